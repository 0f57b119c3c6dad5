"""How benchmarks show, compare and record their rows."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

from benchmarks import _table
from benchmarks._table import (
    Options,
    bounded,
    compare,
    find,
    number,
    parse_options,
    percentile,
    repeated,
    run_peer,
    show,
    size,
    spread,
)
from benchmarks.peers._common import first_bytes, overlapping


def test_a_ratio_above_one_is_better_whatever_the_unit() -> None:
    fast = compare("b", "get", 2.0, "ms", against="ray", against_value=6.0, better="lower", target=2)
    wide = compare("b", "put", 2.0, "GB/s", against="memcpy", against_value=4.0, better="higher", target=0.85)
    assert (fast.ratio, fast.met) == (3.0, True)
    assert (wide.ratio, wide.met, wide.target) == (0.5, False, ">= 0.85x")


def test_an_absent_peer_is_said_and_meets_nothing() -> None:
    row = compare("b", "get", 2.0, "ms", against="ray", against_value=None, better="lower", target=1)
    assert (row.ratio, row.met, row.note) == (None, None, "ray absent")


def test_a_target_beside_an_absent_peer_is_missed() -> None:
    row = repeated(
        "b", "get", [0.002, 0.004, 0.003], "ms", against="ray", theirs=None, better="lower", target=1, scale=1e3
    )
    assert (row.value, row.ratio, row.met) == (3.0, None, False)
    row = repeated("b", "get", [0.002], "ms", against="ray", theirs=0.004, better="lower", target=1, scale=1e3)
    assert (row.ratio, row.met) == (2.0, True)


def test_tensors_over_one_memory_differ_in_their_first_bytes() -> None:
    tensors = overlapping(64 << 10, 16, value=9)
    assert sum(tensor.nbytes for tensor in tensors) == 64 << 10
    assert first_bytes(tensors) == sum(9 + number for number in range(16))


def test_a_bound_is_met_at_the_bound() -> None:
    assert bounded("b", "p95", 50.0, "ms", limit=50, better="lower").met
    assert not bounded("b", "rate", 639.0, "/s", limit=640, better="higher").met
    assert bounded("b", "p95", None, "ms", limit=50, better="lower").met is None


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0, "0"),
        (0.01234, "0.0123"),
        (1.2345, "1.23"),
        (12.345, "12.3"),
        (123.4, "123"),
        (12345.6, "12,346"),
    ],
)
def test_numbers_have_three_digits(value: float | None, text: str) -> None:
    assert number(value) == text


def test_small_helpers() -> None:
    assert (size(1 << 30), size(3 << 19), size(5)) == ("1 GiB", "1.5 MiB", "5 B")
    assert [percentile(range(1, 101), p) for p in (50, 95, 99, 100)] == [50, 95, 99, 100]
    assert percentile([3.0], 99) == 3.0
    assert spread([0.001, 0.002], scale=1000) == "1.00..2.00 (n=2)"
    assert find([{"case": "put", "nbytes": 1, "runs_s": [1]}], case="put", nbytes=1) == [1.0]


def test_rows_are_shown_as_a_table_or_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        bounded("b", "p95", 20.0, "ms", limit=50, better="lower"),
        bounded("b", "x", None, "ms", limit=1, better="lower"),
    ]
    assert show(rows, parse_options("", [])) == 0
    out = capsys.readouterr().out
    assert "<= 50 ms" in out
    assert "absent" in out
    assert show(rows, parse_options("", ["--json", "--quick"])) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["met"] for line in lines] == [True, None]


def test_recorded_rows_are_appended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_table, "RESULTS", tmp_path / "RESULTS.md")
    for _ in range(2):
        show(
            [bounded("b", "p95", 20.0, "ms", limit=50, better="lower")], Options(quick=False, as_json=True, record=True)
        )
    text = (tmp_path / "RESULTS.md").read_text()
    assert text.count("# Results\n") == 1
    assert text.count("| p95 | 20.0 ms |") == 2


@pytest.fixture
def peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A peer whose interpreter is ours, and the folder of its scripts."""
    scripts = tmp_path / "benchmarks" / "peers"
    scripts.mkdir(parents=True)
    binary = tmp_path / "venvs" / "toy" / "bin"
    binary.mkdir(parents=True)
    (binary / "python").symlink_to(sys.executable)
    (binary.parent / ".installed").touch()
    monkeypatch.setattr(_table, "ROOT", tmp_path)
    monkeypatch.setattr(_table, "PEERS", tmp_path / "venvs")
    return scripts


def test_a_peer_answers_in_json_lines_between_its_own_noise(peer: Path) -> None:
    (peer / "toy.py").write_text("print('noise'); print('{\"case\": \"put\"}')")
    assert run_peer("toy", "toy.py") == [{"case": "put"}]


def test_a_failed_or_absent_peer_answers_nothing(peer: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (peer / "toy.py").write_text("print('{}'); raise SystemExit('out of memory')")
    assert run_peer("toy", "toy.py") == []
    assert run_peer("none", "toy.py") == []
    told = capfd.readouterr().err
    assert "out of memory" in told
    assert "none is absent" in told


def test_a_slow_peer_is_ended_with_what_it_started(peer: Path) -> None:
    (peer / "toy.py").write_text(
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], process_group=0)\n"
        f"open({str(peer / 'pid')!r}, 'w').write(str(child.pid)); time.sleep(60)\n"
    )
    assert run_peer("toy", "toy.py", timeout_s=5) == []
    pid = int((peer / "pid").read_text())
    ends = time.monotonic() + 10
    while running(pid):
        assert time.monotonic() < ends
        time.sleep(0.01)


def running(pid: int) -> bool:
    """Whether the process is there and no zombie; a kill takes effect a moment after it is sent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
