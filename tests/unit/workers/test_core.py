"""Work that must be finished, and readings of the log."""

from __future__ import annotations

import asyncio

import pytest

from tensorbus.bus import MemoryBus, MemoryCluster
from tensorbus.errors import DeadlineExceededError, InvalidArgumentError, OutOfSpaceError, UnavailableError
from tensorbus.ids import ArtifactId
from tensorbus.model import Manifest, TensorSpec
from tensorbus.workers._events import CURSORS_MAX, Cursor, find_cursor, open_cursor, subjects_about
from tests.unit.workers.rig import TENANT, Rig, caller, rig, soon, until

A = b"a" * 100


async def test_what_must_be_finished_is_finished_without_the_one_who_asked() -> None:
    async with rig(MemoryCluster()) as worker:
        go, done = asyncio.Event(), asyncio.Event()

        async def work() -> None:
            await go.wait()
            done.set()

        asking = asyncio.create_task(worker.core.finish(work(), name="work"))
        await asyncio.sleep(0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        go.set()
        await until(done.is_set, "the work's end")


async def test_an_error_belongs_to_who_waits_and_ends_nothing_else() -> None:
    async with rig(MemoryCluster()) as worker:

        async def fail() -> None:
            await asyncio.sleep(0)
            raise UnavailableError("no")

        with pytest.raises(UnavailableError):
            await worker.core.finish(fail(), name="fail")
        asking = asyncio.create_task(worker.core.finish(fail(), name="fail"))
        await asyncio.sleep(0)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await asyncio.sleep(0.01)
        assert not (await worker.puts.take(worker.incoming(A), deadline=soon())).existed


async def test_a_worker_that_leaves_ends_what_is_under_way_and_takes_nothing_more() -> None:
    async with rig(MemoryCluster()) as worker:
        asking = asyncio.create_task(worker.core.finish(asyncio.Event().wait(), name="for ever"))
        await asyncio.sleep(0)
        worker.core.close()
        with pytest.raises((asyncio.CancelledError, UnavailableError)):
            await asking
        with pytest.raises(UnavailableError, match="is leaving"):
            await worker.core.finish(asyncio.Event().wait(), name="too late")


async def test_a_position_is_waited_for_and_one_beyond_the_log_is_refused() -> None:
    cluster = MemoryCluster()
    async with rig(cluster, "w1") as one, rig(cluster, "w2") as two:
        taken = await one.puts.take(one.incoming(A), deadline=soon())
        await two.core.reached(taken.position, soon())
        assert two.core.state.artifact(TENANT, taken.artifact) is not None
        with pytest.raises(InvalidArgumentError, match="beyond the log"):
            await two.core.reached(cluster.log.last_seq + 1, soon())
        cluster.pause()
        with pytest.raises(DeadlineExceededError):
            await two.core.reached(cluster.log.last_seq + 1, soon(0.05))
        cluster.resume()


async def test_a_large_manifest_travels_as_a_blob_and_comes_back_equal() -> None:
    cluster = MemoryCluster()
    async with rig(cluster, "w1") as one, rig(cluster, "w2") as two:
        manifest = Manifest(tuple(TensorSpec(f"layer.{n}", "f32", (1,)) for n in range(20_000)))
        ref = await one.core.store_manifest(manifest, deadline=soon())
        assert ref.blob is not None
        assert ref.inline is None
        taken = await one.puts.take(one.incoming(A), deadline=soon())
        await two.core.reached(taken.position, soon())
        record = two.core.state.artifacts[TENANT, taken.artifact]
        record.manifest = ref
        assert await two.core.load_manifest(record, deadline=soon()) == manifest
        cluster.pause()
        assert await two.core.load_manifest(record, deadline=soon(0.1)) == manifest  # known by now
        cluster.resume()


# -- cursors ----------------------------------------------------------------------------------------------------------


async def put(worker: Rig, data: bytes, **options: object) -> tuple[ArtifactId, int]:
    taken = await worker.puts.take(worker.incoming(data, **options), deadline=soon())  # type: ignore[arg-type]  # passed on
    return taken.artifact, taken.position


def cursor(worker: Rig, *, after: int = 0, until: int | None = None, tenant: str = TENANT) -> Cursor:
    return Cursor(worker.bus, tenant=tenant, after=after, until=until, subjects=None)


async def test_a_reading_comes_in_pages_that_neither_skip_nor_repeat() -> None:
    cluster = MemoryCluster()
    async with rig(cluster) as worker:
        for n in range(10):
            await put(worker, bytes([n]), key=f"k{n}")
        reading = cursor(worker, until=cluster.log.last_seq)
        found: list[object] = []
        done = False
        while not done:
            items, done = await reading.next(limit=3, wait_s=1.0)
            assert len(items) <= 3
            found += [item["seq"] for item in items]
        assert found == sorted(set(found))
        assert len(found) == 21  # the session, ten artifacts, ten keys
        assert await reading.next(limit=3, wait_s=0.0) == ([], True)
        await reading.close()


async def test_a_reading_that_follows_waits_for_what_comes_and_resumes_after_a_position() -> None:
    async with rig(MemoryCluster()) as worker:
        _, position = await put(worker, b"1")
        reading = cursor(worker, after=position)
        assert await reading.next(limit=10, wait_s=0.02) == ([], False)
        waiting = asyncio.create_task(reading.next(limit=10, wait_s=10.0))
        await asyncio.sleep(0.01)
        _, second = await put(worker, b"2")
        items, done = await waiting
        assert ([item["seq"] for item in items], done) == ([second], False)
        assert items[0]["type"] == "ArtifactPut"
        assert items[0]["principal"] == "s1"
        await reading.close()


async def test_a_reading_shows_nothing_of_other_tenants() -> None:
    cluster = MemoryCluster()
    async with rig(cluster) as worker:
        await put(worker, b"1", key="secret", tenant="rival")
        mine, _ = await put(worker, b"2", key="mine")
        reading = cursor(worker, until=cluster.log.last_seq)
        items, done = await reading.next(limit=100, wait_s=1.0)
        assert done
        assert [item["type"] for item in items] == ["SessionOpened", "ArtifactPut", "KeyBound"]
        assert "secret" not in str(items)
        assert mine in str(items)
        await reading.close()


async def test_a_reading_about_one_artifact_shows_its_own_history() -> None:
    cluster = MemoryCluster()
    async with rig(cluster) as worker:
        await put(worker, b"1", key="other")
        mine, _ = await put(worker, b"2", key="mine")
        subjects = subjects_about(worker.bus, worker.core.state, worker.core.state.artifacts[TENANT, mine])
        reading = Cursor(worker.bus, tenant=TENANT, after=0, until=cluster.log.last_seq, subjects=subjects)
        items, _ = await reading.next(limit=100, wait_s=1.0)
        assert [item["type"] for item in items] == ["ArtifactPut", "KeyBound"]
        await reading.close()


async def test_a_reading_whose_caller_gave_up_in_between_loses_nothing() -> None:
    async with rig(MemoryCluster()) as worker:
        _, position = await put(worker, b"0")
        reading = cursor(worker, after=position)
        given_up = asyncio.create_task(reading.next(limit=10, wait_s=10.0))
        await asyncio.sleep(0.01)
        given_up.cancel()
        await asyncio.gather(given_up, return_exceptions=True)
        _, second = await put(worker, b"1")
        items, _ = await reading.next(limit=10, wait_s=10.0)
        assert [item["seq"] for item in items] == [second]
        await reading.close()


async def test_two_calls_on_one_reading_share_it_without_loss_or_repeat() -> None:
    async with rig(MemoryCluster()) as worker:
        _, position = await put(worker, b"0")
        reading = cursor(worker, after=position)
        calls = [asyncio.create_task(reading.next(limit=1, wait_s=1.0)) for _ in range(3)]
        await asyncio.sleep(0.01)
        made = [(await put(worker, bytes([n, n])))[1] for n in range(3)]
        found = [item["seq"] for items, _ in await asyncio.gather(*calls) for item in items]
        while len(found) < 3:
            items, _ = await reading.next(limit=1, wait_s=1.0)
            assert items
            found += [item["seq"] for item in items]
        assert sorted(found) == made  # type: ignore[type-var]  # sequences
        await reading.close()


async def test_closing_a_reading_of_a_bus_that_is_away_ends_it() -> None:
    cluster = MemoryCluster()
    bus = MemoryBus(cluster)
    reading = Cursor(bus, tenant=TENANT, after=0, until=None, subjects=None)
    waiting = asyncio.create_task(reading.next(limit=1, wait_s=60.0))
    await asyncio.sleep(0.01)
    bus.disconnect()
    async with soon(2.0).scope():
        await reading.close()
        await asyncio.gather(waiting, return_exceptions=True)
    await bus.close()


async def test_a_connection_has_so_many_readings_and_no_more() -> None:
    async with rig(MemoryCluster()) as worker:
        who = caller()
        numbers = [open_cursor(who, cursor(worker)) for _ in range(CURSORS_MAX)]
        assert len(set(numbers)) == CURSORS_MAX
        with pytest.raises(OutOfSpaceError):
            open_cursor(who, cursor(worker))
        assert find_cursor(who, numbers[3]) is who.cursors[numbers[3]]
