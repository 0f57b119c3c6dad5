"""The callers of a worker: one session per connection, what it owns, and what it is told unasked."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tensorbus.errors import InvalidArgumentError, TensorbusError
from tensorbus.ids import LeaseId
from tensorbus.transport import PeerSession
from tensorbus.workers._core import start_in

if TYPE_CHECKING:
    from tensorbus.workers._events import Cursor
    from tensorbus.workers._query_ops import Relayed

log = logging.getLogger("tensorbus.workers")

PUSHES_WAITING_MAX = 4096
FOLLOWED_MAX = 200_000


@dataclass(eq=False, slots=True)
class Caller:
    """One connection and what ends with it.

    Attributes:
        segments: Segments it is filling, with their generations.
        mapped: Segments it still has mapped writable.
        leases: Leases on its own registered memory.
        follows: Names it is told of, each with the state it was told last.
    """

    session: PeerSession
    tenant: str = ""
    pid: int = 0
    segments: dict[int, int] = field(default_factory=dict)
    mapped: dict[int, None] = field(default_factory=dict)
    leases: dict[LeaseId, None] = field(default_factory=dict)
    follows: dict[tuple[str, str], None] = field(default_factory=dict)
    series: dict[str, int] = field(default_factory=dict)
    cursors: dict[int, Cursor] = field(default_factory=dict)
    queries: dict[int, Relayed | None] = field(default_factory=dict)
    pushes: asyncio.Queue[tuple[str, dict[str, object]]] = field(
        default_factory=lambda: asyncio.Queue(PUSHES_WAITING_MAX)
    )

    @property
    def id(self) -> str:
        return self.session.id

    def require_hello(self) -> None:
        if not self.tenant:
            raise InvalidArgumentError("the first call of a connection is hello")

    def push(self, topic: str, data: dict[str, object]) -> None:
        """Queue something to say. Who reads too slowly for the queue is cut off, and asks again when it is back."""
        try:
            self.pushes.put_nowait((topic, data))
        except asyncio.QueueFull:
            log.warning("caller too slow, cut off: session=%s pid=%d", self.id, self.pid)
            self.session.close()

    async def push_all(self) -> None:
        """Say what is queued, in order, until cancelled."""
        while True:
            topic, data = await self.pushes.get()
            await self.session.push(topic, data)


class Callers:
    """All callers of one worker."""

    def __init__(self, group: asyncio.TaskGroup) -> None:
        self._group = group
        self._callers: dict[str, Caller] = {}
        self._pushers: dict[str, asyncio.Task[None]] = {}
        self._on_gone: list[Callable[[Caller], None]] = []

    def __len__(self) -> int:
        return len(self._callers)

    def all(self) -> list[Caller]:
        return list(self._callers.values())

    def tasks(self) -> list[asyncio.Task[None]]:
        """The tasks that push to callers."""
        return list(self._pushers.values())

    def on_gone(self, callback: Callable[[Caller], None]) -> None:
        """Have ``callback`` called on the loop, without blocking, when a caller's connection has ended."""
        self._on_gone.append(callback)

    def opened(self, session: PeerSession) -> None:
        """Hook of the server: a connection was made."""
        caller = Caller(session)
        self._callers[session.id] = caller
        session.on_close(lambda: self._gone(caller))
        pusher = start_in(self._group, self._push(caller), name=f"push {session.id}")
        if pusher is None:
            session.close()
        else:
            self._pushers[session.id] = pusher

    def of(self, session: PeerSession) -> Caller:
        return self._callers[session.id]

    async def _push(self, caller: Caller) -> None:
        try:
            await caller.push_all()
        except TensorbusError as error:
            log.debug("pushes to %s end: %s", caller.id, error)
            caller.session.close()

    def _gone(self, caller: Caller) -> None:
        self._callers.pop(caller.id, None)
        pusher = self._pushers.pop(caller.id, None)
        if pusher is not None:
            pusher.cancel()
        for callback in self._on_gone:
            callback(caller)
