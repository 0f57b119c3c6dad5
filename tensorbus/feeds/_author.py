"""One worker's voice on the log: every fact it says goes through here, and counts once its own fold kept it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

from tensorbus.bus import Appended, Conflict, append
from tensorbus.clock import Deadline
from tensorbus.errors import (
    ConflictError,
    DeadlineExceededError,
    FencedError,
    OutOfSpaceError,
    UnavailableError,
)
from tensorbus.events import MSG_ID, Event, Headers, SessionOpened, aggregate_of
from tensorbus.feeds._feed import DirectoryFeed
from tensorbus.feeds._lookout import insist, look_deadline
from tensorbus.feeds._remember import LostPositionError
from tensorbus.ids import EventId, IdSource, Incarnation, WorkerId, new_event_id
from tensorbus.lifecycle import Directory, Verdict, rules
from tensorbus.telemetry import traceparent

F = TypeVar("F")
Rule = Callable[[Directory], Event | F]
"""Looks at the state and returns the fact to propose, or anything else: the answer that no fact is needed for."""

log = logging.getLogger("tensorbus.feeds")

LANE_WAITING_MAX = 4096
LANE_TRY_S = 1.9
"""Shorter than the bus's patience: it would repeat the request by itself, perhaps at a log that lost its tail."""
DROPS_MAX = 16
LANE_RETRY_DELAY_S = 0.5
LOOK_AGAIN_S = 0.02


@dataclass(slots=True)
class _Saying:
    """A fact that waits for its number."""

    make: Callable[[int], Event]
    principal: str
    cause: str
    said: asyncio.Future[_Said]


@dataclass(frozen=True, slots=True)
class _Said:
    """A fact that was appended, and what was known before: only a log that lost its tail gives a sequence twice."""

    seq: int
    fact: Event
    event_id: EventId
    position: int
    doubts: int
    losses: int


