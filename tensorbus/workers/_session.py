"""A worker's life on the log: it opens a session, proves it alive, and stops at once when it was replaced."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Awaitable, Callable

from tensorbus.clock import NS_PER_S, Clock, Deadline
from tensorbus.errors import FencedError, TensorbusError
from tensorbus.events import Aggregate, Event, SessionEnd, SessionOpened, aggregate
from tensorbus.feeds import Author
from tensorbus.lifecycle import Directory, Touched, rules
from tensorbus.workers._latency import LatencyWindow

log = logging.getLogger("tensorbus.workers")

BEATS_TRIED_PER_TTL = 4

BEATS_KEPT = 64

REOPEN_TRY_S = 10.0
REOPEN_PAUSE_S = 0.2


class OwnSession:
    """Opens, renews and closes the session of one incarnation.

    Attributes:
        acked_ns: The clock just before the last acknowledged heartbeat was sent; the lease counts from there.
        lapses: How often a TTL or more lay between two such heartbeats: others may have ended the session meanwhile.
    """

    def __init__(
        self, author: Author, opening: SessionOpened, *, clock: Clock, heartbeat_s: float, beats: LatencyWindow
    ) -> None:
        self._author = author
        self._opening = opening
        self._clock = clock
        self._heartbeat_s = heartbeat_s
        self._beats = beats
        self._fenced: asyncio.Event = asyncio.Event()
        self._opened = False
        self._opened_at = (0, 0)
        self._lost = asyncio.Event()
        self._sent: deque[tuple[int, int]] = deque(maxlen=BEATS_KEPT)
        self.acked_ns = 0
        self.lapses = 0

    @property
    def aggregate(self) -> Aggregate:
        return aggregate("session", "", self._opening.worker)

    @property
    def provably_alive(self) -> bool:
        """Whether the last acknowledged heartbeat was sent less than a TTL ago."""
        return self._clock.now_ns() - self.acked_ns < self._opening.ttl_ns

    async def open(self, *, deadline: Deadline) -> int:
        """Say that this incarnation lives; an older one of the same id is fenced by that.

        Raises:
            FencedError: If still another incarnation came in between.
        """
        await self._beat(deadline)
        opening = self._opening
        before = self._incarnation()

        def rule(state: Directory) -> Event | None:
            now = self._incarnation()
            if now == opening.incarnation:
                return None
            if now != before:
                # It started later than this process, which stood still meanwhile: the newer one stays.
                text = f"worker {opening.worker} is fenced: incarnation {now} of it opened its session first"
                raise FencedError(text, worker=opening.worker, incarnation=opening.incarnation)
            return opening

        seq, _ = await self._author.decide(rule, deadline=deadline)
        self._note_opened()
        self._opened = True
        self._look()
        return seq

    async def reopen(self) -> None:
        """Open the session again, under the same incarnation, each time that the log has lost it. Runs for ever.

        Heartbeats go on meanwhile. A newer incarnation of the worker on the log fences this one as ever.

        Raises:
            FencedError: If the fold keeps refusing the session.
        """
        while True:
            await self._lost.wait()
            self._lost.clear()
            if self._standing() is not rules.Standing.LOST:
                continue
            log.warning("the log lost the session, opening it again: worker=%s", self._opening.worker)
            try:
                await self._author.decide(self._again, deadline=Deadline(REOPEN_TRY_S, what="opening the session"))
            except FencedError:
                raise
            except TensorbusError as error:
                log.warning("the session could not be opened again yet: reason=%s", error)
                await asyncio.sleep(REOPEN_PAUSE_S)
            self._note_opened()
            self._look()

    def _again(self, state: Directory) -> Event | None:
        return self._opening if self._standing() is rules.Standing.LOST else None

    def _note_opened(self) -> None:
        session = self._author.feed.live.state.sessions.get(self._opening.worker)
        if session is not None and session.incarnation == self._opening.incarnation:
            self._opened_at = (session.opened, session.opened_ns)

    def _standing(self) -> rules.Standing:
        opening, state = self._opening, self._author.feed.live.state
        seq, time_ns = self._opened_at
        return rules.standing(
            state, worker=opening.worker, incarnation=opening.incarnation, opened=seq, opened_ns=time_ns
        )

    def _look(self) -> None:
        """See whether the session is still open."""
        match self._standing():
            case rules.Standing.LOST:
                self._lost.set()
            case rules.Standing.OVER:
                self._fenced.set()

    def _incarnation(self) -> str | None:
        """The newest incarnation of this worker that the own fold knows, alive or not."""
        held = self._author.feed.live.state.sessions.get(self._opening.worker)
        return None if held is None else held.incarnation

    async def close(self, *, deadline: Deadline) -> None:
        """Say that this worker leaves."""

        def rule(state: Directory) -> Event | None:
            return rules.end_session(
                state,
                worker=self._opening.worker,
                incarnation=self._opening.incarnation,
                reason=SessionEnd.LEFT,
            )

        if not self._fenced.is_set():
            await self._author.decide(rule, deadline=deadline)

    async def renew(self) -> None:
        """Send heartbeats for ever. A bus that does not answer is waited for: silence ends nobody by itself.

        None is waited for longer than a part of the TTL: one lost answer must not make the worker silent for all of it.
        """
        patience_s = self._opening.ttl_ns / NS_PER_S / BEATS_TRIED_PER_TTL
        while True:
            started = self._clock.now_ns()
            try:
                await self._beat(Deadline(patience_s, what="a heartbeat"))
            except TensorbusError as error:
                log.warning("heartbeat not acknowledged: worker=%s reason=%s", self._opening.worker, error)
            spent = (self._clock.now_ns() - started) / NS_PER_S
            await asyncio.sleep(max(0.01, self._heartbeat_s - spent))

    async def _beat(self, deadline: Deadline) -> None:
        sent = self._clock.now_ns()
        opening = self._opening
        subject = self._author.feed.bus.subjects.live(opening.incarnation, opening.worker)
        seq = await self._author.feed.bus.beat(subject, ttl_s=math.ceil(opening.ttl_ns / NS_PER_S), deadline=deadline)
        self.lapses += bool(self.acked_ns) and sent - self.acked_ns >= opening.ttl_ns
        self.acked_ns = sent
        self._sent.append((seq, sent))
        self._beats.note(self._clock.now_ns() - sent)

    def sent_ns(self, seq: int) -> int | None:
        """When the newest acknowledged heartbeat was sent that lies at or before a sequence of the live stream."""
        return max((sent for at, sent in self._sent if at <= seq), default=None)

    def on_change(self, _position: int, touched: tuple[Touched, ...]) -> None:
        """Follower of the Directory: notices the end of the own session."""
        # Before the opening counts, what ends under this id is a former life of it.
        if self._opened and Touched("session", "", self._opening.worker) in touched:
            self._look()

    async def until_fenced(self, before: Callable[[str], Awaitable[None]]) -> None:
        """Wait for the own session's end by another, tell it with ``before``, and raise.

        Raises:
            FencedError: Always; says who took over or that the session was ended.
        """
        await self._fenced.wait()
        now = self._author.feed.live.state.sessions.get(self._opening.worker)
        if now is not None and now.incarnation != self._opening.incarnation:
            what = f"incarnation {now.incarnation} of it started as process {now.pid} on host {now.host}"
        else:
            what = "its session was ended after a silence longer than its TTL"
        text = f"worker {self._opening.worker} is fenced: {what}"
        await before(text)
        raise FencedError(text, worker=self._opening.worker, incarnation=self._opening.incarnation)
