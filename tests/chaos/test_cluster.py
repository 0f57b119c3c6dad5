"""Three servers: one may die, stand still or lose its disk, and all may pause. Nothing acknowledged is lost."""

from __future__ import annotations

import asyncio
import random
from contextlib import AsyncExitStack

import pytest

from tests.chaos.conftest import CLUSTER_TTL_S, Trio, bodies
from tests.chaos.load import Load, in_step
from tests.integration.workers.raw import Raw
from tests.sizes import SIZES

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(SIZES.timeout_s)]
NAMES = ["gate", "w1", "w2"]
LOG = "TB"


async def started(trio: Trio, stack: AsyncExitStack) -> tuple[Raw, list[Raw]]:
    """Two workers and a gateway, and who watches."""
    gate = trio.worker("gateway", id="gate")
    workers = [trio.worker(id=f"w{n}", host_id=f"h{n}") for n in (1, 2)]
    watching, *raws = [await stack.enter_async_context(await Raw.unix(each.socket)) for each in (gate, *workers)]
    return watching, raws


async def settled(watching: Raw, raws: list[Raw], load: Load, *, since_s: float) -> None:
    """Nothing is lost, nobody's session has ended although a TTL went by, and all know the same."""
    left_s = since_s + CLUSTER_TTL_S * 1.2 - asyncio.get_running_loop().time()
    await asyncio.sleep(max(left_s, 0.0))
    await in_step([watching, *raws])
    for raw in raws:
        await load.check(raw)
    assert await bodies(watching, "SessionEnded") == []
    assert await watching.live_workers() == NAMES


async def kill_the_leader(trio: Trio, load: Load) -> None:
    leader = await asyncio.to_thread(trio.cluster.wait_leader, LOG)
    await asyncio.to_thread(trio.cluster.kill, leader)
    await load.more(20)
    await asyncio.to_thread(trio.cluster.start, leader)
    await asyncio.to_thread(trio.cluster.wait_healthy)


async def wipe_a_follower(trio: Trio, load: Load) -> None:
    """Once it is filled again, what it has must be enough: the leader goes."""
    leader = await asyncio.to_thread(trio.cluster.wait_leader, LOG)
    follower = (leader + 1) % len(trio.cluster.servers)
    await asyncio.to_thread(trio.cluster.wipe, follower)
    await load.more(20)
    await asyncio.to_thread(trio.cluster.start, follower)
    await asyncio.to_thread(trio.cluster.wait_healthy)
    await kill_the_leader(trio, load)


async def pause_all(trio: Trio, load: Load) -> None:
    servers = range(len(trio.cluster.servers))
    for number in servers:
        await asyncio.to_thread(trio.cluster.pause, number)
    before = load.puts
    await asyncio.sleep(CLUSTER_TTL_S * 1.2)
    assert load.puts <= before + 2 * len(load.raws), "a put was acknowledged by nobody"
    for number in servers:
        trio.cluster.resume(number)
    await load.more(20)


async def test_whatever_becomes_of_the_servers_nothing_acknowledged_is_lost_and_nobody_ended(trio: Trio) -> None:
    async with AsyncExitStack() as stack:
        watching, raws = await started(trio, stack)
        load = Load(raws)
        async with load.running():
            for seed in range(SIZES.cluster_rounds):
                hurts = [kill_the_leader, wipe_a_follower, pause_all]
                random.Random(seed).shuffle(hurts)
                for hurt in hurts:
                    await load.more(20)
                    await hurt(trio, load)
            since_s = asyncio.get_running_loop().time()
        await settled(watching, raws, load, since_s=since_s)
