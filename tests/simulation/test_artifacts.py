"""Bytes and their facts: nothing acknowledged is lost while somebody holds it, and memory is what the log says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from tensorbus.events import ArtifactDestroyed, DestroyReason
from tensorbus.lifecycle import Artifact
from tensorbus.testing import World, disturb, sweep
from tests.simulation.callers import CONTENTS, IDS, Promises
from tests.simulation.cluster import TTL_S, Cluster, in_memory
from tests.simulation.test_names import CALLERS, GATEWAYS, WORKERS, call, start
from tests.sizes import SIZES

Scenario = Callable[[World], Coroutine[Any, Any, None]]

DEEDS = {
    "put": 5, "put_named": 4, "put_given": 3, "register": 3, "pin": 2, "renew": 1, "release": 2,
    "read": 4, "read_leased": 3, "destroy": 3, "bind": 1, "unbind": 1, "resolve": 1,
}  # fmt: skip
FAULTS = ("loss", "lost_ack", "duplicate", "slow", "partition", "pause", "bus_pause", "crash")
SETTLE_S = 60.0


def artifacts(*, deeds: dict[str, int] = DEEDS, for_s: float = 40.0, one_sleeps: bool = False) -> Scenario:
    """Callers put, register, pin, read and destroy the same few artifacts through two workers; all faults come.

    Args:
        one_sleeps: Whether a worker stands still for longer than its TTL first, which few plans bring about in time.
    """

    async def scenario(world: World) -> None:
        cluster, promises = Cluster(world), Promises()
        with in_memory():
            start(cluster)
            call(cluster, promises, workers=WORKERS, deeds=deeds)
            if one_sleeps:
                await asyncio.sleep(5.0)
                world.pause("w0")
                await asyncio.sleep(2 * TTL_S)
                world.resume("w0")
            await disturb(world, [*WORKERS, *GATEWAYS, *CALLERS], for_s=for_s)
            for name in CALLERS:
                world.crash(name)
            await world.eventually("every worker is in step with the log", cluster.settled, within_s=SETTLE_S)
            await quiet(cluster)
            cluster.truth.check()
            check_promises(cluster, promises)

    return scenario


async def quiet(cluster: Cluster) -> None:
    """No caller is left: soon no lease is, nothing is without a replica, and each worker holds what the log says."""

    ends_s = cluster.world.loop.time() + SETTLE_S + 2 * TTL_S
    while not cluster.settled() or list(unsettled(cluster)):
        assert cluster.world.loop.time() < ends_s, f"memory is not what the log says: {list(unsettled(cluster))}"
        await asyncio.sleep(1.0)


def unsettled(cluster: Cluster) -> Iterator[str]:
    """In what the workers differ from the log, once nothing happens any more."""
    fold = cluster.truth.fold
    for record in fold.artifacts.values():
        if record.live and not record.replicas:
            yield f"{record.artifact} is an orphan"
        for lease in record.leases.values():
            if lease.ttl_ns is not None:  # one without a time limit lasts until it is released, or its worker ends
                yield f"{record.artifact} has {lease}"
    for name in WORKERS:
        if name not in cluster.running:
            yield f"{name} does not run"
            continue
        memory = cluster.memories[name]
        said = {record.artifact for record in fold.artifacts.values() if _held_by(cluster, record, name)}
        held = {one.artifact: one for one in memory.store.all()}
        if said != set(held):
            yield f"{name} holds {sorted(held)}, of which the log has {sorted(said)}"
        parts = {id(part) for one in held.values() for part in one.parts}
        for segment in memory.pool.busy.values():
            if id(segment) not in parts:
                yield f"{name} leaks segment {segment.id} ({segment.label}, {segment.state})"
        for one in held.values():
            if not one.valid or (one.artifact in IDS and _bytes(one) != CONTENTS[IDS.index(one.artifact)]):
                yield f"{name} serves wrong bytes for {one.artifact}"
        granted = {lease for r in fold.artifacts.values() for lease in r.leases.values() if lease.worker == name}
        if {lease.lease for lease in granted} != set(memory.leases._granted):
            yield f"{name} counts the leases {sorted(memory.leases._granted)}, the log {granted}"


def _held_by(cluster: Cluster, record: Artifact, name: str) -> bool:
    incarnation = cluster.running[name].incarnation
    return any((r.worker, r.incarnation) == (name, incarnation) for r in record.replicas.values())


def _bytes(held: Any) -> bytes:
    (part,) = held.parts
    return bytes(part.data)


def check_promises(cluster: Cluster, promises: Promises) -> None:
    """A put that was acknowledged ends because somebody asked for it, or with the last who held it; never by itself."""
    for fact in cluster.truth.kept():
        event = fact.event
        if not isinstance(event, ArtifactDestroyed):
            continue
        cluster.world.cover(f"destroyed.{event.reason}")
        if event.reason is DestroyReason.ASKED:
            assert event.artifact in promises.destroys_asked
        if event.reason is DestroyReason.ABANDONED:
            born = max(seq for seq, _ in _births(cluster, event.artifact) if seq < fact.seq)
            late = [at for name, at in promises.put if name == event.artifact and born <= at < fact.seq]
            assert not late, f"{event.artifact} was promised at {late} and abandoned at {fact.seq}"


def _births(cluster: Cluster, artifact: str) -> list[tuple[int, str | None]]:
    lived = cluster.truth.lived[artifact]
    return [entry for n, entry in enumerate(lived) if entry[1] and (n == 0 or lived[n - 1][1] is None)]


def test_bytes_hold_whatever_comes_over_workers_and_callers() -> None:
    covers = [f"fault.{name}" for name in FAULTS]
    reached = ("put", "joined", "register", "pin", "release", "read", "fetched", "unknown_outcome", "connection_lost")
    ends = [f"destroyed.{reason}" for reason in DestroyReason]
    found = sweep(artifacts(one_sleeps=True), SIZES.sim_seeds, check_every=50)
    found.check(covers=[*covers, *reached, *ends, "CallerLeaseEnded", "ReplicaAdded", "conflict", "fenced"])
