"""Whether an embedded NATS server is well, asked at its monitoring port by whoever knows its directory."""

from __future__ import annotations

import json
import shutil
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

ANSWER_S: Final = 1.0
ANSWER_BYTES_MAX: Final = 4096
FREE_BYTES_MIN: Final = 1 << 20
"""With less room on its disk a server cannot be counted on, and is not started again."""
STATE_FILE: Final = "server.json"

_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # it is on this machine, whatever proxy is set


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """What a look at a server found.

    Attributes:
        problem: What is wrong, in words; empty if nothing is.
        broken: Whether the server said so itself. A stream that met a full disk takes nothing, also when there is room
            again, until the server is started again.
        free_bytes: Room on the disk of its directory; ``None`` if that cannot be told.
    """

    problem: str = ""
    broken: bool = False
    free_bytes: int | None = None

    @property
    def has_room(self) -> bool:
        """Whether there is enough room for the server to work."""
        return self.free_bytes is None or self.free_bytes >= FREE_BYTES_MIN


def health_of(home: Path) -> Health:
    """How the server that runs in a directory is. Blocks for a second at most."""
    try:
        state: dict[str, Any] = json.loads((home / STATE_FILE).read_text(encoding="utf-8"))
        monitor = str(state["monitor"])
    except (OSError, ValueError, LookupError, TypeError):
        return Health(problem="it has not started", free_bytes=free_bytes(home))
    return ask_health(monitor, home)


def ask_health(monitor: str, home: Path) -> Health:
    """Ask at the address of its monitoring port."""
    problem, broken = _ask(monitor)
    return Health(problem=problem, broken=broken, free_bytes=free_bytes(home))


def free_bytes(home: Path) -> int | None:
    """Room on the disk of a directory, ``None`` if that cannot be told."""
    try:
        return shutil.disk_usage(home).free
    except OSError:
        return None


def _ask(monitor: str) -> tuple[str, bool]:
    try:
        with _opener.open(f"{monitor}/healthz", timeout=ANSWER_S) as answer:
            return ("", False) if answer.status == 200 else (f"status {answer.status}", True)
    except urllib.error.HTTPError as exc:
        with exc:
            return _said(exc.read(ANSWER_BYTES_MAX).decode("utf-8", "replace")), True
    except (OSError, ValueError) as exc:
        reason = getattr(exc, "reason", exc)
        return f"it does not answer ({reason})", False


def _said(body: str) -> str:
    try:
        return str(json.loads(body)["error"])
    except (ValueError, LookupError, TypeError):
        return body
