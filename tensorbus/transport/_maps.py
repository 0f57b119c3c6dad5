"""Mapping a segment that another process owns: private and pinned to read it, shared to fill it."""

from __future__ import annotations

import mmap
import os
import weakref

import numpy as np

from tensorbus.errors import TensorbusError, UnavailableError
from tensorbus.transport._fds import close_quietly
from tensorbus.transport._segments import PAGE_BYTES, populate_pages
from tensorbus.transport._sockets import translate


class PinnedMap(mmap.mmap):
    """A mapping that keeps its pin open as long as it lives: until the last array over it is gone, or the process.

    A forked child has its own copy of both, so it keeps the pin until its own copy is gone.
    """

    _unpin: weakref.finalize[[int], PinnedMap]

    def hold(self, pin_fd: int) -> None:
        """Own the pin from now on."""
        self._unpin = weakref.finalize(self, close_quietly, pin_fd)
        self._unpin.atexit = False  # the kernel closes it at the end of the process, and not a moment earlier

    def close(self) -> None:
        """Unmap and unpin.

        Raises:
            BufferError: If an array over the mapping is still in use; nothing is changed then.
        """
        super().close()
        self._unpin()


def map_private(fd: int, nbytes: int, pin_fd: int) -> PinnedMap:
    """Map a segment for reading, copy on write: what is written there is seen by nobody else.

    Args:
        fd: Of the segment, read-only; closed here, also on failure.
        nbytes: Length of the segment; a mapping has at least one byte.
        pin_fd: Kept open until the mapping is gone; closed on failure.

    Raises:
        UnavailableError: If the kernel refuses the mapping; DeniedError: If the segment is sealed against it.
    """
    return _map(fd, nbytes, pin_fd, flags=mmap.MAP_PRIVATE)


def map_shared(fd: int, nbytes: int, pin_fd: int) -> PinnedMap:
    """Map a segment to fill it; the owner sees every write. Arguments and errors as in :func:`map_private`."""
    return _map(fd, nbytes, pin_fd, flags=mmap.MAP_SHARED)


def map_shared_readonly(fd: int, nbytes: int, pin_fd: int) -> PinnedMap:
    """Map memory that its owner goes on changing, to copy from it. Arguments and errors as in :func:`map_private`."""
    return _map(fd, nbytes, pin_fd, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)


def populate(mapping: mmap.mmap, start: int, nbytes: int) -> None:
    """Have the pages of a part of a mapping backed now, which is faster than by the first touch of each.

    Blocks, without the interpreter's lock. The machine's lack of memory is an error here; at a touch it kills.

    Raises:
        OutOfSpaceError: If the machine has no memory for it.
    """
    first = start // PAGE_BYTES * PAGE_BYTES
    end = min(start + nbytes, len(mapping))
    if end > first:
        populate_pages(np.frombuffer(mapping, np.uint8).ctypes.data + first, end - first)


def _map(fd: int, nbytes: int, pin_fd: int, *, flags: int, prot: int = mmap.PROT_READ | mmap.PROT_WRITE) -> PinnedMap:
    try:
        if os.fstat(fd).st_size < nbytes:
            raise UnavailableError(f"a segment of {nbytes} bytes has only {os.fstat(fd).st_size}")
        mapping = PinnedMap(fd, max(nbytes, 1), flags=flags, prot=prot)
    except (OSError, ValueError) as exc:
        close_quietly(pin_fd)
        if isinstance(exc, TensorbusError) or not isinstance(exc, OSError):
            raise
        raise translate(exc, f"cannot map a segment of {nbytes} bytes") from exc
    except BaseException:
        close_quietly(pin_fd)
        raise
    finally:
        close_quietly(fd)
    mapping.hold(pin_fd)
    return mapping
