"""Answers to queries: asked for through the worker, come from a store, arrive in pieces as they are read."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from tensorbus.errors import CorruptError, InvalidArgumentError
from tensorbus.sdk._query_arrow import ArrowStream, pyarrow, rows_of
from tensorbus.sdk._records import LOG_STREAM, Position, parse
from tensorbus.transport import Reply

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

    from tensorbus.clock import Deadline
    from tensorbus.sdk._core import Core


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What an answer says of itself, with each piece (``docs/spec/query.md``)."""

    store: str
    cursor: int | None
    piece: int
    position: int
    first: int
    rows: int
    truncated: bool
    done: bool


class AsyncQueryResult:
    """The rows that a store answered with: all at once, or batch by batch as they arrive.

    The first rows are there; the rest is fetched when it is asked for, for as long as the connection to the worker
    lasts, and unless nobody asks for 30 seconds. All at once (:meth:`arrow`, :meth:`pandas`, :meth:`dicts`) can be
    asked for again and in every form; batches come once.
    """

    def __init__(self, core: Core, reply: Reply, *, timeout: float | None, what: str) -> None:
        self._core = core
        self._timeout = timeout
        self._what = what
        self._stream = ArrowStream()
        self._epoch = core.link.epoch
        self._table: pa.Table | None = None
        self._kept: list[pa.RecordBatch] | None = None
        self._begun = False
        self._turn = asyncio.Lock()
        self._piece = parse(Piece, reply.data)
        self._cursor = self._piece.cursor
        if self._cursor is not None:
            self._tidy = weakref.finalize(self, _close_later, core, self._cursor, self._epoch)
            self._tidy.atexit = False
        self._arrived = self._decoded(reply)

    @property
    def store(self) -> str:
        """The store that answered."""
        return self._piece.store

    @property
    def position(self) -> Position:
        """Where in the log the rows hold."""
        return {LOG_STREAM: self._piece.position}

    @property
    def first(self) -> int:
        """Sequence at which the store's history begins; 0: with the log."""
        return self._piece.first

    @property
    def schema(self) -> pa.Schema | None:
        """The columns; ``None`` as long as their description has not arrived."""
        return self._stream.schema

    @property
    def truncated(self) -> bool | None:
        """Whether rows beyond the limit were cut; ``None`` as long as that is not known, since more is to come."""
        return self._piece.truncated if self._piece.done or self._piece.truncated else None

    async def batches(self) -> AsyncIterator[pa.RecordBatch]:
        """The rows as Arrow record batches, each fetched when it is asked for. They come once.

        Raises:
            ExpiredError: If nobody asked for 30 seconds; UnavailableError: If the store or the connection went.
            InvalidArgumentError: If the rows were asked for before.
        """
        self._begin()
        try:
            while True:
                for batch in self._arrived:
                    yield batch
                if self._piece.done:
                    return
                self._arrived = await self._next()
        finally:
            self._end()

    async def arrow(self) -> pa.Table:
        """All rows as a ``pyarrow.Table``. Raises as :meth:`batches`; a call that failed may be repeated."""
        async with self._turn:
            if self._table is None:
                if self._kept is None:
                    self._begin()
                    self._kept = []
                while True:
                    self._kept += self._arrived
                    self._arrived = []
                    if self._piece.done:
                        break
                    self._arrived = await self._next()
                self._table = pyarrow().Table.from_batches(self._kept, schema=self._stream.schema)
                self._kept = []
                self._end()
            return self._table

    async def pandas(self) -> pd.DataFrame:
        """All rows as a ``pandas.DataFrame``. Raises as :meth:`batches`.

        Raises:
            InvalidArgumentError: If pandas is not installed.
        """
        return to_pandas(await self.arrow())

    async def dicts(self) -> list[dict[str, Any]]:
        """All rows as dicts by column name, times as ``datetime``. Raises as :meth:`batches`."""
        return await asyncio.to_thread(to_dicts, await self.arrow())

    async def aclose(self) -> None:
        """Let the store forget what was not fetched. Safe to repeat."""
        self._begun = True
        self._end()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def _begin(self) -> None:
        if self._begun:
            raise InvalidArgumentError("these rows were fetched batch by batch, or closed; ask again for them")
        self._begun = True

    async def _next(self) -> list[pa.RecordBatch]:
        deadline = self._core.begin(self._timeout, f"the next rows of {self._what}")
        args = {"cursor": self._cursor, "piece": self._piece.piece + 1}
        reply = await self._core.ask("query_next", args, deadline=deadline, repeat=False, epoch=self._epoch)
        piece = parse(Piece, reply.data)
        if piece.piece != self._piece.piece + 1:
            raise CorruptError(f"piece {piece.piece} of an answer came instead of {self._piece.piece + 1}")
        self._piece = piece
        return self._decoded(reply)

    def _decoded(self, reply: Reply) -> list[pa.RecordBatch]:
        batches = self._stream.feed(reply.body)
        if self._piece.done:
            self._stream.finish()
        return batches

    def _end(self) -> None:
        self._arrived = []
        if self._cursor is not None:
            self._tidy()


def _close_later(core: Core, cursor: int, epoch: int) -> None:
    """Called on any thread, also by the collector."""

    def close() -> None:
        if epoch == core.link.epoch:  # else the cursor went with its connection
            core.tidy("query_close", {"cursor": cursor})

    core.later(close)


def to_dicts(table: pa.Table) -> list[dict[str, Any]]:
    """All rows as dicts."""
    return [row for batch in table.to_batches() for row in rows_of(batch)]


def to_pandas(table: pa.Table) -> pd.DataFrame:
    """All rows as a data frame.

    Raises:
        InvalidArgumentError: If pandas is not installed.
    """
    try:
        return table.to_pandas()
    except ImportError as exc:
        raise InvalidArgumentError("pandas() needs pandas, which is not installed here: pip install pandas") from exc


async def ask(
    core: Core, what: str, args: Mapping[str, object], *, deadline: Deadline, timeout: float | None
) -> AsyncQueryResult:
    """Have a store answer. Raises what it answers."""
    pyarrow()  # before anybody works for it
    reply = await core.ask("query_open", {"what": what, **args}, deadline=deadline)
    return AsyncQueryResult(core, reply, timeout=timeout, what=what)
