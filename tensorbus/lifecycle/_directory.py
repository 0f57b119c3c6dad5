"""The Directory: which artifacts, names, replicas, leases and sessions there are, folded from the log.

One mutator, :meth:`Directory.apply`; everything else reads. It is total and never raises on a decoded fact: the message is
in the log already, and all that is left to decide is whether it counts. It reads no clock, no network and no random source.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator

from tensorbus.events import Aggregate, AnyRecorded, Event, Recorded, Subjects, UnknownEvent, aggregate_of
from tensorbus.ids import ArtifactId, Incarnation, WorkerId
from tensorbus.lifecycle import _fold_artifacts as artifacts
from tensorbus.lifecycle import _fold_names as names
from tensorbus.lifecycle import _fold_sessions as sessions
from tensorbus.lifecycle._hash import StateHash
from tensorbus.lifecycle._records import Artifact, Key, Series, Session, Touched, Verdict

FOLD_VERSION = 1
"""Raised when the meaning of the fold changes; a snapshot states it."""


class Directory:
    """State of the fold at sequence ``seq``.

    Attributes:
        seq: The last sequence applied.
        dropped: How many proposals did not count, by reason.
        gaps: How often an author's running number skipped: facts are missing, and the state must be rebuilt.
        unknown: How many facts of unknown type were passed over; above 0 the state is degraded.
        orphans: Live artifacts without any replica, oldest first, each with the worker's life that owes its end (its
            caller's lease ended there), or ``None``: a witness owes it.
    """

    def __init__(self, subjects: Subjects | None = None) -> None:
        self.subjects = subjects or Subjects()
        self.seq = 0
        self.sessions: dict[WorkerId, Session] = {}
        self.artifacts: dict[tuple[str, ArtifactId], Artifact] = {}
        self.keys: dict[tuple[str, str], Key] = {}
        self.series: dict[tuple[str, str], Series] = {}
        self.heads: dict[Aggregate, int] = {}
        self.by_digest: dict[tuple[str, str], dict[ArtifactId, None]] = {}
        self.by_view: dict[tuple[str, ArtifactId], ArtifactId] = {}
        self.by_worker: dict[WorkerId, dict[tuple[str, ArtifactId], None]] = {}
        self.orphans: dict[tuple[str, ArtifactId], tuple[WorkerId, Incarnation] | None] = {}
        self.dropped: dict[str, int] = {}
        self.gaps = 0
        self.unknown = 0
        self._hash = StateHash(self._entity_text)

    # -- the one mutator ---------------------------------------------------------------------------------------------

    def apply(self, recorded: AnyRecorded) -> Verdict:
        """Take the next message of the log in and say whether it counts. A sequence seen before changes nothing."""
        if recorded.seq <= self.seq:
            return Verdict(False, "duplicate")
        self.seq = recorded.seq
        if isinstance(recorded.event, UnknownEvent):
            self.unknown += 1
            about, _ = self.subjects.parse(recorded.subject)
            self._move_head(about, recorded.seq)
            return self._drop("unknown")
        about = aggregate_of(recorded.event)
        why = self._refuse(about, recorded)
        self._move_head(about, recorded.seq)
        if why:
            return self._drop(why)
        verdict = self._evolve(recorded)
        if not verdict.kept:
            return self._drop(verdict.why)
        for touched in verdict.touched:
            self._hash.mark(touched)
        return verdict

    def _refuse(self, about: Aggregate, recorded: Recorded[Event]) -> str:
        """Why the message cannot count whatever it says, or an empty text."""
        subject = self.subjects.fact(about, recorded.headers.author)
        if recorded.subject != subject:
            return "subject"
        if about.contested:
            return "" if recorded.headers.expected == self.heads.get(about, 0) else "sequence"
        return ""

    def _evolve(self, recorded: Recorded[Event]) -> Verdict:
        kind = aggregate_of(recorded.event).kind
        if kind == "session":
            return sessions.evolve(self, recorded)
        author = self.sessions.get(recorded.headers.author)
        if author is None or not author.live or author.incarnation != recorded.headers.incarnation:
            return Verdict(False, "fenced")
        number = getattr(recorded.event, "number", None)
        if number is not None:
            if number <= author.number:
                return Verdict(False, "duplicate")
            self.gaps += number != author.number + 1
            author.number = number
            self._hash.mark(Touched("session", "", author.worker))
        if kind in ("key", "series"):
            return names.evolve(self, recorded)
        return artifacts.evolve(self, recorded)

    def _move_head(self, about: Aggregate, seq: int) -> None:
        if about.contested:
            self.heads[about] = seq
            self._hash.mark(about)

    def _drop(self, why: str) -> Verdict:
        self.dropped[why] = self.dropped.get(why, 0) + 1
        return Verdict(False, why)

    # -- reading -----------------------------------------------------------------------------------------------------

    def head(self, about: Aggregate) -> int:
        """The last sequence of a contested aggregate, kept or dropped: what the next append must expect."""
        return self.heads.get(about, 0)

    def artifact(self, tenant: str, artifact: ArtifactId) -> Artifact | None:
        """The newest life of an artifact under that id, live or destroyed; a ``tb1:`` id also finds what is linked to it."""
        found = self.artifacts.get((tenant, artifact))
        if found is not None and found.live:
            return found
        for linked in self.by_digest.get((tenant, artifact), ()):
            other = self.artifacts.get((tenant, linked))
            if other is not None and other.live:
                return other
        return found

    def key(self, tenant: str, key: str) -> Key | None:
        return self.keys.get((tenant, key))

    def one_series(self, tenant: str, name: str) -> Series | None:
        return self.series.get((tenant, name))

    def live_sessions(self) -> Iterator[Session]:
        return (session for session in self.sessions.values() if session.live)

    def is_live(self, worker: WorkerId, incarnation: str) -> bool:
        session = self.sessions.get(worker)
        return session is not None and session.live and session.incarnation == incarnation

    def owed_by_witness(self) -> list[Artifact]:
        """Live artifacts without a replica whose end no living worker owes."""
        owed = (where for where, by in self.orphans.items() if by is None or not self.is_live(*by))
        return [self.artifacts[where] for where in owed]

    @property
    def degraded(self) -> bool:
        """Whether facts were passed over or are missing, so that the state may not be the log's."""
        return self.unknown > 0 or self.gaps > 0

    def hash(self) -> str:
        """Canonical hash of the whole state, equal for any two folds of the same messages."""
        return self._hash.hex()

    def _entity_text(self, key: Hashable) -> str | None:
        if isinstance(key, Aggregate):
            return f"head {key.kind} {key.token} {self.heads[key]}"
        if not isinstance(key, Touched):
            return None
        match key.kind:
            case "session":
                return repr(self.sessions.get(WorkerId(key.name)))
            case "key":
                return f"{key.tenant!r} {self.keys.get((key.tenant, key.name))!r}"
            case "series":
                return f"{key.tenant!r} {self.series.get((key.tenant, key.name))!r}"
            case _:
                return repr(self.artifacts.get((key.tenant, ArtifactId(key.name))))
