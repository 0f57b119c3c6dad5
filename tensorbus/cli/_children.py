"""The worker processes that `tensorbus up` starts, watches and ends."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tensorbus.transport import WorkerCard, living_workers

LOG_TAIL_LINES: Final = 15
LOG_TAIL_BYTES: Final = 64 << 10
LOG_BYTES_MAX: Final = 8 << 20


class Child:
    """One worker process. Must be started by the main thread: the death of the thread that starts it ends it.

    Args:
        role: What it is called, also its log file.
        roles: Its roles, separated by commas; the one it is called by when ``None``.
        worker: Its worker id.
        flags: Settings as command line flags.
    """

    def __init__(self, role: str, *, worker: str, home: Path, flags: Sequence[str], roles: str | None = None) -> None:
        self.role = role
        self.roles = roles or role
        self.worker = worker
        self.log = home / "log" / f"{role}.log"
        self._home = home
        self._flags = flags
        self._log_start = 0
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start it; what it prints goes to its log."""
        self.log.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if self.log.exists() and self.log.stat().st_size > LOG_BYTES_MAX:
            self.log.replace(self.log.with_suffix(".old.log"))
        command = [sys.executable, "-m", "tensorbus.cli", "worker", "--roles", self.roles, "--id", self.worker]
        with self.log.open("ab") as output:
            self._log_start = output.tell()
            self._process = subprocess.Popen(
                [*command, "--parent", str(os.getpid()), *self._flags],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                process_group=0,  # a Ctrl-C in the terminal is for `up`, which ends all in order
            )

    def card(self) -> WorkerCard | None:
        """What it says of itself once callers can connect."""
        return next((card for card in living_workers(self._home) if card.pid == self.pid), None)

    def ended(self) -> int | None:
        """Its exit code, negative for a signal; ``None`` while it runs."""
        return None if self._process is None else self._process.poll()

    def terminate(self) -> None:
        """Ask it to leave."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()

    def join(self, timeout_s: float) -> int | None:
        """Wait for its end; kill it if that takes longer. Its exit code, ``None`` if it was never started."""
        if self._process is None:
            return None
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def log_tail(self) -> list[str]:
        """The last lines that it printed since it was started."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(self._log_start, self.log.stat().st_size - LOG_TAIL_BYTES))
                lines = file.read().decode("utf-8", "replace").splitlines()
        except OSError:
            return []
        return lines[-LOG_TAIL_LINES:]


def outcome(code: int) -> str:
    """An exit code in words."""
    return f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"
