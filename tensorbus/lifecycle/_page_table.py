"""The pages of one shard: which holders have which page where, for millions of them, in numpy arrays.

An open-addressing hash table with linear probing (Knuth, TAOCP vol. 3, 6.4, algorithm L) that takes, finds and drops
batches without a Python loop over their pages. Keys are hashes already, so their own bytes are the hash.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
import numpy.typing as npt

from tensorbus.errors import OutOfSpaceError
from tensorbus.lifecycle._page_rows import EMPTY, NO_ROW, TOMBSTONE, Numbered, PageRows, Rows, probe_start, term

FULL: Final = 0.6
"""Share of the table in use, tombstones included, at which it is made anew."""
SLOTS_MIN: Final = 64
PAGES_MAX: Final = 1 << 30
COPIES_MAX: Final = 8
"""Holders of one page that are remembered; a further one is not needed to find it."""


class PageTable:
    """Pages by key, keyspace and fragment, each with the holders that have it, the first writer first.

    Keyspaces and holders go by number here (:attr:`keyspaces`, :attr:`holders`). The order of what happened shows in
    the order of a page's holders only; :attr:`state_hash` covers the set.
    """

    def __init__(self) -> None:
        self.keyspaces = Numbered()
        self.holders = Numbered()
        self._rows = PageRows()
        self._slots = np.full(SLOTS_MIN, EMPTY, np.int32)
        self._used = 0
        self._sum = np.zeros(4, np.uint64)

    def __len__(self) -> int:
        """How many copies of pages there are."""
        return self._rows.live

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the arrays take."""
        return self._rows.memory_bytes + self._slots.nbytes

    @property
    def state_hash(self) -> str:
        """64 hexadecimal digits that depend on the copies only; kept with each change.

        The sum of a 256-bit mix of each copy: it tells that two states agree and resists no adversary.
        """
        return self._sum.astype("<u8").tobytes().hex()

    # -- finding ------------------------------------------------------------------------------------------------------

    def find(self, keys: npt.NDArray[np.uint8], keyspace: int, fragment: int = 0) -> Rows:
        """int32[n]: the row of each page's first copy, or -1.

        Args:
            keys: uint8[n, 32].
            keyspace: Its number here.
        """
        words = np.ascontiguousarray(keys).view("<u8").reshape(-1, 4)
        count = len(words)
        return self._find(words, np.full(count, keyspace, np.uint16), np.full(count, fragment, np.uint16))[0]

    def at(self, rows: Rows) -> tuple[npt.NDArray[np.void], npt.NDArray[np.uint32]]:
        """Copies as records, and the second of the stream at which each expires, 0 is never."""
        return self._rows.records(rows), self._rows.expires_s[rows]

    def copies(self, row: int) -> list[int]:
        """The rows of all copies of a page, from that of its first."""
        return list(self._chain(row))

    def _chain(self, row: int) -> Iterator[int]:
        while row != NO_ROW:
            yield row
            row = int(self._rows.next[row])

    def _find(
        self, words: npt.NDArray[np.uint64], keyspace: npt.NDArray[np.uint16], fragment: npt.NDArray[np.uint16]
    ) -> tuple[Rows, npt.NDArray[np.int64]]:
        """The first copy's row of each, or -1, and its place in the table."""
        mask = len(self._slots) - 1
        places = probe_start(words, keyspace, fragment) & mask
        found = np.full(len(words), NO_ROW, np.int32)
        open_ = np.arange(len(words))
        while len(open_):
            rows = self._slots[places[open_]]
            taken = rows >= 0
            same = taken.copy()
            same[taken] = self._rows.same(rows[taken], words, keyspace, fragment, open_[taken])
            found[open_[same]] = rows[same]
            open_ = open_[(rows != EMPTY) & ~same]
            places[open_] = (places[open_] + 1) & mask
        return found, places

    # -- changing -----------------------------------------------------------------------------------------------------

    def add(self, records: npt.NDArray[np.void], expires_s: npt.NDArray[np.uint32] | None = None) -> None:
        """Take copies in, in their order. One that its holder has already gets the new place.

        Args:
            records: As in a batch of the stream, keyspaces and holders by their number here.
            expires_s: uint32[n], the second of the stream at which each expires, 0 is never.

        Raises:
            OutOfSpaceError: If the shard is full.
        """
        expires_s = np.zeros(len(records), np.uint32) if expires_s is None else expires_s
        if self._rows.live + len(records) > PAGES_MAX:
            raise OutOfSpaceError(f"a shard holds at most {PAGES_MAX} copies of pages")
        left = np.arange(len(records))
        while len(left):
            first = _firsts(records[left])
            self._add_distinct(records[left[first]], expires_s[left[first]])
            left = np.delete(left, first)

    def _add_distinct(self, records: npt.NDArray[np.void], expires_s: npt.NDArray[np.uint32]) -> None:
        words, keyspace, fragment = _names(records)
        found, _ = self._find(words, keyspace, fragment)
        known = found != NO_ROW
        for at in np.flatnonzero(known).tolist():
            self._add_copy(int(found[at]), records[at : at + 1], expires_s[at : at + 1])
        fresh = ~known
        if fresh.any():
            rows = self._rows.take(records[fresh], expires_s[fresh])
            self._count(rows, +1)
            self._insert(rows, words[fresh], keyspace[fresh], fragment[fresh])

    def _add_copy(self, row: int, record: npt.NDArray[np.void], expires_s: npt.NDArray[np.uint32]) -> None:
        """A page that is there gets a further holder, or one of its holders a new place."""
        copies, holders = self.copies(row), self._rows.holder
        mine = next((copy for copy in copies if holders[copy] == record["holder"][0]), None)
        if mine is not None:
            rows = np.array([mine], np.int32)
            self._mix(rows, -1)
            self._rows.place(rows, record, expires_s)
            self._mix(rows, +1)
        elif len(copies) < COPIES_MAX:
            rows = self._rows.take(record, expires_s)
            self._count(rows, +1)
            self._rows.next[copies[-1]] = rows[0]

    def _insert(
        self,
        rows: Rows,
        words: npt.NDArray[np.uint64],
        keyspace: npt.NDArray[np.uint16],
        fragment: npt.NDArray[np.uint16],
    ) -> None:
        """Enter first copies that the table lacks."""
        if self._used + len(rows) > FULL * len(self._slots):
            self._rebuild(self._rows.live + len(rows), leave_out=rows)
        self._used += self._settle(rows, probe_start(words, keyspace, fragment))

    def _settle(self, rows: Rows, start: npt.NDArray[np.int64]) -> int:
        """Give each row a free place; how many of these were not a tombstone's."""
        mask = len(self._slots) - 1
        places, open_, fresh = start & mask, np.arange(len(rows)), 0
        while len(open_):
            at = places[open_]
            before = self._slots[at]
            free = before < 0
            self._slots[at[free]] = rows[open_[free]]
            won = free & (self._slots[at] == rows[open_])  # of two that took one place, the later has it
            fresh += int(np.count_nonzero(before[won] == EMPTY))
            open_ = open_[~won]
            places[open_] = (places[open_] + 1) & mask
        return fresh

    def _rebuild(self, count: int, *, leave_out: Rows) -> None:
        size = SLOTS_MIN
        while count > FULL / 2 * size:
            size *= 2
        heads = self._slots[self._slots >= 0]
        self._slots = np.full(size, EMPTY, np.int32)
        words, keyspace, fragment = self._rows.names(heads)
        self._used = self._settle(heads, probe_start(words, keyspace, fragment))

    def remove(self, records: npt.NDArray[np.void]) -> int:
        """Drop copies that lie where the records say; others of the same page stay. Gives how many there were."""
        found, _ = self._find(*_names(records))
        there = found != NO_ROW
        rows, records = found[there], records[there]
        hit = self._rows.lie_at(rows, records)
        further = [
            copy
            for at in np.flatnonzero(~hit).tolist()
            for copy in self.copies(int(rows[at]))[1:]
            if self._rows.lie_at(np.array([copy]), records[at : at + 1])[0]
        ]
        return self._drop(np.unique(np.concatenate([rows[hit], np.array(further, np.int32)])))

    def remove_keyspace(self, keyspace: int) -> int:
        """Drop all pages of a keyspace; gives how many copies there were."""
        return self._drop(self._rows.of(self._rows.keyspace, keyspace))

    def remove_holder(self, holder: int) -> int:
        """Drop all copies of a holder; gives how many there were."""
        return self._drop(self._rows.of(self._rows.holder, holder))

    def _drop(self, rows: Rows) -> int:
        if not len(rows):
            return 0
        self._count(rows, -1)
        gone = np.zeros(self._rows.capacity, np.bool_)
        gone[rows] = True
        words, keyspace, fragment = self._rows.names(rows)
        heads, places = self._find(words, keyspace, fragment)
        alone = (heads == rows) & (self._rows.next[rows] == NO_ROW)
        self._slots[places[alone]] = TOMBSTONE
        chained = dict(zip(heads[~alone].tolist(), places[~alone].tolist(), strict=True))
        for head, place in chained.items():
            self._slots[place] = self._unlink(head, gone)
        self._rows.free(rows)
        return len(rows)

    def _unlink(self, head: int, gone: npt.NDArray[np.bool_]) -> int:
        """Chain up the copies that stay; gives the first of them, or a tombstone."""
        stay = [row for row in self.copies(head) if not gone[row]]
        for row, after in zip(stay, [*stay[1:], NO_ROW], strict=False):
            self._rows.next[row] = after
        return stay[0] if stay else TOMBSTONE

    # -- the whole ----------------------------------------------------------------------------------------------------

    def dump(self) -> tuple[npt.NDArray[np.void], npt.NDArray[np.uint32]]:
        """All copies as records, and when each expires; taken in again by :meth:`add`, they give this table."""
        order, level = list[Rows](), self._slots[self._slots >= 0]
        while len(level):
            order.append(level)
            level = self._rows.next[level]
            level = level[level != NO_ROW]
        rows = np.concatenate(order) if order else np.empty(0, np.int32)
        return self.at(rows)

    def _count(self, rows: Rows, sign: int) -> None:
        self._mix(rows, sign)
        self.keyspaces.count(self._rows.keyspace[rows], sign)
        self.holders.count(self._rows.holder[rows], sign)

    def _mix(self, rows: Rows, sign: int) -> None:
        total = term(self._rows, rows, self.keyspaces.seeds, self.holders.seeds)
        self._sum = self._sum + total if sign > 0 else self._sum - total


def _names(
    records: npt.NDArray[np.void],
) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint16], npt.NDArray[np.uint16]]:
    words = np.ascontiguousarray(records["key"]).view("<u8").reshape(-1, 4)
    return words, np.ascontiguousarray(records["keyspace"]), np.ascontiguousarray(records["fragment"])


def _firsts(records: npt.NDArray[np.void]) -> npt.NDArray[np.int64]:
    """Where each page of a batch comes first, in order."""
    hashes = probe_start(*_names(records))
    if len(np.unique(hashes)) == len(hashes):
        return np.arange(len(records))
    names = np.empty(len(records), [("key", "V32"), ("keyspace", "<u2"), ("fragment", "<u2")])
    for name in ("key", "keyspace", "fragment"):
        names[name] = records[name]
    _, first = np.unique(names.view("V36"), return_index=True)
    return np.sort(first)
