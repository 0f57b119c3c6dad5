"""The pages of one shard: which holders have which page where, for millions of them, in numpy arrays.

Batches are taken in, found and dropped without a Python loop over their pages, see ``docs/adr/0012-index-of-pages.md``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt

from tensorbus.errors import OutOfSpaceError
from tensorbus.lifecycle._page_buckets import NO_ROW, Buckets, Places, Rows, tags_of
from tensorbus.lifecycle._page_hash import LANES, hash_of, terms
from tensorbus.lifecycle._page_rows import (
    Numbered,
    PageRows,
    Records,
    Seconds,
    Words,
    holder_of,
    keyspace_of,
    words_of,
)

PAGES_MAX: Final = 1 << 30
COPIES_MAX: Final = 8
"""Holders of one page that are remembered; a further one is not needed to find it."""
_AT_ONCE: Final = 4096
"""Copies that are taken in or dropped at once: what lies between fits the second cache."""
_FRAGMENT: Final = np.uint64(16)
_PAGE: Final = np.uint64(0xFFFF_FFFF)

Mask = npt.NDArray[np.bool_]


class PageTable:
    """Pages by key, keyspace and fragment, each with the holders that have it, the first writer first.

    Keyspaces and holders go by number here (:attr:`keyspaces`, :attr:`holders`). The order of what happened shows in
    the order of a page's holders only; :attr:`state_hash` covers the set. Seconds are those of the stream's clock.
    """

    def __init__(self) -> None:
        self.keyspaces = Numbered()
        self.holders = Numbered()
        self._rows = PageRows()
        self._buckets = Buckets()
        self._sum = np.zeros(LANES, np.uint64)

    def __len__(self) -> int:
        """How many copies of pages there are."""
        return self._rows.live

    @property
    def pages(self) -> int:
        """How many fragments of pages there are, however many copies each has."""
        return len(self._buckets)

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the arrays take."""
        return self._rows.memory_bytes + self._buckets.nbytes

    @property
    def state_hash(self) -> str:
        """64 hexadecimal digits that depend on the copies only; kept with each change.

        Sums of four mixes of each copy: it tells that two states agree and resists no adversary.
        """
        return self._sum.astype("<u8").tobytes().hex()

    # -- finding ------------------------------------------------------------------------------------------------------

    def find(self, keys: npt.NDArray[np.uint8], keyspace: int, fragment: int = 0) -> Rows:
        """int32[n]: the row of each page's first copy, or -1.

        Args:
            keys: uint8[n, 32].
            keyspace: Its number here.
        """
        words = np.ascontiguousarray(keys).view(np.uint64)
        return self._find(words, np.full(len(words), fragment << 16 | keyspace, np.uint64))[0]

    def find_records(self, records: Records) -> Rows:
        """int32[n]: :meth:`find` for the pages of records, whose keyspaces are numbers here."""
        words = words_of(records)
        return self._find(words, words[:, 4] & _PAGE)[0]

    def find_group(self, keys: npt.NDArray[np.uint8], keyspace: int, fragments: int) -> Rows:
        """int32[n, fragments]: :meth:`find` for each of a group's ranks."""
        words = np.repeat(np.ascontiguousarray(keys).view(np.uint64), fragments, axis=0)
        which = np.tile(np.arange(fragments, dtype=np.uint64) << _FRAGMENT | np.uint64(keyspace), len(keys))
        return self._find(words, which)[0].reshape(-1, fragments)

    def usable(self, rows: Rows, *, now_s: int = 0, live: Mask | None = None) -> Rows:
        """Each page's first copy that has not expired and whose holder lives, or -1.

        Args:
            rows: int32[…] as :meth:`find` gives them.
            live: bool[m] by number of the holder; all live without it.
        """
        found = rows.reshape(-1).copy()
        open_ = np.flatnonzero(found != NO_ROW)
        while len(open_):
            at = found[open_]
            bad = self._rows.last_s(at) < now_s
            if live is not None:
                bad |= ~live[self._rows.holders(at)]
            open_ = open_[bad]
            found[open_] = self._rows.next(at[bad])
            open_ = open_[found[open_] != NO_ROW]
        return found.reshape(rows.shape)

    def match(
        self,
        keys: npt.NDArray[np.uint8],
        keyspace: int,
        *,
        fragments: int = 1,
        now_s: int = 0,
        live: Mask | None = None,
    ) -> int:
        """How many keys from the first on are there, with every fragment; see :meth:`usable`."""
        there = self.usable(self.find_group(keys, keyspace, fragments), now_s=now_s, live=live) != NO_ROW
        missing = np.flatnonzero(~there.all(axis=1))
        return int(missing[0]) if len(missing) else len(keys)

    def at(self, rows: Rows) -> tuple[Records, Seconds]:
        """Copies as records, and the second at which each expires, 0 is never."""
        return self._rows.records(rows)

    def copies(self, row: int) -> list[int]:
        """The rows of all copies of a page, from that of its first."""
        found = []
        while row != NO_ROW:
            found.append(row)
            row = int(self._rows.next(np.array([row], np.int32))[0])
        return found

    def _find(self, words: Words, which: Words) -> tuple[Rows, Places]:
        """The first copy's row of each page, or -1, and its place in the table."""
        return self._buckets.find(tags_of(hash_of(words, which)), self._same(words, which))

    def _same(self, words: Words, which: Words) -> Callable[[Rows, npt.NDArray[np.int64]], Mask]:
        def same(rows: Rows, at: npt.NDArray[np.int64]) -> Mask:
            mine, theirs = self._rows.words(rows), words.take(at, axis=0)
            differ = mine[:, 4] & _PAGE ^ which[at]
            for column in range(4):
                differ |= mine[:, column] ^ theirs[:, column]
            equal: Mask = differ == 0
            return equal

        return same

    # -- changing -----------------------------------------------------------------------------------------------------

    def add(self, records: Records, expires_s: Seconds | None = None) -> None:
        """Take copies in, in their order. One that its holder has already gets the new place.

        Args:
            records: As in a batch of the stream, keyspaces and holders by their number here.
            expires_s: uint32[n], the second at which each expires, 0 is never.

        Raises:
            OutOfSpaceError: If the shard is full.
        """
        if self._rows.live + len(records) > PAGES_MAX:
            raise OutOfSpaceError(f"a shard holds at most {PAGES_MAX} copies of pages")
        expires_s = np.zeros(len(records), np.uint32) if expires_s is None else expires_s
        for begin in range(0, len(records), _AT_ONCE):
            self._add(records[begin : begin + _AT_ONCE], expires_s[begin : begin + _AT_ONCE])

    def _add(self, records: Records, expires_s: Seconds) -> None:
        words = words_of(records)
        hashes = hash_of(words, words[:, 4] & _PAGE)
        while len(records):
            first = _firsts(hashes)
            if first is None:
                self._add_distinct(records, expires_s, hashes)
                return
            self._add_distinct(records[first], expires_s[first], hashes[first])
            records, expires_s, hashes = records[~first], expires_s[~first], hashes[~first]

    def _add_distinct(self, records: Records, expires_s: Seconds, hashes: Words) -> None:
        words, tags = words_of(records), tags_of(hashes)
        found, _ = self._buckets.find(tags, self._same(words, words[:, 4] & _PAGE))
        known = found != NO_ROW
        if known.any():
            self._add_copies(found[known], records[known], expires_s[known])
            fresh = ~known
            records, expires_s, tags = records[fresh], expires_s[fresh], tags[fresh]
        if len(records):
            rows = self._rows.take(records, expires_s)
            self._count(rows, +1)
            self._buckets.insert(rows, tags)

    def _add_copies(self, heads: Rows, records: Records, expires_s: Seconds) -> None:
        """Pages that are there get a further holder, or one of their holders a new place."""
        mine, last, lengths = self._copies_of(heads, records["holder"])
        known = mine != NO_ROW
        if known.any():
            self._count(mine[known], -1, moved=True)
            self._rows.place(mine[known], records[known], expires_s[known])
            self._count(mine[known], +1, moved=True)
        joins = ~known & (lengths < COPIES_MAX)
        if joins.any():
            rows = self._rows.take(records[joins], expires_s[joins])
            self._count(rows, +1)
            self._rows.chain(last[joins], rows)

    def _copies_of(self, heads: Rows, holders: npt.NDArray[np.uint16]) -> tuple[Rows, Rows, npt.NDArray[np.int64]]:
        """Each page's copy of a holder, or -1; the last copy looked at; how many these were."""
        mine, last, lengths = heads.copy(), heads.copy(), np.ones(len(heads), np.int64)
        open_ = np.arange(len(heads))
        while len(open_):
            open_ = open_[self._rows.holders(mine[open_]) != holders[open_]]
            last[open_] = mine[open_]
            mine[open_] = self._rows.next(mine[open_])
            open_ = open_[mine[open_] != NO_ROW]
            lengths[open_] += 1
        return mine, last, lengths

    def remove(self, records: Records) -> int:
        """Drop copies that lie where the records say; others of the same page stay. Gives how many there were."""
        found = self.find_records(records)
        there = found != NO_ROW
        mine, _, _ = self._copies_of(found[there], records["holder"][there])
        has = mine != NO_ROW
        rows = mine[has]
        return self._drop(_distinct(rows[self._rows.lie_at(rows, records[there][has])]))

    def remove_keyspace(self, keyspace: int) -> int:
        """Drop all pages of a keyspace; gives how many copies there were."""
        return self._drop(self._rows.of_keyspace(keyspace))

    def remove_holder(self, holder: int) -> int:
        """Drop all copies of a holder; gives how many there were."""
        return self._drop(self._rows.of_holder(holder))

    def expire(self, now_s: int) -> int:
        """Drop the copies that expire at this second or did before; gives how many there were.

        Costs nothing while none does.
        """
        return self._drop(self._rows.due(now_s))

    def _drop(self, rows: Rows) -> int:
        for begin in range(0, len(rows), _AT_ONCE):
            part = rows[begin : begin + _AT_ONCE]
            self._count(part, -1)
            self._rows.retire(part)
            self._unlink(*self._heads(part))
            self._rows.free(part)
        return len(rows)

    def _heads(self, rows: Rows) -> tuple[Rows, Places]:
        """The first copies of the pages of rows, each once, and their places."""
        words = self._rows.words(rows)
        heads, places = self._find(words, words[:, 4] & _PAGE)
        order = np.argsort(heads, kind="stable")
        order = order[np.append(True, np.diff(heads[order]) != 0)]
        return heads[order], places[order]

    def _unlink(self, heads: Rows, places: Places) -> None:
        """Chain up the copies of pages that were not retired; pages without any go."""
        first, last = np.full(len(heads), NO_ROW, np.int32), np.full(len(heads), NO_ROW, np.int32)
        current, open_ = heads.copy(), np.arange(len(heads))
        while len(open_):
            at = current[open_]
            current[open_] = after = self._rows.next(at)
            stays = self._rows.alive(at)
            pages, rows = open_[stays], at[stays]
            before = last[pages]
            further = before != NO_ROW
            self._rows.chain(before[further], rows[further])
            first[pages[~further]] = rows[~further]
            last[pages] = rows
            open_ = open_[after != NO_ROW]
        self._rows.chain(last[last != NO_ROW], np.full(1, NO_ROW, np.int32))
        gone = first == NO_ROW
        moved = (first != heads) & ~gone
        self._buckets.remove(places[gone])
        self._buckets.point(places[moved], first[moved])

    # -- the whole ----------------------------------------------------------------------------------------------------

    def dump(self) -> tuple[Records, Seconds]:
        """All copies as records, and when each expires; taken in again by :meth:`add`, they give this table."""
        level = self._buckets.rows()
        order = []
        while len(level):
            order.append(level)
            level = self._rows.next(level)
            level = level[level != NO_ROW]
        return self.at(np.concatenate([*order, np.empty(0, np.int32)]))

    def _count(self, rows: Rows, sign: int, *, moved: bool = False) -> None:
        """Copies come into what is kept of all, or go; those that only move are not counted."""
        words = self._rows.words(rows)
        keyspaces, holders = keyspace_of(words), holder_of(words)
        seeds = self.keyspaces.seeds[keyspaces], self.holders.seeds[holders]
        total = terms(words, *seeds, self._rows.last_s(rows)).sum(axis=1, dtype=np.uint64)
        self._sum = self._sum + total if sign > 0 else self._sum - total
        if not moved:
            self.keyspaces.count(keyspaces, sign)
            self.holders.count(holders, sign)


def _firsts(hashes: Words) -> Mask | None:
    """Which pages of a batch are the first with their hash; nothing if all are."""
    ordered = np.sort(hashes)
    if not (ordered[1:] == ordered[:-1]).any():
        return None
    order = np.argsort(hashes, kind="stable")
    first = np.empty(len(hashes), np.bool_)
    first[order] = np.append(True, np.diff(hashes[order]) != 0)
    return first


def _distinct(rows: Rows) -> Rows:
    ordered = np.sort(rows)
    return ordered[np.append(True, np.diff(ordered) != 0)] if len(ordered) else ordered
