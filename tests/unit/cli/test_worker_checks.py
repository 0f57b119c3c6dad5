"""What `doctor` makes of a worker's figures."""

from __future__ import annotations

from tensorbus.cli._worker_checks import _pinned

GIB = 1 << 30


def test_pins_are_told_of_once_they_keep_more_than_half_of_the_memory() -> None:
    pool = {"budget_bytes": 8 * GIB}
    few = {"leases": 1, "artifacts": 1, "pinned_bytes": 4 * GIB}
    assert _pinned({"pool": pool, "pins": few}) == ""
    text = _pinned({"pool": pool, "pins": {**few, "leases": 2, "pinned_bytes": 5 * GIB}})
    assert text == "2 pins keep 5.0 GiB of its 8.0 GiB of memory, which no put can have"
    assert _pinned({"pool": None, "pins": None}) == _pinned({}) == ""
