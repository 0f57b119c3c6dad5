"""Bringing an artifact here from a worker that has it: once, however many callers ask at the same time."""

from __future__ import annotations

import asyncio
import logging

from tensorbus.clock import Deadline
from tensorbus.errors import (
    ConflictError,
    CorruptError,
    DeadlineExceededError,
    OutOfSpaceError,
    TensorbusError,
    UnavailableError,
)
from tensorbus.ids import ArtifactId
from tensorbus.lifecycle import Artifact, Session, rules
from tensorbus.transport import Pool, Segment, TransferReport, Ways
from tensorbus.workers._core import Core
from tensorbus.workers._disk import DiskTier
from tensorbus.workers._puts import Puts, known_outcome, wrong_tensors
from tensorbus.workers._shared import Shared
from tensorbus.workers._store import Held, Store, Where
from tensorbus.workers._tiers import Tiers
from tensorbus.workers._transfers import PASSING, WRONG_SHOWN, Arriving, How, Transfers, shared

log = logging.getLogger("tensorbus.workers")

CATCH_UP_S = 2.0
LET_GO_S = 2.0
LET_GO_LOOK_S = 0.005
ARRIVING_S = 1.0
"""How long a fetch that was begun is waited for to bring its first bytes, by who would have them handed on."""
ARRIVING_LOOK_S = 0.01

HERE = TransferReport(path="shm", why="held by the worker of this host")
RELOADED = TransferReport(path="disk", why="it was on this worker's disk")


