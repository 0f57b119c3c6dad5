"""Requests over one inbox that outlast a lost connection, and the translation of JetStream's answers."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from nats.aio.msg import Msg

from tensorbus.bus._ask import WORKING
from tensorbus.bus._link import Link, Refused
from tensorbus.bus._port import WrongSequenceError
from tensorbus.clock import Deadline
from tensorbus.errors import (
    DeniedError,
    InvalidArgumentError,
    NotFoundError,
    OutOfSpaceError,
    TensorbusError,
    UnavailableError,
)
from tensorbus.events import MSG_ID

RESEND_S: Final = 2.0
"""Silence after which a request is sent again: its server may have died behind a router that lives."""
PAUSE_S: Final = 0.05
BUSY_PAUSE_S: Final = 0.002
NOT_SENT_PAUSE_S: Final = 0.01
IN_FLIGHT_BYTES_MAX: Final = 64 << 20

WRONG_SEQUENCE: Final = 10071
FENCE_BUSY: Final = 10164
UNDER_WAY: Final = 10158
"""An earlier attempt of the same id waits for its followers: it may yet be stored, or get lost with its leader."""
NO_STREAM: Final = 10059
NO_MESSAGE: Final = 10037
NAME_IN_USE: Final = 10058
_TOO_LARGE: Final = frozenset({10054})
_FULL: Final = frozenset({10023, 10028, 10047, 10077})
_FULL_TEXT = re.compile(r"(?i)maximum (bytes|messages)|insufficient|resource limits|no space|exceed")
NO_RESPONDERS: Final = "503"


class NoStreamError(UnavailableError):
    """The server is there and the stream is not."""


@dataclass(slots=True)
class _Waiting:
    subject: str
    deadline: Deadline
    future: asyncio.Future[Msg | None]
    timer: asyncio.TimerHandle | None = None

    def wait(self) -> None:
        """Count the silence from now."""
        self.forget()
        left = self.deadline.left()
        wait_s = RESEND_S if left is None else min(left, RESEND_S)
        self.timer = self.future.get_loop().call_later(wait_s, _give_up, self.future)

    def forget(self) -> None:
        if self.timer is not None:
            self.timer.cancel()


@dataclass(slots=True)
class Doubt:
    """Whether an attempt was sent that nobody answered: it may have had its effect."""

    unanswered: bool = False


class Requests:
    """Request and reply over a link. A request is repeated, under one reply subject, until its first answer.

    Args:
        appends_max: How many appends may wait for their acknowledgement at once.
    """

    def __init__(self, link: Link, *, appends_max: int) -> None:
        self.link = link
        self._appends_max = appends_max
        self._appends = 0
        self._append_bytes = 0
        self._waiting: dict[str, _Waiting] = {}
        self._count = 0
        self._inbox = ""
        self._generation = -1
        self._deaf = -2
        self._subscribing = asyncio.Lock()
        self.lost_at = -math.inf
        """When the connection was lost last, in the loop's time."""
        link.listen(self)

    def on_lost(self) -> None:
        self.lost_at = asyncio.get_running_loop().time()
        self._deaf = -2  # permissions may have been mended when it comes back
        for entry in self._waiting.values():
            if not entry.future.done():
                entry.future.set_result(None)

    def on_refused(self, refused: Refused) -> None:
        if self._inbox and refused.means(f"{self._inbox}*"):
            self._deaf = self._generation
        for entry in self._waiting.values():
            if not entry.future.done() and (self._is_deaf or refused.means(entry.subject)):
                entry.future.set_exception(self._denied(entry.subject))

    @property
    def _is_deaf(self) -> bool:
        """Whether the server does not let us listen to answers on the present connection."""
        return self._deaf == self._generation

    def _denied(self, subject: str) -> DeniedError:
        if self._is_deaf:
            return DeniedError(f"the server refuses our inbox {self._inbox}*, so no answer to {subject} can arrive")
        return DeniedError(f"the server refuses {subject}", subject=subject)

    async def request(
        self,
        subject: str,
        data: bytes,
        *,
        deadline: Deadline,
        headers: Mapping[str, str] | None = None,
        doubt: Doubt | None = None,
    ) -> Msg:
        """Send until something answers.

        Raises:
            UnavailableError: If the connection did not come up within the deadline and nothing was sent.
            DeadlineExceededError: If it was sent and nobody answered within the deadline.
            DeniedError: If the server refuses the subject.
        """
        token = str(self._count)
        self._count += 1
        doubt = doubt or Doubt()
        while True:
            if not self.link.up or self._generation != self.link.generation:
                try:
                    await self._ready(deadline)
                except UnavailableError as exc:
                    if doubt.unanswered and not self.link.closed:
                        raise deadline.error() from exc
                    raise
            if self._is_deaf:
                raise self._denied(subject)
            reply, sent = await self._attempt(token, subject, data, headers, deadline)
            if reply is not None:
                return reply
            doubt.unanswered = doubt.unanswered or sent
            if deadline.left() == 0.0:
                raise deadline.error()

    async def _ready(self, deadline: Deadline) -> None:
        async with self._subscribing:
            await self.link.wait_up(deadline)
            if self._generation != self.link.generation:
                generation = self.link.generation
                self._inbox = self.link.client.new_inbox() + "."
                await self.link.subscribe(self._inbox + "*", self._on_reply)
                self._generation = generation

    async def _attempt(
        self, token: str, subject: str, data: bytes, headers: Mapping[str, str] | None, deadline: Deadline
    ) -> tuple[Msg | None, bool]:
        loop = asyncio.get_running_loop()
        entry = _Waiting(subject, deadline, loop.create_future())
        self._waiting[token] = entry
        entry.wait()
        try:
            if not await self.link.send(subject, data, reply=self._inbox + token, headers=headers):
                await asyncio.sleep(NOT_SENT_PAUSE_S)
                return None, False
            return await entry.future, True
        finally:
            entry.forget()
            del self._waiting[token]

    def _on_reply(self, msg: Msg) -> None:
        entry = self._waiting.get(msg.subject[len(self._inbox) :])
        if entry is None or entry.future.done():
            return
        if msg.headers is not None and WORKING in msg.headers:
            entry.wait()
        else:
            entry.future.set_result(msg)

    async def api(self, verb: str, body: Mapping[str, Any] | None = None, *, deadline: Deadline) -> dict[str, Any]:
        """A question to JetStream's API at the leader; absent or electing leaders are waited for.

        Raises:
            NoStreamError: If there is no such stream; NotFoundError: If there is no such message or consumer.
        """
        subject, data = f"$JS.API.{verb}", b"" if body is None else json.dumps(body).encode()
        while True:
            reply = await self.request(subject, data, deadline=deadline)
            if not nobody_there(reply):
                answer: dict[str, Any] = json.loads(reply.data)
                error = answer.get("error")
                if error is None:
                    return answer
                if not _for_now(error):
                    raise translate(error, subject=subject)
            await self.pause(deadline, UnavailableError("JetStream does not answer: it is disabled or has no leader"))

    async def append(
        self, subject: str, data: bytes, *, headers: Mapping[str, str], stream: str, deadline: Deadline
    ) -> int:
        """Publish into a stream and return the sequence; see :meth:`tensorbus.bus.Bus.publish`."""
        if MSG_ID not in headers:
            raise InvalidArgumentError(f"a publish to {subject} needs a {MSG_ID} header, so that it can be repeated")
        self._admit(len(data))
        doubt, absent = Doubt(), UnavailableError(f"stream {stream} has no leader that takes {subject}")
        try:
            while True:
                reply = await self.request(subject, data, deadline=deadline, headers=headers, doubt=doubt)
                pause_s = PAUSE_S
                if nobody_there(reply):
                    await self.api(f"STREAM.INFO.{stream}", deadline=deadline)  # raises if there is none
                else:
                    answer = json.loads(reply.data)
                    error = answer.get("error")
                    if error is None:
                        return int(answer["seq"])
                    if error.get("err_code") == FENCE_BUSY:
                        pause_s = BUSY_PAUSE_S
                    elif error.get("err_code") == UNDER_WAY:
                        doubt.unanswered = True
                    elif not _for_now(error):
                        raise translate(error, subject=subject, headers=headers)
                await self.pause(deadline, deadline.error() if doubt.unanswered else absent, pause_s)
        finally:
            self._appends -= 1
            self._append_bytes -= len(data)

    def _admit(self, nbytes: int) -> None:
        if self.link.closed:
            raise UnavailableError("the bus is closed")
        limit = self.link.client.max_payload
        if nbytes > limit:
            raise InvalidArgumentError(f"a message of {nbytes} bytes is over the server's {limit}", nbytes=nbytes)
        if self._appends >= self._appends_max or self._append_bytes + nbytes > IN_FLIGHT_BYTES_MAX:
            raise OutOfSpaceError(
                f"{self._appends} appends of {self._append_bytes} bytes wait for the bus, more are refused",
                waiting=self._appends,
                limit=self._appends_max,
            )
        self._appends += 1
        self._append_bytes += nbytes

    async def pause(self, deadline: Deadline, otherwise: TensorbusError, pause_s: float = PAUSE_S) -> None:
        """Wait a little before the next try, or raise ``otherwise`` when there is no time for one."""
        left = deadline.left()
        if left is not None and left <= pause_s:
            raise otherwise
        await asyncio.sleep(pause_s)


