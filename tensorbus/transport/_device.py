"""Memory that tensors live in, wherever that is: one small interface, with a host and a CUDA implementation.

Blocking calls: whoever owns a device calls it from threads of its own, never from an event loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import count
from types import TracebackType
from typing import Final, Protocol, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from tensorbus.errors import CorruptError
from tensorbus.transport._fds import Fds

HostMemory: TypeAlias = bytes | bytearray | memoryview | npt.NDArray[np.uint8]

HANDLE_BYTES_MAX: Final = 256
_SERIALS = count(1)


@dataclass(eq=False, slots=True, kw_only=True, weakref_slot=True)
class DeviceBuffer:
    """A range of a device's memory, from :meth:`Device.allocate` or :meth:`Device.open` until :meth:`Device.free`.

    Attributes:
        device: Name of the device, in this process.
        serial: Names the buffer in this process; never used twice.
        nbytes: What was asked for.
        address: Where it begins, for libraries that take pointers; those of a GPU mean nothing to the host.
        tenant: Whose bytes are in it; empty for a buffer of another process.
        imported: Whether it belongs to another owner, and may only be read.
        owner: Of an imported buffer that is this very process's own: the buffer that was exported.
        exports: So often it was exported since it was made or :meth:`Device.withdraw` was called.
    """

    device: str
    nbytes: int
    address: int
    tenant: str = ""
    imported: bool = False
    owner: DeviceBuffer | None = None
    exports: int = 0
    freed: bool = False
    serial: int = field(default_factory=_SERIALS.__next__)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceExport:
    """What another process needs to open a buffer. Its header travels as JSON, its descriptors beside it.

    Attributes:
        device: Identity of the device (:attr:`Device.identity`).
        process: Of the exporter (:func:`this_process`).
        serial: Of the buffer, in that process.
        nbytes: Its length.
        handle: What the device's driver made, for the driver; empty where descriptors say all.
        fds: Owned by the export until they are taken: by sending them, or by :meth:`Device.open`.
    """

    device: str
    process: str
    serial: int
    nbytes: int
    handle: bytes = b""
    fds: Fds = field(default_factory=Fds, compare=False)

    def header(self) -> dict[str, object]:
        """All but the descriptors, as JSON values."""
        return {
            "device": self.device,
            "process": self.process,
            "serial": self.serial,
            "nbytes": self.nbytes,
            "handle": self.handle.hex(),
        }

    @classmethod
    def from_header(cls, header: Mapping[str, object], fds: Iterable[int] = ()) -> DeviceExport:
        """What :meth:`header` wrote, with the descriptors that came along; they are owned from here on.

        Raises:
            CorruptError: If the peer sent something else.
        """
        owned = Fds(fds)
        device, process = header.get("device"), header.get("process")
        serial, nbytes, handle = header.get("serial"), header.get("nbytes"), header.get("handle")
        texts = isinstance(device, str) and isinstance(process, str) and isinstance(handle, str)
        if not texts or not _is_size(serial) or not _is_size(nbytes) or len(str(handle)) > 2 * HANDLE_BYTES_MAX:
            owned.close()
            raise CorruptError("an export of device memory is not as it should be")
        try:
            data = bytes.fromhex(str(handle))
        except ValueError as exc:
            owned.close()
            raise CorruptError("an export of device memory has a handle that is not hexadecimal") from exc
        return cls(
            device=str(device), process=str(process), serial=int(str(serial)), nbytes=int(str(nbytes)), handle=data,
            fds=owned,
        )  # fmt: skip


class DeviceStream(Protocol):
    """Copies that happen one after the other. One thread at a time uses it."""

    def synchronize(self) -> None:
        """Wait until all copies so far are done."""
        ...

    def done(self) -> bool:
        """Whether all copies so far are done, without waiting."""
        ...

    def after(self, other: DeviceStream) -> None:
        """Begin no further copy before what the other stream was given so far is done. Does not wait."""
        ...

    def close(self) -> None:
        """Wait, then give up the stream. Safe to repeat."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class PageLock(Protocol):
    """Host memory that the device copies from and to without a detour."""

    def release(self) -> None:
        """Wait for copies that use it and end it. Safe to repeat."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Device(Protocol):
    """Memory in one place, and the ways in and out of it. All methods may be called from any thread and may block.

    Copies without a stream are done when the call returns. On a stream they may still be under way: until it was
    synchronized nobody may write to what is read or touch what is written. The stream keeps both alive.

    Errors, wherever they fit: InvalidArgumentError for ranges that are not within a buffer, and for buffers and streams
    of another device; ExpiredError for a buffer that was freed; UnavailableError for a device that is closed or broken.

    Attributes:
        name: In this process: ``host``, ``cuda:0``.
        identity: Of the hardware, the same in every process that can open its exports.
        description: For people.
        capacity_bytes: All of its memory, used or not.
        exports_outlive: Whether what was opened stays readable when the exporter's process ends.
    """

    name: str
    identity: str
    description: str
    capacity_bytes: int
    exports_outlive: bool

    def free_bytes(self) -> int:
        """What could be allocated now, as far as one can tell: others use the same memory."""
        ...

    def allocate(self, nbytes: int, *, tenant: str) -> DeviceBuffer:
        """Memory with undefined content. What a buffer of another tenant held never appears in it.

        Raises:
            OutOfSpaceError: If there is no room; the details say who holds how much.
        """
        ...

    def free(self, buffer: DeviceBuffer) -> None:
        """Wait for copies that use a buffer and end it; an imported one is let go of.

        Raises:
            ConflictError: If it is exported: somebody may be reading it (see :meth:`withdraw`).
        """
        ...

    def stream(self) -> DeviceStream:
        """A new stream, for its owner to close.

        Raises:
            OutOfSpaceError: If there are too many.
        """
        ...

    def upload(
        self, source: HostMemory, target: DeviceBuffer, *, offset: int = 0, stream: DeviceStream | None = None
    ) -> None:
        """Copy all of ``source``, contiguous host memory, over a buffer from ``offset`` on.

        Raises:
            DeniedError: If the buffer is imported.
        """
        ...

    def download(
        self, source: DeviceBuffer, target: HostMemory, *, offset: int = 0, stream: DeviceStream | None = None
    ) -> None:
        """Fill ``target``, contiguous and writable host memory, from a buffer, beginning at ``offset``."""
        ...

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
        """Copy between buffers of this device; within one buffer the ranges must not overlap.

        Raises:
            DeniedError: If the target is imported.
        """
        ...

    def lock(self, memory: HostMemory) -> PageLock:
        """Have copies from and to this host memory go at the link's full rate. Slow to make: for memory that is reused.

        Raises:
            ConflictError: If some of it is locked; OutOfSpaceError: If the machine allows no more of it.
        """
        ...

    def export(self, buffer: DeviceBuffer) -> DeviceExport:
        """Let other processes on this machine read a buffer. Only to those it belongs to: whoever opens it sees all.

        The owner keeps its content as it is until it knows that nobody reads it any more.

        Raises:
            DeniedError: If the buffer is imported; UnavailableError: If the device cannot.
        """
        ...

    def withdraw(self, buffer: DeviceBuffer) -> None:
        """The owner says that nobody has the buffer open any more, or may be harmed by its end. Now it can be freed."""
        ...

    def open(self, export: DeviceExport) -> DeviceBuffer:
        """Map what another process exported, for reading; :meth:`free` lets go of it. Takes the export's descriptors.

        The exporter's own process gets the very memory.

        Raises:
            ExpiredError: If the buffer or its process is gone; UnavailableError: If it is memory of another device.
            CorruptError: If the export does not fit the memory that came with it.
        """
        ...

    def synchronize(self) -> None:
        """Wait until all copies on all streams are done."""
        ...

    def close(self) -> None:
        """Free all that is left, exported or not, and end the streams. Safe to repeat."""
        ...


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63
