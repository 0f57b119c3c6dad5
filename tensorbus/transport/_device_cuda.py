"""A GPU's memory behind the device interface, through the CUDA runtime.

Each buffer has memory of its own, which its tenant may use again. Only so can it be exported alone: a handle of CUDA
opens the whole allocation that an address is in.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Final, Self

import numpy as np
import numpy.typing as npt

from tensorbus.errors import CorruptError, InvalidArgumentError, OutOfSpaceError, TensorbusError, UnavailableError
from tensorbus.transport._copy import default_threads
from tensorbus.transport._device import DeviceBuffer, DeviceExport, DeviceStream, HostMemory
from tensorbus.transport._device_cuda_stream import CudaStream
from tensorbus.transport._device_ledger import Ledger, check_apart, exported_here, host_array, this_process
from tensorbus.transport._device_runtime import (
    D2D,
    D2H,
    H2D,
    HOST_PORTABLE,
    IPC_HANDLE_BYTES,
    IPC_LAZY_PEER_ACCESS,
    Runtime,
    load_runtime,
    translated,
)
from tensorbus.transport._device_staging import StagingPlan
from tensorbus.transport._device_vram import Vram, VramPool

log = logging.getLogger("tensorbus.transport")

Bytes = npt.NDArray[np.uint8]

STREAMS_MAX: Final = 16
_COPY_THREADS_MAX: Final = 4


class CudaDevice:
    """VRAM as a :class:`Device`. Making one begins to use the GPU, which takes up to seconds.

    Args:
        ordinal: Which of the GPUs that this process sees.
        keep_bytes: So much freed memory is kept for its tenant's next buffers; allocating anew stops the GPU's work.
        staging: Page-locked memory of each stream that copies from or to memory that is not locked.
        threads: To copy between such memory and staging.
        runtime: The runtime's calls; cupy's when ``None``.

    Raises:
        UnavailableError: If cupy, a driver or the GPU is missing.
    """

    exports_outlive = False

    def __init__(
        self,
        ordinal: int = 0,
        *,
        keep_bytes: int = 1 << 30,
        staging: StagingPlan | None = None,
        threads: int | None = None,
        runtime: Runtime | None = None,
    ) -> None:
        self.runtime = runtime or load_runtime()
        self.name = f"cuda:{ordinal}"
        self._ordinal = ordinal
        self._pid = os.getpid()
        self._ledger = Ledger(self.name)
        self._plan = staging or StagingPlan()
        self._threads = threads or min(_COPY_THREADS_MAX, default_threads())
        self._lock = threading.Lock()
        self._pool = VramPool(self.runtime, keep_bytes=keep_bytes)
        self._memories: dict[int, Vram] = {}
        self._streams: dict[int, CudaStream] = {}
        self._page_locks: list[CudaPageLock] = []
        self.enter()
        with translated(f"looking at {self.name}"):
            about = self.runtime.getDeviceProperties(ordinal)
            bus = self.runtime.deviceGetPCIBusId(ordinal)
        self.identity = f"cuda:{bytes(about.get('uuid', b'')).hex()}@{bus}"
        self.capacity_bytes = int(about["totalGlobalMem"])
        self.description = f"{_text(about['name'])}, {self.capacity_bytes >> 20} MiB, at {bus}"
        self._own = CudaStream(self, self._plan, threads=self._threads)

    def free_bytes(self) -> int:
        self.enter()
        with translated(f"asking {self.name} for its free memory"):
            free, _ = self.runtime.memGetInfo()
        return free + self._pool.idle_bytes

    def allocate(self, nbytes: int, *, tenant: str) -> DeviceBuffer:
        self.enter()
        if nbytes < 0:
            raise InvalidArgumentError(f"a buffer cannot have {nbytes} bytes")
        try:
            memory = self._pool.take(nbytes, tenant, stream=self._own.handle)
        except OutOfSpaceError as error:
            free = self.free_bytes()
            raise self._ledger.out_of_space(nbytes, free=free, capacity=self.capacity_bytes) from error
        buffer = DeviceBuffer(device=self.name, nbytes=nbytes, address=memory.address, tenant=tenant)
        with self._lock:
            self._memories[buffer.serial] = memory
        return self._ledger.add(buffer)

    def free(self, buffer: DeviceBuffer) -> None:
        self.enter()
        self._ledger.remove(buffer)
        self._wait_for(buffer)
        if buffer.owner is not None:
            return
        if buffer.imported:
            with translated("letting go of imported memory"):
                self.runtime.ipcCloseMemHandle(buffer.address)
            return
        with self._lock:
            memory = self._memories.pop(buffer.serial)
        self._pool.put(memory)

    def stream(self) -> CudaStream:
        self.enter()
        with self._lock:
            if len(self._streams) >= STREAMS_MAX:
                raise OutOfSpaceError(f"{self.name} has {STREAMS_MAX} streams open, and no more are allowed")
            stream = CudaStream(self, self._plan, threads=self._threads)
            self._streams[stream.handle] = stream
            return stream

    def upload(
        self, source: HostMemory, target: DeviceBuffer, *, offset: int = 0, stream: DeviceStream | None = None
    ) -> None:
        data = host_array(source)
        with self._on(stream) as on, translated("copying to the device", asked_bytes=data.nbytes):
            address = self._ledger.check(target, offset, data.nbytes, write=True)
            if self._is_locked(data):
                on.keep(target, memory=data)
                on.copy(address, data.ctypes.data, data.nbytes, H2D)
            elif data.nbytes:
                on.keep(target)
                on.stage_up(data, address)

    def download(
        self, source: DeviceBuffer, target: HostMemory, *, offset: int = 0, stream: DeviceStream | None = None
    ) -> None:
        room = host_array(target, write=True)
        with self._on(stream) as on, translated("copying from the device", asked_bytes=room.nbytes):
            address = self._ledger.check(source, offset, room.nbytes)
            if self._is_locked(room):
                on.keep(source, memory=room)
                on.copy(room.ctypes.data, address, room.nbytes, D2H)
            elif room.nbytes:
                on.keep(source)
                on.stage_down(address, room)

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
        with self._on(stream) as on, translated("copying within the device"):
            first = self._ledger.check(source, source_offset, nbytes)
            second = self._ledger.check(target, target_offset, nbytes, write=True)
            check_apart(source, target, source_offset, target_offset, nbytes)
            if nbytes:
                on.keep(source, target)
                on.copy(second, first, nbytes, D2D)

    def lock(self, memory: HostMemory) -> CudaPageLock:
        self.enter()
        array = host_array(memory, write=True)  # a private map would be copied page by page, so maps to read are not
        if not array.nbytes:
            raise InvalidArgumentError("there is nothing to lock")
        with translated("locking host memory", asked_bytes=array.nbytes):
            self.runtime.hostRegister(array.ctypes.data, array.nbytes, HOST_PORTABLE)
        made = CudaPageLock(self, array)
        with self._lock:
            self._page_locks.append(made)
        return made

    def export(self, buffer: DeviceBuffer) -> DeviceExport:
        self.enter()
        self._ledger.exported(buffer)
        try:
            self._wait_for(buffer)
            with translated("exporting memory"):
                handle = self.runtime.ipcGetMemHandle(buffer.address)
        except BaseException:
            buffer.exports -= 1
            raise
        self._memories[buffer.serial].shared = True
        return DeviceExport(
            device=self.identity, process=this_process(), serial=buffer.serial, nbytes=buffer.nbytes, handle=handle
        )

    def withdraw(self, buffer: DeviceBuffer) -> None:
        self._ledger.withdrawn(buffer)

    def open(self, export: DeviceExport) -> DeviceBuffer:
        export.fds.close()
        self.enter()
        if export.device != self.identity:
            raise UnavailableError(f"the export is of {export.device}, not of {self.identity}")
        if len(export.handle) != IPC_HANDLE_BYTES:
            raise CorruptError(f"a handle of CUDA memory has {len(export.handle)} bytes instead of {IPC_HANDLE_BYTES}")
        owner = exported_here(export)  # the runtime refuses to open what its own process exported
        if owner is not None:
            address = owner.address
        else:
            with translated("opening exported memory", opening=True):
                address = self.runtime.ipcOpenMemHandle(export.handle, IPC_LAZY_PEER_ACCESS)
        return self._ledger.add(
            DeviceBuffer(device=self.name, nbytes=export.nbytes, address=address, imported=True, owner=owner)
        )

    def synchronize(self) -> None:
        self.enter()
        for stream in self._all_streams():
            stream.synchronize()

    def close(self) -> None:
        if self._ledger.closed or os.getpid() != self._pid:
            return
        _tried(f"waiting for {self.name}", self.synchronize)
        left = self._ledger.close()
        for stream in self._all_streams():
            stream.closed = True
            _tried("ending a stream", stream.destroy)
        for lock in self._page_locks:
            _tried("unlocking host memory", lock.unregister)
        for buffer in left:
            if buffer.imported and buffer.owner is None:
                _tried("letting go of imported memory", self.runtime.ipcCloseMemHandle, buffer.address)
        for memory in self._memories.values():
            _tried("freeing memory", self._pool.give_back, memory)
        _tried("freeing memory", self._pool.trim)
        self._streams.clear()
        self._page_locks.clear()
        self._memories.clear()

    # -- for streams and locks ----------------------------------------------------------------------------------------

    def enter(self) -> None:
        """Make the device the calling thread's own.

        Raises:
            UnavailableError: If it is closed, or this is a forked child of the process that made it.
        """
        self._ledger.check_open()
        if os.getpid() != self._pid:
            raise UnavailableError(f"{self.name} cannot be used in a forked child; start a new process")
        with translated(f"turning to {self.name}"):
            self.runtime.setDevice(self._ordinal)

    def forget(self, stream: CudaStream) -> None:
        with self._lock:
            self._streams.pop(stream.handle, None)

    def unlock(self, lock: CudaPageLock) -> None:
        """End a lock, after the copies that use its memory."""
        if self._ledger.closed:
            return
        with self._lock:
            self._page_locks.remove(lock)
        self.synchronize()
        lock.unregister()

    # -- copies -------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _on(self, stream: DeviceStream | None) -> Iterator[CudaStream]:
        """The stream to copy on, with its lock; without one of the caller's, wait for the end."""
        on = self._own if stream is None else stream
        if not isinstance(on, CudaStream) or on.device is not self:
            raise InvalidArgumentError("the stream is of another device")
        on.enter()
        with on.lock:
            yield on
        if stream is None:
            on.synchronize()

    def _all_streams(self) -> list[CudaStream]:
        with self._lock:
            return [self._own, *self._streams.values()]

    def _wait_for(self, buffer: DeviceBuffer) -> None:
        for stream in self._all_streams():
            if stream.uses(lambda use: any(one is buffer or one.owner is buffer for one in use.buffers)):
                stream.synchronize()

    def _is_locked(self, array: Bytes) -> bool:
        low, high = array.ctypes.data, array.ctypes.data + array.nbytes
        with self._lock:
            return array.nbytes > 0 and any(lock.low <= low and high <= lock.high for lock in self._page_locks)


class CudaPageLock:
    """See :class:`PageLock`."""

    def __init__(self, device: CudaDevice, memory: Bytes) -> None:
        self.low = memory.ctypes.data
        self.high = self.low + memory.nbytes
        self._device = device
        self._memory: Bytes | None = memory

    def release(self) -> None:
        if self._memory is not None:
            self._device.unlock(self)

    def unregister(self) -> None:
        """Tell the runtime; nothing may use the memory any more."""
        self._memory = None
        with translated("unlocking host memory"):
            self._device.runtime.hostUnregister(self.low)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def cuda_devices(runtime: Runtime | None = None) -> int:
    """How many GPUs this process sees; none is no error.

    Raises:
        UnavailableError: If cupy or a driver is missing.
    """
    with translated("counting CUDA devices"):
        return (runtime or load_runtime()).getDeviceCount()


def _tried(what: str, work: Callable[..., object], *args: object) -> None:
    """Do a step of closing; a device that is broken must not keep the others from being done."""
    try:
        with translated(what):
            work(*args)
    except TensorbusError as error:
        log.warning("closing a device: %s", error)


def _text(name: object) -> str:
    return name.decode("utf-8", "replace") if isinstance(name, bytes) else str(name)
