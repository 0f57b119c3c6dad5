"""``bus migrate``: one server becomes three."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import click

from tensorbus.bus import EmbeddedServer, Migrated, NatsAuth
from tensorbus.bus import migrate as move
from tensorbus.cli._bus_admin import SERVERS, connected
from tensorbus.cli._options import GivenPath, json_option, takes_settings
from tensorbus.cli._output import emit_json, size
from tensorbus.cli._progress import Progress
from tensorbus.cli._urls import without_password
from tensorbus.clock import Deadline
from tensorbus.config import Resolved, Settings
from tensorbus.errors import ConflictError, UnavailableError
from tensorbus.transport import is_locked
from tensorbus.workers import bus_url

MIGRATE_S: Final = 24 * 3600.0


@click.command(short_help="Move the log to other servers.")
@click.option("--to", "target", required=True, metavar="URL", help="The servers to move to, as nats_url names them.")
@click.option("--replicas", type=click.Choice(["1", "3", "5"]), default="3", show_default=True, help="Copies there.")
@click.option("--to-creds", type=GivenPath(), metavar="FILE", help="Credentials there; nats_creds if not given.")
@click.option("--to-nkey-seed", type=GivenPath(), metavar="FILE", help="Seed there; nats_nkey_seed if not given.")
@click.option("--to-tls-ca", type=GivenPath(), metavar="FILE", help="Authority there; nats_tls_ca if not given.")
@click.option("--force", is_flag=True, help="Go on although workers, known to be dead, never left the log.")
@takes_settings(*SERVERS)
@json_option
def migrate(
    resolved: Resolved,
    *,
    target: str,
    replicas: str,
    to_creds: Path | None,
    to_nkey_seed: Path | None,
    to_tls_ca: Path | None,
    force: bool,
    as_json: bool,
) -> None:
    """Copy the log to other servers with its sequences, have it kept by several of them, and compare the two.

    Stop all workers first. The home's own server is started for the time of the move if nobody runs it. The source is
    only read; when anything fails, what was made at the target is removed. Afterwards start the workers with
    --nats-url of the new servers.
    """
    settings = resolved.settings
    auth = _auth_there(settings, target, to_creds, to_nkey_seed, to_tls_ca)
    with _source(settings) as url, Progress("copying the log") as progress:
        moved = asyncio.run(_move(settings, url, target, auth, int(replicas), force=force, progress=progress))
    if as_json:
        emit_json(moved)
        return
    copies = f"{moved.replicas} servers" if moved.replicas > 1 else "1 server"
    print(f"{moved.stream}: {moved.messages} messages, {size(moved.nbytes)}, up to {moved.last_seq}; kept by {copies}")
    print(f"start the workers with --nats-url {without_password(target)} --nats-replicas {moved.replicas}")


async def _move(
    settings: Settings, url: str, target: str, auth: NatsAuth, replicas: int, *, force: bool, progress: Progress
) -> Migrated:
    async with connected(settings, url, NatsAuth.of(settings)) as source, connected(settings, target, auth) as there:
        deadline = Deadline(MIGRATE_S, what="moving the log")
        try:
            return await move(source, there, replicas=replicas, force=force, progress=progress, deadline=deadline)
        except ConflictError as exc:
            if "workers" not in exc.details or not is_locked(settings.home / "run" / "up.lock"):
                raise
            advice = f"`tensorbus up` of home {settings.home} runs: stop it first"
            if settings.nats_url is None:
                advice += ", and `bus migrate` starts the home's server by itself"
            raise ConflictError(f"{exc.message}; {advice}", **exc.details) from exc


def _auth_there(
    settings: Settings, target: str, creds: Path | None, seed: Path | None, authority: Path | None
) -> NatsAuth:
    """As whom to connect to the target: as here, but for what was said."""
    here = NatsAuth.of(settings.model_copy(update={"nats_url": target}))
    return NatsAuth(
        creds=creds or (here.creds if seed is None else None),
        nkey_seed=seed or (here.nkey_seed if creds is None else None),
        tls_ca=authority or here.tls_ca,
        tls_cert=here.tls_cert,
        tls_key=here.tls_key,
    )


@contextlib.contextmanager
def _source(settings: Settings) -> Iterator[str]:
    """The URL to move from. A home's own server ends with its `up`, as the workers must, so it is started for this."""
    try:
        yield bus_url(settings)
    except UnavailableError:
        home = settings.home / "nats"
        if settings.nats_url is not None or not (home / "jetstream").is_dir():
            raise
    else:
        return
    with EmbeddedServer(home) as server:
        yield server.url
