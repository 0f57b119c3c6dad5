"""A node's way to the bus, with faults on it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, aclosing, asynccontextmanager, contextmanager
from typing import Any, Generic, TypeVar

from tensorbus.bus import Bus, Handler, Heartbeat, LogInfo, Message, Reader, Stream, StreamLimits
from tensorbus.bus._position import Position
from tensorbus.clock import Deadline
from tensorbus.errors import TensorbusError, UnavailableError
from tensorbus.events import MSG_ID, Subjects
from tensorbus.testing._world import BUS, Node

T = TypeVar("T")

INBOX_ITEMS_MAX = 64
ON_THE_WAY_MAX = 256
ATTEMPT_S = 2.0
"""After this long without an answer a request is sent again, as the real bus does within the caller's deadline."""
REQUEST_S = 30.0
"""How long a request without a deadline of its own waits for an answer that may never come."""


class SimStream:
    """One stream as one life of one node sees it, see :class:`SimBus`.

    Args:
        wire: The connection to it.
        inner: The stream itself.
    """

    def __init__(self, wire: SimBus, inner: Stream) -> None:
        self._wire = wire
        self._inner = inner

    @property
    def name(self) -> str:
        return self._inner.name

    @property
    def subjects(self) -> Subjects:
        return self._inner.subjects

    async def publish(self, subject: str, data: bytes, *, headers: Mapping[str, str], deadline: Deadline) -> int:
        """As the port says. The message may arrive twice if it has a message id, and late if its caller gave up."""

        def store() -> Awaitable[int]:
            return self._inner.publish(subject, data, headers=headers, deadline=Deadline(REQUEST_S))

        if MSG_ID in headers and self._wire.chance(self._wire.world.plan.duplicate, "duplicate"):
            self._wire.exchange(store, reply=None)
        return await self._wire.request(store, deadline)

    async def get(self, seq: int, *, deadline: Deadline) -> Message | None:
        return await self._wire.request(lambda: self._inner.get(seq, deadline=Deadline(REQUEST_S)), deadline)

    async def first_from(self, filter_subject: str, seq: int, *, deadline: Deadline) -> Message | None:
        return await self._wire.request(
            lambda: self._inner.first_from(filter_subject, seq, deadline=Deadline(REQUEST_S)), deadline
        )

    async def last_on(self, filter_subject: str, *, deadline: Deadline) -> Message | None:
        return await self._wire.request(
            lambda: self._inner.last_on(filter_subject, deadline=Deadline(REQUEST_S)), deadline
        )

    async def subjects_on(self, filter_subject: str, *, deadline: Deadline) -> list[str]:
        return await self._wire.request(
            lambda: self._inner.subjects_on(filter_subject, deadline=Deadline(REQUEST_S)), deadline
        )

    async def last_seq(self, *, deadline: Deadline) -> int:
        return await self._wire.request(lambda: self._inner.last_seq(deadline=Deadline(REQUEST_S)), deadline)

    async def log_state(self, *, deadline: Deadline) -> LogInfo:
        return await self._wire.request(lambda: self._inner.log_state(deadline=Deadline(REQUEST_S)), deadline)

    async def purge(self, filter_subject: str, *, upto: int, keep_last: bool = True, deadline: Deadline) -> int:
        def remove() -> Awaitable[int]:
            return self._inner.purge(filter_subject, upto=upto, keep_last=keep_last, deadline=Deadline(REQUEST_S))

        return await self._wire.request(remove, deadline)

    @contextmanager
    def on_lost(self, callback: Callable[[], None]) -> Iterator[None]:
        token = object()
        self._wire.losses[token] = callback
        try:
            with self._inner.on_lost(callback):
                yield
        finally:
            del self._wire.losses[token]

    @asynccontextmanager
    async def read(self, filter_subject: str, *, after: int) -> AsyncIterator[Reader]:
        """As the port says. Batches come late, in pieces, and not at all while the node is cut off."""
        reader = _SimReader(self, filter_subject, after=after)
        with ExitStack() as pump:

            def start() -> None:
                pump.close()
                reader.inbox.clear()
                batches = self._batches(filter_subject, after=reader.position, reader=reader)
                pump.enter_context(self._wire.pump(batches, reader.inbox, split=self._wire.split))

            start()
            self._wire.readings[start] = reader
            try:
                yield reader
            finally:
                del self._wire.readings[start]

    async def _batches(
        self, filter_subject: str, *, after: int, reader: _SimReader
    ) -> AsyncGenerator[list[Message], None]:
        async with self._inner.read(filter_subject, after=after) as source:
            last = await self._inner.last_on(filter_subject, deadline=Deadline(REQUEST_S))
            await self._wire.reaches_node()
            reader.opened(0 if last is None else last.seq)
            async for batch in source:
                yield batch


