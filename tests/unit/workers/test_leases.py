"""Callers' leases: what begins, counts and ends them, and what a reader is refused from that moment on."""

from __future__ import annotations

import asyncio

import pytest

from tensorbus.bus import MemoryCluster
from tensorbus.errors import NotFoundError
from tensorbus.events import DestroyReason, LeasePurpose
from tensorbus.ids import ArtifactId, LeaseId
from tensorbus.workers._callers import Caller
from tests.unit.workers.rig import TENANT, Rig, caller, rig, soon, until

A = b"a" * 5000


async def register(worker: Rig, who: Caller, data: bytes = A, *, lease_s: float = 60.0) -> tuple[ArtifactId, LeaseId]:
    incoming = worker.incoming(data, lease_s=lease_s)
    assert incoming.lease is not None
    taken = await worker.puts.take(incoming, deadline=soon())
    worker.leases.began(
        incoming.lease.id, tenant=TENANT, artifact=taken.artifact, purpose=LeasePurpose.REGISTER, ttl_s=lease_s
    )
    who.leases[incoming.lease.id] = None
    return taken.artifact, incoming.lease.id


def reason(worker: Rig, artifact: ArtifactId) -> DestroyReason | None:
    return worker.core.state.artifacts[TENANT, artifact].reason


async def test_a_lease_that_is_not_renewed_runs_out_and_its_artifact_and_memory_go() -> None:
    async with rig(MemoryCluster()) as worker:
        worker.core.spawn(worker.leases.expire(), name="expire")
        artifact, _ = await register(worker, caller(), lease_s=0.1)
        assert worker.busy_bytes
        await until(lambda: reason(worker, artifact) is DestroyReason.LEASE_ENDED, "the end of the artifact")
        assert worker.busy_bytes == 0
        assert len(worker.leases) == 0


async def test_a_lease_that_is_renewed_lives_on() -> None:
    async with rig(MemoryCluster()) as worker:
        worker.core.spawn(worker.leases.expire(), name="expire")
        who = caller()
        artifact, lease = await register(worker, who, lease_s=0.3)
        for _ in range(20):
            await asyncio.sleep(0.05)
            assert worker.leases.renew(who, [lease]) == []
        assert reason(worker, artifact) is None
        await until(lambda: reason(worker, artifact) is DestroyReason.LEASE_ENDED, "the end of the artifact")
        assert worker.leases.renew(who, [lease, "other"]) == [lease, "other"]


async def test_reads_are_refused_at_once_when_leases_run_out_while_the_bus_stands_still() -> None:
    cluster = MemoryCluster()
    async with rig(cluster) as worker:
        worker.core.spawn(worker.leases.expire(), name="expire")
        made = [await register(worker, caller(), bytes([n]) * 10, lease_s=0.1 + n / 20) for n in range(4)]
        cluster.pause()
        await until(lambda: not any(worker.store.get(TENANT, artifact) for artifact, _ in made), "no bytes to read")
        assert all(reason(worker, artifact) is None for artifact, _ in made)
        cluster.resume()
        for artifact, _ in made:
            await until(lambda artifact=artifact: reason(worker, artifact) is DestroyReason.LEASE_ENDED, "the facts")


async def test_a_renewal_tells_the_truth_while_another_lease_runs_out() -> None:
    cluster = MemoryCluster()
    async with rig(cluster) as worker:
        who = caller()
        first, _ = await register(worker, who, b"1", lease_s=0.05)
        second, lease = await register(worker, who, b"2", lease_s=0.05)
        await asyncio.sleep(0.06)
        cluster.pause()
        worker.core.spawn(worker.leases.expire(), name="expire")
        await until(lambda: worker.store.get(TENANT, first) is None, "the first's end")
        lives = worker.leases.renew(who, [lease]) == []
        cluster.resume()
        await until(lambda: reason(worker, first) is DestroyReason.LEASE_ENDED, "the fact")
        assert (worker.store.get(TENANT, second) is not None) == lives


async def test_a_lease_is_released_once() -> None:
    async with rig(MemoryCluster()) as worker:
        who = caller()
        artifact, lease = await register(worker, who)
        position = await worker.leases.release(who, lease, deadline=soon())
        assert position == worker.core.state.artifacts[TENANT, artifact].destroyed
        with pytest.raises(NotFoundError, match="released, ran out"):
            await worker.leases.release(who, lease, deadline=soon())


