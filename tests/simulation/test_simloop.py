"""The simulator itself: virtual time, one seed one run, planted bugs found, nodes that crash and stand still."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tensorbus.clock import NS_PER_S, Deadline
from tensorbus.errors import DeadlineExceededError, UnavailableError
from tensorbus.testing import (
    DeadlockError,
    FaultPlan,
    InvariantError,
    LivelockError,
    Node,
    Report,
    SimLoop,
    World,
    disturb,
    run,
    search,
    sweep,
)

ROOT = Path(__file__).parents[2]
Scenario = Callable[[World], Coroutine[Any, Any, None]]


def passed(scenario: Scenario, seed: int = 1, **options: Any) -> Report:
    return run(scenario, seed, **options).check()


async def busy(world: World) -> None:
    """Everything that could differ between processes: task groups, sets of tasks, threads, timeouts, cancellation."""

    async def worker(name: str, queue: asyncio.Queue[int]) -> None:
        while True:
            item = await queue.get()
            await asyncio.sleep(world_rng.random())
            world.note(name, await asyncio.to_thread(str, item))

    world_rng = world.rng("work")
    queue: asyncio.Queue[int] = asyncio.Queue(maxsize=4)
    for name in ("a", "b", "c"):
        world.node(name).spawn(worker(name, queue), name="worker")
    for item in range(100):
        await queue.put(item)
    tasks = {asyncio.create_task(asyncio.sleep(world_rng.random()), name=f"t{n}") for n in range(20)}
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    world.note("first", *(task.get_name() for task in done))
    for task in tasks:
        task.cancel()
    with suppress(ExceptionGroup):
        async with asyncio.TaskGroup() as group:
            for _ in range(10):
                group.create_task(asyncio.sleep(100))
            raise ValueError
    await disturb(world, ["a", "b", "c"], for_s=60.0)


async def racing_counter(world: World) -> None:
    """The planted bug: the second read-change-write begins in time to see the first only in asyncio's own order."""
    counter = 0

    async def increment(after_hops: int) -> None:
        nonlocal counter
        for _ in range(after_hops):
            await asyncio.sleep(0)
        seen = counter
        await asyncio.sleep(0)
        counter = seen + 1

    async with asyncio.TaskGroup() as group:
        group.create_task(increment(0))
        group.create_task(increment(4))
    assert counter == 2, "an increment was lost"


# ---------------------------------------------------------------------------------------------------------------- loop


def test_twenty_thousand_virtual_seconds_pass_quickly() -> None:
    async def scenario(world: World) -> None:
        async def beat() -> None:
            while True:
                await asyncio.sleep(5)
                world.cover("beat")

        for n in range(3):
            world.node(f"n{n}").spawn(beat(), name="beat")
        await asyncio.sleep(20_000)

    report = passed(scenario)
    assert report.virtual_s == 20_000
    assert report.covered["beat"] == pytest.approx(12_000, abs=3)


def test_the_loop_serves_asyncio_by_itself() -> None:
    async def main() -> float:
        async with asyncio.timeout(10):
            await asyncio.sleep(3)
        assert await asyncio.to_thread(sum, [1, 2, 3]) == 6
        return asyncio.get_running_loop().time()

    with asyncio.Runner(loop_factory=lambda: SimLoop(7)) as runner:
        assert runner.run(main()) == 3


def test_a_deadline_counts_virtual_time() -> None:
    async def scenario(world: World) -> None:
        with pytest.raises(DeadlineExceededError):
            async with Deadline(3600.0).scope():
                await asyncio.Event().wait()
        assert world.loop.time() == 3600

    passed(scenario)


