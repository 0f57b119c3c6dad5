"""Names and versions under many hands: what is acknowledged holds, what is refused was due, versions have no holes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

from tensorbus.events import VersionPublished
from tensorbus.testing import Node, World, disturb, sweep
from tests.simulation.callers import Caller, Promises
from tests.simulation.cluster import Cluster, in_memory
from tests.sizes import SIZES

Scenario = Callable[[World], Coroutine[Any, Any, None]]

WORKERS, GATEWAYS, CALLERS = ("w0", "w1"), ("g0",), ("c0", "c1", "c2", "c3")
DEEDS = {"put": 2, "bind": 5, "unbind": 2, "publish": 4, "destroy": 1, "resolve": 6}
FAULTS = ("loss", "lost_ack", "duplicate", "slow", "partition", "pause", "bus_pause", "crash")
SETTLE_S = 60.0


def names(*, for_s: float = 25.0) -> Scenario:
    """Callers of two workers and a gateway name the same few things at once; all faults come over all of them."""

    async def scenario(world: World) -> None:
        cluster, promises = Cluster(world), Promises()
        with in_memory():
            start(cluster)
            call(cluster, promises, workers=(*WORKERS, *GATEWAYS), deeds=DEEDS)
            await disturb(world, [*WORKERS, *GATEWAYS, *CALLERS], for_s=for_s)
            for name in CALLERS:
                world.crash(name)
            await world.eventually("every worker is in step with the log", cluster.settled, within_s=SETTLE_S)
            cluster.truth.check()
            check_versions(cluster, promises)

    return scenario


def start(cluster: Cluster) -> None:
    for name in WORKERS:
        cluster.start(name, "basic")
    for name in GATEWAYS:
        cluster.start(name, "gateway")


def call(cluster: Cluster, promises: Promises, *, workers: tuple[str, ...], deeds: dict[str, int]) -> None:
    async def main(node: Node) -> None:
        await Caller(cluster, node, promises, workers=workers, deeds=deeds).run()

    for name in CALLERS:
        cluster.world.node(name).start(main)


def check_versions(cluster: Cluster, promises: Promises) -> None:
    """What was promised as a version is that version for good, or its artifact has ended."""
    for (name, number), artifact in promises.versions.items():
        series = cluster.truth.fold.series["t", name]
        assert number <= series.last
        assert series.versions.get(number, artifact) == artifact
    facts = [fact for fact in cluster.truth.kept() if isinstance(fact.event, VersionPublished)]
    for session, count in Counter(fact.headers.principal for fact in facts).items():
        assert count <= promises.published[session], f"session {session} published more often than it asked to"


def test_names_hold_whatever_comes_over_workers_and_callers() -> None:
    covers = [f"fault.{name}" for name in FAULTS]
    reached = ("bind", "unbind", "publish", "destroy", "resolve", "conflict", "unknown_outcome", "connection_lost")
    refused = ("refused.NotFoundError", "refused.ConflictError", "dropped.destroyed")
    seeds = range(10, 10 + SIZES.sim_seeds)  # one of twenty has a fact dropped for what was destroyed meanwhile
    sweep(names(), seeds, check_every=50).check(covers=[*covers, *reached, *refused])


def test_a_caller_who_comes_while_a_fenced_worker_goes_down_does_not_hide_that_it_is_fenced() -> None:
    sweep(names(), [1248], check_every=50).check()
