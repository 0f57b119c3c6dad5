"""``bus``: what an operator does with the NATS servers, and ``bus init``."""

from __future__ import annotations

import click

from tensorbus.bus import BusAdmin, StreamLimits, StreamReport
from tensorbus.cli._bus_admin import SERVERS, with_admin
from tensorbus.cli._bus_check import check
from tensorbus.cli._bus_grants import grants
from tensorbus.cli._bus_migrate import migrate
from tensorbus.cli._options import json_option, takes_settings
from tensorbus.cli._output import emit_json, table
from tensorbus.clock import Deadline
from tensorbus.config import Resolved


@click.group(short_help="Look after the NATS servers of the log.")
def bus() -> None:
    """Make the log's streams, look at them, move them to other servers, and say who may do what.

    `init` and `migrate` need the permissions of the role admin; `check` does with those of any.
    """


@click.command(short_help="Make the streams that are missing.")
@click.option("--replicas", type=click.Choice(["1", "3", "5"]), help="The same as --nats-replicas.")
@click.option("--after-loss", is_flag=True, help="The log is lost for good: make a new one, beyond the old sequences.")
@click.option("--above", type=int, default=0, metavar="SEQ", help="A sequence that the lost log is known to have had.")
@takes_settings(*SERVERS, "nats_replicas")
@json_option
def init(resolved: Resolved, *, replicas: str | None, after_loss: bool, above: int, as_json: bool) -> None:
    """Make the streams that are missing, each kept by --replicas servers. Those that are there stay as they are."""
    limits = StreamLimits(replicas=resolved.settings.nats_replicas if replicas is None else int(replicas))

    async def work(admin: BusAdmin) -> tuple[StreamReport, ...]:
        deadline = Deadline(resolved.settings.timeout_s, what="making the streams")
        return await admin.init(limits, remembered_seq=above, after_loss=after_loss, deadline=deadline)

    found = with_admin(resolved.settings, work)
    if as_json:
        for stream in found:
            emit_json(stream)
        return
    rows = [(one.name, "made" if one.made else "was there", str(one.replicas), str(one.last_seq)) for one in found]
    table(("STREAM", "", "COPIES", "LAST"), rows, right=("COPIES", "LAST"))


for command in (init, check, grants, migrate):
    bus.add_command(command)
