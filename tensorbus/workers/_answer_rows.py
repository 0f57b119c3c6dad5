"""The rows of an answer, as Arrow record batches and then as pieces of one stream."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, Literal

import pyarrow as pa

from tensorbus.projections import GlobalStore, QueryLimits, TimeTravel

BATCH_ROWS: Final = 1024
Limits = tuple[int, float, int]
"""Rows, seconds, bytes."""
_VALIDITY: Final = ("valid_from", "valid_to")
_SINGULAR: Final = {"keys": "key", "leases": "lease", "series": "series"}


@dataclass(slots=True)
class Rows:
    """What an answer consists of.

    Attributes:
        position: The store's position, or that of the moment asked for.
        first: Where the store's history begins, 0: with the log.
        truncated: Whether rows were cut; known at the end.
        ended: Whether the last batch was handed out.
    """

    schema: pa.Schema
    batches: Iterator[pa.RecordBatch]
    position: int
    first: int
    close: Callable[[], None] = lambda: None
    truncated: bool = False
    ended: bool = False

    @classmethod
    def of_dicts(
        cls,
        store: GlobalStore,
        columns: Sequence[str],
        rows: Iterable[Sequence[Any] | Mapping[str, Any]],
        *,
        position: int | None = None,
        rows_max: int | None = None,
        types: Mapping[str, pa.DataType] | None = None,
    ) -> Rows:
        """Rows of text, unless ``types`` says otherwise; mappings are read by the columns' names."""
        schema = pa.schema([(name, (types or {}).get(name, pa.string())) for name in columns])
        answer = cls(schema, iter(()), store.position[0] if position is None else position, store.first)

        def batches() -> Iterator[pa.RecordBatch]:
            source, left = iter(rows), rows_max
            while chunk := list(islice(source, BATCH_ROWS if left is None else min(BATCH_ROWS, left + 1))):
                if left is not None and len(chunk) > left:
                    answer.truncated, chunk = True, chunk[:left]
                left = None if left is None else left - len(chunk)
                yield _batch(schema, chunk)
                if answer.truncated:
                    return

        answer.batches = batches()
        return answer


def _batch(schema: pa.Schema, rows: list[Any]) -> pa.RecordBatch:
    names = schema.names
    columns = [
        [row[name] for row in rows] if isinstance(rows[0], Mapping) else [row[at] for row in rows]
        for at, name in enumerate(names)
    ]
    return pa.record_batch([pa.array(c, t) for c, t in zip(columns, schema.types, strict=True)], schema=schema)


def table_rows(store: GlobalStore, sql: str, params: list[Any], limits: Limits) -> Rows:
    """What SQL gives."""
    rows, seconds, nbytes = limits
    result = store.query(sql, params or None, limits=QueryLimits(rows=rows, seconds=seconds, nbytes=nbytes))
    answer = Rows(result.schema, iter(()), result.position, store.first, result.close)

    def batches() -> Iterator[pa.RecordBatch]:
        yield from result
        answer.truncated = result.truncated

    answer.batches = batches()
    return answer


_STATUS: Final = """
SELECT
    position,
    first,
    (SELECT max(time_ns) FROM facts) AS newest_ns,
    (SELECT worker FROM roles WHERE role = 'store') AS holder,
    (SELECT token FROM roles WHERE role = 'store') AS token,
    (SELECT count(*) FROM archives) AS files,
    (SELECT min(first) FROM archives) AS archive_first,
    (SELECT max(last) FROM archives) AS archive_last,
    (SELECT sum(nbytes)::UBIGINT FROM archives) AS archive_nbytes,
    (SELECT max(upto) FROM purges WHERE type = 'LogPurged') AS announced,
    (SELECT max(upto) FROM purges WHERE type = 'PurgeCompleted') AS completed,
    (SELECT count(*) FROM truncations) AS truncations
FROM meta
"""


def status_rows(store: GlobalStore, limits: Limits) -> Rows:
    """How far the store is, and what it knows of archive and purges: nothing of any tenant."""
    return table_rows(store, _STATUS, [], limits)


def state_rows(store: GlobalStore, seq: int | None, tenant: str, limits: Limits) -> Rows:
    """The rows that held at a position, by kind."""
    at = store.position[0] if seq is None else seq
    tables = TimeTravel(store).state_at(at)

    def rows() -> Iterator[tuple[str, str]]:
        for name, table in tables.items():
            for batch in table.to_batches(max_chunksize=BATCH_ROWS):
                yield from ((_kind(name), _text(row)) for row in batch.to_pylist() if _of(tenant, row))

    return Rows.of_dicts(store, ("kind", "row"), rows(), position=at, rows_max=limits[0])


def diff_rows(store: GlobalStore, start: int | None, end: int | None, tenant: str, limits: Limits) -> Rows:
    """What differs between two positions."""
    now = store.position[0]
    found = TimeTravel(store).diff(now if start is None else start, now if end is None else end)

    def rows() -> Iterator[tuple[str, str, str | None, str | None]]:
        for name, difference in found.items():
            kind = _kind(name)
            yield from (("added", kind, None, _text(row)) for row in difference.added if _of(tenant, row))
            yield from (("removed", kind, _text(row), None) for row in difference.removed if _of(tenant, row))
            for before, after in difference.changed:
                if _of(tenant, before):
                    yield ("changed", kind, _text(before), _text(after))

    at = now if end is None else end
    return Rows.of_dicts(store, ("change", "kind", "before", "after"), rows(), position=at, rows_max=limits[0])


def fact_rows(
    store: GlobalStore, op: Literal["history", "why"], kind: Any, tenant: str, name: str, limit: int | None
) -> Rows:
    """The facts about something, or those that led to it."""
    travel = TimeTravel(store)
    found = travel.history(kind, tenant, name) if op == "history" else travel.why(kind, tenant, name)
    facts = [fact for fact in found if _of(tenant, fact)]
    facts = facts if limit is None else facts[-limit:]
    types = {"seq": pa.uint64(), "token": pa.uint64(), "expected": pa.uint64(), "time_ns": pa.int64()}
    types |= {"kept": pa.bool_()}
    return Rows.of_dicts(store, list(found[0]), facts, types=types)


def _of(tenant: str, row: Mapping[str, Any]) -> bool:
    """Whether a row is that tenant's, or nobody's."""
    return row.get("tenant") in (None, tenant)


def _kind(table: str) -> str:
    return _SINGULAR.get(table, table.removesuffix("s"))


def _text(row: Mapping[str, Any]) -> str:
    return json.dumps({name: value for name, value in row.items() if name not in _VALIDITY}, default=str)


def pieces(rows: Rows, *, nbytes_max: int) -> Iterator[tuple[bytes, int]]:
    """The stream in pieces of a size, each with the number of rows up to its end. ``rows.ended`` tells the last one."""
    sink, buffer, count = io.BytesIO(), bytearray(), 0
    with pa.ipc.new_stream(sink, rows.schema) as writer:
        for batch in rows.batches:
            writer.write_batch(batch)
            count += batch.num_rows
            buffer += _taken(sink)
            while len(buffer) > nbytes_max:
                yield bytes(buffer[:nbytes_max]), count
                del buffer[:nbytes_max]
    buffer += _taken(sink)
    while len(buffer) > nbytes_max:
        yield bytes(buffer[:nbytes_max]), count
        del buffer[:nbytes_max]
    rows.ended = True
    yield bytes(buffer), count


def _taken(sink: io.BytesIO) -> bytes:
    data = sink.getvalue()
    sink.seek(0)
    sink.truncate()
    return data
