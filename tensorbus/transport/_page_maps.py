"""Page arenas that another process owns: filled by the one engine that they are for, and read by anybody it lets.

A reader asks nobody. It looks at a page's stamp, copies, and looks again: the owner moves the stamp on before the slot
may be written anew, so bytes of another page are never taken for the page's own.
"""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np

from tensorbus.errors import InvalidArgumentError
from tensorbus.transport._copy import Bytes
from tensorbus.transport._fds import close_quietly
from tensorbus.transport._maps import map_private, map_shared, map_shared_readonly
from tensorbus.transport._page_copy import Blocks, Rows, blocks_of, copy_in, copy_out, pick
from tensorbus.transport._page_layout import (
    CORRUPT,
    OK,
    TORN,
    ArenaShape,
    Generations,
    PagePlaces,
    PageTable,
    Slots,
    States,
    Sums,
    fence,
    slots_of,
)
from tensorbus.transport._segments import page_round
from tensorbus.transport._sockets import translate


class ArenaWriter:
    """An engine's writable map of its own arena. Blocks may be written from several threads, each slot from one.

    Args:
        fd: Of the slots, writable; closed here, also on failure.
        pin_fd: Kept open until the mapping is gone.
        shape: As the owner said.

    Raises:
        UnavailableError: If the kernel refuses the mapping; DeniedError: If the arena is sealed against it.
    """

    def __init__(self, fd: int, pin_fd: int, shape: ArenaShape) -> None:
        self.shape = shape
        # The mapping goes with the last array over it: one that is being filled keeps it.
        self._rows: Rows | None = _rows_of(map_shared(fd, shape.nbytes, pin_fd), shape)

    def write(self, slots: Slots, blocks: Any, nbytes: int, *, sums: bool = True) -> Sums:
        """Copy blocks into slots that the owner reserved for this writer. Blocks; releases the interpreter's lock.

        Args:
            slots: ``[n]``, each once.
            blocks: ``n`` blocks of ``nbytes``; see :func:`blocks_of`.
            sums: Whether to take checksums, which the owner keeps and readers can check.

        Returns:
            ``uint64[n]``, zeros without ``sums``.

        Raises:
            InvalidArgumentError: If the blocks or slots do not suit.
        """
        rows = self._rows
        if rows is None:
            raise InvalidArgumentError("this arena is closed")
        slots = np.asarray(slots, np.int64)
        _check_slots(slots, nbytes, self.shape)
        return copy_in(rows, slots, blocks_of(blocks, len(slots), nbytes), nbytes, sums=sums)

    def close(self) -> None:
        """Unmap, as soon as no write runs any more. Safe to repeat."""
        self._rows = None


class MappedArena:
    """A reader's map of an arena.

    Args:
        fd: Of the slots, read-only; closed here, as ``table_fd`` is, also on failure.
        pin_fd: Kept open until the mapping is gone: as long as it is open, the memory serves nothing but this arena.
        shape: As the owner said.

    Raises:
        UnavailableError: If the kernel refuses the mapping; CorruptError: If the table is none.
    """

    def __init__(self, fd: int, table_fd: int, pin_fd: int, shape: ArenaShape) -> None:
        self.shape = shape
        try:
            rows = _rows_of(map_shared_readonly(fd, shape.nbytes, pin_fd), shape)
        except BaseException:
            close_quietly(table_fd)
            raise
        self._open: tuple[PageTable, Rows] | None = (PageTable.open(_map_table(table_fd, shape), shape), rows)

    @property
    def retired(self) -> bool:
        """Whether its owner has given it up; close it then."""
        return self._open is None or self._open[0].retired

    def read_into(self, places: PagePlaces, out: Any, nbytes: int, *, verify: bool = False) -> States:
        """Copy pages out. Blocks; releases the interpreter's lock, and uses all cores for large batches.

        Args:
            places: ``[n]``, all in this arena.
            out: ``n`` writable blocks of ``nbytes``; see :func:`blocks_of`.
            nbytes: Size of each page.
            verify: Whether to check the checksums of those pages that have one.

        Returns:
            What came of each page. The content of a block whose page is not ``OK`` is undefined.

        Raises:
            InvalidArgumentError: If the blocks do not suit.
        """
        if self._open is None:
            raise InvalidArgumentError("this arena is closed")
        table, rows = self._open
        blocks = blocks_of(out, len(places), nbytes, writable=True)
        return read_pages(table, rows, places, blocks, nbytes, verify=verify)

    def close(self) -> None:
        """Unmap, as soon as no read runs any more. Safe to repeat."""
        self._open = None


