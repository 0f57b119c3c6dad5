"""One connection to a :class:`BulkServer`, used from the caller's thread."""

# ruff: noqa: SLF001 - a client and its exchanges are one unit
from __future__ import annotations

import socket
import ssl
import threading
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final, NoReturn, Self

from tensorbus.clock import Deadline
from tensorbus.errors import CorruptError, TensorbusError, UnavailableError, from_wire
from tensorbus.transport._blocks import Span, block_bytes, checksum, cut
from tensorbus.transport._bulk import LostError, StalledError, TlsWire, Wire
from tensorbus.transport._bulk_frames import BULK_VERSION, HEADER_BYTES_MAX, BlockHead, Message
from tensorbus.transport._frames import RemoteProtocolError
from tensorbus.transport._sockets import translate, tune
from tensorbus.transport._tls import shake_hands

STALL_S: Final = 10.0
AHEAD_MAX: Final = 64
"""A peer that neither sends nor takes a byte for so long is given up."""
_READ_BLOCKS_MAX: Final = 8
_DAY_S: Final = 24 * 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedSource:
    """A source that the server lends until it is closed or the connection ends.

    Attributes:
        source: Its number on this connection.
        nbytes: Length of its memory, of which its blocks are a part.
        tables: Names its manifest and layout: two sources with the same have the same blocks.
        manifest: As JSON; empty where it was not asked for.
        layout: As JSON; empty where it was not asked for.
        ahead: Others that began before us to get the same from there, the last one last.
        first: Number of the request for the first block that went along; 0 if none did.
    """

    source: int
    nbytes: int
    generation: int
    tables: str
    manifest: str
    layout: str
    ahead: tuple[str, ...] = ()
    first: int = 0


@dataclass(frozen=True, slots=True)
class Wanted:
    """A block that is to come, and the memory it goes to."""

    index: int
    views: Sequence[memoryview]
    nbytes: int


@dataclass(frozen=True, slots=True)
class Came:
    """A block that came.

    Attributes:
        checksum: What the source says; ``None`` where it was not asked.
        found: That of the bytes that came.
    """

    index: int
    checksum: int | None
    found: int | None

    @property
    def right(self) -> bool:
        return self.checksum == self.found


