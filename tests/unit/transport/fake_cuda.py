"""The CUDA runtime without a GPU, as late as it may be: copies happen when somebody waits for them, and not before.

What a real GPU would only sometimes punish is an assertion here: a slot reused too early, memory unlocked while a copy
needs it, a thread that did not choose its device, an address that is not one.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np
import numpy.typing as npt

from tensorbus.transport._device_runtime import D2D, D2H, H2D

NAMES = {1: "cudaErrorInvalidValue", 2: "cudaErrorMemoryAllocation", 400: "cudaErrorInvalidResourceHandle"}


class CudaRuntimeError(RuntimeError):
    """As cupy's: its number is in ``status``."""

    def __init__(self, status: int) -> None:
        super().__init__(f"{NAMES.get(status, 'cudaError')}: {status}")
        self.status = status


@dataclass(eq=False)
class Block:
    memory: npt.NDArray[np.uint8]
    live: bool = True

    @property
    def address(self) -> int:
        return self.memory.ctypes.data

    def covers(self, address: int, nbytes: int) -> bool:
        return self.live and self.address <= address and address + nbytes <= self.address + self.memory.nbytes


@dataclass(eq=False)
class Op:
    work: Callable[[], None]
    ranges: tuple[tuple[int, int], ...] = ()
    done: bool = False


