"""What `doctor` makes of a worker's figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tensorbus.cli._verdict import State
from tensorbus.cli._worker_checks import _pinned, _stores
from tensorbus.config import Settings

GIB = 1 << 30


def test_pins_are_told_of_once_they_keep_more_than_half_of_the_memory() -> None:
    pool = {"budget_bytes": 8 * GIB}
    few = {"leases": 1, "artifacts": 1, "pinned_bytes": 4 * GIB}
    assert _pinned({"pool": pool, "pins": few}) == ""
    text = _pinned({"pool": pool, "pins": {**few, "leases": 2, "pinned_bytes": 5 * GIB}})
    assert text == "2 pins keep 5.0 GiB of its 8.0 GiB of memory, which no put can have"
    assert _pinned({"pool": None, "pins": None}) == _pinned({}) == ""


def test_a_broken_store_is_wrong_and_that_nobody_keeps_the_log_is_said_besides(tmp_path: Path) -> None:
    broken = {"trouble": "there is no room", "keeps_log": False, "keeper": "s2"}
    sound = {"trouble": "", "keeps_log": True, "keeper": "s2"}
    settings = Settings(home=tmp_path)

    def told(stores: dict[str, dict[str, Any]]) -> list[tuple[State, str]]:
        return [(one.state, one.found) for one in _stores(settings, stores, [])]

    assert told({"s1": broken, "s2": sound}) == [
        (State.WRONG, "store s1: there is no room"),
        (State.OK, "store s2 follows the log and keeps it"),
    ]
    assert told({"s1": {**broken, "keeper": ""}})[1][0] == State.WARNING
    assert "nothing is archived" in told({"s1": {**broken, "keeper": ""}})[1][1]
    assert told({"s1": {"trouble": ""}}) == [(State.OK, "store s1 follows the log")], "an older one says less"
