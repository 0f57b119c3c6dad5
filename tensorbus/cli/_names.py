"""``ls``, ``rm``, ``bind``: keys and what they are bound to."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from tensorbus.cli._client import with_bus
from tensorbus.cli._options import CLIENT, json_option, takes_settings
from tensorbus.cli._output import emit_json, name, short_id, size, table
from tensorbus.cli._verdict import command
from tensorbus.config import Resolved

if TYPE_CHECKING:
    from tensorbus.sdk import AsyncArtifact, AsyncBus, KeyInfo, SeriesInfo


@click.command(short_help="List keys, or series of versions.")
@click.argument("prefix", default="")
@click.option("--series", is_flag=True, help="List series of versions instead of keys.")
@takes_settings(*CLIENT)
@json_option
def ls(resolved: Resolved, *, prefix: str, series: bool, as_json: bool) -> None:
    """List the keys that begin with PREFIX, and the artifact of each."""

    async def work(bus: AsyncBus) -> None:
        if series:
            _print_series(await bus.ls_series(prefix), as_json=as_json)
        else:
            _print_keys(await bus.ls(prefix), as_json=as_json)

    with_bus(resolved, work)


def _print_keys(keys: list[KeyInfo], *, as_json: bool) -> None:
    if as_json:
        for one in keys:
            emit_json({"key": one.key, "id": one.artifact, "nbytes": one.nbytes, "tensors": one.tensors})
        return
    rows = [(name(one.key), short_id(one.artifact), size(one.nbytes), str(one.tensors)) for one in keys]
    table(("KEY", "ID", "SIZE", "TENSORS"), rows, right=("SIZE", "TENSORS"))


def _print_series(series: list[SeriesInfo], *, as_json: bool) -> None:
    if as_json:
        for one in series:
            emit_json(one)
        return
    rows = [(name(one.name), str(one.last), str(one.kept)) for one in series]
    table(("SERIES", "LAST", "KEPT"), rows, right=("LAST", "KEPT"))


@click.command(short_help="Destroy an artifact, or drop a key.")
@click.argument("ref")
@click.option("--key-only", is_flag=True, help="Drop only the key REF; its artifact lives on.")
@takes_settings(*CLIENT)
@json_option
def rm(resolved: Resolved, *, ref: str, key_only: bool, as_json: bool) -> None:
    """Destroy the artifact REF, a key or an id, everywhere, with every key and version that names it.

    Who has it mapped can go on reading.
    """

    async def work(bus: AsyncBus) -> None:
        art = await (_by_key(bus, ref) if key_only else bus.artifact(ref))
        if key_only:
            position = await bus.unbind(ref)
        else:
            position = await art.destroy()
        if as_json:
            emit_json(
                {"id": art.id, "key": ref if key_only else art.key, "destroyed": not key_only, "position": position}
            )
        elif key_only:
            print(f"dropped key {name(ref)}; artifact {short_id(art.id)} lives on")
        else:
            print(f"destroyed {art.id}")

    with_bus(resolved, work)


async def _by_key(bus: AsyncBus, key: str) -> AsyncArtifact:
    from tensorbus.errors import NotFoundError

    try:
        return await bus.artifact(key=key)
    except NotFoundError as missing:
        try:
            art = await bus.artifact(key)
        except NotFoundError:
            raise missing from None
        advice = f"it is the id of an artifact, which `{command('tensorbus', 'rm', key)}` destroys"
        raise NotFoundError(f"{name(key)} is no key; {advice}", key=key, id=art.id) from missing


@click.command(short_help="Name an artifact by a key as well.")
@click.argument("key")
@click.argument("ref")
@click.option("--rebind", is_flag=True, help="Take KEY from the artifact that has it now.")
@takes_settings(*CLIENT)
@json_option
def bind(resolved: Resolved, *, key: str, ref: str, rebind: bool, as_json: bool) -> None:
    """Name the artifact REF, a key or an id, by KEY as well."""

    async def work(bus: AsyncBus) -> None:
        art = await bus.bind(key, await bus.artifact(ref), rebind=rebind)
        if as_json:
            emit_json({"key": key, "id": art.id, "position": art.position})
        else:
            print(f"{name(key)} is {art.id}")

    with_bus(resolved, work)
