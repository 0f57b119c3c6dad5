"""Reading another process's device memory where it lies: ``cuda_ipc``, and the same over host memory.

The owner learns that a reader is gone, however it ended, by a pipe of which the reader holds an end. Until then the
memory is neither freed nor used again.
"""

from __future__ import annotations

import select
import threading
from collections.abc import Mapping, Sequence
from typing import Final

from tensorbus.clock import Deadline
from tensorbus.errors import CorruptError, InvalidArgumentError
from tensorbus.transport._blocks import Span
from tensorbus.transport._device import Device, DeviceBuffer, DeviceExport
from tensorbus.transport._device_ledger import host_array
from tensorbus.transport._fds import Fds, close_quietly
from tensorbus.transport._routes import Grant, Room
from tensorbus.transport._segments import new_pin

_NAMES: Final = {"host": "host_map", "cuda": "cuda_ipc"}


class DeviceServing:
    """Buffers of this process that others read. All methods may be called from any thread.

    Args:
        device: Of the buffers; not owned.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._pins: dict[int, tuple[DeviceBuffer, set[int]]] = {}
        self._lock = threading.Lock()

    def grant(self, buffer: DeviceBuffer) -> Grant:
        """Let one reader read a buffer whose content does not change any more. Who may is the caller's to know.

        Raises:
            TensorbusError: As :meth:`Device.export` does.
        """
        watched, pin = new_pin()
        with self._lock:
            try:
                export = self._device.export(buffer)
            except BaseException:
                close_quietly(watched)
                close_quietly(pin)
                raise
            self._pins.setdefault(buffer.serial, (buffer, set()))[1].add(watched)
        return Grant(export.header(), Fds([pin, *export.fds.take()]))

    def readers(self, buffer: DeviceBuffer) -> int:
        """How many still read a buffer. At none it is withdrawn, and can be freed."""
        with self._lock:
            _, pins = self._pins.get(buffer.serial, (buffer, set()))
            for pin in _ended(pins):
                pins.remove(pin)
                close_quietly(pin)
            if not pins and buffer.serial in self._pins:
                del self._pins[buffer.serial]
                self._device.withdraw(buffer)
            return len(pins)

    def close(self) -> None:
        """Watch no reader any more; what they read stays exported. Safe to repeat."""
        with self._lock:
            for _, pins in self._pins.values():
                for pin in pins:
                    close_quietly(pin)
            self._pins.clear()


class DeviceRoute:
    """The route to memory of the same device in another process. See :class:`Route`.

    Args:
        device: Opens what others export, and holds the destinations; not owned.
    """

    def __init__(self, device: Device) -> None:
        self.name = _NAMES[device.identity.partition(":")[0]]
        self._device = device

    def offer(self) -> Mapping[str, object] | None:
        return {"device": self._device.identity}

    def refuses(self, offer: Mapping[str, object], room: Room) -> str | None:
        if offer.get("device") != self._device.identity:
            return f"the bytes are on {offer.get('device')}, and this is {self._device.identity}"
        if isinstance(room, DeviceBuffer) and room.device != self._device.name:
            return f"the bytes are on {self._device.name} and go to {room.device}"
        return None

    def open(self, grant: Grant, *, deadline: Deadline) -> DeviceReader:
        fds = grant.fds.take()
        if not fds:
            raise CorruptError("a grant for device memory came without its pin")
        pin = Fds(fds[:1])
        try:
            return DeviceReader(self._device, self._device.open(DeviceExport.from_header(grant.header, fds[1:])), pin)
        except BaseException:
            pin.close()
            raise


class DeviceReader:
    """See :class:`RouteReader`. The buffer itself may be used too, until :meth:`close`.

    Attributes:
        buffer: The other process's memory, to read.
    """

    def __init__(self, device: Device, buffer: DeviceBuffer, pin: Fds) -> None:
        self.buffer = buffer
        self._device = device
        self._pin = pin

    def read(self, spans: Sequence[Span], room: Room, *, deadline: Deadline) -> None:
        host = None if isinstance(room, DeviceBuffer) else host_array(room, write=True)
        for at, size in spans:
            if at < 0 or size < 0 or at + size > (room.nbytes if host is None else host.nbytes):
                raise InvalidArgumentError(f"span {at}+{size} is not within {room.nbytes} bytes")
        with self._device.stream() as stream:  # whose end waits for the copies, also after an error
            for at, size in spans:
                if deadline.left() == 0:
                    raise deadline.error()
                if host is not None:
                    self._device.download(self.buffer, host[at : at + size], offset=at, stream=stream)
                elif isinstance(room, DeviceBuffer):
                    self._device.copy(self.buffer, room, nbytes=size, source_offset=at, target_offset=at, stream=stream)

    def close(self) -> None:
        if len(self._pin):
            self._device.free(self.buffer)
            self._pin.close()


def _ended(pins: set[int]) -> list[int]:
    """Those whose other end is closed in every process."""
    poll = select.poll()
    for pin in pins:
        poll.register(pin, 0)
    return [pin for pin, _ in poll.poll(0)]
