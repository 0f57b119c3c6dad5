"""What a home says on the stream of one shard: in order, in batches, one append in flight."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from tensorbus.bus import Appended, Stream, append
from tensorbus.clock import Deadline
from tensorbus.errors import FencedError, TensorbusError
from tensorbus.events import TABLE_MAX, Headers, PageHolder, PagesChanged, records_max
from tensorbus.ids import IdSource, Incarnation, WorkerId, new_event_id

log = logging.getLogger("tensorbus.workers")

LINGER_S: Final = 0.002
APPEND_S: Final = 10.0
RETRY_DELAY_S: Final = 0.2
WAITING_MAX: Final = 500_000
"""Records that may wait for the bus; a home whose bus is further behind takes no more in."""

Records = npt.NDArray[np.void]


@dataclass(frozen=True, slots=True)
class _Said:
    """Records with the tables that their ``keyspace`` and ``holder`` are places in."""

    records: Records
    keyspaces: tuple[str, ...]
    holders: tuple[PageHolder, ...]


class ShardLog:
    """One shard's voice under one grant. :meth:`run` is its task.

    Args:
        token: The grant's.
        number: The running number of the shard's last batch.
        on_fenced: Called once when a newer grant is in force: nothing more will be said.

    Attributes:
        number: Of the last batch that the stream took.
    """

    def __init__(
        self,
        pages: Stream,
        *,
        shard: int,
        token: int,
        number: int,
        author: WorkerId,
        incarnation: Incarnation,
        ids: IdSource,
        on_fenced: Callable[[], None],
    ) -> None:
        self.number = number
        self._pages = pages
        self._shard, self._token = shard, token
        self._author, self._incarnation, self._ids = author, incarnation, ids
        self._on_fenced = on_fenced
        self._queue: deque[_Said] = deque()
        self._waiting = 0
        self._put, self._done = 0, 0
        self._wake = asyncio.Event()
        self._moved = asyncio.Event()
        self._ended = False

    @property
    def waiting(self) -> int:
        """Records that are not on the stream yet."""
        return self._put - self._done

    @property
    def full(self) -> bool:
        return self.waiting >= WAITING_MAX

    def put(self, records: Records, keyspaces: tuple[str, ...], holders: tuple[PageHolder, ...]) -> None:
        """Queue records to be said; never waits."""
        if len(records) and not self._ended:
            self._queue.append(_Said(records, keyspaces, holders))
            self._put += len(records)
            self._wake.set()

    async def flush(self, *, deadline: Deadline) -> None:
        """Wait until all that was put so far is on the stream.

        Raises:
            FencedError: If another home has the shard; DeadlineExceededError: If the bus does not take it in time.
        """
        upto = self._put
        async with deadline.scope():
            while self._done < upto:
                if self._ended:
                    raise self._fenced()
                await self._moved.wait()

    async def run(self) -> None:
        """Say what is put, until a newer grant is in force or the task is cancelled."""
        try:
            while True:
                await self._wake.wait()
                await asyncio.sleep(LINGER_S)
                self._wake.clear()
                while self._queue:
                    fact = self._next()
                    if not await self._say(fact):
                        return
                    self.number = fact.number
                    self._done += len(fact.records) // 64
                    self._tell()
        finally:
            self._ended = True
            self._tell()

    def _next(self) -> PagesChanged:
        """The next batch: as much of the queue as one message holds."""
        keyspaces: dict[str, int] = {}
        holders: dict[PageHolder, int] = {}
        parts: list[Records] = []
        room = records_max((), ())
        while self._queue and room > 0:
            said = self._queue[0]
            merged = list(dict.fromkeys([*keyspaces, *said.keyspaces])), list(dict.fromkeys([*holders, *said.holders]))
            if parts and max(len(merged[0]), len(merged[1])) > TABLE_MAX:
                break
            room = records_max(*merged) - sum(map(len, parts))
            if room <= 0:
                break
            keyspaces, holders = ({name: at for at, name in enumerate(names)} for names in merged)  # type: ignore[assignment]
            parts.append(_renumbered(said, room, keyspaces, holders))
            if room < len(said.records):
                self._queue[0] = _Said(said.records[room:], said.keyspaces, said.holders)
            else:
                self._queue.popleft()
        return PagesChanged(
            shard=self._shard,
            number=self.number + 1,
            keyspaces=tuple(keyspaces),
            holders=tuple(holders),
            records=np.concatenate(parts).tobytes(),
        )

    async def _say(self, fact: PagesChanged) -> bool:
        """Append, whatever it takes; ``False`` if a newer grant is in force."""
        headers = Headers(
            event_id=new_event_id(self._ids),
            author=self._author,
            incarnation=self._incarnation,
            token=self._token,
            expected=self._token,
        )
        while True:
            try:
                outcome = await append(self._pages, fact, headers, deadline=Deadline(APPEND_S, what="saying pages"))
            except TensorbusError as error:
                log.warning("pages not said yet: shard=%d number=%d reason=%s", self._shard, fact.number, error)
                await asyncio.sleep(RETRY_DELAY_S)
                continue
            if isinstance(outcome, Appended):
                return True
            log.warning("fenced: shard=%d token=%d in_force=%d", self._shard, self._token, outcome.seq)
            self._on_fenced()
            return False

    def _tell(self) -> None:
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()

    def _fenced(self) -> FencedError:
        return FencedError(f"another home has shard {self._shard}", shard=self._shard, token=self._token)


def _renumbered(said: _Said, room: int, keyspaces: dict[str, int], holders: dict[PageHolder, int]) -> Records:
    """Its first records, with the places of a batch's tables."""
    records = said.records[:room].copy()
    for name, own, table in (("keyspace", said.keyspaces, keyspaces), ("holder", said.holders, holders)):
        if own:
            places = np.array([table[one] for one in own], np.uint16)  # type: ignore[index]
            records[name] = places[records[name]]
    return records
