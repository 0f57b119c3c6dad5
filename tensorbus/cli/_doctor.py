"""``doctor``: what is wrong here, and what to do about it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from typing import Final

import click

from tensorbus.cli._checks import check_all
from tensorbus.cli._errors import EXIT_OTHER
from tensorbus.cli._options import NATS, json_option, takes_flags
from tensorbus.cli._verdict import State, Verdict, show
from tensorbus.config import ENV_PREFIX, Resolved, load
from tensorbus.errors import InvalidArgumentError

FLAGS: Final = ("home", "host_id", "nats_url", *NATS, "subject_prefix", "pool_bytes")


@click.command(short_help="Check everything; say what is wrong.")
@takes_flags(*FLAGS)
@json_option
@click.pass_context
def doctor(ctx: click.Context, flags: dict[str, object], *, as_json: bool) -> None:
    """Check settings, home, bus, workers, clock and limits; for each say what is wrong and what to do.

    Ends with 1 if something is wrong, with 0 if there are only notes.
    """
    resolved, verdicts = _settings(flags)
    verdicts += asyncio.run(check_all(resolved))
    for verdict in verdicts:
        show(verdict, as_json=as_json)
    if any(verdict.state is State.WRONG for verdict in verdicts):
        ctx.exit(EXIT_OTHER)


def _settings(flags: Mapping[str, object]) -> tuple[Resolved, list[Verdict]]:
    """The settings and what is to be said of them. Those that cannot be are left out: the rest is checked too."""
    try:
        resolved = load(flags)
    except InvalidArgumentError as exc:
        problem = Verdict("settings", State.WRONG, str(exc), "correct or remove it; the checks below go without it")
        return _without_faults(flags), [problem]
    origins = sorted(set(resolved.origins.values()) - {"default"})
    return resolved, [Verdict("settings", State.OK, f"valid, from {', '.join(['defaults', *origins])}")]


def _without_faults(flags: Mapping[str, object]) -> Resolved:
    """Settings from what can be read: each variable and flag that fails by itself is dropped, and the file."""
    env: dict[str, str] = {}
    for key, value in os.environ.items():
        if key.startswith(ENV_PREFIX) and _loads({}, {**env, key: value}):
            env[key] = value
    good: dict[str, object] = {}
    for name, given in flags.items():
        if _loads({**good, name: given}, env):
            good[name] = given
    try:
        return load(good, env)
    except InvalidArgumentError:  # the home's own file
        return load(good, {**env, "TENSORBUS_CONFIG": os.devnull})


def _loads(flags: Mapping[str, object], env: Mapping[str, str]) -> bool:
    try:
        load(flags, {"TENSORBUS_CONFIG": os.devnull, **env})
    except InvalidArgumentError:
        return False
    return True
