"""Rows of queries as tables for people, JSON lines, CSV, or a file in Arrow's format."""

from __future__ import annotations

import csv
import json
import math
import sys
from collections.abc import Iterable, Mapping
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import click

from tensorbus.cli._output import name, table

if TYPE_CHECKING:
    import pyarrow as pa

FORMATS: Final = ("table", "json", "csv", "arrow")
CELL_CHARS: Final = 72
"""A longer text is cut in a table; the other formats have it whole."""


class Printer(Protocol):
    """Takes an answer batch by batch."""

    def add(self, batch: pa.RecordBatch) -> None: ...

    def end(self, schema: pa.Schema) -> None: ...

    def give_up(self) -> None: ...


def printer(form: str, output: Path | None) -> Printer:
    """What prints in that format.

    Raises:
        click.UsageError: If format and output do not go together.
    """
    if (form == "arrow") != (output is not None):
        raise click.UsageError("--format arrow and -o FILE go together")
    if output is not None:
        return _ArrowFile(output)
    made: dict[str, type[_Table] | type[_Json] | type[_Csv]] = {"table": _Table, "json": _Json, "csv": _Csv}
    return made[form]()


class _Table:
    def __init__(self) -> None:
        self._rows: list[tuple[str, ...]] = []

    def add(self, batch: pa.RecordBatch) -> None:
        from tensorbus.sdk import rows_of

        self._rows += [tuple(map(cell, row.values())) for row in rows_of(batch)]

    def end(self, schema: pa.Schema) -> None:
        import pyarrow.types as kinds

        right = [field.name for field in schema if kinds.is_integer(field.type) or kinds.is_floating(field.type)]
        names = list(dict.fromkeys(schema.names))
        table([title.upper() for title in names], self._rows, right=[title.upper() for title in right])

    def give_up(self) -> None: ...


class _Json:
    def add(self, batch: pa.RecordBatch) -> None:
        from tensorbus.sdk import rows_of

        for row in rows_of(batch):
            print(json.dumps(value_of(row)))
        sys.stdout.flush()

    def end(self, schema: pa.Schema) -> None: ...

    def give_up(self) -> None: ...


class _Csv:
    def __init__(self) -> None:
        self._writer = csv.writer(sys.stdout, lineterminator="\n")
        self._begun = False

    def add(self, batch: pa.RecordBatch) -> None:
        from tensorbus.sdk import rows_of

        self._begin(batch.schema)
        self._writer.writerows([_csv_value(value) for value in row.values()] for row in rows_of(batch))
        sys.stdout.flush()

    def end(self, schema: pa.Schema) -> None:
        self._begin(schema)

    def give_up(self) -> None: ...

    def _begin(self, schema: pa.Schema) -> None:
        if not self._begun:
            self._writer.writerow(dict.fromkeys(schema.names))
        self._begun = True


class _ArrowFile:
    """Writes beside the file, and puts it in its place when all is there."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._beside = path.with_name(path.name + ".part")
        self._writer: Any = None

    def add(self, batch: pa.RecordBatch) -> None:
        self._open(batch.schema).write_batch(batch)

    def end(self, schema: pa.Schema) -> None:
        self._open(schema).close()
        self._beside.replace(self._path)

    def give_up(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._beside.unlink(missing_ok=True)

    def _open(self, schema: pa.Schema) -> Any:
        if self._writer is None:
            import pyarrow as pa

            self._writer = pa.ipc.new_file(str(self._beside), schema)
        return self._writer


def cell(value: object) -> str:
    """A value on one line of a table."""
    match value:
        case None:
            return "-"
        case str():
            text = name(value)
        case bool():
            return "true" if value else "false"
        case datetime():
            text = value.isoformat(sep=" ")
        case list() | dict() | tuple() | bytes():
            text = json.dumps(value_of(value))
        case _:
            text = str(value)
    return text if len(text) <= CELL_CHARS else text[: CELL_CHARS - 1] + "…"


def value_of(value: object) -> object:
    """A value as JSON has it: times as ISO text, bytes as hex; what is no number is null."""
    match value:
        case float() if not math.isfinite(value):
            return None
        case str() | int() | float() | None:
            return value
        case datetime():
            return value.isoformat()
        case Decimal():
            return float(value)
        case bytes():
            return value.hex()
        case Mapping():
            return {str(key): value_of(item) for key, item in value.items()}
        case Iterable():
            return [value_of(item) for item in value]
        case _:
            return str(value)


def _csv_value(value: object) -> object:
    if value is None or isinstance(value, str):
        return value
    plain = value_of(value)
    return plain if isinstance(plain, str | int | float) and not isinstance(plain, bool) else json.dumps(plain)
