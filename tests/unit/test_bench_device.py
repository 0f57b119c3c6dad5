"""The device benchmark runs before there is a GPU to run it on; the GPU check says that there is none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import device as bench
from tensorbus.transport import CudaDevice, HostDevice, cuda_missing
from tests.unit.transport.fake_cuda import FakeCuda

ROOT = Path(__file__).resolve().parents[2]


def test_it_measures_host_memory_and_what_another_process_opens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "SIZES_QUICK", (1 << 16,))
    device = HostDevice()
    rows = bench.measure(device, neighbour="host", quick=True)
    device.close()
    assert all(row.value for row in rows)
    assert {row.unit for row in rows} == {"GB/s", "us"}


def test_it_makes_only_calls_that_the_runtime_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "SIZES_QUICK", (1 << 16,))
    cuda = FakeCuda(pageable=True)
    device = CudaDevice(0, runtime=cuda)
    rows = bench.measure(device, neighbour=None, quick=True)
    device.close()
    assert all(row.value for row in rows)
    assert (cuda.used, cuda.streams, cuda.registered) == (0, {}, {})


@pytest.mark.skipif(cuda_missing() is None, reason="there is a GPU")
def test_the_check_says_that_there_is_no_gpu() -> None:
    command = [sys.executable, "scripts/check_gpu.py"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 2
    assert "there is no GPU to check" in run.stderr
