"""A log that was recorded once is read for ever, and folds to what it folded to."""

from __future__ import annotations

import json

import pytest

from tensorbus.events import EVENT_TYPES, UnknownEvent
from tensorbus.lifecycle import Directory
from tests.golden.logs import make


@pytest.mark.parametrize("name", make.names())
def test_a_recorded_log_folds_to_what_it_folded_to(name: str) -> None:
    state = make.fold(name)
    recorded = json.loads((make.HERE / f"{name}.json").read_text("utf-8"))
    assert json.loads(json.dumps(make.outcome(state))) == recorded
    state.validate()


def test_every_fact_is_in_some_recorded_log() -> None:
    """A new fact needs a new log: ``python -m tests.golden.logs.make v2``."""
    seen = {type(message.event) for name in make.names() for message in make.read(name)}
    assert seen - {UnknownEvent} == set(EVENT_TYPES)


def test_the_first_log_has_kept_and_dropped_ones_of_every_kind_of_refusal() -> None:
    state = Directory()
    whys = {state.apply(message).why for message in make.read("v1")}
    assert whys == {"", "sequence", "conflict", "held", "destroyed", "missing", "duplicate", "subject", "fenced"}


def test_a_recorded_log_is_never_written_over() -> None:
    before = (make.HERE / "v1.jsonl").read_bytes()
    with pytest.raises(FileExistsError):
        make.write_new("v1")
    assert (make.HERE / "v1.jsonl").read_bytes() == before
