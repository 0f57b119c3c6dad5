"""Serving segment bytes over plain TCP, from threads of its own."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from tensorbus.clock import NS_PER_S, SystemClock
from tensorbus.errors import (
    FencedError,
    InvalidArgumentError,
    NotFoundError,
    OutOfSpaceError,
    TensorbusError,
    to_wire,
)
from tensorbus.ids import IdSource
from tensorbus.transport._bulk import BULK_VERSION, CHUNK_BYTES, RANGES_MAX, LostError, Wire, batches, pieces
from tensorbus.transport._frames import RemoteProtocolError
from tensorbus.transport._sockets import bound_tcp, tune

log = logging.getLogger("tensorbus.transport")

_JOIN_BYTES = 256 * 1024
_CLOCK = SystemClock()


@dataclass(frozen=True, slots=True, kw_only=True)
class BulkSource:
    """What an owner lends for reading until ``release`` is called.

    Attributes:
        manifest: As JSON; passed on as it is.
        layout: As JSON; passed on as it is.
        nbytes: Length of the parts laid end to end.
        parts: The bytes; offsets run over them end to end, each rounded up to whole pages.
        generation: Which use of the memory this is.
        valid: Whether the bytes are still this source's; asked from a thread, around every chunk.
        release: Called once, from a thread, when the reader is done or gone.
    """

    manifest: str
    layout: str
    nbytes: int
    parts: Sequence[memoryview]
    generation: int
    valid: Callable[[], bool]
    release: Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class BulkSink:
    """Where an owner lets a caller's bytes be written.

    Attributes:
        view: Writable, of the announced length.
        commit: Called from a thread with the fields of the commit when all bytes are there; gives the answer.
        abort: Called from a thread instead of ``commit`` if the caller went away or ``commit`` raised.
    """

    view: memoryview
    commit: Callable[[Mapping[str, object]], Mapping[str, object]]
    abort: Callable[[], None]


class BulkOwner(Protocol):
    """Who owns the bytes that a :class:`BulkServer` moves. Called from the server's threads; raises typed errors."""

    def open_source(self, request: Mapping[str, object]) -> BulkSource: ...

    def open_sink(self, request: Mapping[str, object], nbytes: int) -> BulkSink: ...


