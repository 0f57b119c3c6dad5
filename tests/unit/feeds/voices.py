"""Workers' voices on a log in memory, for tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from tensorbus.bus import Bus, MemoryBus, MemoryCluster, put_blob
from tensorbus.clock import Deadline
from tensorbus.events import STORE_ROLE, LogPurged, RoleGranted, SnapshotTaken
from tensorbus.feeds import Author, DirectoryFeed
from tensorbus.ids import SystemIds, WorkerId
from tensorbus.lifecycle import Directory, dump
from tensorbus.projections import LiveDirectory
from tests.unit.lifecycle import history as h


def soon() -> Deadline:
    return Deadline(10, what="the test")


@asynccontextmanager
async def feed(cluster: MemoryCluster, *, purge_delay_s: float = 600.0) -> AsyncIterator[DirectoryFeed]:
    async with reading(MemoryBus(cluster), purge_delay_s=purge_delay_s) as made:
        yield made


@asynccontextmanager
async def reading(bus: Bus, *, purge_delay_s: float = 600.0) -> AsyncIterator[DirectoryFeed]:
    """A feed over any bus."""
    made = DirectoryFeed(bus, LiveDirectory(Directory(bus.subjects)), purge_delay_s=purge_delay_s)
    async with made.running(deadline=soon()):
        yield made


@asynccontextmanager
async def voice(
    cluster: MemoryCluster, worker: WorkerId = h.W1, incarnation: h.Incarnation = h.FIRST, *, opened: bool = True
) -> AsyncIterator[Author]:
    """A worker's author with an open session."""
    async with speaking(MemoryBus(cluster), worker, incarnation, opened=opened) as author:
        yield author


@asynccontextmanager
async def speaking(
    bus: Bus, worker: WorkerId, incarnation: h.Incarnation = h.FIRST, *, opened: bool = True
) -> AsyncIterator[Author]:
    """The same over any bus."""
    async with reading(bus) as made:
        author = Author(made, worker=worker, incarnation=incarnation, ids=SystemIds())
        async with author.running():
            if opened:
                await author.decide(lambda _: h.opened(worker, incarnation), deadline=soon())
            yield author


@dataclass(frozen=True)
class Stored:
    """A snapshot on the log: its fact's sequence, and what the fact says."""

    seq: int
    fact: SnapshotTaken


class Keeper:
    """A worker's voice that has the store's role, and does what a store does, step by step."""

    def __init__(self, author: Author) -> None:
        self.author = author
        self.bus = author.feed.bus

    @property
    def state(self) -> Directory:
        return self.author.feed.live.state

    async def take_role(self) -> None:
        await self.author.decide(lambda _: RoleGranted(role=STORE_ROLE), deadline=soon())

    async def snapshot(self, body: bytes | None = None) -> Stored:
        """Store the present state, or something else that claims to be it."""
        written, upto, state_hash = b"".join(dump(self.state)), self.state.seq, self.state.hash()
        blob = await put_blob(self.bus, written if body is None else body, author=self.author.worker, deadline=soon())
        fact = SnapshotTaken(what="directory", upto=upto, fold=1, state_hash=state_hash, blob=blob)
        seq, _ = await self.author.decide(lambda _: fact, deadline=soon())
        return Stored(seq, fact)

    async def announce(self, stored: Stored, *, delay_ns: int = 600_000_000_000) -> None:
        fact = LogPurged(stream="TB", upto=stored.fact.upto, snapshot=stored.seq, forget=0, delay_ns=delay_ns)
        await self.author.decide(lambda _: fact, deadline=soon())

    async def purge(self, upto: int) -> int:
        """Take every fact up to a sequence off the log, but for the last one of each aggregate; how many went."""
        places: dict[str, None] = {}
        async with self.bus.read(self.bus.subjects.facts, after=0) as reader:
            async for batch in reader:
                places.update(dict.fromkeys(message.subject.rpartition(".")[0] for message in batch))
                if reader.caught_up.is_set():
                    break
        return sum([await self.bus.purge(f"{place}.*", upto=upto, deadline=soon()) for place in places])


@asynccontextmanager
async def keeper(cluster: MemoryCluster, worker: WorkerId = h.W2) -> AsyncIterator[Keeper]:
    async with voice(cluster, worker) as author:
        made = Keeper(author)
        await made.take_role()
        yield made


async def settled(what: Callable[[], bool]) -> None:
    """Wait until something is so."""
    async with asyncio.timeout(10):
        while not what():
            await asyncio.sleep(0.005)
