"""The decoders under a coverage-guided fuzzer, where there is one (``pip install atheris``)."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 60


@pytest.mark.soak
@pytest.mark.timeout(SECONDS * 5)
@pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="atheris is not installed")
def test_a_fuzzer_finds_no_bytes_that_break_a_decoder(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.fuzz.frames", f"-max_total_time={SECONDS}", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
