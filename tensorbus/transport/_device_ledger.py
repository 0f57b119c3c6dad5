"""What the implementations of a device share: accounts of its buffers, and checks of what callers pass."""

from __future__ import annotations

import os
import threading
import weakref
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tensorbus.errors import (
    ConflictError,
    DeniedError,
    ExpiredError,
    InvalidArgumentError,
    OutOfSpaceError,
    UnavailableError,
)
from tensorbus.transport._device import DeviceBuffer, DeviceExport, HostMemory


class Ledger:
    """The buffers of one device that are in use, and what may be done with them. For the implementations."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._live: dict[int, DeviceBuffer] = {}
        self._lock = threading.Lock()
        self._held: dict[str, int] = {}
        self.closed = False

    def add(self, buffer: DeviceBuffer) -> DeviceBuffer:
        with self._lock:
            self._live[buffer.serial] = buffer
            if not buffer.imported:
                self._held[buffer.tenant] = self._held.get(buffer.tenant, 0) + buffer.nbytes
        return buffer

    def check(self, buffer: DeviceBuffer, offset: int = 0, nbytes: int = 0, *, write: bool = False) -> int:
        """The address of a range of a buffer that may be used so."""
        self.check_live(buffer)
        if buffer.owner is not None and buffer.owner.freed:
            raise ExpiredError("the buffer was freed by its owner", buffer=buffer.serial)
        if offset < 0 or nbytes < 0 or offset + nbytes > buffer.nbytes:
            raise InvalidArgumentError(f"range {offset}+{nbytes} is not within {buffer.nbytes} bytes")
        if write and buffer.imported:
            raise DeniedError("an imported buffer is only for reading", buffer=buffer.serial)
        return buffer.address + offset

    def check_live(self, buffer: DeviceBuffer) -> None:
        """Whether a buffer is this device's and was not freed here."""
        self.check_open()
        if buffer.freed:
            raise ExpiredError("the buffer was freed", buffer=buffer.serial)
        if self._live.get(buffer.serial) is not buffer:
            raise InvalidArgumentError(f"the buffer is of {buffer.device!r}, and not of this device")

    def check_open(self) -> None:
        if self.closed:
            raise UnavailableError(f"the device {self._device} is closed")

    def remove(self, buffer: DeviceBuffer) -> None:
        """End a buffer.

        Raises:
            ConflictError: If it is exported.
        """
        with self._lock:
            self.check_live(buffer)
            if buffer.exports:
                raise ConflictError(
                    f"the buffer of {buffer.nbytes} bytes is exported and may be read by another process",
                    buffer=buffer.serial,
                    exports=buffer.exports,
                )
            buffer.freed = True
            del self._live[buffer.serial]
            if not buffer.imported:
                self._held[buffer.tenant] -= buffer.nbytes
                if not self._held[buffer.tenant]:
                    del self._held[buffer.tenant]

    def exported(self, buffer: DeviceBuffer) -> None:
        with self._lock:
            self.check_live(buffer)
            if buffer.imported:
                raise DeniedError("an imported buffer is not this process's to export", buffer=buffer.serial)
            buffer.exports += 1
            _EXPORTED[buffer.serial] = buffer

    def withdrawn(self, buffer: DeviceBuffer) -> None:
        with self._lock:
            self.check_live(buffer)
            buffer.exports = 0

    def close(self) -> list[DeviceBuffer]:
        """Take no further calls; gives the buffers that are left, which are freed from now on."""
        with self._lock:
            self.closed = True
            left = list(self._live.values())
            self._live.clear()
            self._held.clear()
            for buffer in left:
                buffer.freed = True
        return left

    def held_bytes(self) -> int:
        with self._lock:
            return sum(self._held.values())

    def out_of_space(self, asked: int, *, free: int, capacity: int) -> OutOfSpaceError:
        """The error that says who holds the space."""
        with self._lock:
            held = dict(self._held)
        here = sum(held.values())
        return OutOfSpaceError(
            f"{self._device} has no room for {asked} bytes: {free} of {capacity} are free, {here} held here",
            asked_bytes=asked,
            free_bytes=free,
            capacity_bytes=capacity,
            held_bytes=held,
        )


_EXPORTED: weakref.WeakValueDictionary[int, DeviceBuffer] = weakref.WeakValueDictionary()


def exported_here(export: DeviceExport) -> DeviceBuffer | None:
    """The buffer itself, if it was this process that exported it.

    Raises:
        ExpiredError: If it was, and has freed it.
    """
    if export.process != this_process():
        return None
    buffer = _EXPORTED.get(export.serial)
    if buffer is None or buffer.freed:
        raise ExpiredError("the exported buffer was freed", buffer=export.serial)
    return buffer


def this_process() -> str:
    """Names this process among all that ever ran on this machine, since it was started."""
    start = Path("/proc/self/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()[19]
    return f"{os.readlink('/proc/self/ns/pid')}-{os.getpid()}-{start}"


def host_array(memory: HostMemory, *, write: bool = False) -> npt.NDArray[np.uint8]:
    """Host memory as flat bytes, without a copy.

    Raises:
        InvalidArgumentError: If it is not contiguous, or read-only where it shall be written.
    """
    try:
        view: memoryview = memory.data if isinstance(memory, np.ndarray) else memoryview(memory)
        flat = np.frombuffer(view.cast("B") if view.nbytes else b"", dtype=np.uint8)
    except (TypeError, ValueError, BufferError) as exc:
        raise InvalidArgumentError(f"host memory must be contiguous bytes: {exc}") from exc
    if write and view.nbytes and not flat.flags.writeable:
        raise InvalidArgumentError("the host memory to fill is read-only")
    return flat


def check_apart(
    source: DeviceBuffer, target: DeviceBuffer, source_offset: int, target_offset: int, nbytes: int
) -> None:
    """Refuse a copy within one memory whose ranges overlap."""
    gap = source.address + source_offset - target.address - target_offset
    if nbytes and -nbytes < gap < nbytes:
        raise InvalidArgumentError("the ranges of a copy overlap", source_offset=source_offset, nbytes=nbytes)
