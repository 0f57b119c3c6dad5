"""What the Directory knows of each thing: small records, changed only by the fold."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from tensorbus.events import DestroyReason, LeasePurpose, ManifestRef, QuarantineCause, StreamPosition, Tier
from tensorbus.ids import ArtifactId, Incarnation, LeaseId, WorkerId


class ReplicaKey(NamedTuple):
    """One copy: who holds it, of which view (``None``: the whole), in which tier."""

    worker: WorkerId
    view: ArtifactId | None
    tier: Tier


class Replica(NamedTuple):
    """A complete copy on one worker. A tuple, as there may be a million, made again at every start from a snapshot.

    Attributes:
        incarnation: The worker's life that holds it; it is readable while that session is open.
        lease: The caller's lease it stands and falls with, or ``None`` if the worker owns the bytes.
    """

    worker: WorkerId
    incarnation: Incarnation
    tier: Tier
    view: ArtifactId | None
    nbytes: int
    lease: LeaseId | None
    seq: int

    @property
    def key(self) -> ReplicaKey:
        return ReplicaKey(self.worker, self.view, self.tier)


class Quarantine(NamedTuple):
    """A copy that its worker found to have wrong bytes: no place to read from, and known until right ones come.

    Attributes:
        incarnation: The worker's life that found it.
        lease: The caller's lease it stood and fell with, or ``None`` if the worker owned the bytes.
        seq: The sequence of the fact that said so.
    """

    worker: WorkerId
    incarnation: Incarnation
    tier: Tier
    view: ArtifactId | None
    cause: QuarantineCause
    lease: LeaseId | None
    seq: int

    @property
    def key(self) -> ReplicaKey:
        return ReplicaKey(self.worker, self.view, self.tier)


@dataclass(slots=True)
class Session:
    """The newest session of a worker id. ``ended`` is the sequence of its end, or ``None`` while it is open."""

    worker: WorkerId
    incarnation: Incarnation
    host: str
    roles: tuple[str, ...]
    data: str
    control: str
    pool_bytes: int
    ttl_ns: int
    pid: int
    version: str
    opened: int
    opened_ns: int
    ended: int | None = None
    number: int = 0

    @property
    def live(self) -> bool:
        return self.ended is None


@dataclass(frozen=True, slots=True)
class CallerLease:
    """A caller's lease on one worker's replica; ``ttl_ns`` is ``None`` for one that holds until released."""

    lease: LeaseId
    artifact: ArtifactId
    worker: WorkerId
    purpose: LeasePurpose
    holder: str
    ttl_ns: int | None
    seq: int


@dataclass(slots=True)
class Artifact:
    """One life of an artifact, from the fact that made it to the one that ends it.

    Attributes:
        where: Tenant and id, the one tuple that every index shares (a million replicas would each pay for their own).
        quarantined: Copies with wrong bytes, each until its worker has a right one, gives it up or, but on disk, ends.
    """

    where: tuple[str, ArtifactId]
    tenant: str
    artifact: ArtifactId
    digest: str | None
    nbytes: int
    tensors: int
    manifest: ManifestRef
    key: str | None
    born: int
    born_ns: int
    author: WorkerId
    incarnation: Incarnation
    principal: str
    replicas: dict[ReplicaKey, Replica] = field(default_factory=dict)
    quarantined: dict[ReplicaKey, Quarantine] = field(default_factory=dict)
    leases: dict[LeaseId, CallerLease] = field(default_factory=dict)
    views: dict[ArtifactId, str] = field(default_factory=dict)
    keys: dict[str, None] = field(default_factory=dict)
    versions: dict[tuple[str, int], None] = field(default_factory=dict)
    destroyed: int | None = None
    reason: DestroyReason | None = None

    @property
    def live(self) -> bool:
        return self.destroyed is None

    def outlives(self, reason: DestroyReason) -> bool:
        """Whether it goes on all the same, because somebody holds it or, for a put that was given up, built on it."""
        match reason:
            case DestroyReason.LOST | DestroyReason.LEASE_ENDED:
                return bool(self.replicas or self.quarantined)
            case DestroyReason.ABANDONED:
                pinned = any(lease.purpose is LeasePurpose.PIN for lease in self.leases.values())
                copied = any(held.worker != self.author for held in self.replicas.values())
                return bool(self.keys or self.versions) or pinned or copied
            case DestroyReason.ASKED:
                return False


@dataclass(slots=True)
class Key:
    """A name: what it is bound to now, and if to nothing, what became of it."""

    key: str
    artifact: ArtifactId | None
    seq: int
    gone: str = ""


@dataclass(slots=True)
class Series:
    """Numbered versions under a name. A number up to ``last`` that is not in ``versions`` is gone."""

    name: str
    last: int
    versions: dict[int, ArtifactId] = field(default_factory=dict)


class OperationState(StrEnum):
    """How an operation stands. ``lost``: the session of who carried it out ended first; what was done is unknown."""

    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation of one worker, from the fact that it began on.

    Attributes:
        where: Tenant and the caller's key.
        worker: Who carries it out, in that incarnation.
        args: JSON, as in :class:`tensorbus.events.OperationStarted`.
        started: Sequence of that fact.
        ended: Sequence of the fact that ended it, or its worker's session; ``None`` while it runs.
        error: JSON of why it failed.
        result: JSON of what came of it.
    """

    where: tuple[str, str]
    operation: str
    artifact: ArtifactId
    args: str
    worker: WorkerId
    incarnation: Incarnation
    principal: str
    started: int
    started_ns: int
    state: OperationState = OperationState.RUNNING
    ended: int | None = None
    ended_ns: int | None = None
    error: str | None = None
    result: str | None = None
    positions: tuple[StreamPosition, ...] = ()

    @property
    def running(self) -> bool:
        return self.ended is None

    @property
    def body(self) -> tuple[str, ArtifactId, str, WorkerId]:
        """What two that have the same key must agree in, to be the same operation."""
        return self.operation, self.artifact, self.args, self.worker


