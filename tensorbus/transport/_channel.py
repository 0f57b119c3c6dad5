"""A channel carries frames between two ends; here the port and its form over a socket of the running loop."""

from __future__ import annotations

import array
import asyncio
import socket
import struct
from collections import deque
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from tensorbus.errors import TensorbusError, UnavailableError
from tensorbus.transport._fds import Fds
from tensorbus.transport._frames import (
    BODY_BYTES_MAX,
    FDS_MAX,
    BytesLike,
    Decoder,
    Frame,
    LocalProtocolError,
    RemoteProtocolError,
    encode,
)

_RECV_BYTES = 256 * 1024
_HIGH_WATER_BYTES = 1024 * 1024
_BACKLOG_FRAMES_MAX = 256
_IOV_MAX = 512
_FD_BYTES = array.array("i").itemsize


@dataclass(frozen=True, slots=True)
class PeerInfo:
    """Who is at the other end.

    ``pid`` and ``uid`` are the kernel's word (SO_PEERCRED) on a unix socket and ``None`` elsewhere.
    """

    address: str
    pid: int | None = None
    uid: int | None = None


class Channel(Protocol):
    """An ordered, reliable stream of frames. One task receives; any task sends."""

    @property
    def info(self) -> PeerInfo: ...

    @property
    def closed(self) -> bool: ...

    @property
    def passes_fds(self) -> bool: ...

    @property
    def owns_fds(self) -> bool:
        """Whether descriptors are real ones, that the channel closes."""
        ...

    def post(self, header: Mapping[str, object], body: BytesLike = b"", fds: Iterable[int] = ()) -> None:
        """As :meth:`send`, without waiting; the caller looks at :meth:`buffered`."""
        ...

    async def send(self, header: Mapping[str, object], body: BytesLike = b"", fds: Iterable[int] = ()) -> None:
        """Queue a frame, and wait while too much is queued.

        The channel owns ``fds`` from the call on, also if it fails, and closes them once they are sent.

        Raises:
            UnavailableError: If the channel is closed; LocalProtocolError: If it cannot carry the frame.
        """
        ...

    async def recv(self) -> Frame | None:
        """The next frame; ``None`` once the peer has closed in good order, or this side has.

        Raises:
            UnavailableError: If the connection broke; RemoteProtocolError: If the peer broke the format.
        """
        ...

    def buffered(self) -> int:
        """Bytes queued and not sent."""
        ...

    def close(self) -> None:
        """Drop what is queued and end both directions at once. Safe to repeat."""
        ...

    def __aiter__(self) -> AsyncIterator[Frame]: ...


def owned(fds: Iterable[int], *, as_owner: bool = True) -> Fds:
    """Take over descriptors, from a plain list or from another owner."""
    return Fds(fds.take() if isinstance(fds, Fds) else fds, owned=as_owner)


@dataclass(slots=True)
class _Outgoing:
    pieces: deque[memoryview]
    fds: Fds


