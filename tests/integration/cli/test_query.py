"""The past on the command line, against a real store: what is printed, files, rebuilding, and the archive."""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tensorbus as tb
from tensorbus.cli._app import run
from tensorbus.testing._processes import WorkerProgram, wait_until
from tensorbus.transport import living_workers
from tests.servers import Server

pytestmark = pytest.mark.integration


@dataclass(frozen=True)
class Place:
    """A home with a worker and a store that archives at once."""

    home: Path
    basic: WorkerProgram
    store: WorkerProgram
    prefix: str


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.splitlines()]


Tb = Callable[..., Ran]


@pytest.fixture(scope="module")
def place(nats_server: Server) -> Iterator[Place]:
    home = Path(tempfile.mkdtemp(prefix="tb-"))
    with nats_server.processes(home / "test-logs") as owner:
        basic = owner.worker("basic", home=home, id="w1")
        store = owner.worker("gateway,store", home=home, id="s1", archive_s=0.2)
        yield Place(home, basic, store, owner.prefix)
    shutil.rmtree(home, ignore_errors=True)


@pytest.fixture
def call(place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Tb:
    """Runs a command line in this process."""
    for name in [name for name in os.environ if name.startswith("TENSORBUS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("TENSORBUS_HOME", str(place.home))
    monkeypatch.setenv("TENSORBUS_SUBJECT_PREFIX", place.prefix)

    def ran(*args: object) -> Ran:
        capsys.readouterr()
        code = run([str(arg) for arg in args])
        out, err = capsys.readouterr()
        return Ran(code, out, err)

    return ran


@dataclass(frozen=True)
class Told:
    """What was done, and where it is on the log."""

    artifact: str
    put: int
    end: int


@pytest.fixture
def told(place: Place) -> Told:
    """A put under the key ``a/b``, which is then unbound, and a version of ``policy``."""
    with tb.connect(home=place.home) as bus:
        art = bus.put({"w": np.arange(9, dtype=np.uint8)}, key="a/b", rebind=True)
        bus.publish("policy", art)
        return Told(art.id, art.position["TB"], bus.unbind("a/b")["TB"])


def test_query_prints_rows(call: Tb, told: Told) -> None:
    sql = "SELECT key, live FROM keys"
    found = call("query", sql, "--at-least", told.end)
    assert (found.code, found.out) == (0, "KEY  LIVE\na/b  false\n")
    assert call("query", sql, "--json").lines == [{"key": "a/b", "live": False}]
    assert call("query", sql, "--format", "csv").out == "key,live\na/b,false\n"
    cut = call("query", "SELECT * FROM range(10)", "--rows", 3, "--json")
    assert (len(cut.lines), "more rows" in cut.err) == (3, True)
    refused = call("query", "DELETE FROM facts", "--json")
    assert (refused.code, json.loads(refused.err)["error"]["kind"]) == (2, "invalid_argument")
    assert call("query", "--tables").out.startswith("facts\n")


def test_state_and_diff(call: Tb, told: Told) -> None:
    then, *things = call("state", "--at", told.put, "--only", "keys", "--json").lines
    assert then["position"] == {"TB": told.put}
    assert [(thing["kind"], thing["row"]["key"], thing["row"]["artifact"]) for thing in things] == [
        ("key", "a/b", told.artifact)
    ]
    shown = call("state", "--at", told.put)
    assert shown.code == 0
    assert "1 key\nKEY  ARTIFACT" in shown.out
    assert "w1" in shown.out
    assert call("state", "--at", "yesterday").code == 2
    assert call("state", "--at", "2026-01-01T00:00:00").code == 2
    changes = call("diff", "--from", told.put, "--to", told.end)
    assert "+ version  policy " in changes.out
    assert any(line.startswith("~ key      a/b  artifact: tb1:") for line in changes.out.splitlines())
    kinds = {line["kind"] for line in call("diff", "--from", told.put, "--to", told.end, "--json").lines}
    assert {"key", "version"} <= kinds
    assert call("diff", "--from", told.end, "--to", told.end).out == "nothing changed\n"


def test_history_and_why(call: Tb, told: Told) -> None:
    about = call("history", "a/b", "--at-least", told.end)
    assert about.code == 0
    head, *rows = about.out.splitlines()
    assert head.split()[:5] == ["SEQ", "TIME", "FACT", "BY", "ABOUT"]
    assert "KeyUnbound" in rows[-1]
    assert [line["type"] for line in call("history", "a/b", "--limit", 1, "--json").lines] == ["KeyUnbound"]
    assert "SessionOpened" in call("history", "w1", "--kind", "worker").out
    reasons = call("why", told.artifact, "--json").lines
    assert reasons[0]["type"] == "ArtifactPut"
    assert all(line["reason"] for line in reasons)
    assert "WHY" in call("why", told.artifact).out.splitlines()[0]
    assert call("history", "nobody").code == 3


def test_the_stores_and_the_archive_as_they_are(call: Tb, told: Told, place: Place, tmp_path: Path) -> None:
    def archived() -> bool:
        (status,) = call("store", "status", "--json").lines
        return (status["log"]["archive_last"] or 0) >= told.end

    wait_until(archived, what="the facts in the archive", timeout_s=30)
    (status,) = call("store", "status", "--json").lines
    assert [(store["worker"], store["first"], store["error"]) for store in status["stores"]] == [("s1", 0, None)]
    assert status["log"]["holder"] == "s1"
    text = call("store", "status").out
    assert "s1" in text
    assert "log kept by  s1, token " in text
    for more in ([], ["--alone"]):
        absent = call("archive", "verify", "--url", tmp_path / "nonexist", *more)
        assert absent.code == 3
        assert "there is no archive of the log" in absent.err and "nonexist" in absent.err
    beyond = call("state", "--at", 2**62)
    assert beyond.code == 2 and "whose history goes from " in beyond.err
    early = call("state", "--at", "1971-01-01T00:00:00Z")
    assert early.code == 3 and "before history, which goes from " in early.err
    for alone in ([], ["--alone"]):
        (found,) = call("archive", "verify", *alone, "--json").lines
        assert (found["problems"], found["files"] > 0, found["facts"] > 4) == ([], True, True)
    file = tmp_path / "past.duckdb"
    (made,) = call("archive", "restore", "--into", file, "--json").lines
    assert made["position"] >= told.end
    ids = call("query", "SELECT artifact FROM artifacts", "--db", file, "--json").lines
    assert {"artifact": told.artifact} in ids
    sql = f"SELECT seq, type, kept, body FROM facts WHERE seq <= {told.end} ORDER BY seq"
    assert call("query", sql, "--db", file, "--json").lines == call("query", sql, "--json").lines
    assert call("archive", "restore", "--into", file).code == 5
    _broken(call, place, tmp_path)


def test_a_gateway_that_takes_no_sql_still_tells_how_the_stores_are(call: Tb, told: Told, place: Place) -> None:
    gateway = f"tb+tcp://{next(card.control for card in living_workers(place.home) if card.control)}"
    assert call("query", "SELECT 1", "--url", gateway).code == 10
    (status,) = call("store", "status", "--url", gateway, "--json").lines
    assert [store["kind"] for store in status["stores"]] == [None]
    assert status["log"]["holder"] == "s1"


def _broken(call: Tb, place: Place, tmp_path: Path) -> None:
    """A copy of the archive with a damaged and with a missing file."""
    copy = tmp_path / "copy"
    shutil.copytree(place.home / "archive", copy)
    first = sorted(copy.rglob("*.parquet"))[0]
    body = bytearray(first.read_bytes())
    body[len(body) // 2] ^= 1
    first.write_bytes(body)
    for alone in ([], ["--alone"]):
        found = call("archive", "verify", "--url", copy, *alone)
        assert found.code == 9
        assert "wrong: " in found.out
    assert call("archive", "restore", "--into", tmp_path / "no.duckdb", "--url", copy).code == 9
    first.unlink()
    others = list(copy.rglob("*.parquet"))  # without any it is no archive
    assert call("archive", "verify", "--url", copy).code == (9 if others else 3)
    assert call("archive", "restore", "--into", tmp_path / "no.duckdb", "--url", copy).code == 3
    assert call("archive", "restore", "--into", tmp_path / "no.duckdb", "--url", tmp_path / "empty").code == 3
    assert not list(tmp_path.glob("no.duckdb*"))


def test_a_store_is_made_anew_on_request(call: Tb, told: Told, place: Place) -> None:
    before = call("query", "SELECT seq, type, body FROM facts ORDER BY seq", "--at-least", told.end, "--json").lines
    (asked,) = call("store", "rebuild", "--json").lines
    assert (asked["worker"], asked["running"]) == ("s1", True)

    def anew() -> bool:
        found = call("query", "SELECT seq, type, body FROM facts ORDER BY seq", "--json")
        return not Path(asked["mark"]).exists() and found.code == 0 and found.lines[: len(before)] == before

    wait_until(anew, what="the rows of all history, with no further fact", timeout_s=30)
    assert place.store.alive


def test_without_a_worker_with_memory_the_stores_own_socket_is_asked(place: Place, call: Tb, told: Told) -> None:
    os.kill(place.basic.pid, signal.SIGKILL)
    wait_until(lambda: not place.basic.alive, what="the worker's end")
    assert call("query", "SELECT 1 AS one", "--json").lines == [{"one": 1}]
    assert "answers" in call("store", "status").out
    assert call("archive", "verify").code == 0
