"""``query``: SQL over the store's tables, of a running system or of a file."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from tensorbus.cli._client import with_bus
from tensorbus.cli._options import CLIENT, GivenPath, json_option, takes_settings
from tensorbus.cli._output import emit_json, table
from tensorbus.cli._reader import while_read
from tensorbus.cli._rows import FORMATS, Printer, printer
from tensorbus.config import Resolved

if TYPE_CHECKING:
    from tensorbus.sdk import AsyncBus, AsyncQueryResult

ROWS: Final = 100_000


@click.command(short_help="Ask the store in SQL.")
@click.argument("sql", required=False)
@click.option("--tables", is_flag=True, help="List the tables and their columns instead.")
@click.option(
    "--format", "form", type=click.Choice(FORMATS), default="table", show_default=True, help="How to print the rows."
)
@click.option("-o", "--output", type=GivenPath(), metavar="FILE", help="Where --format arrow writes.")
@click.option(
    "--rows", type=click.IntRange(min=0), default=ROWS, show_default=True, metavar="N", help="How many rows at most."
)
@click.option("--at-least", type=click.IntRange(min=0), metavar="SEQ", help="Wait until the store has read so far.")
@click.option("--db", type=GivenPath(), metavar="FILE", help="Ask a file that `archive restore` made instead.")
@takes_settings("subject_prefix", *CLIENT)
@json_option
def query(
    resolved: Resolved,
    *,
    sql: str | None,
    tables: bool,
    form: str,
    output: Path | None,
    rows: int,
    at_least: int | None,
    db: Path | None,
    as_json: bool,
) -> None:
    """Ask the store in SQL (DuckDB's): what is where now, and the whole history. SQL may be `-`: standard input.

    It is read-only, one statement at a time. `tensorbus query --tables` lists the tables. --json is --format json.
    """
    if tables == (sql is not None):
        raise click.UsageError("give SQL, or --tables")
    if as_json and form not in ("table", "json"):
        raise click.UsageError(f"--json and --format {form} exclude each other")
    form = "json" if as_json else form
    if tables:
        _tables(resolved, db, as_json=form == "json")
        return
    statement = sys.stdin.read() if sql == "-" else str(sql)
    out = printer(form, output)
    if db is not None:
        _ask_file(db, statement, rows, out, prefix=resolved.settings.subject_prefix)
        return

    async def work(bus: AsyncBus) -> None:
        async with await bus.query(statement, rows=rows, at_least=at_least) as result:
            await while_read(_print(result, out))
            _say_cut(cut=result.truncated is True, rows=rows)

    with_bus(resolved, work)


async def _print(result: AsyncQueryResult, out: Printer) -> None:
    with _whole(out):
        async for batch in result.batches():
            out.add(batch)
        out.end(result.schema)


def _say_cut(*, cut: bool, rows: int) -> None:
    if cut:
        print(f"tensorbus: there are more rows than these {rows}; --rows asks for more", file=sys.stderr)


def _ask_file(path: Path, sql: str, rows: int, out: Printer, *, prefix: str) -> None:
    from tensorbus.events import Subjects
    from tensorbus.projections import GlobalStore, QueryLimits

    store = GlobalStore.open(path, subjects=Subjects(prefix), create=False)
    try:
        with store.query(sql, limits=QueryLimits(rows=rows)) as result, _whole(out):
            for batch in result:
                out.add(batch)
            out.end(result.schema)
        _say_cut(cut=result.truncated, rows=rows)
    finally:
        store.close()


@contextmanager
def _whole(out: Printer) -> Iterator[None]:
    """Have nothing left of what is not printed to its end."""
    try:
        yield
    except BaseException:
        out.give_up()
        raise


def _tables(resolved: Resolved, db: Path | None, *, as_json: bool) -> None:
    if db is not None:
        from tensorbus.projections import describe

        names = ("table", "column", "type", "text")
        _print_tables([dict(zip(names, row, strict=True)) for row in describe()], as_json=as_json)
        return

    async def work(bus: AsyncBus) -> None:
        _print_tables(await bus.store_tables(), as_json=as_json)

    with_bus(resolved, work)


def _print_tables(columns: Iterable[dict[str, str]], *, as_json: bool) -> None:
    if as_json:
        for column in columns:
            emit_json(column)
        return
    for number, (title, rows) in enumerate(groupby(columns, lambda column: column["table"])):
        print(title if number == 0 else f"\n{title}")
        table(("  COLUMN", "TYPE", "MEANING"), [(f"  {row['column']}", row["type"], row["text"]) for row in rows])
