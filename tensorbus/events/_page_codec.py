"""Page facts to bytes and back. A batch is a header, a JSON head, and packed records that numpy reads in place.

| offset | size | field | meaning |
| --- | --- | --- | --- |
| 0 | 4 | magic | ``TBP1`` |
| 4 | 4 | head | bytes of the JSON head, padded with spaces to a multiple of 8 |
| 8 | 4 | count | records, at least 1; the whole is at most 65,536 bytes |
| 12 | 4 | crc | CRC-32 of head and records |
| 16 | head | JSON | the fact without its records |
| 16 + head | 64 * count | records | see ``_page_records`` |
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal
from zlib import crc32

import numpy as np
import numpy.typing as npt
from pydantic import Field, TypeAdapter, ValidationError
from pydantic_core import PydanticSerializationError

from tensorbus.errors import CorruptError, InvalidArgumentError
from tensorbus.events._envelope import SCHEMA_VERSION, TYPE, Headers, Recorded, UnknownEvent, headers_from_wire
from tensorbus.events._page_facts import (
    PAGE_EVENT_TYPES,
    TABLE_MAX,
    Digest,
    LeaseGranted,
    PageEvent,
    PageHolder,
    PagesChanged,
    Shard,
    ShardSnapshotConfirmed,
    ShardSnapshotTaken,
)
from tensorbus.events._page_records import RECORD, RECORD_BYTES, PageOp

MAGIC: Final = b"TBP1"
PAGE_FACT_BYTES_MAX: Final = 64 * 1024
_HEAD_BYTES: Final = 160
_KEYSPACE_BYTES: Final = 67
_HOLDER_BYTES: Final = 32
"""What the parts of a head take at most, beside a holder's names."""
_HEADER: Final = struct.Struct("<4sIII")
_KNOWN: Final = frozenset(cls.__name__ for cls in PAGE_EVENT_TYPES)
_OPS: Final = (min(PageOp), max(PageOp))

AnyPageRecorded = Recorded[PageEvent] | Recorded[UnknownEvent]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Head:
    """A :class:`PagesChanged` without its records."""

    type: Literal["PagesChanged"]
    shard: Shard
    number: Annotated[int, Field(ge=1)]
    keyspaces: Annotated[tuple[Digest, ...], Field(max_length=TABLE_MAX)]
    holders: Annotated[tuple[PageHolder, ...], Field(max_length=TABLE_MAX)]


_Plain = LeaseGranted | ShardSnapshotTaken | ShardSnapshotConfirmed
_plain: TypeAdapter[_Plain] = TypeAdapter(Annotated[_Plain, Field(discriminator="type")])
_head: TypeAdapter[_Head] = TypeAdapter(_Head)


def encode_page(event: PageEvent) -> bytes:
    """The body of a page fact.

    Raises:
        InvalidArgumentError: If it does not fit its own type, or is too large.
    """
    if isinstance(event, PagesChanged):
        return _encode_batch(event)
    try:
        body = _plain.dump_json(event)
        _plain.validate_json(body, strict=True)
    except (ValidationError, PydanticSerializationError) as exc:
        raise InvalidArgumentError(f"a {event.type} cannot be written: {exc}") from exc
    return body


def decode_page_body(data: bytes, *, type_name: str, schema: int) -> PageEvent | UnknownEvent:
    """The page fact in a body of the given type and schema version; one newer than this program is an unknown one.

    Raises:
        CorruptError: If a body of a known type does not fit it.
    """
    if type_name not in _KNOWN or schema > SCHEMA_VERSION:
        return UnknownEvent(type_name)
    try:
        event: PageEvent = (
            _decode_batch(data) if type_name == "PagesChanged" else _plain.validate_json(data, strict=True)
        )
    except (ValidationError, ValueError) as exc:
        raise CorruptError(f"the pages have a {type_name} (schema {schema}) that does not fit its type: {exc}") from exc
    if event.type != type_name:
        raise CorruptError(f"the header says {type_name}, the body {event.type}")
    return event


