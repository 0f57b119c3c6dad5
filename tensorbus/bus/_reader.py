"""A checkpointed reading of one filter of a stream, over an ephemeral push consumer of its own.

Nothing here is acknowledged and no task runs: who iterates also heals. A gap in the consumer's own sequence, silence of
its heartbeats, a lost connection or a vanished consumer all have one answer, a new consumer at the position + 1.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final

from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from tensorbus.bus._link import Refused
from tensorbus.bus._port import Message
from tensorbus.bus._position import Position
from tensorbus.bus._requests import NoStreamError, Requests
from tensorbus.clock import Deadline
from tensorbus.errors import DeadlineExceededError, DeniedError, NotFoundError, TensorbusError, UnavailableError

HEARTBEAT_S: Final = 0.5
SILENCE_S: Final = 2.0
INACTIVE_S: Final = 5.0
BACKOFF_S_MIN: Final = 0.05
BACKOFF_S_MAX: Final = 0.25
CREATE_S: Final = 1.0
"""How long the answer to one creation of a consumer is waited for: an election swallows the question without a word."""
PATIENT_AFTER: Final = 10
"""After so many creations in vain, more than an election takes, each is waited for as long as silence may last."""
BATCH_MAX: Final = 512
BUFFER_MAX: Final = 64 * 1024
"""Messages held for a slow caller. The server's flow control stops long before, unless the messages are tiny."""
_CONTROL: Final = "100"
_NS_PER_S: Final = 1_000_000_000


