"""``events``, ``workers``, ``stats``: the log, and who speaks on it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from tensorbus.cli._client import with_bus
from tensorbus.cli._options import CLIENT, json_option, takes_settings
from tensorbus.cli._output import age, emit_json, facts, short_id, size, stamp, table
from tensorbus.cli._reader import while_read
from tensorbus.clock import SystemClock
from tensorbus.config import Resolved

if TYPE_CHECKING:
    from tensorbus.sdk import AsyncBus, EventRecord, WorkerInfo


@click.command(short_help="Print the facts on the log.")
@click.option("--follow", is_flag=True, help="Wait for further facts.")
@click.option("--since", type=click.IntRange(min=0), default=0, metavar="SEQ", help="Only facts after this sequence.")
@click.option("--artifact", metavar="REF", help="Only facts about this artifact, a key or an id.")
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Stop after so many facts.")
@takes_settings(*CLIENT)
@json_option
def events(
    resolved: Resolved, *, follow: bool, since: int, artifact: str | None, limit: int | None, as_json: bool
) -> None:
    """Print the facts on the log, oldest first."""

    async def work(bus: AsyncBus) -> None:
        about = None if artifact is None else await _id_of(bus, artifact)

        async def copy() -> None:
            printed = 0
            async with bus.events(follow=follow, since=since, artifact=about) as found:
                async for event in found:
                    _print_event(event, as_json=as_json)
                    printed += 1
                    if printed == limit:
                        return

        await while_read(copy())

    with_bus(resolved, work)


async def _id_of(bus: AsyncBus, ref: str) -> str:
    """The id of an artifact that is there; else the text itself, which may be the id of one that has ended."""
    from tensorbus.errors import NotFoundError

    try:
        return (await bus.artifact(ref)).base_id
    except NotFoundError:
        return ref


def _print_event(event: EventRecord, *, as_json: bool) -> None:
    if as_json:
        emit_json(event)
        return
    body = {key: value for key, value in event.body.items() if key not in _NOT_SHOWN and value not in (None, "")}
    details = " ".join(f"{key}={_shown(key, value)}" for key, value in body.items())
    print(f"{event.seq:>6}  {stamp(event.time_ns)}  {event.type:18} {event.author:18} {details}".rstrip(), flush=True)


_NOT_SHOWN = frozenset({"tenant", "number", "manifest", "worker", "incarnation"})


def _shown(key: str, value: object) -> str:
    if key == "nbytes" and isinstance(value, int):
        return size(value).replace(" ", "")
    return short_id(value) if isinstance(value, str) else json.dumps(value)


@click.command(short_help="List the workers on the log.")
@click.option("--all", "every", is_flag=True, help="Also workers whose session has ended.")
@takes_settings(*CLIENT)
@json_option
def workers(resolved: Resolved, *, every: bool, as_json: bool) -> None:
    """List the workers on the log, on every host."""

    async def work(bus: AsyncBus) -> None:
        found = [one for one in await bus.list_workers() if one.live or every]
        if as_json:
            for one in found:
                emit_json(one)
        else:
            _print_workers(found)

    with_bus(resolved, work)


def _print_workers(found: list[WorkerInfo]) -> None:
    now_ns = SystemClock().wall_ns()
    rows = [
        (
            one.worker,
            "+".join(one.roles),
            one.host,
            "live" if one.live else "ended",
            age(one.opened_ns, now_ns=now_ns),
            str(one.replicas),
            size(one.pool_bytes) if one.pool_bytes else "-",
            one.data or "-",
            one.control or "-",
            str(one.pid),
        )
        for one in found
    ]
    header = ("WORKER", "ROLES", "HOST", "STATE", "AGE", "REPLICAS", "POOL", "BYTES AT", "CALLERS AT", "PID")
    table(header, rows, right=("AGE", "REPLICAS", "POOL", "PID"))


@click.command(short_help="Show figures of a worker and its directory.")
@takes_settings(*CLIENT)
@json_option
def stats(resolved: Resolved, *, as_json: bool) -> None:
    """Show figures of the worker that answers: its pool, its directory and the directory's hash."""

    async def work(bus: AsyncBus) -> None:
        found = await bus.stats()
        if as_json:
            emit_json(found)
            return
        rows = []
        for group, values in found.items():
            if isinstance(values, dict):
                rows += [(f"{group}.{key}", _figure(key, value)) for key, value in values.items()]
            else:
                rows.append((group, json.dumps(values)))
        facts(rows)

    with_bus(resolved, work)


def _figure(key: str, value: object) -> str:
    if key.endswith("bytes") and isinstance(value, int):
        return size(value)
    return value if isinstance(value, str) else json.dumps(value)
