"""The memory pool of a worker: budgeted segments that are filled, sealed, pinned, and used again while warm."""

# ruff: noqa: SLF001 - a pool and its segments are one unit
from __future__ import annotations

import select
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import count

from tensorbus.errors import ConflictError, InvalidArgumentError, OutOfSpaceError, UnavailableError
from tensorbus.transport._fds import close_quietly
from tensorbus.transport._reserve import next_piece
from tensorbus.transport._segments import PAGE_BYTES, Memory, new_pin, page_round

_WASTE_SHARE = 8  # a reused segment may be larger than asked by one part in eight
_WARM_BYTES_MIN = 64 << 10  # a smaller one is made anew as quickly as found again, and would keep descriptors
_SMALL_BYTES = 1 << 20
_SMALL_WARM_MAX = 256
_HOLDERS_SHOWN = 10
_EVENTS_MAX = 256

FreedHandler = Callable[["Segment"], None]
RetiredHandler = Callable[[int, str | None], None]


class SegmentState(StrEnum):
    """The life of one use of a segment."""

    FILLING = "filling"
    SEALED = "sealed"
    RELEASED = "released"
    FREED = "freed"


@dataclass(eq=False, slots=True)
class _Arena:
    """One piece of memory over all its uses."""

    id: int
    memory: Memory
    tenant: str | None = None
    writer: str | None = None
    generation: int = 0
    user: Segment | None = None
    reader_pins: set[int] = field(default_factory=set)
    writer_pins: set[int] = field(default_factory=set)
    leases: int = 0
    retired: bool = False

    @property
    def nbytes(self) -> int:
        return self.memory.nbytes


class Segment:
    """One use of a piece of pool memory, from its allocation to the end of its last reader.

    Attributes:
        id: Names the memory within its pool; the same over all its uses.
        generation: Which use of the memory this is; grows by one with each.
        nbytes: What was asked for; the memory behind it is at least one page.
        label: What the segment holds, for people: an artifact id, say.
    """

    def __init__(self, pool: Pool, arena: _Arena, *, nbytes: int, tenant: str, writer: str | None) -> None:
        self.id = arena.id
        self.generation = arena.generation
        self.nbytes = nbytes
        self.capacity_bytes = arena.nbytes
        self.tenant = tenant
        self.writer = writer
        self.label = ""
        self.state = SegmentState.FILLING
        self._pool = pool
        self._arena = arena

    @property
    def view(self) -> memoryview:
        """This process's writable bytes, ``nbytes`` long. For the writer, before :meth:`seal`."""
        self._check(SegmentState.FILLING, SegmentState.SEALED)
        return memoryview(self._arena.memory.map)[: self.nbytes]

    @property
    def pins(self) -> int:
        """Readers in other processes that map the segment."""
        return len(self._arena.reader_pins) if self._arena.user is self else 0

    @property
    def in_use(self) -> bool:
        """Whether somebody maps the segment, or copies from it."""
        return self._arena.user is self and bool(self._arena.reader_pins or self._arena.leases)

    @property
    def writer_mapped(self) -> bool:
        """Whether the writer still has its mapping from an earlier use; else give it :meth:`open_writer`."""
        return self._arena.user is self and bool(self._arena.writer_pins)

    def valid(self) -> bool:
        """Whether the memory still belongs to this use. Looked at before and after each copying read."""
        return self._arena.user is self

    def prefault(self) -> None:
        """Back every page now; blocks, so call it off the loop. See :meth:`Memory.prefault`."""
        self._check(SegmentState.FILLING)
        self._arena.memory.prefault()

    def open_writer(self) -> tuple[int, int]:
        """Descriptors for the writer: the memory, and a pin to keep open as long as it is mapped. The caller owns both.

        Raises:
            ConflictError: If the memory was sealed in an earlier use and can never be mapped for writing again.
        """
        return self._pool._open_writer(self)

    def open_reader(self) -> tuple[int, int]:
        """Descriptors for a reader: the memory, read-only, and a pin to keep open as long as it is mapped.

        The caller owns both; the segment is pinned until every copy of the pin, in any process, is closed.

        Raises:
            ConflictError: If the segment is not sealed, or released.
        """
        return self._pool._open_reader(self)

    @contextmanager
    def lease(self) -> Iterator[memoryview]:
        """The bytes, read-only, for a copy within this process; not used again before the end of the body."""
        self._pool._begin_lease(self)
        try:
            yield memoryview(self._arena.memory.map)[: self.nbytes].toreadonly()
        finally:
            self._pool._end_lease(self)

    def seal(self) -> None:
        """Put the segment in service: its bytes do not change any more. Safe to repeat."""
        self._pool._seal(self)

    def release(self) -> None:
        """Say that its owner needs it no longer; it is free once its last pin and lease are gone. Safe to repeat."""
        self._pool._release(self)

    def _check(self, *states: SegmentState) -> None:
        if self.state not in states:
            raise ConflictError(f"segment {self.id} is {self.state}", segment=self.id, generation=self.generation)


