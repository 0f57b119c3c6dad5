"""Questions about the past, answered from the global store's history: state, difference, history and reasons.

Everything here blocks, reads one state of the tables throughout, and may be called from any thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC
from typing import Final, Literal

import duckdb
import pyarrow as pa

from tensorbus.errors import InvalidArgumentError, NotFoundError, UnavailableError
from tensorbus.projections._store import GlobalStore
from tensorbus.projections._store_db import one
from tensorbus.projections._store_schema import BY_NAME, ENTITIES, FACTS, VALID, Entity, stored

Row = dict[str, object]
Kind = Literal["artifact", "key", "series", "worker"]

_COLUMNS: Final = (*(column.name for column in stored(FACTS)), "trace_id")
_FACT: Final = ", ".join(f'"{name}"' for name in _COLUMNS)
_ABOUT: Final[dict[str, str]] = {
    "artifact": "tenant = $tenant AND artifact = $name",
    "key": "tenant = $tenant AND kind = 'key' AND name = $name",
    "series": "tenant = $tenant AND kind = 'series' AND name = $name",
    "worker": "worker = $name",
}
_PARTS: Final = ("artifacts", "replicas", "quarantines", "views", "leases", "keys", "versions")
"""Tables whose rows belong to an artifact."""


@dataclass(frozen=True, slots=True)
class Difference:
    """How one table differs between two positions; rows are told apart by the table's key."""

    added: tuple[Row, ...]
    removed: tuple[Row, ...]
    changed: tuple[tuple[Row, Row], ...]


class TimeTravel:
    """The past of one store.

    Args:
        store: Where it is read; nothing is kept between two calls.
    """

    def __init__(self, store: GlobalStore) -> None:
        self._store = store

    def bounds(self) -> tuple[int, int]:
        """The first and the last position that can be asked for; 0 in an empty store.

        Before the first only 0, the empty log, is known.
        """
        with self._store.reading() as cursor:
            return _bounds(cursor)

    def state_at(self, seq: int, *, tables: Iterable[str] | None = None) -> dict[str, pa.Table]:
        """The rows that held after the fact at ``seq``, by table.

        Args:
            seq: A sequence of the log; between two facts the earlier one's state holds.
            tables: Which, such as ``replicas``; all when ``None``.

        Raises:
            NotFoundError: If history begins later; the details name the ``first`` position there is.
            UnavailableError: If the store has not read that far.
        """
        wanted = ENTITIES if tables is None else tuple(_entity(name) for name in tables)
        with self._store.reading() as cursor:
            _check(cursor, seq)
            return {entity.name: _table(cursor, f"SELECT * FROM {entity.name}_at(?)", [seq]) for entity in wanted}

    def seq_at(self, time_ns: int) -> int:
        """The last sequence that the log took at or before a time, nanoseconds since the Unix epoch.

        Raises:
            NotFoundError: If history begins later.
        """
        with self._store.reading() as cursor:
            row = one(cursor, "SELECT max(seq) FROM facts WHERE time_ns <= ?", [time_ns])
            if row and row[0] is not None:
                return int(row[0])
            first, last = _bounds(cursor)
            begun = one(cursor, "SELECT time FROM facts ORDER BY seq LIMIT 1")
        since = f" on {begun[0].astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}" if begun else ""
        what = f"that time is before history, which goes from {first}{since} to {last}"
        raise NotFoundError(what, first=first, last=last, time_ns=time_ns)

    def diff(self, from_seq: int, to_seq: int) -> dict[str, Difference]:
        """What differs between two positions, by table. Costs as much as what changed, but for one look at each table.

        Raises:
            InvalidArgumentError: If they are in the wrong order.
            NotFoundError: If history begins later; UnavailableError: If the store has not read that far.
        """
        if from_seq > to_seq:
            raise InvalidArgumentError(f"{from_seq} is after {to_seq}", from_seq=from_seq, to_seq=to_seq)
        with self._store.reading() as cursor:
            _check(cursor, from_seq)
            _check(cursor, to_seq)
            return {entity.name: _difference(cursor, entity, from_seq, to_seq) for entity in ENTITIES}

    def history(self, kind: Kind, tenant: str, name: str) -> list[Row]:
        """The facts about something, oldest first, also dropped ones, with ``why`` they were.

        Args:
            kind: ``artifact`` (by id), ``key``, ``series`` or ``worker``; a worker has no tenant.

        Raises:
            NotFoundError: If there is none in this history.
        """
        with self._store.reading() as cursor:
            found = _facts(cursor, _about(kind), _named(kind, tenant, name))
        if not found:
            raise NotFoundError(f"no fact is about the {kind} {name!r}", name=name, kind=kind)
        return found

    def why(self, kind: Kind, tenant: str, name: str) -> list[Row]:
        """The facts that led to the present state of something, oldest first, each with its ``reason``.

        These are the kept facts about it, those that changed its rows (the end of a worker's session, say), for a key
        also those of the artifact it names, then whatever these name as their cause, and what shares a trace with them.

        Raises:
            NotFoundError: If there is no such thing now; if there was, the details say ``since`` which sequence not.
        """
        _about(kind)
        reasons: dict[int, str] = {}
        with self._store.reading() as cursor:
            try:
                _of_present(cursor, reasons, kind, tenant, name)
            except NotFoundError as exc:
                since = _gone_since(cursor, kind, tenant, name)
                if since is None:
                    raise
                what = f"there is no {kind} {name!r} since {since}; its `history` has the facts about it"
                raise NotFoundError(what, name=name, kind=kind, since=since) from exc
            _of_causes(cursor, reasons)
            _of_traces(cursor, reasons)
            found = _facts(cursor, "list_contains($seqs, seq)", {"seqs": list(reasons)})
        return [{**fact, "reason": reasons[_number(fact["seq"])]} for fact in found]


