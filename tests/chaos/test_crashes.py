"""Callers and workers that are killed leave nothing behind: no names, memory or descriptors, and a fact for each."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from tests.chaos.conftest import TTL_S, Field, bodies, eventually, fds, gone, said
from tests.integration.workers.actor import data_of
from tests.integration.workers.raw import Raw, until
from tests.sizes import SIZES

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(SIZES.timeout_s)]
COUNT = SIZES.crash_artifacts


async def test_callers_that_are_killed_after_registering_leave_nothing(field: Field) -> None:
    field.worker("gateway", id="gate")
    worker = field.worker(id="w1")
    async with await Raw.unix(worker.socket) as raw:
        await raw.put({"w": b"stays"}, key="stays")
        baseline, open_before = await raw.stats(), fds(worker)
        used_max = 0
        for n in range(SIZES.crash_rounds):
            program = field.actor("register", worker, seed=f"r{n}", count=COUNT, nbytes=20_000)
            said(program, "registered")
            assert (await raw.stats())["directory"]["artifacts"] == COUNT + 1
            program.kill9()
            await eventually(raw, "the artifacts' end", "directory", "artifacts", equals=1)
            await eventually(raw, "the memory", "pool", "busy_bytes", equals=baseline["pool"]["busy_bytes"])
            await eventually(raw, "the pins", "pool", "pins", equals=0)
            used = (await raw.stats())["pool"]["used_bytes"]
            assert used <= used_max or n == 0, "memory grows from round to round"
            used_max = max(used, used_max)
        directory = (await raw.stats())["directory"]
        assert {name: directory[name] for name in ("keys", "replicas", "orphans", "gaps", "unknown")} == {
            "keys": 1,
            "replicas": 1,
            "orphans": 0,
            "gaps": 0,
            "unknown": 0,
        }
        # Free segments keep a descriptor each for their next use, none per round.
        segments = (await raw.stats())["pool"]["segments"]
        await until(lambda: fds(worker) <= open_before + 2 * segments, "the descriptors")
        ended = await bodies(raw, "CallerLeaseEnded")
        assert Counter(body["reason"] for body in ended) == {"connection_lost": COUNT * SIZES.crash_rounds}
        destroyed = {body["artifact"] for body in await bodies(raw, "ArtifactDestroyed")}
        assert destroyed == {f"r{n}-{m}" for n in range(SIZES.crash_rounds) for m in range(COUNT)}


async def test_workers_that_are_killed_after_their_callers_registered_leave_nothing(field: Field) -> None:
    gate = field.worker("gateway", id="gate")
    async with await Raw.unix(gate.socket) as raw:
        open_before = fds(gate)
        for n in range(SIZES.crash_rounds):
            worker = field.worker(id=f"w{n}")
            program = field.actor("register", worker, seed=f"r{n}", count=COUNT, nbytes=20_000)
            said(program, "registered")
            await eventually(raw, "the artifacts", "directory", "artifacts", equals=COUNT)
            async with await Raw.unix(worker.socket) as reader:
                opened = await reader.open(f"r{n}-7")
            worker.kill9()
            await eventually(raw, "the artifacts' end", "directory", "artifacts", equals=0)
            error = await gone(raw, f"r{n}/7")
            assert "lost" in str(error)
            assert opened.bytes("w") == data_of((f"r{n}", 7), 20_000)  # a map outlives its worker
            program.kill9()
        directory = (await raw.stats())["directory"]
        assert {name: directory[name] for name in ("keys", "replicas", "orphans", "sessions")} == {
            "keys": 0,
            "replicas": 0,
            "orphans": 0,
            "sessions": 1,
        }
        await until(lambda: fds(gate) <= open_before, "the descriptors")
        ends = await bodies(raw, "SessionEnded")
        assert [(end["worker"], end["reason"]) for end in ends] == [
            (f"w{n}", "expired") for n in range(SIZES.crash_rounds)
        ]
        destroyed = await bodies(raw, "ArtifactDestroyed")
        assert {body["reason"] for body in destroyed} == {"lost"}
        assert Counter(body["artifact"] for body in destroyed) == {
            f"r{n}-{m}": 1 for n in range(SIZES.crash_rounds) for m in range(COUNT)
        }


async def test_artifacts_with_another_replica_survive_their_worker(field: Field) -> None:
    gate = field.worker("gateway", id="gate")
    one, two = field.worker(id="w1", host_id="h1"), field.worker(id="w2", host_id="h2")
    async with await Raw.unix(one.socket) as here, await Raw.unix(two.socket) as there:
        kept = await here.put({"w": data_of("kept", 100_000)}, key="kept")
        lost = await here.put({"w": data_of("lost", 100_000)}, key="lost")
        await there.open(kept["artifact"]["artifact"], at_least=lost["position"])
    one.kill9()
    async with await Raw.unix(two.socket) as there, await Raw.unix(gate.socket) as watching:
        await gone(watching, "lost")
        opened = await there.open((await there.resolve("kept"))["artifact"])
        assert opened.bytes("w") == data_of("kept", 100_000)
        assert [replica["worker"] for replica in (await there.resolve("kept"))["replicas"]] == ["w2"]


async def test_a_worker_that_starts_again_within_its_ttl_fences_its_former_life_at_once(field: Field) -> None:
    gate = field.worker("gateway", id="gate")
    async with await Raw.unix(gate.socket) as watching:
        for n in range(SIZES.restarts + 1):
            worker = field.worker(id="w1")
            async with await Raw.unix(worker.socket) as raw:
                assert await raw.keys() == []
                taken = await raw.put({"w": data_of(n, 10_000)}, key="k")
                assert (await raw.open(taken["artifact"]["artifact"])).bytes("w") == data_of(n, 10_000)
                await watching.resolve("k", at_least=taken["position"])
            worker.kill9()
            if n < SIZES.restarts:
                again = field.worker(id="w1")
                error = await gone(watching, "k")
                assert "lost" in str(error)
                assert (await watching.live_workers()) == ["gate", "w1"]
                again.kill9()
                await asyncio.sleep(TTL_S * 0.6)
        sessions = [body for body in await bodies(watching, "SessionOpened") if body["worker"] == "w1"]
        assert len({body["incarnation"] for body in sessions}) == 2 * SIZES.restarts + 1


async def session_ended(raw: Raw, worker: str) -> None:
    """Wait until the log says that a worker's session is over."""
    async with asyncio.timeout(30):
        while any(one["worker"] == worker and one["live"] for one in (await raw.call("workers"))["items"]):
            await asyncio.sleep(0.02)


async def test_a_put_under_way_when_its_worker_dies_is_whole_or_not_there(field: Field) -> None:
    gate = field.worker("gateway", id="gate")
    two = field.worker(id="w2", host_id="h2")
    async with await Raw.unix(gate.socket) as watching, await Raw.unix(two.socket) as there:
        for n in range(SIZES.crash_rounds):
            worker = field.worker(id=f"w1-{n}", host_id="h1")
            raw = await Raw.unix(worker.socket)
            puts = [asyncio.create_task(raw.put({"w": data_of((n, m), 5000)}, key=f"{n}/{m}")) for m in range(30)]
            await asyncio.sleep(0.01 * n)
            worker.kill9()
            await asyncio.gather(*puts, return_exceptions=True)
            await raw.connection.close()
            # Only after the end of its session nothing more of it can come to be.
            await session_ended(watching, f"w1-{n}")
            await eventually(watching, "the end of what was lost", "directory", "artifacts", equals=0)
            await eventually(there, "the same elsewhere", "directory", "artifacts", equals=0)
            assert await there.keys() == []
            directory = (await watching.stats())["directory"]
            assert (directory["keys"], directory["orphans"], directory["replicas"]) == (0, 0, 0)
