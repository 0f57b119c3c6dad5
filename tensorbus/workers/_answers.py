"""Answers questions about present and past from the global store: see ``docs/spec/query.md``.

An answer is a stream in Arrow's IPC format, handed out in pieces: the first with the reply, the others when asked for,
so that who reads slowly holds nothing here but one cursor with its own limits.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tensorbus.clock import NS_PER_S, Deadline
from tensorbus.errors import ExpiredError, InvalidArgumentError, OutOfSpaceError, TensorbusError, UnavailableError
from tensorbus.projections import describe
from tensorbus.workers._answer_rows import Rows, diff_rows, fact_rows, pieces, state_rows, status_rows, table_rows
from tensorbus.workers._core import Core
from tensorbus.workers._projector import Projector

if TYPE_CHECKING:
    from tensorbus.projections import TimeTravel

log = logging.getLogger("tensorbus.workers")

PIECE_BYTES: Final = 512 * 1024
IDLE_S: Final = 30.0
CURSORS_MAX: Final = 64
THREADS: Final = 4
ROWS_MAX: Final = 1_000_000
SECONDS_MAX: Final = 60.0
BYTES_MAX: Final = 256 << 20
QUESTION_S: Final = 60.0
READY_S: Final = 0.2
"""How often to look whether this store may answer for all of them."""
AGAIN_S: Final = 10.0

T = TypeVar("T")
Count = Annotated[int, Field(ge=0)]


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Moment(_Strict):
    """A position of the log, or a time."""

    seq: Count | None = None
    time_ns: int | None = None


class Limits(_Strict):
    """What an answer may take; the store's own limits hold as well."""

    rows: Count | None = None
    seconds: Annotated[float, Field(gt=0)] | None = None
    nbytes: Annotated[Count | None, Field(alias="bytes")] = None


class Question(_Strict):
    """One question; which fields count depends on ``op``."""

    op: Literal["query", "state", "diff", "history", "why", "tables", "status", "next", "close"]
    tenant: str = "default"
    at_least: Count | None = None
    sql: str | None = None
    params: list[Any] = []
    limits: Limits = Limits()
    at: Moment | None = None
    start: Annotated[Moment | None, Field(alias="from")] = None
    end: Annotated[Moment | None, Field(alias="to")] = None
    kind: Literal["artifact", "key", "series", "worker"] = "artifact"
    name: str = ""
    limit: Annotated[int, Field(ge=1)] | None = None
    cursor: str | None = None
    piece: Count = 0


@dataclass(slots=True)
class _Cursor:
    """The rest of an answer, and its last piece, which may be asked for again."""

    rows: Rows
    pieces: Iterator[tuple[bytes, int]]
    used_ns: int
    number: int = -1
    last: bytes = b""
    count: int = 0
    done: bool = False
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)


