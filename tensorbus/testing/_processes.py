"""Real processes for tests: workers and programs that are watched, hurt, and always ended."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from tensorbus.clock import Deadline

WAIT_S: Final = 20.0
_POLL_S: Final = 0.01
SESSION_TTL_S: Final = 2.0


def wait_until(condition: Callable[[], object], *, what: str, timeout_s: float = WAIT_S) -> None:
    """Block until the condition holds.

    Raises:
        DeadlineExceededError: If it does not within the time.
    """
    deadline = Deadline(timeout_s, what=what)
    while not condition():
        if not deadline.left():
            raise deadline.error()
        threading.Event().wait(_POLL_S)


def is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


class Program:
    """A child process whose output goes to a file.

    Args:
        command: What to run.
        log: Gets standard output and standard error.
        env: Its environment; this process's own when ``None``.
    """

    def __init__(self, command: Sequence[str], *, log: Path, env: Mapping[str, str] | None = None) -> None:
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                list(command), stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=env
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    @property
    def text(self) -> str:
        """All that it has printed."""
        return self.log.read_text(encoding="utf-8", errors="replace")

    def send(self, number: int) -> None:
        """Send it a signal, if it is still there."""
        if self._process.poll() is None:
            self._process.send_signal(number)

    def pause(self) -> None:
        """SIGSTOP; returns when it has stopped."""
        self.send(signal.SIGSTOP)
        stat = Path(f"/proc/{self.pid}/stat")
        wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", what=f"the stop of {self.pid}")

    def resume(self) -> None:
        self.send(signal.SIGCONT)

    def kill9(self) -> None:
        """End it hard and wait until it is gone."""
        self.send(signal.SIGKILL)
        self._process.wait(WAIT_S)

    def stop(self) -> int:
        """Ask it to end (SIGTERM), wait, and give its exit code."""
        self.send(signal.SIGTERM)
        return self.wait()

    def wait(self, timeout_s: float = WAIT_S) -> int:
        """Wait for its end by itself; its exit code."""
        return self._process.wait(timeout_s)

    def until(self, text: str, *, timeout_s: float = WAIT_S) -> None:
        """Wait until it has printed something.

        Raises:
            DeadlineExceededError: If it does not within the time; RuntimeError: If it ended without.
        """

        def printed() -> bool:
            gone = not self.alive
            if text in self.text:
                return True
            if gone:
                raise RuntimeError(f"process {self.pid} ended with {self._process.returncode}, printed:\n{self.text}")
            return False

        wait_until(printed, what=f"{text!r} from process {self.pid}", timeout_s=timeout_s)


class WorkerProgram(Program):
    """A worker that is ready.

    Attributes:
        worker, incarnation, host_id, socket, data, control: What it said of itself.
    """

    worker: str
    incarnation: str
    host_id: str
    socket: Path
    data: str
    control: str

    def await_ready(self) -> None:
        """Wait until callers can connect."""
        self.until('{"event": "ready"')
        line = next(line for line in self.text.splitlines() if line.startswith('{"event": "ready"'))
        said = json.loads(line)
        self.worker, self.incarnation, self.host_id = said["worker"], said["incarnation"], said["host_id"]
        self.socket, self.data, self.control = Path(said["socket"]), said["data"], said["control"]


class Processes:
    """All processes of one test. Each worker dies with this process, however that ends.

    Args:
        logs: Directory for their output.
        nats_url: The bus of the workers, or ``None`` for that of their home.
        prefix: Subject prefix of the workers.
    """

    def __init__(self, logs: Path, *, nats_url: str | None, prefix: str = "tb") -> None:
        self._logs = logs
        self._nats_url = nats_url
        self.prefix = prefix
        self._programs: list[Program] = []

    def run(self, command: Sequence[str], *, name: str = "program", env: Mapping[str, str] | None = None) -> Program:
        """Start a program; it is killed at the end of the test."""
        program = Program(command, log=self._log(name), env=env)
        self._programs.append(program)
        return program

    def python(self, code: str, *args: str, name: str = "python", env: Mapping[str, str] | None = None) -> Program:
        """Start Python code with arguments."""
        return self.run([sys.executable, "-c", code, *args], name=name, env=env)

    def worker(
        self,
        roles: str = "basic",
        *,
        home: Path,
        id: str | None = None,
        host_id: str | None = None,
        ready: bool = True,
        program: Sequence[str] = ("-m", "tensorbus.cli"),
        **settings: object,
    ) -> WorkerProgram:
        """Start a worker with a session TTL of 2 s and a pool of 64 MiB, and wait until it is ready.

        Args:
            ready: Whether to wait.
            program: What takes the command line's words, as arguments of Python.
            settings: Further settings by name, e.g. ``pool_bytes="256MiB"``.
        """
        chosen: dict[str, object] = {
            "home": home,
            "host_id": host_id,
            "nats_url": self._nats_url,
            "subject_prefix": self.prefix if self._nats_url else None,
            "session_ttl_s": SESSION_TTL_S,
            "pool_bytes": "64MiB",
            **settings,
        }
        command = [sys.executable, *program, "worker", "--json", "--roles", roles]
        command += ["--parent", str(os.getpid())] + ([] if id is None else ["--id", id])
        for name, value in chosen.items():
            command += [] if value is None else ["--" + name.replace("_", "-"), str(value)]
        worker = WorkerProgram(command, log=self._log(id or roles.replace(",", "-")))
        self._programs.append(worker)
        if ready:
            worker.await_ready()
        return worker

    def close(self) -> None:
        """Kill what still runs and print the logs, which pytest shows for a test that failed."""
        for program in self._programs:
            with contextlib.suppress(ProcessLookupError):
                program.kill9()
        for program in self._programs:
            print(f"---- {program.log.name} (process {program.pid})\n{program.text}")  # noqa: T201  # for pytest's report

    def _log(self, name: str) -> Path:
        return self._logs / f"{len(self._programs):02d}-{name}.log"
