"""What a store shows of its fold while facts come."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from tensorbus.bus import Archive, MemoryBus, MemoryCluster
from tensorbus.lifecycle import rules
from tensorbus.workers import _projector
from tensorbus.workers._projector import Projector
from tests.unit.feeds.voices import settled, soon, voice
from tests.unit.lifecycle import history as h

FACTS = 60


async def test_whoever_looks_at_the_fold_meets_what_is_written(tmp_path: Path) -> None:
    cluster = MemoryCluster()
    projector = Projector(
        MemoryBus(cluster),
        path=tmp_path / "store" / "s.duckdb",
        archive=Archive.open(str(tmp_path / "archive")),
        look_s=60.0,
        memory_bytes=64 << 20,
    )
    following = asyncio.create_task(projector.run())
    seen: list[tuple[int, int]] = []

    async def look() -> None:
        while True:
            seen.append(await projector.in_fold(lambda state: (state.seq, projector.position)))

    try:
        async with voice(cluster) as author:
            await settled(lambda: projector.follows)
            looking = asyncio.create_task(look())
            for n in range(FACTS):
                artifact = h.ArtifactId(f"a{n}")
                await author.decide(lambda state, a=artifact: rules.birth(state, h.put(a)), deadline=soon())
                await asyncio.sleep(0.002)
            await projector.reached(cluster.log.last_seq, deadline=soon())
            assert not looking.done(), "nobody is told that rows are missing"
            looking.cancel()
        assert all(seq == position for seq, position in seen)
        assert len({seq for seq, _ in seen}) > 1, "it was looked at while facts came"
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        await projector.close()


async def test_a_thread_that_does_not_come_back_makes_the_store_unfit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_projector, "STUCK_S", 0.1)
    projector = Projector(
        MemoryBus(MemoryCluster()),
        path=tmp_path / "store" / "s.duckdb",
        archive=Archive.open(str(tmp_path / "archive")),
        look_s=60.0,
        memory_bytes=64 << 20,
    )
    following = asyncio.create_task(projector.run())
    go = threading.Event()
    try:
        await settled(lambda: projector.unfit is None)
        busy = asyncio.create_task(projector.in_thread(go.wait))
        await settled(lambda: projector.stuck is not None)
        assert projector.unfit is not None
        go.set()
        await busy
        assert projector.unfit is None
    finally:
        go.set()
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        await projector.close()
