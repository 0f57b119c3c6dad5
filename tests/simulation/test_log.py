"""The log is archived, stored and purged under its users' feet: nobody notices, and nothing of the past is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import pytest

from tensorbus.bus import Archive
from tensorbus.clock import Deadline
from tensorbus.feeds import History, archived_files, decode_one
from tensorbus.feeds._lookout import Lookout, Reading
from tensorbus.testing import World, disturb, search, sweep
from tensorbus.workers._keeper import Keeper
from tensorbus.workers._purge import Purger
from tests.simulation.callers import Promises
from tests.simulation.stores import LIMITS, KeptCluster, SimPurger, kept_in_memory
from tests.simulation.test_artifacts import check_promises
from tests.simulation.test_names import CALLERS, call, check_versions
from tests.sizes import SIZES

Scenario = Callable[[World], Coroutine[Any, Any, None]]
Aside = Callable[[KeptCluster], Coroutine[Any, Any, None]]

WORKERS, STORES = ("w0", "w1"), ("s0", "s1")
DEEDS = {"put": 3, "put_named": 4, "put_given": 3, "read": 2, "destroy": 4, "bind": 3, "unbind": 2, "publish": 2}
FAULTS = ("loss", "lost_ack", "duplicate", "slow", "partition", "pause", "bus_pause", "crash")
FACTS = ("RoleGranted", "Archived", "LogPurged", "PurgeCompleted")
SETTLE_S = 120.0
CUT_AFTER_S = 6.0
FULL_AFTER_S_MAX = 20.0


async def _nothing(cluster: KeptCluster) -> None:
    return


def log_is_kept(*, for_s: float = 45.0, aside: Aside = _nothing) -> Scenario:
    """Callers put, name and end the same few things; two stores keep the log; all faults come over all of them.

    Args:
        aside: What else happens meanwhile, before the callers end.
    """

    async def scenario(world: World) -> None:
        cluster, promises = KeptCluster(world), Promises()
        world.always("no taken id looks free", cluster.truth.check_ids)
        world.always("nothing goes too early", cluster.truth.check_purged)
        with kept_in_memory():
            for name in WORKERS:
                cluster.start(name, "basic")
            for name in STORES:
                cluster.start(name, "gateway", "store")
            call(cluster, promises, workers=(*WORKERS, *STORES), deeds=DEEDS)
            wires = [asyncio.create_task(cluster.reconnect(name), name=f"wire/{name}") for name in (*WORKERS, *STORES)]
            await cut_off(cluster, world.rng("cut").choice((*WORKERS, *STORES)))
            beside = asyncio.create_task(aside(cluster), name="aside")
            await disturb(world, [*WORKERS, *STORES, *CALLERS], for_s=for_s)
            await beside
            for name in CALLERS:
                world.crash(name)
            for wire in wires:
                wire.cancel()
            await world.eventually("every worker is in step with the log", cluster.settled, within_s=SETTLE_S)
            await world.eventually("every store has all rows", cluster.rows_settled, within_s=SETTLE_S)
            cluster.truth.check()
            check_versions(cluster, promises)
            check_promises(cluster, promises)
            check_rows(cluster)
            await check_history(cluster)
            if cluster.truth.purged():
                world.cover("purged")

    return scenario


async def fill_disk(cluster: KeptCluster) -> None:
    """The keeper's disk is full until another store has kept the log."""
    world = cluster.world
    await asyncio.sleep(world.rng("full").uniform(0.0, FULL_AFTER_S_MAX))
    full = await cluster.fill_disk_of_keeper()
    await world.eventually("another store keeps the log", lambda: cluster.kept_by_other(full), within_s=SETTLE_S)
    cluster.disks[full].full = False


async def cut_off(cluster: KeptCluster, name: str) -> None:
    """Cut a node off while a purge is announced and carried out, which few plans bring about in time."""
    await asyncio.sleep(CUT_AFTER_S)
    cluster.world.partition(name)
    await asyncio.sleep(3 * LIMITS["purge_delay_s"])
    cluster.world.mend(name)
    if name in cluster.buses:
        cluster.buses[name].reconnect()


