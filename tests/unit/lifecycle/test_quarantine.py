"""Copies with wrong bytes: nobody is sent to them, and the artifact lives until they are healed or given up."""

from __future__ import annotations

import pytest

from tensorbus.events import DestroyReason, QuarantineCause, Tier
from tensorbus.lifecycle import dump, load
from tests.unit.lifecycle.history import (
    D1,
    W1,
    W2,
    Log,
    T,
    X,
    added,
    destroyed,
    dropped,
    ended,
    put,
    quarantined,
    registered,
    released,
)


def log_with_two_copies() -> Log:
    log = Log()
    log.open(W1)
    log.open(W2)
    log.append(put(D1, D1))
    log.say(added, W2, artifact=D1)
    return log


def test_a_quarantined_copy_is_no_place_to_read_from() -> None:
    log = log_with_two_copies()
    assert log.say(quarantined, W1, artifact=D1, cause=QuarantineCause.READER).kept
    (record,) = log.state.artifacts.values()
    assert [replica.worker for replica in record.replicas.values()] == [W2]
    assert [(mark.worker, mark.tier, mark.cause) for mark in record.quarantined.values()] == [(W1, "dram", "reader")]
    log.state.validate()


def test_who_has_no_copy_has_none_to_quarantine() -> None:
    log = log_with_two_copies()
    assert log.say(quarantined, W1, artifact=D1, tier=Tier.DISK).why == "missing"
    assert log.say(quarantined, W1, artifact=D1).kept
    assert log.say(quarantined, W1, artifact=D1).why == "missing"
    assert log.say(dropped, W1, artifact=D1).why == "missing"


@pytest.mark.parametrize("tier", [Tier.DRAM, Tier.DISK])
def test_a_right_copy_of_the_same_worker_lifts_it(tier: Tier) -> None:
    log = log_with_two_copies()
    log.say(quarantined, W1, artifact=D1)
    log.say(added, W2, artifact=D1, tier=Tier.DISK)
    (record,) = log.state.artifacts.values()
    assert record.quarantined
    assert log.say(added, W1, artifact=D1, tier=tier).kept
    assert not record.quarantined
    log.state.validate()


def test_an_artifact_whose_last_copy_is_corrupt_is_not_lost_until_that_is_gone() -> None:
    log = log_with_two_copies()
    log.say(dropped, W2, artifact=D1)
    log.say(quarantined, W1, artifact=D1)
    (record,) = log.state.artifacts.values()
    assert (record.live, dict(record.replicas), dict(log.state.orphans)) == (True, {}, {})
    assert log.append(destroyed(D1, DestroyReason.LOST)).why == "held"
    log.append(ended(W1), W2)
    assert list(log.state.orphans) == [record.where]
    assert log.append(destroyed(D1, DestroyReason.LOST), W2).kept
    log.state.validate()


def test_one_on_disk_outlives_its_session_and_goes_with_the_artifact() -> None:
    log = log_with_two_copies()
    log.say(added, W1, artifact=D1, tier=Tier.DISK)
    log.say(quarantined, W1, artifact=D1, tier=Tier.DISK)
    log.append(ended(W1), W2)
    (record,) = log.state.artifacts.values()
    assert [mark.tier for mark in record.quarantined.values()] == [Tier.DISK]
    assert log.append(destroyed(D1), W2).kept
    assert (record.quarantined, log.state.quarantined) == ({}, {})
    log.state.validate()


def test_a_callers_own_memory_goes_with_its_lease() -> None:
    log = Log()
    log.open(W1)
    log.append(registered(X))
    log.say(quarantined, W1, artifact=X)
    (record,) = log.state.artifacts.values()
    assert record.quarantined and not log.state.orphans
    log.say(released, W1, artifact=X)
    assert list(log.state.orphans) == [record.where]
    log.state.validate()


def test_a_snapshot_has_it() -> None:
    log = log_with_two_copies()
    log.say(quarantined, W1, artifact=D1)
    again = load(dump(log.state), verify=True)
    assert again.hash() == log.state.hash()
    assert again.artifacts[T, D1].quarantined == log.state.artifacts[T, D1].quarantined
