"""Every error a caller can meet, grouped by what the caller can do about it.

Each class has a stable ``kind`` for events and JSON, says whether a retry can help, and carries the facts a person
needs as keyword data. An error crosses a socket as :func:`to_wire` and comes back as the same class by
:func:`from_wire`.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import ClassVar


class ErrorKind(StrEnum):
    """Stable names of the error classes. Only ever added to."""

    INTERNAL = "internal"
    NOT_FOUND = "not_found"
    CONFLICT = "conflict"
    EXPIRED = "expired"
    FENCED = "fenced"
    UNAVAILABLE = "unavailable"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    CANCELLED = "cancelled"
    INVALID_ARGUMENT = "invalid_argument"
    CORRUPT = "corrupt"
    OUT_OF_SPACE = "out_of_space"
    DENIED = "denied"
    PLAN_FAILED = "plan_failed"


class TensorbusError(Exception):
    """Base of all errors that tensorbus raises on purpose.

    Args:
        message: What happened and, where there is one, what to do.
        details: Ids, positions, sizes and deadlines; JSON values only.
    """

    kind: ClassVar[ErrorKind] = ErrorKind.INTERNAL
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, **details: object) -> None:
        super().__init__(message)
        self.message = message
        self.details: dict[str, object] = details

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[object, ...]:
        return (from_wire, (to_wire(self),))


class NotFoundError(TensorbusError, KeyError):
    """There is nothing by that name, id or version."""

    kind = ErrorKind.NOT_FOUND


class ConflictError(TensorbusError):
    """Something else holds that name or id, or was there first."""

    kind = ErrorKind.CONFLICT


class ExpiredError(TensorbusError):
    """It existed, and its lease or time to live has ended."""

    kind = ErrorKind.EXPIRED


class FencedError(TensorbusError):
    """The actor was replaced: a newer incarnation or a larger fencing token is in force."""

    kind = ErrorKind.FENCED


class UnavailableError(TensorbusError):
    """It exists and cannot be reached now; a retry can help."""

    kind = ErrorKind.UNAVAILABLE
    retryable = True


class DeadlineExceededError(TensorbusError, TimeoutError):
    """The caller's time ran out. The outcome may be unknown: look before repeating."""

    kind = ErrorKind.DEADLINE_EXCEEDED
    retryable = True


class CancelledError(TensorbusError):
    """The operation was cancelled on request."""

    kind = ErrorKind.CANCELLED


class InvalidArgumentError(TensorbusError, ValueError):
    """The call cannot be right, whatever the state of the system."""

    kind = ErrorKind.INVALID_ARGUMENT


class CorruptError(TensorbusError):
    """Bytes differ from what their digest or format promises; they are never handed out."""

    kind = ErrorKind.CORRUPT


class OutOfSpaceError(TensorbusError):
    """A pool, disk or limit is full; the details say who holds the space."""

    kind = ErrorKind.OUT_OF_SPACE
    retryable = True


class DeniedError(TensorbusError):
    """The caller may not do that."""

    kind = ErrorKind.DENIED


class PlanFailedError(TensorbusError):
    """A plan ended without success; the details carry the cause and the partial results."""

    kind = ErrorKind.PLAN_FAILED


_CLASSES: dict[ErrorKind, type[TensorbusError]] = {
    cls.kind: cls
    for cls in (
        TensorbusError,
        NotFoundError,
        ConflictError,
        ExpiredError,
        FencedError,
        UnavailableError,
        DeadlineExceededError,
        CancelledError,
        InvalidArgumentError,
        CorruptError,
        OutOfSpaceError,
        DeniedError,
        PlanFailedError,
    )
}


def to_wire(error: TensorbusError) -> dict[str, object]:
    """The error as JSON values: ``{"kind", "message", "retryable", "details"}``."""
    return {
        "kind": str(error.kind),
        "message": error.message,
        "retryable": error.retryable,
        "details": dict(error.details),
    }


def from_wire(data: Mapping[str, object]) -> TensorbusError:
    """The error that :func:`to_wire` wrote. A kind from a newer peer becomes the base class."""
    try:
        cls = _CLASSES[ErrorKind(str(data.get("kind")))]
    except ValueError:
        cls = TensorbusError
    details = data.get("details")
    error = cls(str(data.get("message", "")))
    if isinstance(details, Mapping):
        error.details.update({str(k): v for k, v in details.items()})
    return error
