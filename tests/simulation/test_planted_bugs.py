"""The scenarios find what they are for: each wrong variant of the product fails within its budget of seeds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest

from tensorbus.bus import Bus, Conflict, Heartbeat, _append, append
from tensorbus.clock import Deadline
from tensorbus.events import DestroyReason, Event
from tensorbus.feeds import Author, DirectoryFeed
from tensorbus.lifecycle import Artifact, Touched, Verdict
from tensorbus.projections import LiveDirectory
from tensorbus.testing import FaultPlan, Wave, World, search
from tensorbus.workers import _puts as puts
from tensorbus.workers._core import Core
from tensorbus.workers._leases import Leases
from tensorbus.workers._puts import Puts
from tensorbus.workers._reclaim import Reclaim
from tensorbus.workers._session import OwnSession
from tensorbus.workers._witness import Hearing, Witness
from tests.simulation.cluster import TTL_S
from tests.simulation.test_artifacts import artifacts
from tests.simulation.test_names import names
from tests.simulation.test_sessions import (
    bus_pauses,
    only_the_bus_pauses,
    restart_as_the_former_life_ends,
    sessions,
)

Scenario = Callable[[World], Coroutine[Any, Any, None]]
Bug = Callable[[ExitStack], None]


def replaced(target: Any, name: str, wrong: Any) -> Bug:
    return lambda stack: stack.enter_context(patch.object(target, name, wrong))


# -- sessions and witnesses -------------------------------------------------------------------------------------------


def _trusts_the_marker(self: Witness, beat: Heartbeat) -> None:
    if beat.gone and beat.worker != self._author.worker:
        self._heard[beat.worker].at_ns = -(1 << 62)  # type: ignore[index]  # ids are text
        self._hearing.since_ns = 0
        return
    right_note(self, beat)


right_note = Witness._note


def _forgets_the_break(self: Hearing, now_ns: int) -> None:
    self.since_ns = now_ns if self.since_ns is None else self.since_ns
    self.until_ns = now_ns


def _proves_by_what_it_hears(
    self: Hearing, *, other_ns: int, sent_ns: int | None, now_ns: int, ttl_ns: int
) -> bool:  # fmt: skip
    return self.since_ns is not None and self.until_ns - max(other_ns, self.since_ns) > ttl_ns


def _is_fenced_by_a_former_end(self: OwnSession, _position: int, touched: tuple[Touched, ...]) -> None:
    if Touched("session", "", self._opening.worker) in touched and not self._holds():
        self._fenced.set()


def _never_notices(self: OwnSession, _position: int, touched: tuple[Touched, ...]) -> None:
    return


async def _no_burial(self: Witness) -> None:
    await asyncio.Event().wait()


# -- appending --------------------------------------------------------------------------------------------------------


async def _takes_every_refusal_for_a_conflict(
    bus: Bus, fence: str, event_id: str, expected: int, said: int, deadline: Deadline
) -> Conflict:
    """One server answers *wrong sequence* also to a retry of what it has stored."""
    return Conflict(said)


# -- the author -------------------------------------------------------------------------------------------------------


async def _does_not_wait_for_its_fold(self: DirectoryFeed, seq: int, *, deadline: Deadline) -> None:
    if self.live.position == 0:
        await right_reached(self, seq, deadline=deadline)


right_reached = DirectoryFeed.reached


async def _answers_from_what_it_has(self: Core, at_least: int | None, deadline: Deadline) -> None:
    return


def _every_fact_counts(self: LiveDirectory, seq: int) -> Verdict:
    return Verdict(True)


async def _says_the_next_number_after_an_unknown_outcome(self: Author, saying: Any) -> tuple[int, Event]:
    fact = saying.make(self._number + 1)
    headers = self._headers(saying.principal, saying.cause, expected=None)
    outcome = await append(self.feed.bus, fact, headers, deadline=Deadline(2.0))
    self._number += 1
    return outcome.seq, fact


# -- bytes ------------------------------------------------------------------------------------------------------------


def _ends_what_is_held(self: Artifact, reason: object) -> bool:
    return False


async def _abandons_what_others_joined(self: Puts, tenant: str, artifact: Any, *, born: int, principal: str) -> None:
    held = self._store.get(tenant, artifact)
    if held is not None:
        held.joined = False
    await right_abandon(self, tenant, artifact, born=born, principal=principal)


right_abandon = Puts.abandon


def _yields_to_copies_only(self: Artifact, reason: DestroyReason) -> bool:
    return reason in (DestroyReason.LOST, DestroyReason.LEASE_ENDED) and bool(self.replicas)


@asynccontextmanager
async def _forgets_who_waits(self: Puts, where: Any) -> AsyncIterator[None]:
    turn = self._births.setdefault(where, puts._Turn())
    try:
        async with turn.lock:
            yield
    finally:
        if not turn.lock.locked():
            self._births.pop(where, None)


def _plant_abandon(stack: ExitStack) -> None:
    replaced(Artifact, "outlives", _yields_to_copies_only)(stack)
    replaced(Puts, "abandon", _abandons_what_others_joined)(stack)


def _keeps_what_ended(self: Reclaim, _position: int, touched: Iterable[Touched]) -> None:
    return


def _keeps_leases_of_the_dead(self: Leases, caller: Any) -> None:
    caller.leases.clear()


@dataclass(frozen=True)
class Planted:
    """A wrong variant, the scenario that must find it, and within how many seeds."""

    plant: Bug
    scenario: Scenario
    seeds: int | range
    plan: FaultPlan | None = None


NAMED_PUTS = {"put": 4, "put_named": 8, "unbind": 2, "destroy": 2}
SLOW = FaultPlan(slow=0.3, crash=Wave(every_s=15.0, length_s=8.0))

BUGS = {
    "a witness trusts the expiry marker": Planted(replaced(Witness, "_note", _trusts_the_marker), sessions(), 20),
    "a witness overlooks that it heard nothing": Planted(
        replaced(Hearing, "heard_itself", _forgets_the_break), only_the_bus_pauses, 60, bus_pauses(TTL_S * 2)
    ),
    "a witness proves by when it heard": Planted(
        replaced(Hearing, "would_have_heard", _proves_by_what_it_hears), sessions(), 60, SLOW
    ),
    "a worker takes a former life's end for its own": Planted(
        replaced(OwnSession, "on_change", _is_fenced_by_a_former_end),
        restart_as_the_former_life_ends(),
        60,
        FaultPlan(delay_s=(0.1, 0.6)),
    ),
    "a fenced worker does not notice": Planted(replaced(OwnSession, "on_change", _never_notices), sessions(), 30),
    "nobody buries what is lost": Planted(replaced(Witness, "bury", _no_burial), artifacts(), 40),
    "a refusal of an own retry is a conflict": Planted(
        replaced(_append, "_who_was_first", _takes_every_refusal_for_a_conflict), names(), 60
    ),
    "an author does not wait for its fold": Planted(
        replaced(DirectoryFeed, "reached", _does_not_wait_for_its_fold), names(), 20
    ),
    "an author does not look whether its fact counts": Planted(
        replaced(LiveDirectory, "verdict", _every_fact_counts), artifacts(), 40
    ),
    "a reader does not wait for its own writes": Planted(
        replaced(Core, "reached", _answers_from_what_it_has), names(), 80
    ),
    "a number is given again after an unknown outcome": Planted(
        replaced(Author, "_say_one", _says_the_next_number_after_an_unknown_outcome), artifacts(), 40
    ),
    "an end does not yield to a new copy": Planted(replaced(Artifact, "outlives", _ends_what_is_held), artifacts(), 20),
    "a put that is given up takes others with it": Planted(
        _plant_abandon,
        artifacts(deeds=NAMED_PUTS),
        range(30, 60),
        FaultPlan(delay_s=(0.05, 0.4)),
    ),
    "a third put of an id takes no turn": Planted(
        replaced(Puts, "one_at_a_time", _forgets_who_waits), artifacts(deeds=NAMED_PUTS), 30
    ),
    "memory of what ended is kept": Planted(replaced(Reclaim, "on_change", _keeps_what_ended), artifacts(), 10),
    "leases outlive their callers": Planted(replaced(Leases, "gone", _keeps_leases_of_the_dead), artifacts(), 10),
}


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found(name: str) -> None:
    planted = BUGS[name]
    options = {} if planted.plan is None else {"plan": planted.plan}
    with ExitStack() as stack:
        planted.plant(stack)
        found = search(planted.scenario, planted.seeds, check_every=50, **options)
    assert found is not None, f"seeds {planted.seeds} did not find that {name}"
