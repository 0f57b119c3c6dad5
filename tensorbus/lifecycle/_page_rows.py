"""What is known of each copy of a page, a row each, in arrays that grow and are reused."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Final

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from tensorbus.errors import OutOfSpaceError
from tensorbus.events import RECORD

EMPTY: Final = -1
TOMBSTONE: Final = -2
NO_ROW: Final = -1
NUMBERS_MAX: Final = 1 << 16
_ROWS_MIN: Final = 64
_GROWTH: Final = 1.25

Rows = npt.NDArray[np.int32]
Words = npt.NDArray[np.uint64]
Halves = npt.NDArray[np.uint16]

_HALVES: Final = ("keyspace", "fragment", "holder")
_PLACE: Final = ("flags", "segment", "generation", "slot", "nbytes")
_ARRAYS: Final = ("words", *_HALVES, *_PLACE, "expires_s", "next", "_alive")


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
        self.capacity = _ROWS_MIN
        self.words = np.zeros((_ROWS_MIN, 4), np.uint64)
        self.keyspace = np.zeros(_ROWS_MIN, np.uint16)
        self.fragment = np.zeros(_ROWS_MIN, np.uint16)
        self.holder = np.zeros(_ROWS_MIN, np.uint16)
        self.flags = np.zeros(_ROWS_MIN, np.uint8)
        self.segment = np.zeros(_ROWS_MIN, np.uint32)
        self.generation = np.zeros(_ROWS_MIN, np.uint32)
        self.slot = np.zeros(_ROWS_MIN, np.uint64)
        self.nbytes = np.zeros(_ROWS_MIN, np.uint32)
        self.expires_s = np.zeros(_ROWS_MIN, np.uint32)
        self.next = np.zeros(_ROWS_MIN, np.int32)
        self._alive = np.zeros(_ROWS_MIN, np.bool_)
        self._free = np.arange(_ROWS_MIN, dtype=np.int32)
        self._free_count = _ROWS_MIN

    @property
    def live(self) -> int:
        return self.capacity - self._free_count

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory that the rows take."""
        arrays: list[npt.NDArray[np.generic]] = [self._free, *(getattr(self, name) for name in _ARRAYS)]
        return sum(array.nbytes for array in arrays)

    def take(self, records: npt.NDArray[np.void], expires_s: npt.NDArray[np.uint32]) -> Rows:
        """Rows for new copies, each its page's only one so far."""
        if len(records) > self._free_count:
            self._grow(self.live + len(records))
        self._free_count -= len(records)
        rows = self._free[self._free_count : self._free_count + len(records)].copy()
        self.words[rows] = np.ascontiguousarray(records["key"]).view("<u8").reshape(-1, 4)
        for name in _HALVES:
            getattr(self, name)[rows] = records[name]
        self.next[rows] = NO_ROW
        self._alive[rows] = True
        self.place(rows, records, expires_s)
        return rows

    def place(self, rows: Rows, records: npt.NDArray[np.void], expires_s: npt.NDArray[np.uint32]) -> None:
        """Where copies lie, and until when they count."""
        for name in _PLACE:
            getattr(self, name)[rows] = records[name]
        self.expires_s[rows] = expires_s

    def free(self, rows: Rows) -> None:
        """Rows are used no more."""
        self._alive[rows] = False
        self._free[self._free_count : self._free_count + len(rows)] = rows
        self._free_count += len(rows)

    def of(self, field: Halves, value: int) -> Rows:
        """The rows that have a value in a field of these."""
        return np.flatnonzero((field == value) & self._alive).astype(np.int32)

    def names(self, rows: Rows) -> tuple[Words, Halves, Halves]:
        """Key, keyspace and fragment of rows."""
        return self.words[rows], self.keyspace[rows], self.fragment[rows]

    def same(
        self, rows: Rows, words: Words, keyspace: Halves, fragment: Halves, at: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.bool_]:
        """Whether each row is of the page that stands at a place of the other arrays."""
        mine, theirs = self.words[rows], words[at]
        same: npt.NDArray[np.bool_] = self.keyspace[rows] == keyspace[at]
        same &= self.fragment[rows] == fragment[at]
        for column in range(4):
            same &= mine[:, column] == theirs[:, column]
        return same

    def lie_at(self, rows: Rows, records: npt.NDArray[np.void]) -> npt.NDArray[np.bool_]:
        """Whether each row is the copy that its record names."""
        same = np.ones(len(rows), np.bool_)
        for name in ("holder", "segment", "generation", "slot"):
            same &= getattr(self, name)[rows] == records[name]
        return same

    def records(self, rows: Rows) -> npt.NDArray[np.void]:
        """Rows as records of a batch, without their time to live."""
        out = np.zeros(len(rows), RECORD)
        out["key"] = self.words[rows].view("V32").reshape(-1)
        for name in (*_HALVES, *_PLACE):
            out[name] = getattr(self, name)[rows]
        return out

    def _grow(self, needed: int) -> None:
        size = max(needed, int(self.capacity * _GROWTH))
        live, more = self.live, size - self.capacity
        for name in _ARRAYS:
            array = getattr(self, name)
            setattr(self, name, np.concatenate([array, np.zeros((more, *array.shape[1:]), array.dtype)]))
        fresh = np.arange(self.capacity, size, dtype=np.int32)
        self._free = np.concatenate([self._free[: self._free_count], fresh, np.empty(live, np.int32)])
        self._free_count += more
        self.capacity = size


def probe_start(words: Words, keyspace: Halves, fragment: Halves) -> npt.NDArray[np.int64]:
    """Where to begin looking: bytes 8 to 15 of the key, which are random, moved by keyspace and fragment."""
    other = (keyspace.astype(np.uint64) << np.uint64(16) | fragment) * _ODD
    return ((words[:, 1] ^ other) >> np.uint64(1)).astype(np.int64)


_ODD: Final = np.uint64(0x9E3779B97F4A7C15)
_MIX: Final = tuple(np.uint64(x) for x in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_LANES: Final = tuple(
    np.uint64(x) for x in (0x243F6A8885A308D3, 0x13198A2E03707344, 0xA4093822299F31D0, 0x082EFA98EC4E6C89)
)


def term(rows: PageRows, which: Rows, keyspaces: Words, holders: Words) -> Words:
    """uint64[4]: what copies add to the hash: the sums of four mixes (the finalizer of SplitMix64, Steele et al. 2014)
    of all that is known of each."""
    words, keyspace, fragment = rows.names(which)
    holder = holders[rows.holder[which]]
    acc = _mixed(words[:, 0] ^ keyspaces[keyspace])
    for value in (words[:, 1], words[:, 2], words[:, 3], holder, fragment.astype(np.uint64)):
        acc = _mixed(acc ^ value)
    for name in (*_PLACE, "expires_s"):
        acc = _mixed(acc ^ getattr(rows, name)[which].astype(np.uint64))
    return np.array([_mixed(acc ^ lane).sum(dtype=np.uint64) for lane in _LANES])


def _mixed(value: Words) -> Words:
    value = value + _ODD
    value = (value ^ (value >> np.uint64(30))) * _MIX[0]
    value = (value ^ (value >> np.uint64(27))) * _MIX[1]
    return value ^ (value >> np.uint64(31))
