"""Answering calls over channels: one session per connection, its requests concurrent up to a bound."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

from tensorbus.clock import Deadline
from tensorbus.errors import OutOfSpaceError, TensorbusError, UnavailableError, to_wire
from tensorbus.ids import IdSource
from tensorbus.transport._channel import Channel, PeerInfo
from tensorbus.transport._connection import Reply
from tensorbus.transport._fds import Fds
from tensorbus.transport._frames import BytesLike, Frame, RemoteProtocolError
from tensorbus.transport._sockets import Listener

log = logging.getLogger("tensorbus.transport")

CONCURRENT_MAX = 64
WAITING_MAX = 1024
UNDO_KEPT = 4096
"""How many of the newest answers can be taken back: more than can be on their way to one caller."""
TIMEOUT_S_MAX = 1e9
_PUSH_BUFFER_BYTES_MAX = 4 * 1024 * 1024


@dataclass(slots=True)
class Request:
    """What a caller asked. Descriptors that the handler does not take are closed when it ends."""

    op: str
    args: dict[str, object]
    deadline: Deadline
    body: BytesLike = b""
    fds: Fds = field(default_factory=Fds)


class PeerSession:
    """A caller's connection, as the server sees it: the owner of what the caller was given."""

    def __init__(self, channel: Channel, *, session_id: str) -> None:
        self.id = session_id
        self._channel = channel
        self._on_close: list[Callable[[], None]] = []
        self._ended = False

    @property
    def info(self) -> PeerInfo:
        return self._channel.info

    @property
    def closed(self) -> bool:
        return self._ended or self._channel.closed

    @property
    def passes_fds(self) -> bool:
        return self._channel.passes_fds

    def on_close(self, callback: Callable[[], None]) -> None:
        """Have ``callback`` called on the loop once the connection has ended; at once if it has."""
        if self._ended:
            callback()
        else:
            self._on_close.append(callback)

    async def push(
        self, topic: str, data: Mapping[str, object], *, body: BytesLike = b"", fds: Iterable[int] = ()
    ) -> None:
        """Send something unasked; waits while the caller does not read.

        Raises:
            UnavailableError: If the connection is gone.
        """
        await self._channel.send({"t": "push", "topic": topic, "data": dict(data)}, body, fds)

    def try_push(self, topic: str, data: Mapping[str, object]) -> bool:
        """Send something unasked, unless the caller reads so slowly that 4 MiB wait for it or is gone; never waits."""
        if self.closed or self._channel.buffered() > _PUSH_BUFFER_BYTES_MAX:
            return False
        try:
            self._channel.post({"t": "push", "topic": topic, "data": dict(data)})
        except UnavailableError:
            return False
        return True

    def close(self) -> None:
        """End the connection."""
        self._channel.close()

    def _end(self) -> None:
        self._ended = True
        callbacks, self._on_close = self._on_close, []
        for callback in callbacks:
            callback()


Handler = Callable[[Request, PeerSession], Awaitable[Reply]]
SessionHook = Callable[[PeerSession], None]


async def serve(
    channel: Channel,
    handler: Handler,
    *,
    ids: IdSource,
    on_open: SessionHook | None = None,
    concurrent_max: int = CONCURRENT_MAX,
    waiting_max: int = WAITING_MAX,
) -> None:
    """Answer the calls of one connection until it ends; then return, whatever ended it.

    Requests start in the order of their arrival. A handler is cancelled when its caller gives up or goes away: what
    must be finished all the same belongs to a task of the handler's owner. A TensorbusError that it raises is the
    answer; any other exception is logged and answered as an internal error.

    Args:
        channel: Owned and closed by this call.
        handler: Called as ``handler(request, session)`` in a task of its own.
        ids: Where the session's id comes from.
        on_open: Called first, with the session; use :meth:`PeerSession.on_close` there for the end.
        concurrent_max: Handlers that run at once.
        waiting_max: Requests that may wait for their turn; more are answered with OutOfSpaceError.
    """
    session = PeerSession(channel, session_id=ids.hex(8))
    server = _Server(session, channel, handler, concurrent_max=concurrent_max, waiting_max=waiting_max)
    try:
        if on_open is not None:
            on_open(session)
        await server.run()
    finally:
        channel.close()
        session._end()  # noqa: SLF001 - nobody else may


async def serve_listener(
    listener: Listener,
    handler: Handler,
    *,
    ids: IdSource,
    on_open: SessionHook | None = None,
    connections_max: int = 4096,
    concurrent_max: int = CONCURRENT_MAX,
) -> None:
    """Accept connections and serve each in a task of its own until cancelled or the listener is closed."""
    room = asyncio.Semaphore(connections_max)

    try:
        async with asyncio.TaskGroup() as group:
            while True:
                await room.acquire()
                channel = await listener.accept()
                serving = serve(channel, handler, ids=ids, on_open=on_open, concurrent_max=concurrent_max)
                task = group.create_task(serving, name=f"serve {channel.info.address}")
                task.add_done_callback(partial(_left, channel, room))
    except* UnavailableError:
        log.debug("%s no longer listens", listener.address)
    finally:
        listener.close()


