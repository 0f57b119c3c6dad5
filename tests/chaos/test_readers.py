"""Whoever maps a tensor reads that tensor or gets an error, whatever the pool, the owner and other readers do."""

from __future__ import annotations

import asyncio

import pytest

from tensorbus.errors import NotFoundError
from tests.chaos.conftest import Field, bodies, eventually, fds, said
from tests.integration.workers.actor import data_of
from tests.integration.workers.raw import Raw, until
from tests.sizes import SIZES

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(SIZES.timeout_s)]
MIB = 1 << 20
LARGE = 3 * MIB


async def press(raw: Raw, artifact: str, *, rounds: int = 30) -> None:
    """Have the pool give its memory to others again and again, as far as it can."""
    for n in range(rounds):
        taken = await raw.put({"w": data_of(("press", n), LARGE)})
        assert taken["artifact"]["artifact"] != artifact
        await raw.call("destroy", artifact=taken["artifact"]["artifact"])


# -- pressure ---------------------------------------------------------------------------------------------------------


async def test_many_processes_on_a_pool_that_is_too_small_read_the_right_bytes_or_none(field: Field) -> None:
    worker = field.worker(id="w1", pool_bytes="24MiB")
    async with await Raw.unix(worker.socket) as raw:
        programs = [
            field.actor("pressure", worker, seed=f"p{n}", rounds=SIZES.pressure_rounds, nbytes_max=2 * MIB)
            for n in range(SIZES.pressure_processes)
        ]
        counts = [await asyncio.to_thread(said, program, "end") for program in programs]
        assert all(count["wrong"] == 0 for count in counts), counts
        assert all(count["other"] == 0 for count in counts), [program.text for program in programs]
        assert sum(count["read"] for count in counts) > SIZES.pressure_rounds
        assert sum(count["full"] for count in counts) > 0, "there was no pressure"
        await eventually(raw, "the memory", "pool", "busy_bytes", equals=0)
        await eventually(raw, "the pins", "pool", "pins", equals=0)
        assert worker.alive


async def test_two_hosts_under_pressure_read_each_others_bytes_right_or_not_at_all(field: Field) -> None:
    workers = [field.worker(id=f"w{n}", host_id=f"h{n}", pool_bytes="24MiB") for n in range(2)]
    programs = [
        field.actor("pressure", workers[n % 2], seed=f"p{n}", rounds=SIZES.pressure_rounds, nbytes_max=2 * MIB)
        for n in range(SIZES.pressure_processes)
    ]
    counts = [await asyncio.to_thread(said, program, "end") for program in programs]
    assert all(count["wrong"] == 0 for count in counts), counts
    assert all(count["other"] == 0 for count in counts), [program.text for program in programs]
    for worker in workers:
        async with await Raw.unix(worker.socket) as raw:
            await eventually(raw, "the memory", "pool", "busy_bytes", equals=0)


# -- pins -------------------------------------------------------------------------------------------------------------


async def test_a_map_keeps_its_memory_until_it_is_dropped(field: Field) -> None:
    worker = field.worker(id="w1", pool_bytes="16MiB")
    async with await Raw.unix(worker.socket) as raw:
        taken = await raw.put({"w": data_of("mine", LARGE)})
        artifact = taken["artifact"]["artifact"]
        opened = await raw.open(artifact)
        await raw.call("destroy", artifact=artifact)
        await press(raw, artifact)
        assert opened.bytes("w") == data_of("mine", LARGE)
        assert (await raw.stats())["pool"]["busy_bytes"] == LARGE
        view = opened.view("w")
        del opened
        await press(raw, artifact, rounds=5)
        assert bytes(view) == data_of("mine", LARGE)  # the last view counts, not the handle
        del view
        await eventually(raw, "the memory", "pool", "busy_bytes", equals=0)


async def test_holders_that_crash_hold_nothing(field: Field) -> None:
    worker = field.worker(id="w1", pool_bytes="64MiB")
    async with await Raw.unix(worker.socket) as raw:
        taken = await raw.put({"w": data_of("mine", LARGE)}, key="k")
        before = fds(worker)
        holders = [field.actor("hold", worker, ref="k", lease_s=1.0 if n % 2 else None) for n in range(6)]
        assert all(said(holder, "holding")["right"] for holder in holders)
        assert (await raw.stats())["pool"]["pins"] == 6
        assert len(await bodies(raw, "CallerLeaseGranted")) == 3
        for holder in holders:
            holder.kill9()
        await eventually(raw, "the pins", "pool", "pins", equals=0)
        while (await raw.resolve("k"))["leases"]:  # a pin with a time is a fact of its own and runs out by itself
            await asyncio.sleep(0.02)
        assert [body["reason"] for body in await bodies(raw, "CallerLeaseEnded")] == ["expired"] * 3
        await until(lambda: fds(worker) <= before, "the descriptors")
        await raw.call("destroy", artifact=taken["artifact"]["artifact"])
        await eventually(raw, "the memory", "pool", "busy_bytes", equals=0)


