"""A Directory as bytes: lines of JSON between a header and a trailer, see ``docs/spec/snapshot.md``.

The same messages give the same bytes, since each table is written in the order in which it grew; and a state that is
read back has the same orders, so that it goes on like the one that was written. Each thing's term of the state's hash
is written with it: hashing a large state again would cost more than all the rest.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Final, TypeVar

from blake3 import blake3

from tensorbus.errors import ConflictError, UnavailableError
from tensorbus.ids import Incarnation, WorkerId
from tensorbus.lifecycle._directory import Directory
from tensorbus.lifecycle._fold_log import CLUSTER, LOG
from tensorbus.lifecycle._records import Artifact, CallerLease, Operation, Replica, Session, Touched

FORMAT: Final = 3
NAME: Final = "tensorbus directory"
PIECE_BYTES: Final = 64 * 1024
ROWS_MAX: Final = 128
"""How many small things share a line."""

_COUNTED: Final = ("heads", "sessions", "artifacts", "keys", "series", "operations", "roles")
_SETTLED_AT_ONCE: Final = 64
_encode: Final = json.JSONEncoder(separators=(",", ":")).encode
_Place = tuple[WorkerId, Incarnation, str]
T = TypeVar("T")


def dump(state: Directory) -> Iterator[bytes]:
    """The state in pieces of at most 64 KiB, each a few milliseconds' work; the first ones may be empty.

    The state must stay as it is until the last piece: hold the feed.

    Raises:
        UnavailableError: If the state passed over facts that this program does not know.
        ConflictError: While iterating, if the state moved on meanwhile.
    """
    if state.unknown:
        raise UnavailableError(
            f"the directory at {state.seq} passed over {state.unknown} facts that this version does not know, "
            "so it cannot be stored; upgrade",
            seq=state.seq,
        )
    return _pieces(state)


def _pieces(state: Directory) -> Iterator[bytes]:
    seq, hasher, buffer, count = state.seq, blake3(), bytearray(), 0
    for line in _lines(state):
        if line:
            count += 1
            buffer += line.encode("ascii")
            buffer += b"\n"
        while len(buffer) >= PIECE_BYTES or not line:
            piece = bytes(buffer[:PIECE_BYTES])
            del buffer[:PIECE_BYTES]
            hasher.update(piece)
            yield piece
            if state.seq != seq:
                raise ConflictError(f"the directory moved from {seq} to {state.seq} while it was stored", seq=seq)
            if not line:
                break
    hasher.update(bytes(buffer))
    buffer += _encode(["end", count, hasher.hexdigest()]).encode("ascii") + b"\n"
    for at in range(0, len(buffer), PIECE_BYTES):
        yield bytes(buffer[at : at + PIECE_BYTES])


def _lines(state: Directory) -> Iterator[str]:
    """All but the trailer; an empty one lets the caller take a breath."""
    while not state.settled(_SETTLED_AT_ONCE):
        yield ""
    yield _header(state)
    yield from _heads(state)
    yield from _sessions(state)
    yield from _artifacts(state)
    yield from _names(state)
    yield from _links(state)
    yield from _operations(state)
    yield from _log(state)


def _header(state: Directory) -> str:
    counts = {name: len(getattr(state, name)) for name in _COUNTED}
    return _encode(
        {
            "name": NAME,
            "format": FORMAT,
            "fold": state.log.fold,
            "seq": state.seq,
            "hash": state.hash(),
            "counts": counts,
            "dropped": state.dropped,
            "gaps": state.gaps,
        }
    )


def _heads(state: Directory) -> Iterator[str]:
    terms = state.terms
    rows = ((about.kind, about.token, seq, f"{terms[about]:x}") for about, seq in state.heads.items())
    return (_encode(["heads", batch]) for batch in _batches(rows))


def _sessions(state: Directory) -> Iterator[str]:
    return (_session(session, _term(state, "session", "", worker)) for worker, session in state.sessions.items())


def _session(s: Session, term: str) -> str:
    says = (s.worker, s.incarnation, s.host, s.roles, s.data, s.control, s.pool_bytes, s.ttl_ns, s.pid, s.version)
    return _encode(["session", term, *says, s.opened, s.opened_ns, s.ended, s.number])


def _artifacts(state: Directory) -> Iterator[str]:
    places: dict[_Place, int] = {}
    for where, record in state.artifacts.items():
        yield _artifact(record, _term(state, "artifact", *where))
        yield from _replicas(record, places)
        for mark in record.quarantined.values():
            yield _encode(["quarantined", *mark])
        for names in _batches(record.keys):
            yield _encode(["named", names])
        for versions in _batches(record.versions):
            yield _encode(["versioned", versions])
        for view, definition in record.views.items():
            yield _encode(["view", view, definition])
        for lease in record.leases.values():
            yield _lease(lease)


def _artifact(r: Artifact, term: str) -> str:
    blob = r.manifest.blob
    manifest = r.manifest.inline if blob is None else (blob.digest, blob.nbytes, blob.chunks, blob.author)
    digest = True if r.digest == r.artifact else r.digest
    birth = (r.key, r.born, r.born_ns, r.author, r.incarnation, r.principal)
    return _encode(
        ["artifact", term, r.tenant, r.artifact, digest, r.nbytes, r.tensors, manifest, *birth, r.destroyed, r.reason]
    )


def _replicas(record: Artifact, places: dict[_Place, int]) -> Iterator[str]:
    """The copies, each by the number of its place; a place is told before its first one."""
    for batch in _batches(record.replicas.values()):
        for replica in batch:
            place = (replica.worker, replica.incarnation, str(replica.tier))
            if place not in places:
                places[place] = len(places)
                yield _encode(["place", *place])
        yield _encode(["replicas", [_replica(replica, record, places) for replica in batch]])


def _replica(replica: Replica, record: Artifact, places: dict[_Place, int]) -> tuple[object, ...]:
    worker, incarnation, tier, view, nbytes, lease, seq = replica
    place = places[worker, incarnation, tier]
    plain = view is None and lease is None and nbytes == record.nbytes
    return (place, seq) if plain else (place, seq, view, nbytes, lease)


def _lease(lease: CallerLease) -> str:
    return _encode(["lease", lease.lease, lease.worker, lease.purpose, lease.holder, lease.ttl_ns, lease.seq])


def _names(state: Directory) -> Iterator[str]:
    keys = (
        (tenant, key.key, key.artifact, key.seq, key.gone, _term(state, "key", tenant, name))
        for (tenant, name), key in state.keys.items()
    )
    for batch in _batches(keys):
        yield _encode(["keys", batch])
    for (tenant, name), series in state.series.items():
        yield _encode(["series", _term(state, "series", tenant, name), tenant, series.name, series.last])
        for versions in _batches(series.versions.items()):
            yield _encode(["versions", versions])


def _links(state: Directory) -> Iterator[str]:
    """Orders that do not follow from the artifacts': of those with the same bytes, and of those without a copy."""
    for (tenant, digest), linked in state.by_digest.items():
        if len(linked) > 1:
            yield _encode(["linked", tenant, digest, list(linked)])
    for batch in _batches((*where, owed_by) for where, owed_by in state.orphans.items()):
        yield _encode(["orphans", batch])


