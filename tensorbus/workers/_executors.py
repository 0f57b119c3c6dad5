"""What a worker with memory does for an operation: each can be repeated, and says what came of it."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, Protocol

from blake3 import blake3

from tensorbus.clock import Deadline
from tensorbus.errors import ConflictError, CorruptError, NotFoundError, TensorbusError, UnavailableError
from tensorbus.events import QuarantineCause
from tensorbus.ids import ArtifactId, LeaseId, WorkerId, b32, prefixed
from tensorbus.lifecycle import Artifact, Operation, Session, rules
from tensorbus.transport import TransferReport
from tensorbus.workers._core import Core
from tensorbus.workers._directory_ops import sources_of
from tensorbus.workers._disk import DiskTier
from tensorbus.workers._fetch import HERE, Fetches
from tensorbus.workers._integrity import Integrity
from tensorbus.workers._leases import Leases
from tensorbus.workers._puts import known_outcome
from tensorbus.workers._store import Held, Store
from tensorbus.workers._tiers import Tiers

log = logging.getLogger("tensorbus.workers")

EXECUTE_S: Final = 3600.0
"""What an operation may take that was given no deadline."""


@dataclass(frozen=True, slots=True)
class Order:
    """What is asked of one worker, under the caller's key."""

    tenant: str
    id: str
    worker: WorkerId
    operation: str
    artifact: ArtifactId
    args: str
    principal: str = ""

    @property
    def where(self) -> tuple[str, str]:
        return self.tenant, self.id

    @property
    def body(self) -> tuple[str, ArtifactId, str, WorkerId]:
        return self.operation, self.artifact, self.args, self.worker


