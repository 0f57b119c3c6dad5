"""After a loss of the log's tail: what is held is said again, with its names and pins, and the loss is on record."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tensorbus.bus import MemoryCluster
from tensorbus.clock import LoopClock
from tensorbus.errors import NotFoundError
from tensorbus.events import DestroyReason, LeasePurpose
from tensorbus.feeds import Loss, Remembered
from tensorbus.ids import RANDOM_PREFIX, ArtifactId, EventId
from tensorbus.lifecycle import Artifact, rules
from tensorbus.workers import _announce, _losses
from tensorbus.workers._announce import Announcer, Fate, fate
from tensorbus.workers._latency import LatencyWindow
from tensorbus.workers._losses import Losses
from tensorbus.workers._position import PositionFile
from tensorbus.workers._session import OwnSession
from tests.unit.workers.rig import TENANT, Rig, caller, opening, rig, soon, until


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_losses, "SETTLE_S", 0.05)
    monkeypatch.setattr(_announce, "VERSIONS_S", 0.5)
    monkeypatch.setattr(_announce, "ENDS_DELAY_S", 0.05)


@asynccontextmanager
async def worker(cluster: MemoryCluster, name: str = "w1") -> AsyncIterator[Rig]:
    """A worker's parts with all that deals with losses."""
    async with rig(cluster, name) as made:
        core = made.core
        losses = Losses(core, Announcer(core, made.store, made.leases))
        core.feed.on_loss = losses.on_loss
        session = OwnSession(
            core.author, opening(name, core.me.incarnation), clock=LoopClock(), heartbeat_s=1, beats=LatencyWindow()
        )
        with core.live.followed(session.on_change):
            await session.open(deadline=soon())
            core.spawn(losses.run(), name="losses")
            core.spawn(session.reopen(), name="reopen")
            yield made


async def put(made: Rig, data: bytes, **options: object) -> ArtifactId:
    taken = await made.puts.take(made.incoming(data, **options), deadline=soon())  # type: ignore[arg-type]
    return taken.artifact


async def settled(*all_of: Rig, losses: int = 1) -> None:
    def done() -> bool:
        return all(
            made.core.feed.losses >= losses and not made.core.feed.unsure and not made.core.unsettled for made in all_of
        )

    await until(done, "all has been said again")
    for made in all_of:
        await made.core.feed.reached(await made.bus.last_seq(deadline=soon()), deadline=soon())
        made.core.state.validate()
        assert made.core.state.gaps == 0
    assert len({made.core.state.hash() for made in all_of}) == 1


def live(made: Rig, artifact: ArtifactId) -> Artifact:
    return rules.live_artifact(made.core.state, tenant=TENANT, artifact=artifact)


async def decide(made: Rig, rule: object) -> None:
    await made.core.author.decide(rule, deadline=soon())  # type: ignore[arg-type]


async def test_what_was_put_after_the_cut_is_there_again() -> None:
    cluster = MemoryCluster()
    async with worker(cluster) as made, worker(cluster, "w2") as other:
        before = await put(made, b"before", key="b")
        cut = cluster.log.last_seq
        after = await put(made, b"after", key="a")
        given = await put(made, b"given", given="mine", digest=False)
        await until(lambda: live(made, given).digest)
        await decide(made, lambda s: rules.publish(s, tenant=TENANT, name="s", artifact=after))
        await decide(made, lambda s: rules.bind(s, tenant=TENANT, key="b", artifact=after, rebind=True))
        await other.core.feed.reached(cluster.log.last_seq, deadline=soon())
        who = caller()
        lease, _ = await made.leases.pin(who, after, ttl_s=60, deadline=soon())
        cluster.truncate(cut)
        await settled(made, other)
        state = other.core.state
        assert {key.artifact for (_, name), key in state.keys.items() if name in "ab"} == {after}
        assert state.series[TENANT, "s"].versions == {1: after}
        assert live(other, after).leases[lease].purpose is LeasePurpose.PIN
        assert live(other, given).digest is not None
        assert live(made, before).born <= cut
        assert made.bytes_of(after) == b"after"
        assert made.store.get(TENANT, after).life == live(made, after).born  # type: ignore[union-attr]
        assert state.log.truncations == 1


