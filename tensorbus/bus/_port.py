"""What the rest of the system may ask of the bus. NATS and its in-memory twin both pass ``testing.BusContract``."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from tensorbus.clock import Deadline
from tensorbus.events import Subjects


@dataclass(frozen=True, slots=True)
class Message:
    """A stored message as the stream has it."""

    seq: int
    time_ns: int
    subject: str
    headers: Mapping[str, str]
    data: bytes


@dataclass(frozen=True, slots=True)
class Appended:
    """The fact is in the log at ``seq``."""

    seq: int


@dataclass(frozen=True, slots=True)
class Conflict:
    """Somebody wrote to the aggregate since; its last sequence is ``seq`` now. Nothing was written."""

    seq: int


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A worker's newest sign of life, or (``gone``) the hint that it ran out."""

    worker: str
    incarnation: str
    seq: int
    gone: bool


class Reader(Protocol):
    """A checkpointed reading of one filter, in order, without gaps and without acknowledgements."""

    position: int
    """Sequence of the last message handed out, or of the start."""

    def __aiter__(self) -> AsyncIterator[list[Message]]:
        """Batches, each non-empty and in order. Survives reconnects, failovers and server restarts by itself."""
        ...


class Bus(Protocol):
    """One cluster's streams under one subject prefix. All reads go to the stream leader."""

    @property
    def subjects(self) -> Subjects: ...

    async def publish(self, subject: str, data: bytes, *, headers: Mapping[str, str], deadline: Deadline) -> int:
        """Store a message once and return its sequence (the first one's for a repeated ``Nats-Msg-Id``).

        Raises:
            WrongSequenceError: If the expected last sequence does not hold.
            UnavailableError: If it is known that nothing was stored, or the bus cannot be reached.
            DeadlineExceededError: If the outcome is unknown within the deadline.
            OutOfSpaceError: If the stream or disk is full, or too many appends wait on this connection.
            DeniedError: If the server refuses the subject.
        """
        ...

    async def get(self, seq: int, *, deadline: Deadline) -> Message | None:
        """The message of the log stream at a sequence."""
        ...

    async def first_from(self, filter_subject: str, seq: int, *, deadline: Deadline) -> Message | None:
        """The first message of the log stream on a filter at or after a sequence."""
        ...

    async def last_on(self, filter_subject: str, *, deadline: Deadline) -> Message | None:
        """The last message of the log stream on a filter (wildcards allowed)."""
        ...

    def read(self, filter_subject: str, *, after: int) -> AbstractAsyncContextManager[Reader]:
        """Read the log stream from the first message after a sequence, for as long as the context is open."""
        ...

    async def last_seq(self, *, deadline: Deadline) -> int:
        """The last sequence of the log stream."""
        ...

    async def beat(self, subject: str, *, ttl_s: int, deadline: Deadline) -> int:
        """Store a heartbeat in the live stream; it runs out after whole seconds. Creates the stream when it is gone."""
        ...

    def watch_live(self) -> AbstractAsyncContextManager[AsyncIterator[Heartbeat]]:
        """The live stream's present values, then each change, for as long as the context is open."""
        ...

    async def close(self) -> None: ...
