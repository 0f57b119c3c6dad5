"""The machine's own memory behind the device interface: memfds, which other processes map."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import threading
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import numpy as np
import numpy.typing as npt

from tensorbus.errors import CorruptError, InvalidArgumentError, UnavailableError
from tensorbus.transport._copy import copy_and_hash
from tensorbus.transport._device import DeviceBuffer, DeviceExport, DeviceStream, HostMemory, PageLock
from tensorbus.transport._device_ledger import Ledger, check_apart, exported_here, host_array, this_process
from tensorbus.transport._fds import Fds, close_quietly
from tensorbus.transport._segments import Memory, page_round

Bytes = npt.NDArray[np.uint8]

_F_GET_SEALS: Final = 1034
_F_SEAL_SHRINK: Final = 0x02


class HostDevice:
    """DRAM as a :class:`Device`. Copies happen at once, also those on a stream.

    Args:
        capacity_bytes: How much of it may be allocated; the machine's memory when ``None``.
        threads: To copy with; as many as there are processors when ``None``.
    """

    exports_outlive = True

    def __init__(self, *, capacity_bytes: int | None = None, threads: int | None = None) -> None:
        self.name = "host"
        self.identity = f"host:{Path('/proc/sys/kernel/random/boot_id').read_text(encoding='ascii').strip()}"
        self.capacity_bytes = capacity_bytes or os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE
        self.description = f"{self.capacity_bytes >> 20} MiB of host memory"
        self._threads = threads
        self._ledger = Ledger(self.name)
        self._arrays: dict[int, Bytes] = {}
        self._memories: dict[int, Memory] = {}
        self._coming_bytes = 0
        self._lock = threading.Lock()

    def free_bytes(self) -> int:
        self._ledger.check_open()
        used = self._ledger.held_bytes() + self._coming_bytes
        return max(0, min(self.capacity_bytes - used, _available_bytes()))

    def allocate(self, nbytes: int, *, tenant: str) -> DeviceBuffer:
        self._ledger.check_open()
        if nbytes < 0:
            raise InvalidArgumentError(f"a buffer cannot have {nbytes} bytes")
        with self._lock:  # taken before its pages come, which takes long, and not twice meanwhile
            free = self.free_bytes()
            if nbytes > free:
                raise self._ledger.out_of_space(nbytes, free=free, capacity=self.capacity_bytes)
            self._coming_bytes += nbytes
        try:
            memory = Memory(page_round(nbytes))
            try:
                memory.prefault()
            except BaseException:
                memory.close()
                raise
            array = np.frombuffer(memory.map, dtype=np.uint8)[:nbytes]
            return self._add(array, DeviceBuffer(device=self.name, nbytes=nbytes, address=0, tenant=tenant), memory)
        finally:
            with self._lock:
                self._coming_bytes -= nbytes

    def free(self, buffer: DeviceBuffer) -> None:
        self._ledger.remove(buffer)
        self._drop(buffer)

    def stream(self) -> HostStream:
        self._ledger.check_open()
        return HostStream(self)

    def upload(
        self, source: HostMemory, target: DeviceBuffer, *, offset: int = 0, stream: DeviceStream | None = None
    ) -> None:
        data = host_array(source)
        self._ledger.check(target, offset, data.nbytes, write=True)
        self._check_stream(stream)
        self._copy(data, self._arrays[target.serial][offset : offset + data.nbytes])

    def download(
        self, source: DeviceBuffer, target: HostMemory, *, offset: int = 0, stream: DeviceStream | None = None
    ) -> None:
        room = host_array(target, write=True)
        self._ledger.check(source, offset, room.nbytes)
        self._check_stream(stream)
        self._copy(self._arrays[source.serial][offset : offset + room.nbytes], room)

    def copy(
        self,
        source: DeviceBuffer,
        target: DeviceBuffer,
        *,
        nbytes: int,
        source_offset: int = 0,
        target_offset: int = 0,
        stream: DeviceStream | None = None,
    ) -> None:
        self._ledger.check(source, source_offset, nbytes)
        self._ledger.check(target, target_offset, nbytes, write=True)
        self._check_stream(stream)
        check_apart(source, target, source_offset, target_offset, nbytes)
        data = self._arrays[source.serial][source_offset : source_offset + nbytes]
        self._copy(data, self._arrays[target.serial][target_offset : target_offset + nbytes])

    def lock(self, memory: HostMemory) -> PageLock:
        self._ledger.check_open()
        host_array(memory, write=True)
        return _NoLock()

    def export(self, buffer: DeviceBuffer) -> DeviceExport:
        self._ledger.exported(buffer)
        memory = self._memories[buffer.serial]
        memory.seal()
        fds = Fds([memory.reopen(writable=False)])
        return DeviceExport(
            device=self.identity, process=this_process(), serial=buffer.serial, nbytes=buffer.nbytes, fds=fds
        )

    def withdraw(self, buffer: DeviceBuffer) -> None:
        self._ledger.withdrawn(buffer)

    def open(self, export: DeviceExport) -> DeviceBuffer:
        try:
            self._ledger.check_open()
            if export.device != self.identity:
                raise UnavailableError(f"the export is of {export.device}, not of {self.identity}")
            here = exported_here(export)
            fds = export.fds.take()
        except BaseException:
            export.fds.close()
            raise
        try:
            if len(fds) != 1:
                raise CorruptError(f"an export of host memory came with {len(fds)} descriptors instead of one")
            array = _map(fds[0], export.nbytes)
        finally:
            for fd in fds:
                close_quietly(fd)
        buffer = DeviceBuffer(device=self.name, nbytes=export.nbytes, address=0, imported=True, owner=here)
        return self._add(array, buffer, None)

    def synchronize(self) -> None:
        self._ledger.check_open()

    def close(self) -> None:
        for buffer in self._ledger.close():
            self._drop(buffer)

    def _add(self, array: Bytes, buffer: DeviceBuffer, memory: Memory | None) -> DeviceBuffer:
        buffer.address = array.ctypes.data
        self._arrays[buffer.serial] = array
        if memory is not None:
            self._memories[buffer.serial] = memory
        return self._ledger.add(buffer)

    def _drop(self, buffer: DeviceBuffer) -> None:
        del self._arrays[buffer.serial]
        memory = self._memories.pop(buffer.serial, None)
        if memory is not None:
            memory.close()

    def _check_stream(self, stream: DeviceStream | None) -> None:
        if stream is not None and (not isinstance(stream, HostStream) or stream.device is not self):
            raise InvalidArgumentError("the stream is of another device")
        if isinstance(stream, HostStream):
            stream.check_open()

    def _copy(self, source: Bytes, target: Bytes) -> None:
        if source.nbytes:
            copy_and_hash([(source, target)], threads=self._threads, digests=False)


class HostStream:
    """Has nothing to wait for."""

    def __init__(self, device: HostDevice) -> None:
        self.device = device
        self._closed = False

    def check_open(self) -> None:
        if self._closed:
            raise InvalidArgumentError("the stream is closed")

    def synchronize(self) -> None:
        self.check_open()

    def done(self) -> bool:
        self.check_open()
        return True

    def after(self, other: DeviceStream) -> None:
        self.check_open()
        if not isinstance(other, HostStream) or other.device is not self.device:
            raise InvalidArgumentError("the other stream is of another device")
        other.check_open()

    def close(self) -> None:
        self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _NoLock:
    """Host memory needs no locking for copies within it."""

    def release(self) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


def _map(fd: int, nbytes: int) -> Bytes:
    """Map a peer's memfd for reading. One whose size could still shrink would kill whoever reads what went."""
    try:
        seals, size = fcntl.fcntl(fd, _F_GET_SEALS), os.fstat(fd).st_size
        if not seals & _F_SEAL_SHRINK or size < nbytes:
            raise CorruptError(f"an export of {nbytes} bytes came with {size} bytes of memory, seals {seals:#x}")
        mapping = mmap.mmap(fd, max(nbytes, 1), flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    except OSError as exc:
        raise CorruptError(f"an export of host memory came with a descriptor that cannot be mapped: {exc}") from exc
    return np.frombuffer(mapping, dtype=np.uint8)[:nbytes]


def _available_bytes() -> int:
    """What the kernel thinks could be had without swapping."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return os.sysconf("SC_AVPHYS_PAGES") * mmap.PAGESIZE
