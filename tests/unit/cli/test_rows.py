"""Rows as tables, JSON, CSV and Arrow files."""

from __future__ import annotations

import csv
import io
import json
import math
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import click
import pyarrow as pa
import pytest

from tensorbus.cli._rows import CELL_CHARS, cell, printer, value_of

BATCH = pa.record_batch(
    {
        "seq": pa.array([7, None], pa.uint64()),
        "key": ["a/b", "new\nline"],
        "time": pa.array([1_700_000_000_123_456_789, None], pa.timestamp("ns")),
        "roles": [["basic", "store"], []],
    }
)


def printed(form: str, capsys: pytest.CaptureFixture[str]) -> str:
    out = printer(form, None)
    out.add(BATCH)
    out.end(BATCH.schema)
    return capsys.readouterr().out


def test_a_table_has_its_numbers_to_the_right(capsys: pytest.CaptureFixture[str]) -> None:
    head, first, second = printed("table", capsys).splitlines()
    assert head.split() == ["SEQ", "KEY", "TIME", "ROLES"]
    assert first.startswith("  7  a/b ")
    assert '["basic", "store"]' in first
    assert second.startswith('  -  "new\\nline"')


def test_json_is_a_line_per_row(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = (json.loads(line) for line in printed("json", capsys).splitlines())
    assert first == {"seq": 7, "key": "a/b", "time": "2023-11-14T22:13:20.123456", "roles": ["basic", "store"]}
    assert second == {"seq": None, "key": "new\nline", "time": None, "roles": []}


def test_csv_can_be_read_back(capsys: pytest.CaptureFixture[str]) -> None:
    rows = list(csv.reader(io.StringIO(printed("csv", capsys))))
    assert rows[0] == ["seq", "key", "time", "roles"]
    assert rows[1:] == [["7", "a/b", "2023-11-14T22:13:20.123456", '["basic", "store"]'], ["", "new\nline", "", "[]"]]


@pytest.mark.parametrize("form", ["table", "csv"])
def test_no_rows_have_a_header(form: str, capsys: pytest.CaptureFixture[str]) -> None:
    printer(form, None).end(BATCH.schema)
    assert "key" in capsys.readouterr().out.lower()


def test_an_arrow_file_is_there_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "rows.arrow"
    out = printer("arrow", path)
    out.add(BATCH)
    assert not path.exists()
    out.end(BATCH.schema)
    assert pa.ipc.open_file(path).read_all().to_batches()[0].equals(BATCH)
    out = printer("arrow", tmp_path / "other.arrow")
    out.add(BATCH)
    out.give_up()
    assert [file.name for file in tmp_path.iterdir()] == ["rows.arrow"]


@pytest.mark.parametrize(("form", "output"), [("arrow", None), ("csv", Path("x"))])
def test_arrow_and_a_file_go_together(form: str, output: Path | None) -> None:
    with pytest.raises(click.UsageError):
        printer(form, output)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "-"),
        ("", '""'),
        (True, "true"),
        (3, "3"),
        (1.5, "1.5"),
        (datetime(2026, 1, 31, 12), "2026-01-31 12:00:00"),
        ({"a": 1}, '{"a": 1}'),
        (b"\x01", '"01"'),
        ("x" * 200, "x" * (CELL_CHARS - 1) + "…"),
    ],
)
def test_a_cell_stays_on_its_line(value: object, shown: str) -> None:
    assert cell(value) == shown


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (math.nan, None),
        (Decimal("1.50"), 1.5),
        (b"\xff", "ff"),
        ((1, [2]), [1, [2]]),
        ({1: math.inf}, {"1": None}),
        (datetime(2026, 1, 31), "2026-01-31T00:00:00"),
    ],
)
def test_values_as_json(value: Any, found: object) -> None:
    assert value_of(value) == found
