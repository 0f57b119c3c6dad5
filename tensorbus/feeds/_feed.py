"""Joins the log and the Directory: reads, decodes, applies, and knows how far it is and whether it may go on there."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, TypeVar

from tensorbus.bus import Bus, Message
from tensorbus.clock import Deadline
from tensorbus.errors import TensorbusError, UnavailableError
from tensorbus.feeds._decode import decode_all as decode_all
from tensorbus.feeds._decode import decode_one as decode_one
from tensorbus.feeds._lookout import Lookout, Reading, insist, look_deadline
from tensorbus.feeds._remember import Loss, LostPositionError, Remembered, check
from tensorbus.feeds._restore import restore, without_collections
from tensorbus.lifecycle import Directory, Touched, differences, dissolve
from tensorbus.projections import LiveDirectory

log = logging.getLogger("tensorbus.feeds")

READ_AHEAD_S = 0.05
"""How long to wait for the own reader before asking the leader whether there is anything to wait for."""

PURGE_DELAY_S: Final = 600.0
RESTORE_S: Final = 300.0
APPLIED_AT_ONCE: Final = 128
"""Facts that are folded before others get their turn on the loop: a few milliseconds' worth."""
TOLD_AT_ONCE: Final = 64
LOOK_AGAIN_S: Final = 0.01

OnLoss = Callable[[Directory, Loss], Awaitable[None]]
"""Gets the state as it was before the loss. It is emptied afterwards: keep records of it, not the whole."""

T = TypeVar("T")


