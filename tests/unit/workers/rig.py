"""The parts of a worker in one process, over the bus in memory and a real pool."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from tensorbus.bus import MemoryBus, MemoryCluster
from tensorbus.clock import Clock, Deadline, LoopClock
from tensorbus.events import SessionOpened
from tensorbus.feeds import Author, DirectoryFeed
from tensorbus.ids import Incarnation, SystemIds, WorkerId, new_incarnation
from tensorbus.lifecycle import Directory
from tensorbus.model import Manifest, TensorSpec, plan_layout
from tensorbus.projections import LiveDirectory
from tensorbus.transport import Pool, Segment, hash_bytes
from tensorbus.workers._callers import Caller
from tensorbus.workers._core import Core, Identity
from tensorbus.workers._leases import Leases
from tensorbus.workers._puts import Incoming, Lease, Puts
from tensorbus.workers._reclaim import Reclaim
from tensorbus.workers._store import Store

TENANT = "acme"
MIB = 1 << 20


def soon(seconds: float = 10.0) -> Deadline:
    return Deadline(seconds, what="the test")


async def until(condition: Callable[[], object], what: str = "a condition") -> None:
    """Wait for something to become true, with a deadline."""
    async with Deadline(10.0, what=what).scope():
        while not condition():
            await asyncio.sleep(0.005)


@dataclass(eq=False)
class FakeSession:
    """Stands for a caller's connection."""

    id: str = "s1"
    closed: bool = False
    said: list[tuple[str, dict[str, object]]] = field(default_factory=list)

    def close(self) -> None:
        self.closed = True

    async def push(self, topic: str, data: dict[str, object]) -> None:
        self.said.append((topic, data))


def caller(name: str = "s1", *, tenant: str = TENANT) -> Caller:
    return Caller(FakeSession(name), tenant=tenant, pid=1)  # type: ignore[arg-type]  # as far as these tests look


@dataclass
class Rig:
    """One worker's parts, its session open."""

    core: Core
    pool: Pool
    store: Store
    puts: Puts
    leases: Leases
    bus: MemoryBus

    def filled(self, data: bytes, *, tenant: str = TENANT) -> Segment:
        segment = self.pool.allocate(len(data), tenant=tenant, writer=None)
        segment.view[:] = data
        return segment

    def incoming(
        self,
        data: bytes,
        *,
        given: str | None = None,
        key: str | None = None,
        rebind: bool = False,
        digest: bool = True,
        lease_s: float | None = None,
        tenant: str = TENANT,
    ) -> Incoming:
        manifest = Manifest((TensorSpec("w", "u8", (len(data),)),))
        segment = self.filled(data, tenant=tenant)
        if digest:
            manifest = manifest.with_digests([hash_bytes(memoryview(data))])
        lease = None if lease_s is None else Lease(id=f"lease-{segment.id}", holder="s1", ttl_s=lease_s)  # type: ignore[arg-type]  # any text
        return Incoming(
            tenant=tenant,
            principal="s1",
            parts=(segment,),
            layout=plan_layout(manifest),
            manifest=manifest,
            given=given,
            key=key,
            rebind=rebind,
            lease=lease,
        )

    @property
    def busy_bytes(self) -> int:
        return self.pool.stats().busy_bytes

    def bytes_of(self, artifact: str) -> bytes:
        held = self.store.get(TENANT, artifact)  # type: ignore[arg-type]  # ids are texts here
        assert held is not None, f"{artifact} is not held"
        with held.reading() as parts:
            return bytes(parts[0])


@asynccontextmanager
async def rig(
    cluster: MemoryCluster, name: str = "w1", *, pool_bytes: int = 8 * MIB, clock: Clock | None = None, ttl_s: int = 60
) -> AsyncIterator[Rig]:
    ids = SystemIds()
    bus = MemoryBus(cluster)
    feed = DirectoryFeed(bus, LiveDirectory(Directory(cluster.subjects)))
    author = Author(feed, worker=WorkerId(name), incarnation=new_incarnation(ids), ids=ids)
    me = Identity(WorkerId(name), author.incarnation, f"host-{name}", ("basic",))
    pool = Pool(pool_bytes)
    try:
        async with feed.running(deadline=soon()), author.running(), asyncio.TaskGroup() as group:
            core = Core(me=me, bus=bus, feed=feed, author=author, ids=ids, clock=clock or LoopClock(), group=group)
            store = Store()
            leases = Leases(core, store)
            reclaim = Reclaim(core, store, leases)
            await open_session(author, ttl_s=ttl_s)
            try:
                with core.live.followed(reclaim.on_change):
                    yield Rig(core, pool, store, Puts(core, store), leases, bus)
            finally:
                core.close()
    except* Exception as failed:
        raise failed.exceptions[0] from None
    finally:
        pool.close()


def opening(worker: str, incarnation: str, *, ttl_s: float = 60) -> SessionOpened:
    return SessionOpened(
        worker=WorkerId(worker),
        incarnation=Incarnation(incarnation),
        host=f"host-{worker}",
        roles=("basic",),
        data="127.0.0.1:1",
        control="",
        pool_bytes=8 * MIB,
        ttl_ns=int(ttl_s * 1e9),
        pid=1,
        version="0",
    )


async def open_session(author: Author, *, ttl_s: float = 60) -> None:
    fact = opening(author.worker, author.incarnation, ttl_s=ttl_s)
    await author.decide(lambda _state: fact, deadline=soon())
