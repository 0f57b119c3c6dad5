"""Canonical text of each thing in the Directory: what the state's hash is made of.

It is JSON of plain values, so it does not depend on the names of our classes; which values belong to it is fixed per
``FOLD_VERSION``. What has no order by meaning is sorted, so that a state restored from a snapshot has the same text.
"""

from __future__ import annotations

import json

from tensorbus.events import Aggregate
from tensorbus.ids import Incarnation, WorkerId
from tensorbus.lifecycle._records import Artifact, Key, LogState, Operation, RoleLease, Series, Session

_encode = json.JSONEncoder(separators=(",", ":")).encode


def head_text(about: Aggregate, seq: int) -> str:
    kind, token = about
    if kind.isascii() and kind.isalnum() and token.isascii() and token.isalnum():  # those that are made here all are
        return f'["head","{kind}","{token}",{seq}]'
    return _json("head", kind, token, seq)


def session_text(session: Session) -> str:
    life = (session.opened, session.opened_ns, session.ended, session.number)
    says = (session.host, session.roles, session.data, session.control, session.pool_bytes, session.ttl_ns)
    return _json("session", session.worker, session.incarnation, life, says, session.pid, session.version)


def key_text(tenant: str, key: Key) -> str:
    return _json("key", tenant, key.key, key.artifact, key.seq, key.gone)


def series_text(tenant: str, series: Series) -> str:
    return _json("series", tenant, series.name, series.last, sorted(series.versions.items()))


def artifact_text(record: Artifact, owed_by: tuple[WorkerId, Incarnation] | None) -> str:
    """Text of an artifact; ``owed_by`` says whose duty its end is, if it is without replicas."""
    blob = record.manifest.blob
    manifest = (record.manifest.inline, blob and (blob.digest, blob.nbytes, blob.chunks, blob.author))
    birth = (record.born, record.born_ns, record.author, record.incarnation, record.principal, record.key)
    replicas = sorted(
        (r.worker, r.view or "", r.tier, r.incarnation, r.nbytes, r.lease or "", r.seq)
        for r in record.replicas.values()
    )
    leases = sorted(
        (c.lease, c.worker, c.purpose, c.holder, -1 if c.ttl_ns is None else c.ttl_ns, c.seq)
        for c in record.leases.values()
    )
    quarantined = sorted(
        (q.worker, q.view or "", q.tier, q.incarnation, q.cause, q.lease or "", q.seq)
        for q in record.quarantined.values()
    )
    return _json(
        "artifact",
        (record.tenant, record.artifact, record.digest, record.nbytes, record.tensors),
        manifest,
        birth,
        replicas,
        leases,
        (sorted(record.views.items()), sorted(record.keys), sorted(record.versions)),
        (record.destroyed, record.reason, owed_by),
        *((quarantined,) if quarantined else ()),  # one without has the text that it had before there were any
    )


def operation_text(operation: Operation) -> str:
    what = (operation.operation, operation.artifact, operation.args, operation.principal)
    who = (operation.worker, operation.incarnation)
    life = (operation.started, operation.started_ns, operation.state, operation.ended, operation.ended_ns)
    positions = [(at.stream, at.seq) for at in operation.positions]
    return _json("operation", *operation.where, what, who, life, operation.error, operation.result, positions)


def role_text(role: RoleLease) -> str:
    return _json("role", role.role, role.worker, role.incarnation, role.token)


def log_text(log: LogState) -> str:
    purge = log.announced
    announced = purge and (purge.seq, purge.time_ns, purge.upto, purge.snapshot, purge.forget, purge.delay_ns)
    lost = (log.truncations, log.truncated_from, log.truncated_to)
    return _json("log", announced, log.purged, log.forgotten, log.archived, log.archive_first, lost, log.fold)


def shards_text(shards: int) -> str:
    return _json("shards", shards)


def _json(*values: object) -> str:
    return _encode(values)
