"""When a keeper takes the store's role, gives it up, and asks for it again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tensorbus.bus import Archive, MemoryCluster
from tensorbus.errors import OutOfSpaceError, TensorbusError
from tensorbus.events import STORE_ROLE, RoleGranted, RoleResigned
from tensorbus.feeds import decode_one
from tensorbus.lifecycle import log_rules
from tensorbus.workers import _keeper
from tensorbus.workers._keeper import Keeper, KeeperLimits
from tests.unit.workers.rig import Rig, rig, soon, until

FULL = OutOfSpaceError("the disk is full")
RESIGN_S = 0.2
LIMITS = KeeperLimits(
    archive_s=1e6, snapshot_facts=10**6, keep_facts=10**6, purge_delay_s=600, forget_s=600, resign_s=RESIGN_S
)


class Projector:
    """What a keeper needs to know of the rows."""

    def __init__(self) -> None:
        self.unfit: TensorbusError | None = None
        self.stuck: TensorbusError | None = None
        self.follows = self.sure = self.ready = True


class Kept(Keeper):
    """Its one step succeeds, fails, or does not end."""

    failure: TensorbusError | None = None
    hangs = False
    steps = 0

    async def archive(self, *, now: bool = False) -> None:
        self.steps += 1
        if self.hangs:
            await asyncio.Event().wait()
        if self.failure is not None:
            raise self.failure

    async def snapshot(self, *, now: bool = False) -> None: ...

    async def announce(self, *, now: bool = False) -> None: ...

    async def purge(self) -> None: ...


@asynccontextmanager
async def keeping(at: Rig, archive: Path, *, resign_s: float = RESIGN_S) -> AsyncIterator[tuple[Kept, Projector]]:
    projector: Any = Projector()
    keeper = Kept(at.core, projector, Archive.open(str(archive)), replace(LIMITS, resign_s=resign_s))
    tasks = [asyncio.create_task(work) for work in (keeper.run(), keeper.mind())]
    try:
        yield keeper, projector
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_keeper, "LOOK_S", 0.01)


def holder(at: Rig) -> str | None:
    held = log_rules.role_holder(at.core.state, STORE_ROLE)
    return None if held is None else held.worker


def said(cluster: MemoryCluster) -> list[type]:
    """Grants and resignations, in order."""
    facts = (decode_one(message).event for message in cluster.log.after(0, "tb.ev.role.>", count_max=100))
    return [type(fact) for fact in facts]


@pytest.mark.parametrize("what", ["rows", "step", "stuck thread", "stuck step"])
async def test_a_keeper_that_cannot_go_on_makes_room_for_one_that_can(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = MemoryCluster()
    async with rig(cluster, "s1") as one, rig(cluster, "s2") as two, keeping(one, tmp_path) as (first, rows):
        await until(lambda: first.holds and first.steps > 1)
        async with keeping(two, tmp_path) as (second, _):
            match what:
                case "rows":
                    rows.unfit, rows.follows = FULL, False
                case "step":
                    first.failure = FULL
                case "stuck thread":
                    first.hangs, rows.stuck = True, FULL
                case "stuck step":
                    monkeypatch.setattr(_keeper, "STEP_S", 0.05)
                    first.hangs = True
            await until(lambda: second.holds and second.steps > 1, "the other's role")
            assert not first.holds
            assert said(cluster) == [RoleGranted, RoleResigned, RoleGranted]
            assert first.trouble is None if what == "rows" else first.trouble is not None
            rows.unfit = rows.stuck = first.failure = None
            rows.follows = True
            await second.leave(deadline=soon())
            if not first.hangs:
                await until(lambda: first.holds and first.trouble is None, "the role again")
        assert not second.holds


async def test_a_store_that_is_not_well_does_not_ask(tmp_path: Path) -> None:
    cluster = MemoryCluster()
    async with rig(cluster, "s1") as one, keeping(one, tmp_path) as (keeper, rows):
        await until(lambda: keeper.holds)
        rows.unfit = FULL
        await until(lambda: holder(one) is None, "the resignation")
        await asyncio.sleep(2 * RESIGN_S)  # longer than it rests
        assert said(cluster) == [RoleGranted, RoleResigned]
        rows.unfit = None
        await until(lambda: keeper.holds, "the role again")


async def test_trouble_that_passes_costs_no_role(tmp_path: Path) -> None:
    cluster = MemoryCluster()
    async with rig(cluster, "s1") as one, keeping(one, tmp_path, resign_s=60.0) as (keeper, _):
        for _ in range(3):
            await until(lambda: keeper.holds and keeper.trouble is None)
            keeper.failure = FULL
            await until(lambda: keeper.trouble is FULL)
            keeper.failure = None
        await until(lambda: keeper.trouble is None)
        assert said(cluster) == [RoleGranted]


async def test_who_leaves_asks_no_more(tmp_path: Path) -> None:
    cluster = MemoryCluster()
    async with rig(cluster, "s1") as one, keeping(one, tmp_path) as (keeper, _):
        await until(lambda: keeper.holds)
        await keeper.leave(deadline=soon())
        before = keeper.steps
        await asyncio.sleep(0.1)
        assert (said(cluster), keeper.steps) == ([RoleGranted, RoleResigned], before)
        await keeper.leave(deadline=soon())
        assert said(cluster) == [RoleGranted, RoleResigned], "once is enough"