class SimBus(SimStream):
    """The bus as one life of one node sees it: through a network that delays, loses, repeats and is cut.

    What the bus does, it does as the world's node ``"bus"``: a caller that crashes or is paused in between does not
    hold it up, and a request on its way arrives although its caller is gone. Make one for each life.

    Args:
        node: Whose connection this is.
        inner: The bus that all nodes share, such as ``MemoryBus``.
    """

    def __init__(self, node: Node, inner: Bus) -> None:
        self._node = node
        self.world = node.world
        self._server = node.world.node(BUS)
        super().__init__(self, inner)
        self._bus = inner
        self._pages = SimStream(self, inner.pages)
        self._rng = node.world.rng(f"net/{node.name}/{node.life.number}")
        self._life = node.life
        self._closed = False
        self._inboxes: dict[_Inbox[Any], None] = {}
        self._travelling: dict[Callable[[], None], None] = {}
        self.readings: dict[Callable[[], None], _SimReader] = {}
        self.losses: dict[object, Callable[[], None]] = {}
        self._listening = ExitStack()
        self._listening.enter_context(inner.on_lost(self._broke))

    @property
    def pages(self) -> SimStream:
        return self._pages

    async def beat(self, subject: str, *, ttl_s: int, deadline: Deadline) -> int:
        return await self.request(lambda: self._bus.beat(subject, ttl_s=ttl_s, deadline=Deadline(REQUEST_S)), deadline)

    @property
    def max_payload(self) -> int:
        return self._bus.max_payload

    async def ask(self, subject: str, data: bytes, *, deadline: Deadline) -> bytes:
        """As the port says. A question is repeated after a silence, and its first answer is taken, however late."""
        limit = self._limit(deadline)
        reply: asyncio.Future[bytes] = self.world.loop.create_future()

        def question() -> Awaitable[bytes]:
            return self._bus.ask(subject, data, deadline=Deadline(limit.left()))

        async with limit.scope():
            while not reply.done():
                self.exchange(question, reply=reply)
                await asyncio.wait({reply}, timeout=ATTEMPT_S)
        return reply.result()

    @asynccontextmanager
    async def answer(self, subject: str, handler: Handler, *, queue: str) -> AsyncIterator[None]:
        """As the port says. Questions and answers come late, and wait while the node is cut off."""

        async def travel(question: bytes) -> bytes:
            await self.reaches_node()
            answered = self._node.spawn(handler(question), name=f"answer/{subject}", may_raise=(TensorbusError,))
            try:
                answer = await answered
            finally:
                answered.cancel()
            await self.reaches_node()
            return answer

        async def listen() -> None:
            async with self._bus.answer(subject, travel, queue=queue):
                await asyncio.Event().wait()

        stop = self._server.background(listen(), name=f"answers/{self._node.name}")
        forget = self._node.on_crash(stop)
        try:
            yield
        finally:
            forget()
            stop()

    @asynccontextmanager
    async def watch_live(self) -> AsyncIterator[AsyncIterator[Heartbeat]]:
        """As the port says; changes come late, and not at all while the node is cut off."""
        inbox: _Inbox[Heartbeat] = _Inbox()
        with self.pump(self._beats(), inbox, split=lambda beat: [beat]):
            yield inbox

    async def provision(
        self, *, remembered_seq: int, limits: StreamLimits, allow_recreate: bool, deadline: Deadline
    ) -> None:
        def provide() -> Awaitable[None]:
            return self._bus.provision(
                remembered_seq=remembered_seq,
                limits=limits,
                allow_recreate=allow_recreate,
                deadline=Deadline(REQUEST_S),
            )

        await self.request(provide, deadline)

    async def close(self) -> None:
        """Close this connection, which ends its readings. The shared bus stays open."""
        self._closed = True
        self._listening.close()
        for inbox in list(self._inboxes):
            inbox.fail(UnavailableError("this connection to the bus is closed"))

    def reconnect(self) -> None:
        """The connection broke and is back: who wants to know is told, and readings begin again where they are."""
        if self._node.life is not self._life or not self._node.is_up or self._closed:
            return
        self.world.cover("fault.reconnect")
        for callback in list(self.losses.values()):
            callback()
        for start, reader in list(self.readings.items()):
            if reader.on_restart is not None:
                reader.on_restart()
            start()

    def _broke(self) -> None:
        """The server died: what is on its way to it or from it never arrives, and readings begin again."""
        travelling, self._travelling = list(self._travelling), {}
        for give_up in travelling:
            give_up()
        if self._node.life is self._life and self._node.is_up:
            for start in list(self.readings):
                start()

    async def request(self, work: Callable[[], Awaitable[T]], deadline: Deadline) -> T:
        limit = self._limit(deadline)
        async with limit.scope():
            while True:
                reply: asyncio.Future[T] = self.world.loop.create_future()
                self.exchange(work, reply=reply)
                timer = asyncio.timeout(ATTEMPT_S)
                try:
                    async with timer:
                        return await reply
                except TimeoutError:
                    if not timer.expired():
                        raise
                    self.world.cover("fault.repeated")

    def _limit(self, deadline: Deadline) -> Deadline:
        if self._closed or self.world.over:
            raise UnavailableError("this connection to the bus is closed")
        return Deadline(REQUEST_S, what=deadline.what) if deadline.left() is None else deadline

    def exchange(self, work: Callable[[], Awaitable[T]], *, reply: asyncio.Future[T] | None) -> None:
        """Send a request on its way. It is the network's from here on, whatever becomes of the caller."""
        ack_is_lost = self.chance(self.world.plan.lost_ack, "lost_ack")

        async def travel() -> None:
            try:
                await go()
            finally:
                self._travelling.pop(give_up, None)

        async def go() -> None:
            if not await self._arrives():
                return
            try:
                result = await work()
            except TensorbusError as exc:
                if await self._arrives() and reply is not None and not reply.done():
                    reply.set_exception(exc)
                    reply.exception()  # its caller may be dead, and then nobody awaits it
                return
            if not ack_is_lost and await self._arrives() and reply is not None and not reply.done():
                reply.set_result(result)

        give_up = self._server.background(travel(), name=f"request/{self._node.name}")
        self._travelling[give_up] = None

    async def _arrives(self) -> bool:
        """Let a message travel one way; false if it got lost."""
        await asyncio.sleep(self._delay_s())
        if self.chance(self.world.plan.loss, "loss"):
            return False
        if not self._node.connected.is_set():
            # A cut connection either breaks, or holds the bytes back until it is whole again.
            if self._rng.random() < 0.5:
                self.world.cover("fault.partition_drop")
                return False
            self.world.cover("fault.partition_clog")
            await self._node.connected.wait()
        return True

    @contextmanager
    def pump(
        self, source: AsyncGenerator[T, None], inbox: _Inbox[T], *, split: Callable[[T], Sequence[T]]
    ) -> Iterator[None]:
        """Move a feed's items to the node in order until the context is left, or the node crashes."""

        line: asyncio.Queue[tuple[float, T | TensorbusError]] = asyncio.Queue(ON_THE_WAY_MAX)
        stopped = False  # at once, while the end of the task takes a turn of the loop

        async def send() -> None:
            arrives_s = 0.0
            try:
                async with aclosing(source):
                    async for item in source:
                        for piece in split(item):
                            # What was sent first arrives first, but a slow one does not keep those behind it from
                            # travelling meanwhile: a late feed stays as late as its slowest piece, and no later.
                            arrives_s = max(arrives_s, self.world.loop.time() + self._delay_s())
                            await line.put((arrives_s, piece))
            except TensorbusError as exc:
                await line.put((arrives_s, exc))

        async def arrive() -> None:
            while True:
                arrives_s, piece = await line.get()
                await asyncio.sleep(arrives_s - self.world.loop.time())
                await self._node.connected.wait()
                await inbox.put(piece, wanted=lambda: not stopped)

        async def move() -> None:
            async with asyncio.TaskGroup() as group:
                group.create_task(send(), name=f"feed/{self._node.name}/send")
                group.create_task(arrive(), name=f"feed/{self._node.name}/arrive")

        stop = self._server.background(move(), name=f"feed/{self._node.name}")
        forget = self._node.on_crash(stop)
        self._inboxes[inbox] = None
        try:
            yield
        finally:
            stopped = True
            forget()
            self._inboxes.pop(inbox, None)
            stop()

    async def _beats(self) -> AsyncGenerator[Heartbeat, None]:
        async with self._bus.watch_live() as beats:
            async for beat in beats:
                yield beat

    async def reaches_node(self) -> None:
        """Let a feed's item travel: a feed repairs its losses by itself, so here they are delays only."""
        await asyncio.sleep(self._delay_s())
        await self._node.connected.wait()

    def split(self, batch: list[Message]) -> list[list[Message]]:
        if len(batch) < 2 or self._rng.random() < 0.5:
            return [batch]
        at = self._rng.randrange(1, len(batch))
        return [batch[:at], batch[at:]]

    def _delay_s(self) -> float:
        plan = self.world.plan
        low, high = plan.delay_s
        return self._rng.uniform(low, plan.slow_s_max if self.chance(plan.slow, "slow") else high)

    def chance(self, share: float, name: str) -> bool:
        # Drawn also when the share is 0, so that two plans of one seed differ by their faults alone.
        if self._rng.random() >= share:
            return False
        self.world.cover(f"fault.{name}")
        return True


