"""What holds for every history, also for one that nobody well-behaved would write."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorbus.errors import CorruptError
from tensorbus.events import (
    EVENT_TYPES,
    Aggregate,
    AnyRecorded,
    Event,
    PurgeCompleted,
    Recorded,
    aggregate_of,
    decode_body,
    encode,
)
from tensorbus.lifecycle import Directory, forgettable
from tensorbus.projections import LiveDirectory
from tests.unit.lifecycle.history import FIRST, W1, W2, Log, batches, bound, everything, fold, histories, put

REPOSITORY = Path(__file__).parents[3]


@given(histories)
def test_two_folds_of_a_log_are_equal(log: Log) -> None:
    again = fold(log.messages)
    assert again.hash() == log.state.hash()
    assert everything(again) == everything(log.state)


@given(histories, st.lists(st.integers(0, 60)))
def test_the_hash_along_the_way_is_the_hash_of_the_state(log: Log, readings: list[int]) -> None:
    state = Directory()
    for at, message in enumerate(log.messages):
        state.apply(message)
        if at in readings:
            assert state.hash() == state.full_hash()
    assert state.hash() == state.full_hash() == log.state.full_hash()


@given(histories, st.data())
def test_a_message_delivered_again_changes_nothing(log: Log, data: st.DataObject) -> None:
    state = Directory()
    for at, message in enumerate(log.messages):
        state.apply(message)
        before = everything(state), state.hash()
        again = data.draw(st.integers(0, at))
        assert not state.apply(log.messages[again]).kept
        assert (everything(state), state.hash()) == before


@given(histories, st.lists(st.integers(0, 60)))
def test_any_batching_gives_the_same_state_and_verdicts(log: Log, cuts: list[int]) -> None:
    live = LiveDirectory(Directory())
    for batch in batches(log.messages, cuts):
        live.apply(batch)
    one_by_one = Directory()
    verdicts = [one_by_one.apply(message) for message in log.messages]
    assert live.state.hash() == one_by_one.hash()
    for message, verdict in zip(log.messages, verdicts, strict=True):
        found = live.verdict(message.seq)
        assert (found.kept, found.why) == (verdict.kept, verdict.why)


@given(histories)
def test_after_every_message_all_indexes_agree_and_heads_only_grow(log: Log) -> None:
    state = Directory()
    for message in log.messages:
        heads = dict(state.heads)
        forgotten = apply_and_forget(state, message)
        state.validate()
        assert all(state.heads[about] >= seq for about, seq in heads.items() if about not in forgotten)
        assert not forgotten & state.heads.keys()


def apply_and_forget(state: Directory, message: AnyRecorded) -> set[Aggregate]:
    """Fold a message; the aggregates whose messages are gone from the server once it was said."""
    found = forgettable(state, message.event.forget) if isinstance(message.event, PurgeCompleted) else []
    return {about for _, about in found} if state.apply(message).kept else set()


@given(histories)
def test_what_is_forgotten_is_gone_and_what_lives_is_not(log: Log) -> None:
    state = Directory()
    for message in log.messages:
        living = {where for where, record in state.artifacts.items() if record.live}
        named = {where for where, key in state.keys.items() if key.artifact is not None}
        state.apply(message)
        if isinstance(message.event, PurgeCompleted):
            assert living <= state.artifacts.keys()
            assert named <= state.keys.keys()


@given(histories)
def test_a_head_is_the_last_message_on_its_fence_as_the_server_sees_it(log: Log) -> None:
    on_fence: dict[Aggregate, int] = {}
    state = Directory()
    for message in log.messages:
        for about in apply_and_forget(state, message):
            on_fence.pop(about, None)
        if message.subject.startswith("tb.ev."):
            on_fence[log.state.subjects.parse(message.subject)[0]] = message.seq
    assert log.state.heads == {about: seq for about, seq in on_fence.items() if about.contested}


@given(st.lists(st.one_of(*(st.from_type(cls) for cls in EVENT_TYPES)), max_size=20))
def test_no_decodable_fact_makes_the_fold_raise(events: list[Event]) -> None:
    log = Log()
    log.open(W1)
    for event in events:
        decoded = decode_body(encode(event), type_name=event.type, schema=1)
        assert decoded == event
        log.append(decoded)
    log.state.validate()


@given(histories, st.text(max_size=40))
def test_no_subject_makes_the_fold_raise(log: Log, subject: str) -> None:
    log.append(put(), subject="tb.ev." + subject)
    log.append(put(), subject=subject)
    log.state.validate()


def test_the_hash_does_not_depend_on_how_python_hashes_strings() -> None:
    command = [sys.executable, "-m", "tests.golden.logs.make", "--hash", "v1"]
    printed = {
        subprocess.run(
            command,
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=REPOSITORY,
            check=True,
            capture_output=True,
            text=True,
            timeout=60,
        ).stdout
        for seed in ("0", "1", "4242")
    }
    assert len(printed) == 1


def test_validate_says_what_is_wrong() -> None:
    log = Log()
    log.open(W1)
    log.append(put())
    log.state.by_worker.clear()
    log.state.orphans[next(iter(log.state.artifacts))] = None
    with pytest.raises(CorruptError, match=r"by_worker.*orphans") as caught:
        log.state.validate()
    assert caught.value.details == {"seq": log.state.seq}


def test_a_change_past_the_fold_is_seen_by_validate() -> None:
    log = Log()
    log.open(W1)
    log.append(put())
    log.state.hash()
    log.state.sessions[W1].pid += 1
    with pytest.raises(CorruptError, match="hash"):
        log.state.validate()


def test_states_that_differ_in_one_value_differ_in_hash() -> None:
    hashes = set()
    for event in (put(), put(key="k"), replace(put(), nbytes=65), replace(put(), tenant="other"), bound()):
        log = Log()
        log.open(W1)
        log.append(event)
        hashes.add(log.state.hash())
    assert len(hashes) == 5


def test_a_message_on_anothers_subject_moves_that_aggregates_head_only() -> None:
    """The server compares on the subject: a head moved elsewhere would make every later append there fail for ever."""
    log = Log()
    log.open(W1)
    log.append(put())
    about_key, about_artifact = aggregate_of(bound()), aggregate_of(put())
    before = log.state.head(about_artifact)
    verdict = log.append(put(), subject=log.state.subjects.fact(about_key, W1))
    assert (verdict.kept, verdict.why) == (False, "subject")
    assert log.state.head(about_key) == log.state.seq
    assert log.state.head(about_artifact) == before


def test_who_speaks_in_anothers_name_is_not_heard() -> None:
    log = Log()
    log.open(W1)
    log.open(W2)
    message = Recorded(
        log.state.seq + 1,
        0,
        log.state.subjects.fact(aggregate_of(put()), W2),
        replace(log.messages[0].headers, author=W1, incarnation=FIRST, expected=0),
        put(),
    )
    assert log.state.apply(message).why == "subject"


def test_the_random_histories_meet_every_fact_and_every_verdict() -> None:
    """A generator that never gets anywhere proves nothing: each fact must be kept, each reason given, somewhere."""
    kept, reasons = set(), set()

    @settings(max_examples=400, derandomize=True, database=None)
    @given(histories)
    def look(log: Log) -> None:
        state = Directory()
        for message in log.messages:
            verdict = state.apply(message)
            if verdict.kept:
                kept.add(type(message.event))
            reasons.add(verdict.why)

    look()
    assert kept == set(EVENT_TYPES)
    words = {
        "fenced",
        "sequence",
        "conflict",
        "destroyed",
        "missing",
        "held",
        "duplicate",
        "unknown",
        "subject",
        "fold",
    }
    assert reasons == words | {""}
