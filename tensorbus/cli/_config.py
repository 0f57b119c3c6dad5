"""``config``: every setting, its value, and where that came from."""

from __future__ import annotations

import click

from tensorbus.cli._options import json_option, takes_settings
from tensorbus.cli._output import emit_json, name, size, table
from tensorbus.cli._urls import without_password
from tensorbus.config import Resolved, Settings


@click.command(short_help="Show each setting and where it came from.")
@takes_settings(*Settings.model_fields)
@json_option
def config(resolved: Resolved, *, as_json: bool) -> None:
    """Show the settings in force and where each came from: a flag, the environment, a file or the default."""
    values = {setting: _value(resolved, setting) for setting in Settings.model_fields}
    if as_json:
        emit_json({setting: {"value": value, "origin": resolved.origins[setting]} for setting, value in values.items()})
        return
    rows = [(setting, _shown(setting, value), resolved.origins[setting]) for setting, value in values.items()]
    table(("SETTING", "VALUE", "FROM"), rows)


def _value(resolved: Resolved, setting: str) -> object:
    value = getattr(resolved.settings, setting)
    return without_password(value) if setting == "nats_url" and value is not None else value


def _shown(setting: str, value: object) -> str:
    if value is None:
        return "-"
    if setting.endswith("_bytes") and isinstance(value, int):
        return f"{value} ({size(value)})" if value else "0"
    return f"{value:g}" if isinstance(value, float) else name(str(value))
