"""Short questions to servers and workers, for `tensorbus doctor`."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from tensorbus import __version__
from tensorbus.cli._output import size
from tensorbus.clock import Deadline
from tensorbus.config import Settings
from tensorbus.transport import Connection, WorkerCard, connect_unix, is_locked, living_workers

NATS_PORT = 4222
INFO_BYTES_MAX = 1 << 20
PAYLOAD_BYTES_MIN = 1 << 20


async def server_info(url: str, *, timeout_s: float) -> dict[str, object]:
    """What a NATS server says of itself to whoever connects; empty if it does not say it in the clear."""
    parts = urlsplit(url.split(",")[0].strip())
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(
                parts.hostname, parts.port or NATS_PORT, limit=INFO_BYTES_MAX
            )
            try:
                line = await reader.readline()
            finally:
                writer.close()
        found = json.loads(line.removeprefix(b"INFO "))
    except (OSError, ValueError):  # TimeoutError is an OSError
        return {}
    return found if isinstance(found, dict) else {}


async def bus_limits(url: str, *, timeout_s: float = 2.0) -> list[str]:
    """What of a NATS server's settings is too small for the log, in words."""
    limit = (await server_info(url, timeout_s=timeout_s)).get("max_payload")
    if not isinstance(limit, int) or limit >= PAYLOAD_BYTES_MIN:
        return []
    return [
        f"the NATS server takes messages up to {size(limit)} (max_payload): artifacts of many tensors will be refused; "
        f"set max_payload to {size(PAYLOAD_BYTES_MIN)} or more"
    ]


async def ask_worker(
    settings: Settings, card: WorkerCard, op: str, args: Mapping[str, object] | None = None, *, deadline: Deadline
) -> dict[str, object]:
    """What a worker of this home answers to one call of the control protocol.

    Raises:
        UnavailableError: If it is not there; DeadlineExceededError: If it does not answer in time.
    """
    channel = await connect_unix(settings.home / "run" / card.socket, deadline=deadline)
    async with Connection(channel) as connection:
        hello = {"protocol": 1, "tenant": settings.tenant, "pid": os.getpid(), "version": __version__}
        await connection.call("hello", hello, deadline=deadline)
        return (await connection.call(op, args, deadline=deadline)).data


def is_stopped(pid: int) -> bool:
    """Whether the process was stopped by a signal (SIGSTOP) or a debugger."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] in "Tt"


def stopped_processes(home: Path) -> list[tuple[str, int]]:
    """Name and process id of each process of a home that was stopped by a signal."""
    found = [(f"worker {card.worker}", card.pid) for card in living_workers(home)]
    lock = home / "nats" / "pid"
    try:
        if is_locked(lock):
            found.append(("the NATS server", int(lock.read_text(encoding="ascii"))))
    except (OSError, ValueError):
        pass  # it is being started or stopped
    return [(name, pid) for name, pid in found if is_stopped(pid)]
