"""Joins the log and the Directory: reads, decodes, applies, and knows how far it is."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from tensorbus.bus import Bus, Message
from tensorbus.clock import Deadline
from tensorbus.errors import CorruptError, UnavailableError
from tensorbus.events import AnyRecorded, Headers, Recorded, UnknownEvent, decode
from tensorbus.ids import EventId, Incarnation, WorkerId
from tensorbus.projections import LiveDirectory

log = logging.getLogger("tensorbus.feeds")

READ_AHEAD_S = 0.05
"""How long to wait for the own reader before asking the leader whether there is anything to wait for."""


class DirectoryFeed:
    """Keeps a :class:`LiveDirectory` at the head of the log for as long as :meth:`running` is open."""

    def __init__(self, bus: Bus, live: LiveDirectory) -> None:
        self.bus = bus
        self.live = live
        self._task: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def running(self, *, deadline: Deadline) -> AsyncIterator[DirectoryFeed]:
        """Start reading, wait until everything that was there is folded, and read on until the context closes."""
        target = await self.bus.last_seq(deadline=deadline)
        self._task = asyncio.create_task(self._run(), name="directory-feed")
        try:
            await self.reached(target, deadline=deadline)
            yield self
        finally:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def failed(self) -> None:
        """Return or raise when the feed's task ends, which it does only by a bug or on cancellation."""
        assert self._task is not None
        await asyncio.shield(self._task)

    async def reached(self, seq: int, *, deadline: Deadline) -> None:
        """Wait until the Directory holds everything up to ``seq`` that is of its own filter.

        Raises:
            DeadlineExceededError: If it does not within the deadline, e.g. as the log has no such position (yet).
            UnavailableError: If the bus was closed.
        """
        while self.live.position < seq:
            left = deadline.left()
            if left is not None and left <= 0:
                raise deadline.error()
            pause = Deadline(READ_AHEAD_S if left is None else min(READ_AHEAD_S, left))
            try:
                await self.live.reached(seq, deadline=pause)
            except TimeoutError:
                await self._ask_leader(seq, deadline=deadline)

    async def _ask_leader(self, seq: int, *, deadline: Deadline) -> None:
        """A position may lie beyond our own filter's last message: then there is nothing to wait for.

        One beyond the log's own end is no such position: facts that are still to come would count as read already.
        """
        try:
            if seq > await self.bus.last_seq(deadline=deadline):
                return
            here = self.live.position
            following = await self.bus.first_from(self.bus.subjects.facts, here + 1, deadline=deadline)
        except UnavailableError as exc:
            if deadline.left() == 0:
                raise deadline.error() from exc
            raise
        if following is None or following.seq > seq:
            self.live.advance(seq)

    async def _run(self) -> None:
        async with self.bus.read(self.bus.subjects.facts, after=self.live.state.seq) as reader:
            async for batch in reader:
                self.live.apply(decode_all(batch))


def decode_all(batch: Sequence[Message]) -> list[AnyRecorded]:
    """The facts in stored messages; one that cannot be read counts as unknown and makes the state degraded."""
    return [decode_one(message) for message in batch]


def decode_one(message: Message) -> AnyRecorded:
    try:
        return decode(
            seq=message.seq,
            time_ns=message.time_ns,
            subject=message.subject,
            headers=message.headers,
            data=message.data,
        )
    except CorruptError as exc:
        log.error("unreadable message on the log: seq=%d subject=%s reason=%s", message.seq, message.subject, exc)
        nobody = Headers(event_id=EventId(""), author=WorkerId(""), incarnation=Incarnation(""))
        return Recorded(message.seq, message.time_ns, message.subject, nobody, UnknownEvent("unreadable"))
