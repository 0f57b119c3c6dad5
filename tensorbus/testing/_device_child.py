"""Another process with the same kind of device, for the contract: it reads what was exported, or exports itself.

``python -m tensorbus.testing._device_child <descriptor of a socket> <name of a device>``. Messages are JSON in packets
of their own, descriptors beside them.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from tensorbus.clock import Deadline, SystemClock
from tensorbus.errors import TensorbusError, from_wire, to_wire
from tensorbus.transport import (
    CudaDevice,
    Device,
    DeviceBuffer,
    DeviceExport,
    DeviceReader,
    DeviceRoute,
    Fds,
    Grant,
    HostDevice,
)

Bytes = npt.NDArray[np.uint8]

_PACKET_BYTES = 64 << 10
_WAIT_S = 60.0


def pattern(nbytes: int, seed: int) -> Bytes:
    """Bytes that tell where they are and whose they are."""
    return (np.arange(nbytes, dtype=np.uint64) * (2 * seed + 1) % 251).astype(np.uint8)


def content(device: Device, buffer: DeviceBuffer) -> Bytes:
    """All of a buffer."""
    room = np.empty(buffer.nbytes, np.uint8)
    device.download(buffer, room)
    return room


def new_device(name: str) -> Device:
    """``host`` or ``cuda:<ordinal>``."""
    return HostDevice() if name == "host" else CudaDevice(int(name.partition(":")[2]))


class Neighbour:
    """The other process. A context manager: at its end the process is gone.

    Args:
        device: Name of the device that it makes.
    """

    def __init__(self, device: str) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(_WAIT_S)
        with theirs:
            command = [sys.executable, "-m", __name__, str(theirs.fileno()), device]
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()])

    def read(self, export: DeviceExport) -> str:
        """The BLAKE3 of what it reads there; it keeps it open.

        Raises:
            TensorbusError: That the other process met.
        """
        return str(self._ask({"do": "read", "export": export.header()}, export.fds.take())[0]["digest"])

    def open_ns(self, export: DeviceExport) -> int:
        """How long opening took it."""
        return int(self._ask({"do": "open", "export": export.header()}, export.fds.take())[0]["open_ns"])

    def hold(self, grant: Grant) -> None:
        """Have it open a grant by :class:`DeviceRoute` and keep it."""
        self._ask({"do": "hold", "header": dict(grant.header)}, grant.fds.take())

    def write(self, export: DeviceExport) -> None:
        """Have it write there."""
        self._ask({"do": "write", "export": export.header()}, export.fds.take())

    def export(self, nbytes: int, seed: int) -> DeviceExport:
        """Have it fill a buffer with :func:`pattern` and export it."""
        reply, fds = self._ask({"do": "export", "nbytes": nbytes, "seed": seed})
        return DeviceExport.from_header(reply["export"], fds)

    def let_go(self) -> None:
        """Have it free all that it has open."""
        self._ask({"do": "let go"})

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(_WAIT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()
        try:
            self._process.wait(_WAIT_S)
        except subprocess.TimeoutExpired:
            self.kill()

    def _ask(self, question: Mapping[str, Any], fds: Iterable[int] = ()) -> tuple[dict[str, Any], list[int]]:
        _send(self._socket, question, fds)
        found = _receive(self._socket)
        if found is None:
            raise AssertionError(f"the other process ended with {self._process.wait(_WAIT_S)}")
        if "error" in found[0]:
            raise from_wire(found[0]["error"])
        return found


class _Child:
    def __init__(self, device: Device) -> None:
        self._device = device
        self._clock = SystemClock()
        self._open: list[DeviceBuffer] = []
        self._readers: list[DeviceReader] = []

    def answer(self, question: Mapping[str, Any], fds: list[int]) -> tuple[dict[str, Any], list[int]]:
        if question["do"] == "export":
            buffer = self._device.allocate(question["nbytes"], tenant="t")
            self._device.upload(pattern(question["nbytes"], question["seed"]), buffer)
            export = self._device.export(buffer)
            return {"export": export.header()}, export.fds.take()
        if question["do"] == "let go":
            while self._open:
                self._device.free(self._open.pop())
            while self._readers:
                self._readers.pop().close()
            return {}, []
        if question["do"] == "hold":
            grant = Grant(question["header"], Fds(fds))
            self._readers.append(DeviceRoute(self._device).open(grant, deadline=Deadline(_WAIT_S)))
            return {}, []
        began_ns = self._clock.now_ns()
        buffer = self._device.open(DeviceExport.from_header(question["export"], fds))
        self._open.append(buffer)
        if question["do"] == "open":
            return {"open_ns": self._clock.now_ns() - began_ns}, []
        if question["do"] == "write":
            self._device.upload(b"x", buffer)
        return {"digest": blake3(content(self._device, buffer).data).hexdigest()}, []


def _send(sock: socket.socket, message: Mapping[str, Any], fds: Iterable[int]) -> None:
    """Send descriptors that are ours, and close them."""
    owned = list(fds)
    try:
        socket.send_fds(sock, [json.dumps(message).encode()], owned)
    finally:
        for fd in owned:
            os.close(fd)


def _receive(sock: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    data, fds, _, _ = socket.recv_fds(sock, _PACKET_BYTES, 8)
    return (json.loads(data), fds) if data else None


def main(descriptor: int, name: str) -> None:
    with socket.socket(fileno=descriptor) as sock:
        device = new_device(name)
        child = _Child(device)
        while (asked := _receive(sock)) is not None:
            try:
                reply, fds = child.answer(*asked)
            except TensorbusError as error:
                reply, fds = {"error": to_wire(error)}, []
            _send(sock, reply, fds)
        device.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
