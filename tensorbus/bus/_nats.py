"""The bus over a NATS server with JetStream."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Final

from tensorbus.bus._ask import Handler
from tensorbus.bus._auth import NatsAuth
from tensorbus.bus._beats import TTL, Heartbeats
from tensorbus.bus._link import Link
from tensorbus.bus._nats_ask import answer, ask, max_payload
from tensorbus.bus._nats_stream import NatsStream
from tensorbus.bus._port import Heartbeat, StreamLimits
from tensorbus.bus._reader import NatsReader
from tensorbus.bus._requests import NoStreamError, Requests
from tensorbus.bus._streams import ensure_live, ensure_log, ensure_pages
from tensorbus.clock import Clock, Deadline, SystemClock
from tensorbus.errors import (
    DeadlineExceededError,
    InvalidArgumentError,
    TensorbusError,
    UnavailableError,
)
from tensorbus.events import MSG_ID, Subjects
from tensorbus.ids import IdSource, SystemIds

CONNECT_S: Final = 10.0
RECREATE_S: Final = 5.0
JETSTREAM_S: Final = 2.0


class NatsBus(NatsStream):
    """See :class:`tensorbus.bus.Bus`. Made by :meth:`connect`; belongs to the event loop that made it."""

    def __init__(self, link: Link, *, subjects: Subjects, clock: Clock, ids: IdSource, pending_max: int) -> None:
        super().__init__(Requests(link, appends_max=pending_max), subjects=subjects, name=subjects.log_stream)
        self._link = link
        self._pages = NatsStream(self._requests, subjects=subjects, name=subjects.pages_stream)
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
    def pages(self) -> NatsStream:
        return self._pages

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
        await ensure_pages(
            self._requests, self._subjects, limits, clock=self._clock, remembered_seq=0, deadline=deadline
        )
        await self._ensure_live(deadline)

    @property
    def max_payload(self) -> int:
        return max_payload(self._link)

    async def ask(self, subject: str, data: bytes, *, deadline: Deadline) -> bytes:
        return await ask(self._requests, subject, data, deadline=deadline)

    def answer(self, subject: str, handler: Handler, *, queue: str) -> AbstractAsyncContextManager[None]:
        return answer(self._link, subject, handler, queue=queue)

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
