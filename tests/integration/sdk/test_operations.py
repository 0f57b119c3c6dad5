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
        assert await op.result(S) == {"workers": ["w1", "w2"]}
        assert await holders(art) == ["w1", "w2"]
        again, elsewhere = w1.replicate(art, n=2, id="two"), other.operation("two")
        found = await asyncio.gather(again, elsewhere)
        assert [result["workers"] for result in found] == [["w1", "w2"]] * 2
        with pytest.raises(tb.ConflictError, match="key of another"):
            await w1.replicate(art, n=1, id="two")
        assert (await w2.verify(art))["tensors"] == 1

        assert (await w1.evict(art))["evicted"]
        assert await holders(art) == ["w2"]
        assert not (await w1.evict(art))["evicted"]

        moved = await w2.migrate(art, src="w2", dst="w1")
        assert (moved["src"], moved["dst"], await holders(art)) == ("w2", "w1", ["w1"])
        assert torch.equal((await art.tensor("w")), torch.arange(1000))
        status = await other.operation("two").status()
        assert (status.state, status.operation, status.worker) == ("succeeded", "replicate", "w1")
        assert await op.cancel() == status
        with pytest.raises(tb.NotFoundError, match="no worker"):
            await bus.worker("w9").prefetch(art)


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
        assert await again.result(S) == {"workers": ["w3"]}
        assert await holders(art) == ["w1", "w3"]
