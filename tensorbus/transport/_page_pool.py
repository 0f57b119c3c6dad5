"""The owner's side of page memory: arenas of page slots by tenant, writer and size, out of the worker's pool."""

from __future__ import annotations

import select
import threading
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any, Final

import numpy as np

from tensorbus.errors import InvalidArgumentError, NotFoundError
from tensorbus.transport._copy import Bytes
from tensorbus.transport._fds import close_quietly
from tensorbus.transport._page_arena import PageArena
from tensorbus.transport._page_copy import blocks_of, copy_in, pick
from tensorbus.transport._page_layout import (
    GONE,
    PAGE_PLACE,
    ArenaShape,
    Mask,
    PagePlaces,
    Slots,
    States,
    Sums,
    by_segment,
    slot_bytes,
    slots_of,
)
from tensorbus.transport._page_maps import read_pages
from tensorbus.transport._pool import Pool, SegmentState
from tensorbus.transport._segments import new_pin

ARENA_BYTES: Final = 64 << 20
_EVENTS_MAX: Final = 256

Pinned = dict[int, Slots]
"""The slots that a pin holds, by arena."""


@dataclass(frozen=True, slots=True)
class PagePoolStats:
    """What page memory is used for, in slots and bytes."""

    arenas: int
    arena_bytes: int
    live: int
    live_bytes: int
    reserved: int
    leaving: int
    free: int
    pins: int


