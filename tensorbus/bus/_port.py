"""What the rest of the system may ask of the bus. NATS and its in-memory twin both pass ``testing.BusContract``."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from tensorbus.bus._ask import Handler
from tensorbus.clock import Deadline
from tensorbus.errors import ConflictError
from tensorbus.events import Subjects

MIB = 1 << 20


class WrongSequenceError(ConflictError):
    """The expected last sequence does not hold. It may have been our own earlier attempt: :func:`append` looks.

    Attributes:
        seq: The last sequence of the filter now, 0 if it has no message.
    """

    def __init__(self, subject: str, *, seq: int, expected: int | None = None) -> None:
        super().__init__(
            f"the last sequence before {subject} is {seq}, not {expected}", subject=subject, seq=seq, expected=expected
        )
        self.seq = seq


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamLimits:
    """How large the streams may grow; they refuse new messages beyond.

    Attributes:
        log_bytes_max: Size of the log on disk.
        live_bytes_max: Size of the heartbeats in memory.
        pages_bytes_max: Size of the page facts on disk.
        message_bytes_max: Size of one message with its headers.
        dedup_s: Seconds for which the server remembers a message id.
        replicas: Servers that keep a copy.
    """

    log_bytes_max: int = 16 * 1024 * MIB
    live_bytes_max: int = 64 * MIB
    pages_bytes_max: int = 4 * 1024 * MIB
    message_bytes_max: int = 1 * MIB
    dedup_s: int = 120
    replicas: int = 1


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


@dataclass(frozen=True, slots=True, kw_only=True)
class LogInfo:
    """What the log stream holds at one moment.

    Attributes:
        first_seq: Sequence of the oldest message that is there; ``last_seq + 1`` if there is none.
        last_seq: Sequence of the newest message that ever was.
        messages: How many are there.
        nbytes: What they take on the server's disk, about.
        created_ns: When the stream was made; another time at the same sequences is another stream.
    """

    first_seq: int
    last_seq: int
    messages: int
    nbytes: int
    created_ns: int


class Reader(Protocol):
    """A checkpointed reading of one filter, in order, without gaps and without acknowledgements.

    Attributes:
        on_restart: Called on the loop each time the server had to be asked anew, before anything comes of that: the
            log may have become another one meanwhile. It must not wait.
    """

    on_restart: Callable[[], None] | None

    @property
    def position(self) -> int:
        """Sequence of the last message handed out, or of the start."""
        ...

    @property
    def caught_up(self) -> asyncio.Event:
        """Set once everything that the filter had when the reading was opened has been handed out."""
        ...

    async def reached(self, seq: int, *, deadline: Deadline) -> None:
        """Wait until no message of the filter at or before ``seq`` is still to come.

        Somebody must iterate meanwhile, unless there is nothing to wait for.

        Raises:
            DeadlineExceededError: If the deadline passed first.
        """
        ...

    def __aiter__(self) -> AsyncIterator[list[Message]]:
        """Batches, each non-empty and in order. Survives reconnects, failovers and server restarts by itself.

        Raises:
            UnavailableError: If the bus was closed; DeniedError: If the server refuses the reading.
        """
        ...


class Stream(Protocol):
    """One stream, and the appends to it. All reads go to its leader."""

    @property
    def name(self) -> str:
        """How the servers call it."""
        ...

    @property
    def subjects(self) -> Subjects: ...

    async def publish(self, subject: str, data: bytes, *, headers: Mapping[str, str], deadline: Deadline) -> int:
        """Store a message once and return its sequence (the first one's for a repeated ``Nats-Msg-Id``).

        Repeats itself within the deadline while the outcome is unknown, so the headers need a ``Nats-Msg-Id``.

        Raises:
            WrongSequenceError: If the expected last sequence does not hold (perhaps because an attempt of ours did it).
            UnavailableError: If it is known that nothing was stored, because the bus or its stream is not there.
            DeadlineExceededError: If the outcome is unknown within the deadline.
            OutOfSpaceError: If the stream or disk is full, or too many appends wait on this connection.
            DeniedError: If the server refuses the subject.
            InvalidArgumentError: If the message is too large or has no ``Nats-Msg-Id``.
        """
        ...

    async def get(self, seq: int, *, deadline: Deadline) -> Message | None:
        """The message of the stream at a sequence."""
        ...

    async def first_from(self, filter_subject: str, seq: int, *, deadline: Deadline) -> Message | None:
        """The first message of the stream on a filter at or after a sequence."""
        ...

    async def last_on(self, filter_subject: str, *, deadline: Deadline) -> Message | None:
        """The last message of the stream on a filter (wildcards allowed)."""
        ...

    async def subjects_on(self, filter_subject: str, *, deadline: Deadline) -> list[str]:
        """The subjects of the stream that a filter matches and that have messages now, in order."""
        ...

    def read(self, filter_subject: str, *, after: int) -> AbstractAsyncContextManager[Reader]:
        """Read the stream from the first message after a sequence, for as long as the context is open."""
        ...

    async def last_seq(self, *, deadline: Deadline) -> int:
        """The last sequence of the stream."""
        ...

    async def log_state(self, *, deadline: Deadline) -> LogInfo:
        """What the stream holds now."""
        ...

    async def purge(self, filter_subject: str, *, upto: int, keep_last: bool = True, deadline: Deadline) -> int:
        """Remove the messages of the stream on a filter, up to a sequence and with it, for ever.

        Repeating it is safe, and that is what happens while the outcome is unknown.

        Args:
            filter_subject: An aggregate's fence, or one subject.
            keep_last: Leave the filter's last message, whatever its sequence: without it the next to compare and append
                would find the aggregate as if it had never been.

        Returns:
            How many messages went; fewer than there were if an earlier attempt took some.

        Raises:
            DeniedError: If the server does not let this connection purge, or the stream be purged.
            InvalidArgumentError: If the filter is empty.
        """
        ...

    def on_lost(self, callback: Callable[[], None]) -> AbstractContextManager[None]:
        """Call back each time the connection was lost, before anything comes over the next one.

        The callback runs on the loop for as long as the context is open, and must not wait. What is asked of the bus
        afterwards waits until the connection is back.
        """
        ...


class Bus(Stream, Protocol):
    """One cluster's streams under one subject prefix. As a stream it is the log."""

    @property
    def pages(self) -> Stream:
        """The stream of page facts, over the same connection."""
        ...

    @property
    def max_payload(self) -> int:
        """Size in bytes of the largest question or answer; what is larger goes in several."""
        ...

    async def ask(self, subject: str, data: bytes, *, deadline: Deadline) -> bytes:
        """Ask one of those who answer at a subject, not by way of a stream.

        The question is repeated when its answer may be lost (a server died, or who worked on it), so it must be safe to
        answer it twice.

        Args:
            subject: Such as :meth:`tensorbus.events.Subjects.rpc` gives.
            data: At most :attr:`max_payload` bytes.
            deadline: Who answers stops working on it then, too.

        Raises:
            UnavailableError: If nobody listens there. Who lost its connection is waited for, for some seconds.
            DeadlineExceededError: If no answer came within the deadline.
            DeniedError: If the server refuses the subject.
            InvalidArgumentError: If the question or the answer is too large.
            OutOfSpaceError: If who answers had too many questions until the deadline, although asked again and again.
            TensorbusError: Whatever the handler raised, as the same class.
        """
        ...

    def answer(self, subject: str, handler: Handler, *, queue: str) -> AbstractAsyncContextManager[None]:
        """Answer questions at a subject for as long as the context is open, also after the connection came back.

        Each question goes to one of those that share a queue. At most ``ANSWERS_MAX`` are worked on at once, further
        ones wait with those who ask. Leaving the context cancels what is under way: who asked asks the next one.

        Args:
            handler: Gets the question and gives the answer. The typed errors that it raises go to who asked.

        Raises:
            DeniedError: If the server does not let this connection listen there.
            UnavailableError: If the bus is closed.
        """
        ...

    async def beat(self, subject: str, *, ttl_s: int, deadline: Deadline) -> int:
        """Store a heartbeat in the live stream; it runs out after whole seconds. Creates the stream when it is gone."""
        ...

    def watch_live(self) -> AbstractAsyncContextManager[AsyncIterator[Heartbeat]]:
        """The live stream's present values, then each change, for as long as the context is open."""
        ...

    async def provision(
        self, *, remembered_seq: int, limits: StreamLimits, allow_recreate: bool, deadline: Deadline
    ) -> None:
        """See :func:`tensorbus.bus.provision`."""
        ...

    async def close(self) -> None: ...
