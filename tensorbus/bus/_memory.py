"""The bus in memory: what a NATS server with JetStream does, as far as the rest of the system can tell.

No threads and no time but the running loop's, so that a simulator's virtual time drives it. Faults are asked of hooks.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, contextmanager
from typing import Any, Final, TypeVar

from tensorbus.bus._ask import (
    ABSENT_S,
    HEADERS_BYTES,
    RETURN_S,
    STILL_WORKING,
    Answer,
    Desk,
    Handler,
    Turn,
    check_size,
)
from tensorbus.bus._beats import TTL, Heartbeats
from tensorbus.bus._memory_ask import Listening
from tensorbus.bus._memory_cluster import NO_FAULT, Fault, MemoryCluster
from tensorbus.bus._memory_reads import MemoryReads
from tensorbus.bus._memory_stream import MemoryStream, Refused
from tensorbus.bus._port import Heartbeat, Message, Reader, StreamLimits, WrongSequenceError
from tensorbus.bus._position import Position
from tensorbus.clock import Deadline
from tensorbus.errors import DeniedError, InvalidArgumentError, OutOfSpaceError, UnavailableError
from tensorbus.events import MSG_ID, Subjects

RESEND_S: Final = 2.0
BATCH_MAX: Final = 512
ASK_AGAIN_S: Final = 0.05
MESSAGE_BYTES_MAX: Final = 1 << 20
T = TypeVar("T")


class MemoryReader(Position):
    """See :class:`tensorbus.bus.Reader`. Use it as an async context manager."""

    def __init__(
        self, bus: MemoryBus, stored: Callable[[], MemoryStream], *, filter_subject: str, after: int, leader: Any = None
    ) -> None:
        super().__init__(leader or bus, filter_subject, after=after)
        self._bus = bus
        self._stored = stored
        self._wake = asyncio.Event()
        self._closed = False
        self._catch_up_to: int | None = None

    async def __aenter__(self) -> MemoryReader:
        self._bus.cluster.readers[self] = None
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._closed = True
        self._bus.cluster.readers.pop(self, None)
        self.wake()

    def wake(self) -> None:
        self._wake.set()

    def __aiter__(self) -> AsyncIterator[list[Message]]:
        return self

    async def __anext__(self) -> list[Message]:
        while True:
            await asyncio.sleep(0)
            if self._closed:
                raise StopAsyncIteration
            if self._bus.closed:
                raise UnavailableError("the bus is closed")
            batch = [] if self._bus.cut_off else self._look()
            if batch:
                if self._bus.cluster.on_deliver is not None:
                    await asyncio.sleep(self._bus.cluster.on_deliver(batch[0]))
                self._hand_out(batch)
                return batch
            self._wake.clear()
            await self._wake.wait()

    def _look(self) -> list[Message]:
        stream = self._stored()
        if self._catch_up_to is None:
            last = stream.last_on(self._filter)
            self._catch_up_to = 0 if last is None else last.seq
            self._check_caught_up()
        return stream.after(self._position, self._filter, count_max=BATCH_MAX)

    def _hand_out(self, batch: list[Message]) -> None:
        self._advance(batch[-1].seq)
        self._check_caught_up()

    def _check_caught_up(self) -> None:
        if self._catch_up_to is not None and self._position >= self._catch_up_to:
            self._caught_up.set()


class MemoryBus(MemoryReads):
    """See :class:`tensorbus.bus.Bus`. One connection to a :class:`MemoryCluster`.

    Args:
        pending_max: Appends that may wait for their acknowledgement; further ones fail with OutOfSpaceError.
    """

    def __init__(self, cluster: MemoryCluster, *, pending_max: int = 1024) -> None:
        self.cluster = cluster
        self.closed = False
        self._pending_max = pending_max
        self._pending = 0
        self._up = asyncio.Event()
        self._up.set()
        self._waiting: dict[asyncio.Future[Any], None] = {}
        self._on_lost: dict[object, Callable[[], None]] = {}
        self._beats = 0
        self._questions = 0
        self._lost_at = -math.inf
        cluster.connections[self] = None

    @property
    def name(self) -> str:
        return self.subjects.log_stream

    @property
    def subjects(self) -> Subjects:
        return self.cluster.subjects

    @property
    def pages(self) -> MemoryPages:
        return MemoryPages(self)

    @property
    def _stored(self) -> MemoryStream:
        return self.cluster.log

    @property
    def connected(self) -> bool:
        return not self.closed and self._up.is_set()

    @property
    def cut_off(self) -> bool:
        """Whether nothing reaches this connection now."""
        return self.cluster.paused or not self._up.is_set()

    def disconnect(self) -> None:
        """Cut the connection: answers under way are lost, what follows waits for :meth:`reconnect`."""
        self._up.clear()
        self._lost_at = asyncio.get_running_loop().time()
        self._lose_answers()
        for callback in list(self._on_lost.values()):
            callback()

    def reconnect(self) -> None:
        self._up.set()
        self.cluster.wake()

    async def provision(
        self, *, remembered_seq: int, limits: StreamLimits, allow_recreate: bool, deadline: Deadline
    ) -> None:
        del remembered_seq, allow_recreate, deadline
        self.cluster.limit(limits)
        self.cluster.ensure_live()

    async def publish(self, subject: str, data: bytes, *, headers: Mapping[str, str], deadline: Deadline) -> int:
        if MSG_ID not in headers:
            raise InvalidArgumentError(f"a publish to {subject} needs a {MSG_ID} header, so that it can be repeated")
        if self._pending >= self._pending_max:
            raise OutOfSpaceError(
                f"{self._pending} appends wait for the bus, more are refused", limit=self._pending_max
            )
        self._pending += 1
        try:
            return await self._request(lambda: self.cluster.store(subject, data, headers), deadline, subject, headers)
        except Refused as exc:
            raise exc.error from None
        finally:
            self._pending -= 1

    @property
    def max_payload(self) -> int:
        return MESSAGE_BYTES_MAX - HEADERS_BYTES

    async def ask(self, subject: str, data: bytes, *, deadline: Deadline) -> bytes:
        check_size("a question", subject, len(data), self.max_payload)
        self._questions += 1
        key, loop, sent = f"{id(self)}-{self._questions}", asyncio.get_running_loop(), False
        began, turn = loop.time(), Turn(deadline)
        while True:
            await self._connected(deadline, sent=sent)
            sent = True
            try:
                found = await self._ask_once(subject, data, key, deadline)
            except _NoAnswer:
                if deadline.left() == 0.0:
                    raise deadline.error() from None
                continue
            if found is not None and await turn.comes(found):
                continue
            if found is not None:
                return found.value(subject)
            left, now = deadline.left(), loop.time()
            silent = now - began >= ABSENT_S and now - self._lost_at >= RETURN_S
            if silent or (left is not None and left <= ASK_AGAIN_S):
                raise UnavailableError(f"nobody answers at {subject}", subject=subject)
            await asyncio.sleep(ASK_AGAIN_S)

    async def _ask_once(self, subject: str, data: bytes, key: str, deadline: Deadline) -> Answer | None:
        """One attempt; ``None`` if nobody listens."""
        loop = asyncio.get_running_loop()
        found: asyncio.Future[Answer | None] = loop.create_future()
        timer = _patience(found, deadline)

        def hear(answer: Answer | None) -> None:
            nonlocal timer
            timer.cancel()
            if answer is STILL_WORKING and not found.done():
                timer = _patience(found, deadline)
            elif not found.done():
                found.set_result(answer)

        def deliver() -> None:
            listening = self.cluster.switchboard.next_for(subject)
            if not listening:
                hear(None)
            for one in listening:

                async def reply(answer: Answer, one: Listening = one) -> None:
                    if one.reachable():
                        self.cluster.submit(lambda: hear(answer))

                one.desk.accept(data, key=key, left_s=deadline.left(), reply=reply)

        self.cluster.submit(deliver)
        self._waiting[found] = None
        try:
            return await found
        finally:
            timer.cancel()
            del self._waiting[found]

    @asynccontextmanager
    async def answer(self, subject: str, handler: Handler, *, queue: str) -> AsyncIterator[None]:
        if not queue:
            raise InvalidArgumentError("who answers needs a queue, so that one of several answers each question")
        await self._connected(Deadline(None), sent=False)
        desk = Desk(subject, handler, bytes_max=lambda: self.max_payload)
        listening = Listening(subject, queue, desk, lambda: self.connected)
        self.cluster.switchboard.add(listening)
        try:
            yield
        finally:
            self.cluster.switchboard.remove(listening)
            await desk.close()

    def read(self, filter_subject: str, *, after: int) -> AbstractAsyncContextManager[Reader]:
        return MemoryReader(self, lambda: self._stored, filter_subject=filter_subject, after=after)

    async def beat(self, subject: str, *, ttl_s: int, deadline: Deadline) -> int:
        if ttl_s < 1:
            raise InvalidArgumentError(f"a heartbeat's time to live is whole seconds, not {ttl_s}")
        self._beats += 1
        headers = {TTL: f"{ttl_s}s", MSG_ID: f"beat-{id(self)}-{self._beats}"}

        def store() -> int:
            self.cluster.ensure_live()
            return self.cluster.store(subject, b"", headers)

        try:
            return await self._request(store, deadline, subject, headers)
        except Refused as exc:
            raise exc.error from None

    @asynccontextmanager
    async def watch_live(self) -> AsyncIterator[AsyncIterator[Heartbeat]]:
        live = self.cluster.ensure_live
        async with MemoryReader(self, live, filter_subject=self.subjects.live_all, after=0) as reader:
            yield Heartbeats(reader, self.subjects, lambda _seq: None)

    @contextmanager
    def on_lost(self, callback: Callable[[], None]) -> Iterator[None]:
        token = object()
        self._on_lost[token] = callback
        try:
            yield
        finally:
            del self._on_lost[token]

    async def close(self) -> None:
        self.closed = True
        self.cluster.connections.pop(self, None)
        self._up.set()
        self._lose_answers()
        self.cluster.wake()

    def _lose_answers(self) -> None:
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_exception(_NoAnswer())

    async def _request(
        self, action: Callable[[], T], deadline: Deadline, subject: str = "", headers: Mapping[str, str] | None = None
    ) -> T:
        """Ask the server until it answers, as a connection that comes back by itself does."""
        sent = False
        while True:
            await self._connected(deadline, sent=sent)
            fault = NO_FAULT
            if headers is not None and self.cluster.on_publish is not None:
                fault = self.cluster.on_publish(subject, headers)
            if fault.refuse:
                raise DeniedError(f"the server refuses {subject}", subject=subject)
            sent = True
            try:
                return await self._attempt(action, fault, deadline)
            except _NoAnswer:
                if deadline.left() == 0.0:
                    raise deadline.error() from None

    async def _connected(self, deadline: Deadline, *, sent: bool) -> None:
        await asyncio.sleep(0)
        if self.closed:
            raise UnavailableError("the bus is closed")
        try:
            async with deadline.scope():
                await self._up.wait()
        except TimeoutError as exc:
            if sent:
                raise
            raise UnavailableError("the bus is not connected") from exc
        if self.closed:
            raise UnavailableError("the bus is closed")

    async def _attempt(self, action: Callable[[], T], fault: Fault, deadline: Deadline) -> T:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()
        lives = self.cluster.lives

        def act() -> None:
            if self.cluster.lives != lives:
                return
            outcome = _outcome(action)
            if fault.repeat:
                _outcome(action)
            if not fault.lose_reply and not answer.done():
                outcome(answer)

        if not fault.lose_request:
            if fault.delay_s > 0:
                loop.call_later(fault.delay_s, lambda: self.cluster.submit(act))
            else:
                self.cluster.submit(act)
        timer = _patience(answer, deadline)
        self._waiting[answer] = None
        try:
            return await answer
        finally:
            timer.cancel()
            del self._waiting[answer]


class MemoryPages(MemoryReads):
    """The stream of page facts over a bus's connection."""

    def __init__(self, bus: MemoryBus) -> None:
        self._bus = bus

    @property
    def name(self) -> str:
        return self.subjects.pages_stream

    @property
    def subjects(self) -> Subjects:
        return self._bus.subjects

    async def publish(self, subject: str, data: bytes, *, headers: Mapping[str, str], deadline: Deadline) -> int:
        return await self._bus.publish(subject, data, headers=headers, deadline=deadline)

    def read(self, filter_subject: str, *, after: int) -> AbstractAsyncContextManager[Reader]:
        return MemoryReader(self._bus, lambda: self._stored, filter_subject=filter_subject, after=after, leader=self)

    def on_lost(self, callback: Callable[[], None]) -> AbstractContextManager[None]:
        return self._bus.on_lost(callback)

    @property
    def _stored(self) -> MemoryStream:
        return self._bus.cluster.pages

    async def _request(self, action: Callable[[], T], deadline: Deadline) -> T:
        return await self._bus._request(action, deadline)  # noqa: SLF001  the connection is the bus's


class _NoAnswer(Exception):
    """Nobody answered in time, or the connection was lost."""


def _patience(answer: asyncio.Future[Any], deadline: Deadline) -> asyncio.TimerHandle:
    """Give up after a silence, or at the deadline."""
    left = deadline.left()
    return answer.get_loop().call_later(RESEND_S if left is None else min(left, RESEND_S), _give_up, answer)


def _give_up(answer: asyncio.Future[Any]) -> None:
    if not answer.done():
        answer.set_exception(_NoAnswer())


def _outcome(action: Callable[[], T]) -> Callable[[asyncio.Future[T]], None]:
    try:
        result = action()
    except (Refused, WrongSequenceError) as exc:
        error = exc
        return lambda answer: answer.set_exception(error)
    return lambda answer: answer.set_result(result)
