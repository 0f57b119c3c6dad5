"""Operations in the fold: one life for each key, an end or a loss, and a bound on what is kept."""

from __future__ import annotations

import pytest

from tensorbus.events import DropReason, OperationOutcome, Tier
from tensorbus.ids import ArtifactId
from tensorbus.lifecycle import FINISHED_MAX, Operation, OperationState, dump, load
from tests.unit.lifecycle.history import D1, FIRST, SECOND, W1, W2, Log, T, added, began, done, dropped, ended, granted
from tests.unit.lifecycle.history import put as put_


@pytest.fixture
def log() -> Log:
    log = Log()
    log.open(W1)
    log.open(W2)
    log.append(put_(D1))
    return log


def one(log: Log, id: str = "op1") -> Operation:
    return log.state.operations[T, id]


def test_an_operation_runs_from_its_first_fact_to_its_last(log: Log) -> None:
    assert log.say(began, W2, artifact=D1).kept
    begun = one(log)
    assert (begun.state, begun.worker, begun.incarnation, begun.principal) == (OperationState.RUNNING, W2, FIRST, "me")
    assert log.say(done, W2).kept
    assert (one(log).state, one(log).ended, one(log).result) == ("succeeded", log.state.seq, '{"nbytes":64}')
    assert not log.state.running
    log.state.validate()


@pytest.mark.parametrize("outcome", OperationOutcome)
def test_every_outcome_is_a_state(log: Log, outcome: OperationOutcome) -> None:
    log.say(began)
    log.say(done, outcome=outcome, error=None if outcome == "succeeded" else "{}")
    assert one(log).state.value == outcome.value


def test_the_same_key_is_the_same_operation_and_no_other(log: Log) -> None:
    log.say(began, W1)
    assert log.say(began, W1).why == "duplicate"
    assert log.say(began, W1, operation="evict").why == "conflict"
    assert log.say(began, W2).why == "conflict"
    log.say(done, W1)
    assert log.say(began, W1).why == "duplicate"


def test_only_who_began_it_ends_it_and_once(log: Log) -> None:
    assert log.say(done, W1).why == "missing"
    log.say(began, W1)
    assert log.say(done, W2).why == "missing"
    assert log.say(done, W1).kept
    assert log.say(done, W1, outcome=OperationOutcome.FAILED).why == "duplicate"


def test_what_a_worker_did_is_lost_with_its_session_and_may_be_asked_for_again(log: Log) -> None:
    log.say(began, W2)
    verdict = log.append(ended(W2), W1)
    assert ("operation", T, "op1") in verdict.touched
    assert (one(log).state, one(log).ended) == (OperationState.LOST, log.state.seq)
    log.open(W2, SECOND)
    assert log.say(began, W2, SECOND, operation="evict").why == "conflict"
    assert log.say(began, W2, SECOND).kept
    assert (one(log).state, one(log).incarnation) == (OperationState.RUNNING, SECOND)
    log.state.validate()


def test_what_a_worker_did_is_lost_when_its_next_life_begins(log: Log) -> None:
    log.say(began, W2)
    log.open(W2, SECOND)
    assert one(log).state is OperationState.LOST


def test_the_newest_that_ended_are_kept_and_all_that_run(log: Log) -> None:
    log.say(began, W1, id="runs")
    log.say(began, W2, id="other")
    log.say(done, W2, id="other")
    for n in range(FINISHED_MAX + 2):
        log.say(began, W1, id=f"n{n}")
        log.say(done, W1, id=f"n{n}")
    assert (T, "n1") not in log.state.operations
    assert all((T, name) in log.state.operations for name in ("n2", "runs", "other", f"n{FINISHED_MAX + 1}"))
    log.state.validate()
    again = load(dump(log.state), verify=True)
    for state in (again, log.state):
        assert next(iter(state.finished[W1])) == (T, "n2")


def test_a_copy_that_was_asked_away_goes_only_if_another_is_there_for_good(log: Log) -> None:
    def drop(worker: object = W1) -> str:
        return log.say(dropped, worker, artifact=D1, reason=DropReason.ASKED).why  # type: ignore[arg-type]  # a worker

    assert drop() == "held"
    log.say(added, W2, artifact=D1, view=ArtifactId("tbv:none"), tier=Tier.VRAM)
    assert drop() == "held"
    log.say(added, W2, artifact=D1)
    log.say(granted, W1, artifact=D1)
    assert drop() == "held"
    assert drop(W2) == ""
    assert drop(W1) == "held"


def test_of_two_that_give_up_the_last_two_copies_the_first_does(log: Log) -> None:
    log.say(added, W2, artifact=D1)
    assert log.say(dropped, W2, artifact=D1, reason=DropReason.ASKED).kept
    assert log.say(dropped, W1, artifact=D1, reason=DropReason.ASKED).why == "held"
    log.say(added, W2, artifact=D1)
    log.append(ended(W2), W1)
    assert log.say(dropped, W1, artifact=D1, reason=DropReason.ASKED).why == "held"
