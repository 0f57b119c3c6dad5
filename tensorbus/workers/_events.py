"""Readings of the log for callers: pulled in batches, so that a slow reader slows only itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict

from tensorbus.bus import Bus, Message, Reader
from tensorbus.clock import Deadline
from tensorbus.errors import NotFoundError, OutOfSpaceError, UnavailableError
from tensorbus.events import AnyRecorded, UnknownEvent, aggregate
from tensorbus.feeds import decode_one
from tensorbus.lifecycle import Artifact, Directory
from tensorbus.projections import Json
from tensorbus.workers._callers import Caller

CURSORS_MAX = 16


def event_info(recorded: AnyRecorded) -> Json:
    """A fact as callers see it."""
    event, headers = recorded.event, recorded.headers
    unknown = isinstance(event, UnknownEvent)
    body = {} if unknown else {name: value for name, value in asdict(event).items() if name != "type"}
    return {
        "seq": recorded.seq,
        "time_ns": recorded.time_ns,
        "type": event.type,
        "subject": recorded.subject,
        "author": headers.author,
        "incarnation": headers.incarnation,
        "principal": headers.principal,
        "cause": headers.cause,
        "traceparent": headers.traceparent,
        "event_id": headers.event_id,
        "expected": headers.expected,
        "body": body,
    }


class Cursor:
    """One reading. Only facts of the caller's tenant, and those of no tenant, come out."""

    def __init__(
        self, bus: Bus, *, tenant: str, after: int, until: int | None, subjects: frozenset[str] | None
    ) -> None:
        self._bus = bus
        self._tenant = tenant
        self._position = after
        self._until = until
        self._subjects = subjects
        self._stack = AsyncExitStack()
        self._batches: AsyncIterator[list[Message]] | None = None
        self._pending: asyncio.Task[list[Message]] | None = None
        self._left: list[Message] = []
        self._turn = asyncio.Lock()
        self._lost = False
        self.reader: Reader | None = None

    async def next(self, *, limit: int, wait_s: float) -> tuple[list[Json], bool]:
        """Up to ``limit`` facts, waiting up to ``wait_s`` seconds for the first, and whether this is all."""
        deadline = Deadline(wait_s)
        try:
            async with deadline.scope():
                await self._turn.acquire()
        except TimeoutError:
            return [], False  # another call on this reading waits for the same facts
        try:
            return await self._next(limit=limit, deadline=deadline)
        finally:
            self._turn.release()

    async def _next(self, *, limit: int, deadline: Deadline) -> tuple[list[Json], bool]:
        items: list[Json] = []
        self._check_not_lost()
        while len(items) < limit and not self._done:
            if not self._left and not await self._more(0.0 if items else deadline.left()):
                break
            take, self._left = self._left[: limit - len(items)], self._left[limit - len(items) :]
            self._position = take[-1].seq
            items += [event_info(recorded) for recorded in self._wanted(take)]
        return items, self._done

    def lose(self) -> None:
        """The log lost its tail: what follows there is not what followed what was read."""
        self._lost = True
        if self._pending is not None:
            self._pending.cancel()

    def _check_not_lost(self) -> None:
        if self._lost:
            text = f"the log lost its tail, and this reading was at {self._position}: begin a new one"
            raise UnavailableError(text, position={"TB": self._position})

    @property
    def _done(self) -> bool:
        return self._until is not None and self._position >= self._until and not self._left

    async def _more(self, wait_s: float | None) -> bool:
        if self._batches is None:
            facts = self._bus.subjects.facts
            self.reader = await self._stack.enter_async_context(self._bus.read(facts, after=self._position))
            self._batches = aiter(self.reader)
        if self._pending is None:
            self._pending = asyncio.ensure_future(anext(self._batches))
        done, _ = await asyncio.wait([self._pending], timeout=wait_s)
        if not done:
            return False
        ended, self._pending = self._pending, None
        self._check_not_lost()
        self._left = ended.result()
        return True

    def _wanted(self, messages: Sequence[Message]) -> list[AnyRecorded]:
        out = []
        for message in messages:
            if self._subjects is not None and ".".join(message.subject.split(".")[:-1]) not in self._subjects:
                continue
            recorded = decode_one(message)
            if getattr(recorded.event, "tenant", self._tenant) == self._tenant:
                out.append(recorded)
        return out

    async def close(self) -> None:
        if self._pending is not None:
            self._pending.cancel()
            await asyncio.gather(self._pending, return_exceptions=True)
        await self._stack.aclose()


def subjects_about(bus: Bus, state: Directory, record: Artifact) -> frozenset[str]:
    """The subjects, without their author, on which an artifact's own history lies."""
    tenant = record.tenant
    about = [aggregate("artifact", tenant, record.artifact), aggregate("replica", tenant, record.artifact)]
    about += [aggregate("key", tenant, key) for key in record.keys]
    about += [aggregate("key", tenant, record.key)] if record.key else []
    about += [aggregate("series", tenant, name) for name, _ in record.versions]
    about += [aggregate("clease", tenant, lease) for lease in record.leases]
    return frozenset(bus.subjects.fence(one).removesuffix(".*") for one in about)


def open_cursor(caller: Caller, cursor: Cursor) -> int:
    """Give the caller's connection a cursor.

    Raises:
        OutOfSpaceError: If it has 16 open.
    """
    if len(caller.cursors) >= CURSORS_MAX:
        raise OutOfSpaceError(f"this connection reads the log {CURSORS_MAX} times already; close one")
    number = max(caller.cursors, default=0) + 1
    caller.cursors[number] = cursor
    return number


def find_cursor(caller: Caller, number: int) -> Cursor:
    cursor = caller.cursors.get(number)
    if cursor is None:
        raise NotFoundError(f"there is no cursor {number} on this connection", cursor=number)
    return cursor
