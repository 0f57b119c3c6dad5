"""Following a series of versions: pushed, in order, nothing left out, across the loss of a worker."""

# ruff: noqa: SLF001 - a bus, its handles and their mirrors are one unit; what they share is nobody else's
from __future__ import annotations

import asyncio
import weakref
from collections import deque
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Final, Literal, Self, TypeAlias

from tensorbus.clock import Deadline
from tensorbus.errors import (
    CorruptError,
    DeadlineExceededError,
    InvalidArgumentError,
    NotFoundError,
    TensorbusError,
    UnavailableError,
)
from tensorbus.sdk._artifact import AsyncArtifact
from tensorbus.sdk._records import ArtifactInfo, parse, position_of

if TYPE_CHECKING:
    from tensorbus.sdk._async_bus import AsyncBus

Start: TypeAlias = Literal["latest", "earliest"] | int

WAITING_MAX: Final = 256
_STEP_S: Final = 10.0
_RETRY_S: Final = 0.1


class AsyncSubscription:
    """The versions of a series, each once and in order, as artifacts with ``.version``; an async iterator.

    A version that was destroyed before it could be handed out is passed over and counted in ``gone``; with
    ``coalesce`` so is one that a newer one overtook, counted in ``skipped``. The cursor is the number of the last
    version handed out: ``start=position + 1`` goes on there, in another process too.

    Attributes:
        name: The series.
        position: Number of the last version handed out or passed over; 0 before.
        gone: How many versions were gone before they could be handed out.
        skipped: How many were passed over for a newer one.
    """

    def __init__(
        self, bus: AsyncBus, name: str, start: Start, *, coalesce: bool = False, timeout: float | None = None
    ) -> None:
        self.name = name
        self.position = 0
        self.gone = 0
        self.skipped = 0
        self._bus = bus
        self._core = bus._core
        self._start = _checked_start(start)
        self._coalesce = coalesce
        self._timeout = timeout
        self._queue: deque[tuple[int, ArtifactInfo | None, int]] = deque()
        self._known = 0
        self._behind = True
        self._wake = asyncio.Event()
        self._begun = False
        self._closed = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> AsyncArtifact:
        if self._closed:
            raise StopAsyncIteration
        return await self.next()

    async def next(self, *, timeout: float | None = None) -> AsyncArtifact:
        """The next version, waited for.

        Raises:
            DeadlineExceededError: If none came within the time (``None``: that of the subscription, else for ever).
            InvalidArgumentError: If the subscription or its bus is closed.
        """
        if self._closed:
            raise InvalidArgumentError(f"the subscription to {self.name!r:.80} is closed")
        seconds = self._timeout if timeout is None else timeout
        deadline = self._core.begin(seconds, f"the next version of {self.name!r:.80}")
        if seconds is None:
            deadline = Deadline(None)
        while True:
            found = self._pop()
            if found is not None:
                return found
            self._core.check()
            await self._more(deadline)

    async def aclose(self) -> None:
        """End the subscription. Safe to repeat."""
        self._closed = True
        self._queue.clear()
        listeners = self._core.series.get(self.name)
        if listeners is not None:
            listeners.discard(self)
            if not listeners:
                self._core.series.pop(self.name, None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    # -- what the bus tells -------------------------------------------------------------------------------------------

    def on_series(self, data: Mapping[str, object]) -> None:
        """News of the series. What does not follow on what is known, or finds no room, is asked for again."""
        try:
            numbers = self._numbers(data)
        except TensorbusError:
            self._behind = True
            self._wake.set()
            raise
        fresh = [item for item in numbers if item[0] > self._known]
        if not numbers and self._queue:  # something ended, perhaps what waits here: all of that is asked for again
            self._queue.clear()
            self._known = self.position
            self._behind = True
        elif fresh and (fresh[0][0] != self._known + 1 or len(self._queue) + len(fresh) > WAITING_MAX):
            self._behind = True
        elif not self._behind:
            self._take(fresh)
        self._wake.set()

    def on_lost(self) -> None:
        """The connection went: what was published since has to be asked for."""
        self._behind = True
        self._wake.set()

    # -- inside -------------------------------------------------------------------------------------------------------

    def _pop(self) -> AsyncArtifact | None:
        while self._queue:
            number, info, position = self._queue.popleft()
            self.position = number
            if info is None:
                self.gone += 1
            elif self._coalesce and any(later is not None for _, later, _ in self._queue):
                self.skipped += 1
            else:
                return AsyncArtifact(self._bus, info, position, version=number)
        return None

    async def _more(self, deadline: Deadline) -> None:
        """Ask for what is new, or wait for news."""
        if not self._behind:
            self._wake.clear()
            async with deadline.scope():
                await self._wake.wait()
            return
        left = deadline.left()
        if left is not None and left <= 0:
            raise deadline.error()
        try:
            await self._ask(Deadline(_STEP_S if left is None else min(left, _STEP_S), what=deadline.what))
        except (UnavailableError, DeadlineExceededError):
            if left is not None and (deadline.left() or 0) <= _RETRY_S:
                raise
            await asyncio.sleep(_RETRY_S)  # a subscriber waits for the worker to come back

    async def _ask(self, deadline: Deadline) -> None:
        if not self._begun:
            await self._begin(deadline)
        self._core.series.setdefault(self.name, weakref.WeakSet()).add(self)
        self._behind = False  # before the question: a push that overtakes the answer says so again
        try:
            after = self._known
            reply = await self._core.ask(
                "series", {"name": self.name, "after": after, "follow": True}, deadline=deadline
            )
            if self._known < after:
                return  # a push that overtook the answer says that more has to be asked for
            fresh = [item for item in self._numbers(reply.data) if item[0] > self._known]
        except BaseException:
            self._behind = True
            raise
        if len(fresh) > WAITING_MAX and not self._coalesce:
            fresh, self._behind = fresh[:WAITING_MAX], True  # the rest is asked for once these are handed out
        self._take(fresh)

    async def _begin(self, deadline: Deadline) -> None:
        """Find out after which version to begin."""
        match self._start:
            case int():
                self._known = self._start - 1
            case "earliest":
                self._known = 0
            case _:
                self._known = await self._before_latest(deadline)
        self.position = self._known
        self._begun = True

    async def _before_latest(self, deadline: Deadline) -> int:
        try:
            reply = await self._core.ask("version", {"name": self.name, "number": None}, deadline=deadline)
            number = reply.data.get("version")
            return number - 1 if isinstance(number, int) else 0
        except NotFoundError:  # nothing there yet, or everything gone
            reply = await self._core.ask("series", {"name": self.name, "after": 0, "follow": False}, deadline=deadline)
            last = reply.data.get("last")
            numbers = self._numbers(reply.data)
            first = next((number for number, info, _ in numbers if info is not None), None)
            return first - 1 if first is not None else last if isinstance(last, int) else 0

    def _take(self, fresh: list[tuple[int, ArtifactInfo | None, int]]) -> None:
        if fresh:
            self._queue.extend(fresh)
            self._known = fresh[-1][0]

    def _numbers(self, data: Mapping[str, object]) -> list[tuple[int, ArtifactInfo | None, int]]:
        new, gone, position = data.get("new"), data.get("gone"), position_of(data)
        if not isinstance(new, list) or not isinstance(gone, list):
            raise CorruptError(f"what the worker says of the series {self.name!r:.80} is not valid")
        items: list[tuple[int, ArtifactInfo | None, int]] = [(int(number), None, position) for number in gone]
        items += [(int(number), parse(ArtifactInfo, info), position) for number, info in new]
        return sorted(items, key=lambda item: item[0])


def _checked_start(start: object) -> Start:
    if start == "latest" or start == "earliest":
        return "latest" if start == "latest" else "earliest"
    if isinstance(start, int) and not isinstance(start, bool) and start >= 1:
        return start
    raise InvalidArgumentError(
        f'start must be "latest", "earliest" or the number of a version, from 1 on, not {start!r:.80}'
    )
