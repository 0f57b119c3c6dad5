"""The command group, its exit codes, and that docs/cli.md tells them."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest

from tensorbus import errors
from tensorbus.cli import _app as app
from tensorbus.cli import main
from tensorbus.cli._app import COMMANDS, run
from tensorbus.cli._errors import EXIT_CODES, exit_code, from_exit_code, from_os_error, refined, report
from tensorbus.config import Settings

DOC = Path(__file__).resolve().parents[3] / "docs" / "cli.md"


def test_the_page_has_every_command_in_order() -> None:
    headings = re.findall(r"^## (.+)$", DOC.read_text(), re.MULTILINE)
    assert headings == ["Output", "Exit codes", *COMMANDS]


def test_the_page_has_every_exit_code() -> None:
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \|", DOC.read_text(), re.MULTILINE)
    assert {kind: int(code) for code, kind in rows if kind != "internal"} == {str(k): c for k, c in EXIT_CODES.items()}


def test_every_kind_of_error_has_a_code() -> None:
    other = {"internal", "cancelled", "plan_failed"}
    assert {str(kind) for kind in errors.ErrorKind} - {str(kind) for kind in EXIT_CODES} == other
    assert exit_code(errors.TensorbusError("x")) == 1
    assert len(set(EXIT_CODES.values())) == len(EXIT_CODES)


def test_an_error_is_reported_as_text_or_json(capsys: pytest.CaptureFixture[str]) -> None:
    error = errors.OutOfSpaceError("the pool is full", held_by="w1")
    assert report(error, as_json=False) == 8
    assert capsys.readouterr().err == "tensorbus: the pool is full\n"
    report(error, as_json=True)
    assert json.loads(capsys.readouterr().err) == {"error": errors.to_wire(error)}


def help_of(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    """The help of a command, or of all commands of a group."""
    assert run([command, "--help"]) == 0
    found = app.cli.get_command(click.Context(app.cli), command)
    if isinstance(found, click.Group):
        capsys.readouterr()
        for one in found.commands:
            assert run([command, one, "--help"]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_and_json(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of(command, capsys)
    assert "--json" in text
    assert "--home" in text
    assert "--parent" not in text


def test_up_and_worker_take_every_setting_of_theirs() -> None:
    callers_only = {"url", "tenant", "timeout_s", "nats_user"}
    for name in ("up", "worker"):
        command = app.cli.get_command(click.Context(app.cli), name)
        assert command is not None
        assert {parameter.name for parameter in command.params} >= set(Settings.model_fields) - callers_only


def test_help_and_nothing_and_nonsense(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    assert "doctor" in capsys.readouterr().out
    assert run([]) == 2
    assert run(["frobnicate"]) == 2
    assert run(["put", "--json"]) == 2
    assert "Missing argument" in json.loads(capsys.readouterr().err.splitlines()[-1])["error"]["message"]


def test_a_setting_that_cannot_be_names_its_origin(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TENSORBUS_POOL_BYTES", "lots")
    assert run(["ls"]) == 2
    assert "env TENSORBUS_POOL_BYTES" in capsys.readouterr().err


@pytest.mark.parametrize("module", ["_artifacts", "_log", "_up", "_doctor", "_worker"])
def test_no_command_imports_torch(module: str) -> None:
    code = f"import sys, tensorbus.cli.{module}, tensorbus.sdk; print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert found.stdout == "False\n"


@pytest.mark.parametrize(
    ("number", "code"), [(errno.ENOSPC, 8), (errno.EDQUOT, 8), (errno.EACCES, 10), (errno.EROFS, 10), (errno.EIO, 1)]
)
def test_what_the_system_refuses_has_a_code(number: int, code: int) -> None:
    cause = OSError(number, os.strerror(number), "/a/file")
    assert exit_code(from_os_error(cause)) == code
    wrapped = errors.UnavailableError("cannot make it")
    wrapped.__cause__ = cause
    assert exit_code(refined(wrapped)) == (6 if code == 1 else code)
    assert refined(errors.ConflictError("x")).kind is errors.ErrorKind.CONFLICT


def test_an_exit_code_tells_the_kind() -> None:
    assert all(exit_code(from_exit_code(code, "x")) == code for code in [1, *EXIT_CODES.values()])
    assert exit_code(from_exit_code(-9, "x")) == 6


def test_ctrl_c_at_any_moment_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_args: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(app, "run", interrupted)
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 130
