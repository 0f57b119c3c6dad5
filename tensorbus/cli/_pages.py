"""``pages``: how the index of pages stands."""

from __future__ import annotations

import asyncio
from typing import Any

import click

from tensorbus.cli._options import json_option, takes_settings
from tensorbus.cli._output import emit_json, size, table
from tensorbus.cli._page_homes import PageHomes, look_at_homes
from tensorbus.config import Resolved


@click.group(short_help="How the index of pages stands.")
def pages() -> None:
    """How the index of KV-cache pages stands."""


@pages.command(short_help="Show the homes of the shards.")
@takes_settings("home", "tenant")
@json_option
def status(resolved: Resolved, *, as_json: bool) -> None:
    """Show the homes of the shards of pages, on every host, and how far their indexes are to be believed.

    A worker of this home tells where they are.
    """
    found = asyncio.run(look_at_homes(resolved.settings))
    if as_json:
        emit_json({"shards": found.shards, "nobodys": found.nobodys, "homes": found.homes, "silent": found.silent})
    else:
        _print(found)


def _print(found: PageHomes) -> None:
    if not found.shards:
        print("no home was ever there")
        return
    header = ("HOME", "STATE", "SHARDS", "EXACT", "DEGRADED", "REBUILDING", "PAGES", "INDEX", "NOT LOGGED")
    rows = [_row(home) for home in found.homes]
    rows += [(worker, "silent", *("-" for _ in header[2:])) for worker in found.silent]
    table(header, rows, right=header[2:])
    if found.nobodys:
        print(f"{len(found.nobodys)} of {found.shards} shards have no living home")


def _row(home: dict[str, Any]) -> tuple[str, ...]:
    shards = home["shards"]
    exact = sum(shard["state"] == "exact" for shard in shards)
    return (
        home["worker"],
        "alive" if home["alive"] else "unproven",
        str(len(shards)),
        str(exact),
        str(len(shards) - exact),
        str(len(home["rebuilding"])),
        str(sum(shard["pages"] for shard in shards)),
        size(sum(shard["index_bytes"] for shard in shards)),
        str(sum(shard["lag"] for shard in shards)),
    )
