"""The command group: commands by name, loaded when asked for, and the one place where errors become exit codes."""

from __future__ import annotations

import importlib
import io
import os
import sys
from collections.abc import Sequence
from typing import Final

import click

import tensorbus
from tensorbus.cli._errors import EXIT_BROKEN_PIPE, EXIT_INTERRUPTED, from_os_error, report
from tensorbus.errors import InvalidArgumentError, TensorbusError

COMMANDS: Final = {
    "up": "_up:up",
    "worker": "_worker:worker",
    "put": "_artifacts:put",
    "get": "_artifacts:get",
    "ls": "_names:ls",
    "show": "_show:show",
    "rm": "_names:rm",
    "bind": "_names:bind",
    "publish": "_versions:publish",
    "versions": "_versions:versions",
    "prefetch": "_copies:prefetch",
    "pin": "_pins:pin",
    "unpin": "_pins:unpin",
    "replicate": "_copies:replicate",
    "migrate": "_copies:migrate",
    "evict": "_copies:evict",
    "persist": "_copies:persist",
    "verify": "_copies:verify",
    "op": "_op:op",
    "pages": "_pages:pages",
    "events": "_log:events",
    "workers": "_log:workers",
    "stats": "_log:stats",
    "query": "_query:query",
    "state": "_travel:state",
    "diff": "_travel:diff",
    "history": "_travel:history",
    "why": "_travel:why",
    "store": "_store:store",
    "archive": "_archive:archive",
    "config": "_config:config",
    "doctor": "_doctor:doctor",
    "bus": "_bus:bus",
}


class Commands(click.Group):
    """Loads a command's module when the command is used or listed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        place = COMMANDS.get(cmd_name)
        if place is None:
            return None
        module, attribute = place.split(":")
        command = getattr(importlib.import_module(f"tensorbus.cli.{module}"), attribute)
        assert isinstance(command, click.Command)
        return command


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(tensorbus.__version__, prog_name="tensorbus", message="%(prog)s %(version)s")
def cli() -> None:
    """Tensors that outlive the process that made them; every lifecycle change is a fact on NATS JetStream.

    Start with `tensorbus up`. Settings come from flags, TENSORBUS_* and a file; `tensorbus config` shows them.
    """


def run(args: Sequence[str] | None) -> int:
    """Run a command line; returns its exit code."""
    given = list(sys.argv[1:] if args is None else args)
    as_json = "--json" in given
    _open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        # Not cli.main(): that has ideas of its own about Ctrl-C and closed pipes.
        with cli.make_context("tensorbus", given) as ctx:
            cli.invoke(ctx)
        sys.stdout.flush()
    except click.exceptions.Exit as exc:
        return exc.exit_code
    except click.exceptions.NoArgsIsHelpError as exc:
        exc.show()
        return exc.exit_code
    except click.ClickException as exc:
        return _usage(exc, as_json=as_json)
    except TensorbusError as exc:
        return report(exc, as_json=as_json)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        _silence()
        return EXIT_BROKEN_PIPE
    except OSError as exc:
        return report(from_os_error(exc), as_json=as_json)
    return 0


def _usage(exc: click.ClickException, *, as_json: bool) -> int:
    if not as_json:
        exc.show()
        return exc.exit_code
    return report(InvalidArgumentError(exc.format_message()), as_json=True)


def _open_closed_streams() -> None:
    """Lead streams that were closed by who started this (``>&-``) to nowhere.

    Else the next file or socket gets their number and then what is printed; and Python prints errors on standard
    output when there is no standard error.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "r" if number == 0 else "w", encoding="utf-8", closefd=False))  # noqa: SIM115


def _silence() -> None:
    """The reader has gone: keep the interpreter from complaining when it flushes at exit."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)
