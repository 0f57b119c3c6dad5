"""What is known of each copy of a page, a row of 64 bytes each, in an array that grows and is used anew."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Final

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from tensorbus.errors import OutOfSpaceError
from tensorbus.events import RECORD, RECORD_BYTES, PageOp
from tensorbus.lifecycle._page_buckets import NO_ROW, Rows

Words = npt.NDArray[np.uint64]
Halves = npt.NDArray[np.uint16]
Seconds = npt.NDArray[np.uint32]
Records = npt.NDArray[np.void]

_KEPT: Final = {"op": ("alive", "u1"), "ttl_s": ("next", "<i4")}
ROW: Final = np.dtype([_KEPT.get(name, (name, RECORD[name])) for name in RECORD.names or ()])
"""A record of a batch as it is kept: where the operation stood, whether the row is in use; where the time to live
stood, the row of the page's next copy, or -1."""
_WORDS: Final = RECORD_BYTES // 8
_NUMBERS: Final = 4
"""The word of a row that has its numbers: keyspace, fragment and holder, 16 bits each from the lowest on."""
_KEYSPACE, _HOLDER, _ALIVE, _IN_USE = 0xFFFF, 0xFFFF << 32, 0xFF << 48, 1 << 48
NUMBERS_MAX: Final = 1 << 16
_ROWS_MIN: Final = 64
_GROWTH_MAX: Final = 1 << 15
"""Rows by which the array grows at once: more would be a pause, and memory that nobody uses."""
_ONE: Final = np.uint32(1)
_FOREVER: Final = np.uint32(0xFFFF_FFFF)


class Numbered:
    """Names that rows refer to by a small number, which is used anew when no row does any more."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._names: list[Hashable | None] = []
        self._given = NUMBERS_MAX
        """The number that was used anew last: those before it are asked again only when all others were."""
        self._counts = np.zeros(0, np.int64)
        self.seeds = np.zeros(0, np.uint64)
        """A number derived from each name, which enters the table's hash in its place."""

    def __iter__(self) -> Iterator[Hashable]:
        """The names that rows refer to."""
        return (name for name, number in self._numbers.items() if self._counts[number])

    def get(self, name: Hashable) -> int | None:
        """The number of a name, if it has one."""
        return self._numbers.get(name)

    def name(self, number: int) -> Hashable:
        """The name of a number."""
        return self._names[number]

    def rows(self, name: Hashable) -> int:
        """How many rows refer to a name."""
        number = self._numbers.get(name)
        return 0 if number is None else int(self._counts[number])

    def number(self, name: Hashable) -> int:
        """The number of a name, given to it now if need be; good as long as rows refer to it or few were asked since.

        Raises:
            OutOfSpaceError: If 65,536 names are in use.
        """
        known = self._numbers.get(name)
        if known is not None:
            return known
        number = len(self._names) if len(self._names) < NUMBERS_MAX else self._unused()
        if number == len(self._names):
            self._names.append(None)
            if number >= len(self._counts):
                size = max(16, 2 * number)
                self._counts = np.concatenate([self._counts, np.zeros(size - len(self._counts), np.int64)])
                self.seeds = np.concatenate([self.seeds, np.zeros(size - len(self.seeds), np.uint64)])
        else:
            del self._numbers[self._names[number]]
        self._names[number] = name
        self._numbers[name] = number
        self.seeds[number] = int.from_bytes(blake3(repr(name).encode()).digest(length=8), "little")
        return number

    def count(self, numbers: Halves, sign: int) -> None:
        """So many more or fewer rows refer to them."""
        np.add.at(self._counts, numbers, sign)

    def _unused(self) -> int:
        unused = np.flatnonzero(self._counts[:NUMBERS_MAX] == 0)
        if not len(unused):
            raise OutOfSpaceError(f"a shard knows at most {NUMBERS_MAX} keyspaces, and as many holders, at once")
        self._given = int(unused[np.searchsorted(unused, self._given, side="right") % len(unused)])
        return self._given