@dataclass(eq=False)
class FakeCuda:
    """One GPU; several devices may share it, as processes do.

    Args:
        capacity: Bytes of memory.
        eager: Whether copies happen at once instead.
        pageable: Whether copies of memory that is not locked are allowed, as the real one slowly does.
    """

    capacity: int = 64 << 20
    eager: bool = False
    pageable: bool = False
    failures: dict[str, int] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    device: list[Block] = field(default_factory=list)
    host: list[Block] = field(default_factory=list)
    registered: dict[int, int] = field(default_factory=dict)
    streams: dict[int, list[Op]] = field(default_factory=dict)
    events: dict[int, Op | None] = field(default_factory=dict)
    handles: dict[bytes, Block] = field(default_factory=dict)
    opened: list[int] = field(default_factory=list)
    peak: int = 0

    def __post_init__(self) -> None:
        self._numbers = count(1000)
        self._chosen = threading.local()
        self._lock = threading.RLock()

    # -- the device ---------------------------------------------------------------------------------------------------

    def getDeviceCount(self) -> int:
        return 1

    def getDeviceProperties(self, device: int) -> dict[str, Any]:
        return {"name": b"Fake GPU", "totalGlobalMem": self.capacity, "uuid": b"\x01\x02\x00\x04"}

    def deviceGetPCIBusId(self, device: int) -> str:
        return "0000:01:00.0"

    def setDevice(self, device: int) -> None:
        self._call("setDevice", chosen=False)
        self._chosen.device = device

    def deviceSynchronize(self) -> None:
        self._call("deviceSynchronize")
        for stream in list(self.streams):
            self._run(stream)

    def memGetInfo(self) -> tuple[int, int]:
        self._call("memGetInfo")
        return self.capacity - self.used, self.capacity

    @property
    def used(self) -> int:
        return sum(block.memory.nbytes for block in self.device if block.live)

    # -- memory -------------------------------------------------------------------------------------------------------

    def malloc(self, size: int) -> int:
        self._call("malloc")
        with self._lock:
            if self.used + size > self.capacity:
                raise CudaRuntimeError(2)
            block = next((block for block in self.device if not block.live and block.memory.nbytes == size), None)
            if block is None:
                block = Block(np.full(size, 0xDD, np.uint8))
                self.device.append(block)
            block.live = True  # with what was in it before
            return block.address

    def free(self, ptr: int) -> None:
        self._call("free")
        for stream in list(self.streams):
            self._run(stream)
        self._block(self.device, ptr).live = False

    def hostAlloc(self, size: int, flags: int) -> int:
        self._call("hostAlloc")
        self.host.append(Block(np.zeros(size, np.uint8)))
        return self.host[-1].address

    def freeHost(self, ptr: int) -> None:
        self._call("freeHost")
        block = self._block(self.host, ptr)
        self._assert_unused(ptr, block.memory.nbytes)
        block.live = False

    def hostRegister(self, ptr: int, size: int, flags: int) -> None:
        self._call("hostRegister")
        if any(low < ptr + size and ptr < low + nbytes for low, nbytes in self.registered.items()):
            raise CudaRuntimeError(712)
        self.registered[ptr] = size

    def hostUnregister(self, ptr: int) -> None:
        self._call("hostUnregister")
        self._assert_unused(ptr, self.registered[ptr])
        del self.registered[ptr]

    def memcpyAsync(self, dst: int, src: int, size: int, kind: int, stream: int) -> None:
        self._call("memcpyAsync")
        self._assert_reached(dst, size, on_device=kind in (H2D, D2D))
        self._assert_reached(src, size, on_device=kind in (D2H, D2D))
        self._give(stream, Op(lambda: self._move(dst, src, size), ((dst, size), (src, size))))

    def memsetAsync(self, ptr: int, value: int, size: int, stream: int) -> None:
        self._call("memsetAsync")
        self._assert_reached(ptr, size, on_device=True)
        self._give(stream, Op(lambda: _set(ptr, value, size), ((ptr, size),)))

    # -- streams and events -------------------------------------------------------------------------------------------

    def streamCreateWithFlags(self, flags: int) -> int:
        self._call("streamCreateWithFlags")
        number = next(self._numbers)
        self.streams[number] = []
        return number

    def streamDestroy(self, stream: int) -> None:
        self._run(stream)
        del self.streams[stream]

    def streamSynchronize(self, stream: int) -> None:
        self._call("streamSynchronize")
        self._run(stream)

    def streamQuery(self, stream: int) -> int:
        self._call("streamQuery")
        with self._lock:
            if not self.streams[stream]:
                return 0
            self._run(stream, self.streams[stream][0])
            return 600

    def streamWaitEvent(self, stream: int, event: int) -> None:
        op = self.events[event]
        if op is not None:
            self._give(stream, Op(lambda: self._until(op)))

    def eventCreateWithFlags(self, flags: int) -> int:
        self._call("eventCreateWithFlags")
        number = next(self._numbers)
        self.events[number] = None
        return number

    def eventDestroy(self, event: int) -> None:
        del self.events[event]

    def eventRecord(self, event: int, stream: int) -> None:
        self.events[event] = Op(lambda: None)
        self._give(stream, self.events[event])

    def eventSynchronize(self, event: int) -> None:
        self._call("eventSynchronize")
        op = self.events[event]
        if op is not None:
            self._until(op)

    # -- exports ------------------------------------------------------------------------------------------------------

    def ipcGetMemHandle(self, ptr: int) -> bytes:
        self._call("ipcGetMemHandle")
        block = self._block(self.device, ptr)
        handle = ptr.to_bytes(64, "little")
        self.handles[handle] = block
        return handle

    def ipcOpenMemHandle(self, handle: bytes, flags: int) -> int:
        self._call("ipcOpenMemHandle")
        block = self.handles.get(handle)
        if block is None or not block.live:
            raise CudaRuntimeError(400)
        self.opened.append(block.address)
        return block.address

    def ipcCloseMemHandle(self, ptr: int) -> None:
        self._call("ipcCloseMemHandle")
        self.opened.remove(ptr)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _call(self, name: str, *, chosen: bool = True) -> None:
        assert not chosen or hasattr(self._chosen, "device"), f"{name} by a thread that chose no device"
        self.calls.append(name)
        status = self.failures.pop(name, None)
        if status is not None:
            raise CudaRuntimeError(status)

    def _give(self, stream: int, op: Op | None) -> None:
        assert op is not None
        with self._lock:
            self.streams[stream].append(op)
            self.peak = max(self.peak, sum(bool(one.ranges) for one in self.streams[stream]))
            if self.eager:
                self._run(stream)

    def _run(self, stream: int, last: Op | None = None) -> None:
        with self._lock:
            queue = self.streams[stream]
            while queue:
                op = queue.pop(0)
                op.work()
                op.done = True
                if op is last:
                    return

    def _until(self, op: Op) -> None:
        with self._lock:
            for stream, queue in list(self.streams.items()):
                if op in queue:
                    self._run(stream, op)
        assert op.done

    def _move(self, dst: int, src: int, size: int) -> None:
        ctypes.memmove(dst, src, size)

    def _block(self, blocks: list[Block], ptr: int) -> Block:
        found = [block for block in blocks if block.live and block.address == ptr]
        assert found, f"{ptr:#x} is not the beginning of an allocation"
        return found[0]

    def _assert_reached(self, ptr: int, size: int, *, on_device: bool) -> None:
        if on_device:
            assert any(block.covers(ptr, size) for block in self.device), "a copy beyond the device's memory"
            return
        if self.pageable:
            return
        registered = any(low <= ptr and ptr + size <= low + nbytes for low, nbytes in self.registered.items())
        assert registered or any(block.covers(ptr, size) for block in self.host), "a copy of memory that is pageable"

    def _assert_unused(self, ptr: int, size: int) -> None:
        for queue in self.streams.values():
            for op in queue:
                assert all(low >= ptr + size or low + nbytes <= ptr for low, nbytes in op.ranges), "still in use"


def _set(ptr: int, value: int, size: int) -> None:
    ctypes.memset(ptr, value, size)