# -- where history is known ------------------------------------------------------------------------------------------


def _bounds(cursor: duckdb.DuckDBPyConnection) -> tuple[int, int]:
    sql = "SELECT if(first > 0, first, (SELECT coalesce(min(seq), 0) FROM facts)), position FROM meta"
    first, position = one(cursor, sql) or (0, 0)
    return first, position


def _check(cursor: duckdb.DuckDBPyConnection, seq: int) -> None:
    first, position = _bounds(cursor)
    whole = one(cursor, "SELECT first = 0 FROM meta")
    if seq < first and not (seq == 0 and whole and whole[0]):
        what = f"position {seq} is before history, which goes from {first} to {position}"
        raise NotFoundError(what, first=first, last=position, seq=seq)
    if seq > position:
        what = f"the store has read history from {first} to {position}, not to {seq}"
        raise UnavailableError(what, first=first, position=position, seq=seq)


# -- differences -----------------------------------------------------------------------------------------------------


def _difference(cursor: duckdb.DuckDBPyConnection, entity: Entity, low: int, high: int) -> Difference:
    ended = "valid_from <= $low AND valid_to > $low AND valid_to <= $high"
    begun = "valid_from > $low AND valid_from <= $high AND (valid_to IS NULL OR valid_to > $high)"
    bounds: dict[str, object] = {"low": low, "high": high}
    before, after = (
        {
            tuple(row[name] for name in entity.key): row
            for row in _rows(cursor, f"SELECT * FROM {entity.history} WHERE {which} ORDER BY ALL", bounds)
        }
        for which in (ended, begun)
    )
    both = ((before[key], row) for key, row in after.items() if key in before)
    return Difference(
        added=tuple(row for key, row in after.items() if key not in before),
        removed=tuple(row for key, row in before.items() if key not in after),
        changed=tuple((old, new) for old, new in both if _said(old) != _said(new)),
    )


def _said(row: Row) -> Row:
    """A row without when it held: one that ended and came back as it was is no difference."""
    return {name: value for name, value in row.items() if name not in {column.name for column in VALID}}


# -- reasons ---------------------------------------------------------------------------------------------------------


def _of_present(cursor: duckdb.DuckDBPyConnection, reasons: dict[int, str], kind: Kind, tenant: str, name: str) -> None:
    match kind:
        case "artifact":
            _of_artifact(cursor, reasons, tenant, name)
        case "key":
            key = _present(cursor, "keys", 'tenant = $tenant AND "key" = $name', tenant, name)
            _of_about(cursor, reasons, kind, tenant, name, since=0)
            _note(reasons, [_number(key["valid_from"])], "changed keys")
            if key["artifact"] is not None:
                _of_artifact(cursor, reasons, tenant, str(key["artifact"]))
        case "series":
            _of_about(cursor, reasons, kind, tenant, name, since=0)
            sql = "SELECT unnest([valid_from, valid_to]) FROM versions_history WHERE tenant = $tenant AND name = $name"
            _note(reasons, _numbers(cursor, sql, {"tenant": tenant, "name": name}), "changed versions")
        case "worker":
            session = _present(cursor, "sessions", "worker = $name", tenant, name)
            _of_about(cursor, reasons, kind, tenant, name, since=_number(session["opened"]))
    if not reasons:
        raise NotFoundError(f"no fact is about the {kind} {name!r}", name=name, kind=kind)


def _gone_since(cursor: duckdb.DuckDBPyConnection, kind: Kind, tenant: str, name: str) -> int | None:
    """When that went which has no row now: the end of its last row, else the last fact about it."""
    if kind == "series":
        return None  # never forgotten
    table, column = {"artifact": ("artifacts", "artifact"), "key": ("keys", "key"), "worker": ("sessions", "worker")}[
        kind
    ]
    which = f'"{column}" = $name' + ("" if kind == "worker" else " AND tenant = $tenant")
    params = _named(kind, tenant, name)
    ended = _numbers(cursor, f"SELECT max(valid_to) FROM {table}_history WHERE {which}", params)
    return next(iter(ended or _numbers(cursor, f"SELECT max(seq) FROM facts WHERE {_about(kind)}", params)), None)