@dataclass(frozen=True, slots=True)
class RoleLease:
    """Who has a role; ``token`` is the sequence of the grant, and in force until the next message about the role.

    Its holder may act while its session is open, and until it resigns; afterwards the role can be taken.
    """

    role: str
    worker: WorkerId
    incarnation: Incarnation
    token: int


@dataclass(frozen=True, slots=True)
class Purge:
    """What a purge takes: see :class:`tensorbus.events.LogPurged`."""

    seq: int
    time_ns: int
    upto: int
    snapshot: int
    forget: int
    delay_ns: int


@dataclass(slots=True)
class LogState:
    """What became of the log itself.

    Attributes:
        announced: The newest announced purge, also after it was carried out.
        purged: Facts up to this sequence are gone, but for the last one of each aggregate.
        forgotten: What ended at or before this sequence is forgotten.
        archived: Facts up to this sequence are in the archive.
        archive_first: The first sequence that is in the archive, 0 if nothing is.
        truncations: How often the log lost its tail.
        truncated_from: After the newest loss, the first sequence that may have been lost.
        truncated_to: And the last one that somebody is known to have remembered.
        fold: The version of the fold in force.
    """

    announced: Purge | None = None
    purged: int = 0
    forgotten: int = 0
    archived: int = 0
    archive_first: int = 0
    truncations: int = 0
    truncated_from: int = 0
    truncated_to: int = 0
    fold: int = 1


class Touched(NamedTuple):
    """Something that a fact changed, for those who follow it.

    Its kind is ``artifact``, ``key``, ``series``, ``session``, ``operation``, ``role``, ``log`` for the log
    itself, or ``cluster`` for what is fixed for all of it.
    """

    kind: str
    tenant: str
    name: str


class Verdict(NamedTuple):
    """What the fold did with a message.

    Attributes:
        kept: Whether the proposal became a fact.
        why: For a dropped one, a stable word: ``fenced``, ``sequence``, ``conflict``, ``destroyed``, ``missing``,
            ``held``, ``duplicate``, ``unknown``, ``subject`` (another's name or another's aggregate), ``fold`` (the log
            is folded by a version that this program does not know).
        touched: What changed.
    """

    kept: bool
    why: str = ""
    touched: tuple[Touched, ...] = ()