class SocketChannel:
    """A :class:`Channel` over a connected stream socket, on the running loop's readiness callbacks.

    Args:
        sock: Connected; made non-blocking; owned by the channel from now on.
        body_bytes_max: Largest body that is sent or accepted.
        high_water_bytes: Queued bytes above which :meth:`send` waits.
    """

    def __init__(
        self, sock: socket.socket, *, body_bytes_max: int = BODY_BYTES_MAX, high_water_bytes: int = _HIGH_WATER_BYTES
    ) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._unix = sock.family == socket.AF_UNIX
        self._info = peer_info(sock)
        self._body_bytes_max = body_bytes_max
        self._high_water = high_water_bytes
        self._decoder = Decoder(body_bytes_max=body_bytes_max)
        self._outgoing: deque[_Outgoing] = deque()
        self._outgoing_bytes = 0
        self._incoming: deque[Frame] = deque()
        self._arrived = asyncio.Event()
        self._drained = asyncio.Event()
        self._drained.set()
        self._ended = False
        self._closed = False
        self._reading = False
        self._writing = False
        self._error: TensorbusError | None = None
        self._read(True)

    @property
    def info(self) -> PeerInfo:
        return self._info

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def passes_fds(self) -> bool:
        return self._unix

    @property
    def owns_fds(self) -> bool:
        return True

    def buffered(self) -> int:
        return self._outgoing_bytes

    def post(self, header: Mapping[str, object], body: BytesLike = b"", fds: Iterable[int] = ()) -> None:
        mine = owned(fds)
        try:
            self._queue(Frame(header=dict(header), body=body if isinstance(body, bytes) else bytes(body), fds=mine))
        except BaseException:
            mine.close()
            raise

    async def send(self, header: Mapping[str, object], body: BytesLike = b"", fds: Iterable[int] = ()) -> None:
        self.post(header, body, fds)
        while self._outgoing_bytes > self._high_water and not self._closed:
            self._drained.clear()
            await self._drained.wait()

    async def recv(self) -> Frame | None:
        while not self._incoming:
            if self._error is not None and not self._closed:
                raise self._error
            if self._ended or self._closed:
                return None
            self._arrived.clear()
            await self._arrived.wait()
        frame = self._incoming.popleft()
        if not self._ended and len(self._incoming) < _BACKLOG_FRAMES_MAX // 2:
            self._read(True)
        return frame

    async def __aiter__(self) -> AsyncIterator[Frame]:
        while (frame := await self.recv()) is not None:
            yield frame

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._read(False)
        self._write(False)
        for frame in self._incoming:
            frame.fds.close()
        self._incoming.clear()
        self._decoder.close()
        self._drop_outgoing()
        self._sock.close()
        self._arrived.set()

    def abandon(self) -> None:
        """In a forked child: close its copy of the socket, so that the peer sees the end of the parent's.

        Nothing else is touched: the event loop's poll set is still shared with the parent.
        """
        self._closed = True
        self._sock.close()

    def _queue(self, frame: Frame) -> None:
        if self._closed or self._error is not None:
            raise self._error or UnavailableError(f"the connection to {self._info.address} is closed")
        if len(frame.fds) and not self._unix:
            raise LocalProtocolError("descriptors travel over unix sockets only")
        pieces = deque(memoryview(piece) for piece in encode(frame, body_bytes_max=self._body_bytes_max))
        self._outgoing.append(_Outgoing(pieces=pieces, fds=frame.fds))
        self._outgoing_bytes += sum(len(piece) for piece in pieces)
        if not self._writing:
            self._on_writable()

    def _on_writable(self) -> None:
        try:
            while self._outgoing:
                self._sent(self._send_some())
        except (BlockingIOError, InterruptedError):
            self._write(True)
        except OSError as exc:
            self._fail(UnavailableError(f"the connection to {self._info.address} broke: {exc.strerror}"), exc)
        else:
            self._write(False)
        if self._outgoing_bytes <= self._high_water // 2:
            self._drained.set()

    def _send_some(self) -> int:
        first = self._outgoing[0]
        if len(first.fds):
            rights = array.array("i", first.fds)
            return self._sock.sendmsg(list(first.pieces), [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
        pieces: list[memoryview] = []
        for item in self._outgoing:
            if len(item.fds) or len(pieces) >= _IOV_MAX:
                break  # a frame with descriptors begins a message of its own
            pieces.extend(item.pieces)
        return self._sock.sendmsg(pieces)

    def _sent(self, count: int) -> None:
        self._outgoing_bytes -= count
        if count:
            self._outgoing[0].fds.close()
        while count:
            pieces = self._outgoing[0].pieces
            if count < len(pieces[0]):
                pieces[0] = pieces[0][count:]
                return
            count -= len(pieces.popleft())
            if not pieces:
                self._outgoing.popleft()

    def _on_readable(self) -> None:
        try:
            data, fds, truncated = self._recv_some()
        except (BlockingIOError, InterruptedError):
            return
        except OSError as exc:
            self._fail(UnavailableError(f"the connection to {self._info.address} broke: {exc.strerror}"), exc)
            return
        try:
            if not data:
                self._on_eof()
                return
            self._incoming.extend(self._decoder.feed(data, fds))
            if truncated:
                raise RemoteProtocolError("more descriptors came at once than a frame may carry")
            if self._decoder.error is not None:
                raise self._decoder.error
        except RemoteProtocolError as exc:
            self._fail(exc, None)
            return
        self._arrived.set()
        if len(self._incoming) >= _BACKLOG_FRAMES_MAX:
            self._read(False)

    def _on_eof(self) -> None:
        try:
            self._decoder.eof()
        except RemoteProtocolError as exc:
            # A peer that dies while it sends is gone, not wrong.
            self._fail(UnavailableError(f"{self._info.address} went away within a message"), exc)
        else:
            self._end()

    def _recv_some(self) -> tuple[bytes, list[int], bool]:
        if not self._unix:
            return self._sock.recv(_RECV_BYTES), [], False
        space = socket.CMSG_SPACE(FDS_MAX * _FD_BYTES)
        data, ancillary, flags, _ = self._sock.recvmsg(_RECV_BYTES, space, socket.MSG_CMSG_CLOEXEC)
        fds = array.array("i")
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds.frombytes(payload[: len(payload) - len(payload) % _FD_BYTES])
        return data, list(fds), bool(flags & socket.MSG_CTRUNC)

    def _end(self) -> None:
        self._ended = True
        self._read(False)
        self._arrived.set()

    def _fail(self, error: TensorbusError, cause: BaseException | None) -> None:
        if self._error is None:
            error.__cause__ = cause
            self._error = error
        self._drop_outgoing()
        self._write(False)
        self._end()

    def _drop_outgoing(self) -> None:
        for item in self._outgoing:
            item.fds.close()
        self._outgoing.clear()
        self._outgoing_bytes = 0
        self._drained.set()

    def _read(self, on: bool) -> None:
        if on and not self._reading:
            self._loop.add_reader(self._sock.fileno(), self._on_readable)
        elif not on and self._reading:
            self._loop.remove_reader(self._sock.fileno())
        self._reading = on

    def _write(self, on: bool) -> None:
        if on and not self._writing:
            self._loop.add_writer(self._sock.fileno(), self._on_writable)
        elif not on and self._writing:
            self._loop.remove_writer(self._sock.fileno())
        self._writing = on


def peer_info(sock: socket.socket) -> PeerInfo:
    """What the kernel knows of the other end of a connected socket."""
    if sock.family == socket.AF_UNIX:
        layout = struct.Struct("3i")
        pid, uid, _ = layout.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, layout.size))
        return PeerInfo(address=f"unix:pid={pid}", pid=pid, uid=uid)
    try:
        host, port = sock.getpeername()[:2]
    except OSError:
        return PeerInfo(address="gone")
    return PeerInfo(address=f"{host}:{port}")
