"""One worker's voice on the log: every fact it says goes through here, and counts once its own fold kept it."""

from __future__ import annotations

import asyncio
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
from tensorbus.events import Event, Headers, aggregate_of
from tensorbus.feeds._feed import DirectoryFeed
from tensorbus.ids import IdSource, Incarnation, WorkerId, new_event_id
from tensorbus.lifecycle import Directory
from tensorbus.telemetry import traceparent

F = TypeVar("F")
Rule = Callable[[Directory], Event | F]
"""Looks at the state and returns the fact to propose, or anything else: the answer that no fact is needed for."""

log = logging.getLogger("tensorbus.feeds")

LANE_WAITING_MAX = 4096
LANE_TRY_S = 10.0
DROPS_MAX = 16
LANE_RETRY_DELAY_S = 0.5
LOOK_AGAIN_S = 0.02


@dataclass(slots=True)
class _Saying:
    """A fact that waits for its number."""

    make: Callable[[int], Event]
    principal: str
    cause: str
    said: asyncio.Future[tuple[int, Event]]


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
            about = aggregate_of(fact)
            expected = state.head(about.guard or about)
            headers = self._headers(principal, cause, expected=expected, token=expected if about.fenced else 0)
            outcome = await append(self.feed.bus, fact, headers, deadline=deadline)
            await self.feed.reached(outcome.seq, deadline=deadline)
            if isinstance(outcome, Conflict) and outcome.seq < expected:
                # The aggregate is being forgotten, or the log lost its tail: the fold hears of it soon.
                async with deadline.scope():
                    await asyncio.sleep(LOOK_AGAIN_S)
            if isinstance(outcome, Appended):
                verdict = self.feed.live.verdict(outcome.seq)
                if verdict.kept:
                    return outcome.seq, fact
                self._raise_if_final(verdict.why, fact, outcome.seq)
                drops += 1
        raise ConflictError(f"a fact was proposed {drops} times and never counted; rule and fold disagree")

    async def say(
        self, make: Callable[[int], Event], *, deadline: Deadline, principal: str = "", cause: str = ""
    ) -> tuple[int, Event]:
        """Append a fact that only this author may write, under its next running number; one after the other.

        A fact that is in the queue is said, even if the caller stops waiting: its number is taken.

        Args:
            make: Gets the running number and returns the fact.

        Raises:
            FencedError: If this incarnation's session is over.
            ConflictError: If the fold dropped the fact, e.g. because its artifact was destroyed meanwhile.
            OutOfSpaceError: If 4,096 facts wait already; DeadlineExceededError: If it is not said in time.
        """
        if self._lane.full():
            raise OutOfSpaceError(f"{LANE_WAITING_MAX} facts of worker {self.worker} wait for the bus already")
        said: asyncio.Future[tuple[int, Event]] = asyncio.get_running_loop().create_future()
        self._lane.put_nowait(_Saying(make, principal, cause, said))
        async with deadline.scope():
            seq, fact = await said
        await self.feed.reached(seq, deadline=deadline)
        verdict = self.feed.live.verdict(seq)
        if verdict.kept or verdict.why == "duplicate":  # a repeat beyond the bus's memory of ids: the first one counts
            return seq, fact
        self._raise_if_final(verdict.why, fact, seq)
        what = f"{type(fact).__name__} did not count: {verdict.why}"
        raise ConflictError(what, reason=verdict.why, position={"TB": seq})

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

    async def _say_one(self, saying: _Saying) -> tuple[int, Event]:
        """Append under the next number until the outcome is known: its author may not go on without knowing."""
        self._check_sane(self.feed.live.state)
        self._check_open(self.feed.live.state)
        fact = saying.make(self._number + 1)
        headers = self._headers(saying.principal, saying.cause, expected=None)
        while True:
            try:
                outcome = await append(self.feed.bus, fact, headers, deadline=Deadline(LANE_TRY_S))
            except (UnavailableError, DeadlineExceededError, OutOfSpaceError) as error:
                log.warning("fact waits for the bus: type=%s reason=%s", type(fact).__name__, error)
                await asyncio.sleep(LANE_RETRY_DELAY_S)
                continue
            self._number += 1
            return outcome.seq, fact

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
        """A number that is taken outside of the session would leave a hole in the next facts' line."""
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
