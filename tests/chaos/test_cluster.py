"""Three servers: one may die, stand still or lose its disk, and all may pause. Nothing acknowledged is lost."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing

import pytest

from tensorbus.bus import Appended, Bus, Message, StreamLimits, append, provision
from tensorbus.bus._requests import RESEND_S
from tensorbus.clock import NS_PER_S, Deadline
from tensorbus.events import Aggregate, LogPurged
from tensorbus.feeds import decode_one
from tensorbus.testing._bus_contract import headers, key_bound
from tests.chaos.conftest import CLUSTER_TTL_S, WAIT_S, Trio, bodies
from tests.chaos.load import Load, in_step
from tests.chaos.stores import BUSY, bus_of, store_of, until_store, whole
from tests.integration.workers.raw import Raw
from tests.sizes import SIZES

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(SIZES.timeout_s)]
LOG = "TB"


class Scene:
    """Two workers in use, a store that is always busy, and the servers under them."""

    def __init__(self, trio: Trio, load: Load, keeping: Raw, bus: Bus, rng: random.Random) -> None:
        self.trio, self.load, self.keeping, self.bus, self.rng = trio, load, keeping, bus, rng

    # -- what becomes of the servers -----------------------------------------------------------------------------------

    async def leader_killed_during_puts(self) -> None:
        await self._without(await asyncio.to_thread(self.trio.cluster.wait_leader, LOG))

    async def leader_killed_during_a_snapshot(self) -> None:
        """Its bytes come to the log, and its fact a moment later."""
        leader = await asyncio.to_thread(self.trio.cluster.wait_leader, LOG)
        async with aclosing(self._seen(f"{self.bus.subjects.prefix}.blob.*.*.s1")) as pieces:
            await anext(pieces)
        await asyncio.sleep(self.rng.uniform(0, 0.02))
        await self._without(leader)

    async def leader_killed_during_a_purge(self) -> None:
        leader = await asyncio.to_thread(self.trio.cluster.wait_leader, LOG)
        async with aclosing(self._seen(self.bus.subjects.fence(Aggregate("purge", LOG)))) as messages:
            async for message in messages:
                fact = decode_one(message).event
                if isinstance(fact, LogPurged):
                    await asyncio.sleep(fact.delay_ns / NS_PER_S + self.rng.uniform(0, 0.3))
                    break
        await self._without(leader)

    async def followers_disk_wiped(self) -> None:
        """Once it is filled again, what it has must be enough."""
        leader = await asyncio.to_thread(self.trio.cluster.wait_leader, LOG)
        follower = (leader + 1) % len(self.trio.cluster.servers)
        await asyncio.to_thread(self.trio.cluster.wipe, follower)
        await self.load.more(20)
        await asyncio.to_thread(self.trio.cluster.start, follower)
        await asyncio.to_thread(self.trio.cluster.wait_healthy)
        await self._without(leader)

    async def all_paused(self) -> None:
        servers = range(len(self.trio.cluster.servers))
        for number in servers:
            await asyncio.to_thread(self.trio.cluster.pause, number)
        before = self.load.puts
        await asyncio.sleep(CLUSTER_TTL_S * 1.2)
        assert self.load.puts <= before + 2 * len(self.load.raws), "a put was acknowledged by nobody"
        for number in servers:
            self.trio.cluster.resume(number)
        await self.load.more(20)

    async def _without(self, server: int) -> None:
        """Kill it, and start it when the others have gone on, the store too."""
        before = await store_of(self.keeping)
        await asyncio.to_thread(self.trio.cluster.kill, server)
        await self.load.more(20)
        await until_store(self.keeping, "more in the archive", archived=before["archived"] + 1, keeps_log=True)
        await asyncio.to_thread(self.trio.cluster.start, server)
        await asyncio.to_thread(self.trio.cluster.wait_healthy)

    async def _seen(self, filter_subject: str) -> AsyncGenerator[Message]:
        """The messages of a filter that come from now on."""
        after = await self.bus.last_seq(deadline=Deadline(WAIT_S))
        async with Deadline(WAIT_S, what=filter_subject).scope(), self.bus.read(filter_subject, after=after) as reader:
            async for batch in reader:
                for message in batch:
                    yield message


HURTS = (
    Scene.leader_killed_during_a_purge,
    Scene.followers_disk_wiped,
    Scene.leader_killed_during_a_snapshot,
    Scene.all_paused,
    Scene.leader_killed_during_puts,
)[: SIZES.cluster_hurts]


async def test_whatever_becomes_of_the_servers_nothing_is_lost_and_nobody_ended(trio: Trio) -> None:
    trio.configure(**BUSY)
    workers = [trio.worker(id=f"w{n}", host_id=f"h{n}") for n in (1, 2)]
    store = trio.worker("gateway,store", id="s1")
    async with AsyncExitStack() as stack:
        raws = [await stack.enter_async_context(await Raw.unix(each.socket)) for each in (*workers, store)]
        bus = await stack.enter_async_context(bus_of(trio))
        load = Load(raws[:2], kept=50, pause_s=0.1)
        async with load.running():
            await until_store(raws[2], "a purge", purged=1)
            for seed in range(SIZES.cluster_rounds):
                rng = random.Random(seed)
                scene = Scene(trio, load, raws[2], bus, rng)
                for hurt in rng.sample(HURTS, len(HURTS)):
                    await load.more(20)
                    await hurt(scene)
            before = await store_of(raws[2])
            await until_store(raws[2], "a later purge", purged=before["purged"] + 1)
        await asyncio.sleep(CLUSTER_TTL_S * 1.2)  # who was thought dead would be ended by then
        await in_step(raws)
        for raw in raws[:2]:
            await load.check(raw)
        assert await bodies(raws[2], "SessionEnded") == []
        assert await raws[2].live_workers() == ["s1", "w1", "w2"]
        await until_store(raws[2], "the rows", position=load.position)
    store.kill9()
    await whole(trio, "s1", at_least=load.position)


async def test_a_fact_whose_first_attempt_waits_for_the_followers_is_said_once(trio: Trio) -> None:
    """Its repetition meets the first one, still under way in the leader, which says so by an error of its own."""
    async with bus_of(trio) as bus:
        await provision(bus, limits=StreamLimits(replicas=3), deadline=Deadline(WAIT_S))
        await asyncio.to_thread(trio.cluster.wait_healthy)
        leader = await asyncio.to_thread(trio.cluster.wait_leader, LOG)
        followers = [number for number in range(3) if number != leader]
        for number in followers:
            await asyncio.to_thread(trio.cluster.pause, number)
        saying = asyncio.create_task(append(bus, key_bound(), headers(0), deadline=Deadline(WAIT_S)))
        await asyncio.sleep(2 * RESEND_S)
        assert not saying.done()
        for number in followers:
            trio.cluster.resume(number)
        outcome = await saying
        assert isinstance(outcome, Appended)
        assert await bus.first_from(bus.subjects.facts, outcome.seq + 1, deadline=Deadline(WAIT_S)) is None
