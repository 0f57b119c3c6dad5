"""One worker's voice on the log: every fact it says goes through here, and counts once the worker's own fold kept it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from tensorbus.bus import Appended, append
from tensorbus.clock import Deadline
from tensorbus.errors import ConflictError, FencedError, TensorbusError, UnavailableError
from tensorbus.events import Event, Headers, aggregate_of
from tensorbus.feeds._feed import DirectoryFeed
from tensorbus.ids import EventId, IdSource, Incarnation, WorkerId, new_event_id
from tensorbus.lifecycle import Directory
from tensorbus.telemetry import traceparent

F = TypeVar("F")
Rule = Callable[[Directory], Event | F]
"""Looks at the state and returns the fact to propose, or anything else: the answer that no fact is needed for."""

LANE_WAITING_MAX = 4096


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
        self._lane = asyncio.Lock()
        self._lane_waiting = 0

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
        while True:
            self._check_sane(state)
            fact = rule(state)
            if not isinstance(fact, Event):
                return self.feed.live.position, fact
            headers = self._headers(principal, cause, expected=state.head(aggregate_of(fact)))
            outcome = await append(self.feed.bus, fact, headers, deadline=deadline)
            await self.feed.reached(outcome.seq, deadline=deadline)
            if isinstance(outcome, Appended):
                verdict = self.feed.live.verdict(outcome.seq)
                if verdict.kept:
                    return outcome.seq, fact
                self._raise_if_final(verdict.why, fact, outcome.seq)

    async def say(
        self, make: Callable[[int], Event], *, deadline: Deadline, principal: str = "", cause: str = ""
    ) -> tuple[int, Event]:
        """Append a fact that only this author may write, under its next running number; one after the other.

        Args:
            make: Gets the running number and returns the fact.

        Raises:
            FencedError: If this incarnation's session is over.
            ConflictError: If the fold dropped the fact, e.g. because its artifact was destroyed meanwhile.
        """
        if self._lane_waiting >= LANE_WAITING_MAX:
            raise UnavailableError(f"{self._lane_waiting} facts of worker {self.worker} wait for the bus already")
        self._lane_waiting += 1
        try:
            async with self._lane:
                self._check_sane(self.feed.live.state)
                fact = make(self._number + 1)
                headers = self._headers(principal, cause, expected=None)
                # The number is taken once the bus was asked: after an unknown outcome it must not be used again.
                outcome = await self._append_in_lane(fact, headers, deadline)
        finally:
            self._lane_waiting -= 1
        await self.feed.reached(outcome.seq, deadline=deadline)
        verdict = self.feed.live.verdict(outcome.seq)
        if not verdict.kept:
            self._raise_if_final(verdict.why, fact, outcome.seq)
            raise ConflictError(
                f"{type(fact).__name__} did not count: {verdict.why}", reason=verdict.why, position={"TB": outcome.seq}
            )
        return outcome.seq, fact

    async def _append_in_lane(self, fact: Event, headers: Headers, deadline: Deadline) -> Appended:
        """Append and take the number; a caller that gives up does not leave the lane in doubt."""
        work = asyncio.ensure_future(self._append_numbered(fact, headers, deadline))
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            await asyncio.gather(work, return_exceptions=True)
            raise

    async def _append_numbered(self, fact: Event, headers: Headers, deadline: Deadline) -> Appended:
        try:
            outcome = await append(self.feed.bus, fact, headers, deadline=deadline)
        except TensorbusError:
            await self._learn_number(headers.event_id)
            raise
        assert isinstance(outcome, Appended), "a fact of one author has no rival"
        self._number += 1
        return outcome

    async def _learn_number(self, event_id: EventId) -> None:
        """After a failed append the fact may be there all the same; then its number is taken.

        The fold answers: the session's own running number, as soon as it is at the head of the log.
        """
        await asyncio.sleep(0)
        session = self.feed.live.state.sessions.get(self.worker)
        if session is not None and session.incarnation == self.incarnation:
            self._number = max(self._number, session.number)

    def _headers(self, principal: str, cause: str, *, expected: int | None) -> Headers:
        return Headers(
            event_id=new_event_id(self._ids),
            author=self.worker,
            incarnation=self.incarnation,
            principal=principal,
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

    def _raise_if_final(self, why: str, fact: Event, seq: int) -> None:
        if why in ("fenced", "subject"):
            raise FencedError(
                f"worker {self.worker} (incarnation {self.incarnation}) was replaced or its session ended: "
                f"{type(fact).__name__} at {seq} did not count",
                worker=self.worker,
                incarnation=self.incarnation,
                position={"TB": seq},
            )
