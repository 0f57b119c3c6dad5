"""Subjects are built and parsed here and nowhere else.

``<prefix>.ev.<kind>.<id>.<author>``: the id is a hash of the user's text (``docs/spec/ids.md``), the author is last so
that NATS permissions stop a worker from speaking for another.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NamedTuple

from tensorbus.errors import InvalidArgumentError
from tensorbus.events._facts import (
    Archived,
    ArtifactDestroyed,
    ArtifactDigested,
    ArtifactPut,
    ArtifactRegistered,
    CallerLeaseEnded,
    CallerLeaseGranted,
    Event,
    FoldRaised,
    KeyBound,
    KeyUnbound,
    LogPurged,
    LogTruncated,
    OperationEnded,
    OperationStarted,
    PurgeCompleted,
    ReplicaAdded,
    ReplicaDropped,
    ReplicaQuarantined,
    RoleGranted,
    RoleResigned,
    SessionEnded,
    SessionOpened,
    ShardsFixed,
    SnapshotTaken,
    VersionPublished,
    ViewDefined,
)
from tensorbus.events._page_facts import (
    LeaseGranted,
    PageEvent,
    PagesChanged,
    ShardSnapshotConfirmed,
    ShardSnapshotTaken,
)
from tensorbus.ids import WorkerId, subject_token

CONTESTED: Final = frozenset(
    {"artifact", "key", "series", "session", "instance", "trunc", "fold", "role", "cluster", "lease"}
)
"""Kinds that several authors may write: each fact of them is compared and appended on the filter over its aggregate."""

FENCED: Final = frozenset({"snap", "purge", "archive"})
"""Kinds that only the holder of the store's role may write: each fact names the role's filter and its token."""

SHARD_FENCED: Final = frozenset({"shard", "psnap"})
"""Kinds that only the holder of a shard's lease may write: each fact names the lease's filter and its token."""

PAGE_KINDS: Final = frozenset({"lease", "shard", "psnap", "pconf"})
"""Kinds of the stream of page facts; their id is the number of the shard."""

_OWN_PLACE: Final = PAGE_KINDS | {"snap"}
"""Kinds whose subjects begin with the kind; those of all others with ``ev``."""

STORE_ROLE: Final = "store"
AGGREGATES_KEPT: Final = 8192
"""Names whose hashes are remembered: some megabytes."""


class Aggregate(NamedTuple):
    """What a fact is about: a kind, and the hash of tenant and name (or, where no user chooses it, the name itself)."""

    kind: str
    token: str

    @property
    def contested(self) -> bool:
        return self.kind in CONTESTED

    @property
    def fenced(self) -> bool:
        return self.kind in FENCED

    @property
    def guard(self) -> Aggregate | None:
        """The aggregate on whose filter its facts are compared and appended; ``None`` where only one author writes."""
        if self.fenced:
            return Aggregate("role", STORE_ROLE)
        if self.kind in SHARD_FENCED:
            return Aggregate("lease", self.token)
        return self if self.contested else None


SHARDS: Final = Aggregate("cluster", "shards")


@lru_cache(AGGREGATES_KEPT)
def aggregate(kind: str, tenant: str, name: str) -> Aggregate:
    """The aggregate of a name; most facts are about what others were about shortly before."""
    return Aggregate(kind, subject_token(kind, tenant, name))


def aggregate_of(event: Event | PageEvent) -> Aggregate:
    """The aggregate that the fact belongs to."""
    match event:
        case PagesChanged():  # first, as most facts are those
            return Aggregate("shard", str(event.shard))
        case ReplicaAdded() | ReplicaDropped() | ReplicaQuarantined():  # or these, on the log
            return aggregate("replica", event.tenant, event.artifact)
        case SessionOpened() | SessionEnded():
            return aggregate("session", "", event.worker)
        case ArtifactPut() | ArtifactRegistered() | ArtifactDigested() | ViewDefined() | ArtifactDestroyed():
            return aggregate("artifact", event.tenant, event.artifact)
        case KeyBound() | KeyUnbound():
            return aggregate("key", event.tenant, event.key)
        case VersionPublished():
            return aggregate("series", event.tenant, event.name)
        case CallerLeaseGranted() | CallerLeaseEnded():
            return aggregate("clease", event.tenant, event.lease)
        case OperationStarted() | OperationEnded():
            return aggregate("op", event.tenant, event.id)
        case RoleGranted() | RoleResigned():
            return Aggregate("role", event.role)
        case SnapshotTaken():
            return Aggregate("snap", event.what)
        case Archived():
            return Aggregate("archive", event.stream)
        case LogPurged() | PurgeCompleted():
            return Aggregate("purge", event.stream)
        case LogTruncated():
            return Aggregate("trunc", event.stream)
        case FoldRaised():
            return Aggregate("fold", event.stream)
        case ShardsFixed():
            return SHARDS
        case LeaseGranted():
            return Aggregate("lease", str(event.shard))
        case ShardSnapshotTaken():
            return Aggregate("psnap", str(event.shard))
        case ShardSnapshotConfirmed():
            return Aggregate("pconf", str(event.shard))


@dataclass(frozen=True, slots=True)
class Subjects:
    """The subjects under one prefix.

    Args:
        prefix: One or more tokens without wildcards, ``tb`` by default.
    """

    prefix: str = "tb"

    def __post_init__(self) -> None:
        if not self.prefix or any(c in self.prefix for c in " \t\r\n*>") or ".." in f".{self.prefix}.":
            raise InvalidArgumentError(f"subject prefix {self.prefix!r} must be tokens without spaces or wildcards")

    @property
    def facts(self) -> str:
        """Filter over every fact of the log."""
        return f"{self.prefix}.ev.>"

    @property
    def streams(self) -> dict[str, tuple[str, ...]]:
        """Stream name -> subjects. The stream names carry the prefix when it is not the default."""
        mark = "" if self.prefix == "tb" else "_" + self.prefix.replace(".", "_")
        return {
            f"TB{mark}": (f"{self.prefix}.ev.*.*.*", f"{self.prefix}.snap.*.*", f"{self.prefix}.blob.*.*.*"),
            f"TB_LIVE{mark}": (f"{self.prefix}.live.*.*",),
            f"TB_PAGES{mark}": (
                f"{self.prefix}.lease.*.*",
                f"{self.prefix}.shard.*.*",
                f"{self.prefix}.psnap.*.*",
                f"{self.prefix}.pconf.*.*",
                f"{self.prefix}.pblob.*.*.*",
            ),
        }

    @property
    def log_stream(self) -> str:
        return next(iter(self.streams))

    @property
    def live_stream(self) -> str:
        return list(self.streams)[1]

    @property
    def pages_stream(self) -> str:
        return list(self.streams)[2]

    def fact(self, about: Aggregate, author: WorkerId) -> str:
        return f"{self._place(about)}.{author}"

    def fence(self, about: Aggregate) -> str:
        """The one filter string over an aggregate's facts; those of a contested one are compared and appended on it."""
        return f"{self._place(about)}.*"

    def _place(self, about: Aggregate) -> str:
        kind, token = about
        if kind in _OWN_PLACE:
            return f"{self.prefix}.{kind}.{token}"
        return f"{self.prefix}.ev.{kind}.{token}"

    def shard(self, shard: int) -> str:
        """Filter over everything about a shard: its grants, page batches, snapshots and what confirms them."""
        return f"{self.prefix}.*.{shard}.*"

    @property
    def leases(self) -> str:
        """Filter over the grants of all shards."""
        return f"{self.prefix}.lease.*.*"

    def blob(self, digest: str, chunk: int, author: WorkerId, *, stream: str) -> str:
        """Where a chunk of a large body lies in a stream."""
        kind = "pblob" if stream == self.pages_stream else "blob"
        return f"{self.prefix}.{kind}.{digest}.{chunk}.{author}"

    def rpc(self, name: str) -> str:
        """Where a question of that name is asked, outside of the streams."""
        return f"{self.prefix}.rpc.{name}"

    def live(self, incarnation: str, worker: WorkerId) -> str:
        return f"{self.prefix}.live.{incarnation}.{worker}"

    @property
    def live_all(self) -> str:
        return f"{self.prefix}.live.*.*"

    def parse_live(self, subject: str) -> tuple[str, WorkerId]:
        """Incarnation and worker of a heartbeat's subject."""
        incarnation, worker = subject.removeprefix(f"{self.prefix}.live.").split(".")
        return incarnation, WorkerId(worker)

    def parse(self, subject: str) -> tuple[Aggregate, WorkerId]:
        """Aggregate and author of a fact's subject.

        Raises:
            InvalidArgumentError: If it is no subject of a fact under this prefix.
        """
        head = f"{self.prefix}."
        parts = subject.removeprefix(head).split(".") if subject.startswith(head) else []
        if parts[:1] == ["ev"]:
            parts = parts[1:]
        elif not _OWN_PLACE.issuperset(parts[:1]):
            parts = []
        if len(parts) != 3:
            raise InvalidArgumentError(f"{subject!r} is not the subject of a fact", subject=subject)
        kind, token, author = parts
        return Aggregate(kind, token), WorkerId(author)
