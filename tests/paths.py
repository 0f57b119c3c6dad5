"""A way to a TCP server that can be slow, flip bits, be cut or fall silent; and servers that lend bytes, for tests."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from tensorbus.clock import Deadline, SystemClock
from tensorbus.errors import InvalidArgumentError, NotFoundError
from tensorbus.transport import BlockTable, BulkServer, BulkSink, BulkSource, Origin, SourceTables

_CHUNK = 32 * 1024
_CLOCK = SystemClock()


class ProxyPath:
    """Listens on a port of its own and carries to a server. All may be changed while it works.

    Attributes:
        rate: Bytes per second from the server, together; ``None`` as fast as it can.
        flips: Chance that a chunk from the server has one bit flipped.
        silent: Whether nothing gets through, though connections stay open.
        carried: Bytes from the server that got through.
    """

    def __init__(self, to: tuple[str, int], *, rate: float | None = None, flips: float = 0.0, seed: int = 0) -> None:
        self.rate, self.flips, self.silent, self.open = rate, flips, False, True
        self.carried, self.flipped = 0, 0
        self._to = to
        self._rng = random.Random(seed)
        self._free_ns = 0
        self._lock = threading.Lock()
        self._socks: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._listener.getsockname()
        self._start(self._accept)

    def cut(self) -> None:
        """Break every connection there is, and take no new one."""
        self.open = False
        for sock in list(self._socks):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.silent = False
        self.cut()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        self._listener.close()

    def _start(self, work: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=work, args=args, name="proxy", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                near = self._listener.accept()[0]
            except OSError:
                return
            if not self.open:
                near.close()
                continue
            try:
                far = socket.create_connection(self._to)
            except OSError:
                near.close()
                continue
            self._socks |= {near, far}
            self._start(self._carry, near, far, False)
            self._start(self._carry, far, near, True)

    def _carry(self, source: socket.socket, sink: socket.socket, back: bool) -> None:
        try:
            while data := source.recv(_CHUNK):
                while self.silent and self.open:
                    threading.Event().wait(0.01)
                sink.sendall(self._touched(data) if back else data)
        except OSError:
            pass
        for sock in (source, sink):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        if back:
            for sock in (source, sink):
                self._socks.discard(sock)
                sock.close()

    def _touched(self, data: bytes) -> bytes:
        with self._lock:
            self.carried += len(data)
            now_ns = _CLOCK.now_ns()
            wait_ns = 0
            if self.rate is not None:
                self._free_ns = max(self._free_ns, now_ns) + int(len(data) / self.rate * 1e9)
                wait_ns = self._free_ns - now_ns
            if self._rng.random() < self.flips:
                self.flipped += 1
                spoilt = bytearray(data)
                bit = self._rng.randrange(8 * len(spoilt))
                spoilt[bit // 8] ^= 1 << bit % 8
                data = bytes(spoilt)
        if wait_ns > 0:
            threading.Event().wait(wait_ns / 1e9)
        return data


@dataclass
class Lender:
    """Lends bytes, or what it was made with.

    Attributes:
        data: May be written to, as a memory that fails would be.
        valid: Whether the bytes still are what they were.
        refuses: Whether it has nothing to lend.
    """

    data: bytearray
    spans: list[tuple[int, int]] | None = None
    name: str = "n"
    valid: bool = True
    refuses: bool = False
    await_block: Callable[[int], None] | None = None
    opened: int = 0
    released: int = 0
    tables: SourceTables = field(init=False)

    def __post_init__(self) -> None:
        table = BlockTable(self.spans or [(0, len(self.data))])
        self.tables = SourceTables(manifest="[]", layout="{}", name=self.name, blocks=table)

    def open_source(self, request: Mapping[str, object]) -> BulkSource:
        if self.refuses:
            raise NotFoundError("there is nothing here")
        self.opened += 1
        return BulkSource(
            tables=self.tables,
            nbytes=len(self.data),
            parts=[memoryview(self.data)],
            generation=1,
            valid=lambda: self.valid,
            release=self._release,
            await_block=self.await_block,
        )

    def open_sink(self, request: Mapping[str, object], nbytes: int) -> BulkSink:
        raise InvalidArgumentError("this one takes nothing")

    def _release(self) -> None:
        self.released += 1


@contextmanager
def lending(lender: Lender, **options: object) -> Iterator[BulkServer]:
    """A server of those bytes; at its end all that was lent has come back."""
    server = BulkServer("127.0.0.1", 0, lender, **options)  # type: ignore[arg-type]  # as the caller named them
    try:
        yield server
    finally:
        server.close()
    assert lender.opened == lender.released


def origin(name: str, *addresses: tuple[str, int]) -> Origin:
    return Origin(name=name, addresses=addresses, request={})


def wait_for(condition: Callable[[], object], *, seconds: float = 20.0) -> None:
    deadline = Deadline(seconds, what="the test's condition")
    while not condition():
        if not deadline.left():
            raise deadline.error()
        threading.Event().wait(0.005)
