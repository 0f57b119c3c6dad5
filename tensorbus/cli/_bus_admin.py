"""An operator's connection to the NATS servers, for the commands of ``bus``."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final, TypeVar

from tensorbus.bus import BusAdmin, NatsAuth
from tensorbus.cli._options import NATS
from tensorbus.clock import Deadline
from tensorbus.config import Settings
from tensorbus.events import Subjects
from tensorbus.workers import bus_url

T = TypeVar("T")

SERVERS: Final = ("home", "nats_url", *NATS, "nats_user", "subject_prefix", "timeout_s")
"""Settings of commands that talk to the NATS servers themselves."""


def with_admin(settings: Settings, work: Callable[[BusAdmin], Awaitable[T]]) -> T:
    """Run ``work`` with an operator's connection to the servers of the settings."""

    async def run() -> T:
        async with connected(settings, bus_url(settings), NatsAuth.of(settings)) as admin:
            return await work(admin)

    return asyncio.run(run())


@asynccontextmanager
async def connected(settings: Settings, url: str, auth: NatsAuth) -> AsyncIterator[BusAdmin]:
    """A connection to some servers, by the name of the settings."""
    admin = await BusAdmin.connect(
        url,
        subjects=Subjects(settings.subject_prefix),
        auth=auth,
        name=settings.nats_user or settings.worker_id or "tensorbus",
        deadline=Deadline(min(settings.timeout_s, 10.0), what="connecting to NATS"),
    )
    try:
        yield admin
    finally:
        await admin.close()