class PagePool:
    """Page slots in arenas. Safe to use from several threads; only :meth:`grow` and the copies take long.

    A batch is an array of places and is answered by one mask, since a place may have gone meanwhile: that is no error.

    Args:
        pool: Where arenas come from, and go when nothing is in them.
        arena_bytes: Size of an arena; more where not even one slot fits.
        on_retired: Told each arena's number and writer when it is given up: who maps it should let it go, since its
            memory is not used again before that.
    """

    def __init__(
        self,
        pool: Pool,
        *,
        arena_bytes: int = ARENA_BYTES,
        on_retired: Callable[[int, str | None], None] | None = None,
    ) -> None:
        self._pool = pool
        self._arena_bytes = arena_bytes
        self._on_retired = on_retired
        self._lock = threading.RLock()
        self._numbers = count(1)
        self._arenas: dict[int, PageArena] = {}
        self._pins: dict[int, Pinned] = {}
        self._hangups = select.epoll()
        self._closed = False

    # -- slots --------------------------------------------------------------------------------------------------------

    def reserve(self, n: int, nbytes: int, *, tenant: str, writer: str | None = None) -> PagePlaces:
        """Take slots for up to ``n`` pages of ``nbytes``: fewer where there is no room, until :meth:`grow` made some.

        Args:
            writer: The connection that is going to fill them; ``None`` if this process does.
        """
        size = slot_bytes(nbytes)
        with self._lock:
            found: list[PagePlaces] = []
            for arena in self._arenas.values():
                if n > 0 and arena.free_count and _serves(arena, size, tenant, writer):
                    found.append(arena.reserve(n))
                    n -= len(found[-1])
            return np.concatenate(found) if found else np.empty(0, PAGE_PLACE)

    def grow(self, nbytes: int, *, tenant: str, writer: str | None = None) -> int:
        """Make one more arena; gives its number. Blocks for as long as new memory takes; call it off the loop.

        Raises:
            OutOfSpaceError: If the pool has no room for it.
        """
        size = slot_bytes(nbytes)
        shape = ArenaShape(max(1, self._arena_bytes // size), size)
        # What an engine fills it maps once, before anything in it is readable.
        segment = self._pool.allocate(shape.nbytes, tenant=tenant, writer=writer, fresh=True)
        try:
            segment.label = "pages"
            segment.prefault()
            with self._lock:
                arena = PageArena(segment, number=next(self._numbers), shape=shape, writer=writer)
                self._arenas[arena.number] = arena
                if writer is None:
                    segment.seal()
                return arena.number
        except BaseException:
            segment.release()
            raise

    def commit(self, places: PagePlaces, sums: Sums | None = None) -> Mask:
        """Make reserved pages readable, whose bytes are all there; gives which of them were reserved.

        Args:
            sums: The checksum of each, as :meth:`write` or the engine's own writer gave them.
        """
        return self._each(places, lambda arena, some, at: arena.commit(some, None if sums is None else sums[at]))

    def abandon(self, places: PagePlaces) -> Mask:
        """Give reserved slots back that are not going to be readable."""
        return self._each(places, lambda arena, some, _: arena.abandon(some))

    def free(self, places: PagePlaces) -> Mask:
        """End pages; gives which of them there were. Their slots are used again, pinned ones once they are not."""
        return self._each(places, lambda arena, some, _: arena.free(some))

    def readable(self, places: PagePlaces) -> Mask:
        """Which of the places hold that very page at this moment."""
        return self._each(places, lambda arena, some, _: _readable(arena, some))

    # -- bytes --------------------------------------------------------------------------------------------------------

    def write(self, places: PagePlaces, blocks: Any, nbytes: int, *, sums: bool = True) -> Sums:
        """Copy bytes of this process into slots that it reserved; gives checksums for :meth:`commit`. Blocks.

        Args:
            blocks: See :func:`blocks_of`.

        Raises:
            InvalidArgumentError: If the blocks are not of that number and size.
        """
        parts = blocks_of(blocks, len(places), nbytes)
        found = np.zeros(len(places), np.uint64)
        for number, at in by_segment(places):
            arena = self._arena(number)
            found[at] = copy_in(arena.rows, places["slot"][at].astype(np.int64), pick(parts, at), nbytes, sums=sums)
        return found

    def views(self, places: PagePlaces, nbytes: int) -> list[Bytes]:
        """The memory of slots that this process reserved, to be filled in place; :meth:`commit` them then.

        Raises:
            NotFoundError: If there is no such arena.
        """
        found: dict[int, Bytes] = {}
        for number, at in by_segment(places):
            rows = self._arena(number).rows
            for n, slot in zip(np.arange(len(places))[at].tolist(), places["slot"][at].tolist(), strict=True):
                found[n] = rows[slot, :nbytes]
        return [found[n] for n in range(len(places))]

    def read_into(self, places: PagePlaces, out: Any, nbytes: int, *, verify: bool = False) -> States:
        """Copy pages out as a reader in any process does; see :meth:`MappedArena.read_into`. Blocks."""
        parts = blocks_of(out, len(places), nbytes, writable=True)
        states = np.full(len(places), GONE, np.uint8)
        for number, at in by_segment(places):
            arena = self.find(number)
            if arena is not None:
                states[at] = read_pages(arena.table, arena.rows, places[at], pick(parts, at), nbytes, verify=verify)
        return states

    # -- who maps them ------------------------------------------------------------------------------------------------

    def shape(self, number: int) -> ArenaShape:
        """An arena's shape.

        Raises:
            NotFoundError: If there is none of that number.
        """
        return self._arena(number).shape

    def open_writer(self, number: int) -> tuple[int, int]:
        """Descriptors for an arena's writer: the slots, and a pin as of :meth:`Segment.open_writer`. The caller's.

        Raises:
            ConflictError: If somebody may read in it already; NotFoundError.
        """
        return self._arena(number).segment.open_writer()

    def open_reader(self, number: int) -> tuple[int, int, int]:
        """Descriptors for a reader: the slots and the table, both read-only, and the pin. The caller owns all three.

        Raises:
            NotFoundError: If there is no such arena; ConflictError: If nothing in it was ever readable.
        """
        arena = self._arena(number)
        fd, pin = arena.segment.open_reader()
        try:
            return fd, arena.memory.reopen(writable=False), pin
        except BaseException:
            close_quietly(fd)
            close_quietly(pin)
            raise

    def pin(self, places: PagePlaces) -> tuple[Mask, int]:
        """Keep pages from being overwritten; gives which of them there were, and the pin.

        The slots are free to be used again once every copy of the pin is closed, in any process (see :meth:`reap`).
        """
        with self._lock:
            ok = self._each(places, lambda arena, some, _: arena.pin(some))
            kept = places[ok]
            pinned = {number: kept["slot"][at].astype(np.int64) for number, at in by_segment(kept)}
            try:
                watched, held = new_pin()
            except BaseException:
                self._unpin(pinned)
                raise
            self._hangups.register(watched, 0)
            self._pins[watched] = pinned
            return ok, held

    def fileno(self) -> int:
        """A descriptor that is readable while a pin has ended and :meth:`reap` was not called."""
        return self._hangups.fileno()

    def reap(self) -> int:
        """Take note of pins that have ended; never blocks. Gives their count."""
        ended = 0
        with self._lock:
            while not self._closed and (events := self._hangups.poll(0, _EVENTS_MAX)):
                for watched, _ in events:
                    self._hangups.unregister(watched)
                    close_quietly(watched)
                    self._unpin(self._pins.pop(watched))
                    ended += 1
        return ended

    def writer_gone(self, writer: str) -> int:
        """A connection ended: its reserved slots are given back; gives how many. What it had committed stays."""
        given = 0
        with self._lock:
            for arena in self._arenas.values():
                if arena.writer == writer:
                    arena.segment.seal()  # once its maps are gone too, nobody else can write there
                    given += arena.abandon_all()
        return given

    def shrink(self, need_bytes: int | None = None) -> int:
        """Give empty arenas back to the pool until so many bytes are, or all of them; gives the bytes."""
        given: list[PageArena] = []
        with self._lock:
            for arena in list(self._arenas.values()):
                if need_bytes is not None and sum(one.shape.nbytes for one in given) >= need_bytes:
                    break
                if arena.empty:
                    del self._arenas[arena.number]
                    given.append(arena)
        for arena in given:
            arena.retire()
            if self._on_retired is not None:
                self._on_retired(arena.number, arena.writer)
        return sum(arena.shape.nbytes for arena in given)

    def stats(self) -> PagePoolStats:
        """A consistent look at the accounts."""
        with self._lock:
            arenas = list(self._arenas.values())
            live = [arena.slots("live") for arena in arenas]
            return PagePoolStats(
                arenas=len(arenas),
                arena_bytes=sum(arena.shape.nbytes for arena in arenas),
                live=sum(live),
                live_bytes=sum(n * arena.shape.slot_bytes for n, arena in zip(live, arenas, strict=True)),
                reserved=sum(arena.slots("reserved") for arena in arenas),
                leaving=sum(arena.slots("leaving") for arena in arenas),
                free=sum(arena.free_count for arena in arenas),
                pins=len(self._pins),
            )

    def close(self) -> None:
        """Close every descriptor, before the pool is closed. Mappings of others stay readable. Safe to repeat."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._hangups.close()
            for watched in self._pins:
                close_quietly(watched)
            self._pins.clear()
            for arena in self._arenas.values():
                arena.retire()
            self._arenas.clear()

    def find(self, number: int) -> PageArena | None:
        """The arena of that number, for other parts of this package."""
        with self._lock:
            return self._arenas.get(number)

    def _arena(self, number: int) -> PageArena:
        arena = self.find(number)
        if arena is None:
            raise NotFoundError(f"there is no page arena {number} here", segment=number)
        return arena

    def _each(self, places: PagePlaces, call: Callable[[PageArena, PagePlaces, Any], Mask]) -> Mask:
        if places.dtype != PAGE_PLACE:
            raise InvalidArgumentError(f"places are an array of {PAGE_PLACE}, not of {places.dtype}")
        found = np.zeros(len(places), np.bool_)
        with self._lock:
            for number, at in by_segment(places):
                arena = self._arenas.get(number)
                if arena is not None:
                    found[at] = call(arena, places[at], at)
        return found

    def _unpin(self, pinned: Pinned) -> None:
        for number, slots in pinned.items():
            self._arenas[number].unpin(slots)


def _serves(arena: PageArena, size: int, tenant: str, writer: str | None) -> bool:
    if arena.shape.slot_bytes != size or arena.tenant != tenant:
        return False
    # Who mapped it for writing may still write; once no such map is left, its slots are this process's to fill.
    return arena.writer == writer or (
        writer is None and arena.segment.state is SegmentState.SEALED and not arena.segment.writer_mapped
    )


def _readable(arena: PageArena, places: PagePlaces) -> Mask:
    slots, within = slots_of(places, arena.shape)
    found = arena.table.readable(slots, places["generation"])
    return found if within is None else found & within
