"""Whole workers in one process: the product's own shells on simulated nodes, over one bus and a network in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

from tensorbus.bus import Bus, Heartbeat, MemoryBus, WrongSequenceError
from tensorbus.clock import Deadline
from tensorbus.config import Settings
from tensorbus.errors import (
    ConflictError,
    FencedError,
    NotFoundError,
    OutOfSpaceError,
    TensorbusError,
    UnavailableError,
)
from tensorbus.events import SessionEnd, SessionEnded, decode
from tensorbus.feeds import Author, DirectoryFeed, LeaseFeed
from tensorbus.lifecycle import Artifact, Session
from tensorbus.testing import InvariantError, Node, SimBus, World
from tensorbus.transport import Channel, Pool, PoolStats, SegmentState, WorkerCard, memory_pair, page_round
from tensorbus.workers import _worker
from tensorbus.workers._announce import Announcer
from tensorbus.workers._bytes_ops import BytesOps
from tensorbus.workers._core import Core, Identity
from tensorbus.workers._disk import DiskTier
from tensorbus.workers._fetch import Fetches
from tensorbus.workers._leases import Leases
from tensorbus.workers._operations import Operations
from tensorbus.workers._puts import Puts
from tensorbus.workers._reclaim import Reclaim
from tensorbus.workers._store import Held, Store
from tensorbus.workers._tiers import Tiers
from tensorbus.workers._worker import START_S, Worker
from tests.simulation.truth import CheckedLive, Truth

TTL_S = 6.0
DRIFT = 1e-3
"""By how much two nodes' clocks may differ in what they call a TTL."""
RESTART_S = 1.0
POOL_BYTES = 1 << 20


class Cluster:
    """Everything that the nodes of one world share.

    Attributes:
        running: The worker process that runs on each node now.
        listening: Where a node's worker accepts callers.
        memories: The bytes that a node's worker holds.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.truth = Truth(world)
        self.bus = MemoryBus(self.truth)
        self.running: dict[str, SimWorker] = {}
        self.listening: dict[str, SimListener] = {}
        self.memories: dict[str, SimMemory] = {}
        self.stops: dict[str, asyncio.Event] = {}
        self.names: list[str] = []

    def start(self, name: str, *roles: str) -> None:
        """Run a worker on a node for ever: whoever ends it, its supervisor starts it anew."""

        async def main(node: Node) -> None:
            while True:
                await self._one_life(node, roles)
                await asyncio.sleep(RESTART_S)

        self.names.append(name)
        self.world.node(name).start(main)

    async def _one_life(self, node: Node, roles: tuple[str, ...]) -> None:
        worker = self.running[node.name] = SimWorker(self, node, roles)
        stop = self.stops[node.name] = asyncio.Event()
        try:
            await worker.run(stop=stop, ready=lambda _card: self.world.cover("ready"))
            self.world.cover("left")
        except FencedError as error:
            self.world.cover("fenced")
            self.world.note("fenced", node.name, worker.incarnation)
            if self.truth.fold.is_live(worker.worker, worker.incarnation):
                raise InvariantError(f"{node.name} was told that it is fenced, which the log does not say") from error
        except TensorbusError as error:
            self.world.cover("could_not_run")
            self.world.note("could not run", node.name, type(error).__name__)
        finally:
            if self.running.get(node.name) is worker:
                del self.running[node.name]

    def connect(self, node: Node, worker: str) -> Channel:
        """A caller's connection to the worker of a node; a crash at either end closes it."""
        listener = self.listening.get(worker)
        if listener is None or listener.closed:
            raise UnavailableError(f"nobody listens on {worker}")
        server, client = memory_pair(names=(worker, node.name))
        node.on_crash(client.close)
        self.world.node(worker).on_crash(server.close)
        listener.offer(server)
        return client

    def settled(self) -> bool:
        """Whether every node's worker is up, holds its session, and has the log's state."""
        fold = self.truth.fold
        return all(
            name in self.running
            and fold.is_live(self.running[name].worker, self.running[name].incarnation)
            and self.running[name].live.state.seq == fold.seq
            and self.running[name].live.state.hash() == fold.hash()
            for name in self.names
            if self.world.node(name).is_up
        )


