"""The global store: present state and history of the log in one DuckDB file, its position in the same transaction.

One thread owns the writing connection and calls ``open``, ``begin``, ``apply``, ``adopt`` and ``close``; :meth:`query`
and the reading of history may come from any thread, each on a cursor of its own. The file is never touched but through
DuckDB: to open and close it a second time in one process would drop the lock that keeps others out.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import duckdb

from tensorbus.clock import Deadline
from tensorbus.errors import ConflictError, CorruptError, InvalidArgumentError, UnavailableError
from tensorbus.events import EVENT_TYPES, Subjects
from tensorbus.ids import EventId
from tensorbus.lifecycle import FOLD_VERSION, Directory
from tensorbus.projections._store_db import (
    REBUILD,
    Params,
    check_database,
    connect,
    file_errors,
    one,
    query_errors,
    remove,
    replace,
)
from tensorbus.projections._store_facts import fact_row
from tensorbus.projections._store_query import BATCH_ROWS, Interrupter, QueryLimits, QueryResult, check
from tensorbus.projections._store_rows import Applied, RowTracker
from tensorbus.projections._store_schema import ENTITIES, SCHEMA_VERSION, statements
from tensorbus.projections._store_write import Batch

MEMORY_BYTES: Final = 1 << 30
QUERIES_MAX: Final = 4
FRESH: Final = ".new"
"""Ends the name of a store that is being rebuilt beside the one in use."""


class GlobalStore:
    """Made by :meth:`open` or :meth:`create_fresh`.

    Attributes:
        path: The file.
        first: The sequence that history begins at, or 0 if that is where the log does.
    """

    def __init__(self, path: Path, subjects: Subjects, memory_bytes: int, threads: int | None, queries: int) -> None:
        self.path = path
        self.first = 0
        self._subjects = subjects
        self._memory_bytes, self._threads = memory_bytes, threads
        self._position, self._event_id = 0, EventId("")
        self._moved = threading.Condition()
        self._queries, self._queries_max = threading.BoundedSemaphore(queries), queries
        self._cursors = threading.Lock()
        self._results: weakref.WeakSet[QueryResult] = weakref.WeakSet()
        self._conn: duckdb.DuckDBPyConnection | None = None
        self._root: duckdb.DuckDBPyConnection | None = None

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        subjects: Subjects,
        memory_bytes: int = MEMORY_BYTES,
        threads: int | None = None,
        queries: int = QUERIES_MAX,
        create: bool = True,
    ) -> GlobalStore:
        """Open the file. Blocks.

        Args:
            path: The file; its folder is made.
            subjects: Those of the log that it is of.
            memory_bytes: What DuckDB may use, for writing and all queries together.
            threads: Threads that DuckDB may use; one for each core when ``None``.
            queries: How many may run at a time.
            create: Whether to make an empty store if there is none.

        Raises:
            ConflictError: If another process has it open, or it is of another log or version.
            CorruptError: If it is damaged; OutOfSpaceError: If the disk is full.
            NotFoundError, InvalidArgumentError: If it is not there or is no store, and none may be made.
        """
        if create:
            with file_errors(path):
                path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        else:
            check_database(path)
        store = cls(path, subjects, memory_bytes, threads, queries)
        store._connect(create=create)
        return store

    @classmethod
    def create_fresh(cls, path: Path, *, subjects: Subjects, memory_bytes: int = MEMORY_BYTES) -> GlobalStore:
        """An empty store beside the one at ``path``, to be fed with all of history and then put there by :meth:`adopt`.

        What an earlier attempt left is thrown away.
        """
        beside = path.with_name(path.name + FRESH)
        cls.delete(beside)
        return cls.open(beside, subjects=subjects, memory_bytes=memory_bytes)

    @staticmethod
    def delete(path: Path) -> None:
        """Delete the file of a store that nobody has open, if it is there.

        Raises:
            UnavailableError: If the system does not let it go.
        """
        with file_errors(path):
            remove(path)

    @property
    def position(self) -> tuple[int, EventId]:
        """The last sequence whose fact is in the tables, and that fact's id; ``(0, "")`` in an empty store."""
        return self._position, self._event_id

    # -- writing: the owning thread ------------------------------------------------------------------------------------

    def begin(self, state: Directory, event_id: EventId) -> None:
        """Begin history with a state instead of with the log, whose facts up to there are gone.

        Args:
            state: What holds at ``state.seq``.
            event_id: Id of the fact at that sequence.

        Raises:
            InvalidArgumentError: If there is something in the store already.
        """
        if self._position:
            raise InvalidArgumentError(f"the store is at {self._position} already", position=self._position)
        batch = Batch(self._subjects)
        batch.change(state.seq, RowTracker(state).everything())
        self._write(batch, state.seq, event_id, first=state.seq)

    def apply(self, batch: Sequence[Applied]) -> None:
        """Take facts in, in one transaction with the position. What is at or below the position is passed over.

        After an error nothing has changed, and the same batch can be applied again.

        Raises:
            ConflictError: If facts are missing between the position and the batch.
            OutOfSpaceError: If disk or memory is full; CorruptError: If file and Directory disagree.
            UnavailableError: If the log is folded by a version that this program does not know.
        """
        rows, seen, last = Batch(self._subjects), self._position, self._event_id
        for item in batch:
            seq = item.recorded.seq
            if seq <= seen:
                continue
            if item.after > seen:
                what = f"the store is at {seen}, the next fact follows {item.after}: facts are missing, {REBUILD}"
                raise ConflictError(what, position=seen, after=item.after)
            if item.verdict.why == "fold":
                raise UnavailableError(f"from {seq} on the log needs a newer tensorbus to be folded", seq=seq)
            rows.fact(fact_row(item.recorded, item.verdict, self._subjects, item.body))
            rows.change(seq, item.changes)
            seen, last = seq, item.recorded.headers.event_id
        if seen > self._position:
            self._write(rows, seen, last)

    def _write(self, batch: Batch, seq: int, event_id: EventId, *, first: int | None = None) -> None:
        if self._conn is None:
            self._connect()
        conn = self._connection()
        first = self.first if first is None else first
        try:
            with file_errors(self.path):
                conn.execute("BEGIN TRANSACTION")
                batch.write(conn)
                conn.execute("UPDATE meta SET position = ?, event_id = ?, first = ?", [seq, event_id, first])
                conn.execute("COMMIT")
        except BaseException:
            self._roll_back()
            raise
        with self._moved:
            self._position, self._event_id, self.first = seq, event_id, first
            self._moved.notify_all()

    def _roll_back(self) -> None:
        """Back to the position. After some errors DuckDB takes no more statements until the file is opened again."""
        try:
            conn = self._connection()
            with suppress(duckdb.TransactionException):  # a failed COMMIT has rolled back by itself
                conn.execute("ROLLBACK")
            one(conn, "SELECT position FROM meta")  # refused by a database that gave up
        except duckdb.Error:
            self._disconnect()

    def close(self) -> None:
        """Close the file; queries that are still read from end with an error."""
        self._disconnect()

    def adopt(self) -> GlobalStore:
        """Put this fresh store, now complete, where it belongs, and open it there. The one that is there is closed.

        Raises:
            InvalidArgumentError: If it is not one that :meth:`create_fresh` made.
        """
        if not self.path.name.endswith(FRESH):
            raise InvalidArgumentError("only a store made by create_fresh can take another's place")
        with file_errors(self.path):
            self._connection().execute("CHECKPOINT")
        self._disconnect()
        target = self.path.with_name(self.path.name.removesuffix(FRESH))
        replace(self.path, target)
        return GlobalStore.open(
            target,
            subjects=self._subjects,
            memory_bytes=self._memory_bytes,
            threads=self._threads,
            queries=self._queries_max,
        )

    # -- reading: any thread -------------------------------------------------------------------------------------------

    def query(
        self, sql: str, params: Params | None = None, *, limits: QueryLimits | None = None, at_least: int = 0
    ) -> QueryResult:
        """Run one read-only statement over the tables as they are at one position. Blocks until the first rows.

        Args:
            sql: One SELECT, EXPLAIN, DESCRIBE or SHOW; see ``docs/store.md`` for the tables.
            params: Values for ``?``, or for ``$name``.
            limits: What it may take; the defaults of :class:`QueryLimits` when ``None``.
            at_least: A sequence that the answer must have taken in; waited for within the time limit.

        Raises:
            InvalidArgumentError: If it is not such a statement, or DuckDB finds fault with it.
            DeadlineExceededError: If the time limit passed, here or while the answer is read.
            OutOfSpaceError: If it needs more memory than DuckDB may use.
            UnavailableError: If too many queries run, or the store is closed.
        """
        limits = limits or QueryLimits()
        deadline = Deadline(limits.seconds, what="the query")
        self.wait_for(at_least, deadline)
        if not self._queries.acquire(timeout=deadline.left()):
            raise UnavailableError(f"{self._queries_max} queries are running already", queries=self._queries_max)
        return self._start(sql, params, limits, deadline)

    def _start(self, sql: str, params: Params | None, limits: QueryLimits, deadline: Deadline) -> QueryResult:
        try:
            cursor = self._cursor()
        except BaseException:
            self._queries.release()
            raise
        timer = Interrupter(cursor, max(deadline.left() or 0.0, 0.001))

        def finish() -> None:
            if timer.stop():
                cursor.close()
                self._queries.release()

        try:
            with query_errors(limits.seconds):
                check(cursor, sql)
                cursor.execute("BEGIN TRANSACTION READ ONLY")
                position = one(cursor, "SELECT position FROM meta")
                relation: Any = cursor.sql(sql) if params is None else cursor.sql(sql, params=params)
                reader = relation.to_arrow_reader(BATCH_ROWS)
                at = position[0] if position else 0
                result = QueryResult(reader, position=at, limits=limits, finish=finish)
                self._results.add(result)
                return result
        except BaseException:
            finish()
            raise

    def wait_for(self, seq: int, deadline: Deadline) -> None:
        """Return once everything up to ``seq`` is in the tables. Blocks.

        Raises:
            DeadlineExceededError: If that takes longer.
        """
        with self._moved:
            if not self._moved.wait_for(lambda: self._position >= seq, timeout=deadline.left()):
                raise deadline.error()

    @contextmanager
    def reading(self) -> Iterator[duckdb.DuckDBPyConnection]:
        """A cursor for our own SQL, which sees one state of the tables throughout."""
        cursor = self._cursor()
        try:
            with file_errors(self.path):
                cursor.execute("BEGIN TRANSACTION READ ONLY")
                yield cursor
        finally:
            cursor.close()

    def rows(self, table: str) -> list[dict[str, object]]:
        """All rows of a table or view, in order; for tests and tools."""
        with self.reading() as cursor:
            found = cursor.execute(f'SELECT * FROM "{table}" ORDER BY ALL')
            names = [column[0] for column in found.description or ()]
            return [dict(zip(names, row, strict=True)) for row in found.fetchall()]

    def hash(self) -> str:
        """Hash of the content of all tables, whatever the order of their rows: equal histories, equal hashes."""
        parts = []
        with self.reading() as cursor:
            for table in ("facts", "meta", *(entity.history for entity in ENTITIES)):
                sql = f"SELECT count(*), coalesce(sum(md5_number_lower(t::VARCHAR)::HUGEINT), 0) FROM {table} t"
                parts.append(f"{table} {one(cursor, sql)}")
        return "; ".join(parts)

    # -- the file ------------------------------------------------------------------------------------------------------

    def _connect(self, *, create: bool = True) -> None:
        conn = connect(self.path, memory_bytes=self._memory_bytes, threads=self._threads)
        try:
            with file_errors(self.path):
                self._read_meta(conn, create=create)
            root = conn.cursor()
        except BaseException:
            conn.close()
            raise
        with self._cursors:
            self._conn, self._root = conn, root

    def _read_meta(self, conn: duckdb.DuckDBPyConnection, *, create: bool) -> None:
        if one(conn, "SELECT 1 FROM duckdb_tables() WHERE table_name = 'meta'") is None:
            if not create:
                raise InvalidArgumentError(f"{self.path} is a DuckDB database and no store", path=str(self.path))
            self._make_tables(conn)
        row = one(conn, "SELECT schema_version FROM meta")
        version = row[0] if row else None
        if version != SCHEMA_VERSION:
            self._refuse(f"has tables of version {version}, this program's are {SCHEMA_VERSION}")
        row = one(conn, "SELECT position, event_id, first, fold_version, prefix FROM meta")
        if row is None:
            raise CorruptError(f"the store {self.path} has no position, {REBUILD}", path=str(self.path))
        self._position, self._event_id, self.first = row[0], EventId(row[1]), row[2]
        if row[4] != self._subjects.prefix:
            self._refuse(f"is of the log {row[4]!r}, not of {self._subjects.prefix!r}")
        if row[3] > FOLD_VERSION:
            self._refuse(f"was written by fold {row[3]}, this program knows {FOLD_VERSION}")
        known = [cls.__name__ for cls in EVENT_TYPES]
        passed = one(conn, "SELECT type FROM facts WHERE why = 'unknown' AND list_contains(?, type)", [known])
        if passed is not None:
            self._refuse(f"has passed over facts that this program knows ({passed[0]})")

    def _refuse(self, why: str) -> None:
        raise ConflictError(f"the store {self.path} {why}: {REBUILD}", path=str(self.path))

    def _make_tables(self, conn: duckdb.DuckDBPyConnection) -> None:
        conn.execute("BEGIN TRANSACTION")
        for statement in statements():
            conn.execute(statement)
        conn.execute(
            "INSERT INTO meta VALUES (0, '', 0, ?, ?, ?)", [SCHEMA_VERSION, FOLD_VERSION, self._subjects.prefix]
        )
        conn.execute("COMMIT")

    def _connection(self) -> duckdb.DuckDBPyConnection:
        if self._conn is None:
            raise UnavailableError(f"the store {self.path} is closed", path=str(self.path))
        return self._conn

    def _cursor(self) -> duckdb.DuckDBPyConnection:
        """A connection of its own, made from one that runs no statement."""
        with self._cursors:
            if self._root is None:
                raise UnavailableError(f"the store {self.path} is closed", path=str(self.path))
            return self._root.cursor()

    def _disconnect(self) -> None:
        """Close all that keeps the file open, also what is still read from: else it could not be opened anew."""
        for result in list(self._results):
            result.close()
        with self._cursors:
            for conn in (self._root, self._conn):
                if conn is not None:
                    with suppress(duckdb.Error):
                        conn.close()
            self._conn = self._root = None
