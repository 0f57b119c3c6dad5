"""Stores on simulated nodes: the product's projector, keeper and history over an archive in memory.

Simulated are the database and its thread: rows are a list in memory that outlives its node's crashes, written whole or
not at all, and the questions that the keeper asks in SQL are asked of that list. Answers to callers are left out.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar, cast
from unittest.mock import patch

from tensorbus.bus import Archive, MemoryBus
from tensorbus.clock import Deadline
from tensorbus.config import Settings
from tensorbus.errors import ConflictError, OutOfSpaceError, TensorbusError
from tensorbus.events import STORE_ROLE, Aggregate, AnyRecorded, Event
from tensorbus.feeds import Author, DirectoryFeed, LeaseFeed, Remembered
from tensorbus.ids import ArtifactId, EventId
from tensorbus.lifecycle import Directory, Verdict, log_rules
from tensorbus.projections import Applied, GlobalStore, Json, LiveDirectory
from tensorbus.testing import Node, SimBus, World
from tensorbus.transport import WorkerCard
from tensorbus.workers._core import Core
from tensorbus.workers._keeper import Keeper, KeeperLimits
from tensorbus.workers._projector import Projector
from tensorbus.workers._purge import KEPT_WHOLE, OWN, UNGUARDED, WORTH, Purger
from tensorbus.workers._store_role import LOOKS_PER_DELAY, StoreRole
from tensorbus.workers._worker import START_S
from tests.simulation import cluster as parts
from tests.simulation.cluster import Cluster, SimWorker
from tests.simulation.truth import CheckedLive, Truth

T = TypeVar("T")
LIMITS: Final = {
    "archive_s": 4.0,
    "snapshot_facts": 20,
    "keep_facts": 10,
    "purge_delay_s": 4.0,
    "forget_s": 8.0,
    "resign_s": 5.0,
}
STORE_MEMORY: Final = 64 << 20
WORK_S_MAX: Final = 0.05
LOOK_S: Final = 0.2


class KeptTruth(Truth):
    """The books of a log that is purged: they know what is not there any more, and what was forgotten."""

    def _enter(self, recorded: AnyRecorded) -> Verdict:
        assert isinstance(recorded.event, Event), f"nobody writes what cannot be read: {recorded}"
        seq = recorded.seq
        self.facts[seq] = recorded
        verdict = self.verdicts[seq] = self.fold.apply(recorded)
        self.hash_at[seq] = self.fold.hash()
        for touched in verdict.touched:
            if touched.kind == "key":
                key = self.fold.key(touched.tenant, touched.name)
                self.bound[touched.name].append((seq, None if key is None else key.artifact))
            elif touched.kind == "artifact":
                record = self.fold.artifacts.get((touched.tenant, ArtifactId(touched.name)))
                self.lived[touched.name].append((seq, "live" if record is not None and record.live else None))
        return verdict

    def purged(self) -> list[int]:
        """Facts that the log has not got any more."""
        return [seq for seq in self.facts if self.log.get(seq) is None]

    # -- what must hold at any moment ----------------------------------------------------------------------------------

    def check_ids(self) -> None:
        """What is taken never looks free: the server's last sequence of each aggregate is the fold's, unless it is
        being forgotten."""
        announced = self.fold.log.announced
        forgetting = announced.forget if announced is not None and announced.upto > self.fold.log.purged else 0
        for about, head in self.fold.heads.items():
            last = self.log.last_on(self.subjects.fence(about))
            there = 0 if last is None else last.seq
            assert there == head or (there == 0 and head <= forgetting), f"{about} ends at {head}, there is {there}"

    def check_purged(self) -> None:
        """Nothing goes before it is in the archive and its purge was announced."""
        kept = self.fold.log
        allowed = 0 if kept.announced is None else min(kept.archived, kept.announced.upto)
        late = [seq for seq in self.purged() if seq > allowed]
        assert not late, f"{late} are gone, only up to {allowed} may be"


class KeptLive(CheckedLive):
    """Also compared after it was made anew from a snapshot."""

    def replace(self, other: LiveDirectory) -> None:
        super().replace(other)
        assert self.state.hash() == self._truth.hash_at[self.state.seq], f"another state at {self.state.seq}"


class Rows:
    """A store's file.

    Attributes:
        facts: What was taken in, with the verdict of the store's own fold.
        full: Whether the disk that it is on takes nothing more.
    """

    def __init__(self) -> None:
        self.facts: list[Applied] = []
        self.full = False

    @property
    def position(self) -> tuple[int, EventId]:
        if not self.facts:
            return 0, EventId("")
        last = self.facts[-1].recorded
        return last.seq, last.headers.event_id

    def apply(self, batch: Sequence[Applied]) -> None:
        if self.full:
            raise OutOfSpaceError("there is no room for the rows")
        seen, new = self.position[0], list[Applied]()
        for item in batch:
            if item.recorded.seq > seen:
                if item.after > seen:
                    raise ConflictError(f"the rows are at {seen}, the next fact follows {item.after}")
                new.append(item)
                seen = item.recorded.seq
        self.facts += new

    def close(self) -> None:
        """The file stays."""


class SimProjector(Projector):
    """Its one thread is a turn on the loop, now and then a slow one."""

    def __init__(self, worker: KeptWorker, core: Core, archive: Archive) -> None:
        super().__init__(
            core.bus,
            path=Path("/nowhere/store"),
            archive=archive,
            look_s=worker.settings.purge_delay_s / LOOKS_PER_DELAY,
            memory_bytes=STORE_MEMORY,
        )
        self.rows = worker.kept.disks.setdefault(worker.node.name, Rows())
        self._rng = worker.node.world.rng(f"projector/{worker.node.name}/{worker.node.life.number}")
        self._turn = asyncio.Lock()

    @property
    def state(self) -> Directory:
        return self._state

    async def in_thread(self, work: Callable[[], T]) -> T:
        async with self._turn:
            await asyncio.sleep(self._rng.uniform(0.0, WORK_S_MAX))
            return work()

    def _newest(self) -> Remembered | None:
        if not self.rows.facts:
            return None
        last = self.rows.facts[-1].recorded
        return Remembered(last.seq, last.headers.event_id, last.time_ns)

    def _open(self) -> None:
        self._store = cast("GlobalStore", self.rows)


class SimPurger(Purger):
    """Asks the rows of memory instead of SQL."""

    def __init__(self, core: Core, projector: SimProjector) -> None:
        super().__init__(core.bus, projector)
        self._rows = projector.rows
        self._subjects = core.bus.subjects

    def _of_others(self) -> Iterator[int]:
        return (item.recorded.seq for item in self._rows.facts if item.recorded.event.type not in OWN)

    async def count(self, after: int, upto: int) -> int:
        return sum(after < seq <= upto for seq in self._of_others())

    async def upto(self, purged: int, covered: int, *, keep_facts: int) -> int:
        seqs = list(self._of_others())
        upto = min(seqs[-1 - keep_facts] if len(seqs) > keep_facts else 0, covered)
        return upto if await self.count(purged, upto) > keep_facts // WORTH else 0

    async def before(self, time_ns: int, *, at_most: int) -> int:
        found = (item.recorded for item in self._rows.facts)
        return max((fact.seq for fact in found if fact.time_ns <= time_ns and fact.seq <= at_most), default=0)

    def _aggregates(self, after: int, upto: int) -> list[Aggregate]:
        facts = (item.recorded for item in self._rows.facts)
        found = dict.fromkeys(self._subjects.parse(fact.subject)[0] for fact in facts if after < fact.seq <= upto)
        return [about for about in found if about.kind not in UNGUARDED and about.kind not in KEPT_WHOLE]

    def _in_facts(self, purged: int) -> set[str]:
        return set()  # manifests are small enough here to be in their facts


class SimStoreRole:
    """The role's parts but for the answers."""

    def __init__(self, worker: KeptWorker, core: Core) -> None:
        settings = worker.settings
        archive = Archive.open(worker.kept.archive_url)
        self.projector = SimProjector(worker, core, archive)
        limits = KeeperLimits(
            archive_s=settings.archive_s,
            snapshot_facts=settings.snapshot_facts,
            keep_facts=settings.keep_facts,
            purge_delay_s=settings.purge_delay_s,
            forget_s=settings.forget_s,
            resign_s=settings.resign_s,
        )
        self.keeper = Keeper(core, self.projector, archive, limits)
        self.keeper._purger = SimPurger(core, self.projector)

    def work(self) -> list[tuple[str, Coroutine[Any, Any, None]]]:
        return [("project", self.projector.run()), ("keep", self.keeper.run()), ("mind", self.keeper.mind())]

    async def leave(self, *, deadline: Deadline) -> None:
        await self.keeper.leave(deadline=deadline)

    def on_loss(self) -> None:
        self.keeper.on_loss()
        self.projector.suspect()

    def stats(self) -> Json:
        return {}