class ObservedBus(SimBus):
    """A worker's bus that checks each death that its witness decides on against what really happened."""

    def __init__(self, node: Node, cluster: Cluster) -> None:
        super().__init__(node, cluster.bus)
        self.node, self.cluster = node, cluster
        self._truth = cluster.truth
        self._heard_itself_s: float | None = None

    async def publish(self, subject: str, data: bytes, *, headers: Mapping[str, str], deadline: Deadline) -> int:
        if subject.startswith("tb.ev.session."):
            fact = decode(seq=0, time_ns=0, subject=subject, headers=headers, data=data).event
            if isinstance(fact, SessionEnded) and fact.reason is SessionEnd.EXPIRED:
                self._check_silent(fact)
        try:
            return await super().publish(subject, data, headers=headers, deadline=deadline)
        except WrongSequenceError:
            self.node.world.cover("conflict")
            raise

    def _check_silent(self, fact: SessionEnded) -> None:
        world = self.node.world
        world.note("decides", self.node.name, fact.worker, fact.incarnation)
        assert self._heard_itself_s is not None, f"{self.node.name} ends a session and never heard itself"
        assert world.loop.time() - self._heard_itself_s < TTL_S + 1, f"{self.node.name} has heard nothing of late"
        since_s = self._heard_itself_s - TTL_S * (1 - DRIFT)
        heard = self._truth.beats_between(fact.worker, fact.incarnation, since_s, self._heard_itself_s)
        assert not heard, (
            f"{self.node.name} ends {fact.worker} at {world.loop.time():.3f}, whose heartbeats were stored at {heard}; "
            f"what it heard last of itself was stored at {self._heard_itself_s:.3f}"
        )

    @asynccontextmanager
    async def watch_live(self) -> AsyncIterator[AsyncIterator[Heartbeat]]:
        async with super().watch_live() as beats:
            yield self._noting(beats)

    async def _noting(self, beats: AsyncIterator[Heartbeat]) -> AsyncIterator[Heartbeat]:
        running = self.cluster.running
        async for beat in beats:
            own = beat.worker == self.node.name and beat.incarnation == running[self.node.name].incarnation
            if own and not beat.gone:
                self._heard_itself_s = self._truth.beat_s[beat.seq]
            yield beat


class SimWorker(Worker):
    """The worker of the product, without its files and sockets."""

    def __init__(self, cluster: Cluster, node: Node, roles: tuple[str, ...]) -> None:
        settings = Settings(
            home=Path("/nowhere"),
            worker_id=node.name,
            host_id=f"host-{node.name}",
            session_ttl_s=TTL_S,
            pool_bytes=POOL_BYTES,
        )
        super().__init__(settings, roles=roles, clock=node.clock, ids=node.ids)
        self.cluster, self.node = cluster, node
        self.live = CheckedLive(cluster.truth)

    @property
    def incarnation(self) -> str:
        return self._incarnation

    @property
    def unsettled(self) -> bool:
        """Whether it still says again what it holds."""
        memory = self.cluster.memories.get(self.node.name)
        return memory is not None and memory.core.unsettled

    async def run(self, *, stop: asyncio.Event, ready: Callable[[WorkerCard], None]) -> None:
        async with AsyncExitStack() as stack:
            bus = await self._connect(stack)
            feed = DirectoryFeed(bus, self.live)
            author = Author(feed, worker=self.worker, incarnation=self._incarnation, ids=self._ids)
            await stack.enter_async_context(feed.running(deadline=Deadline(START_S, what="reading the log")))
            await stack.enter_async_context(author.running())
            leases = LeaseFeed(bus.pages)
            await stack.enter_async_context(leases.running(deadline=Deadline(START_S, what="reading the grants")))
            try:
                async with asyncio.TaskGroup() as group:
                    await self._serve(group, feed, author, leases, stop=stop, ready=ready)
            except* TensorbusError as failed:
                raise failed.exceptions[0] from None

    async def _connect(self, stack: AsyncExitStack) -> Bus:
        bus = ObservedBus(self.node, self.cluster)
        stack.push_async_callback(bus.close)
        return bus

    async def _listen(self, stack: AsyncExitStack, me: Identity) -> list[Any]:
        listener = self.cluster.listening[self.node.name] = SimListener(self.node)
        stack.callback(listener.close)
        return [listener]

    @asynccontextmanager
    async def _card_up(self, me: Identity) -> AsyncIterator[WorkerCard]:
        yield WorkerCard(
            worker=self.worker, incarnation=me.incarnation, host_id=me.host, roles=self.roles, pid=1, socket="",
            control="", data=me.data,
        )  # fmt: skip


class SimListener:
    """Where callers connect; closed with the worker's life."""

    def __init__(self, node: Node) -> None:
        self.address = node.name
        self.closed = False
        self._offered: asyncio.Queue[Channel | None] = asyncio.Queue(64)
        node.on_crash(self.close)

    def offer(self, channel: Channel) -> None:
        self._offered.put_nowait(channel)

    async def accept(self) -> Channel:
        channel = None if self.closed else await self._offered.get()
        if channel is None:
            raise UnavailableError(f"{self.address} is closed")
        return channel

    def close(self) -> None:
        self.closed = True
        while not self._offered.empty():
            waiting = self._offered.get_nowait()
            if waiting is not None:
                waiting.close()
        self._offered.put_nowait(None)