class BulkServer:
    """One accepting thread, and one more per connection.

    Args:
        host: Address to listen at.
        port: 0 takes a free one; see :attr:`address`.
        owner: Asked for sources and sinks.
        ids: Where read tokens come from.
        connections_max: Beyond that a newcomer takes the place of the connection that has asked for nothing for
            longest, and of none if all are at work: then it is told OutOfSpaceError and closed.
        spare_s: How long a connection is spared after it was last at work.
        hello_s: A connection that does not greet within that time is closed.
        idle_s: A connection that asks for nothing for so long is closed, which releases what it has open.
        stall_s: A connection that takes or sends nothing for so long within a transfer is closed.

    Raises:
        ConflictError: If the port is taken.
    """

    def __init__(
        self,
        host: str,
        port: int,
        owner: BulkOwner,
        *,
        ids: IdSource,
        connections_max: int = 64,
        spare_s: float = 1.0,
        hello_s: float = 5.0,
        idle_s: float = 600.0,
        stall_s: float = 30.0,
    ) -> None:
        self._spare_ns = int(spare_s * NS_PER_S)
        self._hello_s = hello_s
        self._owner = owner
        self._ids = ids
        self._connections_max = connections_max
        self._idle_s = idle_s
        self._stall_s = stall_s
        self._lock = threading.Lock()
        self._wires: dict[Wire, _Talk] = {}
        self._threads: list[threading.Thread] = []
        self._closed = False
        self._listener = bound_tcp(host, port)
        self.host, self.port = self._listener.getsockname()[:2]
        self._acceptor = threading.Thread(target=self._accept, name="bulk accept", daemon=True)
        self._acceptor.start()

    @property
    def address(self) -> str:
        """``host:port``."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def close(self) -> None:
        """End all connections and threads, releasing every source. Blocks shortly. Safe to repeat."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for wire in self._wires:
                wire.abort()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept(), which close() alone does not
        self._acceptor.join()
        self._listener.close()
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        while True:
            try:
                sock, (host, port, *_) = self._listener.accept()
            except OSError as exc:
                if self._closed:
                    return
                log.warning("bulk accept failed: %s", exc)
                threading.Event().wait(0.05)  # out of descriptors: the connections that end give some back
                continue
            tune(sock)
            self._admit(Wire(sock, peer=f"{host}:{port}"))

    def _admit(self, wire: Wire) -> None:
        times = {"hello_s": self._hello_s, "idle_s": self._idle_s, "stall_s": self._stall_s}
        talk = _Talk(wire, self._owner, self._ids, **times)
        thread = threading.Thread(target=self._serve, args=(wire, talk), name=f"bulk {wire.peer}", daemon=True)
        with self._lock:
            if not self._closed and (len(self._wires) < self._connections_max or self._make_room()):
                self._wires[wire] = talk
                self._threads = [other for other in self._threads if other.is_alive()]
                self._threads.append(thread)
                thread.start()
                return
        with contextlib.suppress(TensorbusError):
            wire.set_timeout(1.0)
            _send_error(wire, OutOfSpaceError(f"{self._connections_max} bulk connections are open already"))
        wire.close()

    def _make_room(self) -> bool:
        """End the connection that waits for its next request for longest; says whether there was one."""
        idle = [(talk.idle_since_ns, wire) for wire, talk in self._wires.items() if talk.idle_since_ns]
        if not idle:
            return False
        since_ns, wire = min(idle, key=lambda entry: entry[0])
        if _CLOCK.now_ns() - since_ns < self._spare_ns:
            return False
        del self._wires[wire]
        wire.abort()
        return True

    def _serve(self, wire: Wire, talk: _Talk) -> None:
        try:
            talk.run()
        except LostError as exc:
            log.debug("bulk connection ended: %s", exc)
        except TensorbusError as exc:
            log.info("bulk connection of %s ended: %s", wire.peer, exc)
        except Exception:  # the thread's edge: the connection ends, the server goes on
            log.exception("bulk connection of %s failed", wire.peer)
        finally:
            talk.release()
            with self._lock:
                self._wires.pop(wire, None)
            wire.abort()
            wire.close()


