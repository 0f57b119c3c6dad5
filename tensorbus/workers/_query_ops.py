"""Queries of callers, relayed to a store: ``query_open``, ``query_next``, ``query_close`` (``docs/spec/query.md``)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from pydantic import Field

from tensorbus.clock import Deadline
from tensorbus.errors import (
    CorruptError,
    DeniedError,
    ExpiredError,
    InvalidArgumentError,
    OutOfSpaceError,
    TensorbusError,
    UnavailableError,
)
from tensorbus.ids import WorkerId
from tensorbus.transport import Reply, Request
from tensorbus.workers._core import Core
from tensorbus.workers._requests import Ask, Position, parse

if TYPE_CHECKING:
    from tensorbus.workers._callers import Caller

ROLE: Final = "store"
ANY_STORE: Final = "query"
CURSORS_MAX: Final = 16
PLACE_S: Final = 2.0
"""How long a question waits for a place among its connection's answers, most of which are read at once."""
LOOK_S: Final = 0.02
CLOSE_S: Final = 2.0
PATIENCE_S: Final = 5.0
"""How long to wait for a store that runs and may not answer yet."""
AGAIN_S: Final = 0.2
_LINE_BYTES_MAX: Final = 64 * 1024
_WHAT_ROWS: Final = ("query", "state", "diff")


class Moment(Ask):
    """A point of the log: a sequence, or a stream time in nanoseconds since the Unix epoch. Exactly one is given."""

    seq: Position | None = None
    time_ns: Annotated[int, Field(ge=0, lt=2**63)] | None = None


class QueryOpen(Ask):
    what: Literal["query", "state", "diff", "history", "why", "tables", "status"]
    sql: str | None = None
    params: list[Any] = Field(default_factory=list, max_length=1000)
    rows: int | None = Field(None, ge=0, lt=2**63)
    at_least: Position | None = None
    at: Moment | None = None
    begin: Moment | None = Field(None, alias="from")
    to: Moment | None = None
    kind: Literal["artifact", "key", "series", "worker"] | None = None
    name: str | None = Field(None, min_length=1, max_length=4096)
    limit: int | None = Field(None, ge=1, lt=2**31)
    store: str | None = Field(None, pattern=r"^[A-Za-z0-9_-]{1,64}$")


class QueryNext(Ask):
    cursor: int
    piece: int = Field(ge=0)


class QueryClose(Ask):
    cursor: int


@dataclass(frozen=True, slots=True)
class Relayed:
    """The rest of an answer: which store has it, and under what name."""

    store: str
    cursor: object


