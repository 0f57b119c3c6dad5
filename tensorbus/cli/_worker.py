"""``tensorbus worker``: one worker in the foreground."""

from __future__ import annotations

import json
import sys

import click

from tensorbus.cli._options import WORKER, json_option, takes_settings
from tensorbus.cli._parent import end_with
from tensorbus.config import Resolved


@click.command(short_help="Run one worker in the foreground.")
@click.option(
    "--roles",
    default="basic",
    show_default=True,
    metavar="ROLE[,ROLE]",
    help="basic holds tensors in memory; gateway serves callers without a worker; shard-home knows where pages lie; "
    "store keeps the log and answers about the past. All but basic end the sessions of dead workers.",
)
@click.option("--parent", type=int, hidden=True, help="End when this process, which started it, ends.")
@takes_settings("worker_id", *WORKER)
@json_option
def worker(resolved: Resolved, *, roles: str, parent: int | None, as_json: bool) -> None:
    """Run one worker in the foreground until Ctrl-C or SIGTERM.

    It needs a bus: that of a running `tensorbus up`, or --nats-url.
    """
    if parent is not None:
        end_with(parent)
    from tensorbus.policies import eviction
    from tensorbus.telemetry import setup_logging
    from tensorbus.transport import WorkerCard
    from tensorbus.workers import run_process

    setup_logging(str(resolved.settings.log_level))

    def ready(card: WorkerCard) -> None:
        shown = {
            "worker": card.worker,
            "incarnation": card.incarnation,
            "host_id": card.host_id,
            "roles": list(card.roles),
            "pid": card.pid,
            "socket": str(resolved.settings.home / "run" / card.socket),
            "data": card.data,
            "control": card.control,
        }
        if as_json:
            print(json.dumps({"event": "ready", **shown}), flush=True)
        else:
            words = (f"{key}={value}" for key, value in shown.items() if isinstance(value, str) and value)
            print("ready", " ".join(words), flush=True)

    chosen = tuple(role.strip() for role in roles.split(",") if role.strip())
    run_process(
        resolved.settings, roles=chosen, ready=ready, eviction=lambda name, nbytes: eviction(name, nbytes=nbytes)
    )
    sys.stdout.flush()
