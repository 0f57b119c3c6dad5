"""The log loses its tail, or all of it, again and again, under all other faults: what a worker holds is there again."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from tensorbus.clock import Deadline
from tensorbus.errors import TensorbusError, UnavailableError
from tensorbus.model import plan_layout
from tensorbus.testing import Node, World, disturb, sweep
from tensorbus.transport import Connection
from tests.simulation.callers import TENANT, manifest_of
from tests.simulation.cluster import Cluster, in_memory
from tests.simulation.test_artifacts import quiet
from tests.simulation.test_names import CALLERS, GATEWAYS, WORKERS, start
from tests.sizes import SIZES

Scenario = Callable[[World], Coroutine[Any, Any, None]]

SETTLE_S = 90.0
CUT_MAX = 60
FAULTS = ("loss", "lost_ack", "duplicate", "slow", "partition", "pause", "bus_pause", "crash", "loss_of_log")


@dataclass(frozen=True)
class Promise:
    """A put that was acknowledged by a worker's life."""

    key: str
    artifact: str
    content: bytes
    worker: str
    incarnation: str


@dataclass
class Putter:
    """Puts bytes of its own under keys of its own, and remembers what was acknowledged."""

    cluster: Cluster
    node: Node
    promises: list[Promise] = field(default_factory=list)

    async def run(self) -> None:
        rng = self.node.world.rng(f"putter/{self.node.name}/{self.node.life.number}")
        while True:
            worker = rng.choice(WORKERS)
            try:
                channel = self.cluster.connect(self.node, worker)
                async with Connection(channel) as connection:
                    await self._call(connection, "hello", {"protocol": 1, "tenant": TENANT, "pid": 7, "version": "x"})
                    for _ in range(rng.randrange(1, 5)):
                        await self._put(connection, worker)
                        await asyncio.sleep(rng.choice((0.0, 0.2, 1.5)))
            except TensorbusError:
                self.node.world.cover("refused")
            await asyncio.sleep(rng.uniform(0.2, 2.0))

    async def _put(self, connection: Connection, worker: str) -> None:
        running, memory = self.cluster.running.get(worker), self.cluster.memories.get(worker)
        if running is None or memory is None:
            raise UnavailableError(f"{worker} is down")
        name = self.node.ids.hex(6)
        content, key = b"mine " + name.encode(), f"key/{name}"
        place = await self._call(connection, "alloc", {"nbytes": len(content)})
        filling = memory.pool.busy.get((place["segment"], place["generation"]))
        if filling is None:
            return
        filling.data[:] = content
        manifest = manifest_of(content)
        args = {
            "segment": place["segment"],
            "generation": place["generation"],
            "layout": json.loads(plan_layout(manifest).to_json()),
            "key": key,
        }
        reply = await self._call(connection, "commit", args, body=manifest.to_json().encode())
        promise = Promise(key, reply["artifact"]["artifact"], content, worker, running.incarnation)
        self.promises.append(promise)
        self.node.world.cover("put")

    async def _call(self, connection: Connection, op: str, args: dict[str, Any], body: bytes = b"") -> dict[str, Any]:
        reply = await connection.call(op, args, body=body, deadline=Deadline(20.0, what=op))
        reply.fds.take()
        return reply.data


def losses(*, for_s: float = 40.0, whole: bool = True) -> Scenario:
    """Callers put; from time to time the log comes back with an older copy of itself, or made anew.

    Args:
        whole: Whether all of the log may be lost.
    """

    async def scenario(world: World) -> None:
        cluster, promises = Cluster(world), list[Promise]()

        async def main(node: Node) -> None:
            await Putter(cluster, node, promises).run()

        with in_memory():
            start(cluster)
            for name in CALLERS[:2]:
                world.node(name).start(main)
            async with asyncio.TaskGroup() as group:
                group.create_task(lose(cluster, for_s=for_s - 5, whole=whole), name="losses")
                group.create_task(disturb(world, [*WORKERS, *GATEWAYS, *CALLERS], for_s=for_s), name="faults")
            for name in CALLERS[:2]:
                world.crash(name)
            await world.eventually("every worker is in step with the log", cluster.settled, within_s=SETTLE_S)
            await world.eventually("all has been said again", lambda: said_again(cluster), within_s=SETTLE_S)
            await quiet(cluster)
            cluster.truth.check()
            check_promises(cluster, promises)

    return scenario


async def lose(cluster: Cluster, *, for_s: float, whole: bool) -> None:
    """Set the log back a few times."""
    world, log = cluster.world, cluster.truth
    rng = world.rng("losses of the log")
    ends_s = world.loop.time() + for_s
    while True:
        wait_s = rng.uniform(2.0, 20.0)
        if world.loop.time() + wait_s > ends_s:
            return
        await asyncio.sleep(wait_s)
        if whole and rng.random() < 0.3:
            log.lose()
        else:
            log.truncate(max(log.log.last_seq - rng.randrange(CUT_MAX), 1_700_000_000_000_000 - 1))


def said_again(cluster: Cluster) -> bool:
    return all(not running.unsettled for running in cluster.running.values())


def check_promises(cluster: Cluster, promises: list[Promise]) -> None:
    """What was acknowledged by a worker that lived to the end is there, by its key, with its bytes."""
    fold = cluster.truth.fold
    for promise in promises:
        running = cluster.running[promise.worker]
        if running.incarnation != promise.incarnation:
            continue
        cluster.world.cover("kept")
        record = fold.artifacts.get((TENANT, promise.artifact))  # type: ignore[call-overload]  # ids are texts here
        assert record is not None, f"{promise} is not on the log"
        assert record.live, f"{promise} ended: {record.reason}"
        held = cluster.memories[promise.worker].store.get(TENANT, record.artifact)
        assert held is not None, f"{promise} is not held"
        assert bytes(held.parts[0].view) == promise.content, f"other bytes for {promise}"
        bound = fold.keys.get((TENANT, promise.key))
        assert bound is not None, f"{promise} has no key"
        assert bound.artifact == promise.artifact, f"{promise} has another key: {bound}"


def test_what_is_held_outlives_losses_of_the_log() -> None:
    covers = [f"fault.{name}" for name in FAULTS]
    found = sweep(losses(), SIZES.sim_seeds, check_every=50)
    found.check(covers=[*covers, "put", "kept", "LogTruncated"])
