"""Read-only SQL over the global store: what may be asked, and an answer that keeps within its limits."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Final

import duckdb
import pyarrow as pa

from tensorbus.errors import InvalidArgumentError, UnavailableError
from tensorbus.projections._store_db import one, query_errors
from tensorbus.projections._store_schema import ENTITIES

SQL_BYTES_MAX: Final = 256 * 1024
BATCH_ROWS: Final = 8192

TABLE_FUNCTIONS: Final = frozenset(
    {"range", "generate_series", "unnest", "json_each", "json_tree", "duckdb_tables", "duckdb_views", "duckdb_columns"}
    | {f"{entity.name}_at" for entity in ENTITIES}
)
"""All that may stand in FROM with arguments. Others read files (also the store's own), or checkpoint, or run text."""

REFUSED_FUNCTIONS: Final = frozenset(
    {"repeat", "lpad", "rpad", "format", "printf", "range", "generate_series", "list_resize", "array_resize"}
    | {"bitstring"}
    | {"current_setting", "getvariable", "getenv", "write_log", "setseed", "sleep_ms", "pg_sleep"}
    | {"nextval", "currval", "setval"}
)
"""Scalar functions that make a value of any size in one step, which neither memory limit nor interrupt reaches; that
tell of the program's settings and surroundings; that change something, or keep a thread for nothing."""

REPLACING: Final = frozenset({"replace", "regexp_replace"})
REPLACEMENT_MAX: Final = 16
"""Characters of a replacement, which must be written out: a computed one makes a value of any size, as ``repeat``."""

OWN_VIEWS: Final = ("duckdb_", "pragma_", "pg_")
"""How views of DuckDB's own begin, which tell of files and settings; what may be read of them is in TABLE_FUNCTIONS."""

_EXPLAIN: Final = re.compile(
    r"(?:\s|--[^\n]*\n|/\*.*?\*/)*EXPLAIN\s+(?:ANALYZE\s+)?(?:\([^()]*\)\s*)?", re.IGNORECASE | re.DOTALL
)


@dataclass(frozen=True, slots=True)
class QueryLimits:
    """What one query may take.

    Attributes:
        rows: Rows beyond this many are cut off.
        seconds: Time from asking to the last row.
        nbytes: Size of the answer in Arrow's form; batches beyond it are cut off.
    """

    rows: int = 100_000
    seconds: float = 30.0
    nbytes: int = 256 * 1024 * 1024


class QueryResult:
    """The answer: iterate over its Arrow record batches, in this thread. Close it, or use it as a context manager.

    Attributes:
        schema: Names and types of the columns.
        position: The log's sequence that the answer is at.
        truncated: Whether rows were cut off; true only after the last batch.
    """

    def __init__(
        self, reader: pa.RecordBatchReader, *, position: int, limits: QueryLimits, finish: Callable[[], None]
    ) -> None:
        self.schema: pa.Schema = reader.schema
        self.position = position
        self.truncated = False
        self._reader: pa.RecordBatchReader | None = reader
        self._limits, self._finish = limits, finish

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        rows, nbytes = self._limits.rows, self._limits.nbytes
        try:
            while (batch := self._next()) is not None:
                if batch.num_rows > rows or batch.nbytes > nbytes:
                    batch = batch.slice(0, min(rows, _fitting_rows(batch, nbytes)))
                    self.truncated = True
                rows, nbytes = rows - batch.num_rows, nbytes - batch.nbytes
                if batch.num_rows:
                    yield batch
                if self.truncated:
                    return
        finally:
            self.close()

    def _next(self) -> pa.RecordBatch | None:
        reader = self._reader
        if reader is None:
            raise UnavailableError("the answer was closed, or the store is made anew: ask again")
        with query_errors(self._limits.seconds):
            try:
                return reader.read_next_batch()
            except StopIteration:
                return None

    def close(self) -> None:
        """Give up the rest of the answer, and all that keeps the database open. May be called again."""
        self._reader = None
        self._finish()

    def __del__(self) -> None:
        self._finish()  # a result that nobody read to its end must not keep others from asking

    def __enter__(self) -> QueryResult:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _fitting_rows(batch: pa.RecordBatch, nbytes: int) -> int:
    """How many of the first rows are within a size, by halves; exact enough for a limit."""
    rows: int = batch.num_rows
    while rows and batch.slice(0, rows).nbytes > nbytes:
        rows //= 2
    return rows


class Interrupter:
    """Interrupts one cursor when its time is over, unless it has finished before."""

    def __init__(self, cursor: duckdb.DuckDBPyConnection, seconds: float) -> None:
        self._cursor, self._lock, self._over = cursor, threading.Lock(), False
        self._timer = threading.Timer(seconds, self._fire)
        self._timer.daemon = True
        self._timer.start()

    def _fire(self) -> None:
        with self._lock:
            if not self._over:
                self._cursor.interrupt()

    def stop(self) -> bool:
        """No interrupt comes any more. Says whether this call was the first."""
        self._timer.cancel()
        with self._lock:
            first, self._over = not self._over, True
        return first


def check(cursor: duckdb.DuckDBPyConnection, sql: str) -> None:
    """Refuse all but one statement that reads the store's own tables.

    Raises:
        InvalidArgumentError: With DuckDB's words for what cannot be parsed, else saying what is not allowed.
    """
    if len(sql) > SQL_BYTES_MAX:
        raise InvalidArgumentError(f"a query of {len(sql)} characters is over the {SQL_BYTES_MAX} that it may have")
    found = cursor.extract_statements(sql)
    if not found:
        raise InvalidArgumentError("the query has no statement, only space or comments")
    if len(found) != 1:
        raise InvalidArgumentError(f"a query is one statement, not {len(found)}")
    if found[0].type == duckdb.StatementType.EXPLAIN:
        inner = _EXPLAIN.sub("", sql, count=1) if _EXPLAIN.match(sql) else ""
        found = cursor.extract_statements(inner)
        sql = inner
    if len(found) != 1 or found[0].type != duckdb.StatementType.SELECT:
        kind = found[0].type.name if found else "nothing"
        raise InvalidArgumentError(f"a query is a SELECT, EXPLAIN, DESCRIBE or SHOW, not {kind}")
    for what in _refused(_tree(cursor, sql)):
        raise InvalidArgumentError(f"a query may not use {what}")


def _tree(cursor: duckdb.DuckDBPyConnection, sql: str) -> object:
    """The statement as DuckDB's own parser sees it."""
    row = one(cursor, "SELECT json_serialize_sql(?::VARCHAR)", [sql])
    try:
        tree = json.loads(row[0]) if row else {}
    except RecursionError as exc:
        raise InvalidArgumentError("the query is nested too deeply") from exc
    if tree.get("error", True):
        raise InvalidArgumentError(str(tree.get("error_message", "the query cannot be read")))
    return tree


def _refused(tree: object) -> Iterator[str]:
    """What in a statement is not for reading: table functions by name, and nodes that write."""
    waiting: list[object] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, list):
            waiting.extend(node)
        if not isinstance(node, dict):
            continue
        kind, parts = str(node.get("type", "")), dict(node)
        if kind.endswith("_QUERY_NODE"):
            yield kind.removesuffix("_QUERY_NODE")
        if kind == "TABLE_FUNCTION":
            function = parts.pop("function", {})
            name = str(function.get("function_name", "")).lower()
            if name not in TABLE_FUNCTIONS:
                yield f"{name}() in FROM"
            waiting.append(function.get("children"))
        elif kind == "BASE_TABLE":
            name = str(node.get("table_name", "")).lower()
            if name.startswith(OWN_VIEWS) and name not in TABLE_FUNCTIONS:
                yield f"{name} in FROM"
        elif kind == "FUNCTION":
            name = str(node.get("function_name", "")).lower()
            if name in REFUSED_FUNCTIONS:
                yield f"{name}()"
            if name in REPLACING and not _replaces_by_little(node):
                yield f"{name}() with a replacement that is not a text of at most {REPLACEMENT_MAX} characters"
        waiting.extend(parts.values())


def _replaces_by_little(node: dict[str, object]) -> bool:
    """Whether the replacement is written out and short. With a dot before the name, it is not known which it is."""
    given = node.get("arguments")
    arguments = given if isinstance(given, list) else []
    return all(map(_is_short, arguments[1 if node.get("schema") else 2 :]))


def _is_short(argument: object) -> bool:
    expression = argument.get("expression") if isinstance(argument, dict) else None
    literal = expression.get("literal") if isinstance(expression, dict) else None
    return isinstance(literal, dict) and len(str(literal.get("text", ""))) <= REPLACEMENT_MAX
