"""Fills a global store and, batch by batch beside it, a plain database with the same rows."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from pathlib import Path

import duckdb

from tensorbus.bus import Message
from tensorbus.events import Subjects
from tensorbus.feeds import decode_all
from tensorbus.lifecycle import Directory
from tensorbus.projections import Applied, GlobalStore, RowTracker, TimeTravel
from tensorbus.projections._store_facts import arrow_table, fact_row
from tensorbus.projections._store_schema import BY_NAME, FACTS, VALID, Column, statements, stored

FACTS_PER_TRANSACTION = 4096
"""As many as the store's own projector takes."""

Table = tuple[str, tuple[Column, ...], list[tuple[object, ...]]]
"""A table, its columns, and rows for it."""


class Filling:
    """A store and a plain database side by side in a folder.

    Attributes:
        seconds: What the store took; see :class:`benchmarks._replay_parts.Stored`.
        insert_s: What inserting the same rows took.
        prepared_s: What it took to gather these rows, which counts for neither.
    """

    def __init__(self, folder: str) -> None:
        self.seconds = self.insert_s = self.prepared_s = 0.0
        self.facts = self.rows = 0
        self._subjects = Subjects()
        self._store = GlobalStore.open(Path(folder) / "store.duckdb", subjects=self._subjects)
        self._plain = duckdb.connect(str(Path(folder) / "plain.duckdb"), config={"memory_limit": "1GiB"})
        for statement in statements():
            self._plain.execute(statement)
        self._state = Directory(self._subjects)
        self._tracker = RowTracker(self._state)
        self._waiting: list[Applied] = []
        self._first = self._last = 0

    def __enter__(self) -> Filling:
        gc.freeze()
        return self

    def __exit__(self, *exc: object) -> None:
        self._store.close()
        self._plain.close()

    def take_in(self, messages: Sequence[Message]) -> None:
        """Decode and fold messages and note which rows change; write once enough are there."""
        clock, applied = time.perf_counter, self._tracker.applied
        for message, recorded in zip(messages, decode_all(messages), strict=True):
            verdict = self._state.apply(recorded)
            before = clock()
            self._waiting.append(applied(recorded, verdict, body=message.data))
            self.seconds += clock() - before
        self._first, self._last = self._first or messages[0].seq, messages[-1].seq
        if len(self._waiting) >= FACTS_PER_TRANSACTION:
            self.flush()

    def flush(self) -> None:
        batch, self._waiting = self._waiting, []
        start = time.perf_counter()
        self._store.apply(batch)
        written = time.perf_counter()
        tables = rows_of(batch, self._subjects)
        prepared = time.perf_counter()
        self._insert(tables)
        self.seconds += written - start
        self.prepared_s += prepared - written
        self.insert_s += time.perf_counter() - prepared
        self.facts += len(batch)
        self.rows += sum(len(rows) for _, _, rows in tables)

    def _insert(self, tables: Sequence[Table]) -> None:
        self._plain.execute("BEGIN")
        for name, columns, rows in tables:
            self._plain.register("batch", arrow_table(columns, rows))
            names = ", ".join(f'"{column.name}"' for column in columns)
            self._plain.execute(f"INSERT INTO {name} ({names}) SELECT * FROM batch")
            self._plain.unregister("batch")
        self._plain.execute("COMMIT")

    def travel(self, repeats: int) -> tuple[list[tuple[float, float]], tuple[int, int]]:
        """Seconds for the state in the middle and at the end, of each repeat, and the rows of both."""
        travel = TimeTravel(self._store)
        middle = (self._first + self._last) // 2
        took = [(self._seconds(travel, middle), self._seconds(travel, self._last)) for _ in range(repeats)]
        half, whole = (sum(map(len, travel.state_at(seq).values())) for seq in (middle, self._last))
        return took, (half, whole)

    def _seconds(self, travel: TimeTravel, seq: int) -> float:
        start = time.perf_counter()
        travel.state_at(seq)
        return time.perf_counter() - start


def rows_of(batch: Sequence[Applied], subjects: Subjects) -> list[Table]:
    """The rows that a batch of facts adds, by table."""
    tables: dict[str, Table] = {}
    if batch:
        facts = [fact_row(item.recorded, item.verdict, subjects, item.body) for item in batch]
        tables["facts"] = ("facts", stored(FACTS), facts)
    for item in batch:
        for change in item.changes:
            if change.opens is None:
                continue
            entity = BY_NAME[change.table]
            table = tables.setdefault(change.table, (entity.history, (*entity.columns, VALID[0]), []))
            table[2].append((*change.row, item.recorded.seq))
    return list(tables.values())
