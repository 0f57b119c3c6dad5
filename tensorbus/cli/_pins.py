"""``pin`` and ``unpin``: keep a replica on this host's worker."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

import click

from tensorbus.cli._client import explained, with_bus
from tensorbus.cli._options import CLIENT, json_option, takes_settings
from tensorbus.cli._output import emit_json, name
from tensorbus.cli._probes import ask_worker
from tensorbus.cli._verdict import command
from tensorbus.clock import Deadline
from tensorbus.config import Resolved, Settings
from tensorbus.errors import DeadlineExceededError, UnavailableError
from tensorbus.transport import living_workers

if TYPE_CHECKING:
    from tensorbus.sdk import AsyncBus, Position

TTL_S_MAX: Final = 365 * 86_400


def _ttl(_ctx: click.Context, _param: click.Parameter, value: float) -> float:
    if not 0 < value <= TTL_S_MAX:  # nan is not either
        raise click.BadParameter(f"{value:g} is not a number of seconds above 0 and up to {TTL_S_MAX} (a year)")
    return value


@click.command(short_help="Keep a replica on this host's worker.")
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
@takes_settings(*CLIENT)
@json_option
def pin(resolved: Resolved, *, ref: str, ttl_s: float, as_json: bool) -> None:
    """Have this host's worker keep a replica of the artifact REF, a key or an id; fetches one if it has none.

    The pin is a fact on the log and outlives this command. Prints the lease that `unpin` takes.
    """

    async def find(bus: AsyncBus) -> str:
        return (await bus.artifact(ref)).base_id

    artifact = with_bus(resolved, find)
    try:
        answer = _ask(resolved.settings, "pin", {"artifact": artifact, "ttl_s": ttl_s})
    except DeadlineExceededError as exc:
        raise explained(exc, resolved) from exc
    if as_json:
        emit_json({"id": artifact, "lease": answer["lease"], "ttl_s": ttl_s, "position": {"TB": answer["position"]}})
    else:
        print(answer["lease"])


@click.command(short_help="End a pin.")
@click.argument("lease")
@takes_settings(*CLIENT)
@json_option
def unpin(resolved: Resolved, *, lease: str, as_json: bool) -> None:
    """End the pin LEASE; its replica may be evicted from then on."""

    async def end(bus: AsyncBus) -> Position:
        return await bus.unpin(lease)

    position = with_bus(resolved, end)
    if as_json:
        emit_json({"lease": lease, "position": dict(position)})
    else:
        print(f"ended {name(lease)}")


def _ask(settings: Settings, op: str, args: dict[str, object]) -> dict[str, object]:
    cards = living_workers(settings.home)
    here = [card for card in cards if "basic" in card.roles and card.host_id == settings.host_id]
    if not here:
        raise UnavailableError(
            f"no worker of home {settings.home} holds memory on this host, so nothing can be pinned here; "
            f"start one with `{command('tensorbus', 'up', '--home', settings.home)}`",
            home=str(settings.home),
        )
    deadline = Deadline(settings.timeout_s, what=op)
    return asyncio.run(ask_worker(settings, here[0], op, args, deadline=deadline))
