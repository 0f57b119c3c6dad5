"""The command ``tensorbus``: one subcommand per verb. Importing it is quick; each command imports what it needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit with its code (table in ``docs/cli.md``)."""
    try:
        from tensorbus.cli._app import run

        code = run(args)
    except KeyboardInterrupt:  # before anything could take it
        code = 130
    raise SystemExit(code)


__all__ = ["main"]
