"""The command ``tensorbus``: one subcommand per verb. Importing it is quick; each command imports what it needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit with its code (table in ``docs/cli.md``)."""
    from tensorbus.cli._app import run

    raise SystemExit(run(args))


__all__ = ["main"]