async def test_a_log_of_nothing_gets_all_that_is_held() -> None:
    cluster = MemoryCluster()
    async with worker(cluster) as made, worker(cluster, "w2") as other:
        artifacts = [await put(made, b"%d" % n, key=f"k{n}") for n in range(20)]
        theirs = await put(other, b"theirs")
        lent = await put(made, b"lent", lease_s=60, digest=False)
        lease = made.store.get(TENANT, lent).lease  # type: ignore[union-attr]
        made.leases.began(lease, tenant=TENANT, artifact=lent, purpose=LeasePurpose.REGISTER, ttl_s=60)  # type: ignore[arg-type]
        cluster.lose()
        await settled(made, other)
        for n, artifact in enumerate(artifacts):
            assert other.core.state.keys[TENANT, f"k{n}"].artifact == live(other, artifact).artifact
        assert live(made, theirs).author == "w2"
        assert lease in live(other, lent).leases
        assert other.core.state.log.truncations == 1


async def test_two_losses_in_a_row_lose_nothing() -> None:
    cluster = MemoryCluster()
    async with worker(cluster) as made, worker(cluster, "w2") as other:
        cut = cluster.log.last_seq
        artifacts = [await put(made, b"%d" % n, key=f"k{n}") for n in range(20)]
        cluster.truncate(cut)
        await until(lambda: cluster.log.last_seq > cut + 8, "some of it said again")
        cluster.truncate(cut)
        await settled(made, other, losses=2)
        for n, artifact in enumerate(artifacts):
            assert other.core.state.keys[TENANT, f"k{n}"].artifact == live(other, artifact).artifact


async def test_both_who_hold_it_say_so_and_one_names_it() -> None:
    cluster = MemoryCluster()
    async with worker(cluster) as made, worker(cluster, "w2") as other:
        cut = cluster.log.last_seq
        artifact = await put(made, b"x", key="k")
        assert await put(other, b"x", key="k") == artifact
        cluster.truncate(cut)
        await settled(made, other)
        assert {replica.worker for replica in live(made, artifact).replicas.values()} == {"w1", "w2"}


async def test_a_key_that_somebody_used_since_is_left() -> None:
    cluster = MemoryCluster()
    async with worker(cluster) as made, worker(cluster, "w2") as other:
        cut = cluster.log.last_seq
        artifact = await put(made, b"x", key="k")
        made.bus.disconnect()
        cluster.connections.pop(made.bus)
        cluster.truncate(cut)
        await settled(other)
        another = await put(other, b"y", key="k")
        made.bus.reconnect()
        await settled(made, other)
        assert made.core.state.keys[TENANT, "k"].artifact == another
        assert live(other, artifact).keys == {}


async def test_what_was_destroyed_since_gives_its_memory_back() -> None:
    cluster = MemoryCluster()
    async with worker(cluster) as made, worker(cluster, "w2") as other:
        artifact = await put(made, b"x")
        cut = cluster.log.last_seq
        await put(made, b"y")
        made.bus.disconnect()
        cluster.connections.pop(made.bus)
        cluster.truncate(cut)
        await settled(other)
        await decide(other, lambda s: rules.destroy(s, tenant=TENANT, artifact=artifact, reason=DestroyReason.ASKED))
        made.bus.reconnect()
        await settled(made, other)
        assert made.store.get(TENANT, artifact) is None
        with pytest.raises(NotFoundError):
            live(made, artifact)


async def test_an_end_that_was_lost_ends_again() -> None:
    cluster = MemoryCluster()
    async with worker(cluster) as made:
        artifact, who = await put(made, b"x"), caller()
        lease, _ = await made.leases.pin(who, artifact, ttl_s=None, deadline=soon())
        cut = cluster.log.last_seq
        await made.leases.release(who, lease, deadline=soon())
        cluster.truncate(cut)
        await settled(made)
        await until(lambda: not live(made, artifact).leases)