class DirectoryFeed:
    """Keeps a :class:`LiveDirectory` at the head of the log for as long as :meth:`running` is open.

    It begins at the newest snapshot. When a purge overtook it, or facts are missing, it rebuilds the state from a
    snapshot and what follows, in place, in slices of a few milliseconds; until then it answers from what it has.

    After each loss of the connection, before anything more is folded, it reads the last message again. If the log has
    lost it, positions go down: the state is rebuilt, and whoever waits for a position gets
    :class:`~tensorbus.feeds.LostPositionError`, also for one that the log still has.

    Args:
        purge_delay_s: Seconds between the announcement of a purge and its execution, if the last one on the log did not
            say less. The newest announcement is looked at twice as often, and after each loss of the connection, before
            anything more is folded.
        on_rebuilt: Called after a rebuild; a process that lives for this freezes its garbage collector's view then.
        on_loss: Called when the log has lost what was read of it, before the state is replaced.

    Attributes:
        losses: How often the log was found to have lost what was read of it.
        rebuilding: Whether the state is known to lack facts and is being made anew.
        rebuilds: How often that was done.
        snapshot_used: Sequence of the snapshot that the state goes back to; ``None`` if to the log's beginning.
    """

    def __init__(
        self,
        bus: Bus,
        live: LiveDirectory,
        *,
        purge_delay_s: float = PURGE_DELAY_S,
        on_rebuilt: Callable[[], None] | None = None,
        on_loss: OnLoss | None = None,
    ) -> None:
        self.bus = bus
        self.live = live
        self.rebuilding = False
        self.rebuilds = 0
        self.snapshot_used: int | None = None
        self.losses = 0
        self.on_loss = on_loss
        self._on_rebuilt = on_rebuilt
        self._reading = Reading(live)
        self._lookout = Lookout(bus, purge_delay_s=purge_delay_s, on_loss=self._note)
        self._task: asyncio.Task[None] | None = None
        self._loss: Loss | None = None
        self._last_loss: Loss | None = None
        self._gaps_known = 0

    @property
    def degraded(self) -> bool:
        """Whether the state may not be the log's: facts were passed over or are missing."""
        return self.rebuilding or self.live.state.degraded

    @property
    def remembered(self) -> Remembered | None:
        """The last message that was folded, ``None`` if none was."""
        return self._reading.remembered

    @property
    def doubts(self) -> int:
        """How often the log may have become another one: what was appended since and not folded may be gone."""
        return self._lookout.doubts

    @property
    def unsure(self) -> bool:
        """Whether the connection was lost since it was last seen that the log has what was read of it."""
        return self._lookout.unsure or self.rebuilding

    @asynccontextmanager
    async def running(self, *, deadline: Deadline) -> AsyncIterator[DirectoryFeed]:
        """Start reading, wait until everything that was there is folded, and read on until the context closes.

        Raises:
            UnavailableError, CorruptError, NotFoundError: If the log was purged and no snapshot can be used: a newer
                program wrote it, or its bytes are not right or not there.
        """
        with self.bus.on_lost(self.suspect):
            target = await self.bus.last_seq(deadline=deadline)
            await self._start(deadline)
            self._task = asyncio.create_task(self._run(), name="directory-feed")
            try:
                try:
                    with without_collections():
                        await self.reached(target, deadline=deadline)
                except LostPositionError:
                    await self.checked(deadline=deadline)
                yield self
            finally:
                self._task.cancel()
                await asyncio.gather(self._task, return_exceptions=True)

    async def failed(self) -> None:
        """Return or raise when the feed's task ends.

        Raises:
            UnavailableError: If the bus was closed.
            UnavailableError, CorruptError, NotFoundError: If a rebuild is needed and no snapshot can be used.
        """
        assert self._task is not None
        await asyncio.shield(self._task)

    async def reached(self, seq: int, *, deadline: Deadline) -> None:
        """Wait until the Directory holds everything up to ``seq`` that is of its own filter.

        Raises:
            DeadlineExceededError: If it does not within the deadline, e.g. as the log has no such position (yet).
            LostPositionError: If the log turned out to have lost its tail meanwhile.
            UnavailableError: If the bus was closed. What ended the reading, if it has ended.
        """
        losses = self.losses
        while self.live.position < seq:
            self._raise_if_ended()
            if self.losses != losses and self._last_loss is not None:
                raise LostPositionError(seq, self._last_loss)
            left = deadline.left()
            if left is not None and left <= 0:
                raise deadline.error()
            pause = Deadline(READ_AHEAD_S if left is None else min(READ_AHEAD_S, left))
            try:
                await self.live.reached(seq, deadline=pause)
            except TimeoutError:
                await self._ask_leader(seq, deadline=deadline)

    def suspect(self) -> None:
        """The log may not be what it was: look whether it has what was read of it, before anything more is folded."""
        self._lookout.suspect()

    async def checked(self, *, deadline: Deadline) -> None:
        """Look from now on, and wait until the state is known to be one of the log as it is, rebuilt if need be.

        Raises:
            DeadlineExceededError: If that takes longer. What ended the reading, if it has ended.
        """
        self.suspect()
        await self.sure(deadline=deadline)

    async def sure(self, *, deadline: Deadline) -> None:
        """Wait as long as the feed is unsure of the log.

        Raises:
            DeadlineExceededError: If that takes longer. What ended the reading, if it has ended.
        """
        async with deadline.scope():
            while self.unsure:
                self._raise_if_ended()
                await asyncio.sleep(LOOK_AGAIN_S)

    def _raise_if_ended(self) -> None:
        if self._task is not None and self._task.done():
            self._task.result()

    async def _ask_leader(self, seq: int, *, deadline: Deadline) -> None:
        """A position may lie beyond our own filter's last message: then there is nothing to wait for.

        One beyond the log's own end is no such position: facts that are still to come would count as read already.
        And nothing follows where a purge was, though something did.
        """
        try:
            if seq > await self.bus.last_seq(deadline=deadline):
                return
            here, replaced = self.live.position, self.live.replaced
            following = await self.bus.first_from(self.bus.subjects.facts, here + 1, deadline=deadline)
            if self.rebuilding or await self._lookout.look(self._reading, deadline=deadline) or self.unsure:
                return
        except UnavailableError as exc:
            if deadline.left() == 0:
                raise deadline.error() from exc
            raise
        if replaced == self.live.replaced and (following is None or following.seq > seq):
            self.live.advance(seq)

    # -- reading ------------------------------------------------------------------------------------------------------

    async def _start(self, deadline: Deadline) -> None:
        """Begin at a snapshot, in a state that has read nothing yet."""
        self._lookout.begin()
        if self.live.state.seq:
            return
        with without_collections():
            restored = await restore(self.bus, deadline=deadline)
            if isinstance(restored, TensorbusError):
                raise restored
            await self._take_over(Reading.of(restored))
        self.snapshot_used, self._gaps_known = restored.snapshot, restored.state.gaps

    async def _run(self) -> None:
        while True:
            await self._rebuild(await self._until_overtaken())

    async def _until_overtaken(self) -> str:
        """Read on until the state cannot be right any more; says why."""
        return await _first_of(self._watch(self._reading), self._read())

    async def _read(self) -> str:
        live = self.live
        async with self.bus.read(self.bus.subjects.facts, after=live.state.seq) as reader:
            while not isinstance(batch := await self._lookout.next(reader, self._reading), str):
                for part in _sliced(batch, APPLIED_AT_ONCE):
                    self._apply(part)
                    if live.state.gaps > self._gaps_known:
                        return "the running number of an author skipped: facts are missing"
                    if part[-1] is not batch[-1]:
                        await asyncio.sleep(0)
        return batch

    def _apply(self, batch: Sequence[Message]) -> None:
        before = self.live.state.log.announced
        self._reading.apply(batch)
        if self.live.state.log.announced is not before:
            self._lookout.wake.set()

    async def _watch(self, reading: Reading) -> str:
        """Look for losses and purges also while nothing comes."""
        lookout = self._lookout
        while True:
            lookout.wake.clear()
            if cause := await insist(lambda: lookout.look(reading)):
                return cause
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(lookout.again_at(reading)):
                    await lookout.wake.wait()

    def _note(self, loss: Loss, reading: Reading) -> None:
        """The log has lost what was read of it: nobody may count on a position any more."""
        if reading is self._reading and self._loss is None:
            self._loss = self._last_loss = loss
            self.losses += 1
            self.live.lose(lambda seq: LostPositionError(seq, loss))

    # -- rebuilding ---------------------------------------------------------------------------------------------------

    async def _rebuild(self, why: str) -> None:
        """Make the state anew from a snapshot and what follows, while the old one goes on answering.

        Once for each cause: facts that are missing on the log itself are missing afterwards too.

        Raises:
            UnavailableError, CorruptError, NotFoundError: If no snapshot can be used, and the log is not whole.
        """
        log.warning("the directory is rebuilt: position=%d reason=%s", self.live.position, why)
        gaps = self.live.state.gaps
        self.rebuilding = True
        try:
            with without_collections():
                fresh = await self._anew()
                await self._tell_loss()
                await self._take_over(fresh)
                if self._on_rebuilt is not None:
                    self._on_rebuilt()
        finally:
            self.rebuilding, self._loss = False, None
        self.rebuilds += 1
        self._gaps_known = self.live.state.gaps
        if 0 < gaps <= self._gaps_known:
            log.error("the directory stays degraded, the log itself lacks facts: gaps=%d", self._gaps_known)
        log.info("the directory was rebuilt: position=%d snapshot=%s", self.live.position, self.snapshot_used)

    async def _tell_loss(self) -> None:
        """A loss may also have come while the state was made anew for another reason."""
        remembered = self._reading.remembered
        if self._loss is None and remembered is not None:
            loss = await insist(lambda: check(self.bus, remembered, deadline=look_deadline()))
            if loss is not None:
                self._note(loss, self._reading)
        if self._loss is not None and self.on_loss is not None:
            await self.on_loss(self.live.state, self._loss)

    async def _anew(self) -> Reading:
        """A second Directory at the head of the log."""
        while True:
            self._lookout.begin()
            restored = await insist(lambda: restore(self.bus, deadline=Deadline(RESTORE_S, what="a rebuild")))
            if isinstance(restored, TensorbusError):
                raise restored
            fresh = Reading.of(restored)
            if await self._catch_up(fresh):
                self.snapshot_used = restored.snapshot
                return fresh

    async def _catch_up(self, fresh: Reading) -> bool:
        """Feed it what follows; ``False`` if a purge overtook that too, or the log lost what was read."""
        facts, after = self.bus.subjects.facts, fresh.live.state.seq
        first = await insist(lambda: self.bus.first_from(facts, after + 1, deadline=look_deadline()))
        if first is None:
            return not await insist(lambda: self._lookout.look(fresh))
        # A tail that is lost while it is being read never comes: somebody must look meanwhile.
        return not await _first_of(self._watch(fresh), self._read_up(fresh))

    async def _read_up(self, fresh: Reading) -> str:
        """Read to where the log ended at the beginning; or says why that cannot be."""
        async with self.bus.read(self.bus.subjects.facts, after=fresh.live.state.seq) as reader:
            while not isinstance(batch := await self._lookout.next(reader, fresh), str):
                for part in _sliced(batch, APPLIED_AT_ONCE):
                    fresh.apply(part)
                    await asyncio.sleep(0)
                if reader.caught_up.is_set():
                    return ""
        return batch

    async def _take_over(self, fresh: Reading) -> None:
        """Let the live Directory be the fresh one, tell its followers all that is different, and free what was."""
        changed: list[Touched] = []
        for touched in differences(self.live.state, fresh.live.state):
            changed += touched
            await asyncio.sleep(0)
        self.live.replace(fresh.live)
        self._reading.remembered = fresh.remembered
        for part in _sliced(changed, TOLD_AT_ONCE):
            self.live.tell(tuple(part))
            await asyncio.sleep(0)
        for _ in dissolve(fresh.live.state):
            await asyncio.sleep(0)


async def _first_of(*works: Coroutine[Any, Any, T]) -> T:
    """What the first that ends gives, of two at once the former; the others are cancelled."""
    tasks: list[asyncio.Task[T]] = [asyncio.create_task(work, name="directory-feed-part") for work in works]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return next(task.result() for task in tasks if task.done())
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _sliced(items: Sequence[T], count: int) -> Iterator[Sequence[T]]:
    return (items[at : at + count] for at in range(0, len(items), count))
