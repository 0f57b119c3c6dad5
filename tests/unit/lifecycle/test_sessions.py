"""Sessions: who may speak, what goes with a worker's life, and what an author's running number is for."""

from __future__ import annotations

import pytest

from tensorbus.events import STORE_ROLE, RoleGranted, SessionEnd, Tier, UnknownEvent, aggregate_of
from tensorbus.lifecycle import Directory, ReplicaKey, rules
from tests.unit.lifecycle import history as h


@pytest.fixture
def log() -> h.Log:
    log = h.Log()
    log.open(h.W1)
    log.open(h.W2)
    return log


def replicas(log: h.Log) -> list[ReplicaKey]:
    record = log.state.artifact(h.T, h.X)
    assert record is not None
    return list(record.replicas)


def test_the_end_of_a_session_drops_memory_and_keeps_disk(log: h.Log) -> None:
    log.append(h.put())
    log.say(h.added, tier=Tier.DISK)
    log.say(h.added, tier=Tier.VRAM)
    log.say(h.added, h.W2)
    assert log.append(h.ended(h.W1), h.W2).kept
    assert replicas(log) == [ReplicaKey(h.W1, None, Tier.DISK), ReplicaKey(h.W2, None, Tier.DRAM)]


def test_leases_end_with_the_session_of_the_worker_that_granted_them(log: h.Log) -> None:
    log.append(h.registered(lease=h.L1))
    log.say(h.granted, h.W2, lease=h.L2)  # also one on which the worker has no replica of its own
    log.append(h.ended(h.W2), h.W1)
    record = log.state.artifact(h.T, h.X)
    assert record is not None
    assert list(record.leases) == [h.L1]
    log.append(h.ended(h.W1))
    assert record.leases == {}


def test_what_only_an_ended_session_held_is_owed_by_a_witness(log: h.Log) -> None:
    log.append(h.put())
    log.append(h.put(h.Y, h.D2, tier=Tier.DISK))
    log.append(h.ended(h.W1), h.W2)
    assert [record.artifact for record in log.state.owed_by_witness()] == [h.X]


def test_a_new_incarnation_fences_the_old_one_at_once(log: h.Log) -> None:
    log.append(h.put())
    assert log.open(h.W1, h.SECOND).kept
    assert replicas(log) == []
    assert log.append(h.put(h.Y), h.W1, h.FIRST).why == "fenced"
    assert log.append(h.put(h.Y), h.W1, h.SECOND).kept


def test_an_incarnation_opens_once(log: h.Log) -> None:
    assert log.open().why == "duplicate"
    log.append(h.ended())
    assert log.open().why == "duplicate"
    assert log.open(h.W1, h.SECOND).kept


def test_nobody_opens_a_session_for_another(log: h.Log) -> None:
    assert log.append(h.opened(h.W3), h.W1).why == "fenced"
    assert log.append(h.opened(h.W1, h.SECOND), h.W1, h.FIRST).why == "fenced"


def test_a_session_is_ended_by_itself_or_a_live_witness(log: h.Log) -> None:
    assert log.append(h.ended(h.W2), h.W3).why == "fenced"
    assert log.append(h.ended(h.W1), h.W1).kept
    assert log.append(h.ended(h.W1), h.W2).why == "missing"
    assert log.append(h.ended(h.W2), h.W1).why == "fenced"


def test_a_witness_that_comes_late_ends_nothing_of_the_next_life(log: h.Log) -> None:
    def end(incarnation: h.Incarnation) -> object:
        return rules.end_session(log.state, worker=h.W1, incarnation=incarnation, reason=SessionEnd.EXPIRED)

    assert end(h.FIRST) == h.ended(h.W1, h.FIRST)
    log.open(h.W1, h.SECOND)
    assert end(h.FIRST) is None
    assert log.append(h.ended(h.W1, h.FIRST), h.W2).why == "missing"
    assert log.state.is_live(h.W1, h.SECOND)


def test_who_never_opened_a_session_is_not_heard(log: h.Log) -> None:
    assert log.append(h.put(), h.W3).why == "fenced"


def test_a_proposal_that_expected_another_head_does_not_count_and_is_the_head_now(log: h.Log) -> None:
    log.append(h.put())
    assert log.append(h.destroyed(), expected=0).why == "sequence"
    assert log.append(h.destroyed(), expected=None).why == "sequence"
    assert log.state.head(aggregate_of(h.put())) == log.state.seq
    assert log.append(h.destroyed()).kept


def test_a_running_number_counts_once_and_a_hole_is_noticed(log: h.Log) -> None:
    log.append(h.put())
    assert log.append(h.added(1), h.W2).kept
    assert log.append(h.dropped(1), h.W2).why == "duplicate"
    assert not log.state.degraded
    assert log.append(h.added(3), h.W2).kept
    assert (log.state.gaps, log.state.degraded) == (1, True)


def test_a_number_is_taken_also_by_a_fact_that_did_not_count(log: h.Log) -> None:
    assert log.append(h.added(1, h.Y)).why == "missing"
    log.append(h.put())
    log.append(h.added(2))
    assert log.state.gaps == 0


def test_each_life_counts_from_one(log: h.Log) -> None:
    log.append(h.put(), h.W2)
    log.say(h.added)
    log.open(h.W1, h.SECOND)
    assert log.append(h.added(1), h.W1, h.SECOND).kept


def test_a_fact_from_a_newer_version_is_counted_and_moves_the_head(log: h.Log) -> None:
    about = aggregate_of(h.put())
    verdict = log.append(UnknownEvent("ArtifactSealed"), subject=log.state.subjects.fact(about, h.W1))
    assert verdict.why == "unknown"
    assert (log.state.unknown, log.state.degraded, log.state.head(about)) == (1, True, log.state.seq)


def test_a_session_that_was_forgotten_is_over_and_not_lost(log: h.Log) -> None:
    """Who slept until nobody remembers it must not open its former session again."""
    log.append(RoleGranted(role=STORE_ROLE), h.W1)
    opened = log.state.sessions[h.W2]

    def stands(state: Directory) -> rules.Standing:
        return rules.standing(state, worker=h.W2, incarnation=h.FIRST, opened=opened.opened, opened_ns=opened.opened_ns)

    assert stands(log.state) is rules.Standing.OPEN
    assert stands(h.Log().state) is rules.Standing.LOST
    log.append(h.ended(h.W2), h.W1)
    assert stands(log.state) is rules.Standing.OVER
    upto = log.state.seq
    log.append(h.purge(upto, upto))
    log.append(h.purged(upto, upto))
    assert h.W2 not in log.state.sessions
    assert stands(log.state) is rules.Standing.OVER
