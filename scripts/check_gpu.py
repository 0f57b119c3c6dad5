"""Holds this machine's GPU to the device contract and measures it, in under five minutes.

Needs a GPU with its driver, and ``pip install -e '.[cuda,dev]'`` (``cuda13`` where the driver speaks CUDA 13). Prints
what the machine is, the contract's outcome, and a table. The exit code is 1 if the contract is broken, 2 if there is no
GPU.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONTRACT_S, BENCH_S = 150, 130
CONTRACT = ("pytest", "tests/contract/test_device_cuda.py", "-q", "-m", "cuda", "-p", "no:cacheprovider")


def run(title: str, arguments: Sequence[str], timeout: float) -> int:
    """Run a module of Python's in a process of its own; one that hangs is ended, and counts as failed."""
    print(f"== {title}: python -m {' '.join(arguments)}", flush=True)
    began = time.monotonic()
    try:
        code = subprocess.run([sys.executable, "-m", *arguments], cwd=ROOT, timeout=timeout, check=False).returncode
    except subprocess.TimeoutExpired:
        print(f"   ended after {timeout:.0f} s", flush=True)
        code = 1
    print(f"   {'passed' if code == 0 else 'FAILED'} in {time.monotonic() - began:.0f} s\n", flush=True)
    return code


def describe() -> str | None:
    """Print what is there; why it cannot be used, if so."""
    sys.path.insert(0, str(ROOT))
    from tensorbus.transport import CudaDevice, cuda_missing

    missing = cuda_missing()
    if missing is None:
        device = CudaDevice(0)
        print(f"{device.name}: {device.description}; {device.free_bytes() >> 20} MiB free\n", flush=True)
        device.close()
    return missing


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the benchmark only to see whether it runs")
    parser.add_argument("--record", action="store_true", help="append the table to benchmarks/RESULTS.md")
    options = parser.parse_args(argv)
    missing = describe()
    if missing is not None:
        print(f"there is no GPU to check: {missing}", file=sys.stderr)
        return 2
    bench = ["benchmarks.device"]
    bench += ["--quick"] if options.quick else []
    bench += ["--record"] if options.record else []
    codes = [run("contract", CONTRACT, CONTRACT_S), run("benchmark", bench, BENCH_S)]
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main())
