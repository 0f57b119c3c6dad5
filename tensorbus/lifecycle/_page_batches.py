"""Records that wait to be said, packed into as few batches as hold them. No I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from tensorbus.events import TABLE_MAX, PageHolder, PagesChanged, records_max

T = TypeVar("T")
Records = npt.NDArray[np.void]
_FULL: Final = records_max((), ())


class _Piece(NamedTuple):
    """Records with the tables that their ``keyspace`` and ``holder`` are places in."""

    records: Records
    keyspaces: tuple[str, ...]
    holders: tuple[PageHolder, ...]


class PageBatches:
    """A shard's records in the order in which they were put.

    Attributes:
        put_count: Records that were ever put.
        packed_count: Records that went into batches.
    """

    def __init__(self, shard: int) -> None:
        self.put_count = 0
        self.packed_count = 0
        self._shard = shard
        self._queue: deque[_Piece] = deque()

    @property
    def waiting(self) -> int:
        """Records that are in no batch yet."""
        return self.put_count - self.packed_count

    @property
    def fill_a_batch(self) -> bool:
        """Whether waiting longer would not make the next batch larger, about."""
        return self.waiting >= _FULL

    def put(self, records: Records, keyspaces: tuple[str, ...], holders: tuple[PageHolder, ...]) -> int:
        """Take records in, which must stay as they are; how many were put by now.

        Args:
            keyspaces, holders: What the records name by place; at most 256 each.
        """
        if len(records):
            self._queue.append(_Piece(records, keyspaces, holders))
            self.put_count += len(records)
        return self.put_count

    def pack(self, number: int) -> PagesChanged | None:
        """The next batch under a running number, ``None`` if nothing waits."""
        keyspaces: dict[str, int] = {}
        holders: dict[PageHolder, int] = {}
        parts: list[Records] = []
        count = 0
        while self._queue:
            piece = self._queue[0]
            names, who = _joined(keyspaces, piece.keyspaces), _joined(holders, piece.holders)
            room = records_max(names, who) - count
            if parts and (room <= 0 or max(len(names), len(who)) > TABLE_MAX):
                break
            keyspaces, holders = names, who
            part = piece.records[:room].copy()
            part["keyspace"] = _places(piece.keyspaces, keyspaces)[part["keyspace"]]
            part["holder"] = _places(piece.holders, holders)[part["holder"]]
            parts.append(part)
            count += len(part)
            if room < len(piece.records):
                self._queue[0] = piece._replace(records=piece.records[room:])
                break
            self._queue.popleft()
        self.packed_count += count
        if not parts:
            return None
        return PagesChanged(
            shard=self._shard,
            number=number,
            keyspaces=tuple(keyspaces),
            holders=tuple(holders),
            records=np.concatenate(parts).tobytes(),
        )


def _joined(table: dict[T, int], names: Sequence[T]) -> dict[T, int]:
    """A table with further names."""
    return {name: at for at, name in enumerate(dict.fromkeys([*table, *names]))}


def _places(names: Sequence[T], table: dict[T, int]) -> npt.NDArray[np.uint16]:
    return np.array([table[name] for name in names] or [0], np.uint16)
