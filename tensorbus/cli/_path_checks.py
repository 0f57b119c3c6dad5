"""The checks of `tensorbus doctor` that look at how bytes get here: which paths are used, and why one is not."""

from __future__ import annotations

import asyncio
import ipaddress
import ssl
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from tensorbus.cli._output import size
from tensorbus.cli._verdict import State, Verdict, command
from tensorbus.clock import Deadline
from tensorbus.config import Settings
from tensorbus.errors import DeniedError, TensorbusError
from tensorbus.transport import BulkClient, WorkerCard, cuda_missing, parse_addresses, tls_files

REACH_S: Final = 2.0
PEERS_MAX: Final = 16
"""So many workers are tried, and no more."""

Session = Mapping[str, Any]


async def check_paths(settings: Settings, cards: Sequence[WorkerCard], alive: Sequence[Session]) -> list[Verdict]:
    """For each path that bytes can take whether it is used from here, else why not.

    Args:
        cards: The workers of this home.
        alive: The sessions whose processes live, as far as is known.
    """
    found = list(_shm(settings, cards, alive))
    found += await _tcp(settings, alive)
    return [*found, *_disk(settings), *_cuda()]


def _shm(settings: Settings, cards: Sequence[WorkerCard], alive: Sequence[Session]) -> Iterator[Verdict]:
    """Readers map the memory of the worker that has their host id, in this home."""
    mine = [card.worker for card in cards if "basic" in card.roles and card.host_id == settings.host_id]
    advice = command("tensorbus", "worker", "--home", settings.home, "--host-id", settings.host_id)
    if mine:
        yield Verdict("shm", State.OK, f"readers on this host map the memory of {', '.join(mine)}")
    elif any("basic" in one["roles"] for one in alive):
        found = f"no worker holds memory for host id {settings.host_id}: callers read copies through a gateway"
        yield Verdict("shm", State.WARNING, found, advice)
    else:
        yield Verdict("shm", State.WRONG, "no worker holds memory: nothing can be put", advice)


async def _tcp(settings: Settings, alive: Sequence[Session]) -> list[Verdict]:
    """Whether each worker on another host answers where it says that it serves bytes."""
    far = [one for one in alive if "basic" in one["roles"] and one.get("host") != settings.host_id]
    if not far:
        return [Verdict("tcp", State.OK, "not used: no worker that is known of holds memory on another host")]
    try:
        files = tls_files(settings)
        tls = None if files is None else files.context(server=False)
    except TensorbusError as exc:
        return [Verdict("tcp", State.WRONG, str(exc), "correct data_tls_cert, data_tls_key and data_tls_ca")]
    tried = await asyncio.gather(*(asyncio.to_thread(_unreached, one, tls) for one in far[:PEERS_MAX]))
    if found := [verdict for verdict in tried if verdict is not None]:
        return found
    how = "in the clear" if tls is None else "over TLS"
    some = f" (the first {PEERS_MAX} of {len(far)} were tried)" if len(far) > PEERS_MAX else ""
    return [Verdict("tcp", State.OK, f"{len(far)} workers on other hosts answer {how}{some}")]


def _unreached(session: Session, tls: ssl.SSLContext | None) -> Verdict | None:
    """What keeps bytes of a worker from coming here over TCP; ``None`` if nothing does."""
    who, data = f"{session['worker']} on host {session.get('host')}", str(session.get("data") or "")
    if not data:
        return Verdict("tcp", State.WRONG, f"{who} serves no bytes to other hosts", "look at that worker's log")
    try:
        for address in parse_addresses(data):
            deadline = Deadline(REACH_S, what=f"connecting to {who} at {data}")
            BulkClient.connect(*address, deadline=deadline, tls=tls).close()
    except DeniedError as exc:
        advice = "give all workers data_tls_* of one authority, or none of them any"
        return Verdict("tcp", State.WRONG, f"bytes of {who} do not come from {data}: {exc}", advice)
    except TensorbusError as exc:
        here = _loopback(data)
        advice = (
            f"set data_host of {session['worker']} to an address that other hosts reach"
            if here
            else (f"let this host connect to {data} (firewall, route), or set data_host and data_port there")
        )
        return Verdict("tcp", State.WRONG, f"bytes of {who} do not come from {data}: {exc}", advice)
    return None


def _loopback(data: str) -> bool:
    try:
        return any(ipaddress.ip_address(host).is_loopback for host, _ in parse_addresses(data))
    except ValueError:
        return False  # a name


def _disk(settings: Settings) -> Iterator[Verdict]:
    if settings.disk_bytes:
        where = settings.disk_dir or settings.home / "disk"
        yield Verdict("disk", State.OK, f"copies that leave memory go to {where}, up to {size(settings.disk_bytes)}")
    else:
        yield Verdict("disk", State.OK, "not used: disk_bytes is 0, so what memory has no room for is not kept")


def _cuda() -> Iterator[Verdict]:
    why = cuda_missing()
    yield Verdict("cuda", State.OK, "there is a CUDA device" if why is None else f"not used: {why}")
