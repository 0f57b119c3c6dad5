"""What the owner and the users of page memory agree on: how a page is named, and what its arena's table says of it.

An arena is a memfd of slots of one size, and a second memfd beside it, the table, which only the owner ever writes: a
stamp and a checksum for each slot. The layout is fixed in ``docs/spec/page-memory.md``.
"""

from __future__ import annotations

import mmap
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from tensorbus.errors import CorruptError, InvalidArgumentError

GRAIN_BYTES: Final = 4096
SLOT_BYTES_MAX: Final = 4 << 20
PAGE_PLACE: Final = np.dtype([("segment", "<u4"), ("generation", "<u4"), ("slot", "<u8")])
"""Where a page lies, as it travels: the arena's number, the use of the slot (an even stamp), and the slot."""
STAMP_FIRST: Final = 1
STAMP_MAX: Final = 0xFFFF_FFF0
"""A slot whose stamp got there is never used again: a stamp that comes round would name two pages."""

PagePlaces: TypeAlias = npt.NDArray[np.void]
"""``PAGE_PLACE[n]``."""
Slots: TypeAlias = npt.NDArray[np.int64]
Generations: TypeAlias = npt.NDArray[np.uint32]
Mask: TypeAlias = npt.NDArray[np.bool_]
Sums: TypeAlias = npt.NDArray[np.uint64]

_HEAD = struct.Struct("<4sIIII")
_MAGIC: Final = b"tbpt"
_VERSION: Final = 1
_HEAD_BYTES: Final = 64
_RETIRED_AT: Final = 4
"""Which u32 of the head tells that the arena is given up."""


class PageState(IntEnum):
    """What came of reading one page.

    ``OK``: its bytes are right. ``GONE``: the slot has been given to another use, or to none, before it was read.
    ``TORN``: that happened while it was read. ``CORRUPT``: the bytes are not those that were written. ``LOST``: its
    holder could not be asked.
    """

    OK = 0
    GONE = 1
    TORN = 2
    CORRUPT = 3
    LOST = 4


# The same for arithmetic: numpy takes ten times as long for a member of an enumeration as for a number of its own.
OK: Final = np.uint8(PageState.OK)
GONE: Final = np.uint8(PageState.GONE)
TORN: Final = np.uint8(PageState.TORN)
CORRUPT: Final = np.uint8(PageState.CORRUPT)
LOST: Final = np.uint8(PageState.LOST)

States: TypeAlias = npt.NDArray[np.uint8]
"""``PageState`` of each page of a batch."""


@dataclass(frozen=True, slots=True)
class ArenaShape:
    """How many slots an arena has, and how large each is."""

    slots: int
    slot_bytes: int

    @property
    def nbytes(self) -> int:
        return self.slots * self.slot_bytes

    @property
    def table_bytes(self) -> int:
        return _HEAD_BYTES + _stamp_bytes(self.slots) + 8 * self.slots


def slot_bytes(nbytes: int) -> int:
    """The slot size of pages of ``nbytes``.

    Raises:
        InvalidArgumentError: If pages cannot be so large, or so small.
    """
    if not 0 < nbytes <= SLOT_BYTES_MAX:
        raise InvalidArgumentError(f"a page has from 1 to {SLOT_BYTES_MAX} bytes, not {nbytes}")
    return -(-nbytes // GRAIN_BYTES) * GRAIN_BYTES


class PageTable:
    """The table of one arena, over the bytes of its memfd.

    Attributes:
        stamps: ``uint32[slots]``. Even: the slot is readable, and this is its generation. Odd: it is free or being
            filled. A stamp only grows.
        sums: ``uint64[slots]``: XXH3-64 of the page as it was written, 0 where nobody took it.
    """

    __slots__ = ("_head", "shape", "stamps", "sums")

    def __init__(self, buffer: mmap.mmap, shape: ArenaShape) -> None:
        self.shape = shape
        self._head = np.frombuffer(buffer, np.uint32, _HEAD_BYTES // 4)
        self.stamps = np.frombuffer(buffer, np.uint32, shape.slots, _HEAD_BYTES)
        self.sums = np.frombuffer(buffer, np.uint64, shape.slots, _HEAD_BYTES + _stamp_bytes(shape.slots))

    @classmethod
    def create(cls, buffer: mmap.mmap, shape: ArenaShape) -> PageTable:
        """Write the table of an arena in which nothing can be read yet."""
        table = cls(buffer, shape)
        head = _HEAD.pack(_MAGIC, _VERSION, shape.slots, shape.slot_bytes, 0)
        table._head[: len(head) // 4] = np.frombuffer(head, np.uint32)
        table.stamps[:] = STAMP_FIRST
        return table

    @classmethod
    def open(cls, buffer: mmap.mmap, shape: ArenaShape) -> PageTable:
        """Read the table that an owner wrote.

        Raises:
            CorruptError: If it is none, or is that of an arena of another shape.
        """
        if len(buffer) < shape.table_bytes:
            raise CorruptError(f"the table of {shape.slots} page slots has only {len(buffer)} bytes")
        magic, version, slots, size, _ = _HEAD.unpack_from(buffer)
        if (magic, version) != (_MAGIC, _VERSION) or (slots, size) != (shape.slots, shape.slot_bytes):
            raise CorruptError(f"this is no table of {shape.slots} page slots of {shape.slot_bytes} bytes")
        return cls(buffer, shape)

    @property
    def retired(self) -> bool:
        """Whether the owner has given the arena up: who maps it should let it go."""
        return bool(self._head[_RETIRED_AT])

    def retire(self) -> None:
        self._head[_RETIRED_AT] = 1

    def readable(self, slots: Slots, generations: Generations) -> Mask:
        """Which of the slots, all within the arena, hold that very use of them at this moment."""
        found: Mask = (self.stamps[slots] == generations) & (generations & 1 == 0)
        return found


def places_of(segment: int, slots: Slots, generations: Generations) -> PagePlaces:
    """Places in one arena."""
    places = np.empty(len(slots), PAGE_PLACE)
    places["segment"], places["slot"], places["generation"] = segment, slots, generations
    return places


def by_segment(places: PagePlaces) -> Iterator[tuple[int, slice | Slots]]:
    """The arenas that the places are in, each with which of the places: a slice if they are together."""
    segments = places["segment"]
    if not len(segments):
        return
    first = int(segments[0])
    if (segments == first).all():
        yield first, slice(None)
        return
    for segment in np.unique(segments).tolist():
        at = np.flatnonzero(segments == segment)
        together = int(at[-1] - at[0]) + 1 == len(at)
        yield segment, slice(int(at[0]), int(at[-1]) + 1) if together else at


def slots_of(places: PagePlaces, shape: ArenaShape) -> tuple[Slots, Mask | None]:
    """The places' slots in an arena, and which are within it: ``None`` is all; the slot of one that is not is 0."""
    asked = places["slot"]
    within: Mask = asked < shape.slots
    if within.all():
        return asked.astype(np.int64), None
    return np.where(within, asked, 0).astype(np.int64), within


def fence() -> None:
    """Let no load or store of this thread pass: what comes before is done before what comes after.

    x86 keeps loads in order, and stores; ARM does not. Giving a lock back is a release and taking it an acquire, and
    C libraries make them of instructions that the processor does not reorder among each other, so that the pair is a
    barrier for both.
    """
    lock = threading.Lock()
    lock.acquire()
    lock.release()
    lock.acquire()


def _stamp_bytes(slots: int) -> int:
    return -(-4 * slots // 64) * 64
