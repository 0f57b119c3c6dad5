"""A real system to measure: ``tensorbus up`` in a directory of its own, and more workers in the same home."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from benchmarks._table import ROOT

READY_S = 60.0
END_S = 20.0
COMMAND = [sys.executable, "-m", "tensorbus.cli"]


class Home:
    """A running home. Worker ``i`` has the host id ``h<i>``; worker 0 and the gateway belong to ``up``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._programs: list[subprocess.Popen[str]] = []
        self._outputs: list[IO[str]] = []

    @property
    def nats_url(self) -> str:
        return (self.path / "bus.url").read_text(encoding="ascii").strip()

    def start(self, arguments: Sequence[str]) -> subprocess.Popen[str]:
        """Run a command of the CLI; what it says on standard error is shown if it does not get ready."""
        errors = self._errors(len(self._programs)).open("w", encoding="utf-8")
        program = subprocess.Popen(
            [*COMMAND, *arguments, "--home", str(self.path), "--json"],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            cwd=ROOT,
            env={name: value for name, value in os.environ.items() if not name.startswith("TENSORBUS_")},
        )
        self._programs.append(program)
        self._outputs.append(errors)
        return program

    def await_ready(self, program: subprocess.Popen[str]) -> None:
        """Read until callers can connect; a timer ends a program that does not get there."""
        assert program.stdout is not None
        for line in program.stdout:
            if line.startswith("{") and _event(line) == "ready":
                return
        said = self._errors(self._programs.index(program)).read_text(encoding="utf-8")
        raise SystemExit(f"{' '.join(map(str, program.args))} ended with {program.wait()}: {said[-2000:]}")  # type: ignore[arg-type]

    def end(self) -> None:
        """End what was started, workers before the bus that they say goodbye to."""
        for program in reversed(self._programs):
            program.send_signal(signal.SIGTERM)
            if program is not self._programs[0]:
                continue
            for other in self._programs[:0:-1]:
                _reap(other)
            _reap(program)
        for output in self._outputs:
            output.close()

    def _errors(self, number: int) -> Path:
        return self.path.parent / f"{number}.err"


def _event(line: str) -> Any:
    try:
        return json.loads(line).get("event")
    except ValueError:
        return None


def _reap(program: subprocess.Popen[str]) -> None:
    try:
        program.wait(END_S)
    except subprocess.TimeoutExpired:
        program.kill()
        program.wait()
    if program.stdout is not None:
        program.stdout.close()


@contextlib.contextmanager
def running_home(
    *, workers: int = 1, pool_bytes: int = 1 << 28, reserve_bytes: int = 0, heartbeat_s: float | None = None
) -> Iterator[Home]:
    """A bus, a gateway and that many workers, each a process; all ended at the end, whatever happens."""
    flags = ["--pool-bytes", str(pool_bytes), "--reserve-bytes", str(reserve_bytes), "--log-level", "warning"]
    if heartbeat_s is not None:
        flags += ["--heartbeat-s", str(heartbeat_s)]
    with tempfile.TemporaryDirectory(prefix="tb-bench-") as folder:
        home = Home(Path(folder) / "home")
        home.path.mkdir()
        try:
            first = home.start(["up", "--host-id", "h0", *flags])
            home.await_ready(first)
            more = [
                home.start(["worker", "--worker-id", f"w{n}", "--host-id", f"h{n}", *flags]) for n in range(1, workers)
            ]
            for program in more:
                home.await_ready(program)
            yield home
        finally:
            home.end()


def until(moment: float) -> None:
    """Sleep to a moment of :func:`time.perf_counter`, which all processes of a machine share."""
    time.sleep(max(0.0, moment - time.perf_counter()))
