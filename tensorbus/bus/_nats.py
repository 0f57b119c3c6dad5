"""The bus over a NATS server with JetStream."""

from __future__ import annotations

import base64
import itertools
import re
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from datetime import datetime
from typing import Any, Final

from tensorbus.bus._ask import Handler
from tensorbus.bus._auth import NatsAuth
from tensorbus.bus._beats import TTL, Heartbeats
from tensorbus.bus._link import Link, Refused
from tensorbus.bus._nats_ask import answer, ask, max_payload
from tensorbus.bus._port import Heartbeat, LogInfo, Message, Reader, StreamLimits
from tensorbus.bus._reader import NatsReader
from tensorbus.bus._requests import NoStreamError, Requests
from tensorbus.bus._streams import ensure_live, ensure_log
from tensorbus.clock import Clock, Deadline, SystemClock
from tensorbus.errors import (
    CorruptError,
    DeadlineExceededError,
    InvalidArgumentError,
    NotFoundError,
    TensorbusError,
    UnavailableError,
)
from tensorbus.events import MSG_ID, Subjects
from tensorbus.ids import IdSource, SystemIds

CONNECT_S: Final = 10.0
RECREATE_S: Final = 5.0
JETSTREAM_S: Final = 2.0
_TIME = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?Z")


class NatsBus:
    """See :class:`tensorbus.bus.Bus`. Made by :meth:`connect`; belongs to the event loop that made it."""

    def __init__(self, link: Link, *, subjects: Subjects, clock: Clock, ids: IdSource, pending_max: int) -> None:
        self._link = link
        self._requests = Requests(link, appends_max=pending_max)
        self._subjects = subjects
        self._clock = clock
        self._beat_ids = (f"{stem}-{n}" for stem in [ids.hex(8)] for n in itertools.count())
        self._limits = StreamLimits()
        self._live_seq = 0

    @classmethod
    async def connect(
        cls,
        url: str,
        *,
        subjects: Subjects | None = None,
        auth: NatsAuth | None = None,
        name: str = "tensorbus",
        pending_max: int = 1024,
        deadline: Deadline | None = None,
        clock: Clock | None = None,
        ids: IdSource | None = None,
    ) -> NatsBus:
        """Connect to a server, and stay connected until :meth:`close`.

        Args:
            url: One or more NATS URLs, separated by commas.
            subjects: The subjects' prefix; ``tb`` when ``None``.
            auth: As whom to connect, and whom to trust.
            name: How the server calls this connection. Its inboxes begin with ``_INBOX_<name>``, so that permissions
                can confine them.
            pending_max: Appends that may wait for their acknowledgement; further ones fail with OutOfSpaceError.
            deadline: For the first connection; 10 s when ``None``.

        Raises:
            UnavailableError: If no server answers; DeniedError: If it refuses the credentials.
            InvalidArgumentError: If it is older than 2.14, or URL, credentials or certificates cannot be used.
        """
        link = Link(url, auth=auth or NatsAuth(), name=name)
        await link.open(deadline or Deadline(CONNECT_S, what="connecting to NATS"))
        return cls(
            link,
            subjects=subjects or Subjects(),
            clock=clock or SystemClock(),
            ids=ids or SystemIds(),
            pending_max=pending_max,
        )

    @property
    def subjects(self) -> Subjects:
        return self._subjects

    @property
    def connected(self) -> bool:
        """Whether the connection is up right now."""
        return self._link.up

    async def provision(
        self, *, remembered_seq: int, limits: StreamLimits, allow_recreate: bool, deadline: Deadline
    ) -> None:
        self._limits = limits
        await self._need_jetstream(deadline)
        await ensure_log(
            self._requests,
            self._subjects,
            limits,
            clock=self._clock,
            remembered_seq=remembered_seq,
            allow_recreate=allow_recreate,
            deadline=deadline,
        )
        await self._ensure_live(deadline)

    async def publish(self, subject: str, data: bytes, *, headers: Mapping[str, str], deadline: Deadline) -> int:
        stream = self._subjects.log_stream
        return await self._requests.append(subject, data, headers=headers, stream=stream, deadline=deadline)

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
            info = await self._requests.api(f"STREAM.INFO.{self._subjects.log_stream}", question, deadline=deadline)
            page = info["state"].get("subjects") or {}
            found += page
            if not page or len(found) >= int(info.get("total", 0)):
                return sorted(found)

    async def last_seq(self, *, deadline: Deadline) -> int:
        return (await self.log_state(deadline=deadline)).last_seq

    async def log_state(self, *, deadline: Deadline) -> LogInfo:
        info = await self._requests.api(f"STREAM.INFO.{self._subjects.log_stream}", deadline=deadline)
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
        answer = await self._requests.api(f"STREAM.PURGE.{self._subjects.log_stream}", body, deadline=deadline)
        return int(answer["purged"])

    @property
    def max_payload(self) -> int:
        return max_payload(self._link)

    async def ask(self, subject: str, data: bytes, *, deadline: Deadline) -> bytes:
        return await ask(self._requests, subject, data, deadline=deadline)

    def answer(self, subject: str, handler: Handler, *, queue: str) -> AbstractAsyncContextManager[None]:
        return answer(self._link, subject, handler, queue=queue)

    def read(self, filter_subject: str, *, after: int) -> AbstractAsyncContextManager[Reader]:
        return NatsReader(
            self._requests, leader=self, stream=self._subjects.log_stream, filter_subject=filter_subject, after=after
        )

    async def beat(self, subject: str, *, ttl_s: int, deadline: Deadline) -> int:
        if ttl_s < 1:
            raise InvalidArgumentError(f"a heartbeat's time to live is whole seconds, not {ttl_s}")
        headers = {TTL: f"{ttl_s}s", MSG_ID: next(self._beat_ids)}
        stream = self._subjects.live_stream
        while True:
            try:
                seq = await self._requests.append(subject, b"", headers=headers, stream=stream, deadline=deadline)
            except NoStreamError:
                await self._ensure_live(deadline)
            else:
                self._note_live(seq)
                return seq

    @asynccontextmanager
    async def watch_live(self) -> AsyncIterator[AsyncIterator[Heartbeat]]:
        async def create() -> None:
            await self._ensure_live(Deadline(RECREATE_S, what="making the stream of heartbeats anew"))

        # One message per subject: all that is there, in order, is the present values.
        reader = NatsReader(
            self._requests,
            leader=self,
            stream=self._subjects.live_stream,
            filter_subject=self._subjects.live_all,
            after=0,
            create_stream=create,
        )
        async with reader:
            yield Heartbeats(reader, self._subjects, self._note_live)

    @contextmanager
    def on_lost(self, callback: Callable[[], None]) -> Iterator[None]:
        listener = _Losses(callback)
        self._link.listen(listener)
        try:
            yield
        finally:
            self._link.forget(listener)

    async def close(self) -> None:
        await self._link.close()

    def _note_live(self, seq: int) -> None:
        self._live_seq = max(self._live_seq, seq)

    async def _ensure_live(self, deadline: Deadline) -> None:
        await ensure_live(
            self._requests,
            self._subjects,
            self._limits,
            clock=self._clock,
            remembered_seq=self._live_seq,
            deadline=deadline,
        )

    async def _need_jetstream(self, deadline: Deadline) -> None:
        """Say soon that JetStream is off. A server without it may still lead to one with it: then that answers."""
        if not self._link.without_jetstream:
            return
        left = deadline.left()
        soon = Deadline(JETSTREAM_S if left is None else min(left, JETSTREAM_S), what="asking for JetStream")
        try:
            await self._requests.api("INFO", deadline=soon)
        except (UnavailableError, DeadlineExceededError) as exc:
            raise UnavailableError(
                "JetStream is off in the NATS server: add `jetstream {}` to its configuration, or start it with -js"
            ) from exc
        except TensorbusError:
            pass  # something with JetStream answers, if only that this account may not ask

    async def _message(self, question: dict[str, Any], deadline: Deadline) -> Message | None:
        verb = f"STREAM.MSG.GET.{self._subjects.log_stream}"
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
