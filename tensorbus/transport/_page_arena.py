"""One arena of page slots, as its owner keeps it: what is free, reserved, readable or pinned. No locks, no waiting."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tensorbus.transport._page_layout import (
    STAMP_MAX,
    ArenaShape,
    Mask,
    PagePlaces,
    PageTable,
    Slots,
    Sums,
    fence,
    places_of,
    slots_of,
)
from tensorbus.transport._pool import Segment, SegmentState
from tensorbus.transport._segments import Memory, page_round

_FREE, _RESERVED, _LIVE, _LEAVING, _WORN = (np.uint8(number) for number in range(5))
"""What a slot is: leaving is freed but pinned; worn is one whose stamp has come to its end."""
_NAMES: Final = {"free": _FREE, "reserved": _RESERVED, "live": _LIVE, "leaving": _LEAVING, "worn": _WORN}
_ONE: Final = np.uint32(1)


class PageArena:
    """Slots of one size in one segment of the pool, all of one tenant.

    A slot's stamp turns odd before anybody else may write there, and even again only once its bytes are whole.

    Args:
        segment: Owned from now on; holds ``shape.nbytes``.
        number: Names the arena in the places of its pages. Never used twice by one owner.
        writer: The connection that fills it; ``None`` if the owner does.
    """

    def __init__(self, segment: Segment, *, number: int, shape: ArenaShape, writer: str | None) -> None:
        self.number = number
        self.shape = shape
        self.tenant = segment.tenant
        self.writer = writer
        self.segment = segment
        self.memory = Memory(page_round(shape.table_bytes))
        self.memory.fix_size()
        self.table = PageTable.create(self.memory.map, shape)
        self.memory.seal()
        self.rows: npt.NDArray[np.uint8] = np.frombuffer(segment.view, np.uint8, shape.nbytes).reshape(
            shape.slots, shape.slot_bytes
        )
        self._states = np.zeros(shape.slots, np.uint8)
        self._pins = np.zeros(shape.slots, np.uint32)
        # Taken from the end, so that a new arena is filled from its beginning.
        self._free: Slots = np.arange(shape.slots - 1, -1, -1, dtype=np.int64)
        self._free_count = shape.slots
        self._worn = 0

    @property
    def free_count(self) -> int:
        return self._free_count

    @property
    def empty(self) -> bool:
        """Whether nothing is in it, nor about to be."""
        return self._free_count + self._worn == self.shape.slots

    def slots(self, state: str) -> int:
        """How many slots are ``free``, ``reserved``, ``live``, ``leaving`` or ``worn``."""
        return int((self._states == _NAMES[state]).sum())

    def reserve(self, most: int) -> PagePlaces:
        """Take free slots, in order, up to so many; each place has the generation that its page is going to have."""
        count = min(most, self._free_count)
        slots = np.sort(self._free[self._free_count - count : self._free_count])
        self._free_count -= count
        self._states[slots] = _RESERVED
        return places_of(self.number, slots, self.table.stamps[slots] + _ONE)

    def commit(self, places: PagePlaces, sums: Sums | None) -> Mask:
        """Make reserved slots readable; gives which of them it found reserved under that generation."""
        ok, slots = self._found(places, _RESERVED, ahead=1)
        if len(slots) and self.segment.state is SegmentState.FILLING:
            self.segment.seal()  # its writer has mapped it, and nobody else may any more
        self.table.sums[slots] = 0 if sums is None else sums[ok]
        fence()  # the bytes and their checksums are there before the stamp says so
        self.table.stamps[slots] += _ONE
        self._states[slots] = _LIVE
        return ok

    def abandon(self, places: PagePlaces) -> Mask:
        """Give reserved slots back unread; whoever still holds the place cannot commit it any more."""
        ok, slots = self._found(places, _RESERVED, ahead=1)
        self._renew(slots, 2)
        return ok

    def abandon_all(self) -> int:
        """Give back every reserved slot; gives how many there were."""
        slots = np.flatnonzero(self._states == _RESERVED)
        self._renew(slots, 2)
        return len(slots)

    def free(self, places: PagePlaces) -> Mask:
        """End pages: from now on nobody reads them. A pinned slot is used again once it is not any more."""
        ok, slots = self._found(places, _LIVE, ahead=0)
        pinned = slots[self._pins[slots] > 0]
        self._states[pinned] = _LEAVING
        self.table.stamps[pinned] += _ONE
        self._renew(slots[self._pins[slots] == 0], 1)
        return ok

    def pin(self, places: PagePlaces) -> Mask:
        """Keep pages that are readable from being overwritten until :meth:`unpin`."""
        ok, slots = self._found(places, _LIVE, ahead=0)
        self._pins[slots] += _ONE
        return ok

    def unpin(self, slots: Slots) -> None:
        """Take back one pin of each."""
        self._pins[slots] -= _ONE
        done = slots[(self._pins[slots] == 0) & (self._states[slots] == _LEAVING)]
        self._renew(done, 0)

    def retire(self) -> None:
        """Give the memory back; nothing in it is readable, reserved or pinned any more."""
        self.table.retire()
        self.segment.release()
        self.memory.close()

    def _renew(self, slots: Slots, step: int) -> None:
        """Put slots, their stamps moved on, to the free ones."""
        self.table.stamps[slots] += np.uint32(step)
        worn: npt.NDArray[Any] = self.table.stamps[slots] >= STAMP_MAX
        self._states[slots[worn]] = _WORN
        self._worn += int(worn.sum())
        slots = slots[~worn]
        self._states[slots] = _FREE
        self._free[self._free_count : self._free_count + len(slots)] = slots[::-1]
        self._free_count += len(slots)

    def _found(self, places: PagePlaces, state: np.uint8, *, ahead: int) -> tuple[Mask, Slots]:
        """Which of the places, each once, are slots in that state and in that use; and their slots."""
        slots, within = slots_of(places, self.shape)
        ok = (self._states[slots] == state) & (self.table.stamps[slots] + np.uint32(ahead) == places["generation"])
        if within is not None:
            ok &= within
        if len(slots) == 1:
            return ok, slots[ok]
        again = np.ones(len(slots), np.bool_)
        again[np.unique(np.where(ok, slots, -1), return_index=True)[1]] = False
        ok &= ~again
        return ok, slots[ok]
