"""Pages that come and go as a trace of requests has it: what an allocator has to do, and how well it does it."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tensorbus.transport._arena import PageSpace

PAGE_TOKENS = 512
TOKEN_BYTES = 4096
FREE = -1


@dataclass(frozen=True, slots=True)
class Step:
    """One operation: allocate ``nbytes`` for ``page``, or free it if that is :data:`FREE`."""

    page: int
    nbytes: int


def page_steps(requests: Sequence[tuple[int, Sequence[int]]], *, capacity_bytes: int, steps_max: int) -> list[Step]:
    """What a least-recently-used cache of that size allocates and frees.

    Args:
        requests: Tokens and pages of each. Its last page holds what is left over of its tokens.
    """
    steps: list[Step] = []
    there: OrderedDict[int, int] = OrderedDict()
    used = 0
    while len(steps) < steps_max:
        for tokens, pages in requests:
            for n, page in enumerate(pages):
                if page in there:
                    there.move_to_end(page)
                    continue
                held = min(PAGE_TOKENS, tokens - n * PAGE_TOKENS)
                nbytes = max(1, held) * TOKEN_BYTES
                while used + nbytes > capacity_bytes:
                    gone, freed = there.popitem(last=False)
                    used -= freed
                    steps.append(Step(gone, FREE))
                there[page] = nbytes
                used += nbytes
                steps.append(Step(page, nbytes))
    return steps[:steps_max]


class FreeList:
    """The plainest allocator of several sizes: for each a stack of what was freed, and fresh bytes if that is empty.

    What is freed of one size never serves another, so it wastes whatever the mix of sizes leaves behind.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[int]] = {}
        self._end = 0

    def allocate(self, nbytes: int) -> tuple[int, int]:
        freed = self._free.get(nbytes)
        if freed:
            return freed.pop(), nbytes
        offset = self._end
        self._end += nbytes
        return offset, nbytes

    def free(self, extent: tuple[int, int]) -> None:
        offset, nbytes = extent
        freed = self._free.get(nbytes)
        if freed is None:
            self._free[nbytes] = [offset]
        else:
            freed.append(offset)

    @property
    def span_bytes(self) -> int:
        """The bytes that it came to take."""
        return self._end


def seconds_of(steps: Sequence[Step], allocate: Callable[[int], Any], free: Callable[[Any], None]) -> float:
    """How long an allocator takes, which must never be full."""
    there: dict[int, Any] = {}
    started = time.perf_counter()
    for step in steps:
        if step.nbytes == FREE:
            free(there.pop(step.page))
        else:
            there[step.page] = allocate(step.nbytes)
    return time.perf_counter() - started


def overhead_of(steps: Sequence[Step], space: PageSpace) -> tuple[float, int]:
    """The share of a full space that its live bytes do not use, at worst, and how many arenas it came to take.

    An arena is added whenever something does not fit, so what counts is the largest space over the most live bytes.
    """
    there: dict[int, Any] = {}
    live = live_max = arenas = 0
    for step in steps:
        if step.nbytes == FREE:
            extent, nbytes = there.pop(step.page)
            space.free(extent)
            live -= nbytes
            continue
        extent = space.allocate(step.nbytes)
        if extent is None:
            arenas = max(arenas, space.grow() + 1)
            extent = space.allocate(step.nbytes)
        there[step.page] = extent, step.nbytes
        live += step.nbytes
        live_max = max(live, live_max)
    return 1 - live_max / (arenas * space.arena_bytes), arenas
