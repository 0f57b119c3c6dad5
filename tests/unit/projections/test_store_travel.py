"""The past in the global store: states, differences, histories and reasons, and where they begin."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorbus.errors import InvalidArgumentError, NotFoundError, UnavailableError
from tensorbus.projections import Difference, GlobalStore, TimeTravel
from tests.unit.lifecycle import history as h
from tests.unit.projections.store_rig import SUBJECTS, Feed, expected, fill, found, histories, small_log


@pytest.fixture
def store(tmp_path: Path) -> Iterator[GlobalStore]:
    store = GlobalStore.open(tmp_path / "s.duckdb", subjects=SUBJECTS, memory_bytes=128_000_000)
    yield store
    store.close()


@pytest.fixture
def past(store: GlobalStore) -> TimeTravel:
    """Of the small log."""
    return TimeTravel(fill(store, small_log()))


def at(past: TimeTravel, seq: int) -> dict[str, set[tuple[Any, ...]]]:
    return found((name, table.to_pylist()) for name, table in past.state_at(seq).items())


@settings(max_examples=15)
@given(histories, st.data())
def test_a_state_and_its_difference_to_another_make_the_other(log: h.Log, data: st.DataObject) -> None:
    seqs = [message.seq for message in log.messages]
    low, high = sorted((data.draw(st.sampled_from([0, *seqs])), data.draw(st.sampled_from(seqs))))
    with tempfile.TemporaryDirectory() as folder:
        store = GlobalStore.open(Path(folder) / "s.duckdb", subjects=SUBJECTS, memory_bytes=128_000_000)
        past = TimeTravel(fill(store, log))
        before, after, changes = at(past, low), at(past, high), past.diff(low, high)
        store.close()
    assert before == expected(h.fold([message for message in log.messages if message.seq <= low]))
    for name, change in changes.items():
        gone = found([(name, [*change.removed, *(old for old, _ in change.changed)])])[name]
        new = found([(name, [*change.added, *(row for _, row in change.changed)])])[name]
        assert gone <= before[name]
        assert (before[name] - gone) | new == after[name]


def test_between_two_facts_the_earlier_ones_state_holds(store: GlobalStore) -> None:
    log = h.Log()
    log.open()
    log.append(h.put(), skip=5)
    past = TimeTravel(fill(store, log))
    assert at(past, 4) == at(past, 1) != at(past, 7)


def test_only_the_tables_that_are_wanted(past: TimeTravel) -> None:
    assert list(past.state_at(5, tables=["keys", "roles"])) == ["keys", "roles"]
    with pytest.raises(InvalidArgumentError, match="no table 'meta'"):
        past.state_at(5, tables=["meta"])


# -- bounds ----------------------------------------------------------------------------------------------------------


def test_before_the_beginning_the_error_names_the_first_position(store: GlobalStore) -> None:
    log = small_log()
    feed = Feed(h.fold(log.messages[:5]))
    store.begin(feed.state, log.messages[4].headers.event_id)
    store.apply(feed.take(log.messages[5:]))
    past = TimeTravel(store)
    assert past.bounds() == (5, log.messages[-1].seq)
    assert at(past, 5) == expected(h.fold(log.messages[:5]))
    for question in (lambda: past.state_at(4), lambda: past.state_at(0), lambda: past.diff(3, 7)):
        with pytest.raises(NotFoundError, match=f"from 5 to {log.messages[-1].seq}") as caught:
            question()
        assert caught.value.details["first"] == 5
    with pytest.raises(NotFoundError) as caught:
        past.seq_at(log.messages[3].time_ns)
    assert (caught.value.details["first"], caught.value.details["last"]) == (5, log.messages[-1].seq)


def test_a_log_known_from_its_start_begins_empty(store: GlobalStore) -> None:
    log = h.Log()
    log.open()
    log.messages = [message._replace(seq=100 + message.seq) for message in log.messages]
    past = TimeTravel(fill(store, log))
    assert past.bounds() == (101, 101)
    assert not any(at(past, 0).values())
    with pytest.raises(NotFoundError, match="from 101 to 101"):
        past.state_at(50)


def test_beyond_the_position_nothing_is_known_yet(past: TimeTravel) -> None:
    last = small_log().messages[-1].seq
    past.state_at(last)
    for question in (lambda: past.state_at(last + 1), lambda: past.diff(1, last + 1)):
        with pytest.raises(UnavailableError, match=f"from 1 to {last}"):
            question()
    with pytest.raises(InvalidArgumentError):
        past.diff(5, 4)


def test_a_time_is_the_last_fact_up_to_it(past: TimeTravel) -> None:
    assert [past.seq_at(time_ns) for time_ns in (1_000, 2_999, 3_000, 10**18)] == [1, 2, 3, small_log().state.seq]
    with pytest.raises(NotFoundError, match="from 1 on 1970-01-01T00:00:00Z to "):
        past.seq_at(999)


# -- what people ask -------------------------------------------------------------------------------------------------


def test_a_difference_tells_added_removed_and_changed_apart(past: TimeTravel) -> None:
    changes = past.diff(8, small_log().state.seq)
    assert [row["artifact"] for row in changes["artifacts"].added] == ["y"]
    assert [(row["worker"], row["artifact"]) for row in changes["replicas"].removed] == [("w2", "x")]
    assert [(old["live"], new["live"]) for old, new in changes["sessions"].changed] == [(True, False)]
    assert changes["views"] == Difference((), (), ())


@pytest.mark.parametrize(
    ("kind", "name", "types"),
    [
        ("artifact", "y", ["ArtifactPut", "KeyBound", "VersionPublished", "ArtifactDestroyed"]),
        ("key", "gone", ["KeyBound"]),
        ("series", "policy", ["VersionPublished", "VersionPublished"]),
        ("worker", "w2", ["SessionOpened", "ReplicaAdded", "ArtifactPut", "SessionEnded"]),
    ],
)
def test_a_history_is_every_fact_about_it(past: TimeTravel, kind: Any, name: str, types: list[str]) -> None:
    rows = past.history(kind, h.T, name)
    assert [row["type"] for row in rows] == types
    assert [row["seq"] for row in rows] == sorted(row["seq"] for row in rows)  # type: ignore[type-var]


def test_a_history_has_dropped_facts_with_why(store: GlobalStore) -> None:
    log = small_log()
    log.append(h.put(h.X, h.D2))
    rows = TimeTravel(fill(store, log)).history("artifact", h.T, "x")
    assert [(row["kept"], row["why"]) for row in rows][-1] == (False, "conflict")


def test_nothing_by_that_name_is_an_error(past: TimeTravel) -> None:
    for kind in ("artifact", "key", "series", "worker"):
        for ask in (past.history, past.why):
            with pytest.raises(NotFoundError):
                ask(kind, h.T, "nobody")  # type: ignore[arg-type]
        with pytest.raises(NotFoundError):
            past.why("key", "other tenant", "k")
    for ask in (past.history, past.why):
        with pytest.raises(InvalidArgumentError, match="one of artifact, key"):
            ask("table", h.T, "x")  # type: ignore[arg-type]


@pytest.mark.parametrize(("kind", "name"), [("artifact", "y"), ("key", "gone"), ("worker", "w2")])
def test_why_of_what_was_forgotten_says_since_when(store: GlobalStore, kind: Any, name: str) -> None:
    log = small_log()
    upto = log.state.seq
    log.append(h.RoleGranted(role="store"))
    log.append(h.purge(upto, upto))
    log.append(h.purged(upto, upto))
    past = TimeTravel(fill(store, log))
    with pytest.raises(NotFoundError, match=f"since {log.state.seq}; its `history`") as caught:
        past.why(kind, h.T, name)
    assert caught.value.details["since"] == log.state.seq
    assert past.history(kind, h.T, name)
    with pytest.raises(NotFoundError, match="nobody"):
        past.why(kind, h.T, "nobody")


def test_why_a_key_is_what_it_is(past: TimeTravel) -> None:
    reasons = {row["type"]: row["reason"] for row in past.why("key", h.T, "k")}
    assert reasons == {
        "KeyBound": "about the key",
        "ArtifactPut": "about artifact x",
        "ViewDefined": "about artifact x",
        "ReplicaAdded": "about artifact x",
        "CallerLeaseGranted": "about artifact x",
        "VersionPublished": "about artifact x",
        "SessionEnded": "changed replicas",
    }
    gone = [(row["type"], row["reason"]) for row in past.why("key", h.T, "gone")]
    assert gone == [("KeyBound", "about the key"), ("ArtifactDestroyed", "changed keys")]


def test_why_is_of_the_present_life(store: GlobalStore) -> None:
    log = small_log()
    log.append(h.put(h.Y, h.D2))
    rows = TimeTravel(fill(store, log)).why("artifact", h.T, "y")
    assert [row["seq"] for row in rows] == [log.state.seq]


def test_why_follows_causes_and_traces(store: GlobalStore) -> None:
    log = h.Log()
    log.open()
    for artifact in ("a", "b", "c", "d"):
        log.append(h.put(h.ArtifactId(artifact), None))
    messages = list(log.messages)
    trace = "00-" + "ab" * 16 + "-" + "cd" * 8 + "-01"
    messages[2] = _with(messages[2], cause=messages[1].headers.event_id, traceparent=trace)
    messages[3] = _with(messages[3], cause=messages[2].headers.event_id)
    messages[4] = _with(messages[4], traceparent=trace)
    rows = TimeTravel(fill(store, h.Log(messages=messages))).why("artifact", h.T, "c")
    assert [(row["seq"], row["reason"]) for row in rows] == [
        (2, "cause of 3"),
        (3, "cause of 4"),
        (4, "about artifact c"),
        (5, f"same trace {'ab' * 16}"),
    ]


def _with(message: Any, **headers: str) -> Any:
    return message._replace(headers=replace(message.headers, **headers))
