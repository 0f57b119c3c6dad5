"""Listening and connecting: unix sockets at paths of any length, and TCP with what a control connection needs."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tensorbus.clock import Deadline
from tensorbus.errors import ConflictError, DeniedError, InvalidArgumentError, TensorbusError, UnavailableError
from tensorbus.transport._channel import SocketChannel
from tensorbus.transport._frames import BODY_BYTES_MAX

_BACKLOG = 512
_RETRY_S = 0.005
_SOCKET_NAME_BYTES_MAX = 64


class Listener:
    """A listening socket that gives a channel per connection.

    Args:
        sock: Bound and listening; owned by the listener.
        address: What to tell those who connect: a path, or ``host:port``.

    Attributes:
        port: The TCP port that was bound; 0 for a unix socket.
    """

    def __init__(self, sock: socket.socket, *, address: str, body_bytes_max: int, path: Path | None = None) -> None:
        sock.setblocking(False)
        self.address = address
        self.port = 0 if path is not None else int(sock.getsockname()[1])
        self._sock = sock
        self._body_bytes_max = body_bytes_max
        self._path = path
        self._made = None if path is None else _identity(path)

    async def accept(self) -> SocketChannel:
        """Wait for the next connection.

        Raises:
            UnavailableError: If the listener is closed.
        """
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(self._sock)
            except OSError as exc:
                if self._sock.fileno() < 0 or exc.errno == errno.EBADF:
                    raise UnavailableError(f"{self.address} is closed") from exc
                # Out of descriptors, or the peer is gone already: neither ends the service.
                await asyncio.sleep(_RETRY_S * 10)
                continue
            tune(sock)
            return SocketChannel(sock, body_bytes_max=self._body_bytes_max)

    def close(self) -> None:
        """Stop listening, and remove the socket's path if it is still ours. Safe to repeat."""
        self._sock.close()
        if self._path is not None and self._made is not None and _identity(self._path) == self._made:
            self._path.unlink(missing_ok=True)


async def listen_unix(path: str | Path, *, body_bytes_max: int = BODY_BYTES_MAX) -> Listener:
    """Listen at a path, for this user only.

    The path may be longer than the kernel's 108 bytes. A socket that nobody answers at any more is replaced.

    Raises:
        ConflictError: If somebody listens there; InvalidArgumentError: If the folder is missing or the name too long.
    """
    path = Path(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        with _short_path(path) as (short, folder):
            # Two starters must not both find the socket stale and remove each other's.
            fcntl.flock(folder, fcntl.LOCK_EX)
            _remove_stale(path, short)
            sock.bind(short)
            os.chmod(short, 0o600)  # nobody can connect before listen()
            sock.listen(_BACKLOG)
    except OSError as exc:
        sock.close()
        raise translate(exc, f"cannot listen at {path}") from exc
    except BaseException:
        sock.close()
        raise
    return Listener(sock, address=str(path), body_bytes_max=body_bytes_max, path=path)


async def connect_unix(path: str | Path, *, deadline: Deadline, body_bytes_max: int = BODY_BYTES_MAX) -> SocketChannel:
    """Connect to a unix socket, waiting within the deadline while its backlog is full.

    Raises:
        UnavailableError: If nobody listens there; DeniedError: If it belongs to another user.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        with _short_path(Path(path)) as (short, _):
            async with deadline.scope():
                while not _try_connect(sock, short):
                    await asyncio.sleep(_RETRY_S)
    except OSError as exc:
        sock.close()
        raise exc if isinstance(exc, TensorbusError) else translate(exc, f"nobody answers at {path}") from exc
    except BaseException:
        sock.close()
        raise
    return SocketChannel(sock, body_bytes_max=body_bytes_max)


async def listen_tcp(host: str, port: int = 0, *, body_bytes_max: int = BODY_BYTES_MAX) -> Listener:
    """Listen at an address; port 0 takes a free one (see :attr:`Listener.port`).

    Raises:
        ConflictError: If the port is taken; InvalidArgumentError: If the host is no address of this machine.
    """
    sock = bound_tcp(host, port)
    bound_host, bound_port = sock.getsockname()[:2]
    return Listener(sock, address=f"{bound_host}:{bound_port}", body_bytes_max=body_bytes_max)


async def connect_tcp(
    host: str, port: int, *, deadline: Deadline, body_bytes_max: int = BODY_BYTES_MAX
) -> SocketChannel:
    """Connect over TCP.

    Raises:
        UnavailableError: If nobody listens there or the host cannot be found.
    """
    loop = asyncio.get_running_loop()
    sock: socket.socket | None = None
    try:
        async with deadline.scope():
            family, kind, proto, _, address = (await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM))[0]
            sock = socket.socket(family, kind | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC, proto)
            await loop.sock_connect(sock, address)
    except OSError as exc:
        if sock is not None:
            sock.close()
        raise exc if isinstance(exc, TensorbusError) else translate(exc, f"nobody answers at {host}:{port}") from exc
    except BaseException:
        if sock is not None:
            sock.close()
        raise
    tune(sock)
    return SocketChannel(sock, body_bytes_max=body_bytes_max)


def bound_tcp(host: str, port: int) -> socket.socket:
    """A blocking TCP socket that listens at the address."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind | socket.SOCK_CLOEXEC, proto)
    except OSError as exc:
        raise translate(exc, f"cannot listen at {host}:{port}") from exc
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(_BACKLOG)
    except OSError as exc:
        sock.close()
        raise translate(exc, f"cannot listen at {host}:{port}") from exc
    return sock


def tune(sock: socket.socket) -> None:
    """No delay for small messages, and an end to connections whose peer is gone without a word."""
    if sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)


def translate(exc: OSError, what: str) -> TensorbusError:
    """The error of ours for what the kernel said."""
    message = f"{what}: {exc.strerror or exc}"
    if exc.errno in (errno.EACCES, errno.EPERM):
        return DeniedError(message)
    if exc.errno == errno.EADDRINUSE:
        return ConflictError(message)
    if exc.errno in (errno.EADDRNOTAVAIL, errno.ENAMETOOLONG, errno.ENOTDIR, errno.EAFNOSUPPORT):
        return InvalidArgumentError(message)
    return UnavailableError(message)


@contextmanager
def _short_path(path: Path) -> Iterator[tuple[str, int]]:
    """The path by way of its folder's descriptor, since a socket address holds 108 bytes."""
    if len(os.fsencode(path.name)) > _SOCKET_NAME_BYTES_MAX:
        raise InvalidArgumentError(f"socket name {path.name!r} is over {_SOCKET_NAME_BYTES_MAX} bytes")
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}", folder
    finally:
        os.close(folder)


def _remove_stale(path: Path, short: str) -> None:
    if _identity(path) is None:
        return
    if not path.is_socket():
        raise ConflictError(f"{path} exists and is no socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC) as probe:
        try:
            probe.connect(short)
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
        except BlockingIOError:
            pass  # a full backlog is somebody too
    raise ConflictError(f"somebody listens at {path} already")


def _try_connect(sock: socket.socket, short: str) -> bool:
    try:
        sock.connect(short)
    except BlockingIOError:  # unlike TCP, a unix socket with a full backlog wants the whole call again
        return False
    return True


def _identity(path: Path) -> tuple[int, int, int] | None:
    """What tells this file from another at the same path; inode numbers alone are used again at once."""
    try:
        found = path.lstat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_ctime_ns
