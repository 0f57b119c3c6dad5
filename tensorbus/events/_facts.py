"""The facts: what happened to an artifact, a key, a series, a session, a replica, a caller's lease or the log itself.

Each is a frozen record in the past tense. A shipped fact never changes its meaning: add a new one, teach the codec to
lift the old form, and keep an old log in ``tests/golden``. Who wrote it and when is in the headers and the stream.
Quantities carry their unit; an id is the text, the subject carries its hash.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from tensorbus.ids import ArtifactId, Incarnation, LeaseId, WorkerId


class Tier(StrEnum):
    """Where a replica's bytes are."""

    VRAM = "vram"
    DRAM = "dram"
    DISK = "disk"
    SOURCE = "source"


class SessionEnd(StrEnum):
    """Why a worker's session ended."""

    LEFT = "left"
    EXPIRED = "expired"


class DestroyReason(StrEnum):
    """Why an artifact ended."""

    ASKED = "asked"
    LEASE_ENDED = "lease_ended"
    LOST = "lost"
    ABANDONED = "abandoned"


class LeaseEnd(StrEnum):
    """Why a caller's lease ended."""

    RELEASED = "released"
    EXPIRED = "expired"
    CONNECTION_LOST = "connection_lost"


class LeasePurpose(StrEnum):
    """What a caller's lease keeps: its own registered bytes, or a replica that must not be evicted."""

    REGISTER = "register"
    PIN = "pin"


class DropReason(StrEnum):
    """Why one replica went while the artifact lives on; ``asked`` counts only while another copy is there for good.

    ``corrupt`` is in old logs: since :class:`ReplicaQuarantined` a copy with wrong bytes is not dropped.
    """

    EVICTED = "evicted"
    CORRUPT = "corrupt"
    ASKED = "asked"


class QuarantineCause(StrEnum):
    """What showed that a replica has wrong bytes: its worker's own look (``verify``), the checksums of its spill file
    (``spill``), or a reader's complaint, which the worker then found to be true (``reader``)."""

    VERIFY = "verify"
    SPILL = "spill"
    READER = "reader"


class OperationOutcome(StrEnum):
    """How a worker's operation ended."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlobRef:
    """A body too large for a fact: zlib-compressed chunks ``0..chunks-1`` on ``<prefix>.blob.<digest>.<n>.<author>``.

    Attributes:
        digest: BLAKE3-256 of the body before compression, lower-case hex.
        nbytes: Size of the body before compression.
        chunks: How many messages it takes.
        author: The worker that wrote them.
    """

    digest: str
    nbytes: int
    chunks: int
    author: WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestRef:
    """Where the table of tensors is: in the fact itself (``inline``, JSON text) or in a blob. Exactly one is set."""

    inline: str | None = None
    blob: BlobRef | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOpened:
    """A worker process began its life on the log; an older session of the same id ended with it.

    Attributes:
        host: Host id; equal means that memory can be shared.
        roles: ``basic``, ``gateway``, ``shard-home``, ``store``.
        data: ``host:port`` where others read bytes, or empty.
        control: ``host:port`` where callers without a local worker connect, or empty.
        pool_bytes: Size of its memory pool.
        ttl_ns: Silence after which a witness may end the session.
        pid: Process id on its host, for people.
        version: tensorbus version.
    """

    type: Literal["SessionOpened"] = "SessionOpened"
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


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionEnded:
    """A worker's life on the log ended; its replicas in memory and the leases on them went with it."""

    type: Literal["SessionEnded"] = "SessionEnded"
    worker: WorkerId
    incarnation: Incarnation
    reason: SessionEnd


