"""Keeps the global store at the head of the log: one thread folds, and writes what the fold changed."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import TypeVar

from tensorbus.bus import Archive, Bus, Message
from tensorbus.clock import Deadline
from tensorbus.errors import ConflictError, TensorbusError, UnavailableError
from tensorbus.feeds import History, Remembered, base_for, check, decode_all, insist, newest_purge, remember
from tensorbus.lifecycle import Directory
from tensorbus.projections import Applied, GlobalStore, RowTracker

log = logging.getLogger("tensorbus.workers")

T = TypeVar("T")
AGAIN_S = 1.0
AGAIN_S_MAX = 30.0
CHECK_S = 10.0
MARK_S = 0.5
"""How often to look whether the store is to be made anew."""
STUCK_S = 120.0
"""More than the largest state takes to be written down."""
QUERIES_MAX = 128
"""More than there are cursors for answers: nobody ever waits in a thread for another's answer to be read."""
FACTS_MAX = 4096
"""Facts that one transaction takes."""


class Projector:
    """The store's file and the fold that fills it. Everything that touches either runs in one thread.

    The fold is one of its own, so that the rows of a fact are seen right after it, and so that it can begin at the
    store's position, wherever the process's own Directory is.

    Args:
        path: The store's file.
        archive: Where purged facts are.
        look_s: How often to look for purges that overtake the reading.
        memory_bytes: What the database may use.

    Attributes:
        trouble: Why the store does not follow the log now, or ``None``.
    """

    def __init__(self, bus: Bus, *, path: Path, archive: Archive, look_s: float, memory_bytes: int) -> None:
        self._bus = bus
        self._path = path
        self._archive = archive
        self._memory_bytes = memory_bytes
        self._history = History(bus, archive, look_s=look_s, on_restart=self.suspect)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="store")
        self._store: GlobalStore | None = None
        self._state = Directory(bus.subjects)
        self._tracker = RowTracker(self._state)
        self._moved = asyncio.Event()
        self._heard = 1
        self._checked = 0
        self._target: int | None = None
        self._numbers = count()
        self._working: dict[int, float] = {}
        self.trouble: TensorbusError | None = None

    def suspect(self) -> None:
        """The log may have lost what is in the rows: look before anything more is folded."""
        self._heard += 1

    @property
    def sure(self) -> bool:
        """Whether the rows are of the log as it is, as far as is known."""
        return self._store is not None and self._heard == self._checked

    @property
    def ready(self) -> bool:
        """Whether the rows have come as far as the log was when they were opened, and nothing stopped them since.

        Before that they are right and tell only of the past: who asks would take it for all that there is.
        """
        return self._store is not None and self._target is not None and self.position >= self._target

    def require_ready(self) -> GlobalStore:
        """The store, if it may answer.

        Raises:
            UnavailableError: If it may not; says why.
        """
        store = self.store
        if not self.ready:
            where = f"it is at {self.position}" + (f" of {self._target}" if self._target else "")
            reason = f"it reads history, {where}" if self.trouble is None else f"it stopped: {self.trouble}"
            raise UnavailableError(f"the global store does not answer: {reason}", position=self.position)
        return store

    @property
    def rebuild_mark(self) -> Path:
        """A file that asks for the store to be made anew."""
        return self._path.with_suffix(".rebuild")

    @property
    def store(self) -> GlobalStore:
        """The open store.

        Raises:
            UnavailableError: If it is not open; says why.
        """
        if self._store is None:
            reason = "it is being opened" if self.trouble is None else str(self.trouble)
            raise UnavailableError(f"the global store does not answer yet: {reason}")
        return self._store

    @property
    def follows(self) -> bool:
        """Whether the file is open and nothing is wrong."""
        return self._store is not None and self.trouble is None

    @property
    def unfit(self) -> TensorbusError | None:
        """Why the log cannot be kept by what is in the rows, or ``None``."""
        if self.trouble is not None:
            return self.trouble
        if self.ready:
            return self.stuck
        return UnavailableError(f"the global store reads history, it is at {self.position}")

    @property
    def stuck(self) -> TensorbusError | None:
        """What to say of a thread that has not come to the end of its work for long, or ``None``."""
        waited_s = asyncio.get_running_loop().time() - min(self._working.values(), default=math.inf)
        if waited_s < STUCK_S:
            return None
        return UnavailableError(f"the global store's thread has not answered for {waited_s:.0f} s")

    @property
    def position(self) -> int:
        """Everything up to this sequence is in the store's rows."""
        return 0 if self._store is None else self._store.position[0]

    async def run(self) -> None:
        """Follow the log for ever. Trouble is said, waited out, and tried again from what the rows say."""
        pause_s = AGAIN_S
        while True:
            before = self.position
            try:
                await self._follow_until_marked()
            except TensorbusError as error:
                if str(error) != str(self.trouble):
                    log.error("the global store stopped: position=%d reason=%s", self.position, error)
                self.trouble = error
            self._target = None
            pause_s = AGAIN_S if self.position > before else min(2 * pause_s, AGAIN_S_MAX)
            await asyncio.sleep(pause_s)

    async def close(self) -> None:
        """Close the store; the thread ends."""
        await self.in_thread(self._close)
        self._thread.shutdown()

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Run something between two batches, in the thread that owns fold and rows."""
        loop = asyncio.get_running_loop()
        number = next(self._numbers)
        self._working[number] = loop.time()
        try:
            return await loop.run_in_executor(self._thread, work)
        finally:
            del self._working[number]

    async def in_fold(self, work: Callable[[Directory], T]) -> T:
        """Look at the state that the rows hold, between two batches."""

        def look() -> T:
            if self._state.seq != self.store.position[0]:
                raise UnavailableError("the global store has not written what it folded")
            return work(self._state)

        return await self.in_thread(look)

    async def reached(self, seq: int, *, deadline: Deadline) -> None:
        """Wait until the rows hold everything up to a sequence.

        Raises:
            DeadlineExceededError: If they do not in time.
        """
        while self.position < seq:
            moved = self._moved
            position = self.position
            following = await self._bus.first_from(self._bus.subjects.facts, position + 1, deadline=deadline)
            purged = await newest_purge(self._bus, deadline=deadline)  # where a purge was, there is nothing on the log
            if (following is None or following.seq > seq) and purged.upto <= position:
                return
            async with deadline.scope():
                await moved.wait()

    # -- following -----------------------------------------------------------------------------------------------------

    async def _follow_until_marked(self) -> None:
        """Follow the log until somebody asks for the store to be made anew, also while no fact comes."""
        following = asyncio.create_task(self._follow(), name="follow")
        try:
            while not (await asyncio.wait({following}, timeout=MARK_S))[0]:
                if self._store is not None and self._marked():
                    return
                if self._store is not None and not self.sure:
                    await self._check()
            following.result()
        finally:
            following.cancel()
            await asyncio.wait({following})

    async def _follow(self) -> None:
        await self.in_thread(self._open)
        await self._check()
        state = await base_for(self._bus, self._archive, upto=self.position)
        await self.in_thread(lambda: self._start_from(state))
        deadline = Deadline(CHECK_S, what="looking how far the log is")
        newest = await self._bus.last_on(self._bus.subjects.facts, deadline=deadline)
        self._set_target(0 if newest is None else newest.seq)
        async with aclosing(self._history.batches(state.seq)) as batches:
            async for batch in batches:
                for at in range(0, len(batch), FACTS_MAX):
                    await self._take_in(batch[at : at + FACTS_MAX])

    async def _take_in(self, messages: list[Message]) -> None:
        """Fold and write. What is folded must be written: when the disk is full, it is tried again."""
        while not self.sure:
            await self._check(remember(messages[-1]))
        applied: list[Applied] = []

        def take_in() -> None:  # at once, so that who looks at the fold meets what is written
            if not applied:
                applied.extend(self._fold(messages))
            self.store.apply(applied)

        while True:
            try:
                await self.in_thread(take_in)
            except TensorbusError as error:
                if not error.retryable:
                    raise
                if self.trouble is None:
                    log.error("the global store cannot write: position=%d reason=%s", self.position, error)
                self.trouble = error
                await asyncio.sleep(AGAIN_S)
                continue
            if self.ready:
                self.trouble = None
            self._moved.set()
            self._moved = asyncio.Event()
            return

    def _set_target(self, seq: int) -> None:
        self._target = seq
        if self.ready:
            self.trouble = None

    async def _check(self, following: Remembered | None = None) -> None:
        """See that the log has what is in the rows, and what is to follow; else the store is made anew.

        Raises:
            UnavailableError: If the log has lost it.
        """
        heard, newest = self._heard, await self.in_thread(self._newest)
        for one in (newest, following):
            if one is not None and await insist(partial(self._is_lost, one)):
                self._mark()
                what = f"the log lost the fact at {one.seq}: the global store is made anew"
                raise UnavailableError(what, seq=one.seq)
        self._checked = heard

    async def _is_lost(self, one: Remembered) -> bool:
        return await check(self._bus, one, deadline=Deadline(CHECK_S, what="looking at the log")) is not None

    # -- in the thread -------------------------------------------------------------------------------------------------

    def _newest(self) -> Remembered | None:
        """The fact at the rows' position."""
        seq, event_id = self.store.position
        if not seq or not event_id:
            return None
        with self.store.reading() as cursor:
            row = cursor.execute("SELECT time_ns FROM facts WHERE seq = ?", [seq]).fetchone()
        return Remembered(seq, event_id, 0 if row is None else int(row[0]))

    def _open(self) -> None:
        if self._marked():
            self._close()
            GlobalStore.delete(self._path)
            with _naming(self.rebuild_mark):
                self.rebuild_mark.unlink(missing_ok=True)
        if self._store is None:
            self._store = GlobalStore.open(
                self._path, subjects=self._bus.subjects, memory_bytes=self._memory_bytes, queries=QUERIES_MAX
            )

    def _marked(self) -> bool:
        with _naming(self.rebuild_mark):
            return self.rebuild_mark.exists()

    def _mark(self) -> None:
        with _naming(self.rebuild_mark):
            self.rebuild_mark.touch()

    def _start_from(self, state: Directory) -> None:
        if state.seq > self.position:
            raise ConflictError(f"a fold at {state.seq} cannot go on for rows at {self.position}")
        self._state, self._tracker = state, RowTracker(state)

    def _fold(self, messages: list[Message]) -> list[Applied]:
        state, tracker = self._state, self._tracker
        return [tracker.applied(recorded, state.apply(recorded)) for recorded in decode_all(messages)]

    def _close(self) -> None:
        store, self._store = self._store, None
        if store is not None:
            store.close()


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Translate what the system says about a file beside the store's."""
    try:
        yield
    except OSError as exc:
        raise UnavailableError(f"{path} cannot be used: {exc.strerror or exc}", path=str(path)) from exc
