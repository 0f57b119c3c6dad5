"""What importing the package costs, and the list of its public names."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "duckdb", "cupy", "pyverbs", "safetensors", "opentelemetry")


def imported_by(statement: str) -> set[str]:
    """Top-level packages that a fresh interpreter loads for the statement."""
    run = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", statement], capture_output=True, text=True, check=True, timeout=60
    )
    names = (line.rpartition("|")[2].strip() for line in run.stderr.splitlines() if line.startswith("import time:"))
    return {name.partition(".")[0] for name in names}


@pytest.mark.parametrize("statement", ["import tensorbus", "import tensorbus, tensorbus.cli"])
def test_the_front_doors_open_without_heavy_packages(statement: str) -> None:
    assert imported_by(statement).isdisjoint(HEAVY)
