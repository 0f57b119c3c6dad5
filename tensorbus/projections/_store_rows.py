"""Which rows of the global store a fact closes and which it opens: seen in the Directory, without a database.

A :class:`RowTracker` remembers of each thing only what tells whether its row is still right. For replicas and leases
these are the Directory's own records, which are frozen: a million copies cost one reference each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from tensorbus.events import AnyRecorded, ReplicaAdded, ReplicaDropped
from tensorbus.ids import ArtifactId, LeaseId, WorkerId
from tensorbus.lifecycle import (
    Artifact,
    CallerLease,
    Directory,
    Key,
    Operation,
    Quarantine,
    Replica,
    ReplicaKey,
    Session,
    Verdict,
)

Where = tuple[str, ArtifactId]
RowKey = int | tuple[object, ...]
"""What finds an open row: the values of the table's ``Entity.row``, the bare number where it is one."""

_NO_REPLICAS: Final[dict[ReplicaKey, Replica]] = {}  # stand for "none", never changed: most artifacts have no more
_NO_QUARANTINE: Final[dict[ReplicaKey, Quarantine]] = {}
_NO_LEASES: Final[dict[LeaseId, CallerLease]] = {}
_NO_VIEWS: Final[dict[ArtifactId, str]] = {}
_NO_VERSIONS: Final[dict[tuple[str, int], None]] = {}


class Change(NamedTuple):
    """One row of a table ends, begins, or is replaced.

    Attributes:
        table: Name of the entity, such as ``replicas``.
        closes: The row that holds no longer.
        opens: The row that holds from here on.
        row: Its values, in the order of the entity's columns.
    """

    table: str
    closes: RowKey | None
    opens: RowKey | None
    row: tuple[object, ...] = ()


class Applied(NamedTuple):
    """A fact that the Directory has taken in, with what it means for the store.

    Attributes:
        after: The Directory's position before it, so that the store can tell a hole from the next fact.
        body: The message as it was, if it is at hand; else the fact is written once more.
    """

    recorded: AnyRecorded
    verdict: Verdict
    changes: tuple[Change, ...]
    after: int
    body: bytes | None = None


@dataclass(slots=True)
class _Held:
    """The rows that an artifact has: its own, told by ``state``, and those of what belongs to it."""

    state: tuple[int, str | None, int | None]
    replicas: dict[ReplicaKey, Replica] = field(default_factory=lambda: _NO_REPLICAS)
    quarantined: dict[ReplicaKey, Quarantine] = field(default_factory=lambda: _NO_QUARANTINE)
    leases: dict[LeaseId, CallerLease] = field(default_factory=lambda: _NO_LEASES)
    views: dict[ArtifactId, str] = field(default_factory=lambda: _NO_VIEWS)
    versions: dict[tuple[str, int], None] = field(default_factory=lambda: _NO_VERSIONS)


