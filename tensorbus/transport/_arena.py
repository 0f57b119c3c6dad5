"""Where small segments lie in arenas: extents of whole grains, found by best fit, freed ones kept for the next like it.

Pure bookkeeping over numbers; the memory is its user's. A space is one tenant's: arenas are never shared.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from itertools import count
from typing import Final, TypeAlias

from tensorbus.errors import InvalidArgumentError
from tensorbus.transport._segments import PAGE_BYTES

ARENA_BYTES: Final = 64 << 20
"""Larger segments have memory of their own."""


Extent: TypeAlias = tuple[int, int, int]
"""A piece of an arena in one use of it: its offset over the arenas laid end to end, its size in bytes (whole grains),
and its generation, which no other extent that began there has or had. A plain tuple: a million are made in a second.
"""


@dataclass(frozen=True, slots=True)
class SpaceStats:
    """What a space's bytes are used for: ``capacity = live + cached + free``.

    Attributes:
        cached_bytes: Freed, and kept as they are for the next of their size; joined with their neighbours when need be.
        largest_bytes: The largest extent that could be allocated without another arena.
    """

    capacity_bytes: int
    live_bytes: int
    cached_bytes: int
    free_bytes: int
    largest_bytes: int


class PageSpace:
    """Extents within arenas of one size.

    The common case, pages of few sizes that come and go, takes a freed extent of the very size. Else the smallest hole
    that fits is cut, and before an allocation is refused all that was freed is joined with its neighbours. Each freed
    extent is joined at most once, so all calls take logarithmic time, taken together.

    Args:
        arena_bytes: Size of each arena, whole grains.
        grain_bytes: A power of two; sizes are rounded up to multiples of it.
    """

    __slots__ = (
        "_arenas", "_by_size", "_cached", "_ends", "_holes", "_mask", "_rest", "_sizes", "_uses",
        "arena_bytes",
    )  # fmt: skip

    def __init__(self, *, arena_bytes: int = ARENA_BYTES, grain_bytes: int = PAGE_BYTES) -> None:
        if grain_bytes < 1 or grain_bytes & (grain_bytes - 1) or arena_bytes < grain_bytes or arena_bytes % grain_bytes:
            raise InvalidArgumentError(f"arenas of {arena_bytes} bytes in grains of {grain_bytes}")
        self.arena_bytes = arena_bytes
        self._rest, self._mask = grain_bytes - 1, -grain_bytes
        self._arenas: dict[int, None] = {}
        # By offset: the generation of what begins there; 0 while that is cached, negative once it was joined.
        self._uses: dict[int, int] = {}
        self._cached: dict[int, list[Extent]] = {}  # by size: freed extents, as they will be in their next use
        self._holes: dict[int, int] = {}  # by where they begin
        self._ends: dict[int, int] = {}  # where a hole begins, by where it ends
        self._by_size: dict[int, dict[int, None]] = {}
        self._sizes: list[int] = []  # of holes, in order

    # -- arenas -------------------------------------------------------------------------------------------------------

    def grow(self) -> int:
        """Take one more arena; gives its number."""
        number = next(n for n in count() if n not in self._arenas)
        self._arenas[number] = None
        self._add_hole(number * self.arena_bytes, self.arena_bytes)
        return number

    def shrink(self) -> int | None:
        """Give up an arena in which nothing lives; gives its number, ``None`` if there is none."""
        self._join_cached()
        for number in self._arenas:
            start = number * self.arena_bytes
            if self._holes.get(start) == self.arena_bytes:
                self._take_hole(start)
                del self._arenas[number]
                return number
        return None

    # -- extents ------------------------------------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> Extent | None:
        """An extent of at least ``nbytes``, ``None`` if no arena has a hole for it.

        Raises:
            InvalidArgumentError: If it is larger than an arena.
        """
        cached = self._cached.get(nbytes)
        if cached:
            extent = cached.pop()
            self._uses[extent[0]] = extent[2]
            return extent
        need = (nbytes + self._rest) & self._mask or self._rest + 1
        if need != nbytes and self._cached.get(need):
            return self.allocate(need)
        offset = self._from_hole(need)
        if offset is None:
            return None
        self._uses[offset] = generation = 1 - self._uses.get(offset, 0)
        return offset, need, generation

    def free(self, extent: Extent) -> None:
        """Give an extent back.

        Raises:
            InvalidArgumentError: If it is not, or no longer, allocated.
        """
        offset, nbytes, generation = extent
        uses = self._uses
        if uses.get(offset) != generation:
            raise InvalidArgumentError(f"nothing to free: {extent} is not allocated")
        uses[offset] = 0
        cached = self._cached.get(nbytes)
        if cached is None:
            self._cached[nbytes] = [(offset, nbytes, generation + 1)]
        else:
            cached.append((offset, nbytes, generation + 1))

    def valid(self, extent: Extent) -> bool:
        """Whether it is still this use of its bytes."""
        return self._uses.get(extent[0]) == extent[2]

    def stats(self) -> SpaceStats:
        """Costs as much as there are holes and freed extents, which it joins."""
        cached = sum(nbytes * len(extents) for nbytes, extents in self._cached.items())
        free = sum(self._holes.values())
        capacity = len(self._arenas) * self.arena_bytes
        self._join_cached()
        largest = self._sizes[-1] if self._sizes else 0
        return SpaceStats(capacity, capacity - cached - free, cached, free, largest)

    # -- holes --------------------------------------------------------------------------------------------------------

    def _from_hole(self, need: int) -> int | None:
        if need > self.arena_bytes:
            raise InvalidArgumentError(f"{need} bytes do not fit an arena of {self.arena_bytes}")
        sizes = self._sizes
        at = bisect_left(sizes, need)
        if at == len(sizes):
            self._join_cached()
            at = bisect_left(sizes, need)
            if at == len(sizes):
                return None
        size = sizes[at]
        same = self._by_size[size]
        start, _ = same.popitem()
        if not same:
            del self._by_size[size], sizes[at]
        if size == need:
            del self._holes[start], self._ends[start + size]
            return start
        # The hole keeps its beginning, and what is taken lies at its end.
        size -= need
        offset = start + size
        del self._ends[offset + need]
        self._put_hole(start, size)
        return offset

    def _join_cached(self) -> None:
        cached, self._cached = self._cached, {}
        for extents in cached.values():
            for offset, nbytes, generation in extents:
                self._uses[offset] = 1 - generation
                self._add_hole(offset, nbytes)

    def _add_hole(self, start: int, size: int) -> None:
        """Note a hole, as one with those that it touches within its arena."""
        before, end = self._ends.get(start), start + size
        if before is not None and start % self.arena_bytes:
            size += self._take_hole(before)
            start = before
        if end in self._holes and end % self.arena_bytes:
            size += self._take_hole(end)
        self._put_hole(start, size)

    def _put_hole(self, start: int, size: int) -> None:
        self._holes[start] = size
        self._ends[start + size] = start
        same = self._by_size.get(size)
        if same is None:
            self._by_size[size] = {start: None}
            insort(self._sizes, size)
        else:
            same[start] = None

    def _take_hole(self, start: int) -> int:
        size = self._holes.pop(start)
        del self._ends[start + size]
        same = self._by_size[size]
        del same[start]
        if not same:
            del self._by_size[size]
            del self._sizes[bisect_left(self._sizes, size)]
        return size
