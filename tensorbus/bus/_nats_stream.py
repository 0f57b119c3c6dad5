"""One stream of a NATS server with JetStream, and how its answers are read."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, contextmanager
from datetime import datetime
from typing import Any

from tensorbus.bus._link import Refused
from tensorbus.bus._port import LogInfo, Message, Reader
from tensorbus.bus._reader import NatsReader
from tensorbus.bus._requests import Requests
from tensorbus.clock import Deadline
from tensorbus.errors import CorruptError, InvalidArgumentError, NotFoundError
from tensorbus.events import Subjects

_TIME = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?Z")


class NatsStream:
    """See :class:`tensorbus.bus.Stream`.

    Args:
        requests: The connection, which several streams may share.
        name: How the server calls the stream.
    """

    def __init__(self, requests: Requests, *, subjects: Subjects, name: str) -> None:
        self._requests = requests
        self._subjects = subjects
        self._name = name

    @property
    def name(self) -> str:
        return self._name

    @property
    def subjects(self) -> Subjects:
        return self._subjects

    async def publish(self, subject: str, data: bytes, *, headers: Mapping[str, str], deadline: Deadline) -> int:
        return await self._requests.append(subject, data, headers=headers, stream=self._name, deadline=deadline)

    async def get(self, seq: int, *, deadline: Deadline) -> Message | None:
        return await self._message({"seq": seq}, deadline) if seq > 0 else None

    async def first_from(self, filter_subject: str, seq: int, *, deadline: Deadline) -> Message | None:
        return await self._message({"seq": max(seq, 1), "next_by_subj": filter_subject}, deadline)

    async def last_on(self, filter_subject: str, *, deadline: Deadline) -> Message | None:
        return await self._message({"last_by_subj": filter_subject}, deadline)

    async def subjects_on(self, filter_subject: str, *, deadline: Deadline) -> list[str]:
        found: list[str] = []
        while True:
            question = {"subjects_filter": filter_subject, "offset": len(found)}
            info = await self._requests.api(f"STREAM.INFO.{self._name}", question, deadline=deadline)
            page = info["state"].get("subjects") or {}
            found += page
            if not page or len(found) >= int(info.get("total", 0)):
                return sorted(found)

    async def last_seq(self, *, deadline: Deadline) -> int:
        return (await self.log_state(deadline=deadline)).last_seq

    async def log_state(self, *, deadline: Deadline) -> LogInfo:
        info = await self._requests.api(f"STREAM.INFO.{self._name}", deadline=deadline)
        return parse_info(info)

    async def purge(self, filter_subject: str, *, upto: int, keep_last: bool = True, deadline: Deadline) -> int:
        if not filter_subject:  # to the server that would mean everything
            raise InvalidArgumentError("a purge needs a filter")
        before = upto + 1  # the server's bound is exclusive, and 0 would mean everything
        if keep_last:
            last = await self.last_on(filter_subject, deadline=deadline)
            before = min(before, last.seq if last is not None else 0)
        if before <= 1:
            return 0
        body = {"filter": filter_subject, "seq": before}
        answer = await self._requests.api(f"STREAM.PURGE.{self._name}", body, deadline=deadline)
        return int(answer["purged"])

    def read(self, filter_subject: str, *, after: int) -> AbstractAsyncContextManager[Reader]:
        return NatsReader(self._requests, leader=self, stream=self._name, filter_subject=filter_subject, after=after)

    @contextmanager
    def on_lost(self, callback: Callable[[], None]) -> Iterator[None]:
        listener = _Losses(callback)
        self._requests.link.listen(listener)
        try:
            yield
        finally:
            self._requests.link.forget(listener)

    async def _message(self, question: dict[str, Any], deadline: Deadline) -> Message | None:
        verb = f"STREAM.MSG.GET.{self._name}"
        try:
            answer = await self._requests.api(verb, question, deadline=deadline)
        except NotFoundError:
            return None
        return parse_stored(answer["message"])


class _Losses:
    """Hears of the link only that it was lost."""

    def __init__(self, callback: Callable[[], None]) -> None:
        self.on_lost = callback

    def on_refused(self, refused: Refused) -> None:
        """Nothing was asked."""


def parse_info(info: Mapping[str, Any]) -> LogInfo:
    """What the server says of a stream.

    Raises:
        CorruptError: If it cannot be read.
    """
    try:
        state = info["state"]
        return LogInfo(
            first_seq=int(state["first_seq"]),
            last_seq=int(state["last_seq"]),
            messages=int(state["messages"]),
            nbytes=int(state["bytes"]),
            created_ns=parse_time(info["created"]),
        )
    except (KeyError, ValueError) as exc:
        raise CorruptError(f"the bus gave a stream's state that cannot be read: {exc}") from exc


def parse_stored(stored: Mapping[str, Any]) -> Message:
    """A message as the leader gives it, headers and data in base64.

    Raises:
        CorruptError: If it cannot be read.
    """
    try:
        return Message(
            int(stored["seq"]),
            parse_time(stored["time"]),
            stored["subject"],
            parse_headers(base64.b64decode(stored.get("hdrs", ""))),
            base64.b64decode(stored.get("data", "")),
        )
    except (KeyError, ValueError) as exc:
        raise CorruptError(f"the bus gave a message that cannot be read: {exc}") from exc


def parse_time(text: str) -> int:
    """Nanoseconds since the epoch of an RFC 3339 time in UTC; the standard library cuts at microseconds."""
    found = _TIME.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is no UTC time")
    seconds = int(datetime.fromisoformat(found[1] + "+00:00").timestamp())
    return seconds * 1_000_000_000 + int((found[2] or "").ljust(9, "0"))


def parse_headers(raw: bytes) -> dict[str, str]:
    """The headers of a block that begins with ``NATS/1.0``."""
    lines = raw.decode("utf-8").split("\r\n")[1:]
    pairs = (line.partition(":") for line in lines if line)
    return {name.strip(): value.strip() for name, _, value in pairs}