# -- memory -----------------------------------------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class SimSegment:
    """One use of pretended shared memory."""

    id: int
    generation: int
    nbytes: int
    pool: SimPool
    tenant: str
    label: str = ""
    state: SegmentState = SegmentState.FILLING
    data: bytearray = field(default_factory=bytearray)
    writer_mapped: bool = False
    in_use: bool = False

    @property
    def capacity_bytes(self) -> int:
        return page_round(self.nbytes)

    @property
    def view(self) -> memoryview:
        return memoryview(self.data)

    def valid(self) -> bool:
        return self.state in (SegmentState.FILLING, SegmentState.SEALED)

    def seal(self) -> None:
        if not self.valid():
            raise ConflictError(f"segment {self.id} is {self.state}")
        self.state = SegmentState.SEALED

    def release(self) -> None:
        if self.valid():
            self.state = SegmentState.FREED
            del self.pool.busy[self.id, self.generation]

    @contextmanager
    def lease(self) -> Iterator[memoryview]:
        if not self.valid():
            raise ConflictError(f"segment {self.id} is {self.state}")
        yield memoryview(self.data).toreadonly()

    def open_writer(self) -> tuple[()]:
        return ()

    def open_reader(self) -> list[int]:
        if self.state is not SegmentState.SEALED:
            raise ConflictError(f"segment {self.id} is {self.state}")
        return []


class SimPool:
    """A pool's accounts, with bytes in ordinary memory and no descriptors."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.busy: dict[tuple[int, int], SimSegment] = {}
        self._ids = count(1)

    @property
    def busy_bytes(self) -> int:
        return sum(segment.capacity_bytes for segment in self.busy.values())

    def allocate(self, nbytes: int, *, tenant: str, writer: str | None = None, fresh: bool = False) -> SimSegment:
        del writer, fresh
        if self.busy_bytes + page_round(nbytes) > self.budget_bytes:
            raise OutOfSpaceError(f"{nbytes} bytes do not fit")
        segment = SimSegment(next(self._ids), 1, nbytes, self, tenant, data=bytearray(nbytes))
        self.busy[segment.id, segment.generation] = segment
        return segment

    def stats(self) -> PoolStats:
        busy = self.busy_bytes
        return PoolStats(
            budget_bytes=self.budget_bytes, used_bytes=busy, busy_bytes=busy, free_bytes=0, retiring_bytes=0,
            segments=len(self.busy), pins=0,
        )  # fmt: skip


class SimFetches(Fetches):
    """Fetches from another node's memory instead of its socket."""

    def __init__(self, core: Core, pool: SimPool, store: Store, puts: Puts, bus: ObservedBus) -> None:
        super().__init__(core, cast("Pool", pool), store, puts)
        self._bus = bus
        self._rng = bus.node.world.rng(f"fetch/{bus.node.name}/{bus.node.life.number}")

    async def _from(self, source: Session, record: Artifact, *, alone: bool, relayed: bool) -> Held:
        cluster, name = self._bus.cluster, str(source.worker)
        await asyncio.sleep(self._rng.uniform(0.001, 0.5))
        memory = cluster.memories.get(name)
        reachable = cluster.world.node(name).is_up and memory is not None and memory.incarnation == source.incarnation
        if not reachable or memory is None:
            raise UnavailableError(f"worker {name} cannot be reached")
        theirs = memory.store.get(record.tenant, record.artifact)
        if theirs is None:
            raise NotFoundError(f"worker {name} does not hold {record.artifact}")
        cluster.world.cover("fetched")
        (part,) = theirs.parts
        mine = self._pool.allocate(part.nbytes, tenant=record.tenant)
        mine.view[:] = part.view
        await asyncio.sleep(self._rng.uniform(0.001, 0.5))
        mine.seal()
        return Held(record.tenant, record.artifact, (mine,), theirs.layout, theirs.manifest)


class SimMemory:
    """The part of a worker that holds bytes, made of the product's parts but for the pool and the bulk server."""

    def __init__(self, core: Core, settings: Settings) -> None:
        bus = cast("ObservedBus", core.bus)
        self.core = core
        self.incarnation = core.me.incarnation
        self.on_retired: Callable[[int, str | None], None] = lambda _segment, _writer: None
        self.pool = SimPool(settings.pool_bytes)
        self.store = Store()
        self.leases = Leases(core, self.store)
        disk = DiskTier(core, None, nbytes_max=0)
        pool = cast("Pool", self.pool)
        self.tiers = Tiers(core, pool, self.store, disk, order=None, high=settings.memory_high, low=settings.memory_low)
        self.puts = Puts(core, self.store)
        self.fetches = SimFetches(core, self.pool, self.store, self.puts, bus)
        self.reclaim = Reclaim(core, self.store, self.leases)
        self.ops = BytesOps(
            core,
            tiers=self.tiers,
            store=self.store,
            puts=self.puts,
            fetches=self.fetches,
            leases=self.leases,
        )
        self.operations = Operations(core, None)
        self.announcer = Announcer(core, self.store, self.leases)
        self.address = f"{core.me.worker}:1"
        bus.cluster.memories[bus.node.name] = self

    def work(self) -> list[tuple[str, Coroutine[Any, Any, None]]]:
        return [("leases", self.leases.expire())]

    def on_loss(self) -> None:
        """Nothing is on disk."""

    @classmethod
    @asynccontextmanager
    async def running(cls, core: Core, settings: Settings, _eviction: object = None) -> AsyncIterator[SimMemory]:
        yield cls(core, settings)


@contextmanager
def in_memory() -> Iterator[None]:
    """Give workers pretended memory as long as the context is open."""
    with patch.object(_worker, "MemoryRole", SimMemory):
        yield