def decode_page(*, seq: int, time_ns: int, subject: str, headers: Mapping[str, str], data: bytes) -> AnyPageRecorded:
    """The page fact in a stored message. A type that this version does not know becomes :class:`UnknownEvent`.

    Raises:
        CorruptError: If headers or body are not those of a page fact.
    """
    parsed: Headers = headers_from_wire(headers)
    event = decode_page_body(data, type_name=headers.get(TYPE, ""), schema=parsed.schema)
    return Recorded(seq, time_ns, subject, parsed, event)  # type: ignore[return-value]  # a union of generics is not inferred


def page_records(event: PagesChanged) -> npt.NDArray[np.void]:
    """The records of a batch as a read-only array of ``RECORD``, over the same memory."""
    found = np.frombuffer(event.records, dtype=RECORD)
    found.flags.writeable = False
    return found


def records_max(keyspaces: Iterable[str], holders: Iterable[PageHolder]) -> int:
    """How many records fit in a batch beside these tables, at least."""
    tables = sum(_KEYSPACE_BYTES for _ in keyspaces)
    tables += sum(_HOLDER_BYTES + len(holder.worker) + len(holder.incarnation) for holder in holders)
    return max((PAGE_FACT_BYTES_MAX - _HEADER.size - _HEAD_BYTES - tables) // RECORD_BYTES, 0)


def page_json_schema() -> dict[str, Any]:
    """JSON Schema of the facts that are JSON, and of a batch's head."""
    return TypeAdapter(_Plain | _Head).json_schema()


def _encode_batch(event: PagesChanged) -> bytes:
    head = _Head(
        type=event.type,
        shard=event.shard,
        number=event.number,
        keyspaces=event.keyspaces,
        holders=event.holders,
    )
    try:
        said = _head.dump_json(head)
        said += b" " * (-len(said) % 8)
        _head.validate_json(said, strict=True)
        _check_records(event)
        count, _ = divmod(len(event.records), RECORD_BYTES)
        _check_sizes(len(said), count)
    except (ValidationError, PydanticSerializationError, ValueError) as exc:
        raise InvalidArgumentError(f"a batch of pages cannot be written: {exc}") from exc
    crc = crc32(event.records, crc32(said))
    return b"".join((_HEADER.pack(MAGIC, len(said), count, crc), said, event.records))


def _decode_batch(data: bytes) -> PagesChanged:
    if len(data) < _HEADER.size:
        raise ValueError(f"{len(data)} bytes are less than a header")
    magic, head_bytes, count, crc = _HEADER.unpack_from(data)
    if magic != MAGIC:
        raise ValueError(f"it begins with {magic!r}")
    _check_sizes(head_bytes, count)
    at = _HEADER.size + head_bytes
    if len(data) != at + count * RECORD_BYTES:
        raise ValueError(f"{len(data)} bytes are not those of a head of {head_bytes} and {count} records")
    body = memoryview(data)[_HEADER.size :]
    if crc32(body) != crc:
        raise ValueError("its checksum is wrong")
    head = _head.validate_json(bytes(body[:head_bytes]), strict=True)
    event = PagesChanged(
        shard=head.shard,
        number=head.number,
        keyspaces=head.keyspaces,
        holders=head.holders,
        records=memoryview(data)[at:],
    )
    _check_records(event)
    return event


def _check_sizes(head_bytes: int, count: int) -> None:
    nbytes = _HEADER.size + head_bytes + count * RECORD_BYTES
    if nbytes > PAGE_FACT_BYTES_MAX:
        raise ValueError(f"{nbytes} bytes are over the {PAGE_FACT_BYTES_MAX} that a batch may have")


def _check_records(event: PagesChanged) -> None:
    """Each record must name something in the tables."""
    if len(event.records) % RECORD_BYTES:
        raise ValueError(f"{len(event.records)} bytes are not whole records")
    records = page_records(event)
    if not len(records):
        raise ValueError("it has no records")
    ops = records["op"]
    if ops.min() < _OPS[0] or ops.max() > _OPS[1]:
        raise ValueError("a record has an operation that is none")
    for name, table, silent in (("keyspace", event.keyspaces, PageOp.GONE), ("holder", event.holders, PageOp.CLEAR)):
        most = int(records[name].max())
        if most >= max(len(table), 1) or (not table and (ops != silent).any()):
            raise ValueError(f"a record names {name} {most} of {len(table)}")
    if records["flags"].any():
        raise ValueError("a record has flags that this version does not know")
