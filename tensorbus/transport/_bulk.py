"""What both ends of a bulk connection share: messages on blocking sockets, blocks sent from and taken into memory."""

from __future__ import annotations

import errno
import socket
import ssl
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import xxhash

from tensorbus.errors import DeniedError, TensorbusError, UnavailableError
from tensorbus.transport._blocks import BLOCK_BYTES
from tensorbus.transport._bulk_frames import BlockHead, Message, Parser, encode_block_head, encode_message
from tensorbus.transport._page_copy import page_sum
from tensorbus.transport._tls import refused

_JOIN_BYTES: Final = 256 * 1024
_IOV_MAX: Final = 1024
"""The most pieces of memory that the kernel takes in one call."""
_PIECE_BYTES: Final = 512 * 1024
"""Hashed three times as fast as what comes from memory."""
_TIMEVAL = struct.Struct("@ll")
_LINGER = struct.Struct("@ii")


class LostError(UnavailableError):
    """The connection itself is gone, as opposed to an answer that something is unavailable."""


class StalledError(LostError):
    """The peer neither sent nor took a byte within the time given."""


class Wire:
    """Messages on a connected, blocking socket. One thread at a time uses it; :meth:`abort` may come from any.

    Waiting is bounded by the kernel's own timeouts, so that a receive of many megabytes is one system call.

    Args:
        sock: Owned by the wire.
        peer: Names the other side in errors.
        header_bytes_max: The largest message accepted.
        waits_max: How often in a row a wait may run out with only a part of what was waited for, before the peer counts
            as stalled: it must not keep a thread for ever by a byte now and then. ``None`` leaves it to a deadline.
    """

    def __init__(self, sock: socket.socket, *, peer: str, header_bytes_max: int, waits_max: int | None = None) -> None:
        sock.settimeout(None)
        self._waits_max = waits_max
        self._sock = sock
        self._timeout_s: float | None = None
        self._parser = Parser(header_bytes_max=header_bytes_max)
        self.peer = peer

    def set_timeout(self, seconds: float) -> None:
        """Bound each wait for the peer from now on."""
        if seconds == self._timeout_s:
            return
        whole = max(0.001, seconds)
        value = _TIMEVAL.pack(int(whole), int(whole % 1 * 1_000_000))
        try:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)
        except OSError as exc:
            raise self._translate(exc) from exc
        self._timeout_s = seconds

    def standing(self) -> bool:
        """Whether the peer has not hung up yet; does not wait, and takes nothing in."""
        try:
            return socket.socket.recv(self._sock, 1, socket.MSG_PEEK | socket.MSG_DONTWAIT) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False

    def limit(self, header_bytes_max: int) -> None:
        """Accept messages of up to that size from now on."""
        self._parser.header_bytes_max = header_bytes_max

    def send(self, header: Mapping[str, object], *, more: bool = False) -> None:
        """Send a message without bytes.

        Args:
            more: Whether something follows at once, so that the peer need not wake up for this.
        """
        self._send([memoryview(encode_message(header))], more=more)

    def send_block(self, head: BlockHead, views: Sequence[memoryview], *, more: bool = False) -> None:
        """Send a block from the memory it lies in; ``more`` as in :meth:`send`."""
        self._send([memoryview(encode_block_head(head)), *views], more=more)

    def recv(self) -> Message:
        """The next message; if it is the head of a block, :meth:`recv_into` takes its bytes.

        Raises:
            LostError: If the connection is gone; RemoteProtocolError: If the peer sent no message.
        """
        while True:
            data = bytearray(self._parser.wants)
            self.recv_into([memoryview(data)] if data else [])
            message = self._parser.take(data)
            if message is not None:
                return message

    def recv_block(self, views: Sequence[memoryview]) -> int:
        """Fill the views with the next bytes and give their checksum, taken of each piece while it is in the caches."""
        digest = xxhash.xxh3_64()
        for piece in _pieces(views):
            self.recv_into(piece)
            for view in piece:
                digest.update(view)
        return digest.intdigest()

    def recv_pages(self, pages: Sequence[memoryview]) -> list[int]:
        """Fill each of the pages, and give the checksum of each, taken while its bytes are in the caches."""
        sums: list[int] = []
        group = max(1, _PIECE_BYTES // max(1, len(pages[0]))) if pages else 1
        for start in range(0, len(pages), group):
            some = pages[start : start + group]
            if group == 1:
                sums.append(self.recv_block(some) or 1)
            else:
                self.recv_into(some)
                sums += [page_sum(page) for page in some]
        return sums

    def recv_into(self, views: Sequence[memoryview]) -> None:
        """Fill the views, none of them empty and no more than a block has, with the next bytes."""
        todo, waits = list(views), 0
        while todo:
            self._patient(waits)
            count, waits = self._recv_some(todo), waits + 1
            if count == 0:
                raise LostError(f"{self.peer} closed the connection within a transfer", peer=self.peer)
            todo = _rest(todo, count)

    def skip(self, nbytes: int) -> None:
        """Take in a block's bytes and forget them."""
        self.recv_into([memoryview(bytearray(min(nbytes, BLOCK_BYTES)))])

    def abort(self, *, at_once: bool = False) -> None:
        """Wake whoever waits on the connection and end it; the descriptor stays until :meth:`close`.

        Args:
            at_once: Throw away what is under way and tell the peer so. Without it a peer that is sending may wait for
                room that a closed reader never makes.
        """
        try:
            if at_once:
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER.pack(1, 0))
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)  # that of a TLS socket is not for another thread
        except OSError:
            return  # it never was connected, or is not any more

    def close(self) -> None:
        self._sock.close()

    def _send(self, views: list[memoryview], *, more: bool) -> None:
        """Send the views, one after the other."""
        todo, waits, flags = views, 0, socket.MSG_MORE if more else 0
        while todo:
            self._patient(waits)
            try:
                count, waits = self._sock.sendmsg(todo[:_IOV_MAX], (), flags), waits + 1
            except OSError as exc:
                raise self._translate(exc) from exc
            todo = _rest(todo, count)

    def _patient(self, waits: int) -> None:
        if self._waits_max is not None and waits > self._waits_max:
            raise StalledError(f"{self.peer} is too slow", peer=self.peer)

    def _recv_some(self, views: list[memoryview]) -> int:
        try:
            return self._sock.recvmsg_into(views, 0, socket.MSG_WAITALL)[0]
        except OSError as exc:
            raise self._translate(exc) from exc

    def _translate(self, exc: OSError) -> TensorbusError:
        if exc.errno in (errno.EAGAIN, errno.EWOULDBLOCK) or isinstance(exc, TimeoutError):
            return StalledError(f"{self.peer} made no progress in time", peer=self.peer)
        return LostError(f"the connection to {self.peer} broke: {exc.strerror or exc}", peer=self.peer)


