"""What leaves memory, and what becomes of files found on disk: by rules, without a disk."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from tensorbus.bus import MemoryCluster
from tensorbus.errors import OutOfSpaceError, UnavailableError
from tensorbus.events import DestroyReason, ManifestRef
from tensorbus.ids import ArtifactId, Incarnation, WorkerId
from tensorbus.lifecycle import Artifact
from tensorbus.transport._spill import Spill, SpillHeader, write_spill
from tensorbus.transport._spill_folder import SpillFolder
from tensorbus.workers._disk import DiskTier
from tensorbus.workers._disk_fate import Fate, fate
from tensorbus.workers._pins import pin_figures
from tensorbus.workers._tiers import Tiers
from tests.unit.workers.rig import MIB, TENANT, Rig, rig, soon, until

HEADER = SpillHeader(
    worker="w1", incarnation="i1", tenant=TENANT, artifact="a", born=50, born_ns=500, must=True, layout="{}",
    manifest="{}", parts=(1,),
)  # fmt: skip


def record(*, born: int = 50, born_ns: int = 500, digest: str | None = "tb1:x", ended: bool = False) -> Artifact:
    return Artifact(
        where=(TENANT, ArtifactId("a")), tenant=TENANT, artifact=ArtifactId("a"), digest=digest, nbytes=1, tensors=1,
        manifest=ManifestRef(inline="{}"), key=None, born=born, born_ns=born_ns, author=WorkerId("w1"),
        incarnation=Incarnation("i1"), principal="", destroyed=99 if ended else None,
        reason=DestroyReason.ASKED if ended else None,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("found", "digest", "forgotten", "expected"),
    [
        pytest.param(record(), None, 0, Fate.LIVES, id="the very life"),
        pytest.param(record(born=60, born_ns=600), "tb1:x", 0, Fate.LIVES, id="the same bytes, born again"),
        pytest.param(record(born=60, born_ns=600), "tb1:y", 0, Fate.OVER, id="other bytes under its id"),
        pytest.param(record(born=60, born_ns=600, digest=None), None, 0, Fate.OVER, id="bytes that cannot be told"),
        pytest.param(record(ended=True), "tb1:x", 0, Fate.OVER, id="destroyed while its worker was away"),
        pytest.param(record(born=9, born_ns=90, ended=True), "tb1:x", 0, Fate.UNKNOWN, id="a life the log has lost"),
        pytest.param(None, "tb1:x", 49, Fate.UNKNOWN, id="an artifact the log has lost"),
        pytest.param(None, "tb1:x", 50, Fate.OVER, id="ended so long ago that it is forgotten"),
    ],
)
def test_a_file_is_what_the_log_says(
    found: Artifact | None, digest: str | None, forgotten: int, expected: Fate
) -> None:
    assert fate(HEADER, digest, found, forgotten=forgotten) is expected


def tiers_of(one: Rig, *, high: float = 1.0, low: float = 0.5) -> Tiers:
    return Tiers(one.core, one.pool, one.store, DiskTier(one.core, None, nbytes_max=0), order=None, high=high, low=low)


async def shared(one: Rig, two: Rig, cluster: MemoryCluster, count: int) -> list[str]:
    """Artifacts that both hold."""
    found = []
    for n in range(count):
        data = bytes([n]) * MIB
        found.append((await one.puts.take(one.incoming(data), deadline=soon())).artifact)
        await two.core.feed.reached(cluster.log.last_seq, deadline=soon())
        await two.puts.take(two.incoming(data), deadline=soon())
        await one.core.feed.reached(cluster.log.last_seq, deadline=soon())
    return [str(artifact) for artifact in found]


async def test_only_as_much_as_is_needed_leaves_and_only_what_another_has() -> None:
    cluster = MemoryCluster()
    async with rig(cluster, "w1", pool_bytes=4 * MIB) as one, rig(cluster, "w2") as two:
        tiers = tiers_of(one)
        await shared(one, two, cluster, 3)
        await one.puts.take(one.incoming(b"own" * 1000), deadline=soon())
        (await tiers.allocate(2 * MIB, tenant=TENANT)).release()
        assert len(one.store) == 2
        with pytest.raises(OutOfSpaceError, match="may leave memory is not enough"):
            await tiers.allocate(4 * MIB, tenant=TENANT)
        assert len(one.store) == 2  # nothing goes for a put that cannot be had anyway


async def test_two_that_rely_on_each_other_do_not_both_let_go() -> None:
    cluster = MemoryCluster()
    async with rig(cluster, "w1", pool_bytes=4 * MIB) as one, rig(cluster, "w2", pool_bytes=4 * MIB) as two:
        artifacts = await shared(one, two, cluster, 3)
        await asyncio.gather(*(tiers_of(worker)._relieve(3 * MIB, []) for worker in (one, two)))
        await one.core.feed.reached(cluster.log.last_seq, deadline=soon())
        for artifact in artifacts:
            found = one.core.state.artifacts[TENANT, ArtifactId(artifact)]
            assert found.live
            assert len(found.replicas) >= 1
        assert len(one.store) + len(two.store) >= 3


async def test_the_high_watermark_is_kept_down_to_the_low_one() -> None:
    cluster = MemoryCluster()
    async with rig(cluster, "w1", pool_bytes=8 * MIB) as one, rig(cluster, "w2") as two:
        tiers = tiers_of(one, high=0.7, low=0.4)
        one.core.spawn(tiers.run(), name="tiers")
        await shared(one, two, cluster, 5)
        assert len(one.store) == 5
        await shared(one, two, cluster, 6)
        await until(lambda: one.busy_bytes <= 0.4 * 8 * MIB, "the low watermark")
        assert one.busy_bytes > 0.2 * 8 * MIB


async def test_a_pinned_and_a_used_copy_stay() -> None:
    cluster = MemoryCluster()
    async with rig(cluster, "w1", pool_bytes=4 * MIB) as one, rig(cluster, "w2") as two:
        tiers = tiers_of(one)
        (artifact,) = await shared(one, two, cluster, 1)
        where = TENANT, ArtifactId(artifact)
        with tiers.using(where), pytest.raises(OutOfSpaceError):
            await tiers.allocate(4 * MIB, tenant=TENANT)
        held = one.store.get(*where)
        assert held is not None
        with held.reading(), pytest.raises(OutOfSpaceError):
            await tiers.allocate(4 * MIB, tenant=TENANT)
        await tiers.allocate(4 * MIB, tenant=TENANT)
        assert one.store.get(*where) is None


async def test_without_a_disk_nothing_is_promised_to_be_on_it() -> None:
    cluster = MemoryCluster()
    async with rig(cluster, "w1") as one:
        taken = await one.puts.take(one.incoming(b"x"), deadline=soon())
        held = one.store.get(TENANT, taken.artifact)
        assert held is not None
        with pytest.raises(UnavailableError, match="no disk tier"):
            await tiers_of(one).persist(held)


async def test_who_finds_no_room_is_told_what_is_pinned_and_by_which_lease() -> None:
    cluster = MemoryCluster()
    async with rig(cluster, "w1", pool_bytes=4 * MIB) as one, rig(cluster, "w2") as two:
        tiers = tiers_of(one)
        artifacts = await shared(one, two, cluster, 3)
        lease, _ = await one.leases.grant_pin(
            TENANT, ArtifactId(artifacts[0]), ttl_s=60, principal="me", deadline=soon()
        )
        expected = {"artifact": artifacts[0], "nbytes": MIB, "leases": [lease]}
        assert pin_figures(one.core.state, one.core.me.worker) == {"artifacts": 1, "leases": 1, "pinned_bytes": MIB}
        with pytest.raises(OutOfSpaceError, match="the largest that is pinned is tb1:") as refused:
            await tiers.allocate(4 * MIB, tenant=TENANT)
        assert refused.value.details["pinned"] == [expected]
        with pytest.raises(OutOfSpaceError) as refused:
            await tiers.allocate(4 * MIB, tenant="another")
        assert refused.value.details["pinned"] == [{"artifact": "another tenant's", "nbytes": MIB, "leases": []}]


@pytest.mark.parametrize("keep", [False, True])
async def test_a_writing_that_nobody_waits_for_ends_unless_it_is_to_be_kept(
    keep: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, go, stopped = threading.Event(), threading.Event(), threading.Event()

    def slow(path: Path, header: SpillHeader, parts: list[memoryview], *, stop: threading.Event) -> Spill:
        began.set()
        while not (go.is_set() or stop.is_set()):
            go.wait(0.01)
        if stop.is_set():
            stopped.set()
            raise UnavailableError("it was ended")
        return write_spill(path, header, parts, stop=stop)

    monkeypatch.setattr("tensorbus.workers._disk.write_spill", slow)
    async with rig(MemoryCluster(), "w1", pool_bytes=4 * MIB) as one:
        folder = SpillFolder(tmp_path, one.core.me.worker, home=tmp_path, prefix="tb")
        disk = DiskTier(one.core, folder, nbytes_max=4 * MIB)
        tiers = Tiers(one.core, one.pool, one.store, disk, order=None, high=1.0, low=0.5)
        one.core.spawn(disk.run(), name="disk")
        taken = await one.puts.take(one.incoming(b"x" * MIB), deadline=soon())
        held = one.store.get(TENANT, taken.artifact)
        assert held is not None
        persisting = asyncio.ensure_future(tiers.persist(held, keep=keep))
        await until(began.is_set, "the writing")
        persisting.cancel()
        await asyncio.gather(persisting, return_exceptions=True)
        if keep:
            go.set()
            await until(lambda: disk.get(held.where), "the file")
        else:
            await until(stopped.is_set, "the end of the writing")
            await until(lambda: disk.used_bytes == 0, "the room")
            assert disk.get(held.where) is None
            monkeypatch.undo()
            await tiers.persist(held)
            assert disk.get(held.where) is not None
        disk.close()
