"""An archive on the command line without a log: what is wrong with it, and what a restore makes of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tensorbus.bus import Archive, Message
from tensorbus.cli._app import run
from tensorbus.events import Subjects
from tensorbus.lifecycle import Directory, dump

pytest.importorskip("pyarrow")


@pytest.fixture
def archive(tmp_path: Path) -> Archive:
    """With one snapshot, of an empty log."""
    found = Archive.open(str(tmp_path / "archive"))
    state = Directory(Subjects("tb"))
    found.put_snapshot(state.seq, state.hash(), dump(state))
    return found


def verified(archive: Archive, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    code = run(["archive", "verify", "--alone", "--url", archive.url, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_a_snapshot_is_read_to_its_end(archive: Archive, capsys: pytest.CaptureFixture[str]) -> None:
    code, told = verified(archive, capsys)
    assert (code, told["snapshots"], told["problems"]) == (0, 1, [])


@pytest.mark.parametrize("how", ["another state's", "damaged", "no snapshot"])
def test_a_snapshot_that_is_wrong_is_named(
    archive: Archive, tmp_path: Path, how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (one,) = archive.list_snapshots()
    path = tmp_path / "archive" / one.file
    match how:
        case "another state's":
            path.rename(path.with_name(f"snapshot-{one.seq:020d}-{'f' * 16}.tbs"))
        case "damaged":
            body = bytearray(path.read_bytes())
            body[len(body) // 2] ^= 1
            path.write_bytes(body)
        case _:
            archive.put_snapshot(9, "a" * 64, [b"[]\n"])
    code, told = verified(archive, capsys)
    assert (code, len(told["problems"])) == (9, 1)
    assert "snapshot-" in told["problems"][0]


def test_a_restore_passes_over_a_damaged_file_that_it_does_not_need(
    archive: Archive, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    messages = [Message(seq, seq, "tb.ev.unknown.x.w", {}, b"{}") for seq in range(1, 10)]
    archive.write(messages, first=1, last=9)
    stray = archive.write(messages[:3], first=1, last=3)
    (tmp_path / "archive" / stray.file).write_bytes(b"other")
    assert run(["archive", "restore", "--url", archive.url, "--into", str(tmp_path / "x.duckdb")]) == 0
    out, err = capsys.readouterr()
    assert f"passed over: {stray.file}" in err
    assert "whether facts after 9 were archived, the archive alone cannot tell" in out
