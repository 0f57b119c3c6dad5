"""Which pages leave first: those whose time is over, then the ones untouched for longest. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tensorbus.errors import InvalidArgumentError
from tensorbus.transport._page_layout import Mask

Rows = npt.NDArray[np.intp]
Times = npt.NDArray[np.int64]
NEVER_NS = np.iinfo(np.int64).max
"""When a page without a time to live expires."""


@dataclass(frozen=True, slots=True)
class Watermarks:
    """Between which shares of the room pages are kept: above ``high`` so many leave that ``low`` is reached."""

    high: float
    low: float

    def __post_init__(self) -> None:
        if not 0 < self.low <= self.high <= 1:
            raise InvalidArgumentError(f"watermarks are shares, low before high: {self.low}, {self.high}")

    def excess_bytes(self, used_bytes: int, room_bytes: int) -> int:
        """How much must leave now; 0 while the high mark is not passed."""
        return 0 if used_bytes <= self.high * room_bytes else used_bytes - int(self.low * room_bytes)


def expired_pages(expires_ns: Times, now_ns: int) -> Rows:
    """The pages whose time to live is over."""
    return np.flatnonzero(expires_ns <= now_ns)


def coldest_pages(
    touched_ns: Times, nbytes: npt.NDArray[np.int64], need_bytes: int, *, keep: Mask | None = None
) -> Rows:
    """The pages that have not been touched for longest and make up ``need_bytes``, or all there are; coldest first.

    Takes time in proportion to the number of pages, and n log n of those given.

    Args:
        keep: Those that must not leave: pinned, being read or filled.
    """
    rows = np.arange(len(touched_ns)) if keep is None else np.flatnonzero(~keep)
    if need_bytes <= 0 or not len(rows):
        return rows[:0]
    most = -(-need_bytes // max(1, int(nbytes[rows].min())))  # so many suffice, however small they are
    if most < len(rows):
        rows = rows[np.argpartition(touched_ns[rows], most - 1)[:most]]
    rows = rows[np.argsort(touched_ns[rows], kind="stable")]
    enough = int(np.searchsorted(np.cumsum(nbytes[rows]), need_bytes)) + 1
    return rows[:enough]


def batches(rows: Rows, most: int) -> Iterator[Rows]:
    """The rows in lists of up to ``most``, as facts carry them."""
    return (rows[first : first + most] for first in range(0, len(rows), most))