class NatsReader(Position):
    """See :class:`tensorbus.bus.Reader`. Use it as an async context manager.

    Args:
        create_stream: Makes the stream when it is gone; ``None`` waits for it.
    """

    def __init__(
        self,
        requests: Requests,
        *,
        leader: Any,
        stream: str,
        filter_subject: str,
        after: int,
        create_stream: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        super().__init__(leader, filter_subject, after=after)
        self._requests = requests
        self._stream = stream
        self._create_stream = create_stream
        self._buffer: deque[Msg | str] = deque()
        self._wake = asyncio.Event()
        self._broken = True
        self._closed = False
        self._subscription: Subscription | None = None
        self._inbox = ""
        self._denied: DeniedError | None = None
        self._consumer = ""
        self._openings = 0
        self._arrived = 0
        self._expected = 1
        self._heard_at = 0.0
        self._to_catch_up: int | None = None

    async def __aenter__(self) -> NatsReader:
        self._requests.link.listen(self)
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._closed = True
        self._requests.link.forget(self)
        self._wake.set()
        await self._drop_consumer()

    def on_lost(self) -> None:
        self._broken = True
        self._wake.set()

    def on_refused(self, refused: Refused) -> None:
        """A refused request fails by itself; without its inbox or its flow control, a reading would only wait."""
        flow = f"$JS.FC.{self._stream}.".lower()
        if refused.means(self._inbox) or refused.subject.lower().startswith(flow):
            self._denied = DeniedError(f"the server refuses {refused.subject}", subject=refused.subject)
            self.on_lost()

    def __aiter__(self) -> AsyncIterator[list[Message]]:
        return self

    async def __anext__(self) -> list[Message]:
        while not self._closed:
            if self._denied is not None:
                raise self._denied
            if self._broken:
                await self._open()
            batch = await self._take()
            if len(batch) == BATCH_MAX:
                await asyncio.sleep(0)  # a long replay must not keep the loop to itself
            if batch:
                return batch
            if not self._buffer and not self._broken and not self._closed:
                await self._wait()
        raise StopAsyncIteration

    async def _wait(self) -> None:
        """Until something arrives, at most as long as heartbeats may be missing."""
        self._wake.clear()
        loop = asyncio.get_running_loop()
        silence_ends = self._heard_at + SILENCE_S
        try:
            async with asyncio.timeout_at(silence_ends):
                await self._wake.wait()
        except TimeoutError:
            if loop.time() >= self._heard_at + SILENCE_S:
                self._broken = True

    async def _take(self) -> list[Message]:
        """Hand out what is buffered, up to a batch; a gap ends it and marks the consumer broken."""
        batch: list[Message] = []
        buffer = self._buffer
        while buffer and len(batch) < BATCH_MAX:
            item = buffer.popleft()
            if isinstance(item, str):
                await self._requests.link.send(item)
                continue
            consumer_seq, message = parse(item)
            if consumer_seq != self._expected:
                self._broken = True
                break
            self._expected += 1
            batch.append(message)
        if batch:
            if self._to_catch_up is not None:
                self._to_catch_up -= len(batch)
                self._check_caught_up()
            self._advance(batch[-1].seq)
        return batch

    def _check_caught_up(self) -> None:
        if self._to_catch_up is not None and self._to_catch_up <= 0:
            self._to_catch_up = 0
            self._caught_up.set()

    async def _open(self) -> None:
        """Make a consumer at the position + 1, for as long as it takes.

        Raises:
            DeniedError, InvalidArgumentError: If the server will never allow it.
            UnavailableError: If the bus is closed.
        """
        backoff_s, tries = BACKOFF_S_MIN, 0
        self._openings += 1
        if self._openings > 1 and self.on_restart is not None:
            self.on_restart()
        while True:
            await self._drop_consumer()
            self._broken = False
            tries += 1
            try:
                await self._make_consumer(CREATE_S if tries <= PATIENT_AFTER else SILENCE_S)
            except NoStreamError:
                if self._create_stream is not None:
                    with contextlib.suppress(UnavailableError, DeadlineExceededError):
                        await self._create_stream()
            except (UnavailableError, DeadlineExceededError, NotFoundError):
                if self._requests.link.closed:
                    raise
            else:
                return
            self._broken = True
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, BACKOFF_S_MAX)

    async def _make_consumer(self, wait_s: float) -> None:
        link, deadline = self._requests.link, Deadline(wait_s, what="the creation of a consumer")
        await link.wait_up(deadline)
        inbox = self._inbox = link.client.new_inbox()
        self._heard_at = asyncio.get_running_loop().time()
        self._subscription = await link.subscribe(inbox, self._on_message)
        config = {
            "deliver_subject": inbox,
            "deliver_policy": "by_start_sequence",
            "opt_start_seq": self._position + 1,
            "filter_subject": self._filter,
            "ack_policy": "none",
            "replay_policy": "instant",
            "flow_control": True,
            "idle_heartbeat": int(HEARTBEAT_S * _NS_PER_S),
            "inactive_threshold": int(INACTIVE_S * _NS_PER_S),
            "mem_storage": True,
            "num_replicas": 1,
        }
        body = {"stream_name": self._stream, "config": config}
        answer = await self._requests.api(f"CONSUMER.CREATE.{self._stream}", body, deadline=deadline)
        self._consumer = answer["name"]
        # What arrived in between is in the buffer and was already counted as delivered, not as pending.
        pending = int(answer.get("num_pending", 0)) + int(answer["delivered"]["consumer_seq"])
        if not self._caught_up.is_set():
            self._to_catch_up = pending if self._to_catch_up is None else min(self._to_catch_up, pending)
            self._check_caught_up()

    async def _drop_consumer(self) -> None:
        subscription, self._subscription = self._subscription, None
        self._buffer.clear()
        self._arrived, self._expected = 0, 1
        if subscription is None:
            return
        link = self._requests.link
        if not link.closed:
            await link.unsubscribe(subscription)
            if self._consumer:
                # Without an answer to wait for: should it get lost, the server removes what nobody listens to.
                await link.send(f"$JS.API.CONSUMER.DELETE.{self._stream}.{self._consumer}")
        self._consumer = ""

    def _on_message(self, msg: Msg) -> None:
        """Called in the client's read loop: note it and return."""
        self._heard_at = asyncio.get_running_loop().time()
        headers = msg.headers
        if headers is not None and not msg.data and headers.get("Status") is not None:
            self._on_control(msg, headers)
            return
        self._arrived += 1
        if len(self._buffer) >= BUFFER_MAX:
            self._broken = True
        elif not self._broken:
            self._buffer.append(msg)
        if not self._wake.is_set():
            self._wake.set()

    def _on_control(self, msg: Msg, headers: dict[str, str]) -> None:
        if headers.get("Status") != _CONTROL:  # such as 409 Consumer Deleted
            self._broken = True
        elif msg.reply:
            self._buffer.append(msg.reply)  # flow control: answered when what came before it has been handed out
        else:
            if (stalled := headers.get("Nats-Consumer-Stalled")) is not None and stalled not in self._buffer:
                self._buffer.append(stalled)
            if (sent := headers.get("Nats-Last-Consumer")) is not None and int(sent) != self._arrived:
                self._broken = True
        if self._broken or self._buffer:
            self._wake.set()


def parse(msg: Msg) -> tuple[int, Message]:
    """A delivered message and its place in the consumer's own sequence.

    ``$JS.ACK.<stream>.<consumer>.<delivered>.<stream seq>.<consumer seq>.<time>.<pending>``; newer servers put domain
    and account before the stream, and may add tokens at the end.
    """
    parts = msg.reply.split(".")
    at = 5 if len(parts) <= 9 else 7
    try:
        return int(parts[at + 1]), Message(int(parts[at]), int(parts[at + 2]), msg.subject, msg.headers or {}, msg.data)
    except (IndexError, ValueError) as exc:
        raise TensorbusError(f"the bus delivered a message without a position: reply {msg.reply!r}") from exc
