"""Operations as methods of an artifact's handle: asked for and waited for in one call."""

# ruff: noqa: SLF001 - a bus, its handles and their mirrors are one unit; what they share is nobody else's
from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from tensorbus.clock import Deadline
from tensorbus.errors import UnavailableError
from tensorbus.sdk._operation_records import Evicted, Migrated, Persisted, Prefetched, Replicated, Verified
from tensorbus.sdk._operations import AsyncWorker, worker_id

if TYPE_CHECKING:
    from tensorbus.sdk._artifact import AsyncArtifact


class ShortForms:
    """Mixed into the handle. Who stops waiting, also by ``timeout``, ends nothing: ``bus.operations()`` finds it."""

    __slots__ = ()

    async def prefetch(
        self, worker: AsyncWorker | str, *, device: str = "cpu", timeout: float | None = None
    ) -> Prefetched:
        """Have a copy in a worker's memory; see :meth:`AsyncWorker.prefetch`."""
        at = await self._at(worker, "prefetch", timeout)
        return await at.prefetch(self._handle, device=device).result(timeout)

    async def replicate(
        self, *, to: Sequence[AsyncWorker | str] | None = None, n: int | None = None, timeout: float | None = None
    ) -> Replicated:
        """Have copies on the workers ``to``, or on ``n`` in all; see :meth:`AsyncWorker.replicate`."""
        at = await self._at(None, "replicate", timeout)
        return await at.replicate(self._handle, to=to, n=n).result(timeout)

    async def migrate(
        self, *, src: AsyncWorker | str, dst: AsyncWorker | str, timeout: float | None = None
    ) -> Migrated:
        """Copy to ``dst``, verify it there, then drop it from ``src``; ``dst`` sees to it."""
        at = await self._at(dst, "migrate", timeout)
        return await at.migrate(self._handle, src=src, dst=dst).result(timeout)

    async def evict(self, worker: AsyncWorker | str, *, timeout: float | None = None) -> Evicted:
        """Drop a worker's copies; see :meth:`AsyncWorker.evict`."""
        at = await self._at(worker, "evict", timeout)
        return await at.evict(self._handle).result(timeout)

    async def persist(self, worker: AsyncWorker | str | None = None, *, timeout: float | None = None) -> Persisted:
        """Have a copy on a worker's disk: of this bus's worker, or without one of one that has a copy."""
        at = await self._at(worker, "persist", timeout)
        return await at.persist(self._handle).result(timeout)

    async def verify(self, worker: AsyncWorker | str | None = None, *, timeout: float | None = None) -> Verified:
        """Compare a worker's copies with the digests: those of this bus's worker, or else of one that has a copy.

        Raises:
            CorruptError: If a copy has other bytes; it names where.
        """
        at = await self._at(worker, "verify", timeout, holds=True)
        return await at.verify(self._handle).result(timeout)

    @property
    def _handle(self) -> AsyncArtifact:
        return cast("AsyncArtifact", self)

    async def _at(
        self, worker: AsyncWorker | str | None, what: str, timeout: float | None, *, holds: bool = False
    ) -> AsyncWorker:
        """Who is to be asked: the one that is named, else this bus's own or, where that will not do, a holder."""
        deadline = self._handle._begin(timeout, what)
        named = await self._near(deadline, holds=holds) if worker is None else worker_id(worker)
        return AsyncWorker(self._handle._bus, named)

    async def _near(self, deadline: Deadline, *, holds: bool) -> str:
        handle = self._handle
        hello = await handle._bus._core.link.connect(deadline)
        here = "basic" in hello.roles
        if here and not holds:
            return hello.worker
        holders = [replica.worker for replica in (await handle._now(deadline)).replicas if replica.view is None]
        if not holders:
            text = f"no living worker has a whole copy of {handle.base_id!r}"
            raise UnavailableError(text, artifact=handle.base_id)
        return hello.worker if here and hello.worker in holders else holders[0]
