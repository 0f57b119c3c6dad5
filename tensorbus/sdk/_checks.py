"""What callers give as times, switches and callbacks, checked where the call begins."""

from __future__ import annotations

import math
from typing import Final

from tensorbus.errors import InvalidArgumentError

LEASE_S_MIN: Final = 0.1
LEASE_S_MAX: Final = 86_400.0 * 365


def check_seconds(value: object, what: str) -> float:
    """A number of seconds from 0 on.

    Raises:
        InvalidArgumentError: If it is none.
    """
    try:
        seconds = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    except OverflowError:
        seconds = math.inf
    if not math.isfinite(seconds) or seconds < 0:
        raise InvalidArgumentError(f"{what} must be a number of seconds from 0 on, not {_shown(value)}")
    return seconds


def check_lease_s(value: object, what: str) -> float:
    """How long a lease outlives its last renewal: 0.1 seconds to a year.

    Raises:
        InvalidArgumentError: If it is no such time.
    """
    seconds = check_seconds(value, what)
    if not LEASE_S_MIN <= seconds <= LEASE_S_MAX:
        raise InvalidArgumentError(f"{what} must be {LEASE_S_MIN} to {LEASE_S_MAX:.0f} seconds, not {_shown(value)}")
    return seconds


def check_flag(value: object, what: str) -> bool:
    """A switch.

    Raises:
        InvalidArgumentError: If it is neither ``True`` nor ``False``.
    """
    if not isinstance(value, bool):
        raise InvalidArgumentError(f"{what} is True or False, not {_shown(value)}")
    return value


def check_progress(value: object) -> None:
    """What is to be told of progress.

    Raises:
        InvalidArgumentError: If it cannot be called.
    """
    if value is not None and not callable(value):
        raise InvalidArgumentError(
            f"progress is called as progress(bytes_done, bytes_total); {_shown(value)} cannot be"
        )


def _shown(value: object) -> str:
    # Thousands of digits are no message, and Python refuses to write them.
    return "a number of that size" if isinstance(value, int) and value.bit_length() > 256 else f"{value!r:.80}"