class BulkClient:
    """One connection. Its calls block; one thread at a time makes them, and any thread may :meth:`close` it.

    After UnavailableError, DeadlineExceededError or CorruptError within a transfer the connection is closed, since the
    stream has no place to resume at; other errors are answers, and the connection goes on.
    """

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._lock = threading.RLock()
        self._closed = False
        self._requests = 0
        self._opened = 0
        self._farewells = 0  # sources given back, whose answers are still to be read

    @classmethod
    def connect(
        cls,
        host: str,
        port: int,
        *,
        deadline: Deadline,
        local: str | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> Self:
        """Connect and greet.

        Args:
            local: The address of this machine to connect from; any when ``None``.
            tls: With what to speak TLS; plain when ``None``.

        Raises:
            UnavailableError: If nobody answers; CorruptError: If it is no bulk server; DeadlineExceededError.
            DeniedError: If the server asks for TLS and this side does not, or the other way round.
        """
        wire = _dial(host, port, deadline=deadline, local=local, tls=tls)
        client = cls(wire)
        try:
            with Exchange(client, deadline):
                wire.send({"t": "hello", "version": BULK_VERSION})
                client._expect("hello")
        except BaseException:
            client.close()
            raise
        return client

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def peer(self) -> str:
        """``host:port`` of the server."""
        return self._wire.peer

    def open(
        self, request: Mapping[str, object], *, tables: bool = True, first: bool | None = None, deadline: Deadline
    ) -> OpenedSource:
        """Ask for a source; ``request`` goes to the server's owner as it is.

        Args:
            tables: Whether manifest and layout should come.
            first: Whether the first block is asked for in the same breath, and if so whether with its checksum; it must
                be received before anything else. ``None`` if not.

        Raises:
            TensorbusError: What the owner raised.
        """
        with Exchange(self, deadline):
            self._wire.send({**request, "t": "open", "tables": tables})
            number = 0
            if first is not None:
                number = self._send_read({"source": self._opened + 1, "blocks": [0, 1], "sums": first})
            while self._farewells:
                self._expect("closed")
                self._farewells -= 1
            try:
                header = self._expect("opened")
            except _AnswerError:
                if number:
                    self._refused()
                raise
            source = _opened(header, self._wire.peer, number)
            self._opened += 1
            if number and source.source != self._opened:
                raise RemoteProtocolError(f"{self._wire.peer} opened source {source.source}, not {self._opened}")
            return source

    def _refused(self) -> None:
        """Take in what is said of a read from a source that was not opened."""
        try:
            message = self._message()
        except _AnswerError:
            return
        raise RemoteProtocolError(f"{self._wire.peer} was to refuse a read, not {message!r:.200}")

    def ask_blocks(self, source: int, first: int, count: int, *, sums: bool, deadline: Deadline) -> int:
        """Ask for a source's blocks ``[first, first + count)``; gives the number of the request."""
        return self._ask({"source": source, "blocks": [first, count], "sums": sums}, deadline)

    def ask_spans(self, source: int, spans: Sequence[Span], *, sums: bool, deadline: Deadline) -> int:
        """Ask for spans of a source, which come cut into blocks; gives the number of the request."""
        return self._ask({"source": source, "spans": [list(span) for span in spans], "sums": sums}, deadline)

    def receive(self, request: int, blocks: Sequence[Wanted], *, sums: bool, deadline: Deadline) -> Iterator[Came]:
        """Take in the oldest request's answer.

        Each block is given once its source has vouched for it, by what it sent after it: not before were its bytes
        known to be the source's until they had left. On an error the content of the memory is undefined.

        Raises:
            FencedError: If the source's memory was given to another use; UnavailableError: If the peer is gone.
            InvalidArgumentError: If a span is not within the source; NotFoundError: If it is not open.
        """
        with Exchange(self, deadline) as exchange:
            before: Came | None = None
            for wanted in blocks:
                head = self._head()
                if (head.request, head.index, head.nbytes) != (request, wanted.index, wanted.nbytes):
                    raise RemoteProtocolError(f"block {wanted.index} of {wanted.nbytes} was expected, not {head}")
                if sums and head.checksum is None:
                    raise RemoteProtocolError(f"{self._wire.peer} sent a block without the checksum asked for")
                if before is not None:
                    yield before
                exchange.bound()
                if sums:
                    before = Came(wanted.index, head.checksum, self._wire.recv_block(wanted.views))
                else:
                    self._wire.recv_into(wanted.views)
                    before = Came(wanted.index, None, None)
            self._expect("end")
            if before is not None:
                yield before

    def read_into(self, source: int, reads: Sequence[tuple[int, memoryview]], *, deadline: Deadline) -> None:
        """Fill each memory from the source, over this connection alone. On any error their content is undefined.

        Args:
            source: Opened on this connection.
            reads: Pairs of an offset in the source and the contiguous bytes to fill from there.
            deadline: For the whole transfer.

        Raises:
            CorruptError: If other bytes came than were sent; else as :meth:`receive`.
        """
        places = [(offset, view.cast("B")) for offset, view in reads if view.nbytes]
        for blocks, spans in _requests(places):
            request = self.ask_spans(source, spans, sums=True, deadline=deadline)
            came = list(self.receive(request, blocks, sums=True, deadline=deadline))
            if not all(block.right for block in came):
                self.close()
                raise CorruptError(f"bytes changed on their way from {self._wire.peer}")

    def close_source(self, source: int, *, deadline: Deadline) -> None:
        """Give a source back before the connection ends."""
        with Exchange(self, deadline):
            self._wire.send({"t": "close", "source": source})
            self._expect("closed")

    def rest(self, source: int) -> bool:
        """Give a source back without waiting for the answer, with nothing else open or asked for.

        Returns:
            Whether the connection can :meth:`open` another later.
        """
        try:
            with Exchange(self, Deadline(None)):
                self._wire.send({"t": "close", "source": source})
                self._farewells += 1
        except TensorbusError:
            return False
        return True

    def standing(self) -> bool:
        """Whether the peer has not hung up, as far as this side knows."""
        return not self._closed and self._wire.standing()

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
            CorruptError: If bytes changed on their way; nothing was committed then.
        """
        views = [part.cast("B") for part in parts if part.nbytes]
        with Exchange(self, deadline) as exchange:
            self._wire.send({**request, "t": "put", "nbytes": sum(len(view) for view in views)})
            self._expect("ready")
            for index, block in enumerate(_in_blocks(views)):
                exchange.bound()
                nbytes = sum(len(view) for view in block)
                self._wire.send_block(BlockHead(request=0, index=index, nbytes=nbytes, checksum=checksum(block)), block)
            exchange.bound()
            self._wire.send({**(commit or {}), "t": "commit"})
            exchange.bound(whole=True)  # the owner may have much to do before it answers
            data = self._expect("committed").get("data")
            if not isinstance(data, dict):
                raise RemoteProtocolError(f"{self._wire.peer} committed without an answer")
            return data

    def interrupt(self) -> None:
        """End the connection at once; a call that runs in another thread fails. Does not wait for it."""
        self._closed = True
        self._wire.abort(at_once=True)

    def close(self) -> None:
        """End the connection; a call that runs in another thread fails with UnavailableError. Safe to repeat."""
        self.interrupt()
        with self._lock:
            self._wire.close()

    def _ask(self, header: Mapping[str, object], deadline: Deadline) -> int:
        with Exchange(self, deadline):
            return self._send_read(header)

    def _send_read(self, header: Mapping[str, object]) -> int:
        self._requests += 1
        self._wire.send({**header, "t": "read", "request": self._requests})
        return self._requests

    def _expect(self, kind: str) -> Mapping[str, object]:
        message = self._message()
        if isinstance(message, BlockHead) or message.get("t") != kind:
            raise RemoteProtocolError(f"{self._wire.peer} was to say {kind!r}, not {message!r:.200}")
        return message

    def _head(self) -> BlockHead:
        message = self._message()
        if not isinstance(message, BlockHead):
            raise RemoteProtocolError(f"{self._wire.peer} was to send a block, not {message!r:.200}")
        return message

    def _message(self) -> Message:
        message = self._wire.recv()
        if not isinstance(message, BlockHead) and message.get("t") == "error":
            error = message.get("error")
            raise _AnswerError(from_wire(error if isinstance(error, dict) else {}))
        return message


def _opened(header: Mapping[str, object], peer: str, first: int) -> OpenedSource:
    match header:
        case {"source": int(source), "nbytes": int(nbytes), "generation": int(generation), "tables": str(named)}:
            return OpenedSource(
                source=source,
                nbytes=nbytes,
                generation=generation,
                tables=named,
                manifest=str(header.get("manifest", "")),
                layout=str(header.get("layout", "")),
                ahead=_names(header.get("ahead")),
                first=first,
            )
    raise RemoteProtocolError(f"{peer} opened a source without its number or size")


class _AnswerError(Exception):
    """Carries an error that the server answered past those of the connection itself."""

    def __init__(self, error: TensorbusError) -> None:
        super().__init__(str(error))
        self.error = error


class Exchange:
    """One request on a client: takes its lock, bounds its waits, and closes it when the stream is lost."""

    def __init__(self, client: BulkClient, deadline: Deadline) -> None:
        self._client = client
        self._deadline = deadline

    def bound(self, *, whole: bool = False) -> None:
        """Bound the next wait by what is left of the deadline and, unless ``whole``, by the time a peer may stall."""
        left = self._deadline.left()
        if left is not None and left <= 0:
            raise self._deadline.error()
        limit = STALL_S if not whole else left if left is not None else _DAY_S
        self._client._wire.set_timeout(limit if left is None else min(limit, left))

    def __enter__(self) -> Self:
        self._client._lock.acquire()
        try:
            if self._client.closed:
                raise UnavailableError(f"the connection to {self._client.peer} is closed")
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
            raise UnavailableError(f"the connection to {self._client.peer} was closed here") from exc
        if isinstance(exc, StalledError) and self._deadline.left() == 0:
            raise self._deadline.error() from exc
        raise exc


def _dial(host: str, port: int, *, deadline: Deadline, local: str | None, tls: ssl.SSLContext | None) -> Wire:
    peer = f"{host}:{port}"
    source = None if local is None else (local, 0)
    try:
        sock: socket.socket = socket.create_connection((host, port), timeout=deadline.left(), source_address=source)
    except TimeoutError as exc:
        raise deadline.error() from exc
    except OSError as exc:
        raise translate(exc, f"nobody answers at {peer}") from exc
    try:
        tune(sock)
        if tls is None:
            return Wire(sock, peer=peer, header_bytes_max=HEADER_BYTES_MAX)
        sock = secured = tls.wrap_socket(sock, do_handshake_on_connect=False)
        shake_hands(secured)
        return TlsWire(secured, peer=peer, header_bytes_max=HEADER_BYTES_MAX)
    except OSError as exc:
        sock.close()
        raise translate(exc, f"{peer} went away") from exc
    except UnavailableError as exc:
        sock.close()
        raise deadline.error() if deadline.left() == 0 else exc from exc.__cause__
    except BaseException:
        sock.close()
        raise


def _requests(places: Sequence[tuple[int, memoryview]]) -> Iterator[tuple[list[Wanted], list[Span]]]:
    """Places to fill as requests of a few blocks each: the blocks that will come, and the spans to ask for."""
    blocks: list[Wanted] = []
    spans: list[Span] = []
    todo = cut((offset, len(view)) for offset, view in places)
    rest = iter(places)
    _, view = next(rest, (0, memoryview(b"")))
    for block in todo:
        views: list[memoryview] = []
        for _, nbytes in block:
            if not len(view):
                _, view = next(rest)
            views.append(view[:nbytes])
            view = view[nbytes:]
        blocks.append(Wanted(len(blocks), views, block_bytes(block)))
        spans += block
        if len(blocks) == _READ_BLOCKS_MAX or block is todo[-1]:
            yield blocks, spans
            blocks, spans = [], []


def _in_blocks(views: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    """Parts that follow each other, cut and joined into blocks."""
    starts = [0, *accumulate(len(view) for view in views)]
    for block in cut((start, len(view)) for start, view in zip(starts, views, strict=False)):
        yield [
            views[at := bisect_right(starts, offset) - 1][offset - starts[at] :][:nbytes] for offset, nbytes in block
        ]


def _names(said: object) -> tuple[str, ...]:
    return tuple(str(name) for name in said[:AHEAD_MAX]) if isinstance(said, list) else ()
