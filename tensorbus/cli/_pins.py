"""``pin`` and ``unpin``: keep a replica on a worker."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import click

from tensorbus.cli._client import with_bus
from tensorbus.cli._operate import Asked, operate, takes_operation
from tensorbus.cli._options import CLIENT, json_option, takes_settings
from tensorbus.cli._output import emit_json, name
from tensorbus.config import Resolved
from tensorbus.errors import ConflictError

if TYPE_CHECKING:
    from tensorbus.sdk import AsyncBus, Position

TTL_S_MAX: Final = 365 * 86_400


def _ttl(_ctx: click.Context, _param: click.Parameter, value: float) -> float:
    if not 0 < value <= TTL_S_MAX:  # nan is not either
        raise click.BadParameter(f"{value:g} is not a number of seconds above 0 and up to {TTL_S_MAX} (a year)")
    return value


@click.command(short_help="Keep a replica on a worker.")
@click.argument("ref")
@click.option(
    "--ttl",
    "ttl_s",
    type=float,
    default=3600.0,
    show_default=True,
    callback=_ttl,
    metavar="SECONDS",
    help="When it ends.",
)
@takes_operation()
def pin(resolved: Resolved, *, ref: str, ttl_s: float, asked: Asked) -> None:
    """Have a worker keep a replica of the artifact REF, a key or an id; fetches one if it has none.

    The pin is a fact on the log and outlives this command. Prints the lease that `unpin` takes.
    """
    operate(resolved, ref, "pin", lambda at, art: at.pin(art, ttl_s=ttl_s, **asked.how), asked)


@click.command(short_help="End a pin.")
@click.argument("lease")
@takes_settings(*CLIENT)
@json_option
def unpin(resolved: Resolved, *, lease: str, as_json: bool) -> None:
    """End the pin LEASE, whichever worker has it; its replica may be evicted from then on."""
    position = with_bus(resolved, lambda bus: _unpin(bus, lease))
    if as_json:
        emit_json({"lease": lease, "position": dict(position)})
    else:
        print(f"ended {name(lease)}")


async def _unpin(bus: AsyncBus, lease: str) -> Position:
    try:
        return await bus.unpin(lease)
    except ConflictError as exc:
        holder = exc.details.get("worker")
        if not isinstance(holder, str):
            raise
    operation = bus.worker(holder).unpin(lease)
    await operation
    return (await operation.status()).positions
