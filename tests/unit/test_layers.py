"""The lint contracts hold, and each of them fails on a planted violation."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LINT = (sys.executable, "-c", "from importlinter.cli import lint_imports_command; lint_imports_command()", "--no-cache")


def lint(where: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(LINT, cwd=where, capture_output=True, text=True, timeout=60, check=False)


def plant(module: Path, line: str) -> None:
    """Put the line into the module, or into a new module of the package of that name."""
    flat = module.with_suffix(".py")
    if flat.exists():
        flat.write_text(f"{flat.read_text()}\n{line}\n")
        return
    module.mkdir(exist_ok=True)
    (module / "__init__.py").touch()
    (module / "_planted.py").write_text(f"{line}\n")


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
    plant(tree / "tensorbus" / module, line)
    run = lint(tree)
    assert run.returncode != 0, run.stdout
    assert re.search(rf"{re.escape(contract)} .*BROKEN", run.stdout), run.stdout


def test_a_folder_in_no_layer_is_found(tree: Path) -> None:
    plant(tree / "tensorbus" / "newfolder", "")
    run = lint(tree)
    assert run.returncode != 0
    assert "newfolder" in run.stdout
