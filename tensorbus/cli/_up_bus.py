"""The embedded server of one `tensorbus up`: watched, and started again where that helps."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from tensorbus.bus import EmbeddedServer, Health
from tensorbus.cli._output import size
from tensorbus.cli._probes import is_stopped
from tensorbus.cli._say import Say
from tensorbus.clock import NS_PER_S, Clock, SystemClock
from tensorbus.errors import TensorbusError
from tensorbus.workers import BUS_URL_FILE

LOOK_NS: Final = 2 * NS_PER_S
AGAIN_NS: Final = 5 * NS_PER_S
SILENT_MAX: Final = 3
"""Looks without an answer before that is said: a busy machine is not a broken server."""


class OwnBus:
    """Starts the server, looks after it when asked to, and stops it.

    Args:
        home: Of `up`; the server gets a directory in it.
    """

    def __init__(
        self, home: Path, *, say: Say, server: EmbeddedServer | None = None, clock: Clock | None = None
    ) -> None:
        self.server = server or EmbeddedServer(home / "nats")
        self._home = home
        self._say = say
        self._clock = clock or SystemClock()
        self._look_ns = 0
        self._again_ns = 0
        self._said: set[str] = set()
        self._silent = 0

    def start(self) -> None:
        """Start it for the first time."""
        self.server.start()
        self._started(", an embedded NATS server")

    def stop(self) -> None:
        """Stop it, and take down its address."""
        (self._home / BUS_URL_FILE).unlink(missing_ok=True)
        self.server.stop()

    def look(self) -> None:
        """Look after it, to be called often. What is wrong is said once; what a restart mends is restarted."""
        now_ns = self._clock.now_ns()
        if self.server.pid is None:
            self._trouble("ended", "the NATS server ended; starting it again", kind="dead")
            self._try_again(now_ns)
        elif now_ns >= self._look_ns:
            self._look_ns = now_ns + LOOK_NS
            self._judge(self.server.health(), now_ns)

    def _judge(self, health: Health, now_ns: int) -> None:
        if health.problem and not health.broken:
            self._silent += 1
            if self._silent >= SILENT_MAX:
                self._trouble("failed", self._about_silence(health), kind="silent")
            return
        self._silent = 0
        if health.broken:
            self._broken(health, now_ns)
        elif not health.has_room:
            self._trouble("failed", f"{self._about_room(health)}: what is put next may fail; make room", kind="low")
        elif self._said:
            self._said.clear()
            self._say.event("recovered", "bus      is well again", process="bus")

    def _broken(self, health: Health, now_ns: int) -> None:
        if health.has_room:
            text = f"the NATS server takes no facts ({health.problem}); starting it again"
            self._trouble("failed", text, kind="again")
            if now_ns >= self._again_ns:
                self.server.stop()
                self._try_again(now_ns)
            return
        self._trouble(
            "failed",
            f"the NATS server takes no facts: {self._about_room(health)}. Puts wait and fail until there is room; "
            f"make room, and the server is started again ({health.problem})",
            kind="full",
        )

    def _try_again(self, now_ns: int) -> None:
        if now_ns < self._again_ns:
            return
        self._again_ns = now_ns + AGAIN_NS
        try:
            self.server.start()
            self._said.clear()
            self._started("")
        except (TensorbusError, OSError) as exc:
            seconds = AGAIN_NS // NS_PER_S
            self._trouble("failed", f"{exc}; tried again every {seconds} s", kind=f"start {type(exc).__name__}")

    def _started(self, what: str) -> None:
        url, pid = self.server.url, self.server.pid
        _write_if_new(self._home / BUS_URL_FILE, f"{url}\n")
        self._say.event("started", f"bus      {url}{what}, process {pid}", process="bus", url=url, pid=pid)

    def _trouble(self, event: str, text: str, *, kind: str) -> None:
        if kind not in self._said:
            self._said.add(kind)
            self._say.trouble(event, text, process="bus", log=str(self.server.log_path))

    def _about_silence(self, health: Health) -> str:
        pid = self.server.pid
        if pid is not None and is_stopped(pid):
            return f"the NATS server is stopped; let it go on with kill -CONT {pid}"
        return f"the NATS server, process {pid}, is not well: {health.problem}; see {self.server.log_path}"

    def _about_room(self, health: Health) -> str:
        return f"the disk of {self.server.home} is full ({size(health.free_bytes or 0)} left)"


def _write_if_new(path: Path, text: str) -> None:
    """Nothing is written where nothing changes: the disk may be full."""
    if path.is_file() and path.read_text(encoding="ascii", errors="replace") == text:
        return
    new = path.with_name(f".{path.name}.{os.getpid()}")
    new.write_text(text, encoding="ascii")
    new.replace(path)
