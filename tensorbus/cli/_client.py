"""Commands that talk to a worker: connect, do the work, close."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

from tensorbus.config import Resolved

if TYPE_CHECKING:
    from tensorbus.sdk import AsyncBus

T = TypeVar("T")


def with_bus(resolved: Resolved, work: Callable[[AsyncBus], Awaitable[T]]) -> T:
    """Run ``work`` on a bus of its own to the end. Ctrl-C cancels it."""
    return asyncio.run(_with_bus(resolved, work))


async def _with_bus(resolved: Resolved, work: Callable[[AsyncBus], Awaitable[T]]) -> T:
    from tensorbus.sdk import aconnect

    settings, origins = resolved.settings, resolved.origins
    # Who names a home means that one, whatever gateway the environment or the file names.
    url = None if origins["home"] == "flag" and origins["url"] != "flag" else settings.url
    async with aconnect(
        url, home=settings.home, host_id=settings.host_id, tenant=settings.tenant, timeout=settings.timeout_s
    ) as bus:
        return await work(bus)