class Author:
    """Proposes facts as one worker's incarnation.

    Args:
        feed: The worker's own Directory feed, whose fold decides.
        worker: The worker id.
        incarnation: This process's life.
        ids: Source of event ids.
    """

    def __init__(self, feed: DirectoryFeed, *, worker: WorkerId, incarnation: Incarnation, ids: IdSource) -> None:
        self.feed = feed
        self.worker = worker
        self.incarnation = incarnation
        self._ids = ids
        self._number = 0
        self._doubts = -1
        self._opened_at: tuple[int, int] | None = None
        self._lane: asyncio.Queue[_Saying] = asyncio.Queue(LANE_WAITING_MAX)

    async def decide(
        self, rule: Rule[F], *, deadline: Deadline, principal: str = "", cause: str = ""
    ) -> tuple[int, Event | F]:
        """Ask the rule, append its fact on condition that nobody wrote to its aggregate since, else ask again.

        Returns:
            The fact and its sequence, once the own fold kept it; or the rule's answer and the position it was given at.

        Raises:
            FencedError: If this incarnation's session is over.
            DeadlineExceededError: If the outcome is not known in time.
        """
        state = self.feed.live.state
        drops = 0
        while drops < DROPS_MAX:
            self._check_sane(state)
            fact = rule(state)
            if not isinstance(fact, Event):
                return self.feed.live.position, fact
            if not isinstance(fact, SessionOpened) and self._standing() is rules.Standing.LOST:
                await self._reopened(deadline)
                continue
            about = aggregate_of(fact)
            expected = state.head(about.guard or about)
            headers = self._headers(principal, cause, expected=expected, token=expected if about.fenced else 0)
            position, doubts, losses = self.feed.live.position, self.feed.doubts, self.feed.losses
            outcome = await self._append(fact, headers, doubts, deadline=deadline)
            if outcome is None:
                continue
            if isinstance(outcome, Conflict):
                await self._after_conflict(outcome, expected, deadline=deadline)
                continue
            said = _Said(outcome.seq, fact, headers.event_id, position, doubts, losses)
            verdict = await self._verdict(said, deadline=deadline)
            if verdict is None:
                continue
            if verdict.kept:
                self._standing()
                return outcome.seq, fact
            if not self._due_to_loss(verdict.why, said):
                self._raise_if_final(verdict.why, fact, outcome.seq)
            drops += 1
        raise ConflictError(f"a fact was proposed {drops} times and never counted; rule and fold disagree")

    async def _append(
        self, fact: Event, headers: Headers, doubts: int, *, deadline: Deadline
    ) -> Appended | Conflict | None:
        """Append a fact that is compared with its aggregate, or with the role that it needs.

        What the keeper of the log says is true of that log only: ``None`` if it may have lost its tail meanwhile.
        """
        if not aggregate_of(fact).fenced:
            return await append(self.feed.bus, fact, headers, deadline=deadline)
        await self.feed.sure(deadline=deadline)
        return None if self.feed.doubts != doubts else await self._append_if_sure(fact, headers)

    async def _after_conflict(self, outcome: Conflict, expected: int, *, deadline: Deadline) -> None:
        """Hear of what was in the way."""
        with contextlib.suppress(LostPositionError):
            await self.feed.reached(outcome.seq, deadline=deadline)
        if outcome.seq < expected:
            # The aggregate is being forgotten, or the log lost its tail: the fold hears of it soon.
            self.feed.suspect()
            async with deadline.scope():
                await asyncio.sleep(LOOK_AGAIN_S)

    async def _verdict(self, said: _Said, *, deadline: Deadline) -> Verdict | None:
        """What the own fold made of a fact that was appended; ``None`` if the log lost it since."""
        feed, doubts = self.feed, said.doubts
        if said.seq <= said.position:
            await feed.checked(deadline=deadline)
        while True:
            if feed.doubts != doubts:  # also the tail that nobody has read can be lost, and with it just this fact
                doubts = feed.doubts
                await feed.sure(deadline=deadline)
                message = await feed.bus.get(said.seq, deadline=deadline)
                if message is None or message.headers.get(MSG_ID) != said.event_id:
                    return None
            try:
                await feed.reached(said.seq, deadline=deadline)
            except LostPositionError:
                continue
            if feed.doubts == doubts:
                return feed.live.verdict(said.seq)

    def _due_to_loss(self, why: str, said: _Said) -> bool:
        """Whether a fact may have been dropped only since the log lost its tail, and the own session with it."""
        if self.feed.losses != said.losses:
            return True
        return why == "fenced" and self._standing() in (rules.Standing.OPEN, rules.Standing.LOST)

    def _standing(self) -> rules.Standing | None:
        """How the own session stands; ``None`` before it was first seen."""
        session = self.feed.live.state.sessions.get(self.worker)
        if session is not None and session.live and session.incarnation == self.incarnation:
            self._opened_at = (session.opened, session.opened_ns)
        if self._opened_at is None:
            return None
        seq, time_ns = self._opened_at
        return rules.standing(
            self.feed.live.state, worker=self.worker, incarnation=self.incarnation, opened=seq, opened_ns=time_ns
        )

    async def _reopened(self, deadline: Deadline) -> None:
        """Wait until a session that the log lost is open again, or turns out to be over."""
        async with deadline.scope():
            while self._standing() is rules.Standing.LOST:
                await asyncio.sleep(LOOK_AGAIN_S)

    async def say(
        self, make: Callable[[int], Event], *, deadline: Deadline, principal: str = "", cause: str = ""
    ) -> tuple[int, Event]:
        """Append a fact that only this author may write, under its next running number; one after the other.

        A fact that is in the queue is said, even if the caller stops waiting: its number is taken. One that the log
        lost before its outcome was known is said again.

        Args:
            make: Gets the running number and returns the fact.

        Raises:
            FencedError: If this incarnation's session is over.
            ConflictError: If the fold dropped the fact, e.g. because its artifact was destroyed meanwhile.
            OutOfSpaceError: If 4,096 facts wait already; DeadlineExceededError: If it is not said in time.
        """
        while True:
            said = await self._queued(make, principal, cause, deadline=deadline)
            verdict = await self._verdict(said, deadline=deadline)
            if verdict is None or (not verdict.kept and self._due_to_loss(verdict.why, said)):
                continue
            if verdict.kept or verdict.why == "duplicate":  # a repeat beyond the bus's memory of ids: the first counts
                return said.seq, said.fact
            self._raise_if_final(verdict.why, said.fact, said.seq)
            what = f"{type(said.fact).__name__} did not count: {verdict.why}"
            raise ConflictError(what, reason=verdict.why, position={"TB": said.seq})

    async def _queued(self, make: Callable[[int], Event], principal: str, cause: str, *, deadline: Deadline) -> _Said:
        if self._lane.full():
            raise OutOfSpaceError(f"{LANE_WAITING_MAX} facts of worker {self.worker} wait for the bus already")
        said: asyncio.Future[_Said] = asyncio.get_running_loop().create_future()
        self._lane.put_nowait(_Saying(make, principal, cause, said))
        async with deadline.scope():
            return await said

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Author]:
        """Say what is queued for as long as the context is open; what is left then fails as fenced."""
        task = asyncio.create_task(self._say_all(), name="author-lane")
        try:
            yield self
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            while not self._lane.empty():
                self._fail(self._lane.get_nowait(), self._leaving())

    async def _say_all(self) -> None:
        while True:
            saying = await self._lane.get()
            try:
                outcome = await self._say_one(saying)
            except asyncio.CancelledError:
                self._fail(saying, self._leaving())  # its outcome is unknown, and nobody will look
                raise
            except Exception as error:  # noqa: BLE001  # also a bug of who makes the fact: the lane serves the others
                self._fail(saying, error)
                continue
            if not saying.said.done():
                saying.said.set_result(outcome)

    async def _say_one(self, saying: _Saying) -> _Said:
        """Append under the next number until the outcome is known: its author may not go on without knowing."""
        self._check_sane(self.feed.live.state)
        await self._ready()
        number, fact, headers = self._numbered(saying)
        while True:
            position, doubts, losses = self.feed.live.position, self._doubts, self.feed.losses
            try:
                outcome = await self._append_if_sure(fact, headers)
            except OutOfSpaceError as error:
                log.warning("fact waits for the bus: type=%s reason=%s", type(fact).__name__, error)
                await asyncio.sleep(LANE_RETRY_DELAY_S)
                continue
            if outcome is not None:
                self._number = number
                return _Said(outcome.seq, fact, headers.event_id, position, doubts, losses)
            await self._ready()
            before = await self._found(fact, headers.event_id)
            if before is not None:
                self._number = max(self._number, number)  # it may have come after the look at the own number
                return _Said(before, fact, headers.event_id, 0, self._doubts, self.feed.losses)
            if self._number + 1 != number:
                number, fact, headers = self._numbered(saying)

    def _numbered(self, saying: _Saying) -> tuple[int, Event, Headers]:
        number = self._number + 1
        return number, saying.make(number), self._headers(saying.principal, saying.cause, expected=None)

    async def _found(self, fact: Event, event_id: EventId) -> int | None:
        """The sequence of a fact of unknown outcome that outlived the loss after it."""
        bus, subject = self.feed.bus, self.feed.bus.subjects.fact(aggregate_of(fact), self.worker)
        last = await insist(lambda: bus.last_on(subject, deadline=look_deadline()))
        return None if last is None or last.headers.get(MSG_ID) != event_id else last.seq

    async def _ready(self) -> None:
        """Wait until it is known what the next number is: the log may lose its tail, and this worker's numbers with it.

        Raises:
            FencedError: If the session is over: a number that is taken outside of it would leave a hole.
        """
        while self._doubts != self.feed.doubts or self.feed.unsure or self._standing() is rules.Standing.LOST:
            doubts = self.feed.doubts
            await self.feed.sure(deadline=Deadline(None))
            await self._reopened(Deadline(None))
            self._check_open(self.feed.live.state)
            try:
                last = await self.feed.bus.last_seq(deadline=look_deadline())
                await self.feed.reached(last, deadline=look_deadline())
            except (UnavailableError, DeadlineExceededError):
                await asyncio.sleep(LANE_RETRY_DELAY_S)
                continue
            if doubts == self.feed.doubts and self._standing() is rules.Standing.OPEN:
                self._doubts, self._number = doubts, self.feed.live.state.sessions[self.worker].number
        self._check_open(self.feed.live.state)

    async def _append_if_sure(self, fact: Event, headers: Headers) -> Appended | Conflict | None:
        """Try once; ``None`` if the outcome is unknown. The request is not repeated once the bus was away: there may be
        another log then, in which this number is not the next one."""
        trying = asyncio.ensure_future(append(self.feed.bus, fact, headers, deadline=Deadline(LANE_TRY_S)))

        def give_up() -> None:
            trying.cancel()

        try:
            with self.feed.bus.on_lost(give_up):
                return await trying
        except (UnavailableError, DeadlineExceededError) as error:
            log.warning("fact waits for the bus: type=%s reason=%s", type(fact).__name__, error)
            await asyncio.sleep(LANE_RETRY_DELAY_S)
        except asyncio.CancelledError:
            me = asyncio.current_task()
            if not trying.cancelled() or (me is not None and me.cancelling()):
                raise
        self.feed.suspect()
        return None

    def _fail(self, saying: _Saying, error: Exception) -> None:
        if not saying.said.done():
            saying.said.set_exception(error)
            saying.said.exception()  # the caller may be gone

    def _leaving(self) -> FencedError:
        return FencedError(f"worker {self.worker} is leaving", worker=self.worker, incarnation=self.incarnation)

    def _headers(self, principal: str, cause: str, *, expected: int | None, token: int = 0) -> Headers:
        return Headers(
            event_id=new_event_id(self._ids),
            author=self.worker,
            incarnation=self.incarnation,
            principal=principal,
            token=token,
            cause=cause,
            traceparent=traceparent(),
            expected=expected,
        )

    def _check_sane(self, state: Directory) -> None:
        """Who skipped a fact it does not know must not write: it may be wrong about everything that followed."""
        if state.unknown:
            raise UnavailableError(
                f"worker {self.worker} met {state.unknown} facts on the log that this version does not know, "
                "so it writes nothing; upgrade it",
                worker=self.worker,
            )

    def _check_open(self, state: Directory) -> None:
        if not state.is_live(self.worker, self.incarnation):
            raise FencedError(
                f"worker {self.worker} (incarnation {self.incarnation}) has no open session",
                worker=self.worker,
                incarnation=self.incarnation,
            )

    def _raise_if_final(self, why: str, fact: Event, seq: int) -> None:
        if why in ("fenced", "subject"):
            raise FencedError(
                f"worker {self.worker} (incarnation {self.incarnation}) was replaced or its session ended: "
                f"{type(fact).__name__} at {seq} did not count",
                worker=self.worker,
                incarnation=self.incarnation,
                position={"TB": seq},
            )
