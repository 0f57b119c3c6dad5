"""One shard at its home: what is there, what is told about it, and what goes to the stream."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from tensorbus.clock import NS_PER_S, Clock
from tensorbus.errors import OutOfSpaceError, UnavailableError
from tensorbus.events import RECORD, PageHolder, PageOp
from tensorbus.feeds import PageLog
from tensorbus.ids import Incarnation, WorkerId
from tensorbus.lifecycle import PageTable
from tensorbus.model import PageOutcome, PageState

Records = npt.NDArray[np.void]
Bytes = npt.NDArray[np.uint8]
IsLive = Callable[[PageHolder], bool]


class ShardHealth(StrEnum):
    """How far an index is to be believed."""

    EXACT = "exact"
    DEGRADED = "degraded"
    """What it has is right, but some workers have not said yet what they hold."""
    REBUILDING = "rebuilding"


@dataclass(frozen=True, slots=True)
class Added:
    """What became of pages.

    Attributes:
        outcomes: uint8[n] of ``PageOutcome``.
        first: Records of the copies that came first, of those that existed, in order; numbers are those of the table.
    """

    outcomes: Bytes
    first: Records


class HomeShard:
    """The index of one shard under one grant. Lives on the worker's loop; its log's task belongs to who made it.

    Args:
        table: As replayed up to the grant.
        stored: Number of the last batch that the newest snapshot has, about.
        waiting: Lives that may hold pages of the shard which the stream does not have, until they have said so.
        is_live: Whether a holder's session is open.
        host_of: Where a holder is.
    """

    def __init__(
        self,
        *,
        shard: int,
        token: int,
        table: PageTable,
        log: PageLog,
        stored: int,
        waiting: set[PageHolder],
        clock: Clock,
        is_live: IsLive,
        host_of: Callable[[PageHolder], str],
    ) -> None:
        self.shard, self.token = shard, token
        self.table = table
        self.log = log
        self.stored = stored
        self.waiting = waiting
        self._clock = clock
        self._is_live = is_live
        self._host_of = host_of

    @property
    def health(self) -> ShardHealth:
        return ShardHealth.DEGRADED if self.waiting else ShardHealth.EXACT

    @property
    def takes(self) -> bool:
        """Whether changes can be said: the stream is not far behind, and no newer grant is in force."""
        return not self.log.full and self.log.ended is None

    def said(self, holder: PageHolder) -> None:
        """A holder has said all that it holds of this shard."""
        self.waiting.discard(holder)

    # -- what changes --------------------------------------------------------------------------------------------------

    def add(self, records: Records, keyspaces: tuple[str, ...], holder: PageHolder, *, replica: bool) -> Added:
        """Take in what a holder has; the first writer of a page wins, unless these are replicas.

        Args:
            records: ``keyspace`` is a place in ``keyspaces``.
        """
        outcomes = np.full(len(records), PageOutcome.STORED, np.uint8)
        if not self.takes:
            outcomes[:] = PageOutcome.UNAVAILABLE
            return Added(outcomes, np.empty(0, RECORD))
        mine = self._numbered(records, keyspaces, holder)
        mine["op"] = PageOp.ADD
        again = _repeats(mine)
        rows = self.table.find_records(mine)
        outcomes[again] = PageOutcome.EXISTED
        first: dict[int, int] = {}
        if not replica:
            for at, row in self._others(rows, mine).items():
                outcomes[at] = PageOutcome.EXISTED
                first[at] = row
        new = outcomes == PageOutcome.STORED
        try:
            self.table.add(mine[new], self._expires_s(mine[new]))
        except OutOfSpaceError:
            outcomes[new] = PageOutcome.FULL
        else:
            records = records[new]
            records["op"], records["holder"] = PageOp.ADD, 0
            self.log.put(records, keyspaces, (holder,))
        rows = self.table.find_records(mine[again])
        first.update(zip(np.flatnonzero(again).tolist(), rows.tolist(), strict=True))
        order = [first[at] for at in sorted(first)]
        return Added(outcomes, self._at(np.array(order, np.int32)))

    def remove(self, records: Records, keyspaces: tuple[str, ...], holder: PageHolder) -> int:
        """Forget copies that lie where the records say; how many there were.

        Raises:
            UnavailableError: If it cannot be said now; so :meth:`clear`.
        """
        self._check()
        gone = self.table.remove(self._numbered(records, keyspaces, holder))
        if gone:
            records = records.copy()
            records["op"], records["holder"], records["ttl_s"] = PageOp.REMOVE, 0, 0
            self.log.put(records, keyspaces, (holder,))
        return gone

    def clear(self, keyspace: str) -> int:
        """Forget all pages of a keyspace; how many copies there were. It is said also if there were none."""
        self._check()
        number = self.table.keyspaces.get(keyspace)
        gone = 0 if number is None else self.table.remove_keyspace(number)
        self.log.put(_one(PageOp.CLEAR), (keyspace,), ())
        return gone

    def forget_holder(self, holder: PageHolder) -> int:
        """A holder's life is over; how many copies it had. Only while :attr:`takes`."""
        self.waiting.discard(holder)
        number = self.table.holders.get(_name(holder))
        if number is None or not self.table.holders.rows(_name(holder)):
            return 0
        gone = self.table.remove_holder(number)
        self.log.put(_one(PageOp.GONE), (), (holder,))
        return gone

    # -- what is asked ------------------------------------------------------------------------------------------------

    def look(self, keys: Bytes, keyspace: str, fragment: int, *, host: str) -> tuple[Bytes, Records]:
        """uint8[n] of ``PageState``, and int a record for each key, of which those of hits mean something.

        Numbers in the records are those of the table; ``ttl_s`` is what is left of it.
        """
        states = np.full(len(keys), PageState.DEGRADED if self.waiting else PageState.MISSING, np.uint8)
        found = np.zeros(len(keys), RECORD)
        number = self.table.keyspaces.get(keyspace)
        if number is None:
            return states, found
        rows = self.table.find(keys, number, fragment)
        there = rows >= 0
        usable = self.table.usable(rows, now_s=self._now_s(), live=self._mask(self._is_live))
        if host:
            near = self._mask(lambda holder: self._is_live(holder) and self._host_of(holder) == host)
            nearest = self.table.usable(rows, now_s=self._now_s(), live=near)
            usable = np.where(nearest >= 0, nearest, usable)
        hit = usable >= 0
        states[there] = PageState.EXPIRED
        states[hit] = PageState.HIT
        found[hit] = self._at(usable[hit])
        return states, found

    def holder(self, number: int) -> PageHolder:
        """Whom a number of the table means."""
        name = self.table.holders.name(number)
        assert isinstance(name, tuple)
        return PageHolder(worker=name[0], incarnation=name[1])

    def holders(self) -> list[PageHolder]:
        """Who has pages, or may have."""
        named = [self.table.holders.get(name) for name in self.table.holders]
        return [*(self.holder(number) for number in named if number is not None), *self.waiting]

    # -- helpers ------------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        if not self.takes:
            raise UnavailableError(f"what changes in shard {self.shard} cannot be said now", shard=self.shard)

    def _now_s(self) -> int:
        return self._clock.wall_ns() // NS_PER_S

    def _expires_s(self, records: Records) -> npt.NDArray[np.uint32]:
        ttl_s = records["ttl_s"].astype(np.int64)
        return np.where(ttl_s == 0, 0, np.minimum(self._now_s() + ttl_s, 2**32 - 1)).astype(np.uint32)

    def _numbered(self, records: Records, keyspaces: tuple[str, ...], holder: PageHolder) -> Records:
        """A copy with the table's numbers in place of the call's."""
        mine = records.copy()
        numbers = np.array([self.table.keyspaces.number(name) for name in keyspaces], np.uint16)
        if len(records):
            mine["keyspace"] = numbers[records["keyspace"]]
        mine["holder"] = self.table.holders.number(_name(holder))
        return mine

    def _others(self, rows: npt.NDArray[np.int32], mine: Records) -> dict[int, int]:
        """Of pages that others have and that can be read there: the row of such a copy, by place in the batch."""
        known = np.flatnonzero(rows >= 0)
        if not len(known):
            return {}
        usable = self.table.usable(rows[known], now_s=self._now_s(), live=self._mask(self._is_live))
        known, usable = known[usable >= 0], usable[usable >= 0]
        firsts, _ = self.table.at(usable)
        others = firsts["holder"] != mine["holder"][known]
        return dict(zip(known[others].tolist(), usable[others].tolist(), strict=True))

    def _at(self, rows: npt.NDArray[np.int32]) -> Records:
        records, expires_s = self.table.at(rows)
        left = expires_s.astype(np.int64) - self._now_s()
        records["ttl_s"] = np.where(expires_s == 0, 0, np.maximum(left, 1))
        return records

    def _mask(self, test: Callable[[PageHolder], bool]) -> npt.NDArray[np.bool_]:
        """bool[m]: what is true of each holder, by its number."""
        numbers = [number for name in self.table.holders if (number := self.table.holders.get(name)) is not None]
        mask = np.zeros(max(numbers, default=0) + 1, np.bool_)
        for number in numbers:
            mask[number] = test(self.holder(number))
        return mask


def _name(holder: PageHolder) -> tuple[WorkerId, Incarnation]:
    """What a holder goes by in the table."""
    return holder.worker, holder.incarnation


def _repeats(mine: Records) -> npt.NDArray[np.bool_]:
    """Which pages of a batch came before in it."""
    names = np.empty(len(mine), [("key", "V32"), ("keyspace", "<u2"), ("fragment", "<u2")])
    for name in ("key", "keyspace", "fragment"):
        names[name] = mine[name]
    again = np.ones(len(mine), np.bool_)
    again[np.unique(names.view("V36"), return_index=True)[1]] = False
    return again


def _one(op: PageOp) -> Records:
    records = np.zeros(1, RECORD)
    records["op"] = op
    return records
