"""What a failed command says and which code it exits with."""

from __future__ import annotations

import errno
import json
import sys
from typing import Final

from tensorbus.errors import ErrorKind, TensorbusError, UnavailableError, from_wire, to_wire

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


_ERRNO_KINDS: Final = {
    errno.ENOSPC: ErrorKind.OUT_OF_SPACE,
    errno.EDQUOT: ErrorKind.OUT_OF_SPACE,
    errno.EFBIG: ErrorKind.OUT_OF_SPACE,
    errno.EACCES: ErrorKind.DENIED,
    errno.EPERM: ErrorKind.DENIED,
    errno.EROFS: ErrorKind.DENIED,
}


def of_kind(kind: ErrorKind, message: str, **details: object) -> TensorbusError:
    """An error of that kind."""
    return from_wire({"kind": str(kind), "message": message, "details": details})


def from_exit_code(code: int, message: str, **details: object) -> TensorbusError:
    """The error that a process which ended with that code met; ``unavailable`` for a signal or a strange code."""
    if code == EXIT_OTHER:
        return TensorbusError(message, code=code, **details)
    kind = next((kind for kind, number in EXIT_CODES.items() if number == code), ErrorKind.UNAVAILABLE)
    return of_kind(kind, message, code=code, **details)


def from_os_error(exc: OSError) -> TensorbusError:
    """What the operating system refused, by what a person can do about it."""
    where = f" ({exc.filename})" if exc.filename else ""
    return of_kind(_ERRNO_KINDS.get(exc.errno or 0, ErrorKind.INTERNAL), f"{exc.strerror or exc}{where}")


def refined(error: TensorbusError) -> TensorbusError:
    """The same error; where it says only that something failed, and its cause says more, of the kind of the cause."""
    cause = error.__cause__
    kind = _ERRNO_KINDS.get(cause.errno or 0) if isinstance(cause, OSError) else None
    if kind is None or type(error) not in (TensorbusError, UnavailableError):
        return error
    return of_kind(kind, error.message, **error.details)


def exit_code(error: TensorbusError) -> int:
    """The exit code of an error's kind."""
    return EXIT_CODES.get(error.kind, EXIT_OTHER)


def report(error: TensorbusError, *, as_json: bool) -> int:
    """Say on standard error what went wrong; returns the exit code."""
    error = refined(error)
    if as_json:
        print(json.dumps({"error": to_wire(error)}, default=str), file=sys.stderr)
    else:
        print(f"tensorbus: {as_typed(error.message)}", file=sys.stderr)
    return exit_code(error)


def as_typed(message: str) -> str:
    """A message for the command line: what is an argument in Python is a flag here."""
    return message.replace("pass rebind=True", "use --rebind").replace("rebind=True", "--rebind")