@dataclass(frozen=True, slots=True, kw_only=True)
class ArtifactPut:
    """A worker took an artifact's bytes in: the artifact exists, and the author holds its first replica.

    Attributes:
        digest: The content id ``tb1:…``, or ``None`` until :class:`ArtifactDigested`.
        nbytes: Sum of the tensors' sizes, each counted once per name.
        tensors: How many names the manifest has.
        key: The key it is meant for, bound by a :class:`KeyBound` that follows; ``None`` keeps it without a key.
    """

    type: Literal["ArtifactPut"] = "ArtifactPut"
    tenant: str
    artifact: ArtifactId
    digest: str | None
    nbytes: int
    tensors: int
    manifest: ManifestRef
    tier: Tier
    key: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ArtifactRegistered:
    """A caller lent its own memory: the artifact is usable while the lease lives or another replica is there.

    Attributes:
        lease: The caller's lease on the author's replica.
        holder: The caller's session with the author.
        ttl_ns: The lease's length between renewals.
    """

    type: Literal["ArtifactRegistered"] = "ArtifactRegistered"
    tenant: str
    artifact: ArtifactId
    digest: str | None
    nbytes: int
    tensors: int
    manifest: ManifestRef
    tier: Tier
    key: str | None
    lease: LeaseId
    holder: str
    ttl_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ArtifactDigested:
    """The digest of an artifact that was put without one is known; the manifest now has each tensor's digest."""

    type: Literal["ArtifactDigested"] = "ArtifactDigested"
    tenant: str
    artifact: ArtifactId
    digest: str
    manifest: ManifestRef


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewDefined:
    """A selection of an artifact got its id, before the first replica of it.

    Attributes:
        view: ``tbv:…``, made from the base's id and the definition.
        definition: Canonical JSON of the selection, one step from the base.
    """

    type: Literal["ViewDefined"] = "ViewDefined"
    tenant: str
    artifact: ArtifactId
    view: ArtifactId
    definition: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ArtifactDestroyed:
    """The artifact ended everywhere; keys and versions that name it went with it.

    Attributes:
        keys: Those keys, for people; the fold unbinds what still names it.
        versions: Those versions as ``name@number``, for people.
    """

    type: Literal["ArtifactDestroyed"] = "ArtifactDestroyed"
    tenant: str
    artifact: ArtifactId
    reason: DestroyReason
    keys: tuple[str, ...]
    versions: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyBound:
    """A key names an artifact now.

    Attributes:
        rebind: Whether it may have been taken from another artifact.
    """

    type: Literal["KeyBound"] = "KeyBound"
    tenant: str
    key: str
    artifact: ArtifactId
    rebind: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyUnbound:
    """A key names nothing now; the artifact lives on."""

    type: Literal["KeyUnbound"] = "KeyUnbound"
    tenant: str
    key: str
    artifact: ArtifactId


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionPublished:
    """An artifact became the next version of a series."""

    type: Literal["VersionPublished"] = "VersionPublished"
    tenant: str
    name: str
    version: int
    artifact: ArtifactId


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaAdded:
    """The author now holds a complete copy of an artifact, or of a view of it.

    Attributes:
        view: The view that it is a copy of, or ``None`` for the whole.
        number: The author's running number over its own replica and lease facts, from 1 in each incarnation.
    """

    type: Literal["ReplicaAdded"] = "ReplicaAdded"
    tenant: str
    artifact: ArtifactId
    view: ArtifactId | None
    tier: Tier
    nbytes: int
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaDropped:
    """The author gave up its copy; the artifact lives on."""

    type: Literal["ReplicaDropped"] = "ReplicaDropped"
    tenant: str
    artifact: ArtifactId
    view: ArtifactId | None
    tier: Tier
    reason: DropReason
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaQuarantined:
    """The author found its copy to have other bytes than the artifact's, and serves it no more.

    The artifact lives on, without another copy too: reading it says then that its bytes are corrupt, until somebody
    brings right ones.

    Attributes:
        cause: What showed it.
        wrong: The tensors whose bytes are wrong as far as that is known, the first few of them, for people.
        number: The author's running number over its own replica and lease facts, from 1 in each incarnation.
    """

    type: Literal["ReplicaQuarantined"] = "ReplicaQuarantined"
    tenant: str
    artifact: ArtifactId
    view: ArtifactId | None
    tier: Tier
    cause: QuarantineCause
    wrong: tuple[str, ...]
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CallerLeaseGranted:
    """A caller holds a lease on the author's replica of an artifact.

    Attributes:
        holder: The caller's session with the author, or empty for a pin that runs out by itself.
        ttl_ns: Length between renewals; ``None`` holds until released.
    """

    type: Literal["CallerLeaseGranted"] = "CallerLeaseGranted"
    tenant: str
    artifact: ArtifactId
    lease: LeaseId
    purpose: LeasePurpose
    holder: str
    ttl_ns: int | None
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CallerLeaseEnded:
    """A caller's lease ended; the caller's own memory is no replica any more."""

    type: Literal["CallerLeaseEnded"] = "CallerLeaseEnded"
    tenant: str
    artifact: ArtifactId
    lease: LeaseId
    reason: LeaseEnd
    number: int


