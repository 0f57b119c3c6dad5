"""A hash table of row numbers: buckets of 8 places, each one line of the processor's cache, searched in batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt

SPLIT_FROM: Final = 0.6
SPLIT_TO: Final = 0.7
"""Shares of the places in use between which the table doubles, bit by bit."""
MARKED: Final = 0.25
"""Share of the buckets marked as overflowed from which their rows are sent home again, bit by bit."""
NO_ROW: Final = -1
_WIDTH: Final = 8
_SHIFT: Final = 3
_BUCKETS_MIN: Final = 8
_STRETCH: Final = 2048
"""Buckets that are tidied at once: what lies between fits the second cache."""
_SPARE: Final = 64
"""Buckets after the last one, for rows that go on from there."""
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

    A search thus ends at the first bucket without a mark, and dropping leaves no tombstone. The table doubles by linear
    hashing (Litwin 1980): one stretch of buckets after the other is split by one further bit of each tag, a little with
    each batch that comes, and nobody looks at the rows.
    """

    def __init__(self) -> None:
        self._entries = np.zeros((_BUCKETS_MIN + _SPARE, _WIDTH), np.uint64)
        """The tag in the high half, the row in the low one; 0 is free."""
        self._overflowed = np.zeros(_BUCKETS_MIN + _SPARE, np.bool_)
        self._count = 0
        self._marks = 0
        self._size = _BUCKETS_MIN
        """How many buckets there were before this doubling, a power of two."""
        self._split = 0
        """How many of them were split."""
        self._tidied = 0
        """Where the rows were sent home last."""

    def __len__(self) -> int:
        return self._count

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the table takes."""
        return self._entries.nbytes + self._overflowed.nbytes

    def find(self, tags: Tags, same: Same) -> tuple[Rows, Places]:
        """The row of each query, or -1, and its place."""
        rows, places = np.full(len(tags), NO_ROW, np.int32), np.zeros(len(tags), np.int64)
        open_ = np.arange(len(tags))
        buckets = self._home(tags)
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
            open_, buckets = open_[further], buckets[further] + 1
        return rows, places

    def insert(self, rows: Rows, tags: Tags) -> None:
        """Enter rows that are not there."""
        self._make_room(len(rows))
        self._count += len(rows)
        self._settle(tags << _HALF | rows.astype(np.uint64))
        if self._marks > MARKED * (self._size + self._split):
            self._tidy(len(rows))

    def remove(self, places: Places) -> None:
        """Free places; each once."""
        self._entries.reshape(-1)[places] = 0
        self._count -= len(places)

    def point(self, places: Places, rows: Rows) -> None:
        """Other rows, with the same tags, stand at places."""
        flat = self._entries.reshape(-1)
        flat[places] = flat[places] & ~_LOW | rows.astype(np.uint64)

    def rows(self) -> Rows:
        """All rows."""
        flat = self._entries.reshape(-1)
        rows: Rows = (flat[flat != 0] & _LOW).astype(np.int32)
        return rows

    def _home(self, tags: Tags) -> Places:
        """The bucket in which the search for each tag begins."""
        low = (tags & np.uint64(self._size - 1)).astype(np.int64)
        if self._split:
            high = (tags & np.uint64(self._size)).astype(np.int64)
            low += np.where(low < self._split, high, 0)
        return low

    def _settle(self, entries: npt.NDArray[np.uint64]) -> None:
        """Give each its place."""
        buckets = self._home(entries >> _HALF)
        while len(entries):
            flat = self._entries.reshape(-1)
            slots = (self._entries.take(buckets, axis=0) == 0).argmax(axis=1)
            places = (buckets << _SHIFT) + slots
            room = flat[places] == 0
            flat[places[room]] = entries[room]
            left = flat[places] != entries  # of two that took one place, the later has it
            self._mark(buckets[~room])
            buckets[~room] += 1
            entries, buckets = entries[left], buckets[left]

    def _mark(self, buckets: Places) -> None:
        for bucket in buckets[~self._overflowed[buckets]].tolist():
            self._marks += not self._overflowed[bucket]
            self._overflowed[bucket] = True
            self._reserve(bucket + 2)

    def _reserve(self, buckets: int) -> None:
        if buckets > len(self._entries):
            # In place, as the allocator moves large blocks by their page tables. No view of them outlives a method.
            more = max(buckets, len(self._entries) + min(len(self._entries) // 8, _STRETCH)) + _SPARE
            self._entries.resize((more, _WIDTH), refcheck=False)
            self._overflowed.resize(more, refcheck=False)

    def _make_room(self, more: int) -> None:
        """Split as many buckets as there should be by then."""
        while True:
            full = (self._count + more) / (self._size * _WIDTH)
            due = min(int(self._size * (full - SPLIT_FROM) / (SPLIT_TO - SPLIT_FROM)), self._size)
            if due <= self._split:
                return
            end = min(due, self._split + _STRETCH)
            self._reserve(self._size + end)
            self._send_home(self._split, end, split=True)
            if self._split == self._size:
                self._size, self._split = 2 * self._size, 0

    def _tidy(self, buckets: int) -> None:
        """Send the rows of the next so many buckets home, as far as these have room again."""
        begin = 0 if self._tidied >= self._size + self._split else self._tidied
        self._tidied = min(begin + min(buckets, _STRETCH), self._size + self._split)
        self._send_home(begin, self._tidied)

    def _send_home(self, begin: int, end: int, *, split: bool = False) -> None:
        """Give the rows that belong in a stretch of buckets, but lie elsewhere, their places anew."""
        until = end
        while self._overflowed[until - 1]:
            until += 1
        entries, keep = self._pull(begin, end, until, split=split)
        self._marks -= int(np.count_nonzero(self._overflowed[keep:end]))
        self._overflowed[keep:end] = False
        if split:
            self._split = end
        self._settle(entries)

    def _pull(self, begin: int, end: int, until: int, *, split: bool) -> tuple[npt.NDArray[np.uint64], int]:
        """Take out what does not lie where it belongs; also, up to where marks lead to what belongs before it all."""
        part = self._entries[begin:until]
        home = self._home(part >> _HALF)
        away = home != np.arange(begin, until)[:, None]
        if split:
            away |= part >> _HALF & np.uint64(self._size) != 0
        away &= (part != 0) & (home >= begin) & (home < end)
        entries = part[away]
        part[away] = 0
        before = np.flatnonzero(((part != 0) & (home < begin)).any(axis=1))
        return entries, begin + (int(before[-1]) if len(before) else 0)