async def test_a_put_that_was_under_way_comes_to_its_end() -> None:
    cluster = MemoryCluster()
    async with worker(cluster) as made:
        await put(made, b"x")
        cut = cluster.log.last_seq
        await put(made, b"y")
        cluster.on_deliver = lambda _: 0.1
        putting = asyncio.create_task(put(made, b"z", key="k"))
        await asyncio.sleep(0.05)
        cluster.truncate(cut)
        artifact = await putting
        cluster.on_deliver = None
        await settled(made)
        assert made.bytes_of(artifact) == b"z"
        assert made.core.state.keys[TENANT, "k"].artifact == artifact


# -- what became of it -----------------------------------------------------------------------------------------------


async def one() -> Artifact:
    async with rig(MemoryCluster()) as made:
        return live(made, await put(made, b"x"))


async def test_fates() -> None:
    was = await one()
    digest = was.digest
    later = replace(was, born=was.born - 5, born_ns=was.born_ns + 1)
    earlier = replace(was, born=was.born - 5, born_ns=was.born_ns - 1)
    ended = {"destroyed": 3, "reason": DestroyReason.ASKED}
    lost = {"destroyed": 3, "reason": DestroyReason.LOST}
    random = replace(was, artifact=ArtifactId(RANDOM_PREFIX + "x"), digest=None)
    for before, now, known, expected in [
        (was, None, digest, Fate.UNKNOWN),
        (was, was, digest, Fate.LIVES),
        (was, replace(was, digest=None), None, Fate.LIVES),
        (was, later, digest, Fate.LIVES),
        (was, replace(later, digest="tb1:other"), digest, Fate.TAKEN),
        (was, replace(later, digest=None), digest, Fate.TAKEN),
        (was, replace(was, **ended), digest, Fate.ENDED),  # type: ignore[arg-type]
        (was, replace(was, **lost), digest, Fate.UNKNOWN),  # type: ignore[arg-type]
        (was, replace(later, **ended), digest, Fate.ENDED),  # type: ignore[arg-type]
        (was, replace(earlier, **ended), digest, Fate.UNKNOWN),  # type: ignore[arg-type]
        (random, replace(random, born=1, born_ns=1), None, Fate.LIVES),
        (random, replace(random, **lost), None, Fate.ENDED),  # type: ignore[arg-type]
    ]:
        assert fate(before, now, known) is expected, (before, now)


# -- the record and the position -------------------------------------------------------------------------------------


async def test_a_loss_that_is_on_record_is_not_recorded_again() -> None:
    cluster = MemoryCluster()
    async with worker(cluster) as made:
        losses = Losses(made.core, None)
        lost = Remembered(cluster.log.last_seq + 5, EventId("e" * 32), cluster.log.info().created_ns)
        for _ in range(2):
            await losses._record(Loss(lost, cluster.log.last_seq))
        assert made.core.state.log.truncations == 1
        again = replace(lost, time_ns=made.core.clock.wall_ns() + 1)
        await losses._record(Loss(again, cluster.log.last_seq))
        assert made.core.state.log.truncations == 2


async def test_a_position_outlives_its_process(tmp_path: Path) -> None:
    file = PositionFile(tmp_path, "w1", stream="TB")
    assert file.read() is None
    here = Remembered(7, EventId("e"), 9)
    await file.write(here)
    assert PositionFile(tmp_path, "w1", stream="TB").read() == here
    assert PositionFile(tmp_path, "w1", stream="TB_other").read() is None
    (tmp_path / "w1.position").write_text("{}")
    assert file.read() is None


async def test_a_position_that_cannot_be_kept_is_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = PositionFile(tmp_path / "not there", "w1", stream="TB")
    await file.write(Remembered(7, EventId("e"), 9))
    await file.write(Remembered(8, EventId("f"), 9))
    assert caplog.text.count("cannot be kept") == 1
