"""Who has which shard of the pages: the last grant of each, followed on the stream."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Final

from tensorbus.bus import Message, Stream
from tensorbus.clock import Deadline
from tensorbus.errors import UnavailableError
from tensorbus.events import INCARNATION, MSG_ID
from tensorbus.feeds._lookout import insist, look_deadline
from tensorbus.ids import Incarnation, WorkerId

log = logging.getLogger("tensorbus.feeds")

LOOK_AGAIN_S: Final = 0.2


@dataclass(frozen=True, slots=True)
class ShardGrant:
    """The grant in force: the last message about a shard's lease, whatever its headers say.

    Attributes:
        token: Its sequence.
    """

    shard: int
    token: int
    holder: WorkerId
    incarnation: Incarnation
    event_id: str


OnLease = Callable[[tuple[ShardGrant, ...]], None]
"""Called on the loop with what changed; must not wait. An empty tuple: the stream lost its tail, look at all anew."""


class LeaseFeed:
    """Keeps the grants of all shards at the head of the stream for as long as :meth:`running` is open.

    After each loss of the connection it reads the last grant again, before it takes in another one; one that the stream
    has lost is forgotten with all others, and they are read anew.

    Attributes:
        leases: The grant in force of each shard that ever had one.
        position: Sequence of the last grant that was read.
    """

    def __init__(self, pages: Stream) -> None:
        self.leases: dict[int, ShardGrant] = {}
        self.position = 0
        self._pages = pages
        self._last: ShardGrant | None = None
        self._doubted = False
        self._doubts = asyncio.Event()
        self._moved = asyncio.Event()
        self._order = count()
        self._followers: dict[int, OnLease] = {}
        self._task: asyncio.Task[None] | None = None

    @property
    def unsure(self) -> bool:
        """Whether the connection was lost since it was last seen that the stream has what was read of it."""
        return self._doubted

    @asynccontextmanager
    async def running(self, *, deadline: Deadline) -> AsyncIterator[LeaseFeed]:
        """Start reading, wait until all grants that were there are known, and read on until the context closes."""
        with self._pages.on_lost(self._doubt):
            self._task = asyncio.create_task(self._run(), name="lease-feed")
            try:
                await self.fresh(deadline=deadline)
                yield self
            finally:
                self._task.cancel()
                await asyncio.gather(self._task, return_exceptions=True)

    async def failed(self) -> None:
        """Return or raise when the feed's task ends."""
        assert self._task is not None
        await asyncio.shield(self._task)

    @contextmanager
    def followed(self, follower: OnLease) -> Iterator[None]:
        """Call ``follower`` after each change, as long as the context is open."""
        token = next(self._order)
        self._followers[token] = follower
        try:
            yield
        finally:
            del self._followers[token]

    async def fresh(self, *, deadline: Deadline) -> None:
        """Wait until every grant is known that the leader has now.

        Raises:
            DeadlineExceededError: If that takes longer. What ended the reading, if it has ended.
        """
        last = await self._pages.last_on(self._pages.subjects.leases, deadline=deadline)
        await self.reached(0 if last is None else last.seq, deadline=deadline)

    async def reached(self, seq: int, *, deadline: Deadline) -> None:
        """Wait until the grant at a sequence is known."""
        async with deadline.scope():
            while self.position < seq:
                if self._task is not None and self._task.done():
                    self._task.result()
                moved = self._moved
                await moved.wait()

    def _doubt(self) -> None:
        self._doubted = True
        self._doubts.set()

    async def _run(self) -> None:
        while True:
            tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._look())]
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in tasks:
                    if task.done():
                        task.result()
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
            self._forget()

    async def _read(self) -> None:
        """Take grants in until the stream turns out to have lost one.

        Raises:
            UnavailableError: If the bus was closed.
        """
        async with self._pages.read(self._pages.subjects.leases, after=self.position) as reader:
            reader.on_restart = self._doubt
            async for batch in reader:
                if self._doubted and await insist(self._lost):
                    return
                self._apply(batch)
        raise UnavailableError("the reading of the shards' grants has ended")

    async def _look(self) -> None:
        """Return once the stream has lost the last grant that was read."""
        while True:
            await self._doubts.wait()
            if self._doubted and await insist(self._lost):
                return
            await asyncio.sleep(LOOK_AGAIN_S)

    async def _lost(self) -> bool:
        self._doubts.clear()
        last = self._last
        if last is not None:
            there = await self._pages.get(last.token, deadline=look_deadline())
            if there is None or there.headers.get(MSG_ID, "") != last.event_id:
                log.error("the stream of pages lost its tail: shard=%d token=%d", last.shard, last.token)
                return True
        self._doubted = self._doubts.is_set()
        return False

    def _forget(self) -> None:
        self.leases, self._last, self.position, self._doubted = {}, None, 0, False
        self._tell(())

    def _apply(self, batch: list[Message]) -> None:
        found = [lease for message in batch if (lease := _lease(message, self._pages)) is not None]
        for lease in found:
            self.leases[lease.shard] = self._last = lease
        self.position = batch[-1].seq
        self._tell(tuple(found))

    def _tell(self, changed: tuple[ShardGrant, ...]) -> None:
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()
        for follower in list(self._followers.values()):
            follower(changed)


def _lease(message: Message, pages: Stream) -> ShardGrant | None:
    """The grant that a message is by its place alone: so the servers see it, too."""
    _, shard, author = message.subject.removeprefix(f"{pages.subjects.prefix}.").split(".")
    if not shard.isascii() or not shard.isdecimal():
        return None
    life = Incarnation(message.headers.get(INCARNATION, ""))
    return ShardGrant(int(shard), message.seq, WorkerId(author), life, message.headers.get(MSG_ID, ""))