class KeptCluster(Cluster):
    """Nodes whose log is kept by stores.

    Attributes:
        disks: What each node's store has on its disk.
        stores: The role that runs on a node now.
        buses: The connection that a node has now.
        archive_url: Where the archive is.
    """

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.truth = KeptTruth(world)
        self.bus = MemoryBus(self.truth)
        self.disks: dict[str, Rows] = {}
        self.stores: dict[str, SimStoreRole] = {}
        self.buses: dict[str, SimBus] = {}
        self.archive_url = f"memory://simulated-{id(world)}"

    async def reconnect(self, name: str) -> None:
        """Have a node that was cut off come back by a new connection, or by the old one. Runs for ever."""
        node, rng = self.world.node(name), self.world.rng(f"reconnect/{name}")
        while True:
            while node.connected.is_set():
                await asyncio.sleep(LOOK_S)
            await node.connected.wait()
            if rng.random() < 0.7 and name in self.buses:
                self.buses[name].reconnect()

    async def fill_disk_of_keeper(self) -> str:
        """From now on the disk of the store that keeps the log is full; its name."""
        while (held := log_rules.role_holder(self.truth.fold, STORE_ROLE)) is None:
            await asyncio.sleep(LOOK_S)
        self.world.note("full", held.worker)
        self.world.cover("fault.full_disk")
        self.disks[held.worker].full = True
        return held.worker

    def kept_by_other(self, full: str) -> bool:
        """Whether another store has the role, and has archived what that one could not write."""
        held = log_rules.role_holder(self.truth.fold, STORE_ROLE)
        beyond = self.truth.fold.log.archived > self.disks[full].position[0]
        return held is not None and held.worker != full and beyond

    def rows_settled(self) -> bool:
        """Whether every store is open and has everything in its rows."""
        seq = self.truth.fold.seq
        return all(role.projector.position == role.projector.state.seq == seq for role in self.stores.values())


