"""Joins the log and the Directory: reads, decodes, applies, and knows how far it is and whether it may go on there."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, TypeVar

from tensorbus.bus import Bus, Message
from tensorbus.clock import NS_PER_S, Deadline
from tensorbus.errors import DeadlineExceededError, TensorbusError, UnavailableError
from tensorbus.feeds._decode import decode_all as decode_all
from tensorbus.feeds._decode import decode_one as decode_one
from tensorbus.feeds._restore import newest_purge, restore, without_collections
from tensorbus.lifecycle import Directory, Touched, differences, dissolve
from tensorbus.projections import LiveDirectory

log = logging.getLogger("tensorbus.feeds")

READ_AHEAD_S = 0.05
"""How long to wait for the own reader before asking the leader whether there is anything to wait for."""

PURGE_DELAY_S: Final = 600.0
LOOK_EVERY_S_MIN: Final = 0.05
LOOK_S: Final = 10.0
RESTORE_S: Final = 300.0
RETRY_DELAY_S: Final = 0.5
APPLIED_AT_ONCE: Final = 128
"""Facts that are folded before others get their turn on the loop: a few milliseconds' worth."""
TOLD_AT_ONCE: Final = 64

T = TypeVar("T")


class DirectoryFeed:
    """Keeps a :class:`LiveDirectory` at the head of the log for as long as :meth:`running` is open.

    It begins at the newest snapshot. When a purge overtook it, or facts are missing, it rebuilds the state from a
    snapshot and what follows, in place, in slices of a few milliseconds; until then it answers from what it has.

    Args:
        purge_delay_s: Seconds between the announcement of a purge and its execution, if the last one on the log did not
            say less. The newest announcement is looked at twice as often, and after each loss of the connection, before
            anything more is folded.
        on_rebuilt: Called after a rebuild; a process that lives for this freezes its garbage collector's view then.

    Attributes:
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
    ) -> None:
        self.bus = bus
        self.live = live
        self.rebuilding = False
        self.rebuilds = 0
        self.snapshot_used: int | None = None
        self._purge_delay_s = purge_delay_s
        self._on_rebuilt = on_rebuilt
        self._task: asyncio.Task[None] | None = None
        self._looking = asyncio.Lock()
        self._wake = asyncio.Event()
        self._lost = False
        self._looked_at = 0.0
        self._cause = ""
        self._gaps_known = 0

    @property
    def degraded(self) -> bool:
        """Whether the state may not be the log's: facts were passed over or are missing."""
        return self.rebuilding or self.live.state.degraded

    @asynccontextmanager
    async def running(self, *, deadline: Deadline) -> AsyncIterator[DirectoryFeed]:
        """Start reading, wait until everything that was there is folded, and read on until the context closes.

        Raises:
            UnavailableError, CorruptError, NotFoundError: If the log was purged and no snapshot can be used: a newer
                program wrote it, or its bytes are not right or not there.
        """
        target = await self.bus.last_seq(deadline=deadline)
        with self.bus.on_lost(self._note_loss):
            await self._start(deadline)
            self._task = asyncio.create_task(self._run(), name="directory-feed")
            try:
                await self.reached(target, deadline=deadline)
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
            UnavailableError: If the bus was closed. What ended the reading, if it has ended.
        """
        while self.live.position < seq:
            if self._task is not None and self._task.done():
                self._task.result()
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
        And nothing follows where a purge was, though something did.
        """
        try:
            if seq > await self.bus.last_seq(deadline=deadline):
                return
            here = self.live.position
            following = await self.bus.first_from(self.bus.subjects.facts, here + 1, deadline=deadline)
            if await self._look(self.live.state, deadline=deadline) or self.rebuilding:
                return
        except UnavailableError as exc:
            if deadline.left() == 0:
                raise deadline.error() from exc
            raise
        if following is None or following.seq > seq:
            self.live.advance(seq)

    # -- reading ------------------------------------------------------------------------------------------------------

    async def _start(self, deadline: Deadline) -> None:
        """Begin at a snapshot, in a state that has read nothing yet."""
        self._note_look()
        if self.live.state.seq:
            return
        with without_collections():
            restored = await restore(self.bus, deadline=deadline)
            if isinstance(restored, TensorbusError):
                raise restored
            await self._take_over(LiveDirectory(restored.state))
        self.snapshot_used, self._gaps_known = restored.snapshot, restored.state.gaps

    async def _run(self) -> None:
        while True:
            await self._rebuild(await self._until_overtaken())

    async def _until_overtaken(self) -> str:
        """Read on until the state cannot be right any more; says why."""
        tasks = [
            asyncio.create_task(self._read(), name="directory-feed-read"),
            asyncio.create_task(self._watch(), name="directory-feed-watch"),
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return next(task.result() for task in tasks if task.done())
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self) -> str:
        live = self.live
        async with self.bus.read(self.bus.subjects.facts, after=live.state.seq) as reader:
            async for batch in reader:
                if cause := await self._insist(lambda: self._look(live.state)):
                    return cause
                for part in _sliced(batch, APPLIED_AT_ONCE):
                    self._apply(part)
                    if live.state.gaps > self._gaps_known:
                        return "the running number of an author skipped: facts are missing"
                    if part[-1] is not batch[-1]:
                        await asyncio.sleep(0)
        raise UnavailableError("the reading of the log has ended")

    def _apply(self, batch: Sequence[Message]) -> None:
        before = self.live.state.log.announced
        self.live.apply(decode_all(batch))
        if self.live.state.log.announced is not before:
            self._wake.set()

    async def _watch(self) -> str:
        """Look for a purge also while nothing comes."""
        while True:
            self._wake.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(self._look_again_at):
                    await self._wake.wait()
            if cause := await self._insist(lambda: self._look(self.live.state)):
                return cause

    @property
    def _look_again_at(self) -> float:
        if self._lost:
            return self._looked_at
        announced = self.live.state.log.announced
        said_s = math.inf if announced is None else announced.delay_ns / NS_PER_S
        return self._looked_at + max(min(self._purge_delay_s, said_s) / 2, LOOK_EVERY_S_MIN)

    def _note_loss(self) -> None:
        self._lost = True
        self._wake.set()

    def _note_look(self) -> None:
        """From here on, what is asked of the bus is asked anew: a loss that comes later counts again."""
        self._lost = False
        self._looked_at = asyncio.get_running_loop().time()

    async def _look(self, state: Directory, *, deadline: Deadline | None = None) -> str:
        """Look for a purge that took what is still to be read, if it is time to; says so, or nothing.

        What was read within half a purge's delay of such a look cannot lack anything: a later announcement has not
        been carried out yet.
        """
        async with self._looking:
            if self._cause or asyncio.get_running_loop().time() < self._look_again_at:
                return self._cause
            before = self._looked_at
            self._note_look()
            try:
                purge = await newest_purge(self.bus, deadline=deadline or Deadline(LOOK_S, what="looking for a purge"))
            except BaseException:
                self._looked_at, self._lost = before, True
                raise
            if purge.upto > state.seq:
                self._cause = f"the log was purged up to {purge.upto}, past {state.seq}"
            return self._cause

    async def _insist(self, ask: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Ask the bus until it answers."""
        while True:
            try:
                return await ask()
            except (UnavailableError, DeadlineExceededError) as error:
                log.debug("the bus does not answer yet: reason=%s", error)
                await asyncio.sleep(RETRY_DELAY_S)

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
                await self._take_over(await self._anew())
                if self._on_rebuilt is not None:
                    self._on_rebuilt()
        finally:
            self.rebuilding = False
        self.rebuilds += 1
        self._gaps_known = self.live.state.gaps
        if 0 < gaps <= self._gaps_known:
            log.error("the directory stays degraded, the log itself lacks facts: gaps=%d", self._gaps_known)
        log.info("the directory was rebuilt: position=%d snapshot=%s", self.live.position, self.snapshot_used)

    async def _anew(self) -> LiveDirectory:
        """A second Directory at the head of the log."""
        while True:
            self._cause = ""
            self._note_look()
            restored = await self._insist(lambda: restore(self.bus, deadline=Deadline(RESTORE_S, what="a rebuild")))
            if isinstance(restored, TensorbusError):
                raise restored
            fresh = LiveDirectory(restored.state)
            if await self._catch_up(fresh):
                self.snapshot_used = restored.snapshot
                return fresh

    async def _catch_up(self, fresh: LiveDirectory) -> bool:
        """Feed it what follows; ``False`` if a purge overtook that too."""
        facts, after = self.bus.subjects.facts, fresh.state.seq
        first = await self._insist(lambda: self.bus.first_from(facts, after + 1, deadline=Deadline(LOOK_S)))
        if first is None:
            return not await self._insist(lambda: self._look(fresh.state))
        async with self.bus.read(facts, after=after) as reader:
            async for batch in reader:
                if await self._insist(lambda: self._look(fresh.state)):
                    return False
                for part in _sliced(batch, APPLIED_AT_ONCE):
                    fresh.apply(decode_all(part))
                    await asyncio.sleep(0)
                if reader.caught_up.is_set():
                    return True
        raise UnavailableError("the reading of the log has ended")

    async def _take_over(self, fresh: LiveDirectory) -> None:
        """Let the live Directory be the fresh one, tell its followers all that is different, and free what was."""
        changed: list[Touched] = []
        for touched in differences(self.live.state, fresh.state):
            changed += touched
            await asyncio.sleep(0)
        self.live.replace(fresh)
        for part in _sliced(changed, TOLD_AT_ONCE):
            self.live.tell(tuple(part))
            await asyncio.sleep(0)
        for _ in dissolve(fresh.state):
            await asyncio.sleep(0)


def _sliced(items: Sequence[T], count: int) -> Iterator[Sequence[T]]:
    return (items[at : at + count] for at in range(0, len(items), count))
