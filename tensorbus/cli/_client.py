"""Commands that talk to a worker: connect, do the work, close."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

from tensorbus.cli._errors import of_kind
from tensorbus.cli._probes import stopped_processes
from tensorbus.cli._verdict import command
from tensorbus.config import Resolved
from tensorbus.errors import DeadlineExceededError, TensorbusError, UnavailableError

if TYPE_CHECKING:
    from tensorbus.sdk import AsyncBus

T = TypeVar("T")


def with_bus(resolved: Resolved, work: Callable[[AsyncBus], Awaitable[T]]) -> T:
    """Run ``work`` on a bus of its own to the end. Ctrl-C cancels it."""
    try:
        return asyncio.run(_with_bus(resolved, work))
    except (DeadlineExceededError, UnavailableError) as exc:
        raise explained(exc, resolved) from exc.__cause__


def explained(exc: TensorbusError, resolved: Resolved) -> TensorbusError:
    """The same error with what this machine knows of its reason, and where to look further."""
    home = resolved.settings.home
    stopped = stopped_processes(home) if _url(resolved) is None else []
    if stopped:
        what = "; ".join(f"{name}, process {pid}, is stopped: kill -CONT {pid}" for name, pid in stopped)
    elif isinstance(exc, DeadlineExceededError):
        what = f"{command('tensorbus', 'doctor', '--home', home)} tells what is wrong"
    else:
        return exc
    return of_kind(exc.kind, f"{exc.message} ({what})", **exc.details)


async def _with_bus(resolved: Resolved, work: Callable[[AsyncBus], Awaitable[T]]) -> T:
    from tensorbus.sdk import aconnect

    settings = resolved.settings
    async with aconnect(
        _url(resolved), home=settings.home, host_id=settings.host_id, tenant=settings.tenant, timeout=settings.timeout_s
    ) as bus:
        return await work(bus)


def _url(resolved: Resolved) -> str | None:
    """The gateway to use. Who names a home means that one, whatever gateway the environment or the file names."""
    origins = resolved.origins
    return None if origins["home"] == "flag" and origins["url"] != "flag" else resolved.settings.url
