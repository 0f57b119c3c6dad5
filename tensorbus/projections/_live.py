"""The Directory as a process holds it: fed batch by batch, with people waiting for positions and following names."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import count

from tensorbus.clock import Deadline
from tensorbus.errors import TensorbusError, UnavailableError
from tensorbus.events import AnyRecorded
from tensorbus.lifecycle import Directory, Touched, Verdict

DROPPED_KEPT = 65_536
"""How many of the newest dropped sequences are remembered for their authors."""

Follower = Callable[[int, tuple[Touched, ...]], None]
"""Called after a batch with the position and what it changed; must not block."""


class LiveDirectory:
    """Wraps the fold for one event loop. Not thread-safe; reads from other threads see a state between two facts.

    Attributes:
        state: The fold, for good the same object. Read it freely; only :meth:`apply` and :meth:`replace` change it.
        replaced: How often it was replaced: its sequences may have gone down then.
    """

    def __init__(self, state: Directory) -> None:
        self.state = state
        self.replaced = 0
        self._verdicts: dict[int, str] = {}
        self._waiters: list[tuple[int, int, asyncio.Future[None]]] = []
        self._order = count()
        self._followers: dict[int, Follower] = {}
        self._replacements: dict[int, Callable[[], None]] = {}
        self._arrived = 0
        self._gone = 0
        self._not_judged = state.seq

    @property
    def position(self) -> int:
        """Everything up to this sequence of the log has been taken in."""
        return max(self.state.seq, self._arrived)

    def apply(self, batch: Iterable[AnyRecorded]) -> None:
        """Take messages in, wake who waits, and tell the followers once."""
        touched: dict[Touched, None] = {}
        for recorded in batch:
            if recorded.seq <= self.state.seq:
                continue  # a repeat: its verdict is known already and must not become "duplicate"
            verdict = self.state.apply(recorded)
            if verdict.kept:
                touched.update(dict.fromkeys(verdict.touched))
            elif verdict.why:
                self._note_drop(recorded.seq, verdict.why)
        self._wake()
        self.tell(tuple(touched))

    def advance(self, seq: int) -> None:
        """The leader says that nothing of ours lies between here and ``seq``."""
        self._arrived = max(self._arrived, seq)
        self._wake()

    def replace(self, other: LiveDirectory) -> None:
        """Take over, in place, the state that another one was fed, and what that one knows of each sequence.

        ``other.state`` then is what was here. The position is that of the new state, also if it is lower, as after a
        loss of the log's tail. Who waits for a position beyond it waits on: until it comes, or as long as the wait's
        deadline, or until :meth:`lose`. Followers hear nothing of it: ask :func:`tensorbus.lifecycle.differences`
        beforehand, and :meth:`tell` them.
        """
        self.state.become(other.state)
        self.replaced += 1
        self._verdicts, other._verdicts = other._verdicts, {}
        self._not_judged, self._arrived = other._not_judged, other._arrived
        for callback in list(self._replacements.values()):
            callback()
        self._wake()

    def lose(self, error: Callable[[int], TensorbusError]) -> None:
        """The log lost its tail: whoever waits for a position gets the error that is made for it."""
        waiters, self._waiters, self._gone = self._waiters, [], 0
        for seq, _, waiter in waiters:
            if not waiter.done():
                waiter.set_exception(error(seq))

    def tell(self, touched: tuple[Touched, ...]) -> None:
        """Tell the followers what changed, if anything did."""
        if touched:
            for follower in list(self._followers.values()):
                follower(self.position, touched)

    def verdict(self, seq: int) -> Verdict:
        """What the fold did with an applied sequence (a drop older than the last 65,536 is forgotten).

        Raises:
            UnavailableError: If that is not known, because the state was restored from a snapshot that holds it.
        """
        if seq <= self._not_judged:
            raise UnavailableError(
                f"what became of the fact at {seq} is not known: the state was restored from a snapshot; look for it",
                position={"TB": seq},
            )
        why = self._verdicts.get(seq)
        return Verdict(True) if why is None else Verdict(False, why)

    async def reached(self, seq: int, *, deadline: Deadline) -> None:
        """Return once everything up to ``seq`` is taken in.

        Raises:
            DeadlineExceededError: If that takes longer.
        """
        if self.position >= seq:
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiters, (seq, next(self._order), waiter))
        try:
            async with deadline.scope():
                await waiter
        finally:
            self._forget_gone(waiter)

    @contextmanager
    def followed(self, follower: Follower) -> Iterator[None]:
        """Call ``follower`` after each batch that changed something, as long as the context is open."""
        token = next(self._order)
        self._followers[token] = follower
        try:
            yield
        finally:
            del self._followers[token]

    @contextmanager
    def replacements(self, callback: Callable[[], None]) -> Iterator[None]:
        """Call ``callback`` each time that the state was replaced, before its followers hear what differs.

        Positions may have gone down: what was said of the state before must not be compared with them.
        """
        token = next(self._order)
        self._replacements[token] = callback
        try:
            yield
        finally:
            del self._replacements[token]

    def _wake(self) -> None:
        while self._waiters and self._waiters[0][0] <= self.position:
            waiter = heapq.heappop(self._waiters)[2]
            if not waiter.done():
                waiter.set_result(None)
            else:
                self._gone -= 1

    def _forget_gone(self, waiter: asyncio.Future[None]) -> None:
        """Who gave up stays in the heap until half of it is such; a position that never comes must not fill it."""
        self._gone += waiter.cancelled()
        if self._gone * 2 > len(self._waiters):
            self._waiters = [waiting for waiting in self._waiters if not waiting[2].cancelled()]
            heapq.heapify(self._waiters)
            self._gone = 0

    def _note_drop(self, seq: int, why: str) -> None:
        self._verdicts[seq] = why
        if len(self._verdicts) > DROPPED_KEPT:
            del self._verdicts[next(iter(self._verdicts))]
