"""Workers' voices on a log in memory, for tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tensorbus.bus import MemoryBus, MemoryCluster
from tensorbus.clock import Deadline
from tensorbus.feeds import Author, DirectoryFeed
from tensorbus.ids import SystemIds, WorkerId
from tensorbus.lifecycle import Directory
from tensorbus.projections import LiveDirectory
from tests.unit.lifecycle import history as h


def soon() -> Deadline:
    return Deadline(10, what="the test")


@asynccontextmanager
async def feed(cluster: MemoryCluster) -> AsyncIterator[DirectoryFeed]:
    reading = DirectoryFeed(MemoryBus(cluster), LiveDirectory(Directory(cluster.subjects)))
    async with reading.running(deadline=soon()):
        yield reading


@asynccontextmanager
async def voice(
    cluster: MemoryCluster, worker: WorkerId = h.W1, incarnation: h.Incarnation = h.FIRST, *, opened: bool = True
) -> AsyncIterator[Author]:
    """A worker's author with an open session."""
    async with feed(cluster) as reading:
        author = Author(reading, worker=worker, incarnation=incarnation, ids=SystemIds())
        async with author.running():
            if opened:
                await author.decide(lambda _: h.opened(worker, incarnation), deadline=soon())
            yield author