def _of_artifact(cursor: duckdb.DuckDBPyConnection, reasons: dict[int, str], tenant: str, name: str) -> None:
    born = _number(_present(cursor, "artifacts", "tenant = $tenant AND artifact = $name", tenant, name)["born"])
    _of_about(cursor, reasons, "artifact", tenant, name, since=born)
    for table in _PARTS:
        sql = (
            f"SELECT unnest([valid_from, valid_to]) FROM {table}_history "
            "WHERE tenant = $tenant AND artifact = $name AND valid_from >= $born"
        )
        _note(reasons, _numbers(cursor, sql, {"tenant": tenant, "name": name, "born": born}), f"changed {table}")


def _of_about(
    cursor: duckdb.DuckDBPyConnection, reasons: dict[int, str], kind: Kind, tenant: str, name: str, *, since: int
) -> None:
    sql = f"SELECT seq FROM facts WHERE kept AND seq >= $since AND {_about(kind)}"
    found = _numbers(cursor, sql, {**_named(kind, tenant, name), "since": since})
    _note(reasons, found, f"about the {kind}" if kind != "artifact" else f"about artifact {name}")


def _of_causes(cursor: duckdb.DuckDBPyConnection, reasons: dict[int, str]) -> None:
    """Facts that others name as their cause, then those that these name, and so on."""
    sql = (
        "SELECT c.seq, f.seq FROM facts f JOIN facts c ON c.event_id = f.cause "
        "WHERE list_contains($seqs, f.seq) ORDER BY c.seq, f.seq"
    )
    fresh = list(reasons)
    while fresh:
        found = cursor.execute(sql, {"seqs": fresh}).fetchall()
        fresh = [cause for cause, _ in found if cause not in reasons]
        for cause, effect in found:
            reasons.setdefault(cause, f"cause of {effect}")


def _of_traces(cursor: duckdb.DuckDBPyConnection, reasons: dict[int, str]) -> None:
    sql = (
        "SELECT seq, trace_id FROM facts WHERE kept AND trace_id IN "
        "(SELECT trace_id FROM facts WHERE list_contains($seqs, seq) AND trace_id IS NOT NULL) ORDER BY seq"
    )
    for seq, trace in cursor.execute(sql, {"seqs": list(reasons)}).fetchall():
        reasons.setdefault(seq, f"same trace {trace}")


def _note(reasons: dict[int, str], seqs: Iterable[int], reason: str) -> None:
    for seq in seqs:
        reasons.setdefault(seq, reason)


# -- SQL -------------------------------------------------------------------------------------------------------------


def _about(kind: str) -> str:
    if kind not in _ABOUT:
        raise InvalidArgumentError(f"there is no history of a {kind!r}; it is one of {', '.join(_ABOUT)}")
    return _ABOUT[kind]


def _entity(name: str) -> Entity:
    if name not in BY_NAME:
        raise InvalidArgumentError(f"there is no table {name!r} with a history; there are {', '.join(BY_NAME)}")
    return BY_NAME[name]


def _named(kind: str, tenant: str, name: str) -> dict[str, object]:
    return {"name": name} if kind == "worker" else {"tenant": tenant, "name": name}


def _present(cursor: duckdb.DuckDBPyConnection, table: str, which: str, tenant: str, name: str) -> Row:
    params = _named("worker" if table == "sessions" else table, tenant, name)
    found = _rows(cursor, f"SELECT * FROM {table} WHERE {which}", params)
    if not found:
        raise NotFoundError(f"nothing in {table} is called {name!r} now", name=name, table=table)
    return found[0]


def _facts(cursor: duckdb.DuckDBPyConnection, which: str, params: dict[str, object]) -> list[Row]:
    return _rows(cursor, f"SELECT {_FACT} FROM facts WHERE {which} ORDER BY seq", params)


def _rows(cursor: duckdb.DuckDBPyConnection, sql: str, params: dict[str, object]) -> list[Row]:
    found = cursor.execute(sql, params)
    names = [column[0] for column in found.description or ()]
    return [dict(zip(names, row, strict=True)) for row in found.fetchall()]


def _numbers(cursor: duckdb.DuckDBPyConnection, sql: str, params: dict[str, object]) -> list[int]:
    return [row[0] for row in cursor.execute(sql, params).fetchall() if row[0] is not None]


def _number(value: object) -> int:
    if not isinstance(value, int):
        raise InvalidArgumentError(f"{value!r} is no sequence")
    return value


def _table(cursor: duckdb.DuckDBPyConnection, sql: str, params: Sequence[object]) -> pa.Table:
    return cursor.sql(sql, params=list(params)).to_arrow_table()
