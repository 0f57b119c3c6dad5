"""Moments as callers write them, parameters, and rows as records."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorbus.errors import CorruptError, InvalidArgumentError
from tensorbus.sdk._query_records import change_of, fact_of, moment, parameters, state_of


@pytest.mark.parametrize(
    ("at", "found"),
    [
        (None, None),
        (0, {"seq": 0}),
        (1_700_000_000_000_000, {"seq": 1_700_000_000_000_000}),
        ({"TB": 7}, {"seq": 7}),
        (1.5, {"time_ns": 1_500_000_000}),
        (datetime(1970, 1, 1, 1, tzinfo=timezone(timedelta(hours=1))), {"time_ns": 0}),
        ("1970-01-01T00:00:01Z", {"time_ns": 1_000_000_000}),
        ("1970-01-01T02:00:00.000001+02:00", {"time_ns": 1_000}),
    ],
)
def test_a_moment_is_a_sequence_or_a_time(at: object, found: object) -> None:
    assert moment(at) == found


@given(st.datetimes(min_value=datetime(1970, 1, 2), max_value=datetime(2200, 1, 1), timezones=st.just(UTC)))
def test_a_time_is_exact_to_the_microsecond(at: datetime) -> None:
    found = moment(at)
    assert found is not None
    assert datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=found["time_ns"] // 1000) == at
    assert found["time_ns"] % 1000 == 0
    assert moment(at.isoformat()) == found


@pytest.mark.parametrize(
    "at",
    [True, -1, 2**63, -0.5, 1e300, math.nan, "", "yesterday", "5", b"5", {"OTHER": 1}, [1], "1969-01-01T00:00:00Z"],
)
def test_what_is_no_moment_is_refused(at: object) -> None:
    with pytest.raises(InvalidArgumentError):
        moment(at)


@pytest.mark.parametrize("at", [datetime(2026, 1, 1), "2026-01-01T00:00:00", "2026-01-01"])
def test_a_time_without_a_zone_is_refused(at: object) -> None:
    with pytest.raises(InvalidArgumentError, match="time zone.*Z"):
        moment(at)


def test_parameters_are_json_values() -> None:
    assert parameters(["a", 1, 1.5, True, None]) == ["a", 1, 1.5, True, None]
    for bad in (math.nan, math.inf, b"x", datetime(2026, 1, 1), [1], object()):
        with pytest.raises(InvalidArgumentError, match="parameter 2"):
            parameters([1, bad])


def test_a_state_has_its_rows_by_table() -> None:
    rows = [
        {"kind": "artifact", "row": '{"artifact": "a"}'},
        {"kind": "key", "row": '{"key": "k", "artifact": "a"}'},
        {"kind": "something newer", "row": "{}"},
    ]
    state = state_of(rows, position={"TB": 7}, first=1)
    assert (state.position, state.first) == ({"TB": 7}, 1)
    assert state.artifacts == ({"artifact": "a"},)
    assert state.keys == ({"key": "k", "artifact": "a"},)
    assert state.replicas == ()


def test_changes_and_facts_are_read_from_rows() -> None:
    change = change_of({"change": "added", "kind": "key", "before": None, "after": '{"key": "k"}'})
    assert (change.before, change.after) == (None, {"key": "k"})
    fact = fact_of(
        {"seq": 3, "time_ns": 4, "type": "KeyBound", "kept": False, "why": "held", "body": '{"a": 1}', "new": 1}
    )
    assert (fact.seq, fact.kept, fact.why, fact.body, fact.reason) == (3, False, "held", {"a": 1}, None)
    assert fact_of({"seq": 3, "time_ns": 4, "type": "Newer", "body": None}).body == {}
    for text in ("no json", "[1]"):
        with pytest.raises(CorruptError):
            change_of({"change": "added", "kind": "key", "before": None, "after": text})
