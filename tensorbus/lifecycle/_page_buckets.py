"""A hash table of row numbers: buckets of 8 places, each one line of the processor's cache, searched in batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt

FULL: Final = 0.7
"""Share of the places in use at which the table doubles."""
MARKED: Final = 0.5
"""Share of the buckets marked as overflowed at which the marks are made anew."""
NO_ROW: Final = -1
_WIDTH: Final = 8
_SHIFT: Final = 3
_BUCKETS_MIN: Final = 8
_STRETCH: Final = 2048
"""Buckets that are rebuilt at once: what lies between fits the second cache."""
_HALF: Final = np.uint64(32)
_LOW: Final = np.uint64(0xFFFF_FFFF)
_TAKEN: Final = np.uint64(0x8000_0000)

Rows = npt.NDArray[np.int32]
Places = npt.NDArray[np.int64]
Tags = npt.NDArray[np.uint64]
Same = Callable[[Rows, npt.NDArray[np.int64]], npt.NDArray[np.bool_]]
"""Whether each row is what the query at a place of the batch asks for."""


def tags_of(hashes: npt.NDArray[np.uint64]) -> Tags:
    """The 32 bits that stand for a hash here; the low ones name its bucket, the highest says that a place is taken."""
    return hashes >> _HALF | _TAKEN


class Buckets:
    """Rows by tag. A row that finds its bucket full goes on to the next one, and the full one is marked as overflowed.

    A search thus ends at the first bucket without a mark, and dropping leaves no tombstone. Doubling moves whole
    buckets, by one further bit of each tag, and never looks at the rows.
    """

    def __init__(self) -> None:
        self._entries = np.zeros((_BUCKETS_MIN, _WIDTH), np.uint64)
        """The tag in the high half, the row in the low one; 0 is free."""
        self._overflowed = np.zeros(_BUCKETS_MIN, np.bool_)
        self._count = 0
        self._marks = 0

    def __len__(self) -> int:
        return self._count

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the table takes."""
        return self._entries.nbytes + self._overflowed.nbytes

    def find(self, tags: Tags, same: Same) -> tuple[Rows, Places]:
        """The row of each query, or -1, and its place."""
        rows, places = np.full(len(tags), NO_ROW, np.int32), np.zeros(len(tags), np.int64)
        mask = len(self._entries) - 1
        open_ = np.arange(len(tags))
        buckets = (tags & np.uint64(mask)).astype(np.int64)
        while len(open_):
            window = self._entries.take(buckets, axis=0)
            hits = np.flatnonzero(window >> _HALF == tags[open_][:, None])
            query = hits >> _SHIFT
            candidates = (window.reshape(-1)[hits] & _LOW).astype(np.int32)
            right = same(candidates, open_[query])
            hits, query = hits[right], query[right]
            rows[open_[query]] = candidates[right]
            places[open_[query]] = (buckets[query] << _SHIFT) + (hits & _WIDTH - 1)
            further = self._overflowed[buckets]
            further[query] = False
            open_, buckets = open_[further], (buckets[further] + 1) & mask
        return rows, places

    def insert(self, rows: Rows, tags: Tags) -> None:
        """Enter rows that are not there."""
        self._make_room(len(rows))
        self._count += len(rows)
        self._settle(tags << _HALF | rows.astype(np.uint64))
        if self._marks > MARKED * len(self._entries):
            self._rebuild(1)

    def remove(self, places: Places) -> None:
        """Free places; each once."""
        self._entries.reshape(-1)[places] = 0
        self._count -= len(places)

    def point(self, places: Places, rows: Rows) -> None:
        """Other rows, with the same tags, stand at places."""
        flat = self._entries.reshape(-1)
        flat[places] = flat[places] & ~_LOW | rows.astype(np.uint64)

    def all(self) -> tuple[Rows, Places]:
        """Every row and its place."""
        flat = self._entries.reshape(-1)
        places = np.flatnonzero(flat)
        return (flat[places] & _LOW).astype(np.int32), places

    def _settle(self, entries: npt.NDArray[np.uint64]) -> None:
        mask, flat = len(self._entries) - 1, self._entries.reshape(-1)
        buckets = (entries >> _HALF & np.uint64(mask)).astype(np.int64)
        while len(entries):
            free = self._entries.take(buckets, axis=0) == 0
            slots = free.argmax(axis=1)
            places = (buckets << _SHIFT) + slots
            room = flat[places] == 0
            flat[places[room]] = entries[room]
            left = flat[places] != entries  # of two that took one place, the later has it
            self._mark(buckets[~room])
            buckets[~room] = (buckets[~room] + 1) & mask
            entries, buckets = entries[left], buckets[left]

    def _mark(self, buckets: npt.NDArray[np.int64]) -> None:
        for bucket in buckets[~self._overflowed[buckets]].tolist():
            self._marks += not self._overflowed[bucket]
            self._overflowed[bucket] = True

    def _make_room(self, more: int) -> None:
        factor = 1
        while self._count + more > FULL * factor * self._entries.size:
            factor *= 2
        if factor > 1:
            self._rebuild(factor)

    def _rebuild(self, factor: int) -> None:
        """So many times as many buckets, a power of two. What lies in its own bucket moves without a search."""
        old, count = self._entries, len(self._entries)
        mask = np.uint64(count * factor - 1)
        self._entries = np.zeros((count * factor, _WIDTH), np.uint64)
        self._overflowed, self._marks = np.zeros(count * factor, np.bool_), 0
        astray = []
        for begin in range(0, count, _STRETCH):
            part = old[begin : begin + _STRETCH]
            number = np.arange(begin, begin + len(part), dtype=np.uint64)[:, None]
            home = part >> _HALF & mask
            for step in range(factor):
                at = begin + step * count
                np.copyto(self._entries[at : at + len(part)], part, where=home == number + np.uint64(step * count))
            astray.append(part[(home & np.uint64(count - 1) != number) & (part != 0)])
        self._settle(np.concatenate(astray))
