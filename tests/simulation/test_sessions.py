"""Sessions and their witnesses: who is silent is ended, who is not is left alone, and who was ended knows it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from tensorbus.events import SessionEnd
from tensorbus.testing import FaultPlan, Wave, World, disturb, run, sweep
from tests.simulation.cluster import TTL_S, Cluster, in_memory
from tests.sizes import SIZES

Scenario = Callable[[World], Coroutine[Any, Any, None]]

WORKERS, GATEWAYS = ("w0", "w1", "w2"), ("g0", "g1")
FAULTS = ("loss", "lost_ack", "duplicate", "slow", "partition", "pause", "bus_pause", "crash")
SETTLE_S = 60.0
ENDS_WITHIN_S = TTL_S * 1.5 + 5
"""TTL, the witness's proof after a break of its own, its look, and the append."""


def sessions(*, for_s: float = 60.0) -> Scenario:
    """Workers and two gateways, faults over all of them, one that leaves; at the end one that never comes back."""

    async def scenario(world: World) -> None:
        cluster = Cluster(world)
        with in_memory():
            start(cluster)
            leaver = asyncio.create_task(_leave_now_and_then(cluster), name="leaver")
            await disturb(world, [*WORKERS, *GATEWAYS], for_s=for_s)
            leaver.cancel()
            await world.eventually("every worker is back, in step with the log", cluster.settled, within_s=SETTLE_S)
            await _one_dies(cluster)
            cluster.truth.check()
            if cluster.truth.ended_by(SessionEnd.EXPIRED):
                world.cover("expired")

    return scenario


def start(cluster: Cluster) -> None:
    for name in WORKERS:
        cluster.start(name, "basic")
    for name in GATEWAYS:
        cluster.start(name, "gateway")


async def _leave_now_and_then(cluster: Cluster) -> None:
    rng = cluster.world.rng("leaver")
    while True:
        await asyncio.sleep(rng.uniform(5, 30))
        stop = cluster.stops.get(WORKERS[rng.randrange(len(WORKERS))])
        if stop is not None:
            stop.set()


async def _one_dies(cluster: Cluster) -> None:
    """A worker that is gone for good is known to be, everywhere, soon."""
    victim = cluster.running["w0"]
    cluster.world.crash("w0")

    def known() -> bool:
        lives = [worker.live for name, worker in cluster.running.items() if name != "w0"]
        return not any(live.state.is_live(victim.worker, victim.incarnation) for live in lives)

    await cluster.world.eventually("a dead worker's session ends", known, within_s=ENDS_WITHIN_S)


async def only_the_bus_pauses(world: World) -> None:
    """Whatever the length of its pauses, they end no session."""
    cluster = Cluster(world)
    with in_memory():
        start(cluster)
        await disturb(world, [], for_s=120.0)
        await world.eventually("every worker is up, in step with the log", cluster.settled, within_s=SETTLE_S)
        await asyncio.sleep(3 * TTL_S)
        assert not cluster.truth.ended_by(SessionEnd.EXPIRED)
        assert len(cluster.truth.fold.sessions) == len(WORKERS + GATEWAYS)


def test_sessions_hold_whatever_comes_over_workers_and_witnesses() -> None:
    covers = [f"fault.{name}" for name in FAULTS]
    found = sweep(sessions(), SIZES.sim_seeds, check_every=50)
    found.check(covers=[*covers, "fenced", "expired", "left", "SessionOpened", "SessionEnded", "conflict"])


def bus_pauses(length_s: float) -> FaultPlan:
    wave = Wave(every_s=length_s * 2, length_s=length_s)
    return FaultPlan(bus_pause=wave, slow=0.1, duplicate=0.1, drift_ppm_max=200, skew_s_max=30)


def test_no_session_ends_because_the_bus_stood_still() -> None:
    paused = 0
    for seed in range(SIZES.sim_seeds // 2):
        length_s = TTL_S * (0.2, 0.6, 1.5, 4.0)[seed % 4]
        plan = bus_pauses(length_s)
        report = run(only_the_bus_pauses, seed, plan=plan, check_every=1000).check()
        paused += "fault.bus_pause" in report.covered
    assert paused > SIZES.sim_seeds // 2 * 0.8, "a run without a pause shows nothing"


def test_a_session_lives_while_its_own_opening_is_read_slowly() -> None:
    """Seed 34: the fact was on the log, and no heartbeat came before the own fold had seen it."""
    run(only_the_bus_pauses, 34, plan=bus_pauses(TTL_S * 1.5), check_every=1000).check()


SEEDS_THAT_FAILED = {
    126: "a reading that fell behind made a silence of 5.5 s look longer than the TTL of 6 s",
    289: "the end of a former life, heard while the next one opened its session, fenced that",
}


@pytest.mark.parametrize("seed", SEEDS_THAT_FAILED)
def test_seeds_that_failed_once_pass(seed: int) -> None:
    sweep(sessions(), [seed], check_every=50).check()


def restart_as_the_former_life_ends(back_after_s: float | None = None) -> Scenario:
    async def scenario(world: World) -> None:
        cluster = Cluster(world)
        after_s = world.rng("back").uniform(TTL_S - 2, TTL_S + 2) if back_after_s is None else back_after_s
        with in_memory():
            start(cluster)
            await world.eventually("all are up", cluster.settled, within_s=SETTLE_S)
            world.crash("w0")
            await asyncio.sleep(after_s)
            world.restart("w0")
            await asyncio.sleep(TTL_S)
            await world.eventually("w0 is back", cluster.settled, within_s=SETTLE_S)
            assert "fenced" not in world.covered
            cluster.truth.check()

    return scenario


def test_a_worker_that_comes_back_while_its_former_life_is_ended_goes_on() -> None:
    """It meets that end before, within and after the opening of its session."""
    plan = FaultPlan(delay_s=(0.1, 0.6))
    ended_first = 0
    for step in range(16):
        scenario = restart_as_the_former_life_ends(TTL_S - 4 + step * 3 / 8)
        report = run(scenario, step, plan=plan, check_every=1000).check()
        ended_first += bool(report.covered.get("SessionEnded"))
    assert 0 < ended_first < 16, "the restarts lie on both sides of the end"
