"""The part of a worker that holds bytes: pool, store, puts, fetches, leases, and the server that others read from."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from tensorbus.config import Settings
from tensorbus.errors import OutOfSpaceError
from tensorbus.transport import PinWatch, Pool, tls_files
from tensorbus.workers._announce import Announcer
from tensorbus.workers._bulk import BulkSide
from tensorbus.workers._bytes_ops import BytesOps
from tensorbus.workers._core import Core
from tensorbus.workers._fetch import Fetches, ways_of
from tensorbus.workers._leases import Leases
from tensorbus.workers._puts import Puts
from tensorbus.workers._reclaim import Reclaim
from tensorbus.workers._store import Store


class MemoryRole:
    """Everything that a basic worker has and a gateway has not."""

    def __init__(self, core: Core, settings: Settings) -> None:
        self._loop = asyncio.get_running_loop()
        self.on_retired: Callable[[int, str | None], None] = lambda _segment, _writer: None
        self.pool = Pool(settings.pool_bytes, reserve_bytes=settings.reserve_bytes, on_retired=self._retired)
        self.store = Store()
        self.leases = Leases(core, self.store)
        self.puts = Puts(core, self.store)
        self.fetches = Fetches(core, self.pool, self.store, self.puts, ways_of(settings))
        self.reclaim = Reclaim(core, self.store, self.leases)
        self.ops = BytesOps(
            core, pool=self.pool, store=self.store, puts=self.puts, fetches=self.fetches, leases=self.leases
        )
        self.announcer = Announcer(core, self.store, self.leases)
        self.bulk = BulkSide(core, self.pool, self.store, self.puts)
        self.address = ""

    def _retired(self, segment: int, writer: str | None) -> None:
        """Comes from whatever thread asked the pool."""
        self._loop.call_soon_threadsafe(lambda: self.on_retired(segment, writer))

    @classmethod
    @asynccontextmanager
    async def running(cls, core: Core, settings: Settings) -> AsyncIterator[MemoryRole]:
        """Have memory and serve its bytes as long as the context is open."""
        role = cls(core, settings)
        pins = PinWatch(role.pool)
        try:
            role.address = role.bulk.start(settings.data_host, settings.data_port, tls=tls_files(settings))
            pins.start()
            if settings.reserve_bytes:
                core.spawn(role._fill_reserve(), name="fill reserve")
            async with role.bulk.permitting():
                yield role
        finally:
            pins.close()
            await asyncio.to_thread(role.bulk.close)
            role.pool.close()

    async def _fill_reserve(self) -> None:
        try:
            await asyncio.to_thread(self.pool.fill_reserve)
        except OutOfSpaceError:
            return  # the first put says so to somebody who can act on it