def _operations(state: Directory) -> Iterator[str]:
    return (_operation(each, _term(state, "operation", *where)) for where, each in state.operations.items())


def _operation(o: Operation, term: str) -> str:
    who = (o.worker, o.incarnation, o.principal)
    positions = [(at.stream, at.seq) for at in o.positions]
    life = (o.started, o.started_ns, o.state, o.ended, o.ended_ns, o.error, o.result, positions)
    return _encode(["operation", term, *o.where, o.operation, o.artifact, o.args, *who, *life])


def _log(state: Directory) -> Iterator[str]:
    for name, role in state.roles.items():
        yield _encode(["role", _term(state, "role", "", name), role.role, role.worker, role.incarnation, role.token])
    if LOG in state.terms:
        log, purge = state.log, state.log.announced
        announced = purge and (purge.seq, purge.time_ns, purge.upto, purge.snapshot, purge.forget, purge.delay_ns)
        kept = (log.purged, log.forgotten, log.archived, log.archive_first)
        lost = (log.truncations, log.truncated_from, log.truncated_to)
        yield _encode(["log", f"{state.terms[LOG]:x}", announced, *kept, *lost, log.fold])
    if CLUSTER in state.terms:
        yield _encode(["cluster", f"{state.terms[CLUSTER]:x}", state.shards])


def _term(state: Directory, kind: str, tenant: str, name: str) -> str:
    return f"{state.terms[Touched(kind, tenant, name)]:x}"


def _batches(rows: Iterable[T]) -> Iterator[list[T]]:
    source = iter(rows)
    while batch := list(islice(source, ROWS_MAX)):
        yield batch