@dataclass(slots=True)
class Progress:
    """How far an operation is, in bytes; ``total`` is 0 until it is known.

    Attributes:
        copied: Bytes of the copies that were not there before.
        now: Bytes of the copy that is under way here.
        parts: Operations under way that are a part of this one.
    """

    done: int = 0
    total: int = 0
    copied: int = 0
    now: Callable[[], int] = lambda: 0
    parts: dict[tuple[str, str], None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Done:
    """What came of it, and the last sequence of the log that it took; 0 if none."""

    result: dict[str, object]
    position: int = 0


class Delegate(Protocol):
    """Asks other workers for parts of an operation."""

    async def done(self, order: Order, *, deadline: Deadline) -> Operation: ...


class Executors:
    """The operations of one worker."""

    def __init__(
        self,
        core: Core,
        *,
        store: Store,
        fetches: Fetches,
        tiers: Tiers,
        disk: DiskTier,
        leases: Leases,
        integrity: Integrity,
    ) -> None:
        self._core = core
        self._store = store
        self._fetches = fetches
        self._tiers = tiers
        self._disk = disk
        self._leases = leases
        self._integrity = integrity
        self._table: dict[str, Callable[[_Job], Awaitable[Done]]] = {
            "prefetch": self._prefetch,
            "pin": self._pin,
            "unpin": self._unpin,
            "replicate": self._replicate,
            "migrate": self._migrate,
            "evict": self._evict,
            "persist": self._persist,
            "verify": self._verify,
        }

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._table)

    async def run(self, order: Order, args: Mapping[str, Any], progress: Progress, delegate: Delegate) -> Done:
        """Do it.

        Raises:
            TensorbusError: Why it was not done.
        """
        what = f"{order.operation} on worker {order.worker}"
        deadline = Deadline(float(args.get("deadline_s", EXECUTE_S)), what=what)
        async with deadline.scope():
            return await self._table[order.operation](_Job(order, args, progress, delegate, deadline))

    async def _prefetch(self, job: _Job) -> Done:
        device, me = job.args.get("device", "cpu"), job.order.worker
        if device != "cpu":
            raise UnavailableError(f"worker {me} keeps no copies in memory of {device!r}", worker=me, device=device)
        held, report = await self._bring(job, self._live(job))
        found = {"worker": job.order.worker, "nbytes": held.manifest.nbytes, "path": report.path, "why": report.why}
        return Done(found, self._core.live.position)

    async def _bring(self, job: _Job, record: Artifact) -> tuple[Held, TransferReport]:
        """Have a copy in memory; who gives up waiting gives up the transfer too, unless somebody else waits for it."""
        where = (job.order.tenant, record.artifact)
        job.progress.total = record.nbytes
        job.progress.now = lambda: self._fetches.done_bytes(where)
        try:
            found = await self._fetches.ensure(*where, deadline=job.deadline, keep=False)
        finally:
            job.progress.now = lambda: 0
        job.progress.done = record.nbytes
        return found

    async def _pin(self, job: _Job) -> Done:
        record, ttl_s, me = self._live(job), float(job.args["ttl_s"]), job.order.worker
        with self._tiers.using(record.where):  # what is about to be pinned must not leave before it is
            held, _ = await self._bring(job, record)
            granting = self._leases.grant_pin(
                held.tenant, held.artifact, ttl_s=ttl_s, principal=job.order.principal, deadline=known_outcome()
            )
            lease, position = await self._core.finish(granting, name="pin", unwanted=partial(self._unwanted, job))
        found = {"worker": me, "artifact": held.artifact, "nbytes": record.nbytes, "lease": lease, "ttl_s": ttl_s}
        return Done(found, position)

    def _unwanted(self, job: _Job, granted: tuple[LeaseId, int]) -> None:
        """A pin was granted when its operation had been called off already."""
        work = self._end_quietly(job.order.tenant, granted[0])
        self._core.spawn(work, name=f"end pin {granted[0]}")

    async def _end_quietly(self, tenant: str, lease: LeaseId) -> None:
        try:
            await self._leases.end_pin(tenant, lease, deadline=known_outcome())
        except TensorbusError as error:
            log.info("end of pin not said: lease=%s reason=%s", lease, error)

    async def _unpin(self, job: _Job) -> Done:
        lease = LeaseId(job.args["lease"])
        ending = self._leases.end_pin(job.order.tenant, lease, deadline=known_outcome())
        position = await self._core.finish(ending, name="unpin")
        found = {"worker": job.order.worker, "lease": lease, "ended": position is not None}
        return Done(found, position or 0)

    async def _evict(self, job: _Job) -> Done:
        artifact, me = self._live(job).artifact, job.order.worker
        try:
            position = await self._tiers.evict((job.order.tenant, artifact))
        except NotFoundError:
            self._live(job)
            return Done({"worker": me, "evicted": False})  # it was gone already, which is what was asked for
        except ConflictError as exc:
            if exc.details.get("reason") != "held":
                raise
            text = f"the copy of {artifact!r} on worker {me} is pinned by now, or the last one that can be read"
            raise ConflictError(text, artifact=artifact, worker=me) from exc
        return Done({"worker": me, "evicted": True}, position)

    async def _persist(self, job: _Job) -> Done:
        record = self._live(job)
        with self._tiers.using(record.where):
            held, _ = await self._bring(job, record)
            job.progress.total, job.progress.done = 2 * record.nbytes, record.nbytes
            position = await self._tiers.persist(held, keep=False)
        job.progress.done = job.progress.total
        return Done({"worker": job.order.worker, "nbytes": record.nbytes}, position)

    async def _verify(self, job: _Job) -> Done:
        """Read every copy here; those with other bytes are quarantined, and named."""
        record, me = self._live(job), job.order.worker
        held, spilled = self._store.get(*record.where), self._disk.get(record.where) is not None
        if held is None and not spilled:
            text = f"worker {me} has no copy of {record.artifact!r} to verify"
            raise NotFoundError(text, artifact=record.artifact, worker=me)
        if held is not None and not held.manifest.digested:
            raise ConflictError(f"{held.artifact!r} has no digests yet to verify its bytes by", artifact=held.artifact)
        job.progress.total = record.nbytes * ((held is not None) + spilled)
        looked = await self._integrity.look(record.where, QuarantineCause.VERIFY)
        job.progress.done = job.progress.total
        bad = {str(tier): names for tier, names in looked.items() if names}
        if bad:
            raise CorruptError(
                f"the copy of {record.artifact!r} on worker {me} ({', '.join(bad)}) has other bytes than its digests "
                "promise, and is quarantined",
                artifact=record.artifact,
                worker=me,
                wrong=bad,
            )
        found = {"worker": me, "nbytes": record.nbytes, "tensors": record.tensors, "tiers": [*map(str, looked)]}
        return Done(found)

    async def _replicate(self, job: _Job) -> Done:
        record = self._live(job)
        wanted = job.args.get("to")
        if wanted is not None:
            reached = await self._all_to(job, record, [WorkerId(worker) for worker in wanted])
        else:
            reached = await self._up_to(job, record, int(job.args["n"]))
        return Done({"workers": reached, "nbytes": job.progress.copied}, self._core.live.position)

    async def _all_to(self, job: _Job, record: Artifact, workers: list[WorkerId]) -> list[WorkerId]:
        job.progress.total = record.nbytes * len(workers)
        try:
            async with asyncio.TaskGroup() as group:
                for worker in workers:
                    group.create_task(self._copy_to(job, record, worker), name=f"replicate to {worker}")
        except* TensorbusError as failed:
            raise failed.exceptions[0] from None
        return workers

    async def _up_to(self, job: _Job, record: Artifact, n: int) -> list[WorkerId]:
        """Copies for good on ``n`` workers: other hosts first, and the next one where one fails."""
        missing = n - len(_owners(self._core, record))
        job.progress.total = record.nbytes * max(0, missing)
        failed: TensorbusError | None = None
        for candidate in _candidates(self._core, record) if missing > 0 else ():
            try:
                await self._copy_to(job, record, candidate.worker)
            except TensorbusError as exc:
                if job.deadline.left() == 0:
                    raise
                failed = exc
                continue
            missing -= 1
            if not missing:
                break
        if missing > 0:
            text = f"{record.artifact!r} cannot be on {n} workers: {missing} more with room for it are needed"
            raise UnavailableError(text, artifact=record.artifact, missing=missing) from failed
        return sorted(session.worker for session in _owners(self._core, record))

    async def _copy_to(self, job: _Job, record: Artifact, worker: WorkerId) -> None:
        part = await self._part(job, "prefetch", worker)
        job.progress.done += record.nbytes
        if json.loads(part.result or "{}").get("path") != HERE.path:
            job.progress.copied += record.nbytes

    async def _migrate(self, job: _Job) -> Done:
        """Copy, verify, and only then drop."""
        source, target = WorkerId(job.args["src"]), WorkerId(job.args["dst"])
        record = self._live(job)
        job.progress.total = record.nbytes
        await self._copy_to(job, record, target)
        await self._part(job, "verify", target)
        await self._part(job, "evict", source)
        return Done({"src": source, "dst": target, "nbytes": record.nbytes}, self._core.live.position)

    async def _part(self, job: _Job, operation: str, worker: WorkerId) -> Operation:
        """A part of the operation on some worker, under a key made from this one's: repeating it is safe."""
        part = b32(blake3(prefixed("op", job.order.id, operation, worker)).digest(length=20))
        order = replace(job.order, id=part, worker=worker, operation=operation, args="{}")
        job.progress.parts[order.where] = None
        try:
            return await job.delegate.done(order, deadline=job.deadline)
        finally:
            del job.progress.parts[order.where]

    def _live(self, job: _Job) -> Artifact:
        return rules.live_artifact(self._core.state, tenant=job.order.tenant, artifact=job.order.artifact)


@dataclass(frozen=True, slots=True)
class _Job:
    order: Order
    args: Mapping[str, Any]
    progress: Progress
    delegate: Delegate
    deadline: Deadline


def _owners(core: Core, record: Artifact) -> list[Session]:
    """The living workers with a whole copy of their own."""
    now = core.state.artifacts.get(record.where, record)
    own = {replica.worker for replica in now.replicas.values() if replica.view is None and replica.lease is None}
    return [session for session in sources_of(core.state, now) if session.worker in own]


def _candidates(core: Core, record: Artifact) -> list[Session]:
    """Who could take a copy, the best first."""
    owners = _owners(core, record)
    workers, hosts = {session.worker for session in owners}, {session.host for session in owners}
    able = [
        s for s in core.state.live_sessions() if s.data and s.worker not in workers and s.pool_bytes >= record.nbytes
    ]
    return sorted(able, key=lambda s: (s.host in hosts, -s.pool_bytes, s.worker))
