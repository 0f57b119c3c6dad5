"""Who keeps the log, what its keeper may say, and what is forgotten with a purge."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given

from tensorbus.errors import ConflictError, FencedError, InvalidArgumentError
from tensorbus.events import (
    SHARDS,
    STORE_ROLE,
    Aggregate,
    Event,
    FoldRaised,
    RoleGranted,
    RoleResigned,
    ShardsFixed,
    SnapshotTaken,
    Subjects,
)
from tensorbus.ids import EventId
from tensorbus.lifecycle import Directory, RoleLease, forgettable, log_rules
from tests.unit.lifecycle import history as h

GRANT = RoleGranted(role=STORE_ROLE)
RESIGNED = RoleResigned(role=STORE_ROLE)


def kept_by(worker: h.WorkerId = h.W1) -> h.Log:
    log = h.Log()
    log.open(h.W1)
    log.open(h.W2)
    assert log.append(GRANT, worker).kept
    return log


def test_subjects_of_the_logs_own_facts() -> None:
    subjects = Subjects()
    places = {
        subjects.fact(fact_about, h.W1): subjects.fence(fact_about.guard or fact_about)
        for fact_about in (Aggregate("role", "store"), Aggregate("snap", "directory"), Aggregate("purge", "TB"))
    }
    assert places == {
        "tb.ev.role.store.w1": "tb.ev.role.store.*",
        "tb.snap.directory.w1": "tb.ev.role.store.*",
        "tb.ev.purge.TB.w1": "tb.ev.role.store.*",
    }
    assert subjects.parse("tb.snap.directory.w1") == (Aggregate("snap", "directory"), "w1")


def test_the_sequence_of_the_last_grant_is_the_token() -> None:
    log = kept_by()
    first = log.state.roles[STORE_ROLE]
    assert first == RoleLease(STORE_ROLE, h.W1, h.FIRST, log.state.seq)
    assert log.append(GRANT, h.W2, expected=None).kept, "a grant counts whatever its headers say"
    assert log.state.roles[STORE_ROLE].token == log.state.seq > first.token
    assert log_rules.role_token(log.state, STORE_ROLE) == log.state.seq


@pytest.mark.parametrize("bent", ["worker", "incarnation", "token", "expected", "older token"])
def test_only_the_holder_under_its_token_keeps_the_log(bent: str) -> None:
    log = kept_by()
    token = log.state.seq
    given = {
        "worker": {"author": h.W2},
        "incarnation": {"incarnation": h.SECOND},
        "token": {"token": 7},
        "expected": {"expected": 7},
        "older token": {"expected": token - 1, "token": token - 1},
    }[bent]
    verdict = log.append(h.archived(), **given)  # type: ignore[arg-type]
    assert (verdict.kept, verdict.why) == (False, "fenced")
    assert log.append(h.archived()).kept
    assert log.append(GRANT, h.W2).kept
    assert log.append(h.purge(), expected=token, token=token).why == "fenced"


def test_a_message_on_the_roles_subject_that_is_no_grant_ends_the_token_too() -> None:
    """The server compares with it, so nothing would be taken any more under the old one."""
    log = kept_by()
    log.append(h.put(), subject="tb.ev.role.store.w1")
    token = log.state.roles[STORE_ROLE].token
    assert log.append(h.archived(), expected=token, token=token).why == "fenced"
    assert isinstance(log_rules.take_role(log.state, role=STORE_ROLE, worker=h.W1, incarnation=h.FIRST), RoleGranted)


def test_the_role_can_be_taken_once_its_holders_session_has_ended() -> None:
    log = kept_by()

    def ask() -> object:
        return log_rules.take_role(log.state, role=STORE_ROLE, worker=h.W2, incarnation=h.FIRST)

    assert ask() == log.state.roles[STORE_ROLE]
    log.append(h.ended(h.W1), h.W2)
    assert ask() == GRANT


def test_who_has_the_role_may_give_it_up_and_another_takes_it_though_the_first_lives() -> None:
    log = kept_by()
    token = log.state.seq

    def resign(worker: h.WorkerId, incarnation: h.Incarnation = h.FIRST) -> object:
        return log_rules.resign_role(log.state, role=STORE_ROLE, worker=worker, incarnation=incarnation)

    assert (resign(h.W1), resign(h.W2), resign(h.W1, h.SECOND)) == (RESIGNED, None, None)
    assert log.append(RESIGNED).kept
    assert STORE_ROLE not in log.state.roles
    assert resign(h.W1) is None, "once is enough"
    assert log.append(h.archived(), expected=token, token=token).why == "fenced"
    assert log.append(h.archived()).why == "fenced", "nor under the number of its own resignation"
    with pytest.raises(FencedError, match="nobody"):
        log_rules.as_keeper(log.state, h.purge(), worker=h.W1, incarnation=h.FIRST)
    assert log_rules.take_role(log.state, role=STORE_ROLE, worker=h.W2, incarnation=h.FIRST) == GRANT
    assert log.append(GRANT, h.W2).kept
    assert log.append(h.archived(), h.W2).kept
    log.state.validate()


@pytest.mark.parametrize(
    ("bent", "why"),
    [({"author": h.W2}, "fenced"), ({"incarnation": h.SECOND}, "fenced"), ({"expected": 1}, "sequence"),
     ({"expected": None}, "sequence")],
)  # fmt: skip
def test_only_the_holder_gives_the_role_up(bent: dict[str, Any], why: str) -> None:
    log = kept_by()
    held = log.state.roles[STORE_ROLE]
    assert log.append(RESIGNED, **bent).why == why
    assert log.state.roles[STORE_ROLE] == held
    assert log_rules.resign_role(log.state, role=STORE_ROLE, worker=h.W1, incarnation=h.FIRST) is None
    assert log_rules.take_role(log.state, role=STORE_ROLE, worker=h.W1, incarnation=h.FIRST) == GRANT


def test_a_resignation_that_was_overtaken_by_a_grant_takes_nothing_from_the_next_holder() -> None:
    log = kept_by()
    token = log.state.seq
    log.append(GRANT, h.W2)
    assert log.append(RESIGNED, expected=token).why == "sequence"
    assert log.state.roles[STORE_ROLE].worker == h.W2


@given(h.histories)
def test_the_role_is_with_whose_grant_is_the_last_message_about_it(log: h.Log) -> None:
    state, last = Directory(), None
    for message in log.messages:
        verdict = state.apply(message)
        if verdict.kept and isinstance(message.event, h.LogPurged | h.PurgeCompleted | h.Archived | SnapshotTaken):
            assert last == (message.headers.author, message.headers.incarnation)
        if message.subject.startswith("tb.ev.role.store."):
            headers, is_grant = message.headers, isinstance(message.event, RoleGranted) and verdict.kept
            last = (headers.author, headers.incarnation) if is_grant else None
        for worker in (h.W1, h.W2):
            for life in (h.FIRST, h.SECOND, h.Incarnation("3" * 16)):
                has = log_rules.has_role(state, role=STORE_ROLE, worker=worker, incarnation=life)
                assert has == (last == (worker, life))


def test_a_keeper_that_was_replaced_is_told_by_whom() -> None:
    log = kept_by()
    assert log_rules.as_keeper(log.state, h.purge(), worker=h.W1, incarnation=h.FIRST) == h.purge()
    log.append(GRANT, h.W2)
    with pytest.raises(FencedError, match="w2"):
        log_rules.as_keeper(log.state, h.purge(), worker=h.W1, incarnation=h.FIRST)


def test_archive_files_follow_each_other() -> None:
    log = kept_by()
    assert log.append(h.archived(1, 4)).kept
    assert log.append(h.archived(6, 9)).why == "conflict"
    assert log.append(h.archived(1, 4)).why == "duplicate"
    assert log.append(h.archived(5, 9)).kept
    assert (log.state.log.archive_first, log.state.log.archived) == (1, 9)


def test_a_purge_is_announced_carried_out_and_goes_only_forward() -> None:
    log = kept_by()
    assert log.append(h.purged(4)).why == "missing"
    assert log.append(h.purge(4)).kept
    assert log.state.log.purged == 0
    assert log.append(h.purged(4)).kept
    assert log.append(h.purged(4)).why == "duplicate"
    assert log.append(h.purge(3)).why == "duplicate"
    assert log.state.log.purged == 4


def test_what_ended_long_ago_is_forgotten_and_its_id_is_free_again() -> None:
    log = kept_by()
    log.append(h.put(h.X, h.D1))
    log.append(h.bound("k", h.X))
    log.append(h.published(1, h.X))
    log.append(h.put(h.Y, None))
    log.append(h.destroyed(h.X))
    upto = log.state.seq
    log.append(h.put(h.D1, h.D1))
    log.append(h.purge(upto, upto))
    names = {touched.name for touched, _ in forgettable(log.state, upto)}
    assert names == {"x", "k"}
    assert log.append(h.purged(upto, upto)).kept
    assert (h.T, h.X) not in log.state.artifacts
    assert (h.T, "k") not in log.state.keys
    assert log.state.series[h.T, "policy"].last == 1, "a version number is never given twice"
    assert log.append(h.put(h.X, h.D2), expected=0).kept
    log.state.validate()


def test_what_was_heard_of_since_is_not_forgotten() -> None:
    log = kept_by()
    log.append(h.put(h.X, h.D1))
    log.append(h.destroyed(h.X))
    upto = log.state.seq
    log.append(h.put(h.X, h.D2))  # dropped, and on its subject all the same
    log.append(h.purge(upto, upto))
    log.append(h.purged(upto, upto))
    assert (h.T, h.X) in log.state.artifacts


def test_the_keeper_says_nothing_that_the_fold_would_drop() -> None:
    """As after an attempt whose outcome it did not hear: what it decided on is not so any more."""
    log = kept_by()

    def may(fact: Event) -> bool:
        try:
            return log_rules.as_keeper(log.state, fact, worker=h.W1, incarnation=h.FIRST) == fact
        except ConflictError:
            return False

    for fact in (h.archived(1, 4), h.archived(5, 9), h.purge(4), h.purged(4), h.snapshot()):
        assert may(fact)
        assert log.append(fact).kept
    for fact in (h.archived(1, 4), h.archived(5, 12), h.archived(11, 12), h.purge(3), h.purge(4), h.purged(4)):
        assert not may(fact)
        assert not log.append(fact).kept


def test_a_loss_is_recorded_once() -> None:
    log = kept_by()

    def note(known: int) -> object:
        lost = EventId("f" * 32)
        return log_rules.note_truncation(log.state, stream="TB", seq=20, event_id=lost, last=10, known=known)

    fact = note(0)
    assert fact is not None
    assert log.append(fact).kept  # type: ignore[arg-type]
    assert log.state.log.truncations == 1
    assert note(0) is None
    assert note(log.state.seq) is not None  # the next one


def test_a_fold_that_is_not_known_stops_the_reader() -> None:
    log = kept_by()
    assert log.append(FoldRaised(stream="TB", version=1)).why == "duplicate"
    assert log.append(FoldRaised(stream="TB", version=2)).kept
    verdict = log.append(h.put())
    assert (verdict.kept, verdict.why) == (False, "fold")
    assert log.state.degraded


def test_a_snapshot_changes_no_state() -> None:
    log = kept_by()
    before = log.state.hash()
    assert isinstance(h.snapshot(), SnapshotTaken)
    assert log.append(h.snapshot()).kept
    assert log.state.hash() == before


def test_the_hash_of_a_log_without_such_facts_is_as_it_was() -> None:
    assert Directory().hash() == "0" * 64


def test_the_number_of_shards_is_fixed_once() -> None:
    log = kept_by()
    fact = log_rules.fix_shards(log.state, shards=64)
    assert fact == ShardsFixed(shards=64)
    assert log.append(fact).kept
    assert log.append(ShardsFixed(shards=128), h.W2).why == "conflict"
    assert log.state.shards == 64
    assert log.state.head(SHARDS) == log.state.seq, "the next append must name also what was dropped"
    assert log_rules.fix_shards(log.state, shards=64) == 64
    with pytest.raises(ConflictError, match="64 shards, not 32"):
        log_rules.fix_shards(log.state, shards=32)


@pytest.mark.parametrize("shards", [0, -1, 3, 65, 1 << 17])
def test_shards_are_a_power_of_two(shards: int) -> None:
    with pytest.raises(InvalidArgumentError, match="power of two"):
        log_rules.fix_shards(Directory(), shards=shards)
