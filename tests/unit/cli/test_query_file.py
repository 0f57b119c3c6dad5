"""SQL over a store's file, with nothing running."""

from __future__ import annotations

import io
import json
from pathlib import Path

import duckdb
import pyarrow as pa
import pytest

from tensorbus.cli._app import run
from tensorbus.projections import GlobalStore
from tests.unit.projections.store_rig import SUBJECTS, fill, small_log


@pytest.fixture(scope="module")
def db(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("db") / "store.duckdb"
    fill(GlobalStore.open(path, subjects=SUBJECTS), small_log()).close()
    return path


def test_rows_come_in_every_format(db: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sql = "SELECT key, live FROM keys ORDER BY key"
    assert run(["query", sql, "--db", str(db)]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == ["KEY", "LIVE"]
    assert len(rows) == 2
    assert run(["query", sql, "--db", str(db), "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["key"] for line in lines] == [row.split()[0] for row in rows]
    assert run(["query", sql, "--db", str(db), "--format", "csv"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "key,live"
    path = tmp_path / "rows.arrow"
    assert run(["query", sql, "--db", str(db), "--format", "arrow", "-o", str(path)]) == 0
    assert pa.ipc.open_file(path).read_all().to_pylist() == lines


def test_what_is_cut_is_said(db: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["query", "SELECT seq FROM facts ORDER BY seq", "--db", str(db), "--rows", "3", "--json"]) == 0
    out, err = capsys.readouterr()
    assert [json.loads(line)["seq"] for line in out.splitlines()] == [1, 2, 3]
    assert "more rows than these 3" in err


def test_sql_comes_from_standard_input_too(
    db: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("SELECT count(*) AS n FROM facts"))
    assert run(["query", "-", "--db", str(db), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["n"] > 10


def test_the_tables_are_told(db: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["query", "--tables", "--db", str(db)]) == 0
    text = capsys.readouterr().out
    assert text.startswith("facts\n  COLUMN ")
    assert "\n\nartifacts\n" in text
    assert run(["query", "--tables", "--db", str(db), "--json"]) == 0
    assert {"table", "column", "type", "text"} == set(json.loads(capsys.readouterr().out.splitlines()[0]))


@pytest.mark.parametrize(
    ("sql", "code"),
    [("DROP TABLE facts", 2), ("SELECT nothing FROM facts", 2), ("SELECT * FROM read_text('/etc/passwd')", 2)],
)
def test_what_is_refused(db: Path, sql: str, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["query", sql, "--db", str(db)]) == code
    assert capsys.readouterr().err.startswith("tensorbus: ")


def test_a_file_that_is_not_there_is_not_made(tmp_path: Path, db: Path) -> None:
    assert run(["query", "SELECT 1", "--db", str(tmp_path / "none.duckdb")]) == 3
    assert not list(tmp_path.iterdir())
    assert run(["query", "SELECT 1", "--db", str(db), "--subject-prefix", "other"]) == 5


def test_a_file_that_is_no_store_is_said_to_be_none_and_stays_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, empty, other = tmp_path / "notes.txt", tmp_path / "empty.duckdb", tmp_path / "other.duckdb"
    text.write_text("nothing of the kind\n" * 1000)
    empty.touch()
    with duckdb.connect(str(other)) as made:
        made.execute("CREATE TABLE mine AS SELECT 1 AS n")
    for path, words in ((text, "no DuckDB database"), (empty, "no DuckDB database"), (other, "no store")):
        before = path.read_bytes()
        assert run(["query", "SELECT 1", "--db", str(path)]) == 2
        told = capsys.readouterr().err
        assert words in told and str(path) in told
        assert path.read_bytes() == before
    assert run(["query", "SELECT 1", "--db", str(tmp_path)]) == 2
    assert run(["query", "SELECT 1", "--db", str(tmp_path / "missing")]) == 3
