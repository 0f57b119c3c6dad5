"""Heartbeats out of a reading of the live stream."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Final

from tensorbus.bus._port import Heartbeat, Message
from tensorbus.events import Subjects

TTL: Final = "Nats-TTL"
MARKER: Final = "Nats-Marker-Reason"
MARKER_TTL_S: Final = 1


class Heartbeats:
    """Iterates over the heartbeats of batches, and notes the largest sequence seen."""

    def __init__(self, batches: AsyncIterator[list[Message]], subjects: Subjects, note: Callable[[int], None]) -> None:
        self._batches = batches
        self._subjects = subjects
        self._note = note
        self._ready: deque[Message] = deque()

    def __aiter__(self) -> Heartbeats:
        return self

    async def __anext__(self) -> Heartbeat:
        while not self._ready:
            self._ready.extend(await anext(self._batches))
        message = self._ready.popleft()
        self._note(message.seq)
        incarnation, worker = self._subjects.parse_live(message.subject)
        return Heartbeat(worker, incarnation, message.seq, gone=MARKER in message.headers)
