"""``op``: the operations of workers that the log knows."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from tensorbus.cli._client import with_bus
from tensorbus.cli._operate import ended
from tensorbus.cli._options import CLIENT, json_option, takes_settings
from tensorbus.cli._output import age, emit_json, facts, name, short_id, size, stamp, table
from tensorbus.clock import SystemClock
from tensorbus.config import Resolved

if TYPE_CHECKING:
    from tensorbus.sdk import AsyncBus, OperationInfo, OperationProgress


@click.group(short_help="List, show or cancel operations of workers.")
def op() -> None:
    """List, show or cancel operations of workers: prefetch, pin, replicate, migrate, evict, persist, verify."""


@op.command(short_help="List operations, the newest first.")
@click.option("--worker", metavar="ID", help="Only those of this worker.")
@click.option("--running", is_flag=True, help="Only those that have not ended.")
@click.option("--limit", type=click.IntRange(1, 1000), default=100, show_default=True, help="How many at most.")
@takes_settings(*CLIENT)
@json_option
def ls(resolved: Resolved, *, worker: str | None, running: bool, limit: int, as_json: bool) -> None:
    """List the tenant's operations, the newest first. Those that ended long ago are forgotten."""

    async def work(bus: AsyncBus) -> list[OperationInfo]:
        return await bus.operations(worker=worker, running=running, limit=limit)

    found = with_bus(resolved, work)
    if as_json:
        for one in found:
            emit_json(one)
        return
    now_ns = SystemClock().wall_ns()
    rows = [
        (one.id, one.operation, one.worker, one.state, age(one.started_ns, now_ns=now_ns), short_id(one.artifact))
        for one in found
    ]
    table(("ID", "OPERATION", "WORKER", "STATE", "AGE", "ARTIFACT"), rows, right=("AGE",))


@op.command(short_help="Show an operation.")
@click.argument("id")
@click.option("--wait", is_flag=True, help="Wait for its end first.")
@takes_settings(*CLIENT)
@json_option
def show(resolved: Resolved, *, id: str, wait: bool, as_json: bool) -> None:
    """Show the operation ID: how it stands, how far it is, and what came of it.

    With --wait an operation that did not succeed is this command's error.
    """

    async def work(bus: AsyncBus) -> tuple[OperationInfo, OperationProgress]:
        operation = bus.operation(id)
        if wait:
            await ended(operation, f"operation {id}", resolved.settings)
        return await operation.status(), await operation.progress()

    found, progress = with_bus(resolved, work)
    if as_json:
        emit_json(_as_json(found) | {"nbytes_done": progress.nbytes_done, "nbytes_total": progress.nbytes_total})
    else:
        _print(found, progress)


@op.command(short_help="Cancel an operation.")
@click.argument("id")
@takes_settings(*CLIENT)
@json_option
def cancel(resolved: Resolved, *, id: str, as_json: bool) -> None:
    """Have the worker of the operation ID stop; what was done stays done. One that has ended stays as it ended."""

    async def work(bus: AsyncBus) -> OperationInfo:
        operation = bus.operation(id)
        await operation.cancel()
        return await operation.settled()

    found = with_bus(resolved, work)
    if as_json:
        emit_json(_as_json(found))
    else:
        print(f"{name(found.id)} {found.state}")


def _as_json(found: OperationInfo) -> dict[str, object]:
    """Documented in docs/cli.md."""
    return {field: getattr(found, field) for field in found.__slots__}


def _print(found: OperationInfo, progress: OperationProgress) -> None:
    error = found.error or {}
    rows = [
        ("id", name(found.id)),
        ("operation", f"{found.operation} of {name(found.artifact)}"),
        ("arguments", json.dumps(found.args) if found.args else "none"),
        ("worker", f"{found.worker} ({found.incarnation})"),
        ("asked by", found.principal or "-"),
        ("state", found.state),
        ("started", f"{stamp(found.started_ns)} at position {found.started}"),
    ]
    if found.ended_ns is not None:
        rows.append(("ended", f"{stamp(found.ended_ns)} at position {found.ended}"))
    if progress.nbytes_total:
        rows.append(("progress", f"{size(progress.nbytes_done)} of {size(progress.nbytes_total)}"))
    if found.result is not None:
        rows.append(("result", json.dumps(found.result)))
    if error:
        rows.append(("error", f"{error.get('kind')}: {error.get('message')}"))
    if found.state == "lost":
        rows.append(("error", f"the session of worker {found.worker} ended first (the fact at {found.ended})"))
    facts(rows)
