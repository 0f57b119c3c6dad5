"""What a server tells at its monitoring address, and nowhere else: how it writes to its disk."""

from __future__ import annotations

import json
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tensorbus.bus._health import STATE_FILE, free_bytes
from tensorbus.clock import NS_PER_S
from tensorbus.errors import InvalidArgumentError, UnavailableError

ANSWER_S: Final = 2.0

_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Monitored:
    """A server's own account of its storage.

    Attributes:
        sync_always: Whether each write is on the disk before it is acknowledged.
        sync_s: Else, after how many seconds it is.
        storage_bytes, storage_bytes_max: What all streams use, and may use, on its disk.
        free_bytes: Room on that disk, ``None`` where it is another machine's.
    """

    sync_always: bool
    sync_s: float
    storage_bytes: int
    storage_bytes_max: int
    free_bytes: int | None


def monitored(address: str, *, home: Path | None = None) -> Monitored:
    """Ask a server at its monitoring address. Blocks for two seconds at most.

    Args:
        address: Such as ``http://127.0.0.1:8222``.
        home: The server's directory, if it is on this machine.

    Raises:
        UnavailableError: If nobody answers; InvalidArgumentError: If that is no server's monitoring address.
    """
    try:
        with _opener.open(f"{address.rstrip('/')}/jsz", timeout=ANSWER_S) as answer:
            found: dict[str, Any] = json.loads(answer.read())
        config = found["config"]
        return Monitored(
            sync_always=bool(config.get("sync_always", False)),
            sync_s=int(config.get("sync_interval", 0)) / NS_PER_S,
            storage_bytes=int(found.get("storage", 0)),
            storage_bytes_max=int(config["max_storage"]),
            free_bytes=None if home is None else free_bytes(home),
        )
    except (LookupError, TypeError, ValueError) as exc:
        raise InvalidArgumentError(f"{address} is not the monitoring address of a server with JetStream") from exc
    except OSError as exc:
        raise UnavailableError(f"nothing answers at {address}: {exc}", url=address) from exc


def monitor_of(home: Path) -> str | None:
    """The monitoring address of the embedded server in a directory, ``None`` if it was never started."""
    try:
        return str(json.loads((home / STATE_FILE).read_text(encoding="utf-8"))["monitor"])
    except (OSError, ValueError, LookupError, TypeError):
        return None
