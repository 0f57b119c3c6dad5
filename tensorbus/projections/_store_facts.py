"""The row of a fact in the global store's ``facts``, and columns of Python values as Arrow arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import pyarrow as pa

from tensorbus.events import (
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
    ReplicaAdded,
    ReplicaDropped,
    RoleGranted,
    SessionEnded,
    SessionOpened,
    Subjects,
    UnknownEvent,
    VersionPublished,
    ViewDefined,
    encode,
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
_RANGES: Final = {"UBIGINT": (0, 2**64 - 1), "BIGINT": (-(2**63), 2**63 - 1)}


def fact_row(recorded: AnyRecorded, verdict: Verdict, subjects: Subjects) -> tuple[object, ...]:
    """Values of the stored columns of ``facts``, in their order."""
    headers, event = recorded.headers, recorded.event
    kind, about = _place(recorded.subject, subjects)
    body = None if isinstance(event, UnknownEvent) else encode(event).decode()
    return (
        recorded.seq,
        recorded.time_ns,
        event.type,
        kind,
        about,
        *_names(event, headers.author),
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
    parts = subject.removeprefix(f"{subjects.prefix}.").split(".")
    if not subject.startswith(f"{subjects.prefix}."):
        return None, None
    if len(parts) == 4 and parts[0] == "ev":
        return parts[1], parts[2]
    return ("snap", parts[1]) if len(parts) == 3 and parts[0] == "snap" else (None, None)


def _names(event: Event | UnknownEvent, author: str) -> tuple[str | None, str | None, str | None, str | None]:
    """Tenant, artifact, key or series, and worker that the fact is about."""
    match event:
        case ReplicaAdded() | ReplicaDropped() | CallerLeaseGranted() | CallerLeaseEnded():
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
        case RoleGranted():
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
    if isinstance(cell, str):
        return cell.encode("utf-8", "replace").decode()
    if isinstance(cell, int) and sql_type in _RANGES:
        low, high = _RANGES[sql_type]
        return cell if low <= cell <= high else None
    if isinstance(cell, list):
        return [_fitting(item, sql_type) for item in cell]
    return cell