class Answers:
    """Serves one store's answers. Use :meth:`running`."""

    def __init__(self, core: Core, projector: Projector) -> None:
        self._core = core
        self._projector = projector
        self._cursors: dict[str, _Cursor] = {}
        # Two pools: a question that waits for its turn at the database must not keep those back whose turn it is.
        self._opening = ThreadPoolExecutor(THREADS, thread_name_prefix="question")
        self._reading = ThreadPoolExecutor(THREADS, thread_name_prefix="answer")

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Answer on the bus for as long as the context is open.

        Raises:
            DeniedError: If the bus does not let this worker answer.
        """
        bus, me = self._core.bus, self._core.me.worker
        try:
            async with AsyncExitStack() as stack:
                # What cannot be done later should be known now. Who asks in between hears of a store that is not ready.
                async with bus.answer(bus.subjects.rpc("query"), self.handle, queue="store"):
                    pass
                shared = asyncio.create_task(self._answer_for_all(), name="answer for all stores")
                stack.push_async_callback(_cancelled, shared)
                own = bus.subjects.rpc(f"store.{me}")
                await stack.enter_async_context(bus.answer(own, self.handle, queue=f"store-{me}"))
                idle = asyncio.create_task(self._look_after(), name="idle cursors")
                stack.push_async_callback(_cancelled, idle)
                yield
        finally:
            for name in list(self._cursors):
                self._close(name)
            for threads in (self._opening, self._reading):
                threads.shutdown(wait=False, cancel_futures=True)

    async def _answer_for_all(self) -> None:
        """Answer what is asked of any store, as long as this one may: another one answers meanwhile."""
        bus = self._core.bus
        while True:
            try:
                if self._projector.ready:
                    async with bus.answer(bus.subjects.rpc("query"), self.handle, queue="store"):
                        while self._projector.ready:
                            await asyncio.sleep(READY_S)
            except TensorbusError as error:
                log.error("this store answers only what is asked of it by name: reason=%s", error)
                await asyncio.sleep(AGAIN_S)
            await asyncio.sleep(READY_S)

    async def handle(self, data: bytes) -> bytes:
        """One question to its answer; see ``docs/spec/query.md``."""
        try:
            asked = Question.model_validate_json(data)
        except ValidationError as exc:
            raise InvalidArgumentError(f"the question cannot be read: {exc.errors()[0]['msg']}") from exc
        if asked.op == "close":
            self._close(asked.cursor or "")
            return b"{}\n"
        if asked.op == "next":
            return await self._next(asked)
        return await self._open(asked)

    # -- cursors -------------------------------------------------------------------------------------------------------

    async def _open(self, asked: Question) -> bytes:
        if len(self._cursors) >= CURSORS_MAX:
            raise OutOfSpaceError(f"{CURSORS_MAX} answers are being read from this store already")
        deadline = Deadline(asked.limits.seconds or QUESTION_S, what="the question")
        self._projector.require_ready()
        moments = (moment.seq for moment in (asked.at, asked.start, asked.end) if moment is not None)
        for seq in (asked.at_least, *moments):
            await self._reach(seq, deadline)
        rows = await self._in_thread(self._opening, lambda: self._rows(asked))
        cursor = _Cursor(rows, pieces(rows, nbytes_max=PIECE_BYTES), self._core.clock.now_ns())
        name = self._core.ids.hex(8)
        self._cursors[name] = cursor
        try:
            return await self._step(name, cursor)
        except BaseException:
            self._close(name)
            raise

    async def _next(self, asked: Question) -> bytes:
        cursor = self._cursors.get(asked.cursor or "")
        if cursor is None:
            raise ExpiredError(f"there is no answer {asked.cursor} here, or nobody read on for {IDLE_S:g} s")
        async with cursor.turn:
            cursor.used_ns = self._core.clock.now_ns()
            if asked.piece == cursor.number:
                return self._reply(asked.cursor or "", cursor)
            if asked.piece != cursor.number + 1 or cursor.done:
                raise InvalidArgumentError(f"the next piece is {cursor.number + 1}, not {asked.piece}")
            return await self._step(asked.cursor or "", cursor)

    async def _step(self, name: str, cursor: _Cursor) -> bytes:
        """Take the next piece; look one further, so that the last one says that it is."""
        piece = await self._in_thread(self._reading, lambda: next(cursor.pieces, None))
        cursor.last, cursor.count = piece if piece is not None else (b"", cursor.count)
        cursor.number += 1
        cursor.done = piece is None or cursor.rows.ended
        if cursor.done:
            cursor.rows.close()
        return self._reply(name, cursor)

    def _reply(self, name: str, cursor: _Cursor) -> bytes:
        if cursor.done and cursor.number == 0:
            self._close(name)  # nothing can be asked for again: the question itself is repeated
        line = {
            "store": self._core.me.worker,
            "cursor": None if cursor.done and cursor.number == 0 else name,
            "piece": cursor.number,
            "position": cursor.rows.position,
            "first": cursor.rows.first,
            "rows": cursor.count,
            "truncated": cursor.rows.truncated,
            "done": cursor.done,
        }
        return json.dumps(line).encode() + b"\n" + cursor.last

    def _close(self, name: str) -> None:
        cursor = self._cursors.pop(name, None)
        if cursor is not None:
            cursor.rows.close()

    def close_idle(self) -> None:
        """Close the answers that nobody has read on for 30 seconds."""
        oldest = self._core.clock.now_ns() - int(IDLE_S * NS_PER_S)
        for name in [name for name, cursor in self._cursors.items() if cursor.used_ns < oldest]:
            self._close(name)

    async def _look_after(self) -> None:
        while True:
            await asyncio.sleep(IDLE_S / 4)
            self.close_idle()

    # -- what is asked -------------------------------------------------------------------------------------------------

    async def _reach(self, at_least: int | None, deadline: Deadline) -> None:
        if at_least is None or self._projector.position >= at_least:
            return
        last = await self._core.bus.last_seq(deadline=deadline)
        if at_least > last:
            first, _ = await self._in_thread(self._opening, self._travel().bounds)
            what = f"position {at_least} is beyond the log, whose history goes from {first} to {last}"
            raise InvalidArgumentError(what, first=first, last=last)
        await self._projector.reached(at_least, deadline=deadline)

    def _rows(self, asked: Question) -> Rows:
        """In a thread: the rows of an answer."""
        store = self._projector.store
        limits = (
            min(ROWS_MAX, ROWS_MAX if asked.limits.rows is None else asked.limits.rows),
            min(SECONDS_MAX, asked.limits.seconds or SECONDS_MAX),
            min(BYTES_MAX, BYTES_MAX if asked.limits.nbytes is None else asked.limits.nbytes),
        )
        match asked.op:
            case "query":
                if asked.sql is None:
                    raise InvalidArgumentError("a query needs `sql`")
                return table_rows(store, asked.sql, asked.params, limits)
            case "state":
                return state_rows(store, self._moment(asked.at), asked.tenant, limits)
            case "diff":
                return diff_rows(store, self._moment(asked.start), self._moment(asked.end), asked.tenant, limits)
            case "history" | "why":
                return fact_rows(store, asked.op, asked.kind, asked.tenant, asked.name, asked.limit)
            case "status":
                return status_rows(store, limits)
            case "tables":
                return Rows.of_dicts(store, ("table", "column", "type", "text"), describe())
            case _:
                raise InvalidArgumentError(f"there is no question {asked.op!r}")

    def _moment(self, moment: Moment | None) -> int | None:
        if moment is None or (moment.seq is None and moment.time_ns is None):
            return None
        if moment.seq is None:
            assert moment.time_ns is not None
            return self._travel().seq_at(moment.time_ns)
        return min(moment.seq, self._projector.position)  # it was waited for: what lies between is no fact

    def _travel(self) -> TimeTravel:
        from tensorbus.projections import TimeTravel

        return TimeTravel(self._projector.store)

    async def _in_thread(self, threads: ThreadPoolExecutor, work: Callable[[], T]) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(threads, work)
        except RuntimeError as exc:  # shut down meanwhile
            raise UnavailableError(f"store {self._core.me.worker} is leaving") from exc


async def _cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