def _left(channel: Channel, room: asyncio.Semaphore, task: asyncio.Task[None]) -> None:
    channel.close()  # a task that is cancelled before its first step never came to own it
    room.release()


class _Server:
    def __init__(
        self, session: PeerSession, channel: Channel, handler: Handler, *, concurrent_max: int, waiting_max: int
    ) -> None:
        self._session = session
        self._channel = channel
        self._handler = handler
        self._turn = asyncio.Semaphore(concurrent_max)
        self._tasks_max = concurrent_max + waiting_max
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._undo: dict[int, Callable[[], None]] = {}

    async def run(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                while (frame := await self._channel.recv()) is not None:
                    await self._take(frame, group)
                for task in tuple(self._tasks.values()):
                    task.cancel()
        except* TensorbusError as group_exc:
            log.info("connection of %s ended: %s", self._session.info.address, group_exc.exceptions[0])
        except* Exception:  # the edge of the connection: whatever one peer sends ends that peer's connection alone
            log.exception("connection of %s failed", self._session.info.address)

    async def _take(self, frame: Frame, group: asyncio.TaskGroup) -> None:
        number = frame.header.get("id")
        match frame.header.get("t"):
            case "call" if isinstance(number, int) and number not in self._tasks:
                if len(self._tasks) >= self._tasks_max:
                    frame.fds.close()
                    await self._fail(number, OutOfSpaceError(f"{len(self._tasks)} requests wait on this connection"))
                    return
                request = _request(frame)
                task = group.create_task(self._answer(number, request), name=f"op {request.op}")
                self._tasks[number] = task
                # Not in the task itself: one that is cancelled before its first step never gets to its end.
                task.add_done_callback(lambda _: self._ended(number, request))
            case "call":
                raise RemoteProtocolError(f"call with the id {number!r}, which is in use or no number")
            case "cancel" if isinstance(number, int):
                self._give_up(number)
            case _:
                frame.fds.close()

    def _give_up(self, number: int) -> None:
        # The answer first: its task may not have ended yet, and cancelling that would no longer take anything back.
        if (undo := self._undo.pop(number, None)) is not None:
            undo()
        elif (task := self._tasks.get(number)) is not None:
            task.cancel()

    async def _answer(self, number: int, request: Request) -> None:
        try:
            async with self._turn:
                reply = await self._handle(request)
            if isinstance(reply, Reply):
                await self._reply(number, reply)
            else:
                await self._fail(number, reply)
        except UnavailableError:
            log.debug("answer to %s of %s has no taker", request.op, self._session.info.address)

    def _ended(self, number: int, request: Request) -> None:
        request.fds.close()
        self._tasks.pop(number, None)

    async def _handle(self, request: Request) -> Reply | TensorbusError:
        try:
            async with request.deadline.scope():
                return await self._handler(request, self._session)
        except TensorbusError as exc:
            return exc
        except Exception as exc:  # the edge of the task: the caller gets an answer, the log the traceback
            log.exception("handler of %s failed", request.op)
            return TensorbusError(f"{request.op} failed inside the server: {type(exc).__name__}: {exc}")

    async def _reply(self, number: int, reply: Reply) -> None:
        if reply.undo is not None:
            self._undo[number] = reply.undo
            if len(self._undo) > UNDO_KEPT:
                del self._undo[next(iter(self._undo))]
        try:
            await self._channel.send({"t": "ok", "id": number, "data": reply.data}, reply.body, reply.fds)
        except UnavailableError:
            raise
        except TensorbusError as exc:
            await self._fail(number, exc)

    async def _fail(self, number: int, error: TensorbusError) -> None:
        try:
            await self._channel.send({"t": "error", "id": number, "error": to_wire(error)})
        except UnavailableError:
            raise
        except TensorbusError:
            plain = {**to_wire(error), "details": {}}  # details that are no JSON must not cost the answer
            await self._channel.send({"t": "error", "id": number, "error": plain})


def _request(frame: Frame) -> Request:
    header = frame.header
    op, args, timeout_s = header.get("op"), header.get("args"), header.get("timeout_s")
    if (
        not isinstance(op, str)
        or not isinstance(args, dict)
        or not isinstance(timeout_s, int | float | None)
        or not 0 <= (timeout_s or 0) <= TIMEOUT_S_MAX
    ):
        frame.fds.close()
        raise RemoteProtocolError("a call must name an op, args, and a timeout_s from 0 to 1e9 or null")
    return Request(op=op, args=args, deadline=Deadline(timeout_s, what=op), body=frame.body, fds=frame.fds)
