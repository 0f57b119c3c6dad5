"""A CUDA stream, the page-locked memory its copies pass through, and what they use until they are done."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

import numpy as np
import numpy.typing as npt

from tensorbus.errors import InvalidArgumentError
from tensorbus.transport._copy import copy_and_hash
from tensorbus.transport._device import DeviceBuffer, DeviceStream
from tensorbus.transport._device_runtime import (
    D2H,
    EVENT_BLOCKING_NO_TIMING,
    H2D,
    HOST_PORTABLE,
    NOT_READY,
    STREAM_NON_BLOCKING,
    Runtime,
    translated,
)
from tensorbus.transport._device_staging import Piece, Side, StagingPlan, download_steps, pieces

Bytes = npt.NDArray[np.uint8]

_PART_BYTES_MIN = 1 << 20


class StreamHome(Protocol):
    """What a stream needs of its device."""

    @property
    def runtime(self) -> Runtime: ...

    def enter(self) -> None:
        """Make the device the calling thread's own; raises if it cannot be used."""
        ...

    def forget(self, stream: CudaStream) -> None:
        """The stream was closed."""
        ...


@dataclass(eq=False, slots=True)
class _Slot:
    """Page-locked memory, and the event that says when the device is done with it."""

    address: int
    memory: Bytes
    event: int
    busy: bool = False

    def wait(self, runtime: Runtime) -> None:
        if self.busy:
            runtime.eventSynchronize(self.event)
            self.busy = False

    def used(self, runtime: Runtime, stream: int) -> None:
        runtime.eventRecord(self.event, stream)
        self.busy = True


@dataclass(frozen=True, slots=True, eq=False)
class _Use:
    """What a copy needs until it is done."""

    ticket: int
    buffers: Sequence[DeviceBuffer]
    memory: object


class CudaStream:
    """See :class:`DeviceStream`. Staging memory is taken at the first copy that needs it."""

    def __init__(self, device: StreamHome, plan: StagingPlan, *, threads: int) -> None:
        self.device = device
        self.closed = False
        self._plan = plan
        self._threads = threads
        self._slots: list[_Slot] = []
        self._next = 0
        self._uses: list[_Use] = []
        self._tickets = 0
        self.lock = threading.Lock()
        """Held while copies are noted and given to the runtime: who waits for those noted waits for those given."""
        with translated("making a stream"):
            self.handle = device.runtime.streamCreateWithFlags(STREAM_NON_BLOCKING)

    def synchronize(self) -> None:
        self.enter()
        with self.lock:
            given = self._tickets
        with translated("waiting for a stream"):
            self.device.runtime.streamSynchronize(self.handle)
        with self.lock:
            self._uses = [use for use in self._uses if use.ticket > given]

    def done(self) -> bool:
        self.enter()
        if self.device.runtime.streamQuery(self.handle) == NOT_READY:
            return False
        self.synchronize()  # which is quick now, lets go of what the copies used, and tells of an error
        return True

    def after(self, other: DeviceStream) -> None:
        self.enter()
        if not isinstance(other, CudaStream) or other.device is not self.device:
            raise InvalidArgumentError("the other stream is of another device")
        other.enter()
        runtime = self.device.runtime
        with translated("ordering streams"):
            event = runtime.eventCreateWithFlags(EVENT_BLOCKING_NO_TIMING)
            try:
                runtime.eventRecord(event, other.handle)
                runtime.streamWaitEvent(self.handle, event)
            finally:
                runtime.eventDestroy(event)  # the runtime keeps it as long as somebody waits for it

    def close(self) -> None:
        if self.closed:
            return
        try:
            self.synchronize()
        finally:
            self.closed = True
            self.device.forget(self)
            self.destroy()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- for the device -----------------------------------------------------------------------------------------------

    def enter(self) -> None:
        """Whether the stream can be used now, from this thread."""
        self.device.enter()
        if self.closed:
            raise InvalidArgumentError("the stream is closed")

    def uses(self, wanted: Callable[[_Use], bool]) -> bool:
        """Whether a copy that may still be under way uses such a thing."""
        with self.lock:
            return any(wanted(use) for use in self._uses)

    def keep(self, *buffers: DeviceBuffer, memory: object = None) -> None:
        """Note what the copies to come need, before they begin. Under the lock, as all that follows."""
        self._tickets += 1
        self._uses.append(_Use(self._tickets, buffers, memory))

    def copy(self, target: int, source: int, nbytes: int, kind: int) -> None:
        """Give the device a copy between memory that it reaches by itself."""
        self.device.runtime.memcpyAsync(target, source, nbytes, kind, self.handle)

    def stage_up(self, data: Bytes, target: int) -> None:
        """Copy pageable memory to the device. It has been read when this returns; the device may still be writing."""
        runtime = self.device.runtime
        for piece in self._cut(data.nbytes):
            slot = self._slots[piece.slot]
            slot.wait(runtime)
            self._move(data[piece.offset : piece.offset + piece.nbytes], slot.memory[: piece.nbytes])
            self.copy(target + piece.offset, slot.address, piece.nbytes, H2D)
            slot.used(runtime, self.handle)

    def stage_down(self, source: int, room: Bytes) -> None:
        """Copy from the device to pageable memory. It is filled when this returns."""
        runtime = self.device.runtime
        for side, piece in download_steps(self._cut(room.nbytes), self._plan.slots):
            slot = self._slots[piece.slot]
            slot.wait(runtime)
            if side is Side.DEVICE:
                self.copy(slot.address, source + piece.offset, piece.nbytes, D2H)
                slot.used(runtime, self.handle)
            else:
                self._move(slot.memory[: piece.nbytes], room[piece.offset : piece.offset + piece.nbytes])

    def destroy(self) -> None:
        """Give everything back to the runtime, done or not."""
        runtime = self.device.runtime
        slots, self._slots = self._slots, []
        with translated("ending a stream"):
            for slot in slots:
                runtime.eventDestroy(slot.event)
                runtime.freeHost(slot.address)
            runtime.streamDestroy(self.handle)

    def _cut(self, nbytes: int) -> list[Piece]:
        while len(self._slots) < self._plan.slots:
            self._slots.append(self._new_slot())
        cut = pieces(nbytes, self._plan, first_slot=self._next)
        self._next = (self._next + len(cut)) % self._plan.slots
        return cut

    def _new_slot(self) -> _Slot:
        runtime, size = self.device.runtime, self._plan.slot_bytes
        event = runtime.eventCreateWithFlags(EVENT_BLOCKING_NO_TIMING)
        try:
            address = runtime.hostAlloc(size, HOST_PORTABLE)
        except BaseException:
            runtime.eventDestroy(event)
            raise
        return _Slot(address, np.frombuffer(memoryview((ctypes.c_uint8 * size).from_address(address)), np.uint8), event)

    def _move(self, source: Bytes, target: Bytes) -> None:
        """Copy within host memory, with several threads where that pays."""
        parts = max(1, min(self._threads, source.nbytes // _PART_BYTES_MIN))
        step = -(-source.nbytes // parts)
        jobs = [(source[at : at + step], target[at : at + step]) for at in range(0, source.nbytes, step)]
        copy_and_hash(jobs, threads=parts, digests=False)
