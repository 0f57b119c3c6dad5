"""Subjects are built and parsed here and nowhere else.

``<prefix>.ev.<kind>.<id>.<author>``: the id is a hash of the user's text (``docs/spec/ids.md``), the author is last so
that NATS permissions stop a worker from speaking for another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tensorbus.errors import InvalidArgumentError
from tensorbus.events._facts import (
    ArtifactDestroyed,
    ArtifactDigested,
    ArtifactPut,
    ArtifactRegistered,
    CallerLeaseEnded,
    CallerLeaseGranted,
    Event,
    KeyBound,
    KeyUnbound,
    ReplicaAdded,
    ReplicaDropped,
    SessionEnded,
    SessionOpened,
    VersionPublished,
    ViewDefined,
)
from tensorbus.ids import WorkerId, subject_token

CONTESTED: Final = frozenset({"artifact", "key", "series", "session", "instance", "trunc", "fold", "role"})
"""Kinds that several authors may write: each fact of them is compared and appended on ``<prefix>.ev.<kind>.<id>.*``."""


@dataclass(frozen=True, slots=True, order=True)
class Aggregate:
    """What a fact is about: a kind, and the hash of tenant and name."""

    kind: str
    token: str

    @property
    def contested(self) -> bool:
        return self.kind in CONTESTED


def aggregate(kind: str, tenant: str, name: str) -> Aggregate:
    return Aggregate(kind, subject_token(kind, tenant, name))


def aggregate_of(event: Event) -> Aggregate:
    """The aggregate that the fact belongs to."""
    match event:
        case SessionOpened() | SessionEnded():
            return aggregate("session", "", event.worker)
        case ArtifactPut() | ArtifactRegistered() | ArtifactDigested() | ViewDefined() | ArtifactDestroyed():
            return aggregate("artifact", event.tenant, event.artifact)
        case KeyBound() | KeyUnbound():
            return aggregate("key", event.tenant, event.key)
        case VersionPublished():
            return aggregate("series", event.tenant, event.name)
        case ReplicaAdded() | ReplicaDropped():
            return aggregate("replica", event.tenant, event.artifact)
        case CallerLeaseGranted() | CallerLeaseEnded():
            return aggregate("clease", event.tenant, event.lease)


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
        }

    @property
    def log_stream(self) -> str:
        return next(iter(self.streams))

    @property
    def live_stream(self) -> str:
        return list(self.streams)[1]

    def fact(self, about: Aggregate, author: WorkerId) -> str:
        return f"{self.prefix}.ev.{about.kind}.{about.token}.{author}"

    def fence(self, about: Aggregate) -> str:
        """The one filter string on which facts of a contested aggregate are compared and appended."""
        return f"{self.prefix}.ev.{about.kind}.{about.token}.*"

    def blob(self, digest: str, chunk: int, author: WorkerId) -> str:
        return f"{self.prefix}.blob.{digest}.{chunk}.{author}"

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
        head = f"{self.prefix}.ev."
        parts = subject.removeprefix(head).split(".") if subject.startswith(head) else []
        if len(parts) != 3:
            raise InvalidArgumentError(f"{subject!r} is not the subject of a fact", subject=subject)
        kind, token, author = parts
        return Aggregate(kind, token), WorkerId(author)
