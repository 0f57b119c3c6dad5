"""How the homes of page shards stand: asked of a worker of this home where they are, then of each itself."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from tensorbus import __version__
from tensorbus.cli._probes import ask_worker
from tensorbus.cli._verdict import State, Verdict, command
from tensorbus.clock import Deadline
from tensorbus.config import Settings
from tensorbus.errors import TensorbusError, UnavailableError
from tensorbus.transport import Connection, connect_tcp, connect_unix, living_workers

PROBE_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class PageHomes:
    """What was found.

    Attributes:
        shards: How many there are, 0 before there was a home.
        nobodys: Those that nobody living has.
        homes: What each home said of itself, ``page_status`` in ``docs/spec/page-protocol.md``.
        silent: Homes that did not answer, and why.
    """

    shards: int
    nobodys: list[int]
    homes: list[dict[str, Any]]
    silent: dict[str, str]


async def look_at_homes(settings: Settings) -> PageHomes:
    """Ask all homes of the cluster.

    Raises:
        UnavailableError: If no worker lives in this home to ask where they are.
    """
    cards = living_workers(settings.home)
    if not cards:
        raise UnavailableError(f"no worker lives in {settings.home} to ask", home=str(settings.home))
    routes: dict[str, Any] = await ask_worker(settings, cards[0], "page_routes", deadline=Deadline(PROBE_S))
    found, silent = [], {}
    for worker, _, socket, control, _ in routes["homes"]:
        try:
            found.append(await _status(settings, socket, control))
        except (TensorbusError, OSError) as exc:
            silent[worker] = str(exc)
    nobodys = [shard for shard, (place, _) in enumerate(routes["table"]) if place < 0]
    return PageHomes(routes["shards"], nobodys, found, silent)


async def _status(settings: Settings, socket: str, control: str) -> dict[str, Any]:
    deadline = Deadline(PROBE_S, what="asking a home")
    host, _, port = control.rpartition(":")
    channel = await (
        connect_unix(socket, deadline=deadline) if socket else connect_tcp(host, int(port), deadline=deadline)
    )
    async with Connection(channel) as connection:
        hello = {"protocol": 1, "tenant": settings.tenant, "pid": os.getpid(), "version": __version__}
        await connection.call("hello", hello, deadline=deadline)
        return (await connection.call("page_status", deadline=deadline)).data


async def check_pages(settings: Settings) -> list[Verdict]:
    """Whether every shard has a home that answers for it."""
    if not living_workers(settings.home):
        return []
    try:
        return list(_verdicts(settings, await look_at_homes(settings)))
    except (TensorbusError, OSError) as exc:
        return [Verdict("pages", State.WARNING, f"it is not known where pages are: {exc}", "see the workers")]


def _verdicts(settings: Settings, found: PageHomes) -> Iterator[Verdict]:
    if not found.shards:
        return
    for worker, why in found.silent.items():
        yield Verdict("pages", State.WRONG, f"home {worker} does not answer: {why}", "look at its log")
    for home in found.homes:
        if not home["alive"]:
            advice = "it goes on by itself once the bus acknowledges its heartbeats"
            yield Verdict("pages", State.WRONG, f"home {home['worker']} cannot prove that it lives", advice)
    if found.nobodys:
        start = command("tensorbus", "worker", "--roles", "shard-home", "--home", settings.home)
        text = f"{len(found.nobodys)} of {found.shards} shards have no living home: their pages cannot be found"
        yield Verdict(
            "pages", State.WARNING, text, f"another home takes them within seconds; if there is none, {start}"
        )
    elif not found.silent:
        pages = sum(shard["pages"] for home in found.homes for shard in home["shards"])
        text = f"{len(found.homes)} homes answer for {found.shards} shards, {pages} pages"
        yield Verdict("pages", State.OK, text)