def test_a_function_in_a_thread_raises_where_it_is_awaited() -> None:
    async def scenario(_world: World) -> None:
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(lambda: 1 // 0)

    passed(scenario)


def test_waiting_for_nothing_is_a_deadlock_that_names_the_waiting() -> None:
    async def scenario(world: World) -> None:
        world.node("a").spawn(asyncio.Event().wait(), name="reader")
        world.pause("a")
        await asyncio.Event().wait()

    error = run(scenario, 1).error
    assert isinstance(error, DeadlockError)
    assert "scenario" in str(error)
    assert "a#1(paused)/a#1/reader" in str(error)


def test_spinning_without_time_is_a_livelock() -> None:
    async def scenario(_world: World) -> None:
        while True:
            await asyncio.sleep(0)

    assert isinstance(run(scenario, 1).error, LivelockError)


# --------------------------------------------------------------------------------------------------------- determinism


@pytest.mark.parametrize("seed", [3])
def test_one_seed_is_one_run_in_every_process(seed: int) -> None:
    script = (
        "import sys; sys.path.insert(0, 'tests/simulation'); import test_simloop as t\n"
        f"print(t.run(t.busy, {seed}, plan=t.FaultPlan.drawn({seed})).check().digest)"
    )

    def digest(hash_seed: str) -> str:
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        command = [sys.executable, "-c", script]
        return subprocess.run(
            command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True, timeout=60
        ).stdout

    here = run(busy, seed, plan=FaultPlan.drawn(seed)).check().digest
    assert {digest("0"), digest("1"), digest("2")} == {f"{here}\n"}


def test_another_seed_is_another_run() -> None:
    assert len({passed(busy, seed).digest for seed in range(5)}) == 5


# ------------------------------------------------------------------------------------------------------------ searching


def test_a_planted_race_is_found_by_shuffling_and_never_in_asyncios_order() -> None:
    found = search(racing_counter, 300)
    assert found is not None
    assert "an increment was lost" in str(found)
    assert run(racing_counter, found.seed).digest == found.digest
    assert search(racing_counter, 300, shuffle=False) is None


def test_a_failure_says_how_to_repeat_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found = search(racing_counter, 300)
    assert found is not None
    assert f"TENSORBUS_SIM_SEED={found.seed} python -m pytest" in found.rerun
    monkeypatch.setenv("TENSORBUS_SIM_SEED", str(found.seed))
    assert sweep(racing_counter, 300).runs == 1

    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    command = run(racing_counter, found.seed).rerun
    output = subprocess.run(
        command.replace("python", sys.executable, 1), shell=True, cwd=ROOT, capture_output=True, text=True, timeout=60
    ).stdout
    assert found.digest in output
    assert "an increment was lost" in output


def test_a_suite_demands_what_it_must_reach() -> None:
    async def scenario(world: World) -> None:
        if world.rng("coin").random() < 0.5:
            world.cover("heads")

    swept = sweep(scenario, 20)
    swept.check(covers=["heads"])
    assert swept.missing(["heads", "fenced"]) == ("fenced",)
    with pytest.raises(InvariantError, match="fenced"):
        swept.check(covers=["fenced"])
    assert passed(scenario).missing(["fenced"]) == ("fenced",)


# ----------------------------------------------------------------------------------------------------------- invariants


def test_what_must_always_hold_is_checked_between_steps() -> None:
    async def scenario(world: World) -> None:
        level = 0
        world.always("never above 1", lambda: level <= 1)
        level = 2
        await asyncio.sleep(0)
        level = 0

    with pytest.raises(InvariantError, match="'never above 1' does not hold"):
        run(scenario, 1).check()


def test_what_must_happen_is_awaited_and_its_time_is_limited() -> None:
    async def in_time(world: World) -> None:
        world.loop.call_later(4, world.cover, "late")
        world.eventually("covered", lambda: world.covered["late"] > 0, within_s=5)

    async def too_late(world: World) -> None:
        await world.eventually("never", lambda: False, within_s=5)

    assert passed(in_time).virtual_s == 4
    assert "'never' did not come about within 5 s" in str(run(too_late, 1))


def test_an_error_in_a_node_fails_the_run_unless_it_was_expected() -> None:
    async def broken() -> None:
        raise ValueError("planted")

    async def unexpected(world: World) -> None:
        world.node("a").spawn(broken(), name="broken")
        await asyncio.sleep(1)

    async def expected(world: World) -> None:
        with pytest.raises(ValueError, match="planted"):
            await world.node("a").spawn(broken(), name="broken", may_raise=(ValueError,))

    assert isinstance(run(unexpected, 1).error, ValueError)
    passed(expected)


def test_an_error_that_nobody_awaits_fails_the_run() -> None:
    async def scenario(_world: World) -> None:
        asyncio.get_running_loop().call_soon(lambda: 1 // 0)
        await asyncio.sleep(1)

    assert isinstance(run(scenario, 1).error, ZeroDivisionError)


# ---------------------------------------------------------------------------------------------------------------- nodes


def test_a_paused_node_stands_still_while_time_goes_on() -> None:
    async def scenario(world: World) -> None:
        ticks: list[float] = []

        async def tick() -> None:
            while True:
                await asyncio.sleep(1)
                ticks.append(world.loop.time())

        world.node("a").spawn(tick(), name="tick")
        await asyncio.sleep(2.5)
        world.pause("a")
        await asyncio.sleep(10)
        assert ticks == [1, 2]
        world.resume("a")
        await asyncio.sleep(1.5)
        assert ticks == [1, 2, 12.5, 13.5]  # the timer that ran out meanwhile fires at once, and once

    passed(scenario)


def test_a_pause_holds_back_what_others_send() -> None:
    async def scenario(world: World) -> None:
        inbox: asyncio.Queue[str] = asyncio.Queue(maxsize=8)
        seen: list[str] = []

        async def receive() -> None:
            while True:
                seen.append(await inbox.get())

        world.node("a").spawn(receive(), name="receive")
        await asyncio.sleep(1)
        world.pause("a")
        await inbox.put("hello")
        await asyncio.sleep(5)
        assert seen == []
        world.resume("a")
        await asyncio.sleep(0.1)
        assert seen == ["hello"]

    passed(scenario)


def test_a_crash_runs_no_cleanup_and_keeps_the_disk_only() -> None:
    said: list[str] = []

    async def scenario(world: World) -> None:
        async def main(node: Node) -> None:
            lives = int(str(node.disk.get("lives", 0))) + 1
            node.disk["lives"] = lives
            try:
                await asyncio.sleep(1000)
            finally:
                if not world.over:
                    said.append("goodbye")

        node = world.node("a")
        node.start(main)
        broken: list[str] = []
        node.on_crash(lambda: broken.append("peer"))
        waiting = node.spawn(asyncio.sleep(1000), name="waiting")
        await asyncio.sleep(1)
        first = node.ids.hex(4)
        world.crash("a")
        assert broken == ["peer"]
        with pytest.raises(UnavailableError):
            await waiting
        with pytest.raises(UnavailableError):
            node.spawn(asyncio.sleep(1), name="on a dead node")
        await asyncio.sleep(5000)
        world.restart("a")
        await asyncio.sleep(1)
        assert node.disk == {"lives": 2}
        assert node.ids.hex(4) != first

    passed(scenario)
    assert said == []


def test_a_crash_also_ends_children_timers_and_threads() -> None:
    async def scenario(world: World) -> None:
        ran: list[str] = []

        async def main(_node: Node) -> None:
            asyncio.get_running_loop().call_later(5, ran.append, "timer")
            async with asyncio.TaskGroup() as group:
                group.create_task(child())
                await asyncio.to_thread(lambda: None)
                world.crash("a")
                await asyncio.to_thread(ran.append, "thread")

        async def child() -> None:
            await asyncio.sleep(5)
            ran.append("child")

        world.node("a").start(main)
        await asyncio.sleep(100)
        assert ran == []

    passed(scenario)


def test_clocks_are_skewed_by_the_plan_and_go_on_through_a_pause() -> None:
    async def scenario(world: World) -> None:
        a, b = world.node("a"), world.node("b")
        assert a.clock.wall_ns() != b.clock.wall_ns()
        assert abs(a.clock.wall_ns() - b.clock.wall_ns()) <= 2 * 30 * NS_PER_S
        world.pause("a")
        await asyncio.sleep(1000)
        assert a.clock.now_ns() == pytest.approx(1000 * NS_PER_S, rel=201e-6)

    passed(scenario, plan=FaultPlan(skew_s_max=30, drift_ppm_max=200))


def test_waves_of_faults_come_and_the_world_heals() -> None:
    async def main(_node: Node) -> None:
        await asyncio.Event().wait()

    async def scenario(world: World) -> None:
        for name in ("a", "b"):
            world.node(name).start(main)
        await disturb(world, ["a", "b"], for_s=300)
        for name in ("a", "b", "bus"):
            assert world.node(name).is_up
            assert world.node(name).connected.is_set()
            assert world.node(name).life.state == "running"

    swept = sweep(scenario, 12)
    swept.check(covers=["fault.partition", "fault.pause", "fault.crash", "fault.bus_pause"])
