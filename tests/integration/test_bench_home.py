"""The system that benchmarks measure is real, and nothing of it is left afterwards."""

from __future__ import annotations

import pytest

import tensorbus as tb
from benchmarks._home import running_home
from tensorbus.testing._processes import is_alive, wait_until

pytestmark = pytest.mark.integration


def test_a_home_has_the_workers_it_was_asked_for_and_ends_with_them() -> None:
    with running_home(workers=2, heartbeat_s=0.1) as home:
        with tb.connect(home=home.path, host_id="h1") as bus:
            found = bus.list_workers()
            wait_until(lambda: bus.stats()["heartbeat"]["count"] >= 3, what="three heartbeats")
            figures = bus.stats()["heartbeat"]
        assert home.nats_url.startswith("nats://127.0.0.1:")
        assert sorted(worker.host for worker in found if worker.live) == ["h0", "h0", "h1"]
        assert 0 < figures["p50_s"] <= figures["p95_s"] <= figures["max_s"]
    assert not any(is_alive(worker.pid) for worker in found)
    assert not home.path.exists()