async def test_pins_end_with_their_holder_or_by_their_time_and_once(field: Field) -> None:
    worker = field.worker(id="w1")
    async with await Raw.unix(worker.socket) as raw:
        taken = await raw.put({"w": data_of("mine", 1000)}, key="k")
        async with await Raw.unix(worker.socket) as holder:
            await holder.call("pin", artifact=taken["artifact"]["artifact"], ttl_s=None)
            lease = (await holder.call("pin", artifact=taken["artifact"]["artifact"], ttl_s=600))["lease"]
        async with asyncio.timeout(10):
            while len((await raw.resolve("k"))["leases"]) > 1:  # the one without a time goes with its holder
                await asyncio.sleep(0.05)
        assert [held["lease"] for held in (await raw.resolve("k"))["leases"]] == [lease]
        await raw.call("release", lease=lease)
        with pytest.raises(NotFoundError, match="was released, ran out"):
            await raw.call("release", lease=lease)
        assert (await raw.resolve("k"))["leases"] == []
        outcomes = []
        for _ in range(5):
            again = (await raw.call("pin", artifact=taken["artifact"]["artifact"], ttl_s=60))["lease"]
            ends = (raw.call("release", lease=again) for _ in range(2))
            outcomes += await asyncio.gather(*ends, return_exceptions=True)
        assert sum(isinstance(outcome, NotFoundError) for outcome in outcomes) == 5
        assert len(await bodies(raw, "CallerLeaseEnded")) == 7


# -- writing and forking ----------------------------------------------------------------------------------------------


async def test_writing_into_a_mapped_tensor_changes_nobody_elses_and_kills_nobody(field: Field) -> None:
    worker, two = field.worker(id="w1", host_id="h1"), field.worker(id="w2", host_id="h2")
    async with (
        await Raw.unix(worker.socket) as raw,
        await Raw.unix(worker.socket) as other,
        await Raw.unix(two.socket) as far,
    ):
        data = data_of("mine", LARGE)
        taken = await raw.put({"w": data})
        artifact = taken["artifact"]["artifact"]
        mine, theirs = await raw.open(artifact), await other.open(artifact)
        mine.view("w")[:] = bytes(LARGE)
        assert mine.bytes("w") == bytes(LARGE)
        assert theirs.bytes("w") == data
        assert (await other.open(artifact)).bytes("w") == data
        assert (await far.open(artifact, at_least=taken["position"])).bytes("w") == data
        assert (await raw.open(artifact)).right()
        assert worker.alive


async def test_a_forked_child_reads_what_its_parent_mapped_also_when_the_parent_is_gone(field: Field) -> None:
    worker = field.worker(id="w1", pool_bytes="16MiB")
    async with await Raw.unix(worker.socket) as raw:
        taken = await raw.put({"w": data_of("mine", LARGE)}, key="k")
        artifact = taken["artifact"]["artifact"]
        go, out = field.home / "go", field.home / "out"
        parent = field.actor("fork", worker, ref="k", go=str(go), out=str(out))
        said(parent, "forked")
        await asyncio.to_thread(parent.wait)
        await raw.call("destroy", artifact=artifact)
        await press(raw, artifact)
        pool = (await raw.stats())["pool"]
        assert (pool["busy_bytes"], pool["pins"]) == (LARGE, 1)
        go.touch()
        await until(out.exists, "the child's word")
        await until(lambda: out.read_text(), "the child's word")
        assert out.read_text() == "right"
        await eventually(raw, "the memory", "pool", "busy_bytes", equals=0)  # the child is gone too


async def test_memory_that_its_owner_registered_is_not_used_again_while_a_reader_maps_it(field: Field) -> None:
    worker = field.worker(id="w1", pool_bytes="16MiB")
    async with await Raw.unix(worker.socket) as raw, await Raw.unix(worker.socket) as reader:
        async with await Raw.unix(worker.socket) as owner:
            taken = await owner.register({"w": data_of("mine", LARGE)}, key="k")
            opened = await reader.open(taken["artifact"]["artifact"])
            await owner.call("release", lease=taken["lease"])
            with pytest.raises(NotFoundError, match="lease"):
                await reader.open(taken["artifact"]["artifact"])
            owner.kept.clear()
        await press(raw, taken["artifact"]["artifact"])
        assert opened.bytes("w") == data_of("mine", LARGE)
        del opened
        await eventually(raw, "the memory", "pool", "busy_bytes", equals=0)
