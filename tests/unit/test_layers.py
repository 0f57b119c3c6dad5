"""The lint contracts hold, and each of them fails on a planted violation."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LINT = (sys.executable, "-c", "from importlinter.cli import lint_imports_command; lint_imports_command()", "--no-cache")


def lint(where: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(LINT, cwd=where, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copytree(ROOT / "tensorbus", tmp_path / "tensorbus", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def test_the_tree_as_it_is_keeps_every_contract() -> None:
    run = lint(ROOT)
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize(
    ("module", "line", "contract"),
    [
        ("model", "import tensorbus.lifecycle", "Edges point down"),
        ("sdk", "import tensorbus.workers", "Edges point down"),
        ("workers", "import tensorbus.policies", "Edges point down"),
        ("bus", "import tensorbus.transport", "Edges point down"),
        ("errors", "import tensorbus.events", "Edges point down"),
        ("newfolder", "", "Edges point down"),
        ("lifecycle", "import asyncio", "The rules do no I/O"),
        ("events", "import tensorbus.clock", "The rules do no I/O"),
        ("policies", "import socket", "The rules do no I/O"),
        ("workers", "import nats", "Only the bus speaks NATS"),
        ("feeds", "import duckdb", "Only projections speak SQL"),
        ("sdk", "import cupy", "Only the transport touches devices"),
        ("transport", "import torch", "Torch is for the SDK's and the engines' edges"),
    ],
)
def test_a_planted_violation_is_found(tree: Path, module: str, line: str, contract: str) -> None:
    planted = tree / "tensorbus" / module / "_planted.py"
    if not planted.parent.exists() and not planted.parent.with_suffix(".py").exists():
        planted.parent.mkdir()
        (planted.parent / "__init__.py").touch()
    if planted.parent.is_dir():
        planted.write_text(f"{line}\n")
    else:
        flat = planted.parent.with_suffix(".py")
        flat.write_text(f"{flat.read_text()}\n{line}\n")
    run = lint(tree)
    assert run.returncode != 0, run.stdout
    assert f"{contract} BROKEN" in run.stdout or "exhaustive" in run.stdout.lower() or "newfolder" in run.stdout