@dataclass(frozen=True, slots=True)
class PoolStats:
    """What a pool's memory is used for, in bytes; ``used = busy + free + retiring`` and never over ``budget``."""

    budget_bytes: int
    used_bytes: int
    busy_bytes: int
    free_bytes: int
    retiring_bytes: int
    segments: int
    pins: int


class Pool:
    """Budgeted memory in segments of one memfd each. Safe to use from several threads.

    A freed segment stays warm for the next use of about its size. Whoever mapped one for writing could still write
    into it, so it then serves only that writer, or, once the writer's mappings are gone, this process; and never
    another tenant.

    Args:
        budget_bytes: The most memory the pool holds, whatever it is used for.
        reserve_bytes: How much of it :meth:`fill_reserve` makes ready for writers that come new.
        on_freed: Called when a released segment's last reader is gone.
        on_reserve_used: Called when a piece of the reserve was given out; :meth:`fill_reserve` makes another.
        on_retired: Called with a segment's id and writer when the writer should drop its mapping of a free segment,
            because its memory is wanted elsewhere.
    """

    def __init__(
        self,
        budget_bytes: int,
        *,
        reserve_bytes: int = 0,
        on_freed: FreedHandler | None = None,
        on_reserve_used: Callable[[], None] | None = None,
        on_retired: RetiredHandler | None = None,
    ) -> None:
        if budget_bytes < PAGE_BYTES or not 0 <= reserve_bytes <= budget_bytes:
            raise InvalidArgumentError(f"pool budget of {budget_bytes} bytes with a reserve of {reserve_bytes}")
        self.budget_bytes = budget_bytes // PAGE_BYTES * PAGE_BYTES
        self._reserve_bytes = reserve_bytes // PAGE_BYTES * PAGE_BYTES
        self._on_freed = on_freed
        self._on_reserve_used = on_reserve_used
        self._on_retired = on_retired
        self._lock = threading.RLock()
        self._ids = count(1)
        self._arenas: dict[int, _Arena] = {}
        self._free: dict[int, _Arena] = {}  # those without a user; the longest free first
        self._used_bytes = 0
        self._pins: dict[int, _Arena] = {}
        self._hangups = select.epoll()
        self._notes: list[Callable[[], None]] = []
        self._closed = False

    # -- taking memory ------------------------------------------------------------------------------------------------

    def allocate(self, nbytes: int, *, tenant: str, writer: str | None = None, fresh: bool = False) -> Segment:
        """A segment to fill.

        Args:
            nbytes: At least 0.
            tenant: Whose bytes these are.
            writer: The connection id of the caller that will fill it; ``None`` if this process does.
            fresh: Whether the writer cannot use a mapping that it has from before.

        Raises:
            OutOfSpaceError: If the budget is spent. The details say who holds it; ``retiring_bytes`` is what comes
                back by itself in a moment, once writers have dropped mappings that they keep for reuse.
        """
        if nbytes < 0:
            raise InvalidArgumentError(f"a segment of {nbytes} bytes")
        with self._changing():
            self._reap()
            need = page_round(nbytes)
            arena = self._reusable(need, tenant=tenant, writer=writer, fresh=fresh)
            if arena is None:
                self._make_room(need, tenant)
                arena = self._new_arena(need)
            elif arena.nbytes > need + need // _WASTE_SHARE + PAGE_BYTES:
                self._used_bytes -= arena.nbytes - need
                arena.memory.shrink(need)
            if arena.tenant is None and arena.generation:
                self._note(self._on_reserve_used)
            arena.tenant, arena.writer = tenant, writer
            arena.generation += 1
            return self._use(arena, nbytes, tenant=tenant, writer=writer)

    def fill_reserve(self) -> None:
        """Make unused memory ready until there is as much as the reserve, as far as the budget goes. Blocks; call it
        off the loop.

        It lies in pieces of 1 MiB to 256 MiB, as many bytes of each size, so that little of one is given back to the
        machine when it is cut to size.

        Raises:
            OutOfSpaceError: If the machine has no memory for it.
        """
        while self._make_piece():
            pass

    def _make_piece(self) -> bool:
        with self._changing():
            ready = [arena.nbytes for arena in self._arenas.values() if arena.tenant is None]
            room = min(self._reserve_bytes - sum(ready), self.budget_bytes - self._used_bytes)
            if room < PAGE_BYTES:
                return False
            arena = self._new_arena(next_piece(ready, self._reserve_bytes, room))
            # Not for anybody until its pages are there.
            self._use(arena, arena.nbytes, tenant="", writer=None)
        try:
            arena.memory.prefault()
        finally:
            with self._changing():
                arena.generation += 1
                self._let_go(arena)
        return True

    def _use(self, arena: _Arena, nbytes: int, *, tenant: str, writer: str | None) -> Segment:
        arena.user = user = Segment(self, arena, nbytes=nbytes, tenant=tenant, writer=writer)
        self._free.pop(arena.id, None)
        return user

    def _let_go(self, arena: _Arena) -> None:
        arena.user = None
        self._free[arena.id] = arena

    def _reusable(self, need: int, *, tenant: str, writer: str | None, fresh: bool) -> _Arena | None:
        def suits(arena: _Arena) -> bool:
            if arena.retired or arena.nbytes < need:
                return False
            if arena.tenant is None:
                return True  # never used: it can be cut to size
            if arena.tenant != tenant or arena.nbytes > need + need // _WASTE_SHARE + PAGE_BYTES:
                return False
            if writer is not None and arena.writer == writer and arena.writer_pins:
                return not fresh
            return not arena.writer_pins and (writer is None or not arena.memory.write_sealed)

        found = [arena for arena in self._free.values() if suits(arena)]
        # What was used before goes first: the reserve is for those who have nothing.
        return min(found, key=lambda arena: (arena.tenant is None, arena.nbytes), default=None)

    def _make_room(self, need: int, tenant: str) -> None:
        free = [arena for arena in self._free.values() if not arena.retired]
        lacking = self._used_bytes + need - self.budget_bytes
        droppable = sum(arena.nbytes for arena in free if not arena.writer_pins)
        if lacking > droppable:
            if lacking <= sum(arena.nbytes for arena in free) + self._retiring_bytes():
                self._retire([arena for arena in free if arena.writer_pins], lacking - droppable)
            raise self._out_of_space(need, tenant)
        for arena in free:
            if lacking <= 0:
                return
            if not arena.writer_pins:
                lacking -= arena.nbytes
                self._drop(arena)

    def _retire(self, arenas: list[_Arena], lacking: int) -> None:
        lacking -= self._retiring_bytes()
        for arena in arenas:
            if lacking <= 0:
                return
            lacking -= arena.nbytes
            arena.retired = True
            self._note(self._on_retired, arena.id, arena.writer)

    def _new_arena(self, need: int) -> _Arena:
        arena = _Arena(id=next(self._ids), memory=Memory(need))
        self._arenas[arena.id] = arena
        self._used_bytes += need
        return arena

    def _drop(self, arena: _Arena) -> None:
        del self._arenas[arena.id]
        self._free.pop(arena.id, None)
        self._used_bytes -= arena.nbytes
        arena.memory.close()

    # -- the life of a segment ----------------------------------------------------------------------------------------

    def _open_writer(self, segment: Segment) -> tuple[int, int]:
        with self._changing():
            segment._check(SegmentState.FILLING)
            memory = segment._arena.memory
            if memory.write_sealed:
                raise ConflictError(f"segment {segment.id} was sealed in an earlier use", segment=segment.id)
            memory.fix_size()
            return memory.reopen(writable=True), self._pin(segment._arena, segment._arena.writer_pins)

    def _open_reader(self, segment: Segment) -> tuple[int, int]:
        with self._changing():
            segment._check(SegmentState.SEALED)
            fd = segment._arena.memory.reopen(writable=False)
            try:
                return fd, self._pin(segment._arena, segment._arena.reader_pins)
            except BaseException:
                close_quietly(fd)
                raise

    def _pin(self, arena: _Arena, pins: set[int]) -> int:
        watched, held = new_pin()
        self._hangups.register(watched, 0)  # a hang-up is told whatever is asked for; bytes in the pipe are not
        self._pins[watched] = arena
        pins.add(watched)
        return held

    def _begin_lease(self, segment: Segment) -> None:
        with self._lock:
            segment._check(SegmentState.SEALED, SegmentState.FILLING)
            segment._arena.leases += 1

    def _end_lease(self, segment: Segment) -> None:
        with self._changing():
            segment._arena.leases -= 1
            self._settle(segment._arena)

    def _seal(self, segment: Segment) -> None:
        with self._changing():
            segment._check(SegmentState.FILLING, SegmentState.SEALED)
            segment._arena.memory.seal()
            segment.state = SegmentState.SEALED

    def _release(self, segment: Segment) -> None:
        with self._changing():
            if segment.state in (SegmentState.FILLING, SegmentState.SEALED):
                segment.state = SegmentState.RELEASED
                self._settle(segment._arena)

    def _settle(self, arena: _Arena) -> None:
        """See what follows from the end of a pin, a lease or an owner's need."""
        user = arena.user
        if user is not None and user.state is SegmentState.RELEASED and not arena.reader_pins and not arena.leases:
            user.state = SegmentState.FREED
            self._let_go(arena)
            self._note(self._on_freed, user)
        spent = arena.retired or self._too_small(arena)
        if arena.user is None and not arena.writer_pins and spent and arena.id in self._arenas:
            self._drop(arena)

    def _too_small(self, arena: _Arena) -> bool:
        if arena.nbytes < _WARM_BYTES_MIN:
            return True
        small = sum(other.nbytes < _SMALL_BYTES for other in self._free.values())
        return arena.nbytes < _SMALL_BYTES and small > _SMALL_WARM_MAX

    # -- pins ---------------------------------------------------------------------------------------------------------

    def fileno(self) -> int:
        """A descriptor that is readable while a pin has ended and :meth:`reap` was not called."""
        return self._hangups.fileno()

    def reap(self) -> int:
        """Take note of pins that have ended; never blocks. Gives their count."""
        with self._changing():
            return self._reap()

    def _reap(self) -> int:
        ended = 0
        while not self._closed and (events := self._hangups.poll(0, _EVENTS_MAX)):
            for watched, _ in events:
                arena = self._pins.pop(watched)
                self._hangups.unregister(watched)
                close_quietly(watched)
                arena.reader_pins.discard(watched)
                arena.writer_pins.discard(watched)
                self._settle(arena)
                ended += 1
        return ended

    # -- the whole ----------------------------------------------------------------------------------------------------

    def stats(self) -> PoolStats:
        """A consistent look at the accounts."""
        with self._lock:
            busy = self._used_bytes - sum(arena.nbytes for arena in self._free.values())
            retiring = self._retiring_bytes()
            return PoolStats(
                budget_bytes=self.budget_bytes,
                used_bytes=self._used_bytes,
                busy_bytes=busy,
                free_bytes=self._used_bytes - busy - retiring,
                retiring_bytes=retiring,
                segments=len(self._arenas),
                pins=len(self._pins),
            )

    def close(self) -> None:
        """Close every descriptor. Mappings that other processes have stay readable. Safe to repeat."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._hangups.close()
            for watched in self._pins:
                close_quietly(watched)
            self._pins.clear()
            for arena in tuple(self._arenas.values()):
                if arena.user is not None:
                    arena.user.state = SegmentState.FREED
                    arena.user = None
                self._drop(arena)

    def _retiring_bytes(self) -> int:
        return sum(arena.nbytes for arena in self._free.values() if arena.retired)

    def _out_of_space(self, need: int, tenant: str) -> OutOfSpaceError:
        users = sorted(
            (arena for arena in self._arenas.values() if arena.user is not None), key=lambda a: a.nbytes, reverse=True
        )
        holders = [_holder(arena, tenant) for arena in users[:_HOLDERS_SHOWN]]
        busy = sum(arena.nbytes for arena in users)
        retiring = self._retiring_bytes()
        return OutOfSpaceError(
            f"{need} bytes do not fit: {busy} of the pool's {self.budget_bytes} bytes are held by {len(users)} segments"
            + (f", {retiring} more come back in a moment" if retiring else "")
            + (f"; the largest is {holders[0]['owner']}" if holders else ""),
            asked_bytes=need,
            budget_bytes=self.budget_bytes,
            used_bytes=busy,
            retiring_bytes=retiring,
            holders=holders,
        )

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Hold the lock; call back only after it is given up, since a callback may come back to the pool."""
        notes: list[Callable[[], None]] = []
        try:
            with self._lock:
                if self._closed:
                    raise UnavailableError("the pool is closed")
                try:
                    yield
                finally:
                    notes, self._notes = self._notes, []
        finally:  # a refused allocation has asked writers to let go, and they must hear of it
            for note in notes:
                note()

    def _note(self, callback: Callable[..., None] | None, *args: object) -> None:
        if callback is not None:
            self._notes.append(lambda: callback(*args))


def _holder(arena: _Arena, tenant: str) -> dict[str, object]:
    user = arena.user
    assert user is not None
    # One tenant's ids are no business of another's.
    owner = user.label or user.writer or "unnamed" if user.tenant == tenant else "another tenant"
    return {
        "segment": arena.id,
        "nbytes": arena.nbytes,
        "owner": owner,
        "pins": len(arena.reader_pins) + arena.leases,
        "state": str(user.state),
    }
