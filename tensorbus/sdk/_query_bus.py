"""What a bus says of the past and of everything at once: SQL, states, differences, histories. Parts of the buses."""

# ruff: noqa: SLF001 - a bus and its results are one unit; what they share is nobody else's
from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Iterator
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

from tensorbus.errors import InvalidArgumentError, NotFoundError, OutOfSpaceError
from tensorbus.ids import CONTENT_PREFIX, RANDOM_PREFIX, VIEW_PREFIX
from tensorbus.sdk._artifact import AsyncArtifact
from tensorbus.sdk._names import check_ref
from tensorbus.sdk._plain import a_type
from tensorbus.sdk._query import AsyncQueryResult, ask, to_dicts, to_pandas
from tensorbus.sdk._query_records import (
    KINDS,
    FactRecord,
    Kind,
    Moment,
    State,
    StateChange,
    change_of,
    fact_of,
    moment,
    parameters,
    state_of,
)
from tensorbus.sdk._records import Position, at_least_seq

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

    from tensorbus.sdk._core import Core
    from tensorbus.sdk._handles import Artifact

T = TypeVar("T")
ROWS: Final = 100_000
_ROWS_MAX: Final = 2**63 - 1


class AsyncQueries:
    """The part of :class:`AsyncBus` that asks stores. All of it needs a store that runs and, here, pyarrow."""

    _core: Core

    async def query(
        self,
        sql: str,
        *params: object,
        rows: int | None = ROWS,
        at_least: Position | int | None = None,
        store: str | None = None,
        timeout: float | None = None,
    ) -> AsyncQueryResult:
        """Ask a store in SQL (DuckDB's), read-only, over present state and history of every tenant.

        ``tensorbus query --tables`` and ``docs/store.md`` list the tables.

        Args:
            sql: One statement; ``?`` stands for a parameter.
            params: A str, int, float, bool or None for each ``?``.
            rows: How many rows to give at most; ``None`` leaves it to the store's own limits.
            at_least: A position that the store must have folded, as mutations give it.
            store: The store to ask; any when ``None``.
            timeout: Seconds until the first rows, and for each further piece; the bus's default when ``None``. The
                statement itself is given up after the first ``timeout``, also if its rows are still being read.

        Returns:
            The rows: ``await result.dicts()``, ``.arrow()`` or ``.pandas()``, or ``async for batch in
            result.batches()``.

        Raises:
            InvalidArgumentError: If the SQL is wrong or would change something; if pyarrow is not installed.
            UnavailableError: If no store runs; it says how to start one.
            DeniedError: If the bus speaks to a gateway that takes no SQL.
            DeadlineExceededError, OutOfSpaceError: If the statement takes more time or memory than there is.
        """
        deadline = self._core.begin(timeout, "query")
        args = {
            "sql": _check_sql(sql),
            "params": parameters(params),
            "rows": _check_rows(rows),
            "at_least": at_least_seq(at_least),
            "store": store,
        }
        return await ask(self._core, "query", args, deadline=deadline, timeout=timeout)

    async def state(
        self,
        at: Moment | None = None,
        *,
        at_least: Position | int | None = None,
        timeout: float | None = None,
    ) -> State:
        """What was where at a moment, for the bus's tenant.

        Args:
            at: A sequence (``int``, or a position that a mutation gave), a time (seconds since 1970 as ``float``, a
                ``datetime`` with its zone, ISO text); the store's newest position when ``None``.
            at_least: A position that the store must have folded.
            timeout: Seconds, for each piece of the answer; the bus's default when ``None``.

        Raises:
            NotFoundError: If the history does not reach back so far; ``details["first"]`` is where it begins.
            InvalidArgumentError: If the log has not come to that moment; UnavailableError: If no store runs.
            OutOfSpaceError: If it has more rows than a store gives at once; :meth:`query` can ask for parts of it.
        """
        deadline = self._core.begin(timeout, "state")
        args = {"at": moment(at), "at_least": at_least_seq(at_least)}
        async with await ask(self._core, "state", args, deadline=deadline, timeout=timeout) as found:
            table = await _whole(found)
            return await asyncio.to_thread(
                lambda: state_of(to_dicts(table), position=found.position, first=found.first)
            )

    async def diff(
        self,
        from_: Moment,
        to: Moment | None = None,
        *,
        at_least: Position | int | None = None,
        timeout: float | None = None,
    ) -> list[StateChange]:
        """What differs between two moments, for the bus's tenant; arguments and errors as for :meth:`state`."""
        deadline = self._core.begin(timeout, "diff")
        if from_ is None:
            raise InvalidArgumentError("diff() needs the moment to begin with")
        args = {"from": moment(from_, "from_"), "to": moment(to, "to"), "at_least": at_least_seq(at_least)}
        async with await ask(self._core, "diff", args, deadline=deadline, timeout=timeout) as found:
            table = await _whole(found)
            return await asyncio.to_thread(lambda: [change_of(row) for row in to_dicts(table)])

    async def history(
        self,
        ref: AsyncArtifact | str,
        *,
        kind: Kind | None = None,
        limit: int | None = None,
        at_least: Position | int | None = None,
        timeout: float | None = None,
    ) -> list[FactRecord]:
        """The facts about one thing, oldest first, also those that the fold dropped.

        Args:
            ref: A handle, or the name of an artifact, key, series or worker.
            kind: Which of them it is. When ``None``: an artifact if the name has the form of an id, else the first of
                key, artifact (by a given id), series and worker that the log knows by that name.
            limit: How many at most: the newest.
            at_least: A position that the store must have folded.
            timeout: Seconds, for each piece of the answer; the bus's default when ``None``.

        Raises:
            NotFoundError: If no fact is about such a thing; UnavailableError: If no store runs.
        """
        return await self._facts("history", ref, kind, limit, at_least, timeout)

    async def why(
        self,
        ref: AsyncArtifact | str,
        *,
        kind: Kind | None = None,
        limit: int | None = None,
        at_least: Position | int | None = None,
        timeout: float | None = None,
    ) -> list[FactRecord]:
        """The facts that led to the present state of one thing, oldest first, each with its ``reason``.

        Those are the facts about it, those about what it names, and those that led to them by cause or trace; arguments
        and errors as for :meth:`history`.
        """
        return await self._facts("why", ref, kind, limit, at_least, timeout)

    async def store_tables(self, *, timeout: float | None = None) -> list[dict[str, Any]]:
        """The columns that :meth:`query` can ask for: ``table``, ``column``, ``type``, their meaning as ``text``."""
        deadline = self._core.begin(timeout, "tables")
        async with await ask(self._core, "tables", {}, deadline=deadline, timeout=timeout) as found:
            return await found.dicts()

    async def store_status(self, store: str, *, timeout: float | None = None) -> dict[str, Any]:
        """How far one store has read, and what it knows of archive and purges (``docs/spec/query.md``).

        Raises:
            UnavailableError: If it does not run, or cannot answer now; says why.
        """
        deadline = self._core.begin(timeout, "status")
        async with await ask(self._core, "status", {"store": store}, deadline=deadline, timeout=timeout) as found:
            return (await found.dicts())[0]

    async def _facts(
        self,
        what: str,
        ref: object,
        kind: Kind | None,
        limit: int | None,
        at_least: Position | int | None,
        timeout: float | None,
    ) -> list[FactRecord]:
        deadline = self._core.begin(timeout, what)
        kinds, name = _named(ref, kind)
        if limit is not None and (type(limit) is not int or limit < 1):
            raise InvalidArgumentError(f"limit is a whole number from 1 on, not {limit!r:.80}")
        args = {"name": name, "limit": limit, "at_least": at_least_seq(at_least)}
        gone: NotFoundError | None = None
        for one in kinds:
            try:
                found = await ask(self._core, what, {**args, "kind": one}, deadline=deadline, timeout=timeout)
            except NotFoundError as exc:
                gone = gone or (exc if "since" in exc.details else None)
                continue
            async with found:
                facts = [fact_of(row) for row in await found.dicts()]
            if facts:
                return facts
        if gone is not None:
            raise gone
        raise NotFoundError(f"no fact is about {_either(kinds)} {name!r:.120}", name=name, kinds=list(kinds))


