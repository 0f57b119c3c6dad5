"""The part of a worker that holds bytes: pool, store, puts, fetches, leases, and the server that others read from."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from tensorbus.config import Settings
from tensorbus.errors import OutOfSpaceError
from tensorbus.transport import PagePool, PinWatch, Pool, tls_files
from tensorbus.transport._spill_folder import SpillFolder
from tensorbus.workers._announce import Announcer
from tensorbus.workers._bulk import BulkSide
from tensorbus.workers._bytes_ops import BytesOps
from tensorbus.workers._core import Core
from tensorbus.workers._disk import DiskTier
from tensorbus.workers._executors import Executors
from tensorbus.workers._fetch import Fetches
from tensorbus.workers._integrity import Integrity
from tensorbus.workers._leases import Leases
from tensorbus.workers._operations import Operations
from tensorbus.workers._puts import Puts
from tensorbus.workers._reclaim import Reclaim
from tensorbus.workers._store import Store
from tensorbus.workers._tiers import Order, Tiers
from tensorbus.workers._transfers import ways_of

log = logging.getLogger("tensorbus.workers")

REFILL_DELAY_S = 0.5

MakeOrder = Callable[[str, int], Order]
"""Makes an eviction policy by its name, for a tier of so many bytes."""


class MemoryRole:
    """Everything that a basic worker has and a gateway has not."""

    def __init__(self, core: Core, settings: Settings, eviction: MakeOrder | None) -> None:
        self._core = core
        self._loop = asyncio.get_running_loop()
        self.on_retired: Callable[[int, str | None], None] = lambda _segment, _writer: None
        self._reserve_used = asyncio.Event()
        self.pool = Pool(
            settings.pool_bytes,
            reserve_bytes=settings.reserve_bytes,
            on_reserve_used=self._refill,
            on_retired=self._retired,
        )
        self.pages = PagePool(self.pool)
        self.store = Store()
        folder = None
        if settings.disk_bytes:
            root = settings.disk_dir or settings.home / "disk"
            folder = SpillFolder(root, core.me.worker, home=settings.home, prefix=settings.subject_prefix)
        self.disk = DiskTier(core, folder, nbytes_max=settings.disk_bytes)
        self.tiers = Tiers(
            core,
            self.pool,
            self.store,
            self.disk,
            order=None if eviction is None else eviction(settings.eviction, settings.pool_bytes),
            high=settings.memory_high,
            low=settings.memory_low,
        )
        self.leases = Leases(core, self.store)
        self.puts = Puts(core, self.store, persist=self.tiers.persist)
        how = ways_of(settings)
        self.fetches = Fetches(core, self.pool, self.store, self.puts, how, tiers=self.tiers, disk=self.disk)
        self.reclaim = Reclaim(core, self.store, self.leases, self.disk)
        self.ops = BytesOps(
            core, tiers=self.tiers, store=self.store, puts=self.puts, fetches=self.fetches, leases=self.leases
        )
        self.integrity = Integrity(
            core, store=self.store, puts=self.puts, disk=self.disk, tiers=self.tiers, fetches=self.fetches
        )
        core.disk_stats = self.disk.stats if settings.disk_bytes else None
        self.operations = Operations(core, self._executors())
        self.announcer = Announcer(core, self.store, self.leases, self.disk)
        self.bulk = BulkSide(
            core, self.store, self.puts, self.fetches, tiers=self.tiers, disk=self.disk, pages=self.pages
        )
        self.address = ""

    def _executors(self) -> Executors:
        return Executors(
            self._core,
            store=self.store,
            fetches=self.fetches,
            tiers=self.tiers,
            disk=self.disk,
            leases=self.leases,
            integrity=self.integrity,
        )

    def _refill(self) -> None:
        """Comes from whatever thread asked the pool."""
        self._loop.call_soon_threadsafe(self._reserve_used.set)

    def _retired(self, segment: int, writer: str | None) -> None:
        """Comes from whatever thread asked the pool."""
        self._loop.call_soon_threadsafe(lambda: self.on_retired(segment, writer))

    @classmethod
    @asynccontextmanager
    async def running(
        cls, core: Core, settings: Settings, eviction: MakeOrder | None = None
    ) -> AsyncIterator[MemoryRole]:
        """Have memory and serve its bytes as long as the context is open."""
        role = cls(core, settings, eviction)
        watches = [PinWatch(role.pool), PinWatch(role.pages)]
        try:
            role.address = role.bulk.start(settings.data_host, settings.data_port, tls=tls_files(settings))
            for watch in watches:
                watch.start()
            if settings.reserve_bytes:
                core.spawn(role._keep_reserve(), name="fill reserve")
            async with role.bulk.permitting(), role.operations.answering(), role.integrity.answering():
                yield role
        finally:
            for watch in watches:
                watch.close()
            role.fetches.transfers.close()
            await asyncio.to_thread(role.bulk.close)
            role.disk.close()
            role.pages.close()
            role.pool.close()

    def work(self) -> list[tuple[str, Coroutine[Any, Any, None]]]:
        """The endless tasks of this part."""
        return [("leases", self.leases.expire()), ("tiers", self.tiers.run()), ("disk", self.disk.run())]

    def on_loss(self) -> None:
        """The log lost its tail."""
        self.disk.on_loss()

    async def _keep_reserve(self) -> None:
        """Have the reserve filled, for ever, a little after it was used: many puts come together."""
        while True:
            try:
                await asyncio.to_thread(self.pool.fill_reserve)
            except OutOfSpaceError as error:  # the first put says so to somebody who can act on it
                log.info("the reserve is not filled: %s", error)
            await self._reserve_used.wait()
            await asyncio.sleep(REFILL_DELAY_S)
            self._reserve_used.clear()
