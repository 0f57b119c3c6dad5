"""What the home of a shard says on its stream: in order, grouped, one append in flight, under its grant only."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from tensorbus.bus import Appended, Conflict, Stream, append
from tensorbus.clock import Deadline
from tensorbus.errors import FencedError, TensorbusError, UnavailableError
from tensorbus.events import (
    AUTHOR,
    INCARNATION,
    MSG_ID,
    Aggregate,
    Headers,
    PageHolder,
    PagesChanged,
    ShardSnapshotTaken,
    aggregate_of,
)
from tensorbus.feeds._lookout import insist, look_deadline
from tensorbus.feeds._shard_replay import decode_pages
from tensorbus.ids import EventId, IdSource, Incarnation, WorkerId, new_event_id
from tensorbus.lifecycle import PageBatches, Records

log = logging.getLogger("tensorbus.feeds")

LINGER_S: Final = 0.002
TRY_S: Final = 1.9
"""Shorter than the bus's patience: it would repeat the request by itself, perhaps at a stream that lost its tail."""
RETRY_DELAY_S: Final = 0.2
RECORDS_WAITING_MAX: Final = 500_000


class PageLog:
    """One shard's voice under one grant. :meth:`run` is its task.

    Args:
        token: The grant's sequence.
        number: The running number of the shard's last batch that counts.
        on_fenced: Called once when nothing more may be said; :attr:`ended` says why. It must not wait.

    Attributes:
        number: Of the last batch that the stream took.
        position: Sequence of that batch, or the token.
        trouble: Why the bus does not take the present batch, ``None`` if it does.
        ended: Why nothing more is said: a newer grant is in force, or the stream lost its tail.
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
        waiting_max: int = RECORDS_WAITING_MAX,
    ) -> None:
        self.number = number
        self.position = token
        self.trouble: TensorbusError | None = None
        self.ended: TensorbusError | None = None
        self._pages = pages
        self._shard, self._token = shard, token
        self._author, self._incarnation, self._ids = author, incarnation, ids
        self._on_fenced = on_fenced
        self._waiting_max = waiting_max
        self._batches = PageBatches(shard)
        self._logged = 0
        self._last_id: EventId | None = None
        self._doubted = True  # the bus may have been away since the grant
        self._wake = asyncio.Event()
        self._wake.set()
        self._moved = asyncio.Event()

    @property
    def waiting(self) -> int:
        """Records that are not on the stream yet."""
        return self._batches.put_count - self._logged

    @property
    def full(self) -> bool:
        """Whether so many wait that the bus must catch up first."""
        return self.waiting >= self._waiting_max

    def put(self, records: Records, keyspaces: tuple[str, ...], holders: tuple[PageHolder, ...]) -> int:
        """Queue records to be said, without waiting; gives what to wait for with :meth:`logged`.

        Who finds it :attr:`full` is to take no more pages in; what must be said is queued all the same.

        Args:
            records: ``RECORD[n]``, which must stay as they are.
            keyspaces, holders: What the records name by their place; at most 256 each.
        """
        self._wake.set()
        return self._batches.put(records, keyspaces, holders)

    async def logged(self, upto: int, *, deadline: Deadline) -> None:
        """Wait until what :meth:`put` counted is on the stream.

        Raises:
            FencedError, UnavailableError: If it will not be said any more under this grant.
            DeadlineExceededError: If the bus does not take it in time; it may still.
        """
        async with deadline.scope():
            while self._logged < upto:
                if self.ended is not None:
                    raise self.ended
                await self._moved.wait()

    async def flush(self, *, deadline: Deadline) -> None:
        """Wait until all that was put so far is on the stream; raises as :meth:`logged` does."""
        await self.logged(self._batches.put_count, deadline=deadline)

    async def run(self) -> None:
        """Say what is put until nothing more may be said, or the task is cancelled."""
        try:
            with self._pages.on_lost(self._doubt):
                while self.ended is None:
                    await self._wake.wait()
                    if not self._batches.fill_a_batch:
                        await asyncio.sleep(LINGER_S)
                    self._wake.clear()
                    await self._say_all()
        finally:
            self._end(UnavailableError(f"this worker says nothing more of shard {self._shard}", shard=self._shard))

    async def _say_all(self) -> None:
        await self._check()
        while self.ended is None and (batch := self._batches.pack(self.number + 1)) is not None:
            await self._say(batch)

    async def _say(self, batch: PagesChanged) -> None:
        """Append until the outcome is known: the next number depends on it."""
        headers = Headers(
            event_id=new_event_id(self._ids),
            author=self._author,
            incarnation=self._incarnation,
            token=self._token,
            expected=self._token,
        )
        outcome = await self._try(batch, headers)
        while outcome is None:
            await asyncio.sleep(RETRY_DELAY_S)
            await self._check()
            if self.ended is not None:
                return
            outcome = await self._found(batch, headers.event_id)
            if self._doubted:  # the bus was away just now: what was found may be gone, and the last batch with it
                outcome = None
            elif outcome is None:
                outcome = await self._try(batch, headers)
        self.trouble = None
        if isinstance(outcome, Conflict):
            log.warning("fenced: shard=%d token=%d in_force=%d", self._shard, self._token, outcome.seq)
            self._fence(
                FencedError(
                    f"another home has shard {self._shard}: token {self._token} is older than {outcome.seq}",
                    shard=self._shard,
                    token=self._token,
                    in_force=outcome.seq,
                )
            )
            return
        self.number, self.position, self._last_id = batch.number, outcome.seq, headers.event_id
        self._logged = self._batches.packed_count
        self._tell()

    async def _try(self, batch: PagesChanged, headers: Headers) -> Appended | Conflict | None:
        """Once; ``None`` if the outcome is unknown. The request ends when the bus is lost: there may be another stream
        afterwards, in which this number is not the next one."""
        trying = asyncio.ensure_future(append(self._pages, batch, headers, deadline=Deadline(TRY_S)))

        def give_up() -> None:
            trying.cancel()

        try:
            with self._pages.on_lost(give_up):
                return await trying
        except TensorbusError as error:
            self.trouble = error
            log.warning("pages wait for the bus: shard=%d number=%d reason=%s", self._shard, batch.number, error)
            return None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                trying.cancel()
                raise
            return None

    async def _found(self, batch: PagesChanged, event_id: EventId) -> Appended | None:
        """A batch of unknown outcome that is there: it is the last that this author said of the shard."""
        subject = self._pages.subjects.fact(aggregate_of(batch), self._author)
        last = await insist(lambda: self._pages.last_on(subject, deadline=look_deadline()))
        return None if last is None or last.headers.get(MSG_ID) != event_id else Appended(last.seq)

    # -- whether the stream is the one that took the last batch -------------------------------------------------------

    def _doubt(self) -> None:
        self._doubted = True
        self._wake.set()

    async def _check(self) -> None:
        """After the bus was away: a stream that lost the last batch, or the grant, takes no more under it."""
        while self._doubted and self.ended is None:
            self._doubted = False
            if not await insist(self._is_there):
                log.error("the stream of pages lost its tail: shard=%d position=%d", self._shard, self.position)
                self._fence(
                    UnavailableError(
                        f"the stream of pages lost what shard {self._shard} had at {self.position}: its tail is gone",
                        shard=self._shard,
                        position=self.position,
                    )
                )

    async def _is_there(self) -> bool:
        found = await self._pages.get(self.position, deadline=look_deadline())
        if found is None:
            return await self._is_purged()
        if self._last_id is not None:
            return found.headers.get(MSG_ID) == self._last_id
        said = (found.headers.get(AUTHOR), found.headers.get(INCARNATION))
        return said == (self._author, self._incarnation)

    async def _is_purged(self) -> bool:
        """Whether a snapshot of this home's own holds the last batch: it lies behind it, so the tail is there."""
        pattern = self._pages.subjects.fence(Aggregate("psnap", str(self._shard)))
        last = await self._pages.last_on(pattern, deadline=look_deadline())
        if last is None:
            return False
        fact, said = (recorded := decode_pages(last)).event, recorded.headers
        mine = (said.author, said.incarnation, said.token) == (self._author, self._incarnation, self._token)
        return mine and isinstance(fact, ShardSnapshotTaken) and fact.upto >= self.position

    def _fence(self, why: TensorbusError) -> None:
        self._end(why)
        self._on_fenced()

    def _end(self, why: TensorbusError) -> None:
        if self.ended is None:
            self.ended = why
        self._tell()

    def _tell(self) -> None:
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()
