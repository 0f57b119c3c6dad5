"""Reading the log: each fact in order, from any position, to the end or on and on."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Final, Self

from tensorbus.clock import Deadline
from tensorbus.errors import CorruptError, DeadlineExceededError, NotFoundError, UnavailableError
from tensorbus.ids import VIEW_PREFIX
from tensorbus.sdk._explained import explained
from tensorbus.sdk._link import ConnectionLostError
from tensorbus.sdk._records import LOG_STREAM, EventRecord, Position, parse

if TYPE_CHECKING:
    from tensorbus.sdk._core import Core

_BATCH: Final = 500
_WAIT_S: Final = 10.0
_RETRY_S: Final = 0.2


class AsyncEvents:
    """The facts on the log, oldest first: an async iterator. Survives the loss of its worker.

    Args:
        core: The bus's inside.
        since: Facts after this sequence; from the first on when 0.
        follow: Whether to wait for more at the end.
        artifact: Only facts about the artifact of this id.
        named: The same by a key or id, to be looked up when the reading begins.
        timeout: Seconds that one step may take; with ``follow`` ``None`` waits for ever.
    """

    def __init__(
        self,
        core: Core,
        *,
        since: int = 0,
        follow: bool = False,
        artifact: str | None = None,
        named: str | None = None,
        timeout: float | None = None,
    ) -> None:
        self._core = core
        self._seq = since
        self._follow = follow
        self._artifact = artifact
        self._named = named
        self._timeout = timeout
        self._cursor: tuple[int, int] | None = None
        self._items: deque[EventRecord] = deque()
        self._done = False

    @property
    def position(self) -> Position:
        """Sequence of the last fact handed out; give it as ``since`` to go on from there."""
        return {LOG_STREAM: self._seq}

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> EventRecord:
        deadline = self._core.begin(self._timeout, "the next event")
        if self._follow and self._timeout is None:
            deadline = Deadline(None)
        while not self._items:
            if self._done:
                await self.aclose()
                raise StopAsyncIteration
            await self._more(deadline)
        event = self._items.popleft()
        self._seq = event.seq
        return event

    async def aclose(self) -> None:
        """End the reading. Safe to repeat."""
        self._done = True
        cursor, self._cursor = self._cursor, None
        if cursor is not None and cursor[1] == self._core.link.epoch:
            self._core.tidy("events_close", {"cursor": cursor[0]})

    def __del__(self) -> None:
        cursor, core = getattr(self, "_cursor", None), self._core
        if cursor is not None and cursor[1] == core.link.epoch:
            core.later(lambda: core.tidy("events_close", {"cursor": cursor[0]}))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def _more(self, deadline: Deadline) -> None:
        left = deadline.left()
        if left is not None and left <= 0:
            raise deadline.error()
        try:
            await self._step(Deadline(2 * _WAIT_S if left is None else left, what=deadline.what))
        except ConnectionLostError:
            self._cursor = None
        except (UnavailableError, DeadlineExceededError):
            if left is not None:
                raise
            self._cursor = None
            await asyncio.sleep(_RETRY_S)  # who follows waits for the worker to come back

    async def _step(self, deadline: Deadline) -> None:
        if self._named is not None:
            self._artifact, self._named = await self._look_up(self._named, deadline), None
        if self._cursor is None:
            args = {"after": self._seq, "artifact": self._artifact, "follow": self._follow}
            reply = await self._core.ask("events_open", args, deadline=deadline)
            number = reply.data.get("cursor")
            if not isinstance(number, int):
                raise CorruptError("the worker's answer has no cursor")
            self._cursor = (number, self._core.link.epoch)
        number, epoch = self._cursor
        left = deadline.left() or 0.0
        ask: dict[str, object] = {"cursor": number, "wait_s": min(_WAIT_S, left / 2), "limit": _BATCH}
        try:
            reply = await self._core.ask("events_next", ask, deadline=deadline, repeat=False, epoch=epoch)
        except NotFoundError:  # the connection was made again, and the cursor went with the old one
            self._cursor = None
            return
        items = reply.data.get("items")
        self._items.extend(parse(EventRecord, item) for item in (items if isinstance(items, list) else ()))
        self._done = reply.data.get("done") is True

    async def _look_up(self, name: str, deadline: Deadline) -> str:
        """The id behind a name. What is nothing now may be the id of an artifact that has ended, and has its facts."""
        try:
            return (await self._core.resolve(("any", name), at_least=None, deadline=deadline)).info.artifact
        except NotFoundError as exc:
            if name.startswith(VIEW_PREFIX):
                raise explained(exc, name) from exc
            return name


__all__ = ["AsyncEvents", "EventRecord"]
