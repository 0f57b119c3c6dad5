"""Calls, answers and pushes over a channel: the caller's side. The other side is in ``_serving.py``."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import count
from types import TracebackType
from typing import Self

from tensorbus.clock import Deadline
from tensorbus.errors import TensorbusError, UnavailableError, from_wire
from tensorbus.transport._channel import Channel, PeerInfo, owned
from tensorbus.transport._fds import Fds
from tensorbus.transport._frames import BytesLike, Frame, RemoteProtocolError

PushHandler = Callable[["Push"], None]
CloseHandler = Callable[[TensorbusError], None]


@dataclass(slots=True)
class Reply:
    """The answer to a call. Descriptors that are not taken (``reply.fds.take()``) are closed with it.

    Attributes:
        undo: On the server's side: takes back what was granted, if the caller gave up before it had the answer.
    """

    data: dict[str, object] = field(default_factory=dict)
    body: BytesLike = b""
    fds: Fds = field(default_factory=Fds)
    undo: Callable[[], None] | None = None


@dataclass(slots=True)
class Push:
    """Something that the server said unasked."""

    topic: str
    data: dict[str, object]
    body: BytesLike = b""
    fds: Fds = field(default_factory=Fds)


class Connection:
    """Calls to a server, many at a time, over one channel.

    It owns the channel and one task that reads it; :meth:`close` ends both. Use it as ``async with``.

    Args:
        channel: Connected to a peer that runs :func:`serve`.
        on_push: Called on the loop for each push, in order; it must not block.
        on_close: Called once when the connection ends, with the reason.
    """

    def __init__(
        self, channel: Channel, *, on_push: PushHandler | None = None, on_close: CloseHandler | None = None
    ) -> None:
        self._channel = channel
        self._on_push = on_push
        self._on_close = on_close
        self._ids = count(1)
        self._waiting: dict[int, asyncio.Future[Reply]] = {}
        self._reason: TensorbusError | None = None
        self._reader = asyncio.get_running_loop().create_task(self._read(), name=f"read {channel.info.address}")

    @property
    def info(self) -> PeerInfo:
        return self._channel.info

    @property
    def closed(self) -> bool:
        return self._reason is not None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def call(
        self,
        op: str,
        args: Mapping[str, object] | None = None,
        *,
        body: BytesLike = b"",
        fds: Iterable[int] = (),
        deadline: Deadline,
    ) -> Reply:
        """Ask the server for an operation and wait for its answer.

        Cancelling the call, or running out of time, tells the server; the outcome is then unknown and a late answer
        is dropped with its descriptors.

        Args:
            op: The operation's name.
            args: JSON values.
            body: Raw bytes that go along.
            fds: Descriptors that go along; the call owns and closes them, also when it fails.
            deadline: How long to wait; the server is told what is left.

        Raises:
            TensorbusError: Whatever the server answered, as the class it raised.
            UnavailableError: If the connection is or gets lost; DeadlineExceededError: If the time ran out.
        """
        mine = owned(fds, as_owner=self._channel.owns_fds)
        if self._reason is not None:
            mine.close()
            raise _again(self._reason)
        number = next(self._ids)
        header = {"t": "call", "id": number, "op": op, "args": dict(args or {}), "timeout_s": deadline.left()}
        answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            async with deadline.scope():
                await self._channel.send(header, body, mine)
                return await answer
        except (asyncio.CancelledError, TimeoutError):
            # Also when the answer is here already: the server then takes back what it granted.
            self._cancel(number)
            if answer.done() and not answer.cancelled() and answer.exception() is None:
                answer.result().fds.close()
            raise
        finally:
            self._waiting.pop(number, None)
            if answer.done() and not answer.cancelled():
                answer.exception()  # looked at, so that the loop does not report it

    async def close(self) -> None:
        """End the connection; calls that wait fail with UnavailableError. Safe to repeat."""
        self._end(UnavailableError(f"the connection to {self.info.address} was closed here"))
        if self._reader is not asyncio.current_task():
            self._reader.cancel()
            await asyncio.wait([self._reader])

    def _cancel(self, number: int) -> None:
        if self._reason is not None:
            return
        with contextlib.suppress(TensorbusError):  # the reader sees the same end of the connection and reports it
            self._channel.post({"t": "cancel", "id": number})

    async def _read(self) -> None:
        try:
            while (frame := await self._channel.recv()) is not None:
                self._take(frame)
                del frame  # or its descriptors would stay open until the next frame comes
            self._end(UnavailableError(f"{self.info.address} closed the connection"))
        except TensorbusError as exc:
            self._end(exc)

    def _take(self, frame: Frame) -> None:
        header = frame.header
        match header.get("t"):
            case "ok":
                self._answer(header, Reply(_mapping(header.get("data")), frame.body, frame.fds))
            case "error":
                self._answer(header, from_wire(_mapping(header.get("error"))))
            case "push" if self._on_push is not None:
                self._on_push(Push(str(header.get("topic")), _mapping(header.get("data")), frame.body, frame.fds))
            case _:
                frame.fds.close()

    def _answer(self, header: Mapping[str, object], answer: Reply | TensorbusError) -> None:
        number = header.get("id")
        waiting = self._waiting.pop(number, None) if isinstance(number, int) else None
        if waiting is None or waiting.done():
            if isinstance(answer, Reply):
                answer.fds.close()  # too late: whoever asked has gone
        elif isinstance(answer, Reply):
            waiting.set_result(answer)
        else:
            waiting.set_exception(answer)

    def _end(self, reason: TensorbusError) -> None:
        if self._reason is not None:
            return
        self._reason = reason
        self._channel.close()
        waiting, self._waiting = self._waiting, {}
        for answer in waiting.values():
            if not answer.done():
                answer.set_exception(_again(reason))
        if self._on_close is not None:
            self._on_close(reason)


def _again(reason: TensorbusError) -> TensorbusError:
    """A fresh error per call; one exception object raised in many tasks would collect their tracebacks."""
    error = UnavailableError(reason.message, **reason.details)
    error.__cause__ = reason
    return error


def _mapping(value: object) -> dict[str, object]:
    if not isinstance(value, dict):
        raise RemoteProtocolError("a frame lacks the object that its kind has")
    return value