class RowTracker:
    """Follows one Directory from where it stands now; call :meth:`applied` after each of its facts, in order.

    Args:
        state: The Directory, which somebody else feeds.
    """

    def __init__(self, state: Directory) -> None:
        self._state = state
        self._seq = 0
        self._artifacts: dict[Where, _Held] = {}
        self._keys: dict[tuple[str, str], Key] = {}
        self._sessions: dict[WorkerId, tuple[int, int | None]] = {}
        self._operations: dict[tuple[str, str], Operation] = {}
        self._roles: dict[str, int] = {}
        self.restart()

    def restart(self) -> None:
        """Go on from the state as it is now, after it was replaced by a snapshot's."""
        for _ in self.everything():
            pass

    def applied(self, recorded: AnyRecorded, verdict: Verdict, *, body: bytes | None = None) -> Applied:
        """What the fact just taken in changed. To be called right after ``state.apply(recorded)`` gave ``verdict``."""
        after = self._seq
        changes: tuple[Change, ...] = ()
        if recorded.seq > after:
            self._seq = recorded.seq
            if verdict.kept:
                changes = self._changes(recorded, verdict)
        return Applied(recorded, verdict, changes, after, body)

    def _changes(self, recorded: AnyRecorded, verdict: Verdict) -> tuple[Change, ...]:
        event = recorded.event
        if isinstance(event, (ReplicaAdded, ReplicaDropped)):  # most facts: nothing but that one copy has changed
            where = (event.tenant, event.artifact)
            if not self._artifacts[where].quarantined:  # else a right copy ends that of the wrong ones
                return self._one_replica(where, ReplicaKey(recorded.headers.author, event.view, event.tier))
        return tuple(change for touched in verdict.touched for change in self._look(touched.kind, touched[1:]))

    def everything(self) -> Iterator[Change]:
        """Every row of the state as it is, for one who has none yet; the tracker starts from here."""
        state = self._state
        self._seq = state.seq
        for index in (self._artifacts, self._keys, self._sessions, self._operations, self._roles):
            index.clear()
        for worker in state.sessions:
            yield from self._session(worker)
        for role in state.roles:
            yield from self._role(role)
        for operation in state.operations:
            yield from self._operation(operation)
        for where in state.artifacts:
            yield from self._artifact(where)
        for key in state.keys:
            yield from self._key(key)
        for (tenant, name), series in state.series.items():  # those that are there came with their artifacts
            gone = (number for number in range(1, series.last + 1) if number not in series.versions)
            yield from (_version_gone(tenant, name, number, closes=False) for number in gone)

    def _look(self, kind: str, name: tuple[str, str]) -> Iterator[Change]:
        match kind:
            case "artifact":
                return self._artifact((name[0], ArtifactId(name[1])))
            case "key":
                return self._key(name)
            case "session":
                return self._session(WorkerId(name[1]))
            case "operation":
                return self._operation(name)
            case "role":
                return self._role(name[1])
            case _:  # a series changes by its artifacts; the log itself has no row
                return iter(())

    # -- an artifact and what belongs to it ----------------------------------------------------------------------------

    def _artifact(self, where: Where) -> Iterator[Change]:
        record, held = self._state.artifacts.get(where), self._artifacts.get(where)
        if record is None:
            if held is not None:
                del self._artifacts[where]
                yield Change("artifacts", held.state[0], None)
            return
        state = (record.born, record.digest, record.destroyed)
        if held is None:
            held = self._artifacts[where] = _Held(state)
            yield Change("artifacts", None, record.born, _artifact_row(record))
        elif held.state != state:
            born, held.state = held.state[0], state
            yield Change("artifacts", born, record.born, _artifact_row(record))
        yield from _replica_changes(record, held)
        yield from _quarantine_changes(record, held)
        yield from _lease_changes(record, held)
        yield from _view_changes(record, held)
        yield from _version_changes(record, held)

    def _one_replica(self, where: Where, key: ReplicaKey) -> tuple[Change, ...]:
        held = self._artifacts[where]
        old, new = held.replicas.get(key), self._state.artifacts[where].replicas.get(key)
        if old is new:
            return ()
        if held.replicas is _NO_REPLICAS:
            held.replicas = {}
        if new is None:
            held.replicas.pop(key, None)
        else:
            held.replicas[self._state.shared_key(key)] = new
        return (_replica_change(where, old, new),)

    # -- what stands by itself -----------------------------------------------------------------------------------------

    def _key(self, name: tuple[str, str]) -> Iterator[Change]:
        old, new = self._keys.get(name), self._state.keys.get(name)
        if old is new:
            return
        if new is None:
            del self._keys[name]
            yield Change("keys", name, None)
        else:
            self._keys[name] = new
            row = (*name, new.artifact, new.artifact is not None, new.gone or None)
            yield Change("keys", name if old else None, name, row)

    def _session(self, worker: WorkerId) -> Iterator[Change]:
        old, session = self._sessions.get(worker), self._state.sessions.get(worker)
        if session is None:
            if old is not None:
                del self._sessions[worker]
                yield Change("sessions", old[0], None)
        elif old != (session.opened, session.ended):
            self._sessions[worker] = (session.opened, session.ended)
            yield Change("sessions", old[0] if old else None, session.opened, _session_row(session))

    def _operation(self, where: tuple[str, str]) -> Iterator[Change]:
        old, new = self._operations.get(where), self._state.operations.get(where)
        if old is new:
            return
        if new is None:
            del self._operations[where]
            yield Change("operations", old.started if old else None, None)
        else:
            self._operations[where] = new
            yield Change("operations", old.started if old else None, new.started, _operation_row(new))

    def _role(self, role: str) -> Iterator[Change]:
        lease, old = self._state.roles.get(role), self._roles.get(role)
        if lease is None:
            if old is not None:
                del self._roles[role]
                yield Change("roles", old, None)
        elif lease.token != old:
            self._roles[role] = lease.token
            yield Change("roles", old, lease.token, (role, lease.worker, lease.incarnation, lease.token))


