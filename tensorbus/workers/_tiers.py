"""Which replica is where: room in memory is made by what leaves it, to disk or because another copy is as good."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final, Protocol

from tensorbus.errors import ConflictError, NotFoundError, OutOfSpaceError, TensorbusError
from tensorbus.events import DropReason, Event, LeasePurpose, ReplicaDropped, Tier
from tensorbus.lifecycle import Artifact, ReplicaKey, rules, spare
from tensorbus.transport import Pool, Segment, page_round
from tensorbus.workers._core import Core
from tensorbus.workers._disk import DiskTier
from tensorbus.workers._pins import pin_holders
from tensorbus.workers._puts import known_outcome
from tensorbus.workers._store import Held, Store, Where

log = logging.getLogger("tensorbus.workers")

LOOKED_AT_MAX: Final = 512
"""Candidates that are looked at in one go: the loop owes the bus a heartbeat."""
PAUSE_S: Final = 0.2
"""Between two looks at the high watermark."""


class Order(Protocol):
    """What goes first; see ``tensorbus.policies.Eviction``, which fits."""

    def add(self, key: Hashable, nbytes: int) -> None: ...

    def use(self, key: Hashable) -> None: ...

    def remove(self, key: Hashable) -> None: ...

    def evict(self, may: Callable[[Where], bool]) -> Where | None: ...


class Tiers:
    """Decides what leaves memory, and carries it out. Lives on the worker's loop.

    A copy in memory may go if the worker owns it, nobody reads or pins it, and its bytes are not lost by that: it is on
    this worker's disk or goes there first, or another worker holds one. Two that rely on each other propose both that
    theirs goes, and the log keeps the first.

    Args:
        order: What goes first; the eldest without one.
        high: Share of the pool in use from which copies leave by themselves, until it is down to ``low``.
    """

    def __init__(
        self, core: Core, pool: Pool, store: Store, disk: DiskTier, *, order: Order | None, high: float, low: float
    ) -> None:
        self._core = core
        self._pool = pool
        self._store = store
        self._disk = disk
        self._order = order
        self._high_bytes = int(pool.budget_bytes * high)
        self._low_bytes = int(pool.budget_bytes * low)
        self._using: Counter[Where] = Counter()
        self._leaving: set[Where] = set()
        self._relieving = asyncio.Lock()
        self._grown = asyncio.Event()
        store.on_added, store.on_used, store.on_dropped = self._added, self._used, self._dropped
        disk.spare = self._spare

    # -- room ---------------------------------------------------------------------------------------------------------

    async def allocate(self, nbytes: int, *, tenant: str, writer: str | None = None, fresh: bool = False) -> Segment:
        """A segment to fill; what may leave memory leaves it for that. See :meth:`Pool.allocate`.

        Raises:
            OutOfSpaceError: If not enough may leave; the details say who holds the space, and what could not leave why.
        """
        while True:
            try:
                return self._pool.allocate(nbytes, tenant=tenant, writer=writer, fresh=fresh)
            except OutOfSpaceError as error:
                lacking = page_round(nbytes) + self._pool.stats().busy_bytes - self._pool.budget_bytes
                if lacking <= 0 or page_round(nbytes) > self._pool.budget_bytes:
                    raise
                failures: list[TensorbusError] = []
                if not await self._make_room(nbytes, failures):
                    raise _explained(
                        error, failures, pin_holders(self._core.state, self._core.me.worker, tenant)
                    ) from error

    async def _make_room(self, nbytes: int, failures: list[TensorbusError]) -> bool:
        """Whether something has left, so that it is worth another try."""
        async with self._relieving:
            lacking = page_round(nbytes) + self._pool.stats().busy_bytes - self._pool.budget_bytes
            if lacking <= 0:
                return True  # somebody else made room meanwhile
            if await self._evictable_bytes(lacking) < lacking:
                return False
            return await self._relieve(lacking, failures) > 0

    async def run(self) -> None:
        """Keep the pool below its high watermark, for ever, as far as copies may leave."""
        while True:
            await self._grown.wait()
            self._grown.clear()
            busy = self._pool.stats().busy_bytes
            if busy > self._high_bytes:
                async with self._relieving:
                    await self._relieve(busy - self._low_bytes, [])
            await asyncio.sleep(PAUSE_S)

    async def _relieve(self, nbytes: int, failures: list[TensorbusError]) -> int:
        """Have copies leave until so many bytes are free; gives how many became so."""
        freed, kept = 0, list[Where]()
        while freed < nbytes and (where := self._victim()) is not None:
            held = self._store.get(*where)
            if held is None:
                continue
            size = sum(part.capacity_bytes for part in held.parts)
            try:
                left = await self._leave(held)
            except TensorbusError as error:
                log.warning("a copy cannot leave memory: artifact=%s reason=%s", where[1], error)
                failures.append(error)
                left = False
                if isinstance(error, OutOfSpaceError):
                    kept.append(where)
                    break
            freed += size if left else 0
            if not left:
                kept.append(where)
        for where in kept:
            if (held := self._store.get(*where)) is not None:
                self._added(held)
        return freed

    def _victim(self) -> Where | None:
        looked_at, spared = 0, list[Where]()

        def may(where: Where) -> bool:
            nonlocal looked_at
            looked_at += 1
            if looked_at > LOOKED_AT_MAX:
                return False
            if self._may_leave(where):
                return True
            spared.append(where)
            return False

        if self._order is None:
            return next((held.where for held in self._store.all() if may(held.where)), None)
        found = self._order.evict(may)
        for where in spared:  # else those that may not go are looked at again and again
            self._order.use(where)
        return found

    async def _evictable_bytes(self, enough: int) -> int:
        found = 0
        for n, held in enumerate(self._store.all()):
            if n % LOOKED_AT_MAX == LOOKED_AT_MAX - 1:
                await asyncio.sleep(0)
            if self._may_leave(held.where):
                found += sum(part.capacity_bytes for part in held.parts)
                if found >= enough:
                    break
        return found

    # -- what may go --------------------------------------------------------------------------------------------------

    @contextmanager
    def using(self, where: Where) -> Iterator[None]:
        """As long as the context is open, nothing leaves that is about to be pinned."""
        self._using[where] += 1
        try:
            yield
        finally:
            self._using[where] -= 1
            if not self._using[where]:
                del self._using[where]

    def _may_leave(self, where: Where) -> bool:
        record, held = self._core.state.artifacts.get(where), self._store.get(*where)
        return (
            held is not None and record is not None and self._why_not(held, record) == "" and self._can_be_had(record)
        )

    def _why_not(self, held: Held, record: Artifact) -> str:
        """Why a copy in memory must stay, or empty."""
        if held.lease is not None:
            return "it is a caller's own memory"
        if not record.live or held.life != record.born or held.settling or held.where in self._leaving:
            return "its place on the log is being settled"
        me = self._core.me.worker
        if any(one.worker == me and one.purpose is LeasePurpose.PIN for one in record.leases.values()):
            return "it is pinned"
        if self._using[held.where] or any(part.in_use for part in held.parts):
            return "it is being read"
        return ""

    def _can_be_had(self, record: Artifact) -> bool:
        return self._disk.usable or self._others_have(record)

    def _others_have(self, record: Artifact) -> bool:
        return spare(self._core.state, record, self._core.me.worker)

    def _spare(self, where: Where) -> DropReason | None:
        """Whether the copy on disk may go, and on what condition: it is in memory too, or with another worker."""
        record, me = self._core.state.artifacts.get(where), self._core.me
        if record is None or where in self._leaving:
            return None
        mine = record.replicas.get(ReplicaKey(me.worker, None, Tier.DRAM))
        if mine is not None and mine.incarnation == me.incarnation and mine.lease is None:
            return DropReason.EVICTED
        return DropReason.ASKED if self._others_have(record) else None

    # -- leaving ------------------------------------------------------------------------------------------------------

    async def _leave(self, held: Held) -> bool:
        """Have a copy leave memory, to disk if need be. Whether it did: somebody may have come to read it meanwhile."""
        where = held.where
        record = self._core.state.artifacts.get(where)
        if record is None or where in self._leaving:
            return False
        with self._is_leaving(where):
            if self._disk.get(where) is None and not self._others_have(record):
                await self._disk.write(held, must=False)
        now = self._core.state.artifacts.get(where)
        if now is None or self._store.get(*where) is not held or self._why_not(held, now):
            return False
        with self._is_leaving(where):
            try:
                await self._drop(held, DropReason.ASKED if self._disk.get(where) is None else DropReason.EVICTED)
            except ConflictError:
                return False  # it ended, was pinned, or is the last copy by now
        return True

    @contextmanager
    def _is_leaving(self, where: Where) -> Iterator[None]:
        self._leaving.add(where)
        try:
            yield
        finally:
            self._leaving.discard(where)

    async def evict(self, where: Where) -> int:
        """Drop the copies of an artifact on this worker, in memory and on disk; the artifact lives on.

        Returns:
            The position at which they are gone.

        Raises:
            NotFoundError: If there is none here; ConflictError: If it is pinned, read, or the last one that there is.
        """
        record = rules.live_artifact(self._core.state, tenant=where[0], artifact=where[1])
        held, me = self._store.get(*where), self._core.me.worker
        if held is None and self._disk.get(where) is None:
            raise NotFoundError(f"worker {me} holds no copy of {where[1]!r}", artifact=where[1], worker=me)
        why = "" if held is None else self._why_not(held, record)
        if not why and not self._others_have(record):
            why = "it is the last one that a living worker has; replicate it first, or destroy the artifact"
        if why:
            raise ConflictError(f"the copy of {where[1]!r} on worker {me} stays: {why}", artifact=where[1], worker=me)
        return await self._core.finish(self._evict(where), name=f"evict {where[1]}")

    async def _evict(self, where: Where) -> int:
        held = self._store.get(*where)
        if held is not None:
            await self._drop(held, DropReason.ASKED)
        await self._disk.drop(where, DropReason.ASKED)
        return self._core.live.position

    async def persist(self, held: Held, *, must: bool = True, keep: bool = True) -> int:
        """Have a copy on disk that stays there as long as the artifact lives; gives the position at which it is.

        Args:
            must: Whether it is promised.
            keep: Whether the writing goes on when this caller gives up.

        Raises:
            As :meth:`DiskTier.write`; ConflictError: Of a caller's own memory.
        """
        if held.lease is not None:
            raise ConflictError(
                f"artifact {held.artifact!r} is in its caller's own memory, which may change; put a copy to keep it",
                artifact=held.artifact,
            )
        off = self._disk.call_off()
        with self.using(held.where):
            try:
                await self._core.finish(self._disk.write(held, must=must, off=off), name=f"persist {held.artifact}")
            except asyncio.CancelledError:
                if not keep:
                    off.set()
                raise
        return self._core.live.position

    async def _drop(self, held: Held, reason: DropReason) -> None:
        """Say that a copy goes, and only then give its memory back.

        Raises:
            ConflictError: If the log does not keep that: it is pinned, or the last one.
        """

        def fact(number: int) -> Event:
            return ReplicaDropped(
                tenant=held.tenant, artifact=held.artifact, view=None, tier=held.tier, reason=reason, number=number
            )

        await self._core.author.say(fact, deadline=known_outcome())
        if self._store.get(*held.where) is held:
            self._store.drop(*held.where)

    # -- what the store says ------------------------------------------------------------------------------------------

    def _added(self, held: Held) -> None:
        if self._order is not None:
            self._order.add(held.where, sum(part.capacity_bytes for part in held.parts))
        self._grown.set()

    def _used(self, where: Where) -> None:
        if self._order is not None:
            self._order.use(where)

    def _dropped(self, where: Where) -> None:
        if self._order is not None:
            self._order.remove(where)


def _explained(
    error: OutOfSpaceError, failures: list[TensorbusError], pins: Sequence[Mapping[str, object]]
) -> OutOfSpaceError:
    """The pool's error, with why nothing more leaves memory."""
    if failures:
        why = f"nothing leaves memory: {failures[0].message}"
    else:
        why = (
            "what may leave memory is not enough: the rest is pinned, read, a caller's own, or the last copy without a "
            "disk tier (disk_bytes)"
        )
    if pins:
        why += f"; the largest that is pinned is {pins[0]['artifact']} ({pins[0]['nbytes']} bytes)"
    return OutOfSpaceError(f"{error.message}; {why}", **error.details, pinned=list(pins))
