"""What the store's tests share: feeding a log, and the rows that a Directory calls for, told by other words."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from tensorbus.events import AnyRecorded, Subjects
from tensorbus.lifecycle import FOLD_VERSION, Artifact, Directory, Operation, Session
from tensorbus.projections import Applied, GlobalStore, RowTracker
from tests.unit.lifecycle import history as h

SUBJECTS = Subjects()
Rows = dict[str, set[tuple[Any, ...]]]


def known(log: h.Log) -> h.Log:
    """The log up to where its fold is raised beyond what this program knows, and the state there."""
    state = Directory()
    for at, message in enumerate(log.messages):
        if state.log.fold > FOLD_VERSION:
            return h.Log(h.fold(log.messages[:at]), log.messages[:at])
        state.apply(message)
    return log


histories = h.histories.map(known)


class Feed:
    """Folds messages and tracks rows, as the store's role does."""

    def __init__(self, state: Directory | None = None) -> None:
        self.state = state or Directory()
        self.tracker = RowTracker(self.state)

    def take(self, messages: Iterable[AnyRecorded]) -> list[Applied]:
        return [self.tracker.applied(message, self.state.apply(message)) for message in messages]


def fill(store: GlobalStore, log: h.Log, cuts: list[int] | None = None) -> GlobalStore:
    """Apply a whole log in batches."""
    feed = Feed()
    for batch in h.batches(log.messages, cuts or []):
        store.apply(feed.take(batch))
    return store


def small_log() -> h.Log:
    """Two workers; an artifact with a key, a view, copies, a pin and a version; one that ended, with its key."""
    log = h.Log()
    log.open(h.W1)
    log.open(h.W2)
    log.append(h.put())
    log.append(h.bound())
    log.append(h.view_defined())
    log.append(h.added(1), h.W2)
    log.append(h.granted(1))
    log.append(h.published(1))
    log.append(h.put(h.Y, h.D2), h.W2)
    log.append(h.bound("gone", h.Y))
    log.append(h.published(2, h.Y))
    log.append(h.destroyed(h.Y))
    log.append(h.ended(h.W2))
    return log


# -- expected rows ---------------------------------------------------------------------------------------------------


def expected(state: Directory) -> Rows:
    """All rows that hold in the state, without when they began."""
    rows: Rows = {
        "artifacts": {_artifact(record) for record in state.artifacts.values()},
        "replicas": set(),
        "quarantines": set(),
        "views": set(),
        "leases": set(),
        "versions": set(),
        "keys": {
            (tenant, name, key.artifact, key.artifact is not None, key.gone or None)
            for (tenant, name), key in state.keys.items()
        },
        "sessions": {_session(session) for session in state.sessions.values()},
        "operations": {_operation(operation) for operation in state.operations.values()},
        "roles": {(r.role, r.worker, r.incarnation, r.token) for r in state.roles.values()},
    }
    for record in state.artifacts.values():
        for r in record.replicas.values():
            what = (r.worker, r.view, str(r.tier), r.incarnation, r.nbytes, r.lease, r.seq)
            rows["replicas"].add((*record.where, *what))
        for q in record.quarantined.values():
            what = (q.worker, q.view, str(q.tier), q.incarnation, str(q.cause), q.lease, q.seq)
            rows["quarantines"].add((*record.where, *what))
        for view, definition in record.views.items():
            rows["views"].add((record.tenant, view, record.artifact, definition))
        for c in record.leases.values():
            rows["leases"].add((*record.where, c.lease, c.worker, str(c.purpose), c.holder or None, c.ttl_ns, c.seq))
    for (tenant, name), series in state.series.items():
        for number in range(1, series.last + 1):
            artifact = series.versions.get(number)
            rows["versions"].add((tenant, name, number, artifact, artifact is not None))
    return rows


def _session(s: Session) -> tuple[Any, ...]:
    says = (s.host, s.roles, s.data, s.control, s.pool_bytes, s.ttl_ns, s.pid, s.version)
    return (s.worker, s.incarnation, *says, s.opened, s.opened_ns, s.ended is None, s.ended)


def _operation(o: Operation) -> tuple[object, ...]:
    who = (o.worker, o.incarnation, o.principal or None)
    life = (o.started, o.started_ns, str(o.state), o.ended, o.ended_ns, o.error, o.result)
    return (*o.where, o.operation, o.artifact, o.args, *who, *life)


def _artifact(r: Artifact) -> tuple[Any, ...]:
    blob = r.manifest.blob.digest if r.manifest.blob else None
    reason = None if r.reason is None else str(r.reason)
    birth = (r.born, r.born_ns, r.author, r.incarnation, r.principal or None)
    return (*r.where, r.digest, r.nbytes, r.tensors, blob, r.key, *birth, r.destroyed is None, r.destroyed, reason)


def found(tables: Iterable[tuple[str, list[dict[str, Any]]]]) -> Rows:
    """Rows of the store in the form of :func:`expected`; a row that is there twice is an error."""
    rows: Rows = {}
    for name, table in tables:
        plain = [tuple(_plain(v) for k, v in row.items() if k not in ("valid_from", "valid_to")) for row in table]
        assert len(plain) == len(set(plain))
        rows[name] = set(plain)
    return rows


def present(store: GlobalStore) -> Rows:
    return found((name, store.rows(name)) for name in expected(Directory()))


def states(messages: list[AnyRecorded]) -> Iterator[Directory]:
    """The fold after each message; the same object every time."""
    state = Directory()
    for message in messages:
        state.apply(message)
        yield state


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
