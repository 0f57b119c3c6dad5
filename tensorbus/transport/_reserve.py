"""Of what sizes a pool's reserve consists, so that little is lost when a piece is cut to size. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from tensorbus.transport._segments import PAGE_BYTES

SIZES: Final = (1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20)
PIECES_MAX: Final = 64
"""Of one size; each is two descriptors."""


def next_piece(ready: Sequence[int], reserve_bytes: int, room: int) -> int:
    """Whole pages for the next piece: of the smallest size of which there is less than its part.

    Args:
        ready: The pieces that are there.
        reserve_bytes: What all should come to.
        room: The most that the piece may have, at least a page.
    """
    share = max(PAGE_BYTES, reserve_bytes // len(SIZES) // PAGE_BYTES * PAGE_BYTES)
    for size in SIZES:
        there = ready.count(size)
        if size <= room and (there + 1) * size <= share and there < PIECES_MAX:
            return size
    return min(room // PAGE_BYTES * PAGE_BYTES, max(share, SIZES[0]))
