"""Reading from and putting to a :class:`BulkServer` over one connection, from the caller's thread."""

# ruff: noqa: SLF001 - a client and its exchanges are one unit
from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn, Self

from blake3 import blake3

from tensorbus.clock import Deadline
from tensorbus.errors import TensorbusError, UnavailableError, from_wire
from tensorbus.transport._bulk import BULK_VERSION, CHUNK_BYTES, LostError, StalledError, Wire, batches
from tensorbus.transport._frames import RemoteProtocolError
from tensorbus.transport._sockets import translate, tune

_HASH_INLINE_BYTES = 1 << 20
_HASH_AHEAD = 4
STALL_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedSource:
    """A source that the server lends until it is closed or the connection ends."""

    token: str
    nbytes: int
    generation: int
    manifest: str
    layout: str


class BulkClient:
    """One connection. Its calls block; one thread at a time makes them, and any thread may :meth:`close` it.

    After UnavailableError, DeadlineExceededError or CorruptError within a transfer the connection is closed, since the
    stream has no place to resume at; other errors are answers, and the connection goes on.
    """

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._lock = threading.RLock()
        self._closed = False

    @classmethod
    def connect(cls, host: str, port: int, *, deadline: Deadline) -> Self:
        """Connect and greet.

        Raises:
            UnavailableError: If nobody answers; CorruptError: If it is no bulk server; DeadlineExceededError.
        """
        try:
            sock = socket.create_connection((host, port), timeout=deadline.left())
        except TimeoutError as exc:
            raise deadline.error() from exc
        except OSError as exc:
            raise translate(exc, f"nobody answers at {host}:{port}") from exc
        tune(sock)
        client = cls(Wire(sock, peer=f"{host}:{port}"))
        try:
            with _Exchange(client, deadline):
                client._wire.send_head({"t": "hello", "version": BULK_VERSION})
                client._expect("hello")
        except BaseException:
            client.close()
            raise
        return client

    @property
    def closed(self) -> bool:
        return self._closed

    def open(self, request: Mapping[str, object], *, deadline: Deadline) -> OpenedSource:
        """Ask for a source; ``request`` goes to the server's owner as it is.

        Raises:
            TensorbusError: What the owner raised.
        """
        with _Exchange(self, deadline):
            self._wire.send_head({**request, "t": "open"})
            header = self._expect("opened")
            match header:
                case {"token": str(token), "nbytes": int(nbytes), "generation": int(generation)}:
                    manifest, layout = str(header.get("manifest", "")), str(header.get("layout", ""))
                    return OpenedSource(
                        token=token, nbytes=nbytes, generation=generation, manifest=manifest, layout=layout
                    )
            raise RemoteProtocolError(f"{self._wire.peer} opened a source without its token or size")

    def read_into(
        self, token: str, reads: Sequence[tuple[int, memoryview]], *, digests: bool = False, deadline: Deadline
    ) -> list[bytes | None]:
        """Fill each memory from the source. On any error their content is undefined.

        Args:
            token: Of a source opened on this connection.
            reads: Pairs of an offset in the source and the contiguous bytes to fill from there.
            digests: Whether to take the BLAKE3 of each, while receiving.
            deadline: For the whole transfer.

        Returns:
            Per read the 32 bytes of BLAKE3 of what was received, or ``None`` without ``digests``. The caller compares.

        Raises:
            FencedError: If the source's memory was given to another use; UnavailableError: If the peer is gone.
            InvalidArgumentError: If a range is not within the source; NotFoundError: If the token is not open.
        """
        views = [view.cast("B") if view.nbytes else memoryview(bytearray()) for _, view in reads]
        ranges = [[offset, len(view)] for (offset, _), view in zip(reads, views, strict=True)]
        with _Exchange(self, deadline) as exchange, _Hashing(len(views), wanted=digests) as hashing:
            self._wire.send_head({"t": "read", "token": token, "ranges": ranges})
            self._expect("data", body_bytes=sum(len(view) for view in views))
            for batch in batches(views):
                exchange.bound()
                self._wire.recv_into([piece for _, piece in batch])
                hashing.add(batch)
            self._expect("end")
            return hashing.results()

    def close_source(self, token: str, *, deadline: Deadline) -> None:
        """Give a source back before the connection ends."""
        with _Exchange(self, deadline):
            self._wire.send_head({"t": "close", "token": token})
            self._expect("closed")

    def put(
        self,
        request: Mapping[str, object],
        parts: Sequence[memoryview],
        *,
        commit: Mapping[str, object] | None = None,
        deadline: Deadline,
    ) -> dict[str, object]:
        """Send bytes to the server's owner.

        Args:
            request: Goes to the owner before the bytes, which it may refuse.
            parts: The contiguous bytes, one after the other.
            commit: Goes to the owner after the bytes.
            deadline: For the whole transfer.

        Returns:
            The owner's answer to the commit.

        Raises:
            TensorbusError: What the owner raised.
        """
        views = [part.cast("B") for part in parts if part.nbytes]
        nbytes = sum(len(view) for view in views)
        with _Exchange(self, deadline) as exchange:
            self._wire.send_head({**request, "t": "put", "nbytes": nbytes})
            self._expect("ready")
            self._wire.send_head({"t": "data"}, body_bytes=nbytes)
            for view in views:
                for start in range(0, len(view), CHUNK_BYTES):
                    exchange.bound()
                    self._wire.send_bytes(view[start : start + CHUNK_BYTES])
            exchange.bound()
            self._wire.send_head({**(commit or {}), "t": "commit"})
            exchange.bound(whole=True)  # the owner may have much to do before it answers
            data = self._expect("committed").get("data")
            if not isinstance(data, dict):
                raise RemoteProtocolError(f"{self._wire.peer} committed without an answer")
            return data

    def close(self) -> None:
        """End the connection; a call that runs in another thread fails with UnavailableError. Safe to repeat."""
        self._closed = True
        self._wire.abort(at_once=True)
        with self._lock:
            self._wire.close()

    def _expect(self, kind: str, *, body_bytes: int = 0) -> dict[str, object]:
        header, got = self._wire.recv_head()
        if header.get("t") == "error" and got == 0:
            error = header.get("error")
            raise _AnswerError(from_wire(error if isinstance(error, dict) else {}))
        if header.get("t") != kind or got != body_bytes:
            raise RemoteProtocolError(f"{kind!r} of {body_bytes} bytes was expected, not {header.get('t')!r} of {got}")
        return header


