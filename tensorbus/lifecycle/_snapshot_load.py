"""Reads what :func:`tensorbus.lifecycle.dump` wrote, piece by piece, so that a living process can do it in slices."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterable
from typing import Any, Final

from blake3 import blake3

from tensorbus.errors import CorruptError, UnavailableError
from tensorbus.events import (
    Aggregate,
    BlobRef,
    DestroyReason,
    LeasePurpose,
    ManifestRef,
    QuarantineCause,
    StreamPosition,
    Subjects,
    Tier,
)
from tensorbus.ids import ArtifactId
from tensorbus.lifecycle._directory import FOLD_VERSION, Directory
from tensorbus.lifecycle._fold_log import CLUSTER, LOG
from tensorbus.lifecycle._records import (
    Artifact,
    CallerLease,
    Key,
    LogState,
    Operation,
    OperationState,
    Purge,
    Quarantine,
    Replica,
    ReplicaKey,
    RoleLease,
    Series,
    Session,
    Touched,
)
from tensorbus.lifecycle._snapshot import FORMAT, NAME

LINE_BYTES_MAX: Final = 64 * 1024 * 1024
_TRAILER: Final = b'["end",'
_Row = list[Any]


def load(pieces: Iterable[bytes], subjects: Subjects | None = None, *, verify: bool = False) -> Directory:
    """The state that was dumped; it goes on from there as the one that was written would.

    Args:
        pieces: What :func:`dump` gave, cut anywhere.
        verify: Also hash everything anew and check that all indexes agree, which takes as long as a replay.

    Raises:
        CorruptError: If it is not what was written.
        UnavailableError: If a newer program wrote it.
    """
    loader = Loader(subjects)
    for piece in pieces:
        loader.feed(piece)
    return loader.finish(verify=verify)


class Loader:
    """Takes pieces, cut anywhere, and gives a state at the end. 32 KiB take a millisecond or two.

    Attributes:
        seq: The state's sequence, 0 before the header was read.
        hash: What the header says of the state.
        fold: Version of the fold that made it.
    """

    def __init__(self, subjects: Subjects | None = None) -> None:
        self.seq, self.hash, self.fold = 0, "", 0
        self._state = Directory(subjects)
        self._rest = b""
        self._hasher = blake3()
        self._lines = 0
        self._counts: dict[str, int] = {}
        self._ended: tuple[int, str] | None = None
        self._terms: dict[Hashable, int] = {}
        self._total = 0
        self._texts: dict[str, Any] = {}
        self._places: list[tuple[Any, Any, Tier, ReplicaKey, dict[tuple[str, ArtifactId], None]]] = []
        self._record: Artifact | None = None
        self._series: Series | None = None
        self._readers: dict[str, Callable[[_Row], None]] = {
            "heads": self._heads,
            "session": self._session,
            "artifact": self._artifact,
            "place": self._place,
            "replicas": self._replicas,
            "quarantined": self._quarantined,
            "named": self._named,
            "versioned": self._versioned,
            "view": self._view,
            "lease": self._lease,
            "keys": self._keys,
            "series": self._one_series,
            "versions": self._versions,
            "linked": self._linked,
            "orphans": self._orphans,
            "operation": self._operation,
            "role": self._role,
            "log": self._log,
            "cluster": self._cluster,
        }

    def feed(self, piece: bytes) -> None:
        """Read on.

        Raises:
            CorruptError: If it cannot be read.
            UnavailableError: If a newer program wrote it.
        """
        data = self._rest + piece
        end = data.rfind(b"\n") + 1
        self._rest = data[end:]
        if len(self._rest) > LINE_BYTES_MAX:
            raise self._corrupt("a line has no end")
        if end:
            self._read(data[:end])

    def finish(self, *, verify: bool = False) -> Directory:
        """The state, once everything was read.

        Args:
            verify: Also hash everything anew and check that all indexes agree.

        Raises:
            CorruptError: If something is missing, or the whole is not what its header says.
        """
        state = self._state
        if self._ended is None or self._rest:
            raise self._corrupt("it is cut off")
        if self._ended != (self._lines, self._hasher.hexdigest()):
            raise self._corrupt("its bytes are not those that were written")
        if any(len(getattr(state, name)) != count for name, count in self._counts.items()):
            raise self._corrupt("something is in it twice or missing")
        state.restored(self.seq, self._terms, self._total)
        for operation in sorted((o for o in state.operations.values() if not o.running), key=_end):
            state.finished.setdefault(operation.worker, {})[operation.where] = None
        if state.hash() != self.hash or (verify and state.full_hash() != self.hash):
            raise self._corrupt("the state does not have the hash that it says")
        if verify:
            state.validate()
        return state

    def _corrupt(self, what: str) -> CorruptError:
        return CorruptError(f"the snapshot of the directory at {self.seq} is corrupt: {what}", seq=self.seq)

    # -- lines --------------------------------------------------------------------------------------------------------

    def _read(self, data: bytes) -> None:
        if self._ended is not None:
            raise self._corrupt("it goes on behind its end")
        at = data.rfind(b"\n", 0, -1) + 1
        trailer = data[at:] if data.startswith(_TRAILER, at) else b""
        body = data[: len(data) - len(trailer)]
        self._hasher.update(body)
        try:
            for row in json.loads(b"[" + body[:-1].replace(b"\n", b",") + b"]"):
                self._lines += 1
                if self._lines == 1:
                    self._header(row)
                else:
                    self._readers[row[0]](row)
            if trailer:
                _, count, digest = json.loads(trailer)
                self._ended = (count, digest)
        except (ValueError, TypeError, LookupError, AttributeError, AssertionError, RecursionError) as exc:
            raise self._corrupt(f"line {self._lines} cannot be read: {exc!r}") from exc

    def _header(self, header: dict[str, Any]) -> None:
        if header["name"] != NAME:
            raise ValueError("no snapshot of a directory")
        if header["format"] > FORMAT or header["fold"] > FOLD_VERSION:
            raise UnavailableError(
                f"the snapshot of the directory at {header['seq']} has format {header['format']} and fold "
                f"{header['fold']}; this version knows {FORMAT} and {FOLD_VERSION}: upgrade",
                seq=header["seq"],
            )
        self.seq, self.hash, self.fold = int(header["seq"]), str(header["hash"]), int(header["fold"])
        self._counts = dict(header["counts"])
        self._state.dropped, self._state.gaps = dict(header["dropped"]), int(header["gaps"])

    def _note(self, key: Hashable, term: str) -> None:
        self._terms[key] = number = int(term, 16)
        self._total += number

    def _one(self, text: Any) -> Any:
        """One object for all equal texts of a few: tenants, workers, incarnations."""
        return self._texts.setdefault(text, text)

    def _heads(self, row: _Row) -> None:
        heads, terms, one = self._state.heads, self._terms, self._texts.setdefault
        for kind, token, seq, term in row[1]:
            about = Aggregate(one(kind, kind), token)
            heads[about] = seq
            terms[about] = number = int(term, 16)
            self._total += number

    def _session(self, row: _Row) -> None:
        _, term, worker, incarnation, host, roles, *rest = row
        worker = self._one(worker)
        self._state.sessions[worker] = Session(worker, self._one(incarnation), host, tuple(roles), *rest)
        self._note(Touched("session", "", worker), term)

    # -- artifacts ----------------------------------------------------------------------------------------------------

    def _artifact(self, row: _Row) -> None:
        _, term, tenant, artifact, digest, nbytes, tensors, manifest, key, born, born_ns, *who, destroyed, reason = row
        one, state = self._one, self._state
        tenant, digest = one(tenant), artifact if digest is True else digest
        author, incarnation, principal = map(one, who)
        where = (tenant, artifact)
        self._record = state.artifacts[where] = record = Artifact(
            where, tenant, artifact, digest, nbytes, tensors, _manifest(manifest), key, born, born_ns, author,
            incarnation, principal, destroyed=destroyed, reason=None if reason is None else DestroyReason(reason),
        )  # fmt: skip
        if record.live and digest is not None:
            state.by_digest.setdefault((tenant, digest), {})[artifact] = None
        self._note(Touched("artifact", tenant, artifact), term)

    def _place(self, row: _Row) -> None:
        _, worker, incarnation, tier = row
        worker, incarnation, tier = self._one(worker), self._one(incarnation), Tier(tier)
        key = self._state.shared_key(ReplicaKey(worker, None, tier))
        held = self._state.by_worker.setdefault(worker, {})
        self._places.append((worker, incarnation, tier, key, held))

    def _replicas(self, row: _Row) -> None:
        record, places, make = self._record, self._places, tuple.__new__
        assert record is not None
        where, nbytes, replicas = record.where, record.nbytes, record.replicas
        for said in row[1]:
            worker, incarnation, tier, key, held = places[said[0]]
            if len(said) == 2:
                # As Replica(...), which would take longer than all the rest here.
                replica = make(Replica, (worker, incarnation, tier, None, nbytes, None, said[1]))
            else:
                _, seq, view, size, lease = said
                replica = Replica(worker, incarnation, tier, view, nbytes if size == nbytes else size, lease, seq)
                key = self._state.shared_key(replica.key)
            replicas[key] = replica
            held[where] = None

    def _quarantined(self, row: _Row) -> None:
        record = self._record
        assert record is not None
        _, worker, incarnation, tier, view, cause, lease, seq = row
        worker, incarnation = self._one(worker), self._one(incarnation)
        mark = Quarantine(worker, incarnation, Tier(tier), view, QuarantineCause(cause), lease, seq)
        record.quarantined[self._state.shared_key(mark.key)] = mark
        self._state.quarantined.setdefault(worker, {})[record.where] = None

    def _named(self, row: _Row) -> None:
        assert self._record is not None
        self._record.keys.update(dict.fromkeys(row[1]))

    def _versioned(self, row: _Row) -> None:
        assert self._record is not None
        self._record.versions.update(((name, number), None) for name, number in row[1])

    def _view(self, row: _Row) -> None:
        assert self._record is not None
        _, view, definition = row
        self._record.views[view] = definition
        self._state.by_view[self._record.tenant, view] = self._record.artifact

    def _lease(self, row: _Row) -> None:
        record = self._record
        assert record is not None
        _, lease, worker, purpose, holder, ttl_ns, seq = row
        worker = self._one(worker)
        record.leases[lease] = CallerLease(lease, record.artifact, worker, LeasePurpose(purpose), holder, ttl_ns, seq)
        self._state.by_lessor.setdefault(worker, {})[record.where] = None

    # -- names, and the rest ------------------------------------------------------------------------------------------

    def _keys(self, row: _Row) -> None:
        keys, one = self._state.keys, self._one
        for tenant, name, artifact, seq, gone, term in row[1]:
            place = (one(tenant), name)
            keys[place] = Key(name, artifact and self._state.artifacts[place[0], artifact].artifact, seq, one(gone))
            self._note(Touched("key", *place), term)

    def _one_series(self, row: _Row) -> None:
        _, term, tenant, name, last = row
        tenant = self._one(tenant)
        self._series = self._state.series[tenant, name] = Series(name, last)
        self._note(Touched("series", tenant, name), term)

    def _versions(self, row: _Row) -> None:
        assert self._series is not None
        self._series.versions.update((number, artifact) for number, artifact in row[1])

    def _linked(self, row: _Row) -> None:
        _, tenant, digest, linked = row
        known = self._state.by_digest[tenant, digest]
        if len(known) != len(linked) or any(artifact not in known for artifact in linked):
            raise ValueError("artifacts are linked that are not there")
        self._state.by_digest[self._one(tenant), digest] = dict.fromkeys(linked)

    def _orphans(self, row: _Row) -> None:
        for tenant, artifact, owed_by in row[1]:
            where = self._state.artifacts[tenant, artifact].where
            self._state.orphans[where] = None if owed_by is None else (self._one(owed_by[0]), self._one(owed_by[1]))

    def _operation(self, row: _Row) -> None:
        _, term, tenant, name, operation, artifact, args, *who, started, started_ns, outcome, ended, ended_ns = row[:15]
        error, result, positions = row[15:]
        where = (self._one(tenant), name)
        worker, incarnation, principal = map(self._one, who)
        self._state.operations[where] = found = Operation(
            where, self._one(operation), artifact, args, worker, incarnation, principal, started, started_ns,
            OperationState(outcome), ended, ended_ns, error, result,
            tuple(StreamPosition(stream=stream, seq=seq) for stream, seq in positions),
        )  # fmt: skip
        if found.running:
            self._state.running.setdefault(worker, {})[where] = None
        self._note(Touched("operation", *where), term)

    def _role(self, row: _Row) -> None:
        _, term, role, worker, incarnation, token = row
        self._state.roles[role] = RoleLease(role, self._one(worker), self._one(incarnation), token)
        self._note(Touched("role", "", role), term)

    def _log(self, row: _Row) -> None:
        _, term, announced, *rest = row
        self._state.log = LogState(announced and Purge(*announced), *rest)
        self._note(LOG, term)

    def _cluster(self, row: _Row) -> None:
        _, term, self._state.shards = row
        self._note(CLUSTER, term)


def _manifest(said: str | list[Any]) -> ManifestRef:
    if isinstance(said, str):
        return ManifestRef(inline=said)
    digest, nbytes, chunks, author = said
    return ManifestRef(blob=BlobRef(digest=digest, nbytes=nbytes, chunks=chunks, author=author))


def _end(operation: Operation) -> tuple[int, int]:
    """By which the finished ones are in order: those of a session that ended did so together."""
    assert operation.ended is not None, "only asked of what has ended"
    return operation.ended, operation.started