async def test_two_releases_at_once_say_one_end() -> None:
    cluster = MemoryCluster()
    async with rig(cluster) as worker:
        who = caller()
        _, lease = await register(worker, who)
        before = cluster.log.last_seq
        ends = [worker.leases.release(who, lease, deadline=soon()) for _ in range(2)]
        outcomes = await asyncio.gather(*ends, return_exceptions=True)
        assert sorted(type(each).__name__ for each in outcomes) == ["NotFoundError", "int"]
        assert cluster.log.last_seq == before + 2  # the lease's end and the artifact's


async def test_memory_of_a_connection_that_is_gone_is_served_no_longer_and_the_facts_follow() -> None:
    cluster = MemoryCluster()
    async with rig(cluster) as worker:
        gone, other = caller("s1"), caller("s2")
        mine, _ = await register(worker, gone, b"1")
        theirs, _ = await register(worker, other, b"2")
        worker.leases.gone(gone)
        assert worker.store.get(TENANT, mine) is None  # from this moment, whatever the bus does
        await until(lambda: reason(worker, mine) is DestroyReason.LEASE_ENDED, "the facts")
        assert reason(worker, theirs) is None
        worker.leases.gone(gone)  # a second word of it changes nothing


async def test_a_pin_without_a_ttl_ends_with_its_connection() -> None:
    async with rig(MemoryCluster()) as worker:
        taken = await worker.puts.take(worker.incoming(A), deadline=soon())
        who = caller()
        await worker.leases.pin(who, taken.artifact, ttl_s=None, deadline=soon())
        record = worker.core.state.artifacts[TENANT, taken.artifact]
        worker.leases.gone(who)
        await until(lambda: not record.leases, "the pin's end")
        assert record.live
        assert worker.bytes_of(taken.artifact) == A


async def test_a_pin_with_a_ttl_outlives_its_connection_and_ends_once() -> None:
    async with rig(MemoryCluster()) as worker:
        worker.core.spawn(worker.leases.expire(), name="expire")
        who = caller()
        taken = await worker.puts.take(worker.incoming(A), deadline=soon())
        lease, position = await worker.leases.pin(who, taken.artifact, ttl_s=600, deadline=soon())
        assert worker.core.state.seq >= position
        worker.leases.gone(who)
        await asyncio.sleep(0.05)
        record = worker.core.state.artifacts[TENANT, taken.artifact]
        assert list(record.leases) == [lease]
        assert worker.leases.renew(who, [lease]) == []
        await worker.leases.release(caller("s9"), lease, deadline=soon())
        assert not record.leases
        assert record.live
        assert worker.bytes_of(taken.artifact) == A
        with pytest.raises(NotFoundError):
            await worker.leases.release(who, lease, deadline=soon())


async def test_a_pin_with_a_ttl_runs_out_and_leaves_the_artifact() -> None:
    async with rig(MemoryCluster()) as worker:
        worker.core.spawn(worker.leases.expire(), name="expire")
        taken = await worker.puts.take(worker.incoming(A), deadline=soon())
        await worker.leases.pin(caller(), taken.artifact, ttl_s=0.05, deadline=soon())
        record = worker.core.state.artifacts[TENANT, taken.artifact]
        await until(lambda: not record.leases, "the pin's end")
        assert record.live
        assert worker.bytes_of(taken.artifact) == A


async def test_leases_of_another_tenant_are_unknown() -> None:
    async with rig(MemoryCluster()) as worker:
        who, stranger = caller(), caller("s2", tenant="rival")
        _, lease = await register(worker, who)
        assert worker.leases.renew(stranger, [lease]) == [lease]
        with pytest.raises(NotFoundError):
            await worker.leases.release(stranger, lease, deadline=soon())


async def test_destroying_a_registered_artifact_ends_its_lease_without_another_word() -> None:
    cluster = MemoryCluster()
    async with rig(cluster) as worker:
        who = caller()
        artifact, lease = await register(worker, who)
        born = worker.core.state.artifacts[TENANT, artifact].born
        await worker.puts.abandon(TENANT, artifact, born=born, principal="s1")
        assert worker.leases.renew(who, [lease]) == [lease]
        before = cluster.log.last_seq
        worker.leases.gone(who)
        await asyncio.sleep(0.05)
        assert cluster.log.last_seq == before