StreamName = Literal["TB", "TB_PAGES", "TB_PLANS"]
"""A stream by its name without the prefix's mark."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamPosition:
    """A sequence in one of the streams."""

    stream: StreamName
    seq: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationStarted:
    """The author began an operation that a caller asked it for.

    Attributes:
        id: The caller's idempotency key.
        operation: What is done: ``prefetch``, ``pin``, ``unpin``, ``replicate``, ``migrate``, ``evict``, ``persist``,
            ``verify``.
        artifact: On what.
        args: Its other arguments, JSON of an object with sorted names.
    """

    type: Literal["OperationStarted"] = "OperationStarted"
    tenant: str
    id: str
    operation: str
    artifact: ArtifactId
    args: str
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationEnded:
    """An operation of the author's came to its end.

    Attributes:
        error: Why it did not succeed, JSON of an error; ``None`` if it did.
        result: What came of it, JSON of an object; ``None`` if nothing did.
        positions: Where what it did is on the log.
    """

    type: Literal["OperationEnded"] = "OperationEnded"
    tenant: str
    id: str
    outcome: OperationOutcome
    error: str | None
    result: str | None
    positions: tuple[StreamPosition, ...]
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleGranted:
    """The author's incarnation took a role that one worker at a time may have; this fact's sequence is its token.

    Attributes:
        role: ``store``: who archives, takes snapshots and purges.
    """

    type: Literal["RoleGranted"] = "RoleGranted"
    role: Literal["store"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleResigned:
    """The author's incarnation gave a role up that it had: nobody has it until the next grant.

    Attributes:
        role: ``store``: who archives, takes snapshots and purges.
    """

    type: Literal["RoleResigned"] = "RoleResigned"
    role: Literal["store"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotTaken:
    """A projection's state at a sequence was stored, so that a reader may start from it.

    Attributes:
        what: ``directory``.
        upto: The sequence of the last fact in it.
        fold: Version of the fold that made it.
        state_hash: Canonical hash of the state, 64 hexadecimal digits.
        blob: Its body, see ``docs/spec/snapshot.md``.
    """

    type: Literal["SnapshotTaken"] = "SnapshotTaken"
    what: Literal["directory"]
    upto: int
    fold: int
    state_hash: str
    blob: BlobRef


@dataclass(frozen=True, slots=True, kw_only=True)
class Archived:
    """The facts of a range of sequences are in a file of the archive.

    Attributes:
        stream: ``TB``.
        first: First sequence of the range: that after the last one of the file before.
        last: Last sequence of the range.
        count: How many facts are in it.
        file: Path below the archive's URL.
        digest: BLAKE3-256 of the file, lower-case hex.
        nbytes: Size of the file.
    """

    type: Literal["Archived"] = "Archived"
    stream: StreamName
    first: int
    last: int
    count: int
    file: str
    digest: str
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LogPurged:
    """The log is going to lose what a snapshot holds; who has not read that far starts from the snapshot.

    Attributes:
        stream: ``TB``.
        upto: Facts up to this sequence go, but for the last one of each aggregate.
        snapshot: Sequence of the :class:`SnapshotTaken` to start from.
        forget: What ended at or before this sequence is forgotten altogether.
        delay_ns: How long after this fact it is carried out.
    """

    type: Literal["LogPurged"] = "LogPurged"
    stream: StreamName
    upto: int
    snapshot: int
    forget: int
    delay_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PurgeCompleted:
    """An announced purge was carried out; folds forget what ended at or before ``forget``."""

    type: Literal["PurgeCompleted"] = "PurgeCompleted"
    stream: StreamName
    upto: int
    forget: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LogTruncated:
    """The log lost its tail: somebody remembered a fact that is not there any more.

    Attributes:
        stream: ``TB``.
        seq: Where the remembered fact was.
        event_id: Which it was.
        last: The last sequence that the log had when that was noticed.
    """

    type: Literal["LogTruncated"] = "LogTruncated"
    stream: StreamName
    seq: int
    event_id: str
    last: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldRaised:
    """From here on all folds of the stream use that version; a program that does not know it stops."""

    type: Literal["FoldRaised"] = "FoldRaised"
    stream: StreamName
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardsFixed:
    """Into how many shards the cluster's pages are divided, for ever: the first such fact counts.

    Attributes:
        shards: A power of two.
    """

    type: Literal["ShardsFixed"] = "ShardsFixed"
    shards: int


Event = (
    SessionOpened
    | SessionEnded
    | ArtifactPut
    | ArtifactRegistered
    | ArtifactDigested
    | ViewDefined
    | ArtifactDestroyed
    | KeyBound
    | KeyUnbound
    | VersionPublished
    | ReplicaAdded
    | ReplicaDropped
    | ReplicaQuarantined
    | CallerLeaseGranted
    | CallerLeaseEnded
    | OperationStarted
    | OperationEnded
    | RoleGranted
    | RoleResigned
    | SnapshotTaken
    | Archived
    | LogPurged
    | PurgeCompleted
    | LogTruncated
    | FoldRaised
    | ShardsFixed
)
AnyEvent = Annotated[Event, Field(discriminator="type")]
EVENT_TYPES: tuple[type[Event], ...] = Event.__args__
