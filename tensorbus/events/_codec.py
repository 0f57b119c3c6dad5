"""Bytes to facts and back: one strict pydantic adapter over the closed union, and the lifting of old forms."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Final

from pydantic import TypeAdapter, ValidationError
from pydantic_core import PydanticSerializationError

from tensorbus.errors import CorruptError, InvalidArgumentError
from tensorbus.events._envelope import (
    SCHEMA_VERSION,
    TYPE,
    AnyRecorded,
    Headers,
    Recorded,
    UnknownEvent,
    headers_from_wire,
)
from tensorbus.events._facts import EVENT_TYPES, AnyEvent, Event
from tensorbus.events._page_codec import encode_page
from tensorbus.events._page_facts import PageEvent

FACT_BYTES_MAX: Final = 64 * 1024

_adapter: TypeAdapter[Event] = TypeAdapter(AnyEvent)
_validator: Final = _adapter.validator  # what the adapter's own method calls, after a look at its many options
_known: Final = frozenset(cls.__name__ for cls in EVENT_TYPES)

UPCASTERS: dict[tuple[str, int], Callable[[dict[str, Any]], dict[str, Any]]] = {}
"""``(type, schema)`` -> function that lifts such a body by one schema version."""


def encode(event: Event | PageEvent) -> bytes:
    """The body of a fact: JSON, but for batches of pages.

    Raises:
        InvalidArgumentError: If it is over 64 KiB (large bodies go as blobs), or has text that is no UTF-8.
    """
    if isinstance(event, PageEvent):
        return encode_page(event)
    try:
        body = _adapter.dump_json(event)
    except PydanticSerializationError as exc:
        raise InvalidArgumentError(f"a {type(event).__name__} cannot be written: {exc}") from exc
    if len(body) > FACT_BYTES_MAX:
        raise InvalidArgumentError(
            f"a {type(event).__name__} of {len(body)} bytes is over the {FACT_BYTES_MAX} that a fact may have",
            nbytes=len(body),
        )
    return body


def decode_body(data: bytes, *, type_name: str, schema: int) -> Event | UnknownEvent:
    """The fact in a body of the given type and schema version; one newer than this program is an unknown one.

    Raises:
        CorruptError: If a body of a known type does not fit it.
    """
    if type_name not in _known or schema > SCHEMA_VERSION:
        return UnknownEvent(type_name)
    try:
        if (type_name, schema) in UPCASTERS:
            body = json.loads(data)
            while (lift := UPCASTERS.get((type_name, schema))) is not None:
                body, schema = lift(body), schema + 1
            data = json.dumps(body).encode()
        event: Event = _validator.validate_json(data, strict=True)
    except (ValidationError, ValueError) as exc:
        raise CorruptError(f"the log has a {type_name} (schema {schema}) that does not fit its type: {exc}") from exc
    if event.type != type_name:
        raise CorruptError(f"the header says {type_name}, the body {event.type}")
    return event


def decode(*, seq: int, time_ns: int, subject: str, headers: Mapping[str, str], data: bytes) -> AnyRecorded:
    """The fact in a stored message. A type that this version does not know becomes :class:`UnknownEvent`.

    Raises:
        CorruptError: If headers or body are not those of a fact.
    """
    parsed: Headers = headers_from_wire(headers)
    event = decode_body(data, type_name=headers.get(TYPE, ""), schema=parsed.schema)
    return Recorded(seq, time_ns, subject, parsed, event)  # type: ignore[return-value]  # a union of generics is not inferred


def json_schema() -> dict[str, Any]:
    """JSON Schema of the union, from which ``docs/events.md`` is made."""
    return _adapter.json_schema()