class _Talk:
    """One connection's conversation."""

    def __init__(
        self, wire: Wire, owner: BulkOwner, ids: IdSource, *, hello_s: float, idle_s: float, stall_s: float
    ) -> None:
        self.idle_since_ns = 0
        self._hello_s = hello_s
        self._wire = wire
        self._owner = owner
        self._ids = ids
        self._idle_s = idle_s
        self._stall_s = stall_s
        self._sources: dict[str, BulkSource] = {}

    def run(self) -> None:
        self._wire.set_timeout(self._hello_s)
        self.idle_since_ns = _CLOCK.now_ns()
        header, body_bytes = self._wire.recv_head()
        if header.get("t") != "hello" or header.get("version") != BULK_VERSION or body_bytes:
            raise RemoteProtocolError(f"{self._wire.peer} speaks another bulk protocol: {header}")
        self._wire.send_head({"t": "hello", "version": BULK_VERSION})
        while True:
            self._wire.set_timeout(self._idle_s)
            self.idle_since_ns = _CLOCK.now_ns()
            header, body_bytes = self._wire.recv_head()
            self.idle_since_ns = 0
            if body_bytes:
                raise RemoteProtocolError(f"a body of {body_bytes} bytes comes with no request for it")
            self._wire.set_timeout(self._stall_s)
            try:
                self._answer(header)
            except (LostError, RemoteProtocolError):
                raise
            except TensorbusError as exc:
                _send_error(self._wire, exc)

    def release(self) -> None:
        for token in tuple(self._sources):
            self._sources.pop(token).release()

    def _answer(self, header: Mapping[str, object]) -> None:
        match header.get("t"):
            case "open":
                self._open(header)
            case "read":
                self._read(header)
            case "close":
                self._source(header, forget=True).release()
                self._wire.send_head({"t": "closed"})
            case "put":
                self._put(header)
            case other:
                raise InvalidArgumentError(f"no such bulk request: {other!r}")

    def _open(self, header: Mapping[str, object]) -> None:
        source = self._owner.open_source(header)
        token = self._ids.hex(16)
        self._sources[token] = source
        answer = {"token": token, "nbytes": source.nbytes, "generation": source.generation}
        self._wire.send_head({"t": "opened", **answer, "manifest": source.manifest, "layout": source.layout})

    def _read(self, header: Mapping[str, object]) -> None:
        source = self._source(header)
        ranges = _ranges(header.get("ranges"))
        views = [view for offset, nbytes in ranges for view in pieces(source.parts, offset, nbytes)]
        _check_valid(source)
        self._wire.send_head({"t": "data"}, body_bytes=sum(len(view) for view in views))
        for chunk in _chunks(views):
            if not source.valid():
                raise LostError(f"the source was fenced while {self._wire.peer} read it")
            self._wire.send_bytes(chunk)
        # What was sent counts only with this: the bytes were the source's until the last one had left the memory.
        _check_valid(source)
        self._wire.send_head({"t": "end"})

    def _put(self, header: Mapping[str, object]) -> None:
        nbytes = header.get("nbytes")
        if not isinstance(nbytes, int) or nbytes < 0:
            raise InvalidArgumentError(f"a put of {nbytes!r} bytes")
        sink = self._owner.open_sink(header, nbytes)
        committed = False
        try:
            self._wire.send_head({"t": "ready"})
            self._recv_data(sink.view)
            commit, body_bytes = self._wire.recv_head()
            if commit.get("t") != "commit" or body_bytes:
                raise RemoteProtocolError(f"a commit was expected, not {commit.get('t')!r}")
            answer = sink.commit(commit)
            committed = True
        finally:
            if not committed:
                sink.abort()
        self._wire.send_head({"t": "committed", "data": dict(answer)})

    def _recv_data(self, view: memoryview) -> None:
        header, body_bytes = self._wire.recv_head()
        if header.get("t") != "data" or body_bytes != len(view):
            raise RemoteProtocolError(f"{len(view)} bytes were announced, {header.get('t')!r} of {body_bytes} came")
        for batch in batches([view]):
            self._wire.recv_into([piece for _, piece in batch])

    def _source(self, header: Mapping[str, object], *, forget: bool = False) -> BulkSource:
        token = header.get("token")
        source = self._sources.get(token) if isinstance(token, str) else None
        if source is None:
            raise NotFoundError("no source is open under this token")
        if forget:
            del self._sources[str(token)]
        return source


def _send_error(wire: Wire, error: TensorbusError) -> None:
    wire.send_head({"t": "error", "error": to_wire(error)})


def _check_valid(source: BulkSource) -> None:
    if not source.valid():
        raise FencedError("the source's memory was given to another use", generation=source.generation)


def _ranges(value: object) -> list[tuple[int, int]]:
    if not isinstance(value, list) or len(value) > RANGES_MAX:
        raise InvalidArgumentError(f"a read names up to {RANGES_MAX} ranges")
    found: list[tuple[int, int]] = []
    for item in value:
        match item:
            case [int(offset), int(nbytes)]:
                found.append((offset, nbytes))
            case _:
                raise InvalidArgumentError(f"a range is a pair of offset and length, not {item!r}")
    return found


def _chunks(views: Iterable[memoryview]) -> Iterator[memoryview]:
    """The same bytes, small views joined and large ones cut, so that each is worth a system call and no more."""
    small: list[memoryview] = []
    small_bytes = 0
    for view in views:
        if len(view) < _JOIN_BYTES:
            small.append(view)
            small_bytes += len(view)
            if small_bytes < _JOIN_BYTES:
                continue
        if small:
            yield memoryview(b"".join(small))
        if len(view) >= _JOIN_BYTES:
            yield from (view[start : start + CHUNK_BYTES] for start in range(0, len(view), CHUNK_BYTES))
        small, small_bytes = [], 0
    if small:
        yield memoryview(b"".join(small))
