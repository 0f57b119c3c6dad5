"""What a failed command says and which code it exits with."""

from __future__ import annotations

import json
import sys
from typing import Final

from tensorbus.errors import ErrorKind, TensorbusError, to_wire

EXIT_OTHER: Final = 1
EXIT_USAGE: Final = 2
EXIT_INTERRUPTED: Final = 130
EXIT_BROKEN_PIPE: Final = 141

EXIT_CODES: Final = {
    ErrorKind.INVALID_ARGUMENT: EXIT_USAGE,
    ErrorKind.NOT_FOUND: 3,
    ErrorKind.FENCED: 4,
    ErrorKind.CONFLICT: 5,
    ErrorKind.UNAVAILABLE: 6,
    ErrorKind.DEADLINE_EXCEEDED: 7,
    ErrorKind.OUT_OF_SPACE: 8,
    ErrorKind.CORRUPT: 9,
    ErrorKind.DENIED: 10,
    ErrorKind.EXPIRED: 11,
}


def exit_code(error: TensorbusError) -> int:
    """The exit code of an error's kind."""
    return EXIT_CODES.get(error.kind, EXIT_OTHER)


def report(error: TensorbusError, *, as_json: bool) -> int:
    """Say on standard error what went wrong; returns the exit code."""
    if as_json:
        print(json.dumps({"error": to_wire(error)}, default=str), file=sys.stderr)
    else:
        print(f"tensorbus: {error.message}", file=sys.stderr)
    return exit_code(error)
