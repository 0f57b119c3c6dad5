"""Bringing an artifact here: what is gone is not found, and only what is there and out of reach is unavailable."""

from __future__ import annotations

import asyncio

import pytest

from tensorbus.bus import MemoryCluster
from tensorbus.errors import CorruptError, NotFoundError, TensorbusError, UnavailableError
from tensorbus.events import DestroyReason
from tensorbus.ids import ArtifactId
from tensorbus.lifecycle import Artifact, Session, rules
from tensorbus.workers._fetch import Fetches
from tensorbus.workers._store import Held
from tests.unit.workers.rig import TENANT, Rig, rig, soon, until


class NoSource(Fetches):
    """Every source fails, after something has happened."""

    def __init__(self, worker: Rig, error: TensorbusError) -> None:
        super().__init__(worker.core, worker.pool, worker.store, worker.puts)
        self.error = error
        self.asked: list[str] = []
        self.before = asyncio.Event()
        self.before.set()

    async def _from(self, source: Session, record: Artifact, *, alone: bool, relayed: bool) -> Held:
        self.asked.append(source.worker)
        await self.before.wait()
        raise self.error


async def known(one: Rig, two: Rig, cluster: MemoryCluster) -> ArtifactId:
    taken = await one.puts.take(one.incoming(b"a"), deadline=soon())
    await two.core.feed.reached(cluster.log.last_seq, deadline=soon())
    return taken.artifact


@pytest.mark.parametrize("error", [UnavailableError("no answer"), CorruptError("other bytes")])
async def test_an_artifact_whose_sources_all_fail_is_said_by_how_they_failed(error: TensorbusError) -> None:
    cluster = MemoryCluster()
    async with rig(cluster, "w1") as one, rig(cluster, "w2") as two:
        artifact = await known(one, two, cluster)
        fetches = NoSource(two, error)
        with pytest.raises(type(error), match="is on w1"):
            await fetches.ensure(TENANT, artifact, deadline=soon())
        assert fetches.asked == ["w1"]
        assert two.busy_bytes == 0


async def test_an_end_that_the_source_knows_of_and_this_worker_does_not_yet_is_not_found() -> None:
    cluster = MemoryCluster()
    async with rig(cluster, "w1") as one, rig(cluster, "w2") as two:
        artifact = await known(one, two, cluster)
        fetches = NoSource(two, NotFoundError("it was destroyed"))
        fetches.before.clear()
        fetching = asyncio.create_task(fetches.ensure(TENANT, artifact, deadline=soon()))
        await until(lambda: fetches.asked, "the source's turn")
        cluster.on_deliver = lambda _message: 0.1
        before = cluster.log.last_seq
        ending = asyncio.create_task(
            one.core.author.decide(
                lambda state: rules.destroy(state, tenant=TENANT, artifact=artifact, reason=DestroyReason.ASKED),
                deadline=soon(),
            )
        )
        await until(lambda: cluster.log.last_seq > before, "the end on the log")
        assert two.core.state.artifacts[TENANT, artifact].live
        fetches.before.set()
        with pytest.raises(NotFoundError, match="destroyed"):
            await fetching
        await ending


async def test_many_that_ask_share_a_fetch_and_one_that_gives_up_does_not_end_it() -> None:
    cluster = MemoryCluster()
    async with rig(cluster, "w1") as one, rig(cluster, "w2") as two:
        artifact = await known(one, two, cluster)
        fetches = NoSource(two, UnavailableError("no answer"))
        fetches.before.clear()
        asking = [asyncio.create_task(fetches.ensure(TENANT, artifact, deadline=soon())) for _ in range(5)]
        await until(lambda: fetches.asked, "the source's turn")
        asking[0].cancel()
        await asyncio.sleep(0)
        fetches.before.set()
        outcomes = await asyncio.gather(*asking, return_exceptions=True)
        assert [type(each) for each in outcomes] == [asyncio.CancelledError, *[UnavailableError] * 4]
        assert fetches.asked == ["w1"]


class Fetched(Fetches):
    """Brings one byte, as if from a source."""

    def __init__(self, worker: Rig) -> None:
        super().__init__(worker.core, worker.pool, worker.store, worker.puts)
        self.worker = worker

    async def _from(self, source: Session, record: Artifact, *, alone: bool, relayed: bool) -> Held:
        incoming = self.worker.incoming(b"a")
        incoming.parts[0].seal()
        return Held(TENANT, record.artifact, incoming.parts, incoming.layout, incoming.manifest)


async def test_who_reads_has_the_bytes_before_the_copy_is_on_the_log_and_who_counts_on_it_waits() -> None:
    cluster = MemoryCluster()
    async with rig(cluster, "w1") as one, rig(cluster, "w2") as two:
        artifact = await known(one, two, cluster)
        fetches = Fetched(two)
        cluster.on_deliver = lambda _message: 0.2  # nobody's fold knows of a fact at once
        held, _ = await fetches.ensure(TENANT, artifact, deadline=soon(), said=False)
        record = two.core.state.artifacts[TENANT, artifact]
        assert [replica.worker for replica in record.replicas] == ["w1"]
        assert two.bytes_of(artifact) == b"a"
        again, _ = await fetches.ensure(TENANT, artifact, deadline=soon())
        assert again is held
        assert {replica.worker for replica in record.replicas} == {"w1", "w2"}


async def test_a_copy_whose_artifact_has_ended_meanwhile_is_not_handed_out() -> None:
    cluster = MemoryCluster()
    async with rig(cluster, "w1") as one, rig(cluster, "w2") as two:
        artifact = await known(one, two, cluster)
        fetches = Ended(two)
        with pytest.raises(NotFoundError, match="destroyed"):
            await fetches.ensure(TENANT, artifact, deadline=soon(), said=False)
        await until(lambda: two.busy_bytes == 0, "memory back")


class Ended(Fetched):
    """The artifact is destroyed while it comes."""

    async def _from(self, source: Session, record: Artifact, *, alone: bool, relayed: bool) -> Held:
        await self.worker.core.author.decide(
            lambda state: rules.destroy(state, tenant=TENANT, artifact=record.artifact, reason=DestroyReason.ASKED),
            deadline=soon(),
        )
        return await super()._from(source, record, alone=alone, relayed=relayed)
