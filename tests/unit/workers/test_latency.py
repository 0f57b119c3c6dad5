"""Figures of a worker's heartbeats."""

from __future__ import annotations

from tensorbus.workers._latency import WINDOW, LatencyWindow


def test_before_the_first_there_is_nothing() -> None:
    assert LatencyWindow().figures() == {"count": 0, "p50_s": 0.0, "p95_s": 0.0, "max_s": 0.0}


def test_percentiles_are_values_that_occurred() -> None:
    window = LatencyWindow()
    for number in range(100, 0, -1):
        window.note(number * 1_000_000_000)
    assert window.figures() == {"count": 100, "p50_s": 50.0, "p95_s": 95.0, "max_s": 100.0}


def test_old_ones_leave_the_window_and_stay_counted() -> None:
    window = LatencyWindow()
    window.note(10**12)
    for _ in range(WINDOW):
        window.note(10**9)
    assert window.figures() == {"count": WINDOW + 1, "p50_s": 1.0, "p95_s": 1.0, "max_s": 1.0}
