"""Workers' voices on a log in memory, for tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from tensorbus.bus import MemoryBus, MemoryCluster, put_blob
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
    live = LiveDirectory(Directory(cluster.subjects))
    reading = DirectoryFeed(MemoryBus(cluster), live, purge_delay_s=purge_delay_s)
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


@dataclass(frozen=True)
class Stored:
    """A snapshot on the log: its fact's sequence, and what the fact says."""

    seq: int
    fact: SnapshotTaken


class Keeper:
    """A worker's voice that has the store's role, and does what a store does, step by step."""

    def __init__(self, cluster: MemoryCluster, author: Author) -> None:
        self.cluster = cluster
        self.author = author

    @property
    def state(self) -> Directory:
        return self.author.feed.live.state

    async def take_role(self) -> None:
        await self.author.decide(lambda _: RoleGranted(role=STORE_ROLE), deadline=soon())

    async def snapshot(self, body: bytes | None = None) -> Stored:
        """Store the present state, or something else that claims to be it."""
        written = b"".join(dump(self.state))
        blob = await put_blob(
            self.author.feed.bus, written if body is None else body, author=self.author.worker, deadline=soon()
        )
        fact = SnapshotTaken(what="directory", upto=self.state.seq, fold=1, state_hash=self.state.hash(), blob=blob)
        seq, _ = await self.author.decide(lambda _: fact, deadline=soon())
        return Stored(seq, fact)

    async def announce(self, stored: Stored, *, delay_ns: int = 600_000_000_000) -> None:
        fact = LogPurged(stream="TB", upto=stored.fact.upto, snapshot=stored.seq, forget=0, delay_ns=delay_ns)
        await self.author.decide(lambda _: fact, deadline=soon())

    def purge(self, upto: int) -> int:
        """Take every fact up to a sequence off the log, but for the last one of each aggregate."""
        log, subjects = self.cluster.log, self.cluster.subjects
        facts = log.after(0, subjects.facts, count_max=1 << 30)
        places = dict.fromkeys(message.subject.rpartition(".")[0] for message in facts)
        return sum(log.purge(f"{place}.*", upto=upto, keep_last=True) for place in places)


@asynccontextmanager
async def keeper(cluster: MemoryCluster, worker: WorkerId = h.W2) -> AsyncIterator[Keeper]:
    async with voice(cluster, worker) as author:
        made = Keeper(cluster, author)
        await made.take_role()
        yield made


async def settled(what: Callable[[], bool]) -> None:
    """Wait until something is so."""
    async with asyncio.timeout(10):
        while not what():
            await asyncio.sleep(0.005)
