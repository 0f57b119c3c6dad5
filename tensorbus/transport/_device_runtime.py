"""The CUDA runtime as cupy wraps it: found late, typed narrowly, its errors translated where they enter."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Final, Protocol, cast

from tensorbus.errors import (
    ConflictError,
    CorruptError,
    ExpiredError,
    InvalidArgumentError,
    OutOfSpaceError,
    TensorbusError,
    UnavailableError,
)

INVALID_VALUE: Final = 1
OUT_OF_MEMORY: Final = 2
NOT_READY: Final = 600

H2D: Final = 1
D2H: Final = 2
D2D: Final = 3

STREAM_NON_BLOCKING: Final = 1
EVENT_BLOCKING_NO_TIMING: Final = 3
"""Whoever waits for it sleeps instead of turning in a loop."""
HOST_PORTABLE: Final = 1
IPC_LAZY_PEER_ACCESS: Final = 1
IPC_HANDLE_BYTES: Final = 64

_ALREADY_REGISTERED: Final = 712
_ECC_UNCORRECTABLE: Final = 214
_BAD_HANDLES: Final = frozenset({INVALID_VALUE, 201, 205, 400})
"""What opening a handle of memory that is gone is answered with, by driver: value, context, map, resource handle."""
_BROKEN: Final = frozenset({700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 720, 999})
"""After one of these, nothing works in the process any more."""


class Runtime(Protocol):
    """The calls of ``cupy.cuda.runtime`` that are used. Addresses, streams and events are numbers.

    All but ``setDevice``, ``ipc*``, queries and the making of streams and events let go of the interpreter's lock.
    """

    def getDeviceCount(self) -> int: ...
    def getDeviceProperties(self, device: int, /) -> dict[str, Any]: ...
    def deviceGetPCIBusId(self, device: int, /) -> str: ...
    def setDevice(self, device: int, /) -> None: ...
    def deviceSynchronize(self) -> None: ...
    def memGetInfo(self) -> tuple[int, int]: ...
    def malloc(self, size: int, /) -> int: ...
    def free(self, ptr: int, /) -> None: ...
    def hostAlloc(self, size: int, flags: int, /) -> int: ...
    def freeHost(self, ptr: int, /) -> None: ...
    def hostRegister(self, ptr: int, size: int, flags: int, /) -> None: ...
    def hostUnregister(self, ptr: int, /) -> None: ...
    def memcpyAsync(self, dst: int, src: int, size: int, kind: int, stream: int, /) -> None: ...
    def memsetAsync(self, ptr: int, value: int, size: int, stream: int, /) -> None: ...
    def streamCreateWithFlags(self, flags: int, /) -> int: ...
    def streamDestroy(self, stream: int, /) -> None: ...
    def streamSynchronize(self, stream: int, /) -> None: ...
    def streamQuery(self, stream: int, /) -> int: ...
    def streamWaitEvent(self, stream: int, event: int, /) -> None: ...
    def eventCreateWithFlags(self, flags: int, /) -> int: ...
    def eventDestroy(self, event: int, /) -> None: ...
    def eventRecord(self, event: int, stream: int, /) -> None: ...
    def eventSynchronize(self, event: int, /) -> None: ...
    def ipcGetMemHandle(self, ptr: int, /) -> bytes: ...
    def ipcOpenMemHandle(self, handle: bytes, flags: int, /) -> int: ...
    def ipcCloseMemHandle(self, ptr: int, /) -> None: ...


def load_runtime() -> Runtime:
    """The runtime of this machine.

    Raises:
        UnavailableError: If cupy is not installed, finds no driver, or there is no device; the message says which.
    """
    try:
        from cupy.cuda import runtime as found
    except ImportError as exc:
        raise UnavailableError(
            f"CUDA needs cupy: pip install 'tensorbus[cuda]', or tensorbus[cuda13] with CUDA 13 ({exc})"
        ) from exc
    runtime = cast("Runtime", found)
    with translated("looking for CUDA devices"):
        if runtime.getDeviceCount() == 0:
            raise UnavailableError("there is no CUDA device")
    return runtime


def cuda_missing() -> str | None:
    """Why CUDA cannot be used here, for people; ``None`` if it can."""
    try:
        load_runtime()
    except TensorbusError as error:
        return str(error)
    return None


@contextlib.contextmanager
def translated(what: str, *, opening: bool = False, asked_bytes: int = 0) -> Iterator[None]:
    """Raise errors of the runtime as ours.

    Args:
        what: What is being done, for the message.
        opening: Whether a handle of another process is being opened.
        asked_bytes: For an error about memory.
    """
    try:
        yield
    except RuntimeError as exc:
        status = getattr(exc, "status", None)
        if not isinstance(status, int):
            raise
        raise meaning(status, f"{what}: {exc}", opening=opening, asked_bytes=asked_bytes) from exc


def meaning(status: int, message: str, *, opening: bool = False, asked_bytes: int = 0) -> TensorbusError:
    """What a status of the CUDA runtime means to a caller."""
    if opening and status in _BAD_HANDLES:
        return ExpiredError(f"{message}; its owner freed it, is gone, or out of reach", status=status)
    if status == OUT_OF_MEMORY:
        return OutOfSpaceError(message, status=status, asked_bytes=asked_bytes)
    if status == _ECC_UNCORRECTABLE:
        return CorruptError(f"{message}; the device's memory is damaged", status=status)
    if status == _ALREADY_REGISTERED:
        return ConflictError(message, status=status)
    if status == INVALID_VALUE:
        return InvalidArgumentError(message, status=status)
    if status in _BROKEN:
        return UnavailableError(f"{message}; this process must be restarted to use the device again", status=status)
    return UnavailableError(message, status=status)