class _Inbox(Generic[T]):
    """What arrived at a node and was not read yet, bounded; an error ends it."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[T | TensorbusError] = asyncio.Queue(maxsize=INBOX_ITEMS_MAX)
        self._room = asyncio.Event()

    async def put(self, item: T | TensorbusError, *, wanted: Callable[[], bool]) -> None:
        """Wait for room, and put it there if it is still wanted then."""
        while self._queue.full() and wanted():
            self._room.clear()
            await self._room.wait()
        if wanted():
            self._queue.put_nowait(item)

    def clear(self) -> None:
        """Throw away what was not read."""
        while not self._queue.empty():
            self._queue.get_nowait()
        self._room.set()

    def fail(self, error: TensorbusError) -> None:
        """Throw away what was not read, and end."""
        self.clear()
        self._queue.put_nowait(error)

    def __aiter__(self) -> AsyncIterator[T]:
        return self

    async def __anext__(self) -> T:
        item = await self._queue.get()
        self._room.set()
        if isinstance(item, TensorbusError):
            raise item
        return item


class _SimReader(Position):
    def __init__(self, leader: SimStream, filter_subject: str, *, after: int) -> None:
        super().__init__(leader, filter_subject, after=after)
        self.inbox: _Inbox[list[Message]] = _Inbox()
        self._last_at_open: int | None = None

    def opened(self, last_seq: int) -> None:
        """The reading is open, and the filter's last message then was this one."""
        self._last_at_open = last_seq
        self._see_whether_caught_up()

    def __aiter__(self) -> AsyncIterator[list[Message]]:
        return self

    async def __anext__(self) -> list[Message]:
        batch = await anext(self.inbox)
        self._advance(batch[-1].seq)
        self._see_whether_caught_up()
        return batch

    def _see_whether_caught_up(self) -> None:
        if self._last_at_open is not None and self.position >= self._last_at_open:
            self.caught_up.set()
