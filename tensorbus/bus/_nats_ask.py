"""Questions over core NATS request and reply."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import Error as NatsError

from tensorbus.bus._ask import (
    ABSENT_S,
    HEADERS_BYTES,
    RETURN_S,
    Answer,
    Desk,
    Handler,
    Turn,
    check_size,
    question_headers,
    seconds_left,
)
from tensorbus.bus._link import Link, Refused
from tensorbus.bus._requests import Requests, nobody_there
from tensorbus.clock import Deadline
from tensorbus.errors import DeniedError, InvalidArgumentError, UnavailableError

OPEN_S: Final = 5.0
"""How long :func:`answer` waits for a connection before it leaves the rest to its keeper."""
FLUSH_S: Final = 2
AGAIN_S: Final = 0.1


def max_payload(link: Link) -> int:
    return link.client.max_payload - HEADERS_BYTES


async def ask(requests: Requests, subject: str, data: bytes, *, deadline: Deadline) -> bytes:
    """See :meth:`tensorbus.bus.Bus.ask`."""
    check_size("a question", subject, len(data), max_payload(requests.link))
    loop = asyncio.get_running_loop()
    began, turn = loop.time(), Turn(deadline)
    while True:
        reply = await requests.request(subject, data, deadline=deadline, headers=question_headers(deadline))
        if not nobody_there(reply):
            found = Answer(reply.data, reply.headers or {})
            if await turn.comes(found):
                continue
            return found.value(subject)
        absent = UnavailableError(f"nobody answers at {subject}", subject=subject)
        now = loop.time()
        if now - began >= ABSENT_S and now - requests.lost_at >= RETURN_S:
            raise absent
        await requests.pause(deadline, absent)


@asynccontextmanager
async def answer(link: Link, subject: str, handler: Handler, *, queue: str) -> AsyncIterator[None]:
    """See :meth:`tensorbus.bus.Bus.answer`."""
    if not queue:
        raise InvalidArgumentError("who answers needs a queue, so that one of several answers each question")
    answers = _Answers(link, subject, queue, Desk(subject, handler, bytes_max=lambda: max_payload(link)))
    try:
        await answers.open()
        yield
    finally:
        await answers.close()


class _Answers:
    """A subscription that is made anew whenever the link has a new client."""

    def __init__(self, link: Link, subject: str, queue: str, desk: Desk) -> None:
        self._link = link
        self._subject = subject
        self._queue = queue
        self._desk = desk
        self._lost = asyncio.Event()
        self._ready = asyncio.Event()
        self._generation = -1
        self._subscription: Subscription | None = None
        self._denied: DeniedError | None = None
        self._keeper: asyncio.Task[None] | None = None

    async def open(self) -> None:
        self._link.listen(self)
        self._keeper = asyncio.create_task(self._keep(), name=f"answers/{self._subject}")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(OPEN_S):
                await self._ready.wait()
        if self._denied is not None:
            raise self._denied
        if self._link.closed:
            raise UnavailableError("the bus is closed")

    async def close(self) -> None:
        self._link.forget(self)
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait({self._keeper})
        if self._subscription is not None:
            await self._link.unsubscribe(self._subscription)
        await self._desk.close()

    def on_lost(self) -> None:
        self._lost.set()

    def on_refused(self, refused: Refused) -> None:
        if refused.means(self._subject):
            self._denied = DeniedError(
                f"the server does not let this connection answer at {self._subject}", subject=self._subject
            )

    async def _keep(self) -> None:
        try:
            while True:
                self._lost.clear()
                await self._link.wait_up(Deadline(None))
                if self._generation != self._link.generation and not await self._subscribe():
                    await asyncio.sleep(AGAIN_S)
                    continue
                self._ready.set()
                await self._lost.wait()
        except UnavailableError:
            self._ready.set()  # the link is closed

    async def _subscribe(self) -> bool:
        """Whether the server knows of the subscription."""
        generation = self._link.generation
        try:
            self._subscription = await self._link.subscribe(self._subject, self._on_question, queue=self._queue)
            # The server's word on it: without that, a question asked right now could find nobody. Twice, because
            # nats-py sends the first ping before what waits to be sent, and a second one only behind it.
            await self._link.client.flush(timeout=FLUSH_S)
            await self._link.client.flush(timeout=FLUSH_S)
        except (NatsError, OSError, TimeoutError):
            if self._subscription is not None:
                await self._link.unsubscribe(self._subscription)
            return False
        self._generation = generation
        return True

    def _on_question(self, msg: Msg) -> None:
        """Called in the client's read loop."""
        if not msg.reply:
            return

        async def reply(answer: Answer) -> None:
            # Lost if the connection is down: who asked was lost too, or asks again for want of an answer.
            await self._link.send(msg.reply, answer.data, headers=answer.headers or None)

        self._desk.accept(msg.data, key=msg.reply, left_s=seconds_left(msg.headers), reply=reply)
