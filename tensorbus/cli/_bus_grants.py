"""``bus grants``: permissions for a nats-server, and keys for who gets them."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import click

from tensorbus.bus import User, new_seed, parse_user, public_key, users_config, users_json
from tensorbus.cli._options import GivenPath, json_option, takes_settings
from tensorbus.cli._output import emit_json, table
from tensorbus.config import Resolved
from tensorbus.events import Subjects
from tensorbus.ids import IdSource, SystemIds

SEED_BYTES: Final = 32
CONFIG_NAME: Final = "users.conf"
JSON_NAME: Final = "users.json"


@click.command(short_help="Print who may do what, for nats-server; make keys.")
@click.argument("users", nargs=-1, required=True, metavar="ROLE[+ROLE]:NAME[:NKEY]...")
@click.option("--generate", type=GivenPath(), metavar="DIR", help="Write keys and configuration to a directory.")
@takes_settings("home", "subject_prefix")
@json_option
def grants(resolved: Resolved, *, users: Sequence[str], generate: Path | None, as_json: bool) -> None:
    """Print the permissions of users as a part of nats-server's configuration, or with --json as JSON.

    Roles are basic, gateway, store, shard-home, caller and admin; NAME is a worker's id, or the nats_user of a caller
    or an operator. NKEY is the public key by which the servers know the user. With --generate DIR a key is made for
    each who has none: DIR/NAME.nk is its seed, for the setting nats_nkey_seed; DIR/users.conf is to be included by
    nats-server.conf. Keys that are there already stay.
    """
    subjects = Subjects(resolved.settings.subject_prefix)
    wanted = [parse_user(text) for text in users]
    if generate is not None:
        wanted = _with_keys(wanted, generate, SystemIds())
        _write(generate / CONFIG_NAME, users_config(wanted, subjects=subjects))
        _write(generate / JSON_NAME, json.dumps(users_json(wanted, subjects=subjects), indent=1) + "\n")
    if as_json:
        for user in users_json(wanted, subjects=subjects):
            emit_json(user)
    elif generate is not None:
        rows = [
            (user.name, ", ".join(user.roles), str(generate / f"{user.name}.nk"), user.nkey or "") for user in wanted
        ]
        table(("USER", "ROLES", "SEED", "KEY"), rows)
        print(f"nats-server.conf: include {os.path.relpath(generate / CONFIG_NAME)}")
    else:
        print(users_config(wanted, subjects=subjects), end="")


def _with_keys(users: Sequence[User], folder: Path, ids: IdSource) -> list[User]:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return [user if user.nkey is not None else replace(user, nkey=_key(folder, user.name, ids)) for user in users]


def _key(folder: Path, name: str, ids: IdSource) -> str:
    """The public key of a user, whose seed is made if it is not there."""
    path = folder / f"{name}.nk"
    try:
        seed = path.read_text(encoding="ascii").strip()
    except FileNotFoundError:
        seed = new_seed(bytes.fromhex(ids.hex(SEED_BYTES)))
        _write(path, f"{seed}\n")
    return public_key(seed, where=str(path))


def _write(path: Path, text: str) -> None:
    """Readable by nobody else from its first moment on."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with open(fd, "w", encoding="utf-8") as file:
        file.write(text)
    draft.replace(path)
