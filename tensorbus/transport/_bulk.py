"""What both ends of a bulk connection share: frames on blocking sockets, bodies streamed from and into memory."""

from __future__ import annotations

import errno
import socket
import struct
from collections.abc import Iterator, Mapping, Sequence

from tensorbus.errors import InvalidArgumentError, TensorbusError, UnavailableError
from tensorbus.transport._frames import PREFIX_BYTES, RemoteProtocolError, decode_header, decode_prefix, encode_head
from tensorbus.transport._segments import page_round

BULK_VERSION = 1
CHUNK_BYTES = 4 << 20
RANGES_MAX = 200_000
VIEWS_MAX = 512

_TIMEVAL = struct.Struct("@ll")
_LINGER = struct.Struct("@ii")


class LostError(UnavailableError):
    """The connection itself is gone, as opposed to an answer that something is unavailable."""


class StalledError(LostError):
    """The peer neither sent nor took a byte within the time given."""


class Wire:
    """Frames on a connected, blocking socket. One thread at a time uses it; :meth:`abort` may come from any.

    Waiting is bounded by the kernel's own timeouts, so that a receive of many megabytes is one system call.
    """

    def __init__(self, sock: socket.socket, *, peer: str) -> None:
        sock.settimeout(None)
        self._sock = sock
        self.peer = peer

    def set_timeout(self, seconds: float) -> None:
        """Bound each wait for the peer from now on."""
        whole = max(0.001, seconds)
        value = _TIMEVAL.pack(int(whole), int(whole % 1 * 1_000_000))
        try:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)
        except OSError as exc:
            raise self._translate(exc) from exc

    def send_head(self, header: Mapping[str, object], *, body_bytes: int = 0) -> None:
        """Send all of a frame but its body."""
        self.send_bytes(memoryview(encode_head(header, body_bytes=body_bytes)))

    def send_bytes(self, data: memoryview) -> None:
        try:
            self._sock.sendall(data)
        except OSError as exc:
            raise self._translate(exc) from exc

    def recv_head(self) -> tuple[dict[str, object], int]:
        """The next frame's header, and how many bytes of body follow.

        Raises:
            LostError: If the connection is gone; RemoteProtocolError: If the peer sent no frame.
        """
        prefix = decode_prefix(self._recv_exactly(PREFIX_BYTES))
        if prefix.fd_count:
            raise RemoteProtocolError("descriptors do not travel over TCP")
        return decode_header(prefix, self._recv_exactly(prefix.header_bytes)), prefix.body_bytes

    def recv_into(self, views: Sequence[memoryview]) -> None:
        """Fill up to :data:`VIEWS_MAX` views, none of them empty, with the next bytes of a body."""
        todo = list(views)
        while todo:
            try:
                count = self._sock.recvmsg_into(todo, 0, socket.MSG_WAITALL)[0]
            except OSError as exc:
                raise self._translate(exc) from exc
            if count == 0:
                raise LostError(f"{self.peer} closed the connection within a transfer", peer=self.peer)
            while todo and count >= len(todo[0]):
                count -= len(todo.pop(0))
            if count:
                todo[0] = todo[0][count:]

    def abort(self, *, at_once: bool = False) -> None:
        """Wake whoever waits on the connection and end it; the descriptor stays until :meth:`close`.

        Args:
            at_once: Throw away what is under way and tell the peer so. Without it a peer that is sending may wait for
                room that a closed reader never makes.
        """
        try:
            if at_once:
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER.pack(1, 0))
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # it never was connected, or is not any more

    def close(self) -> None:
        self._sock.close()

    def _recv_exactly(self, count: int) -> bytes:
        data = bytearray(count)
        if count:
            self.recv_into([memoryview(data)])
        return bytes(data)

    def _translate(self, exc: OSError) -> TensorbusError:
        if exc.errno in (errno.EAGAIN, errno.EWOULDBLOCK):
            return StalledError(f"{self.peer} made no progress in time", peer=self.peer)
        return LostError(f"the connection to {self.peer} broke: {exc.strerror or exc}", peer=self.peer)


def pieces(parts: Sequence[memoryview], offset: int, nbytes: int) -> list[memoryview]:
    """The bytes of a range over parts that are laid end to end, each rounded up to whole pages.

    What lies between the end of a part and its last page's end is given as zeros.

    Raises:
        InvalidArgumentError: If the range is not within the parts.
    """
    found: list[memoryview] = []
    start, end = 0, offset + nbytes
    for index, part in enumerate(parts):
        size = len(part) if index == len(parts) - 1 else page_round(len(part))
        low, high = max(offset, start), min(end, start + size)
        if low < high:
            data = part[low - start : high - start]
            found.append(data)
            if len(data) < high - low:
                found.append(memoryview(bytes(high - low - len(data))))
        start += size
    if offset < 0 or nbytes < 0 or end > start:
        raise InvalidArgumentError(f"range {offset}+{nbytes} is not within {start} bytes")
    return found


def batches(views: Sequence[memoryview]) -> Iterator[list[tuple[int, memoryview]]]:
    """The views cut and grouped for one system call each, with the index of the view that each piece is of."""
    batch: list[tuple[int, memoryview]] = []
    batch_bytes = 0
    for index, view in enumerate(views):
        start = 0
        while start < len(view):
            piece = view[start : start + CHUNK_BYTES - batch_bytes]
            batch.append((index, piece))
            batch_bytes += len(piece)
            start += len(piece)
            if batch_bytes == CHUNK_BYTES or len(batch) == VIEWS_MAX:
                yield batch
                batch, batch_bytes = [], 0
    if batch:
        yield batch
