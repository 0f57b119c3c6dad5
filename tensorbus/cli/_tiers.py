"""``persist`` and ``evict``: which copies a worker keeps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from tensorbus.cli._client import with_bus
from tensorbus.cli._options import CLIENT, json_option, takes_settings
from tensorbus.cli._output import emit_json, short_id
from tensorbus.config import Resolved, Settings
from tensorbus.errors import UnavailableError
from tensorbus.transport import living_workers

if TYPE_CHECKING:
    from tensorbus.sdk import AsyncBus


@click.command(short_help="Have a copy on a worker's disk.")
@click.argument("ref")
@click.option("--worker", metavar="ID", help="The worker; this host's without it.")
@takes_settings(*CLIENT)
@json_option
def persist(resolved: Resolved, *, ref: str, worker: str | None, as_json: bool) -> None:
    """Have the artifact REF, a key or an id, on a worker's disk for as long as it lives; it is fetched there first.

    The worker needs a disk tier (disk_bytes). Its next life finds the copy again.
    """
    _operate(resolved, ref, worker or _here(resolved.settings), "persist", as_json=as_json)


@click.command(short_help="Drop a worker's copies of an artifact.")
@click.argument("ref")
@click.option("--worker", metavar="ID", help="The worker; this host's without it.")
@takes_settings(*CLIENT)
@json_option
def evict(resolved: Resolved, *, ref: str, worker: str | None, as_json: bool) -> None:
    """Drop a worker's copies of the artifact REF, a key or an id, which lives on.

    Refused if a copy is pinned or read, or is the last one that a living worker has.
    """
    _operate(resolved, ref, worker or _here(resolved.settings), "evict", as_json=as_json)


def _operate(resolved: Resolved, ref: str, worker: str, what: str, *, as_json: bool) -> None:
    async def work(bus: AsyncBus) -> str:
        art = await bus.artifact(ref)
        at = bus.worker(worker)
        await (at.persist(art) if what == "persist" else at.evict(art))
        return art.base_id

    artifact = with_bus(resolved, work)
    if as_json:
        emit_json({"id": artifact, "worker": worker})
    else:
        done = "on disk of" if what == "persist" else "gone from"
        print(f"{short_id(artifact)} is {done} worker {worker}")


def _here(settings: Settings) -> str:
    for card in living_workers(settings.home):
        if "basic" in card.roles and card.host_id == settings.host_id:
            return card.worker
    raise UnavailableError(
        f"no worker of home {settings.home} holds memory on this host; name one with --worker", home=str(settings.home)
    )