def map_pages(fd: int, pin_fd: int, shape: ArenaShape, slots: Slots, nbytes: int) -> list[Bytes]:
    """Pinned pages in place, without a copy: read-only arrays. The pin ends with the last of them.

    Args:
        fd: Of the slots, read-only; closed here, also on failure.
        pin_fd: The pin of these very pages.

    Raises:
        UnavailableError: If the kernel refuses the mapping.
    """
    slots = np.asarray(slots, np.int64)
    try:
        _check_slots(slots, nbytes, shape)
    except BaseException:
        close_quietly(fd)
        close_quietly(pin_fd)
        raise
    rows = _rows_of(map_private(fd, shape.nbytes, pin_fd), shape)
    rows.flags.writeable = False
    return [rows[slot, :nbytes] for slot in slots.tolist()]


def read_pages(
    table: PageTable, rows: Rows, places: PagePlaces, blocks: Blocks, nbytes: int, *, verify: bool
) -> States:
    """Copy pages out of an arena whose owner may free them at any moment; see :meth:`MappedArena.read_into`."""
    slots, generations, states = look(table, places, nbytes)
    ready: Slots | slice = slice(None)
    if states.any():
        ready = np.flatnonzero(states == OK)
        slots, generations, blocks = slots[ready], generations[ready], pick(blocks, ready)
    written = table.sums[slots]
    found = copy_out(rows, slots, blocks, nbytes, sums=verify)
    if verify:
        states[ready] = np.where((written != 0) & (written != found), CORRUPT, states[ready])
    fence()  # every byte was loaded before the stamps are looked at again
    states[ready] = np.where(table.readable(slots, generations), states[ready], TORN)
    return states


def look(table: PageTable, places: PagePlaces, nbytes: int) -> tuple[Slots, Generations, States]:
    """Before a copy: the slots, 0 for those that are none, their generations, and which are ``OK`` and which ``GONE``.

    Raises:
        InvalidArgumentError: If no page here can be so large.
    """
    if not 0 < nbytes <= table.shape.slot_bytes:
        raise InvalidArgumentError(f"pages of {nbytes} bytes are not in slots of {table.shape.slot_bytes}")
    slots, within = slots_of(places, table.shape)
    generations = np.ascontiguousarray(places["generation"])
    ready = table.readable(slots, generations)
    if within is not None:
        ready &= within
    fence()  # no byte is loaded before its stamp
    states: States = (~ready).view(np.uint8)  # OK is 0, and GONE 1
    return slots, generations, states


def _rows_of(mapping: mmap.mmap, shape: ArenaShape) -> Rows:
    return np.frombuffer(mapping, np.uint8, shape.nbytes).reshape(shape.slots, shape.slot_bytes)


def _map_table(fd: int, shape: ArenaShape) -> mmap.mmap:
    try:
        return mmap.mmap(fd, page_round(shape.table_bytes), flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    except (OSError, ValueError) as exc:
        error = exc if isinstance(exc, OSError) else OSError(str(exc))
        raise translate(error, f"cannot map the table of {shape.slots} page slots") from exc
    finally:
        close_quietly(fd)


def _check_slots(slots: Slots, nbytes: int, shape: ArenaShape) -> None:
    if not 0 < nbytes <= shape.slot_bytes:
        raise InvalidArgumentError(f"pages of {nbytes} bytes are not in slots of {shape.slot_bytes}")
    if len(slots) and (slots.min() < 0 or slots.max() >= shape.slots):
        raise InvalidArgumentError(f"slots go from 0 to {shape.slots - 1}")
