"""The past as frozen records: states, what changed between two, and facts with their fate."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from datetime import datetime
from fractions import Fraction
from typing import Any, Final, Literal, TypeAlias

from tensorbus.clock import NS_PER_S
from tensorbus.errors import CorruptError, InvalidArgumentError
from tensorbus.sdk._plain import a_type
from tensorbus.sdk._records import Position, at_least_seq

Moment: TypeAlias = "int | float | str | datetime | Position"
"""A sequence (``int``), or a time: seconds since the Unix epoch (``float``), a ``datetime`` with its zone, ISO text."""

Row: TypeAlias = Mapping[str, Any]
Kind: TypeAlias = Literal["artifact", "key", "series", "worker"]
KINDS: Final = ("artifact", "key", "series", "worker")
_TIME_NS_MAX: Final = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What was where at one position. The rows are those of the store's tables, by column (``docs/store.md``).

    Attributes:
        position: Where in the log.
        first: Sequence at which the store's history begins; 0: with the log.
        quarantines: Copies with wrong bytes, which nobody is served from.
        sessions: The workers.
        operations: Those that run, and the newest that have ended.
        roles: Who has which role that one worker at a time may have.
    """

    position: Position
    first: int
    artifacts: tuple[Row, ...] = ()
    replicas: tuple[Row, ...] = ()
    quarantines: tuple[Row, ...] = ()
    keys: tuple[Row, ...] = ()
    versions: tuple[Row, ...] = ()
    views: tuple[Row, ...] = ()
    leases: tuple[Row, ...] = ()
    sessions: tuple[Row, ...] = ()
    operations: tuple[Row, ...] = ()
    roles: tuple[Row, ...] = ()


STATE_TABLES: Final = tuple(field.name for field in fields(State) if field.name not in ("position", "first"))


@dataclass(frozen=True, slots=True, kw_only=True)
class StateChange:
    """What differs between two states, of one thing.

    Attributes:
        change: ``added``, ``removed`` or ``changed``.
        kind: What it is: ``artifact``, ``replica``, ``key``, ``version``, ``view``, ``lease``, ``session``,
            ``operation`` or ``role``.
        before: Its row in the earlier state, ``None`` if it was not there.
        after: Its row in the later one.
    """

    change: str
    kind: str
    before: Row | None
    after: Row | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FactRecord:
    """A message of the log and what became of it.

    Attributes:
        seq: Its sequence; the log's order.
        time_ns: Stream time, nanoseconds since the Unix epoch.
        type: What happened, e.g. ``ArtifactPut``.
        name: The key or series that it is about.
        worker: The worker that it is about; ``author`` wrote it, and ``principal`` is for whom.
        token: The fencing token under which the author acted.
        cause: Id of the fact that led to this one.
        kept: Whether it became true; a dropped one changed nothing, and ``why`` says the reason in a word.
        body: The fact's own fields.
        reason: In the answer of ``why``: what it has to do with what was asked for.
    """

    seq: int
    time_ns: int
    type: str
    kind: str | None = None
    tenant: str | None = None
    artifact: str | None = None
    name: str | None = None
    worker: str | None = None
    author: str | None = None
    incarnation: str | None = None
    principal: str | None = None
    token: int | None = None
    event_id: str | None = None
    cause: str | None = None
    traceparent: str | None = None
    expected: int | None = None
    kept: bool = True
    why: str | None = None
    body: Row
    reason: str | None = None


_FACT_FIELDS: Final = frozenset(field.name for field in fields(FactRecord))


def moment(at: object, what: str = "at") -> dict[str, int] | None:
    """A point of the log as the protocol has it; ``None`` stays that.

    Raises:
        InvalidArgumentError: If it is none; a time must say its zone.
    """
    match at:
        case None:
            return None
        case bool():
            pass
        case int() | Mapping():
            seq = at_least_seq(at, what=what)
            assert seq is not None, "only None gives None"
            return {"seq": seq}
        case float() if math.isfinite(at):
            return _time(Fraction(at), what)
        case datetime():
            return _of_datetime(at, what)
        case str():
            try:
                return _of_datetime(datetime.fromisoformat(at), what)
            except ValueError as exc:
                raise InvalidArgumentError(_not_a_moment(at, what)) from exc
    raise InvalidArgumentError(_not_a_moment(at, what))


def _of_datetime(at: datetime, what: str) -> dict[str, int]:
    offset = at.utcoffset()
    if offset is None:
        text = at.isoformat()
        raise InvalidArgumentError(f"{what} {text} does not say its time zone; for UTC write {text}Z")
    since = at.replace(tzinfo=None) - offset - datetime(1970, 1, 1)
    return _time(Fraction(since.days * 86_400 + since.seconds) + Fraction(since.microseconds, 1_000_000), what)


def _time(seconds: Fraction, what: str) -> dict[str, int]:
    time_ns = int(seconds * NS_PER_S)
    if not 0 <= time_ns <= _TIME_NS_MAX:
        raise InvalidArgumentError(f"{what} is no time from 1970 to 2262")
    return {"time_ns": time_ns}


def _not_a_moment(at: object, what: str) -> str:
    shown = f"{at!r:.60}" if isinstance(at, str | float | bool) else a_type(at)
    return (
        f"{what} is a sequence of the log (int), a time in seconds since 1970 (float), a datetime, or ISO text with a "
        f"time zone such as 2026-01-31T12:00:00Z, not {shown}"
    )


def parameters(values: Iterable[object]) -> list[object]:
    """What stands for the ``?`` of a statement.

    Raises:
        InvalidArgumentError: If one is no JSON value; a time is given as ISO text.
    """
    found: list[object] = []
    for number, value in enumerate(values, 1):
        if not isinstance(value, str | bool | int | float | None) or value in (math.inf, -math.inf) or value != value:
            raise InvalidArgumentError(
                f"parameter {number} is a str, int, finite float, bool or None, not {a_type(value)}", parameter=number
            )
        found.append(value)
    return found


def state_of(rows: Iterable[Row], *, position: Position, first: int) -> State:
    """The state in the rows of an answer; kinds from a newer store are left out."""
    tables: dict[str, list[Row]] = {name: [] for name in STATE_TABLES}
    for row in rows:
        tables.get(f"{row['kind']}s", []).append(_json(row["row"]))
    return State(position=position, first=first, **{name: tuple(found) for name, found in tables.items()})


def change_of(row: Row) -> StateChange:
    """The change in a row of an answer."""
    before, after = (None if row[name] is None else _json(row[name]) for name in ("before", "after"))
    return StateChange(change=str(row["change"]), kind=str(row["kind"]), before=before, after=after)


def fact_of(row: Row) -> FactRecord:
    """The fact in a row of an answer; columns from a newer store are left out."""
    known = {name: value for name, value in row.items() if name in _FACT_FIELDS}
    return FactRecord(**{**known, "body": {} if known.get("body") is None else _json(known["body"])})


def _json(text: object) -> Row:
    try:
        value = json.loads(str(text))
    except ValueError as exc:
        raise CorruptError("a row of the store's answer is no JSON") from exc
    if not isinstance(value, dict):
        raise CorruptError("a row of the store's answer is no JSON object")
    return value
