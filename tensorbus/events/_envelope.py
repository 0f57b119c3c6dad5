"""What stands around a fact: the headers its author wrote, and the sequence and time the stream gave it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from tensorbus.errors import CorruptError
from tensorbus.events._facts import Event
from tensorbus.ids import EventId, Incarnation, WorkerId

SCHEMA_VERSION = 1

MSG_ID = "Nats-Msg-Id"
EXPECTED_SEQ = "Nats-Expected-Last-Subject-Sequence"
EXPECTED_FILTER = "Nats-Expected-Last-Subject-Sequence-Subject"
TYPE, SCHEMA = "Tb-Type", "Tb-Schema"
AUTHOR, INCARNATION, PRINCIPAL = "Tb-Author", "Tb-Incarnation", "Tb-Principal"
TOKEN, CAUSE, TRACE = "Tb-Token", "Tb-Cause", "traceparent"


@dataclass(frozen=True, slots=True, kw_only=True)
class Headers:
    """Who says it, for whom, and why.

    Attributes:
        event_id: Also the idempotency key of the append.
        author: The worker that publishes; the last token of the subject.
        incarnation: The author's life in which it said so.
        principal: For whom the author spoke: a caller's session, or empty for itself.
        token: The fencing token under which it acts, 0 where there is none.
        cause: The event that led to this one, or empty.
        traceparent: W3C trace context, or empty.
        expected: The last sequence of the aggregate that the author knew; ``None`` where only one author writes.
    """

    event_id: EventId
    author: WorkerId
    incarnation: Incarnation
    principal: str = ""
    token: int = 0
    cause: str = ""
    traceparent: str = ""
    expected: int | None = None
    schema: int = SCHEMA_VERSION


@dataclass(frozen=True, slots=True)
class UnknownEvent:
    """A fact of a type that this version does not know. Readers count it; writers stop."""

    type: str


E = TypeVar("E", covariant=True)


class Recorded(NamedTuple, Generic[E]):
    """A fact with its place in the stream. Folds take time and order from here, never from a body."""

    seq: int
    time_ns: int
    subject: str
    headers: Headers
    event: E


def headers_to_wire(headers: Headers, *, type_name: str, fence: str | None) -> dict[str, str]:
    """The NATS headers of a fact; ``fence`` names the filter that ``expected`` is about."""
    wire = {
        MSG_ID: headers.event_id,
        TYPE: type_name,
        SCHEMA: str(headers.schema),
        AUTHOR: headers.author,
        INCARNATION: headers.incarnation,
        PRINCIPAL: headers.principal,
        TOKEN: str(headers.token) if headers.token else "",
        CAUSE: headers.cause,
        TRACE: headers.traceparent,
    }
    wire = {name: value for name, value in wire.items() if value}
    if headers.expected is not None and fence is not None:
        wire[EXPECTED_SEQ] = str(headers.expected)
        wire[EXPECTED_FILTER] = fence
    return wire


def headers_from_wire(wire: Mapping[str, Any]) -> Headers:
    """The headers of a stored fact.

    Raises:
        CorruptError: If one that every fact has is missing or is no number.
    """
    try:
        expected = wire.get(EXPECTED_SEQ)
        return Headers(
            event_id=wire[MSG_ID],
            author=wire[AUTHOR],
            incarnation=wire[INCARNATION],
            principal=wire.get(PRINCIPAL, ""),
            token=int(wire.get(TOKEN, "0")),
            cause=wire.get(CAUSE, ""),
            traceparent=wire.get(TRACE, ""),
            expected=None if expected is None else int(expected),
            schema=int(wire[SCHEMA]),
        )
    except (KeyError, ValueError) as exc:
        raise CorruptError(f"a message on the log has no usable headers: {exc}") from exc


AnyRecorded = Recorded[Event] | Recorded[UnknownEvent]
