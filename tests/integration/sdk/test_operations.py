"""Operations on real workers: from one to another, found again by id, refused, cancelled, lost."""

from __future__ import annotations

import asyncio
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

        with pytest.raises(tb.ConflictError, match="last one"):
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