class QueryOps:
    """Passes questions on to a store, and its answers back piece by piece, for the caller's own tenant.

    Args:
        gateway_sql: Whether callers over TCP may send SQL, which sees every tenant.
    """

    def __init__(self, core: Core, *, gateway_sql: bool) -> None:
        self._core = core
        self._gateway_sql = gateway_sql
        self._numbers = count(1)

    def table(self) -> dict[str, Any]:
        return {"query_open": self.open, "query_next": self.next, "query_close": self.close}

    async def open(self, caller: Caller, request: Request) -> Reply:
        asked = parse(QueryOpen, request.args, op="query_open")
        if asked.what == "query" and not self._gateway_sql and caller.session.info.uid is None:
            raise DeniedError(
                "SQL sees every tenant and is not allowed through this gateway: ask on a worker's host, or have the "
                "operator set gateway_sql; state, diff, history and why are allowed"
            )
        await self._place(caller, request.deadline)
        question = _question(asked, caller.tenant, request.deadline)
        number = next(self._numbers)
        caller.queries[number] = None  # its place is taken while the store works
        try:
            name = ANY_STORE if asked.store is None else f"store.{asked.store}"
            line, body = await self._ask(name, question, request.deadline)
            goes_on = not line["done"]
            if goes_on:
                caller.queries[number] = Relayed(str(line["store"]), line["cursor"])
        finally:
            if caller.queries.get(number) is None:
                caller.queries.pop(number, None)
        cursor = number if goes_on else None
        return Reply({**line, "cursor": cursor}, body=body, undo=lambda: self._drop(caller, number))

    async def _place(self, caller: Caller, deadline: Deadline) -> None:
        """Wait a little for one of the answers that the connection reads to come to its end.

        Raises:
            OutOfSpaceError: If none does.
        """
        left_s = deadline.left()
        patience = Deadline(PLACE_S if left_s is None else min(PLACE_S, left_s))
        while len(caller.queries) >= CURSORS_MAX:
            if not patience.left():
                raise OutOfSpaceError(f"this connection reads {CURSORS_MAX} answers already; close one")
            await asyncio.sleep(LOOK_S)

    async def next(self, caller: Caller, request: Request) -> Reply:
        asked = parse(QueryNext, request.args, op="query_next")
        kept = caller.queries.get(asked.cursor)
        if kept is None:
            raise ExpiredError(f"there is no answer {asked.cursor} on this connection", cursor=asked.cursor)
        question = {"op": "next", "cursor": kept.cursor, "piece": asked.piece}
        line, body = await self._ask(f"store.{kept.store}", question, request.deadline)
        # It stays also when this was the last piece, which may have to be asked for again; the caller closes it.
        return Reply({**line, "cursor": asked.cursor}, body=body)

    async def close(self, caller: Caller, request: Request) -> Reply:
        asked = parse(QueryClose, request.args, op="query_close")
        self._drop(caller, asked.cursor)
        return Reply({})

    def gone(self, caller: Caller) -> None:
        """The caller's connection has ended: so do its cursors."""
        for number in list(caller.queries):
            self._drop(caller, number)

    def _drop(self, caller: Caller, number: int) -> None:
        kept = caller.queries.pop(number, None)
        if kept is not None:
            self._core.spawn(self._close(kept), name="close query")

    async def _close(self, kept: Relayed) -> None:
        question = json.dumps({"op": "close", "cursor": kept.cursor}).encode()
        subject = self._core.bus.subjects.rpc(f"store.{kept.store}")
        try:
            await self._core.bus.ask(subject, question, deadline=Deadline(CLOSE_S, what="closing a query"))
        except TensorbusError:
            return  # for order's sake only: the store closes what nobody asks for by itself

    async def _ask(
        self, name: str, question: Mapping[str, object], deadline: Deadline
    ) -> tuple[dict[str, object], memoryview]:
        data = json.dumps(question).encode()
        left = deadline.left()
        patience = Deadline(PATIENCE_S if left is None else min(PATIENCE_S, left))
        while True:
            try:
                return _parts(await self._core.bus.ask(self._core.bus.subjects.rpc(name), data, deadline=deadline))
            except UnavailableError as exc:
                problem = await self._explained(exc, name, deadline)
            if name != ANY_STORE or not self._stores() or not patience.left():
                raise problem
            await asyncio.sleep(AGAIN_S)  # it may have started just now, and read history still

    def _stores(self) -> list[WorkerId]:
        return [session.worker for session in self._core.state.live_sessions() if ROLE in session.roles]

    async def _explained(self, exc: UnavailableError, name: str, deadline: Deadline) -> UnavailableError:
        """Why nobody answers. A store that may not answer for all says why when it is asked by itself."""
        stores = self._stores()
        if not stores:
            return UnavailableError(
                "no store runs, and only a store answers queries: `tensorbus up` starts one where "
                "`pip install 'tensorbus[store]'` was done, as does `tensorbus worker --roles store`"
            )
        asked = name.removeprefix("store.")
        if name != ANY_STORE and asked not in stores:
            return UnavailableError(f"store {asked} does not run (there are: {', '.join(stores)})", store=asked)
        if name == ANY_STORE:
            try:
                subject = self._core.bus.subjects.rpc(f"store.{stores[0]}")
                await self._core.bus.ask(subject, b'{"op": "tables"}', deadline=deadline)
            except UnavailableError as said:
                return said
        return exc


def _question(asked: QueryOpen, tenant: str, deadline: Deadline) -> dict[str, object]:
    """The question for the store.

    Raises:
        InvalidArgumentError: If a field is missing.
    """
    question: dict[str, object] = {"op": asked.what, "tenant": tenant, "at_least": asked.at_least}
    if asked.what in _WHAT_ROWS:
        question["limits"] = {"rows": asked.rows, "seconds": deadline.left(), "bytes": None}
    match asked.what:
        case "query":
            question |= {"sql": _given(asked.sql, asked.what, "sql"), "params": asked.params}
        case "state":
            question |= {"at": _moment(asked.at)}
        case "diff":
            question |= {"from": _moment(asked.begin), "to": _moment(asked.to)}
        case "history" | "why":
            name = _given(asked.name, asked.what, "name")
            kind = _given(asked.kind, asked.what, "kind")
            question |= {"kind": kind, "name": name, "limit": asked.limit}
        case "tables" | "status":
            pass
    return question


def _given(value: str | None, what: str, field: str) -> str:
    if value is None:
        raise InvalidArgumentError(f"query_open: {what} needs {field}", argument=field)
    return value


def _moment(at: Moment | None) -> dict[str, int] | None:
    if at is None:
        return None
    if (at.seq is None) == (at.time_ns is None):
        raise InvalidArgumentError("query_open: a moment is a sequence or a time, one of them")
    return at.model_dump(exclude_none=True)


def _parts(answer: bytes) -> tuple[dict[str, object], memoryview]:
    """The line and the body of a store's answer.

    Raises:
        CorruptError: If it is none.
    """
    end = answer.find(b"\n", 0, _LINE_BYTES_MAX)
    try:
        line = json.loads(answer[: max(end, 0)])
    except ValueError as exc:
        raise CorruptError("the store's answer does not begin with a line of JSON") from exc
    if not isinstance(line, dict) or not isinstance(line.get("store"), str) or type(line.get("done")) is not bool:
        raise CorruptError("the store's answer does not say which store gave it, and whether it is done")
    if not line["done"] and not isinstance(line.get("cursor"), str | int):
        raise CorruptError("the store's answer goes on and has no cursor")
    return line, memoryview(answer)[end + 1 :]
