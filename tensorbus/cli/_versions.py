"""``publish`` and ``versions``: numbered series under a name."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from tensorbus.cli._client import with_bus
from tensorbus.cli._options import CLIENT, GivenPath, json_option, takes_settings
from tensorbus.cli._output import age, emit_json, name, short_id, size, table
from tensorbus.cli._progress import Progress
from tensorbus.cli._reader import while_read
from tensorbus.clock import SystemClock
from tensorbus.config import Resolved

if TYPE_CHECKING:
    from tensorbus.sdk import AsyncArtifact, AsyncBus


@click.command(short_help="Make something the next version of a series.")
@click.argument("series")
@click.argument("path", type=GivenPath(), required=False)
@click.option("--artifact", metavar="REF", help="Publish this artifact, a key or an id, instead of a file.")
@takes_settings(*CLIENT)
@json_option
def publish(resolved: Resolved, *, series: str, path: Path | None, artifact: str | None, as_json: bool) -> None:
    """Make PATH, a safetensors file or a directory of them, the next version of SERIES."""
    if (path is None) == (artifact is None):
        raise click.UsageError("give a PATH, or --artifact REF")

    async def work(bus: AsyncBus) -> None:
        if artifact is not None:
            art = await bus.publish(series, await bus.artifact(artifact))
        else:
            with Progress(f"publish {name(series)}") as progress:
                art = await bus.publish(series, path, progress=progress)
        if as_json:
            shown = {"name": series, "version": art.version, "id": art.id, "nbytes": art.nbytes}
            emit_json({**shown, "position": art.position})
        else:
            print(f"{name(series)} v{art.version} is {art.id}, {size(art.nbytes)}")

    with_bus(resolved, work)


@click.command(short_help="List the versions of a series.")
@click.argument("series")
@click.option("--follow", is_flag=True, help="Wait for further versions.")
@takes_settings(*CLIENT)
@json_option
def versions(resolved: Resolved, *, series: str, follow: bool, as_json: bool) -> None:
    """List the versions of SERIES that are there, oldest first."""

    async def work(bus: AsyncBus) -> None:
        if follow:
            await while_read(_follow(bus, series, as_json=as_json))
            return
        last = await bus.latest(series)
        found = []
        subscription = bus.subscribe(series, start="earliest")
        async for art in subscription:
            found.append(art)
            if art.version is not None and last.version is not None and art.version >= last.version:
                break
        await subscription.aclose()
        await _print_all(series, found, as_json=as_json)

    with_bus(resolved, work)


async def _follow(bus: AsyncBus, series: str, *, as_json: bool) -> None:
    async for art in bus.subscribe(series, start="earliest"):
        _print_one(series, art, as_json=as_json)


def _print_one(series: str, art: AsyncArtifact, *, as_json: bool) -> None:
    if as_json:
        emit_json({"name": series, "version": art.version, "id": art.id, "nbytes": art.nbytes})
    else:
        print(f"{name(series)} v{art.version}  {art.id}  {size(art.nbytes)}", flush=True)


async def _print_all(series: str, found: list[AsyncArtifact], *, as_json: bool) -> None:
    if as_json:
        for art in found:
            _print_one(series, art, as_json=True)
        return
    now_ns = SystemClock().wall_ns()
    rows = []
    for art in found:
        info = await art.info()
        rows.append((str(art.version), short_id(art.id), size(art.nbytes), age(info.created_ns, now_ns=now_ns)))
    table(("VERSION", "ID", "SIZE", "PUT AGO"), rows, right=("VERSION", "SIZE", "PUT AGO"))
