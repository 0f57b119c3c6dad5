"""A witness ends the sessions of workers that fell silent, and destroys what was lost with them.

Silence alone is a hint: a paused bus silences everybody. The witness ends a session only when its own heartbeats came
back to it without a break for a whole TTL, by its own CLOCK_BOOTTIME, and the other's did not come in that time. They
come by the same stream and the same reading, so hearing itself proves that it would have heard the other: all that was
stored before its own heartbeat, so surely all that was stored before it sent that one. When it *heard* it proves less,
since a reading that falls behind stretches what it hears.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from tensorbus.bus import Heartbeat
from tensorbus.clock import NS_PER_S, Clock, Deadline
from tensorbus.errors import FencedError, NotFoundError, TensorbusError
from tensorbus.events import DestroyReason, Event, SessionEnd
from tensorbus.feeds import Author
from tensorbus.ids import ArtifactId, Incarnation, WorkerId
from tensorbus.lifecycle import Directory, Session, Touched, rules

log = logging.getLogger("tensorbus.workers")

TRY_S = 10.0
LOOKS_PER_TTL = 8


@dataclass(slots=True)
class _Heard:
    incarnation: str
    at_ns: int


@dataclass(slots=True)
class Hearing:
    """The witness's proof that it can hear: its own heartbeats, as they come back to it.

    Attributes:
        break_ns: A gap longer than this ends the proof, and the count starts anew.
    """

    break_ns: int
    since_ns: int | None = None
    until_ns: int = 0

    def heard_itself(self, now_ns: int) -> None:
        if self.since_ns is None or now_ns - self.until_ns > self.break_ns:
            self.since_ns = now_ns
        self.until_ns = now_ns

    def would_have_heard(self, *, other_ns: int, sent_ns: int | None, now_ns: int, ttl_ns: int) -> bool:
        """Whether the own proof holds now and spans more than a TTL after the other was heard last.

        Args:
            other_ns: When the other was heard last.
            sent_ns: When the newest own heartbeat that came back was sent, if that is known.
        """
        if self.since_ns is None or sent_ns is None or now_ns - self.until_ns > self.break_ns:
            return False  # also: it stood still, and does not know yet what was said meanwhile
        return sent_ns - max(other_ns, self.since_ns) > ttl_ns


class Witness:
    """Runs beside a gateway, a store or a home.

    Args:
        author: Whose voice ends sessions.
        own_ttl_ns: The TTL of the witness's own session; its heartbeats come at least every half of it.
        sent_ns: When the newest acknowledged own heartbeat up to a sequence was sent: :meth:`OwnSession.sent_ns`.
    """

    def __init__(self, author: Author, *, own_ttl_ns: int, clock: Clock, sent_ns: Callable[[int], int | None]) -> None:
        self._author = author
        self._clock = clock
        self._sent_ns = sent_ns
        self._hearing = Hearing(break_ns=own_ttl_ns // 2)
        self._heard_itself = 0
        self._heard: dict[WorkerId, _Heard] = {}
        self._orphaned = asyncio.Event()
        self._own_ttl_ns = own_ttl_ns
        self._bury_ns = 0

    async def listen(self) -> None:
        """Note every sign of life. A live stream that was lost starts the count anew."""
        while True:
            try:
                async with self._author.feed.bus.watch_live() as beats:
                    async for beat in beats:
                        self._note(beat)
            except TensorbusError as error:
                log.warning("live stream lost: reason=%s", error)
                await asyncio.sleep(0.2)

    def _note(self, beat: Heartbeat) -> None:
        if beat.gone:
            return
        now_ns = self._clock.now_ns()
        if beat.worker == self._author.worker and beat.incarnation == self._author.incarnation:
            self._hearing.heard_itself(now_ns)
            self._heard_itself = beat.seq
        else:
            self._heard[WorkerId(beat.worker)] = _Heard(beat.incarnation, now_ns)

    async def judge(self) -> None:
        """Look at every live session again and again, and end the silent ones."""
        while True:
            shortest = NS_PER_S
            for session in list(self._author.feed.live.state.live_sessions()):
                shortest = min(shortest, session.ttl_ns // LOOKS_PER_TTL)
                if session.worker != self._author.worker and self._silent(session):
                    await self._end(session)
            await asyncio.sleep(shortest / NS_PER_S)

    def _silent(self, session: Session) -> bool:
        heard = self._heard.get(session.worker)
        if heard is None or heard.incarnation != session.incarnation:
            # Never heard of this life: count from now on.
            heard = self._heard[session.worker] = _Heard(session.incarnation, self._clock.now_ns())
        return self._hearing.would_have_heard(
            other_ns=heard.at_ns,
            sent_ns=self._sent_ns(self._heard_itself),
            now_ns=self._clock.now_ns(),
            ttl_ns=session.ttl_ns,
        )

    async def _end(self, session: Session) -> None:
        worker, incarnation = session.worker, Incarnation(session.incarnation)

        def rule(state: Directory) -> Event | None:
            return rules.end_session(state, worker=worker, incarnation=incarnation, reason=SessionEnd.EXPIRED)

        log.warning("ending a silent session: worker=%s incarnation=%s", worker, incarnation)
        await self._try(rule)

    def on_change(self, _position: int, _touched: tuple[Touched, ...]) -> None:
        if self._author.feed.live.state.orphans:
            self._orphaned.set()

    def on_loss(self) -> None:
        """The log lost its tail: who holds what looks like an orphan has a TTL to say so."""
        self._bury_ns = self._clock.now_ns() + self._own_ttl_ns

    async def bury(self) -> None:
        """Destroy, one fact each, what has no replica left and that no living worker owes an end."""
        self._orphaned.set()
        while True:
            await self._orphaned.wait()
            self._orphaned.clear()
            while (wait_ns := self._bury_ns - self._clock.now_ns()) > 0:
                await asyncio.sleep(wait_ns / NS_PER_S)
            for record in self._author.feed.live.state.owed_by_witness():
                await self._bury_one(record.tenant, record.artifact)

    async def _bury_one(self, tenant: str, artifact: ArtifactId) -> None:
        def rule(state: Directory) -> Event | None:
            try:
                return rules.destroy(state, tenant=tenant, artifact=artifact, reason=DestroyReason.LOST)
            except NotFoundError:
                return None

        await self._try(rule)

    async def _try(self, rule: object) -> None:
        """Decide; a bus that is away is waited for by the next look."""
        try:
            await self._author.decide(rule, deadline=Deadline(TRY_S))  # type: ignore[arg-type]  # a rule as above
        except FencedError:
            raise
        except TensorbusError as error:
            log.warning("witness could not decide: reason=%s", error)
            self._orphaned.set()
            await asyncio.sleep(0.2)
