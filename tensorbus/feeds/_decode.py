"""Stored messages as facts."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from tensorbus.bus import Message
from tensorbus.errors import CorruptError
from tensorbus.events import AnyRecorded, Headers, Recorded, UnknownEvent, decode
from tensorbus.ids import EventId, Incarnation, WorkerId

log = logging.getLogger("tensorbus.feeds")


def decode_all(batch: Sequence[Message]) -> list[AnyRecorded]:
    """The facts in stored messages; one that cannot be read counts as unknown and makes the state degraded."""
    return [decode_one(message) for message in batch]


def decode_one(message: Message) -> AnyRecorded:
    try:
        return decode(
            seq=message.seq,
            time_ns=message.time_ns,
            subject=message.subject,
            headers=message.headers,
            data=message.data,
        )
    except CorruptError as exc:
        log.error("unreadable message on the log: seq=%d subject=%s reason=%s", message.seq, message.subject, exc)
        nobody = Headers(event_id=EventId(""), author=WorkerId(""), incarnation=Incarnation(""))
        return Recorded(message.seq, message.time_ns, message.subject, nobody, UnknownEvent("unreadable"))