class _AnswerError(Exception):
    """Carries an error that the server answered past those of the connection itself."""

    def __init__(self, error: TensorbusError) -> None:
        super().__init__(str(error))
        self.error = error


class _Exchange:
    """One request on a client: takes its lock, bounds its waits, and closes it when the stream is lost."""

    def __init__(self, client: BulkClient, deadline: Deadline) -> None:
        self._client = client
        self._deadline = deadline

    def bound(self, *, whole: bool = False) -> None:
        """Bound the next wait by what is left of the deadline and, unless ``whole``, by the time a peer may stall."""
        left = self._deadline.left()
        if left is not None and left <= 0:
            raise self._deadline.error()
        limit = STALL_S if not whole else left if left is not None else 24 * 3600.0
        self._client._wire.set_timeout(limit if left is None else min(limit, left))

    def __enter__(self) -> Self:
        self._client._lock.acquire()
        try:
            if self._client.closed:
                raise UnavailableError(f"the connection to {self._client._wire.peer} is closed")
            self.bound()
        except BaseException:
            self._client._lock.release()
            raise
        return self

    def __exit__(self, kind: object, exc: BaseException | None, traceback: object) -> None:
        closed_here = self._client.closed
        try:
            if exc is None:
                return
            if isinstance(exc, _AnswerError):
                raise exc.error from None
            self._client.close()
            if isinstance(exc, LostError):
                self._explain(exc, closed_here=closed_here)
        finally:
            self._client._lock.release()

    def _explain(self, exc: LostError, *, closed_here: bool) -> NoReturn:
        if closed_here:
            raise UnavailableError(f"the connection to {self._client._wire.peer} was closed here") from exc
        if isinstance(exc, StalledError) and self._deadline.left() == 0:
            raise self._deadline.error() from exc
        raise exc


class _Hashing:
    """Digests of what arrives, taken by a thread beside the receiving one once there is enough of it."""

    def __init__(self, count: int, *, wanted: bool) -> None:
        self._results: list[bytes | None] = [None] * count
        self._hashers = [blake3() for _ in range(count)] if wanted else []
        self._todo: queue.Queue[list[tuple[int, memoryview]] | None] = queue.Queue(maxsize=_HASH_AHEAD)
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._join()

    def add(self, batch: list[tuple[int, memoryview]]) -> None:
        if not self._hashers:
            return
        if self._thread is None and sum(len(piece) for _, piece in batch) < _HASH_INLINE_BYTES:
            self._update(batch)
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="hash", daemon=True)
            self._thread.start()
        self._todo.put(batch)

    def results(self) -> list[bytes | None]:
        self._join()
        for number, hasher in enumerate(self._hashers):
            self._results[number] = hasher.digest()
        return self._results

    def _run(self) -> None:
        for batch in iter(self._todo.get, None):
            self._update(batch)

    def _update(self, batch: list[tuple[int, memoryview]]) -> None:
        for number, piece in batch:
            self._hashers[number].update(piece)

    def _join(self) -> None:
        if self._thread is not None:
            self._todo.put(None)
            self._thread.join()
            self._thread = None
