"""Operations on real workers: from one to another, found again by id, refused, cancelled, lost."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import tensorbus as tb
from tensorbus.testing._processes import WorkerProgram

S = 60.0


async def holders(art: tb.AsyncArtifact) -> list[str]:
    return sorted(replica.worker for replica in await art.replicas())


async def test_a_copy_goes_from_worker_to_worker(start_worker: Callable[..., WorkerProgram], home: Path) -> None:
    start_worker("basic", id="w1", host_id="h1")
    start_worker("basic,gateway", id="w2", host_id="h2")
    async with tb.aconnect(home=home, host_id="h1") as bus, tb.aconnect(home=home, host_id="h2") as other:
        art = await bus.put({"w": torch.arange(1000)})
        w1, w2 = bus.worker("w1"), bus.worker("w2")

        with pytest.raises(tb.ConflictError, match="replicate it first"):
            await w1.evict(art)
        with pytest.raises(tb.NotFoundError, match="no copy"):
            await w2.verify(art)

        op = w1.replicate(art, n=2, id="two")
        assert await op.result(S) == tb.Replicated(workers=("w1", "w2"), nbytes=8000)
        assert await op.progress() == tb.OperationProgress(nbytes_done=8000, nbytes_total=8000)
        assert await holders(art) == ["w1", "w2"]
        again, elsewhere = w1.replicate(art, n=2, id="two"), other.operation("two")
        found = await asyncio.gather(again, elsewhere)
        assert [result.workers for result in found] == [("w1", "w2")] * 2
        with pytest.raises(tb.ConflictError, match="key of another"):
            await w1.replicate(art, n=1, id="two")
        assert (await w2.verify(art)).tensors == 1

        assert await w1.evict(art) == tb.Evicted(worker="w1", evicted=True)
        assert await holders(art) == ["w2"]
        assert not (await w1.evict(art)).evicted

        moved = await w2.migrate(art, src=w2, dst="w1")
        assert (moved.src, moved.dst, await holders(art)) == ("w2", "w1", ["w1"])
        assert torch.equal((await art.tensor("w")), torch.arange(1000))
        status = await other.operation("two").status()
        assert (status.state, status.operation, status.worker) == ("succeeded", "replicate", "w1")
        assert await op.cancel() == status
        with pytest.raises(tb.NotFoundError, match="no worker"):
            await bus.worker("w9").prefetch(art)
        with pytest.raises(tb.UnavailableError, match="cuda:0"):
            await w2.prefetch(art, device="cuda:0")
        with pytest.raises(tb.InvalidArgumentError, match="replicate to or n"):
            await w2.replicate(art)


def test_threads_ask_for_operations_and_handles_wait_for_them(
    start_worker: Callable[..., WorkerProgram], home: Path
) -> None:
    start_worker("basic", id="w1", host_id="h1")
    start_worker("basic,gateway", id="w2", host_id="h2")
    with tb.connect(home=home, host_id="h1") as bus:
        art = bus.put({"w": torch.arange(1000)})
        w1, w2 = bus.worker("w1"), bus.worker("w2")
        op = w2.prefetch(art, id="here")
        assert (op.result(S).worker, op.status().state, op.id) == ("w2", "succeeded", "here")
        with pytest.raises(tb.ConflictError, match="key of another"):
            w2.evict(art, id="here")
        assert bus.operation("here").result(S).path == "tcp"
        assert art.verify() == tb.Verified(worker="w1", nbytes=8000, tensors=1, tiers=("dram",))
        assert art.evict(w1) == tb.Evicted(worker="w1", evicted=True)
        assert art.verify().worker == "w2"
        assert art.replicate(n=2).workers == ("w1", "w2")
        assert art.migrate(src=w2, dst=w1) == tb.Migrated(src="w2", dst="w1", nbytes=8000)
        assert art.replicate(to=[w2]).nbytes == 8000
        assert art.prefetch(w2).path == "shm"
        with pytest.raises(tb.UnavailableError, match="disk_bytes"):
            art.persist()
        listed = bus.operations(worker="w2")
        assert listed[-1].id == "here" and {one.worker for one in listed} == {"w2"}
        assert not bus.operations(running=True)


async def test_of_several_who_give_one_key_to_different_operations_one_has_it(
    start_worker: Callable[..., WorkerProgram], home: Path
) -> None:
    start_worker("basic", id="w1", host_id="h1")
    start_worker("basic", id="w2", host_id="h2")
    async with tb.aconnect(home=home, host_id="h1") as bus, tb.aconnect(home=home, host_id="h2") as other:
        art = await bus.put({"w": torch.arange(1000)})
        for n in range(5):
            key = f"key{n}"
            asked = [
                bus.worker("w1").prefetch(art, id=key),
                other.worker("w1").verify(art.id, id=key),
                other.worker("w2").prefetch(art.id, id=key),
                bus.worker("w2").evict(art, id=key),
            ]
            found = await asyncio.gather(*asked, return_exceptions=True)
            taken = [one for one in found if isinstance(one, tb.ConflictError) and "key of another" in str(one)]
            assert len(taken) == 3, found
            states = [(await each.operation(key).status()) for each in (bus, other)]
            assert states[0] == states[1]


async def test_what_was_asked_for_is_begun_although_the_caller_leaves_at_once(
    start_worker: Callable[..., WorkerProgram], home: Path
) -> None:
    start_worker("basic", id="w1", host_id="h1")
    start_worker("basic,gateway", id="w2", host_id="h2")
    async with tb.aconnect(home=home, host_id="h1") as bus:
        art = await bus.put({"w": torch.arange(1000)})
        async with tb.aconnect(home=home, host_id="h1") as leaving:
            leaving.worker("w2").prefetch(art, id="left")
        assert (await bus.operation("left").result(S)).worker == "w2"


async def test_a_worker_s_pin_outlives_the_caller_and_keeps_the_copy(
    start_worker: Callable[..., WorkerProgram], home: Path
) -> None:
    start_worker("basic", id="w1", host_id="h1")
    start_worker("basic,gateway", id="w2", host_id="h2")
    async with tb.aconnect(home=home, host_id="h1") as bus:
        async with tb.aconnect(home=home, host_id="h1") as leaving:
            art = await leaving.put({"w": torch.arange(1000)}, key="k")
            pin = await leaving.worker("w2").pin(art, ttl_s=3600, id="p")
            assert (await leaving.worker("w2").pin(art, ttl_s=3600, id="p")).lease == pin.lease
        art, w2 = await bus.artifact("k"), bus.worker("w2")
        assert [(one.lease, one.worker, one.ttl_s) for one in (await art.info()).leases] == [(pin.lease, "w2", 3600)]
        with pytest.raises(tb.ConflictError, match="pinned"):
            await w2.evict(art)
        assert await w2.unpin(pin.lease) == tb.Unpinned(worker="w2", lease=pin.lease, ended=True)
        assert not (await w2.unpin(pin)).ended
        with pytest.raises(tb.NotFoundError, match="no pin"):
            await w2.unpin(pin.lease)
        assert (await w2.evict(art)).evicted

        brief = await w2.pin(art, ttl_s=0.2)
        async with asyncio.timeout(S):
            while (await art.info()).leases:
                await asyncio.sleep(0.02)
        assert not (await w2.unpin(brief)).ended


async def test_an_operation_whose_worker_is_killed_is_lost_and_can_be_asked_for_again(
    start_worker: Callable[..., WorkerProgram], home: Path
) -> None:
    start_worker("basic,gateway", id="w1", host_id="h1", session_ttl_s=3)
    w2 = start_worker("basic", id="w2", host_id="h2", session_ttl_s=3)
    async with tb.aconnect(home=home, host_id="h1") as bus, tb.aconnect(home=home, host_id="h1") as other:
        art = await bus.put({"w": torch.arange(1000)})
        await bus.worker("w2").prefetch(art)
        w2.send(signal.SIGSTOP)
        op = bus.worker("w1").replicate(art, to=["w2"], id="r")
        assert (await op.status()).state == "running"
        with pytest.raises(tb.CancelledError):
            await op.cancel()
            await op
        w2.send(signal.SIGCONT)

        w3 = start_worker("basic", id="w3", host_id="h3", session_ttl_s=3)
        w3.send(signal.SIGSTOP)
        asked = bus.worker("w2").replicate(art, to=["w3"], id="m")
        assert (await asked.status()).state == "running"
        waiting = [asyncio.ensure_future(each.result(S)) for each in (asked, other.operation("m"))]
        w2.kill9()
        for error in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(error, tb.UnavailableError)
        assert (await other.operation("m").status()).state == "lost"
        w3.kill9()
        for name in ("w2", "w3"):
            start_worker("basic", id=name, host_id=f"h-{name}", session_ttl_s=3)
        again = bus.worker("w2").replicate(art, to=["w3"], id="m")
        assert (await again.result(S)).workers == ("w3",)
        assert await holders(art) == ["w1", "w3"]