def check_rows(cluster: KeptCluster) -> None:
    """Each store has taken every fact in, once, and judged it as the log's fold does."""
    truth = cluster.truth
    for name, role in cluster.stores.items():
        rows = [(item.recorded, item.verdict) for item in role.projector.rows.facts]
        upto = role.projector.position
        said = [(fact, truth.verdicts[seq]) for seq, fact in truth.facts.items() if seq <= upto]
        assert rows == said, f"{name} has other rows than the log had facts"
        assert role.projector.state.hash() == truth.hash_at[upto]


async def check_history(cluster: KeptCluster) -> None:
    """The archive's files follow each other, and together with the log they are all that ever was."""
    truth = cluster.truth
    files = await archived_files(cluster.bus)
    archive = Archive.open(cluster.archive_url)
    assert archive.verify(files).problems == []
    archived = [decode_one(message) for batch in archive.read(files) for message in batch]
    after = files[-1].last if files else 0
    left = [decode_one(message) for message in truth.log.after(after, "tb.ev.>", count_max=1 << 30)]
    assert [*archived, *left] == list(truth.facts.values())


def test_the_log_is_kept_whatever_comes_over_workers_stores_and_callers() -> None:
    covers = [f"fault.{name}" for name in FAULTS]
    found = sweep(log_is_kept(), SIZES.sim_seeds // 2, check_every=50)
    found.check(
        covers=[*covers, *FACTS, "purged", "rebuilt", "started_from_snapshot", "fenced", "conflict", "fault.reconnect"]
    )


def test_a_keeper_whose_disk_is_full_makes_room_for_another() -> None:
    found = sweep(log_is_kept(for_s=30.0, aside=fill_disk), SIZES.sim_seeds // 4, check_every=50)
    found.check(covers=["fault.full_disk", "RoleResigned", *FACTS])


# -- what the scenario is for -----------------------------------------------------------------------------------------


async def _empties_aggregates(self: Purger, filter_subject: str, upto: int, *, keep_last: bool) -> int:
    return await right_take(self, filter_subject, upto, keep_last=False)


async def _purges_what_is_nowhere_else(self: SimPurger, purged: int, covered: int, *, keep_facts: int) -> int:
    return await right_upto(self, purged, 1 << 62, keep_facts=keep_facts)


async def _never_looks(self: Lookout, reading: Reading, *, deadline: Deadline | None = None) -> str:
    self._checked, self._looked_at = self.doubts, asyncio.get_running_loop().time()
    return ""


async def _looks_once(self: History) -> int:
    if not self._looked_at:
        return await right_look(self)
    self._looked_at = asyncio.get_running_loop().time()
    return 0


right_take, right_upto, right_look = Purger._purge, SimPurger.upto, History._purged

RARE = {"archive_s": 1e6}
"""Limits with which nothing is archived."""


async def _keeps_on(self: Keeper, trouble: object) -> None:
    return


@dataclass(frozen=True)
class Planted:
    """A wrong variant of a method, within which seeds the scenario must find it, and what brings it about."""

    target: type
    method: str
    wrong: Any
    seeds: range
    limits: dict[str, float] = field(default_factory=dict)
    aside: Aside = _nothing


BUGS = {
    "a purge empties aggregates": Planted(Purger, "_purge", _empties_aggregates, range(20)),
    "a purge takes what is not in the archive": Planted(
        SimPurger, "upto", _purges_what_is_nowhere_else, range(20), limits=RARE
    ),
    "a reader does not look for purges": Planted(Lookout, "look", _never_looks, range(28, 70)),
    "a store does not look for purges": Planted(History, "_purged", _looks_once, range(15, 70)),
    "a keeper that cannot keep the log keeps its role": Planted(
        Keeper, "_judge", _keeps_on, range(10), aside=fill_disk
    ),
}


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found(name: str) -> None:
    planted = BUGS[name]
    with patch.object(planted.target, planted.method, planted.wrong), patch.dict(LIMITS, planted.limits):
        found = search(log_is_kept(aside=planted.aside), planted.seeds, check_every=50)
    assert found is not None, f"seeds {planted.seeds} did not find that {name}"