def _give_up(future: asyncio.Future[Msg | None]) -> None:
    if not future.done():
        future.set_result(None)


def nobody_there(reply: Msg) -> bool:
    return not reply.data and reply.headers is not None and reply.headers.get("Status") == NO_RESPONDERS


def _for_now(error: Mapping[str, Any]) -> bool:
    """Whether the server says that it will be able to answer soon."""
    return bool(error.get("code") == 503 and error.get("err_code") not in _FULL)


def translate(error: Mapping[str, Any], *, subject: str, headers: Mapping[str, str] | None = None) -> TensorbusError:
    """The typed error for one that JetStream reports."""
    code, text = int(error.get("err_code", 0)), str(error.get("description", "unknown error"))
    if code == WRONG_SEQUENCE:
        found = re.search(r"(\d+)\s*$", text)
        expected = (headers or {}).get("Nats-Expected-Last-Subject-Sequence")
        return WrongSequenceError(
            subject, seq=int(found[1]) if found else 0, expected=None if expected is None else int(expected)
        )
    if code == NO_STREAM:
        return NoStreamError(f"there is no stream for {subject}", code=code)
    if code in _TOO_LARGE:
        return InvalidArgumentError(f"{subject}: {text}", code=code)
    if code in _FULL or _FULL_TEXT.search(text):
        return OutOfSpaceError(f"the bus is full: {text}", code=code, subject=subject)
    if "not permitted" in text:
        return DeniedError(f"{subject}: {text}", code=code)
    if error.get("code") == 404:
        return NotFoundError(f"{subject}: {text}", code=code)
    if error.get("code") == 400:
        return InvalidArgumentError(f"{subject}: {text}", code=code)
    return UnavailableError(f"{subject}: {text}", code=code)