class QueryResult:
    """The rows that a store answered with; see :class:`AsyncQueryResult`."""

    def __init__(self, bus: Queries, result: AsyncQueryResult) -> None:
        self._bus = bus
        self._result = result

    @property
    def store(self) -> str:
        """The store that answered."""
        return self._result.store

    @property
    def position(self) -> Position:
        """Where in the log the rows hold."""
        return self._result.position

    @property
    def first(self) -> int:
        """Sequence at which the store's history begins; 0: with the log."""
        return self._result.first

    @property
    def schema(self) -> pa.Schema | None:
        """The columns; ``None`` as long as their description has not arrived."""
        return self._result.schema

    @property
    def truncated(self) -> bool | None:
        """Whether rows were cut; ``None`` as long as more is to come. See :attr:`AsyncQueryResult.truncated`."""
        return self._result.truncated

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The rows as Arrow record batches, each fetched when it is asked for; see :meth:`AsyncQueryResult.batches`."""
        batches = self._result.batches()

        async def following() -> pa.RecordBatch | None:
            return await anext(batches, None)

        while (batch := self._bus._run(following())) is not None:
            yield batch

    def arrow(self) -> pa.Table:
        """All rows as a ``pyarrow.Table``; see :meth:`AsyncQueryResult.arrow`."""
        return self._bus._run(self._result.arrow())

    def pandas(self) -> pd.DataFrame:
        """All rows as a ``pandas.DataFrame``; see :meth:`AsyncQueryResult.pandas`."""
        return to_pandas(self.arrow())

    def dicts(self) -> list[dict[str, Any]]:
        """All rows as dicts by column name; see :meth:`AsyncQueryResult.dicts`."""
        return to_dicts(self.arrow())

    def close(self) -> None:
        """Let the store forget what was not fetched. Safe to repeat."""
        if not self._bus.closed:
            self._bus._run(self._result.aclose())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Queries(ABC):
    """The part of :class:`Bus` that asks stores; see :class:`AsyncQueries` for arguments and errors."""

    _bus: AsyncQueries

    @property
    @abstractmethod
    def closed(self) -> bool:
        """Whether the bus was closed."""

    @abstractmethod
    def _run(self, work: Coroutine[Any, Any, T]) -> T: ...

    def query(
        self,
        sql: str,
        *params: object,
        rows: int | None = ROWS,
        at_least: Position | int | None = None,
        store: str | None = None,
        timeout: float | None = None,
    ) -> QueryResult:
        """Ask a store in SQL, read-only; see :meth:`AsyncBus.query`. The rows: ``result.dicts()``, ``.arrow()``, …"""
        asked = self._bus.query(sql, *params, rows=rows, at_least=at_least, store=store, timeout=timeout)
        return QueryResult(self, self._run(asked))

    def state(
        self, at: Moment | None = None, *, at_least: Position | int | None = None, timeout: float | None = None
    ) -> State:
        """What was where at a moment; see :meth:`AsyncBus.state`."""
        return self._run(self._bus.state(at, at_least=at_least, timeout=timeout))

    def diff(
        self,
        from_: Moment,
        to: Moment | None = None,
        *,
        at_least: Position | int | None = None,
        timeout: float | None = None,
    ) -> list[StateChange]:
        """What differs between two moments; see :meth:`AsyncBus.diff`."""
        return self._run(self._bus.diff(from_, to, at_least=at_least, timeout=timeout))

    def history(
        self,
        ref: Artifact | str,
        *,
        kind: Kind | None = None,
        limit: int | None = None,
        at_least: Position | int | None = None,
        timeout: float | None = None,
    ) -> list[FactRecord]:
        """The facts about one thing, oldest first; see :meth:`AsyncBus.history`."""
        about = ref if isinstance(ref, str) else _inner(ref)
        return self._run(self._bus.history(about, kind=kind, limit=limit, at_least=at_least, timeout=timeout))

    def why(
        self,
        ref: Artifact | str,
        *,
        kind: Kind | None = None,
        limit: int | None = None,
        at_least: Position | int | None = None,
        timeout: float | None = None,
    ) -> list[FactRecord]:
        """The facts that led to the present state of one thing; see :meth:`AsyncBus.why`."""
        about = ref if isinstance(ref, str) else _inner(ref)
        return self._run(self._bus.why(about, kind=kind, limit=limit, at_least=at_least, timeout=timeout))

    def store_tables(self, *, timeout: float | None = None) -> list[dict[str, Any]]:
        """The tables that :meth:`query` can ask; see :meth:`AsyncBus.store_tables`."""
        return self._run(self._bus.store_tables(timeout=timeout))

    def store_status(self, store: str, *, timeout: float | None = None) -> dict[str, Any]:
        """How one store is; see :meth:`AsyncBus.store_status`."""
        return self._run(self._bus.store_status(store, timeout=timeout))


async def _whole(found: AsyncQueryResult) -> pa.Table:
    """All rows of an answer that would be wrong without some of them."""
    table = await found.arrow()
    if found.truncated:
        raise OutOfSpaceError(
            f"there are more than the {table.num_rows} rows that a store gives at once; ask for a part of them in SQL",
            rows=table.num_rows,
        )
    return table


def _check_sql(sql: object) -> str:
    if not isinstance(sql, str):
        raise InvalidArgumentError(f"a query is a str of SQL, not {a_type(sql)}")
    if not sql.strip():
        raise InvalidArgumentError("a query is a statement of SQL, and this is empty")
    return sql


def _check_rows(rows: object) -> int | None:
    if rows is not None and (type(rows) is not int or not 0 <= rows <= _ROWS_MAX):
        raise InvalidArgumentError(f"rows is a whole number from 0 on, or None, not {rows!r:.80}")
    return rows if isinstance(rows, int) else None


def _named(ref: object, kind: object) -> tuple[tuple[str, ...], str]:
    """The kinds of thing that a caller may mean, likeliest first, and the thing's name."""
    if kind is not None and kind not in KINDS:
        raise InvalidArgumentError(f"kind is one of {', '.join(KINDS)}, not {kind!r:.80}")
    if isinstance(ref, AsyncArtifact):
        if kind not in (None, "artifact"):
            raise InvalidArgumentError(f"a handle is an artifact's, not a {kind}'s")
        return ("artifact",), ref.base_id
    name = check_ref(ref)
    if name.startswith(VIEW_PREFIX):
        raise InvalidArgumentError(f"{name:.80} is a view, which has no history of its own; ask for its base")
    if isinstance(kind, str):
        return (kind,), name
    if name.startswith((CONTENT_PREFIX, RANDOM_PREFIX)):
        return ("artifact",), name
    return ("key", "artifact", "series", "worker"), name


def _either(kinds: tuple[str, ...]) -> str:
    words = [f"an {kind}" if kind == "artifact" else f"a {kind}" for kind in kinds]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def _inner(handle: Any) -> Any:
    return getattr(handle, "_artifact", handle)
