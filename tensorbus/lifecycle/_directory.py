"""The Directory: which artifacts, names, replicas, leases and sessions there are, folded from the log.

One mutator, :meth:`Directory.apply`; everything else reads. It is total and never raises on a decoded fact: the
message is in the log already, and all that is left to decide is whether it counts. It reads no clock, no network and
no random source.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping

from tensorbus.errors import CorruptError, InvalidArgumentError
from tensorbus.events import (
    CONTESTED,
    Aggregate,
    AnyRecorded,
    Event,
    Recorded,
    RoleGranted,
    Subjects,
    UnknownEvent,
    aggregate_of,
)
from tensorbus.ids import ArtifactId, Incarnation, WorkerId
from tensorbus.lifecycle import _canon as canon
from tensorbus.lifecycle import _fold_artifacts as artifacts
from tensorbus.lifecycle import _fold_log as own_log
from tensorbus.lifecycle import _fold_names as names
from tensorbus.lifecycle import _fold_operations as operations
from tensorbus.lifecycle import _fold_sessions as sessions
from tensorbus.lifecycle._hash import StateHash, hash_of
from tensorbus.lifecycle._records import (
    Artifact,
    Key,
    LogState,
    Operation,
    ReplicaKey,
    RoleLease,
    Series,
    Session,
    Touched,
    Verdict,
)
from tensorbus.lifecycle._validate import violations

FOLD_VERSION = 1
"""The newest version of the fold's meaning that this program knows; the log says which is in force."""