class Fetches:
    """All transfers into this worker. A transfer belongs to the worker; who waits for it may give up."""

    def __init__(
        self,
        core: Core,
        pool: Pool,
        store: Store,
        puts: Puts,
        how: How | None = None,
        *,
        tiers: Tiers | None = None,
        disk: DiskTier | None = None,
    ) -> None:
        self.transfers = Transfers(core, how or How(Ways()), self._room)
        self._tiers = tiers
        self._disk = disk
        self._core = core
        self._pool = pool
        self._store = store
        self._puts = puts
        self._running: dict[Where, Shared[tuple[Held, TransferReport]]] = {}

    def done_bytes(self, where: Where) -> int:
        """Bytes that have come of a transfer that is under way; 0 if none is."""
        arriving = self.transfers.arriving(where)
        return 0 if arriving is None else arriving.transfer.nbytes_done

    async def arriving(self, where: Where) -> Arriving | None:
        """A transfer that is under way; waits a little for one that begins."""
        patience = Deadline(ARRIVING_S)
        while (found := self.transfers.arriving(where)) is None:
            if where not in self._running or not patience.left():
                return None
            await asyncio.sleep(ARRIVING_LOOK_S)
        return found

    async def ensure(
        self, tenant: str, artifact: ArtifactId, *, deadline: Deadline, keep: bool = True, said: bool = True
    ) -> tuple[Held, TransferReport]:
        """Have the artifact's bytes here.

        Args:
            said: Whether the copy must be on the log already; who only reads need not wait for that.
            keep: Whether they are to come also when this caller gives up. A transfer that nobody waits for and nobody
                wants kept is called off.

        Raises:
            NotFoundError: If it has ended; UnavailableError: If no worker that holds it can be reached.
            OutOfSpaceError: If the pool has no room; CorruptError: If every source gave wrong bytes.
        """
        record = rules.live_artifact(self._core.state, tenant=tenant, artifact=artifact)
        where = (tenant, record.artifact)
        held, running = self._store.get(*where), self._running.get(where)
        if held is not None and not (said and running):
            self._store.used(where)
            return held, HERE
        if running is None:
            running = self._begin(record)
        try:
            async with deadline.scope():
                return await running.wait(keep=keep, early=not said)
        finally:
            if running.unwanted:
                self._forget(where, running)  # who asks from now on has it begun anew
                await running.call_off(patience_s=LET_GO_S)

    def _begin(self, record: Artifact) -> Shared[tuple[Held, TransferReport]]:
        running = Shared[tuple[Held, TransferReport]]()
        self._running[record.where] = running
        running.begin(self._core.finish(self._fetch(record, running), name=f"fetch {record.artifact}"))
        running.on_ended(lambda: self._forget(record.where, running))
        return running

    def _forget(self, where: Where, running: Shared[tuple[Held, TransferReport]]) -> None:
        if self._running.get(where) is running:
            del self._running[where]

    async def reload(self, record: Artifact, *, deadline: Deadline) -> Held | None:
        """Have the bytes here if they are on this worker's disk, for somebody who was sent here for them."""
        if self._disk is None or self._disk.get(record.where) is None:
            return None
        held, _ = await self.ensure(record.tenant, record.artifact, deadline=deadline)
        return held

    async def _fetch(
        self, record: Artifact, running: Shared[tuple[Held, TransferReport]]
    ) -> tuple[Held, TransferReport]:
        held, report = await running.part(self._bring_here(record))
        came = held.came or report

        def on_held(held: Held) -> None:
            now = self._core.state.artifact(*record.where)
            if now is not None and now.live and now.born == record.born:
                running.hand_out((held, came))

        try:
            held, _ = await self._puts.add_replica(held, on_held=on_held, deadline=known_outcome())
        except ConflictError:
            # It ended while it came. What lives under its id now, if anything does, is another life of it.
            now = rules.live_artifact(self._core.state, tenant=held.tenant, artifact=held.artifact)
            return await self._fetch(now, running)
        self.transfers.trust(record.where)
        return held, held.came or came

    async def _bring_here(self, record: Artifact) -> tuple[Held, TransferReport]:
        """Bytes from this worker's disk or from others, in memory of our own and said to nobody yet."""
        failures: list[TensorbusError] = []
        try:
            held = await self._from_disk(record)
        except (CorruptError, UnavailableError) as error:
            failures.append(error)
        else:
            if held is not None:
                return held, RELOADED
        alone, sources = False, self.transfers.sources(record)
        while sources:
            source = sources.pop(0)
            try:
                held = await self._from(source, record, alone=alone, relayed=not failures)
            except PASSING as error:
                log.warning("fetch failed: artifact=%s source=%s reason=%s", record.artifact, source.worker, error)
                failures.append(error)
                if isinstance(error, CorruptError) and not alone:
                    # Of several that brought wrong bytes together nobody knows whose they are: each is asked alone.
                    alone, sources = True, self.transfers.sources(record) if shared(record) else sources
                continue
            return held, TransferReport(path="tcp", why=f"from worker {source.worker}")
        await self._catch_up()
        raise self._no_source(record, failures)

    async def _from_disk(self, record: Artifact) -> Held | None:
        """Bytes of this worker's disk; if they are in doubt, only if they are those of the digests."""
        if self._disk is None:
            return None
        spill = self._disk.get(record.where)
        held = await self._disk.read(record, self._room)
        if held is None or not self.transfers.doubted(record.where) or not held.manifest.digested:
            return held
        wrong = await asyncio.to_thread(wrong_tensors, held)
        if not wrong:
            return held
        held.release()
        error = CorruptError(f"{record.artifact!r} was spilled with wrong bytes: {', '.join(wrong[:WRONG_SHOWN])}")
        if spill is not None:
            await self._disk.corrupt(record.where, spill, error)
        raise error

    async def _catch_up(self) -> None:
        """A source may know of an end that has not come here: what is gone must not be called unreachable."""
        deadline = Deadline(CATCH_UP_S, what="reading the end of the log")
        try:
            await self._core.feed.reached(await self._core.bus.last_seq(deadline=deadline), deadline=deadline)
        except (UnavailableError, DeadlineExceededError):
            return  # then it is said by what is known here

    async def _from(self, source: Session, record: Artifact, *, alone: bool, relayed: bool) -> Held:
        return await self.transfers.bring(source, record, alone=alone, relayed=relayed)

    async def _room(self, nbytes: int, tenant: str) -> Segment:
        """Memory for a copy; waits a moment for what callers have been asked to let go of."""
        patience = Deadline(LET_GO_S)
        while True:
            try:
                if self._tiers is not None:
                    return await self._tiers.allocate(nbytes, tenant=tenant)
                return self._pool.allocate(nbytes, tenant=tenant, writer=None)
            except OutOfSpaceError as error:
                if not error.details.get("retiring_bytes") or not patience.left():
                    raise
            await asyncio.sleep(LET_GO_LOOK_S)

    def _no_source(self, record: Artifact, failures: list[TensorbusError]) -> TensorbusError:
        now = self._core.state.artifact(record.tenant, record.artifact)
        if now is None or not now.live:
            return rules.missing_artifact(now, record.artifact)
        corrupt = all(isinstance(failure, CorruptError) for failure in failures)
        if corrupt and now.quarantined and not now.replicas:
            return rules.corrupt_artifact(now)
        holders = sorted({replica.worker for replica in record.replicas.values()})
        cls = CorruptError if failures and corrupt else UnavailableError
        reason = "; ".join(str(failure) for failure in failures) or "none of them can be reached from here"
        return cls(
            f"artifact {record.artifact!r} is on {', '.join(holders) or 'no worker'}: {reason}",
            artifact=record.artifact,
            workers=holders,
        )