class PageRows:
    """The rows themselves: which page, who holds it, where, until when, and the page's next copy."""

    def __init__(self) -> None:
        self._store = np.zeros(_ROWS_MIN, ROW)
        self._last_s = np.full(_ROWS_MIN, _FOREVER, np.uint32)
        """The last second at which a copy counts."""
        self._free = np.arange(_ROWS_MIN, dtype=np.int32)
        self._free_count = _ROWS_MIN
        self._due_s = int(_FOREVER)
        """No copy ends before the second after this one."""

    @property
    def live(self) -> int:
        return len(self._store) - self._free_count

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory that the rows take."""
        return self._store.nbytes + self._last_s.nbytes + self._free.nbytes

    # -- reading ------------------------------------------------------------------------------------------------------

    def words(self, rows: Rows) -> Words:
        """uint64[n, 8]: copies of rows as they lie in memory."""
        return self._store.view(np.uint64).reshape(-1, _WORDS).take(rows, axis=0)

    def next(self, rows: Rows) -> Rows:
        """The row of each page's next copy, or -1."""
        return self._store["next"][rows]

    def holders(self, rows: Rows) -> Halves:
        return self._store["holder"][rows]

    def alive(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """Whether rows are in use."""
        alive: npt.NDArray[np.bool_] = self._store["alive"][rows] != 0
        return alive

    def last_s(self, rows: Rows) -> Seconds:
        """The last second at which each copy counts."""
        return self._last_s[rows]

    def lie_at(self, rows: Rows, records: Records) -> npt.NDArray[np.bool_]:
        """Whether each row is at the place that its record names."""
        mine, theirs = self.words(rows), words_of(records)
        same: npt.NDArray[np.bool_] = (mine[:, 5] == theirs[:, 5]) & (mine[:, 6] == theirs[:, 6])
        return same

    def records(self, rows: Rows) -> tuple[Records, Seconds]:
        """Rows as records of a batch, without their time to live, and when each expires, 0 is never."""
        out = self._store.take(rows).view(RECORD)
        out["op"], out["ttl_s"] = PageOp.ADD, 0
        return out, self._last_s[rows] + _ONE

    def of_keyspace(self, number: int) -> Rows:
        """All rows of a keyspace."""
        return self._of(_ALIVE | _KEYSPACE, number)

    def of_holder(self, number: int) -> Rows:
        """All rows of a holder."""
        return self._of(_ALIVE | _HOLDER, number << 32)

    def _of(self, mask: int, value: int) -> Rows:
        numbers = self._store.view(np.uint64)[_NUMBERS::_WORDS] & np.uint64(mask)
        return np.flatnonzero(numbers == np.uint64(value | _IN_USE)).astype(np.int32)

    def due(self, now_s: int) -> Rows:
        """The rows of copies that have expired."""
        if now_s <= self._due_s:
            return np.empty(0, np.int32)
        self._due_s = int(self._last_s[self._last_s >= now_s].min(initial=_FOREVER))
        return np.flatnonzero(self._last_s < now_s).astype(np.int32)

    # -- changing -----------------------------------------------------------------------------------------------------

    def take(self, records: Records, expires_s: Seconds) -> Rows:
        """Rows for new copies, each its page's only one so far."""
        if len(records) > self._free_count:
            self._grow(len(records) - self._free_count)
        self._free_count -= len(records)
        rows = self._free[self._free_count : self._free_count + len(records)].copy()
        kept = records.view(ROW).copy()
        kept["alive"], kept["next"] = 1, NO_ROW
        self._put(rows, kept, expires_s)
        return rows

    def place(self, rows: Rows, records: Records, expires_s: Seconds) -> None:
        """Where copies lie, and until when they count; their pages and holders stay."""
        kept = records.view(ROW).copy()
        kept["alive"], kept["next"] = 1, self.next(rows)
        self._put(rows, kept, expires_s)

    def _put(self, rows: Rows, kept: Records, expires_s: Seconds) -> None:
        self._store[rows] = kept
        last = expires_s - _ONE  # 0, which is never, becomes the largest
        self._last_s[rows] = last
        self._due_s = min(self._due_s, int(last.min(initial=_FOREVER)))

    def chain(self, rows: Rows, after: Rows) -> None:
        """Other copies come after these."""
        self._store["next"][rows] = after

    def retire(self, rows: Rows) -> None:
        """Rows are not in use any more, but can still be read until :meth:`free`."""
        self._store["alive"][rows] = 0
        self._last_s[rows] = _FOREVER

    def free(self, rows: Rows) -> None:
        """Retired rows may be used anew."""
        self._free[self._free_count : self._free_count + len(rows)] = rows
        self._free_count += len(rows)

    def _grow(self, missing: int) -> None:
        size = len(self._store)
        more = max(missing, min(size // 4, _GROWTH_MAX))
        # In place: the allocator moves large blocks by their page tables. No view of them outlives a method.
        self._store.resize(size + more, refcheck=False)
        self._last_s.resize(size + more, refcheck=False)
        self._free.resize(size + more, refcheck=False)
        self._last_s[size:] = _FOREVER
        self._free[self._free_count : self._free_count + more] = np.arange(size, size + more, dtype=np.int32)
        self._free_count += more


def words_of(records: Records) -> Words:
    """uint64[n, 8]: records as they lie in memory; a view where they lie together."""
    return np.ascontiguousarray(records).view(np.uint64).reshape(-1, _WORDS)


def keyspace_of(words: Words) -> Halves:
    """uint16[n]: the numbers of the keyspaces of rows or records."""
    return words[:, _NUMBERS].astype(np.uint16)


def holder_of(words: Words) -> Halves:
    """uint16[n]: the numbers of the holders of rows or records."""
    return (words[:, _NUMBERS] >> np.uint64(32)).astype(np.uint16)
