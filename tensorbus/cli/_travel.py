"""``state``, ``diff``, ``history``, ``why``: what was where at a moment, what changed, and by which facts."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from tensorbus.cli._client import with_bus
from tensorbus.cli._options import CLIENT, json_option, takes_settings
from tensorbus.cli._output import emit_json, name, short_id, size, stamp, table
from tensorbus.cli._rows import cell
from tensorbus.config import Resolved

if TYPE_CHECKING:
    from tensorbus.sdk import AsyncBus, FactRecord, State, StateChange

F = TypeVar("F", bound=Callable[..., Any])

COLUMNS: Final = {
    "artifacts": ("artifact", "nbytes", "tensors", "live", "author", "reason"),
    "replicas": ("artifact", "worker", "tier", "nbytes", "view"),
    "quarantines": ("artifact", "worker", "tier", "cause", "view"),
    "keys": ("key", "artifact", "gone"),
    "versions": ("name", "version", "artifact"),
    "views": ("view", "artifact"),
    "leases": ("lease", "artifact", "worker", "purpose", "holder"),
    "sessions": ("worker", "incarnation", "host", "roles", "live", "pid"),
    "operations": ("id", "operation", "artifact", "worker", "state"),
    "roles": ("role", "worker", "token"),
}
"""What people see of a state; --json has every column."""

LABELS: Final = {
    "artifact": ("artifact",),
    "replica": ("artifact", "worker", "tier"),
    "quarantine": ("artifact", "worker", "tier"),
    "key": ("key",),
    "version": ("name", "version"),
    "view": ("view",),
    "lease": ("lease",),
    "session": ("worker",),
    "operation": ("id",),
    "role": ("role",),
}
SIGNS: Final = {"added": "+", "removed": "-", "changed": "~"}
KINDS: Final = ("artifact", "key", "series", "worker")
_NUMBERS: Final = ("nbytes", "tensors", "version", "pid", "token")
_NOT_SHOWN: Final = frozenset(
    {"type", "tenant", "number", "manifest", "incarnation", "artifact", "key", "name", "worker"}
)


def moment(text: str) -> int | str:
    """A sequence of the log, or a time as the SDK takes it, which says what is wrong with one."""
    return int(text) if text.isascii() and text.isdigit() else text


def at_least_option(function: F) -> F:
    """``--at-least``."""
    help_text = "Wait until the store has read so far; changes print their position."
    return click.option("--at-least", type=click.IntRange(min=0), metavar="SEQ", help=help_text)(function)


@click.command(short_help="Show what was where at a moment.")
@click.option(
    "--at", type=moment, metavar="SEQ|TIME", help="A sequence, or a time such as 2026-01-31T12:00:00Z (default: now)."
)
@click.option("--only", type=click.Choice(tuple(COLUMNS)), multiple=True, help="Only this table; may be repeated.")
@at_least_option
@takes_settings(*CLIENT)
@json_option
def state(
    resolved: Resolved, *, at: int | str | None, only: tuple[str, ...], at_least: int | None, as_json: bool
) -> None:
    """Show what was where at a moment: artifacts, replicas, keys, versions, views, leases, workers and roles."""

    async def work(bus: AsyncBus) -> None:
        found = await bus.state(at, at_least=at_least)
        tables = {title: getattr(found, title) for title in COLUMNS if not only or title in only}
        (_emit_state if as_json else _print_state)(found, tables)

    with_bus(resolved, work)


def _emit_state(found: State, tables: Mapping[str, tuple[Mapping[str, Any], ...]]) -> None:
    emit_json({"position": found.position, "first": found.first})
    for title, rows in tables.items():
        for row in rows:
            emit_json({"kind": title.removesuffix("s"), "row": row})


def _print_state(found: State, tables: Mapping[str, tuple[Mapping[str, Any], ...]]) -> None:
    print(f"at position {found.position['TB']}")
    for title, rows in tables.items():
        if not rows:
            continue
        columns = [column for column in COLUMNS[title] if any(row.get(column) is not None for row in rows)]
        print(f"\n{len(rows)} {title if len(rows) > 1 else title.removesuffix('s')}")
        shown = [tuple(_shown(column, row.get(column)) for column in columns) for row in rows]
        table([column.upper() for column in columns], shown, right=[column.upper() for column in _NUMBERS])


@click.command(short_help="Show what changed between two moments.")
@click.option("--from", "start", type=moment, metavar="SEQ|TIME", required=True, help="The earlier sequence or time.")
@click.option("--to", "end", type=moment, metavar="SEQ|TIME", help="The later one (default: now).")
@at_least_option
@takes_settings(*CLIENT)
@json_option
def diff(resolved: Resolved, *, start: int | str, end: int | str | None, at_least: int | None, as_json: bool) -> None:
    """Show what changed between two moments: + what came, - what went, ~ what is different."""

    async def work(bus: AsyncBus) -> None:
        changes = await bus.diff(start, end, at_least=at_least)
        for change in changes:
            emit_json(change) if as_json else print(_change_line(change))
        if not changes and not as_json:
            print("nothing changed")

    with_bus(resolved, work)


def _change_line(change: StateChange) -> str:
    row = change.after or change.before or {}
    label = " ".join(_shown(column, row.get(column)) for column in LABELS.get(change.kind, tuple(row)[:2]))
    line = f"{SIGNS.get(change.change, change.change)} {change.kind:8} {label}"
    if change.before is None or change.after is None:
        return line
    fields = [field for field in change.after if change.before.get(field) != change.after[field]]
    moves = (
        f"{field}: {_shown(field, change.before.get(field))} -> {_shown(field, change.after[field])}"
        for field in fields
    )
    return f"{line}  {', '.join(moves)}".rstrip()


def _takes_ref(function: F) -> F:
    """What ``history`` and ``why`` share."""

    @click.argument("ref")
    @click.option("--kind", type=click.Choice(KINDS), help="What REF names, where that is not clear.")
    @click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Only the newest so many facts.")
    @at_least_option
    @takes_settings(*CLIENT)
    @json_option
    @functools.wraps(function)
    def run(*args: Any, **values: Any) -> Any:
        return function(*args, **values)

    return run  # type: ignore[return-value]  # same call for click, which passes keywords only


@click.command(short_help="Show the facts about one thing.")
@_takes_ref
def history(resolved: Resolved, *, ref: str, kind: Any, limit: int | None, at_least: int | None, as_json: bool) -> None:
    """Show the facts about REF, oldest first, also those that were dropped.

    REF is an artifact's id, or the name of a key, a series or a worker.
    """

    async def work(bus: AsyncBus) -> None:
        _print_facts(await bus.history(ref, kind=kind, limit=limit, at_least=at_least), as_json=as_json)

    with_bus(resolved, work)


@click.command(short_help="Show which facts led to a thing's present state.")
@_takes_ref
def why(resolved: Resolved, *, ref: str, kind: Any, limit: int | None, at_least: int | None, as_json: bool) -> None:
    """Show the facts that led to the present state of REF, oldest first, and why each is among them.

    REF is an artifact's id, or the name of a key, a series or a worker.
    """

    async def work(bus: AsyncBus) -> None:
        _print_facts(await bus.why(ref, kind=kind, limit=limit, at_least=at_least), as_json=as_json, reasons=True)

    with_bus(resolved, work)


def _print_facts(facts: list[FactRecord], *, as_json: bool, reasons: bool = False) -> None:
    if as_json:
        for fact in facts:
            emit_json(fact)
        return
    dropped = any(not fact.kept for fact in facts)
    header = [
        "SEQ",
        "TIME",
        "FACT",
        "BY",
        "ABOUT",
        *(["WHY"] if reasons else []),
        *(["FATE"] if dropped else []),
        "DETAILS",
    ]
    rows = []
    for fact in facts:
        row = [str(fact.seq), stamp(fact.time_ns), fact.type, _by(fact), _about(fact)]
        row += [fact.reason or "-"] if reasons else []
        row += ["kept" if fact.kept else f"dropped: {fact.why}"] if dropped else []
        rows.append([*row, _details(fact)])
    table(header, rows, right=("SEQ",))


def _by(fact: FactRecord) -> str:
    return f"{fact.author or '-'} for {fact.principal}" if fact.principal else fact.author or "-"


def _about(fact: FactRecord) -> str:
    names = [name(fact.name)] if fact.name else []
    names += [short_id(fact.artifact)] if fact.artifact else []
    return " ".join(names) or fact.worker or "-"


def _details(fact: FactRecord) -> str:
    body = {key: value for key, value in fact.body.items() if key not in _NOT_SHOWN and value not in (None, "", [])}
    text = " ".join(f"{key}={_shown(key, value).replace(' ', '')}" for key, value in body.items())
    return cell(text) if text else ""


def _shown(column: str, value: object) -> str:
    if column == "nbytes" and isinstance(value, int):
        return size(value)
    if column == "roles" and isinstance(value, list):
        return "+".join(map(str, value))
    if isinstance(value, str) and value:
        return short_id(value)
    return json.dumps(value) if isinstance(value, dict) else cell(value)