class Directory:
    """State of the fold at sequence ``seq``.

    Attributes:
        seq: The last sequence applied.
        dropped: How many proposals did not count, by reason.
        gaps: How often an author's running number skipped: facts are missing, and the state must be rebuilt.
        unknown: How many facts of unknown type were passed over; above 0 the state is degraded.
        orphans: Live artifacts without any replica, oldest first, each with the worker's life that owes its end (its
            caller's lease ended there), or ``None``: a witness owes it.
        by_worker: The artifacts of which a worker holds a replica.
        quarantined: The artifacts of which a worker has a copy with wrong bytes.
        by_lessor: The artifacts on which a worker granted a caller's lease that has not ended.
        operations: Those that run, and of each worker the newest that ended, in the order in which they began.
        running: The operations of a worker that run.
        finished: Those that have ended, in that order.
        roles: The last grant of each role, unless its holder has resigned.
        log: What became of the log itself.
    """

    def __init__(self, subjects: Subjects | None = None) -> None:
        self.subjects = subjects or Subjects()
        self.seq = 0
        self.sessions: dict[WorkerId, Session] = {}
        self.artifacts: dict[tuple[str, ArtifactId], Artifact] = {}
        self.keys: dict[tuple[str, str], Key] = {}
        self.series: dict[tuple[str, str], Series] = {}
        self.operations: dict[tuple[str, str], Operation] = {}
        self.running: dict[WorkerId, dict[tuple[str, str], None]] = {}
        self.finished: dict[WorkerId, dict[tuple[str, str], None]] = {}
        self.roles: dict[str, RoleLease] = {}
        self.log = LogState()
        self.shards = 0
        self.heads: dict[Aggregate, int] = {}
        self.by_digest: dict[tuple[str, str], dict[ArtifactId, None]] = {}
        self.by_view: dict[tuple[str, ArtifactId], ArtifactId] = {}
        self.by_worker: dict[WorkerId, dict[tuple[str, ArtifactId], None]] = {}
        self.by_lessor: dict[WorkerId, dict[tuple[str, ArtifactId], None]] = {}
        self.quarantined: dict[WorkerId, dict[tuple[str, ArtifactId], None]] = {}
        self.orphans: dict[tuple[str, ArtifactId], tuple[WorkerId, Incarnation] | None] = {}
        self.dropped: dict[str, int] = {}
        self.gaps = 0
        self.unknown = 0
        self._keys_shared: dict[ReplicaKey, ReplicaKey] = {}
        self._hash = StateHash(self._entity_text)

    # -- the one mutator ---------------------------------------------------------------------------------------------

    def apply(self, recorded: AnyRecorded) -> Verdict:
        """Take the next message of the log in and say whether it counts. A sequence seen before changes nothing."""
        if recorded.seq <= self.seq:
            return Verdict(False, "duplicate")
        self.seq = recorded.seq
        if self.log.fold > FOLD_VERSION:
            self.unknown += 1
            self._move_head(self._place(recorded.subject), recorded.seq)
            return self._drop("fold")
        if isinstance(recorded.event, UnknownEvent):
            self.unknown += 1
            self._move_head(self._place(recorded.subject), recorded.seq)
            return self._drop("unknown")
        about = aggregate_of(recorded.event)
        why = self._refuse(about, recorded)
        # The server compares on the subject, whatever the body says: that aggregate's next append must name this one.
        if why == "subject":
            self._move_head(self._place(recorded.subject), recorded.seq)
        elif about.kind in CONTESTED:
            self._move_head(about, recorded.seq)
        if why:
            return self._drop(why)
        verdict = self._evolve(about.kind, recorded)
        if not verdict.kept:
            return self._drop(verdict.why)
        self.unknown += self.log.fold > FOLD_VERSION  # from here on facts mean what this program does not know
        for touched in verdict.touched:
            self._hash.mark(touched)
        return verdict

    def _refuse(self, about: Aggregate, recorded: Recorded[Event]) -> str:
        """Why the message cannot count whatever it says, or an empty text."""
        subject = self.subjects.fact(about, recorded.headers.author)
        if recorded.subject != subject:
            return "subject"
        if about.kind in CONTESTED and not isinstance(recorded.event, RoleGranted):
            return "" if recorded.headers.expected == self.heads.get(about, 0) else "sequence"
        return ""

    def _place(self, subject: str) -> Aggregate | None:
        """The aggregate on whose fence a message lies, or ``None`` if it lies on none of ours."""
        try:
            return self.subjects.parse(subject)[0]
        except InvalidArgumentError:
            return None

    def _evolve(self, kind: str, recorded: Recorded[Event]) -> Verdict:
        if kind == "session":
            return sessions.evolve(self, recorded)
        if kind in own_log.KINDS:
            return own_log.evolve(self, recorded)
        author = self.sessions.get(recorded.headers.author)
        if author is None or author.ended is not None or author.incarnation != recorded.headers.incarnation:
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
        if kind == "op":
            return operations.evolve(self, recorded, author)
        return artifacts.evolve(self, recorded, author)

    def _move_head(self, about: Aggregate | None, seq: int) -> None:
        if about is not None and about.kind in CONTESTED:
            self.heads[about] = seq
            self._hash.mark(about)

    def forget(self, touched: Touched, about: Aggregate) -> None:
        """Drop an aggregate's head, for the fold, which dropped its record."""
        self.heads.pop(about, None)
        self._hash.mark(about)
        self._hash.mark(touched)

    def _drop(self, why: str) -> Verdict:
        self.dropped[why] = self.dropped.get(why, 0) + 1
        return Verdict(False, why)

    # -- reading -----------------------------------------------------------------------------------------------------

    def head(self, about: Aggregate) -> int:
        """The last sequence of a contested aggregate, kept or dropped: what the next append must expect."""
        return self.heads.get(about, 0)

    def artifact(self, tenant: str, artifact: ArtifactId) -> Artifact | None:
        """The newest life of an artifact under that id, live or destroyed; a ``tb1:`` id also finds its links."""
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

    def full_hash(self) -> str:
        """The same hash, computed from the whole state instead of its changes; for tests and restored snapshots."""
        return hash_of(self._texts())

    # -- snapshots ---------------------------------------------------------------------------------------------------

    def settled(self, count: int) -> bool:
        """Hash at most ``count`` of the changes that :meth:`hash` would have to; whether none is left."""
        return self._hash.settle(count)

    @property
    def terms(self) -> Mapping[Hashable, int]:
        """What each thing adds to the hash: up to date once :meth:`settled`."""
        return self._hash.terms

    def restored(self, seq: int, terms: dict[Hashable, int], total: int) -> None:
        """Go on from a snapshot whose tables were filled in."""
        self.seq = seq
        self._hash.restored(terms, total)

    def become(self, other: Directory) -> None:
        """Exchange everything with another state in place: who holds this one sees the other's from now on.

        ``other`` then is what this one was. :func:`differences` says beforehand what that changes.
        """
        for name in vars(self).keys() - {"_hash", "subjects"}:
            mine, its = getattr(self, name), getattr(other, name)
            setattr(self, name, its)
            setattr(other, name, mine)
        self._hash.take(other._hash)

    def validate(self) -> None:
        """Check that all indexes agree; for tests and restored snapshots. Costs as much as the whole state.

        Raises:
            CorruptError: If something contradicts itself; the message says what.
        """
        found = tuple(violations(self))
        if found:
            raise CorruptError(f"the directory at {self.seq} contradicts itself: {'; '.join(found)}", seq=self.seq)

    def shared_key(self, key: ReplicaKey) -> ReplicaKey:
        """One object for all equal keys of whole copies, of which there are few: a worker, a tier."""
        return self._keys_shared.setdefault(key, key) if key.view is None else key

    def _texts(self) -> Iterator[str]:
        yield from (canon.head_text(about, seq) for about, seq in self.heads.items())
        yield from map(canon.session_text, self.sessions.values())
        yield from (canon.key_text(tenant, key) for (tenant, _), key in self.keys.items())
        yield from (canon.series_text(tenant, series) for (tenant, _), series in self.series.items())
        yield from map(canon.operation_text, self.operations.values())
        yield from map(canon.role_text, self.roles.values())
        yield from (canon.log_text(self.log) for _ in range(self.log != LogState()))
        yield from (canon.shards_text(self.shards) for _ in range(self.shards > 0))
        yield from (canon.artifact_text(record, self.orphans.get(where)) for where, record in self.artifacts.items())

    def _entity_text(self, key: Hashable) -> str | None:
        """Canonical text of an entity, ``None`` once it was forgotten."""
        if isinstance(key, Aggregate):
            return canon.head_text(key, self.heads[key]) if key in self.heads else None
        if not isinstance(key, Touched):
            return None
        match key.kind:
            case "session":
                session = self.sessions.get(WorkerId(key.name))
                return None if session is None else canon.session_text(session)
            case "key":
                bound = self.keys.get((key.tenant, key.name))
                return None if bound is None else canon.key_text(key.tenant, bound)
            case "series":
                return canon.series_text(key.tenant, self.series[key.tenant, key.name])
            case "operation":
                operation = self.operations.get((key.tenant, key.name))
                return None if operation is None else canon.operation_text(operation)
            case "role":
                role = self.roles.get(key.name)
                return None if role is None else canon.role_text(role)
            case "log":
                return None if self.log == LogState() else canon.log_text(self.log)
            case "cluster":
                return canon.shards_text(self.shards) if self.shards else None
            case _:
                where = (key.tenant, ArtifactId(key.name))
                record = self.artifacts.get(where)
                return None if record is None else canon.artifact_text(record, self.orphans.get(where))