class KeptWorker(SimWorker):
    """A worker on a log that is purged, which may have the store's role."""

    def __init__(self, cluster: Cluster, node: Node, roles: tuple[str, ...]) -> None:
        super().__init__(cluster, node, roles)
        assert isinstance(cluster, KeptCluster)
        self.kept = cluster
        self.settings: Settings = self.settings.model_copy(update=LIMITS)
        self.live = KeptLive(cluster.truth)

    async def run(self, *, stop: asyncio.Event, ready: Callable[[WorkerCard], None]) -> None:
        async with AsyncExitStack() as stack:
            bus = await self._connect(stack)
            assert isinstance(bus, SimBus)
            self.kept.buses[self.node.name] = bus
            feed = DirectoryFeed(
                bus,
                self.live,
                purge_delay_s=self.settings.purge_delay_s,
                on_rebuilt=lambda: self.node.world.cover("rebuilt"),
            )
            author = Author(feed, worker=self.worker, incarnation=self._incarnation, ids=self._ids)
            await stack.enter_async_context(feed.running(deadline=Deadline(START_S, what="reading the log")))
            if feed.snapshot_used is not None:
                self.node.world.cover("started_from_snapshot")
            await stack.enter_async_context(author.running())
            leases = LeaseFeed(bus.pages)
            await stack.enter_async_context(leases.running(deadline=Deadline(START_S, what="reading the grants")))
            try:
                async with asyncio.TaskGroup() as group:
                    await self._serve(group, feed, author, leases, stop=stop, ready=ready)
            except* TensorbusError as failed:
                raise failed.exceptions[0] from None

    async def _store(self, stack: AsyncExitStack, core: Core) -> StoreRole:
        return await stack.enter_async_context(self._role(core))

    @asynccontextmanager
    async def _role(self, core: Core) -> AsyncIterator[StoreRole]:
        role = self.kept.stores[self.node.name] = SimStoreRole(self, core)
        try:
            yield cast("StoreRole", role)
        finally:
            await role.projector.close()


@contextmanager
def kept_in_memory() -> Iterator[None]:
    """Pretended memory and disks as long as the context is open."""
    with ExitStack() as stack:
        stack.enter_context(parts.in_memory())
        stack.enter_context(patch.object(parts, "SimWorker", KeptWorker))
        yield
