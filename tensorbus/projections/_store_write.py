"""One transaction's worth of rows for the global store: collected in Python, written table by table through Arrow."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

import duckdb
import pyarrow as pa

from tensorbus.errors import CorruptError
from tensorbus.events import Subjects
from tensorbus.projections._store_db import REBUILD, one
from tensorbus.projections._store_facts import arrow_table
from tensorbus.projections._store_rows import Change, RowKey
from tensorbus.projections._store_schema import BY_NAME, FACTS, VALID, Column, Entity, stored

_FACTS: Final = stored(FACTS)
_FACT_NAMES: Final = ", ".join(f'"{column.name}"' for column in _FACTS)


@dataclass(slots=True)
class _Rows:
    """Changes of one table. A row that is opened and closed within the batch is written once, closed."""

    opened: list[tuple[object, ...]] = field(default_factory=list)
    begins: list[int] = field(default_factory=list)
    ends: dict[int, int] = field(default_factory=dict)
    open: dict[RowKey, int] = field(default_factory=dict)
    closed: list[tuple[RowKey, int]] = field(default_factory=list)

    def close(self, key: RowKey, seq: int) -> None:
        at = self.open.pop(key, None)
        if at is None:
            self.closed.append((key, seq))
        else:
            self.ends[at] = seq

    def begin(self, key: RowKey, row: tuple[object, ...], seq: int) -> None:
        self.open[key] = len(self.opened)
        self.opened.append(row)
        self.begins.append(seq)


class Batch:
    """Collects facts and row changes, then writes them within a transaction that somebody else opened."""

    def __init__(self, subjects: Subjects) -> None:
        self._subjects = subjects
        self._facts: list[tuple[object, ...]] = []
        self._tables: dict[str, _Rows] = {}

    def fact(self, row: tuple[object, ...]) -> None:
        self._facts.append(row)

    def change(self, seq: int, changes: Iterable[Change]) -> None:
        for table, closes, opens, row in changes:
            rows = self._tables.get(table)
            if rows is None:
                rows = self._tables[table] = _Rows()
            if closes is not None:
                rows.close(closes, seq)
            if opens is not None:
                rows.begin(opens, row, seq)

    def write(self, conn: duckdb.DuckDBPyConnection) -> None:
        """Write everything.

        Raises:
            CorruptError: If a row that should end is not open in the file.
        """
        if self._facts:
            _insert(conn, "facts", _FACT_NAMES, arrow_table(_FACTS, self._facts))
        for name, rows in self._tables.items():
            entity = BY_NAME[name]
            if rows.closed:
                _close(conn, entity, rows.closed)  # before the new rows are there: these must stay open
            if rows.opened:
                _insert(conn, entity.history, "", _table(entity, rows))


def _table(entity: Entity, rows: _Rows) -> pa.Table:
    table = arrow_table(entity.columns, rows.opened)
    for column, values in zip(VALID, (rows.begins, map(rows.ends.get, range(len(rows.begins)))), strict=True):
        table = table.append_column(column.name, pa.array(list(values), type=pa.uint64()))
    return table


def _insert(conn: duckdb.DuckDBPyConnection, table: str, names: str, rows: pa.Table) -> None:
    conn.register("batch", rows)
    try:
        conn.execute(f"INSERT INTO {table} {f'({names})' if names else ''} SELECT * FROM batch")
    finally:
        conn.unregister("batch")


def _close(conn: duckdb.DuckDBPyConnection, entity: Entity, closed: list[tuple[RowKey, int]]) -> None:
    """End open rows: one UPDATE that joins on what finds them."""
    names = [column for column in entity.columns if column.name in entity.row]
    found = [(*(key if isinstance(key, tuple) else (key,)), seq) for key, seq in closed]
    conn.register("closing", arrow_table((*names, Column("upto", "UBIGINT", "")), found))
    try:
        match = " AND ".join(f'h."{column.name}" = c."{column.name}"' for column in names)
        sql = f"UPDATE {entity.history} h SET valid_to = c.upto FROM closing c WHERE h.valid_to IS NULL AND {match}"
        done = one(conn, sql)
    finally:
        conn.unregister("closing")
    if done is None or done[0] != len(closed):
        count = done[0] if done else 0
        raise CorruptError(f"{len(closed)} rows of {entity.name} should end, {count} were open: {REBUILD}")