def _replica_changes(record: Artifact, held: _Held) -> Iterator[Change]:
    old, new = held.replicas, record.replicas
    if old == new:
        return
    held.replicas = new.copy() if new else _NO_REPLICAS
    for key in {**old, **new}:
        if old.get(key) is not new.get(key):
            yield _replica_change(record.where, old.get(key), new.get(key))


def _replica_change(where: Where, old: Replica | None, new: Replica | None) -> Change:
    if new is None:
        return Change("replicas", old.seq if old else None, None)
    row = (*where, new.worker, new.view, new.tier, new.incarnation, new.nbytes, new.lease, new.seq)
    return Change("replicas", old.seq if old else None, new.seq, row)


def _quarantine_changes(record: Artifact, held: _Held) -> Iterator[Change]:
    old, new = held.quarantined, record.quarantined
    if old == new:
        return
    held.quarantined = new.copy() if new else _NO_QUARANTINE
    for key, mark in old.items():
        if new.get(key) is not mark:
            yield Change("quarantines", mark.seq, None)
    for key, mark in new.items():
        if old.get(key) is not mark:
            what = (mark.worker, mark.view, mark.tier, mark.incarnation, mark.cause, mark.lease, mark.seq)
            yield Change("quarantines", None, mark.seq, (*record.where, *what))


def _lease_changes(record: Artifact, held: _Held) -> Iterator[Change]:
    old, new = held.leases, record.leases
    if old == new:
        return
    held.leases = new.copy() if new else _NO_LEASES
    for name, lease in old.items():
        if new.get(name) is not lease:
            yield Change("leases", lease.seq, None)
    for name, lease in new.items():
        if old.get(name) is not lease:
            what = (lease.worker, lease.purpose, lease.holder or None, lease.ttl_ns, lease.seq)
            yield Change("leases", None, lease.seq, (*record.where, lease.lease, *what))


def _view_changes(record: Artifact, held: _Held) -> Iterator[Change]:
    old, new = held.views, record.views
    if old == new:
        return
    held.views = new.copy() if new else _NO_VIEWS
    for view in old:
        if view not in new:
            yield Change("views", (record.tenant, view), None)
    for view, definition in new.items():
        if view not in old:
            yield Change("views", None, (record.tenant, view), (record.tenant, view, record.artifact, definition))


def _version_changes(record: Artifact, held: _Held) -> Iterator[Change]:
    old, new = held.versions, record.versions
    if old == new:
        return
    held.versions = new.copy() if new else _NO_VERSIONS
    for name, number in old:
        if (name, number) not in new:
            yield _version_gone(record.tenant, name, number, closes=True)
    for name, number in new:
        if (name, number) not in old:
            key = (record.tenant, name, number)
            yield Change("versions", None, key, (*key, record.artifact, True))


def _version_gone(tenant: str, name: str, number: int, *, closes: bool) -> Change:
    key = (tenant, name, number)
    return Change("versions", key if closes else None, key, (*key, None, False))


def _artifact_row(record: Artifact) -> tuple[object, ...]:
    blob = record.manifest.blob
    what = (record.digest, record.nbytes, record.tensors, blob.digest if blob else None, record.key)
    birth = (record.born, record.born_ns, record.author, record.incarnation, record.principal or None)
    return (*record.where, *what, *birth, record.live, record.destroyed, record.reason)


def _session_row(session: Session) -> tuple[object, ...]:
    says = (session.host, list(session.roles), session.data, session.control, session.pool_bytes, session.ttl_ns)
    life = (session.opened, session.opened_ns, session.live, session.ended)
    return (session.worker, session.incarnation, *says, session.pid, session.version, *life)


def _operation_row(operation: Operation) -> tuple[object, ...]:
    what = (operation.operation, operation.artifact, operation.args)
    who = (operation.worker, operation.incarnation, operation.principal or None)
    life = (operation.started, operation.started_ns, operation.state, operation.ended, operation.ended_ns)
    return (*operation.where, *what, *who, *life, operation.error, operation.result)
