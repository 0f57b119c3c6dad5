"""The waves of faults that come over a world."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from tensorbus.testing._fault_plan import Wave
from tensorbus.testing._world import BUS, World


async def disturb(world: World, nodes: Sequence[str], *, for_s: float) -> None:
    """Let the plan's partitions, pauses and crashes come over the world for some virtual seconds, then heal it.

    Counts what it did under ``fault.partition``, ``fault.pause``, ``fault.crash`` and ``fault.bus_pause``.
    """
    plan, ends_s = world.plan, world.loop.time() + for_s
    async with asyncio.TaskGroup() as group:
        for name, wave, targets, begin, end in (
            ("partition", plan.partition, nodes, world.partition, world.mend),
            ("pause", plan.pause, nodes, world.pause, world.resume),
            ("bus_pause", plan.bus_pause, (BUS,), world.pause, world.resume),
            ("crash", plan.crash, nodes, world.crash, _restart_if_down(world)),
        ):
            if wave.every_s:
                waves = _waves(world, name, wave, targets=targets, begin=begin, end=end, ends_s=ends_s)
                group.create_task(waves, name=f"faults/{name}")
        await asyncio.sleep(for_s)
    world.heal()


def _restart_if_down(world: World) -> Callable[[str], None]:
    def restart(name: str) -> None:
        if not world.node(name).is_up:
            world.restart(name)

    return restart


async def _waves(
    world: World,
    name: str,
    wave: Wave,
    *,
    targets: Sequence[str],
    begin: Callable[[str], None],
    end: Callable[[str], None],
    ends_s: float,
) -> None:
    rng = world.rng(f"waves/{name}")
    while True:
        gap_s, length_s = rng.expovariate(1 / wave.every_s), rng.expovariate(1 / wave.length_s)
        if world.loop.time() + gap_s >= ends_s:
            return
        await asyncio.sleep(gap_s)
        target = targets[rng.randrange(len(targets))]
        world.cover(f"fault.{name}")
        begin(target)
        await asyncio.sleep(min(length_s, ends_s - world.loop.time()))
        end(target)