def _rest(views: list[memoryview], count: int) -> list[memoryview]:
    """What is left of the views after so many bytes."""
    for number, view in enumerate(views):
        if count < len(view):
            return [view[count:], *views[number + 1 :]]
        count -= len(view)
    return []


def _pieces(views: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    """The views cut and grouped into pieces that fit a processor's own cache."""
    piece: list[memoryview] = []
    room = _PIECE_BYTES
    for view in views:
        while len(view) >= room:
            yield [*piece, view[:room]]
            view, piece, room = view[room:], [], _PIECE_BYTES
        if len(view):
            piece.append(view)
            room -= len(view)
    if piece:
        yield piece


class TlsWire(Wire):
    """The same over TLS, which knows neither many views at once nor the kernel's timeouts; its peers are members."""

    def __init__(self, sock: ssl.SSLSocket, *, peer: str, header_bytes_max: int) -> None:
        super().__init__(sock, peer=peer, header_bytes_max=header_bytes_max)
        self._tls = sock

    def set_timeout(self, seconds: float) -> None:
        try:
            self._tls.settimeout(max(0.001, seconds))
        except OSError as exc:
            raise self._translate(exc) from exc

    def _translate(self, exc: OSError) -> TensorbusError:
        if refused(exc):
            return DeniedError(f"{self.peer} does not accept this process's certificate: {exc}")
        return super()._translate(exc)

    def _send(self, views: list[memoryview], *, more: bool) -> None:
        """Small pieces are joined, or each would be a record of its own."""
        nbytes = sum(map(len, views))
        joined = [memoryview(b"".join(views))] if nbytes < _JOIN_BYTES * len(views) else views
        try:
            for data in joined:
                self._tls.sendall(data)
        except (OSError, ValueError) as exc:
            raise self._translate(self._last_word(exc)) from exc

    def _last_word(self, exc: OSError | ValueError) -> OSError:
        """Why the peer hung up, if it said so: it refuses a certificate once this side believes to be connected."""
        failed = exc if isinstance(exc, OSError) else OSError(str(exc))
        if isinstance(exc, TimeoutError):
            return failed  # it did not hang up
        try:
            self._tls.recv(1)
        except ssl.SSLError as said:
            return said if refused(said) else failed
        except (OSError, ValueError):
            pass
        return failed

    def _recv_some(self, views: list[memoryview]) -> int:
        try:
            return self._tls.recv_into(views[0])
        except (OSError, ValueError) as exc:
            raise self._translate(exc if isinstance(exc, OSError) else OSError(str(exc))) from exc
