"""What people see of states, changes and facts, and which command lines cannot be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tensorbus.cli._app import run
from tensorbus.cli._store import StoreStatus, _log_facts, _print
from tensorbus.cli._travel import _change_line, _print_facts, _print_state, moment
from tensorbus.sdk import FactRecord, State, StateChange
from tensorbus.transport import WorkerCard, locked, run_dir, write_card

ID = "tb1:" + "a" * 52
NONE: dict[str, Any] = {"position": {"TB": 9}, "first": 0}


@pytest.mark.parametrize(
    ("text", "found"), [("17", 17), ("2026-01-31T12:00:00Z", "2026-01-31T12:00:00Z"), ("-1", "-1")]
)
def test_a_moment_is_a_number_or_left_to_the_sdk(text: str, found: object) -> None:
    assert moment(text) == found


def test_a_state_is_tables_of_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    keys = ({"key": "a/b", "artifact": ID, "gone": None}, {"key": "x\ny", "artifact": None, "gone": None})
    sessions = ({"worker": "w1", "roles": ["basic", "store"], "live": True, "pid": 7},)
    found = State(**NONE, keys=keys, sessions=sessions)
    _print_state(found, {"keys": found.keys, "artifacts": (), "sessions": found.sessions})
    text = capsys.readouterr().out
    assert text.startswith("at position 9\n\n2 keys\nKEY     ARTIFACT\n")
    assert f"a/b     {ID[:20]}…" in text
    assert '"x\\ny"  -' in text
    assert "1 session\nWORKER  ROLES        LIVE  PID\nw1      basic+store  true    7" in text
    assert "artifacts" not in text


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (StateChange(change="added", kind="key", before=None, after={"key": "k"}), "+ key      k"),
        (
            StateChange(change="removed", kind="version", before={"name": "p", "version": 3}, after=None),
            "- version  p 3",
        ),
        (
            StateChange(
                change="changed", kind="key", before={"key": "k", "artifact": "a"}, after={"key": "k", "artifact": None}
            ),
            "~ key      k  artifact: a -> -",
        ),
        (StateChange(change="added", kind="newer", before=None, after={"x": 1, "y": "z"}), "+ newer    1 z"),
    ],
)
def test_a_change_is_one_line(change: StateChange, line: str) -> None:
    assert _change_line(change) == line


def fact(**more: Any) -> FactRecord:
    base: dict[str, Any] = {"seq": 5, "time_ns": 1_700_000_000_000_000_000, "type": "KeyBound", "author": "w1"}
    return FactRecord(
        **{**base, "name": "k", "artifact": ID, "body": {"key": "k", "nbytes": 2048, "type": "KeyBound"}, **more}
    )


def test_facts_are_a_chain(capsys: pytest.CaptureFixture[str]) -> None:
    dropped = fact(seq=16, kept=False, why="held", principal="s1", reason="it names k", body={})
    _print_facts([fact(reason="about k"), dropped], as_json=False, reasons=True)
    head, first, second = capsys.readouterr().out.splitlines()
    assert head.split() == ["SEQ", "TIME", "FACT", "BY", "ABOUT", "WHY", "FATE", "DETAILS"]
    assert first.startswith("  5  2023-11-14 22:13:20.000Z  KeyBound  w1 ")
    assert f"k {ID[:20]}…" in first
    assert first.endswith("nbytes=2.0KiB")
    assert "w1 for s1" in second
    assert second.endswith("it names k  dropped: held")
    _print_facts([fact()], as_json=False)
    assert "FATE" not in capsys.readouterr().out
    _print_facts([dropped], as_json=True)
    assert json.loads(capsys.readouterr().out)["why"] == "held"


def test_the_stores_as_people_see_them(capsys: pytest.CaptureFixture[str]) -> None:
    log = {
        "holder": "s1", "token": 3, "files": 2, "archive_first": 1, "archive_last": 90, "archive_nbytes": 2048,
        "announced": 80, "completed": 40, "truncations": 0, "newest_ns": 1,
    }  # fmt: skip
    stores = [
        StoreStatus(worker="s1", position=99, lag=1, first=0, newest_ns=1),
        StoreStatus(worker="s2", error="gone"),
    ]
    _print(stores, log)
    text = capsys.readouterr().out
    assert "s1     answers  yes              99    1  the log's" in text
    assert "s2     silent" in text
    assert "s2: gone" in text
    assert ("archived", "1 to 90 in 2 files, 2.0 KiB") in _log_facts(log)
    assert ("purged", "up to 40, announced up to 80") in _log_facts(log)
    empty = dict.fromkeys(log) | {"truncations": 0}
    assert dict(_log_facts(empty))["archived"] == "nothing yet"
    _print([], None)
    assert "--roles store" in capsys.readouterr().out


@pytest.mark.parametrize(
    "args",
    [
        ["query"],
        ["query", "select 1", "--tables"],
        ["query", "select 1", "--json", "--format", "csv"],
        ["query", "select 1", "--format", "arrow"],
        ["query", "select 1", "-o", "x"],
        ["query", "select 1", "--rows", "-1"],
        ["diff"],
        ["history"],
        ["why", "k", "--kind", "tensor"],
        ["state", "--only", "tensors"],
        ["store", "frobnicate"],
    ],
)
def test_command_lines_that_cannot_be(args: list[str], home: Path) -> None:
    assert run([*args, "--home", str(home)] if args[-1] != "frobnicate" else args) == 2


def test_rebuild_marks_the_store_that_there_is(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["store", "rebuild", "--home", str(home)]) == 3
    (home / "store").mkdir()
    (home / "store" / "s1.duckdb").touch()
    assert run(["store", "rebuild", "--home", str(home), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told == {"worker": "s1", "mark": str(home / "store" / "s1.rebuild"), "running": False}
    assert (home / "store" / "s1.rebuild").exists()
    assert run(["store", "rebuild", "--home", str(home), "--worker", "s9"]) == 3
    card = WorkerCard(
        worker="s2", incarnation="i", host_id="h", roles=("gateway", "store"), pid=1, socket="s", control="", data=""
    )
    directory = run_dir(home)
    with locked(directory / "s2.lock", what="the test"):
        write_card(directory, card)
        assert run(["store", "rebuild", "--home", str(home)]) == 2
        assert "--worker s1 or --worker s2" in capsys.readouterr().err
        assert run(["store", "rebuild", "--home", str(home), "--worker", "s2"]) == 0
        assert "it begins now" in capsys.readouterr().out
