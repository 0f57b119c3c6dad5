"""The row of a fact in the global store's ``facts``, and columns of Python values as Arrow arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import pyarrow as pa
from pydantic import TypeAdapter

from tensorbus.events import (
    EVENT_TYPES,
    AnyRecorded,
    ArtifactDestroyed,
    ArtifactDigested,
    ArtifactPut,
    ArtifactRegistered,
    CallerLeaseEnded,
    CallerLeaseGranted,
    Event,
    KeyBound,
    KeyUnbound,
    OperationEnded,
    OperationStarted,
    ReplicaAdded,
    ReplicaDropped,
    ReplicaQuarantined,
    RoleGranted,
    RoleResigned,
    SessionEnded,
    SessionOpened,
    Subjects,
    UnknownEvent,
    VersionPublished,
    ViewDefined,
)
from tensorbus.lifecycle import Verdict
from tensorbus.projections._store_schema import Column

_TYPES: Final = {
    "VARCHAR": pa.string(),
    "UBIGINT": pa.uint64(),
    "BIGINT": pa.int64(),
    "BOOLEAN": pa.bool_(),
    "VARCHAR[]": pa.list_(pa.string()),
}
_WRITERS: Final[dict[type[Event], Callable[[Event], bytes]]] = {
    cls: TypeAdapter(cls).serializer.to_json for cls in EVENT_TYPES
}
"""The codec's form, a third of its cost: which member of the union a fact is need not be found out."""
_RANGES: Final = {"UBIGINT": (0, 2**64 - 1), "BIGINT": (-(2**63), 2**63 - 1)}


def fact_row(
    recorded: AnyRecorded, verdict: Verdict, subjects: Subjects, body: bytes | None = None
) -> tuple[object, ...]:
    """Values of the stored columns of ``facts``, in their order."""
    headers, event = recorded.headers, recorded.event
    kind, about = _place(recorded.subject, subjects)
    tenant, artifact, name, worker = _names(event, headers.author)
    if body is None and not isinstance(event, UnknownEvent):
        body = _WRITERS[type(event)](event)
    return (
        recorded.seq,
        recorded.time_ns,
        event.type,
        kind,
        about,
        tenant,
        artifact,
        name,
        worker,
        headers.author,
        headers.incarnation,
        headers.principal or None,
        headers.token or None,
        headers.event_id,
        headers.cause or None,
        headers.traceparent or None,
        headers.expected,
        verdict.kept,
        verdict.why or None,
        body,
    )


def _place(subject: str, subjects: Subjects) -> tuple[str | None, str | None]:
    """Kind and id of the aggregate that the subject names."""
    parts = subject.rsplit(".", 3)
    if len(parts) == 4 and (parts[0] == f"{subjects.prefix}.ev" or (parts[0], parts[1]) == (subjects.prefix, "snap")):
        return parts[1], parts[2]
    return None, None


def _names(event: Event | UnknownEvent, author: str) -> tuple[str | None, str | None, str | None, str | None]:
    """Tenant, artifact, key or series, and worker that the fact is about."""
    match event:
        case ReplicaAdded() | ReplicaDropped() | ReplicaQuarantined() | CallerLeaseGranted() | CallerLeaseEnded():
            return event.tenant, event.artifact, None, author
        case ArtifactPut() | ArtifactRegistered():
            return event.tenant, event.artifact, event.key, author
        case KeyBound() | KeyUnbound():
            return event.tenant, event.artifact, event.key, None
        case VersionPublished():
            return event.tenant, event.artifact, event.name, None
        case ArtifactDigested() | ViewDefined() | ArtifactDestroyed():
            return event.tenant, event.artifact, None, None
        case SessionOpened() | SessionEnded():
            return None, None, None, event.worker
        case OperationStarted():
            return event.tenant, event.artifact, event.id, author
        case OperationEnded():
            return event.tenant, None, event.id, author
        case RoleGranted() | RoleResigned():
            return None, None, None, author
        case _:
            return None, None, None, None


def arrow_table(columns: Sequence[Column], rows: Sequence[tuple[object, ...]]) -> pa.Table:
    """Rows as an Arrow table; ``rows`` must not be empty."""
    values = zip(*rows, strict=True)
    arrays = [_array(list(cells), column.type) for column, cells in zip(columns, values, strict=True)]
    return pa.Table.from_arrays(arrays, names=[column.name for column in columns])


def _array(cells: list[object], sql_type: str) -> pa.Array:
    try:
        return pa.array(cells, type=_TYPES[sql_type])
    except (OverflowError, pa.ArrowInvalid, UnicodeEncodeError):
        return pa.array([_fitting(cell, sql_type) for cell in cells], type=_TYPES[sql_type])


def _fitting(cell: object, sql_type: str) -> object:
    """A value that the column can hold: a fact may say any number, and its body keeps what it said."""
    if isinstance(cell, bytes):
        return cell.decode("utf-8", "replace")
    if isinstance(cell, str):
        return cell.encode("utf-8", "replace").decode()
    if isinstance(cell, int) and sql_type in _RANGES:
        low, high = _RANGES[sql_type]
        return cell if low <= cell <= high else None
    if isinstance(cell, list):
        return [_fitting(item, sql_type) for item in cell]
    return cell
