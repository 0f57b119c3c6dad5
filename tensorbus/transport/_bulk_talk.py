"""What a bulk server says on one connection, and whose bytes it moves there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from tensorbus.clock import Clock
from tensorbus.errors import CorruptError, FencedError, InvalidArgumentError, NotFoundError, TensorbusError, to_wire
from tensorbus.transport._blocks import Block, BlockTable, Span, checksum, cut, pieces
from tensorbus.transport._bulk import LostError, Wire
from tensorbus.transport._bulk_frames import BULK_VERSION, HEADER_BYTES_MAX, REQUEST_MAX, BlockHead
from tensorbus.transport._bulk_pages import PageOwner, PageTalk
from tensorbus.transport._frames import RemoteProtocolError

SPANS_MAX: Final = 8192
SOURCES_MAX: Final = 64
HELLO_BYTES_MAX: Final = 4096
REQUEST_BYTES_MAX: Final = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceTables:
    """What stays the same as long as bytes are lent; made once for all who read them.

    Attributes:
        manifest: As JSON; passed on as it is.
        layout: As JSON; passed on as it is.
        name: Equal for two sources exactly if manifest and layout are.
        blocks: The blocks, and their checksums as far as they are known.
    """

    manifest: str
    layout: str
    name: str
    blocks: BlockTable


@dataclass(frozen=True, slots=True, kw_only=True)
class BulkSource:
    """What an owner lends for reading until ``release`` is called.

    Attributes:
        tables: What it is made of.
        nbytes: Length of the parts laid end to end.
        parts: The bytes; offsets run over them end to end, each rounded up to whole pages.
        generation: Which use of the memory this is.
        valid: Whether the bytes are still this source's; asked from a thread, around every block.
        release: Called once, from a thread, when the reader is done or gone.
        await_block: For bytes that are still arriving: waits for a block; called from a thread before it is read.
        ahead: Others that get the same from here, and may hand on what they have; names for the reader.
    """

    tables: SourceTables
    nbytes: int
    parts: Sequence[memoryview]
    generation: int
    valid: Callable[[], bool]
    release: Callable[[], None]
    await_block: Callable[[int], None] | None = None
    ahead: Sequence[str] = ()


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
    """Who owns the bytes that a bulk server moves. Called from the server's threads; raises typed errors."""

    def open_source(self, request: Mapping[str, object]) -> BulkSource: ...

    def open_sink(self, request: Mapping[str, object], nbytes: int) -> BulkSink: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """How long a connection may take for what, in seconds."""

    hello_s: float
    idle_s: float
    stall_s: float


class Talk:
    """One connection's conversation. :meth:`release` afterwards, whatever came of it."""

    def __init__(
        self, wire: Wire, owner: BulkOwner, *, times: Times, clock: Clock, pages: PageOwner | None = None
    ) -> None:
        self.idle_since_ns = 0
        """Since when it waits for a request; 0 while it is at work."""
        self._wire = wire
        self._owner = owner
        self._times = times
        self._clock = clock
        self._sources: dict[int, BulkSource] = {}
        self._opened = 0
        self._pages = PageTalk(wire, pages)

    def run(self) -> None:
        """Answer requests until the connection ends.

        Raises:
            LostError: When it does; RemoteProtocolError: If the peer broke the protocol.
        """
        self._wire.set_timeout(self._times.hello_s)
        self._wire.limit(HELLO_BYTES_MAX)
        self._hello(self._request())
        self._wire.limit(REQUEST_BYTES_MAX)
        while True:
            self._wire.set_timeout(self._times.idle_s)
            header = self._request()
            self._wire.set_timeout(self._times.stall_s)
            try:
                self._answer(header)
            except (LostError, RemoteProtocolError):
                raise
            except TensorbusError as exc:
                send_error(self._wire, exc)

    def release(self) -> None:
        """Give back all that is open."""
        while self._sources:
            self._sources.popitem()[1].release()

    def _request(self) -> Mapping[str, object]:
        self.idle_since_ns = self._clock.now_ns()
        message = self._wire.recv()
        self.idle_since_ns = 0
        if isinstance(message, BlockHead):
            raise RemoteProtocolError("a block comes with no request for it")
        return message

    def _hello(self, header: Mapping[str, object]) -> None:
        if header.get("t") != "hello" or header.get("version") != BULK_VERSION:
            error = RemoteProtocolError(f"this side speaks version {BULK_VERSION} of the bulk protocol")
            send_error(self._wire, error)
            raise error
        self._wire.send({"t": "hello", "version": BULK_VERSION})

    def _answer(self, header: Mapping[str, object]) -> None:
        match header.get("t"):
            case "open":
                self._open(header)
            case "read":
                self._read(header)
            case "close":
                self._sources.pop(self._number(header)).release()
                self._wire.send({"t": "closed"})
            case "pages":
                self._pages.answer(header)
            case "put":
                self._put(header)
            case other:
                raise InvalidArgumentError(f"no such bulk request: {other!r:.80}")

    # -- reading ------------------------------------------------------------------------------------------------------

    def _open(self, header: Mapping[str, object]) -> None:
        if len(self._sources) >= SOURCES_MAX:
            raise InvalidArgumentError(f"a connection has up to {SOURCES_MAX} sources open")
        source = self._owner.open_source(header)
        self._opened += 1
        self._sources[self._opened] = source
        tables = source.tables
        answer: dict[str, object] = {"t": "opened", "source": self._opened, "nbytes": source.nbytes}
        answer |= {"generation": source.generation, "tables": tables.name}
        if source.ahead:
            answer["ahead"] = list(source.ahead)
        if header.get("tables") is not False:
            answer |= {"manifest": tables.manifest, "layout": tables.layout}
        self._wire.send(answer)

    def _read(self, header: Mapping[str, object]) -> None:
        source = self._sources[self._number(header)]
        request, sums = header.get("request"), header.get("sums") is True
        if type(request) is not int or not 0 <= request <= REQUEST_MAX:
            raise InvalidArgumentError(f"a read has a number, not {request!r:.80}")
        if source.await_block is not None and "blocks" not in header:
            raise InvalidArgumentError("what is still arriving is read by its blocks")
        _check_valid(source)
        for index, block in _asked(header, source.tables.blocks):
            if source.await_block is not None:
                source.await_block(index)
            views = [view for offset, nbytes in block for view in pieces(source.parts, offset, nbytes)]
            known = source.tables.blocks if "blocks" in header else None
            total = _sum_of(views, index, known) if sums else None
            nbytes = sum(len(view) for view in views)
            # The head says that the block before it had left while the source was still valid.
            _check_valid(source)
            self._wire.send_block(BlockHead(request=request, index=index, nbytes=nbytes, checksum=total), views)
        _check_valid(source)
        self._wire.send({"t": "end", "request": request})

    def _number(self, header: Mapping[str, object]) -> int:
        number = header.get("source")
        if type(number) is not int or number not in self._sources:
            raise NotFoundError("no source is open under this number")
        return number

    # -- putting ------------------------------------------------------------------------------------------------------

    def _put(self, header: Mapping[str, object]) -> None:
        nbytes = header.get("nbytes")
        if type(nbytes) is not int or nbytes < 0:
            raise InvalidArgumentError(f"a put of {nbytes!r:.80} bytes")
        sink = self._owner.open_sink(header, nbytes)
        committed = False
        try:
            self._wire.send({"t": "ready"})
            spoilt = self._recv_blocks(sink.view)
            self._wire.limit(HEADER_BYTES_MAX)
            commit = self._wire.recv()
            self._wire.limit(REQUEST_BYTES_MAX)
            if isinstance(commit, BlockHead) or commit.get("t") != "commit":
                raise RemoteProtocolError("a commit was expected")
            if spoilt:
                raise CorruptError(f"{spoilt} blocks came with other bytes than were sent")
            answer = sink.commit(commit)
            committed = True
        finally:
            if not committed:
                sink.abort()
        self._wire.send({"t": "committed", "data": dict(answer)})

    def _recv_blocks(self, view: memoryview) -> int:
        """Fill the memory; gives how many blocks have other bytes than their checksums say."""
        spoilt = 0
        for index, ((offset, nbytes),) in enumerate(cut([(0, len(view))])):
            head = self._wire.recv()
            if not isinstance(head, BlockHead) or (head.index, head.nbytes) != (index, nbytes):
                raise RemoteProtocolError(f"block {index} of {nbytes} bytes was expected, not {head!r:.200}")
            found = self._wire.recv_block([view[offset : offset + nbytes]])
            spoilt += head.checksum is not None and found != head.checksum
        return spoilt


def send_error(wire: Wire, error: TensorbusError) -> None:
    """Answer a request with an error."""
    wire.send({"t": "error", "error": to_wire(error)})


def _check_valid(source: BulkSource) -> None:
    if not source.valid():
        raise FencedError("the source's memory was given to another use", generation=source.generation)


def _asked(header: Mapping[str, object], table: BlockTable) -> Iterator[tuple[int, Block]]:
    if "blocks" not in header:
        return enumerate(cut(_spans(header.get("spans"))))
    match header["blocks"]:
        case [int(first), int(count)] if first >= 0 and count >= 0 and first + count <= len(table):
            return iter(list(enumerate(table.blocks[first : first + count], first)))
        case other:
            raise InvalidArgumentError(f"of {len(table)} blocks, {other!r:.80} cannot be read")


def _spans(value: object) -> list[Span]:
    if not isinstance(value, list) or len(value) > SPANS_MAX:
        raise InvalidArgumentError(f"a read names up to {SPANS_MAX} spans")
    found: list[Span] = []
    for item in value:
        match item:
            case [int(offset), int(nbytes)] if offset >= 0 and 0 <= nbytes < 1 << 48:
                found.append((offset, nbytes))
            case _:
                raise InvalidArgumentError(f"a span is a pair of offset and length, not {item!r:.80}")
    return found


def _sum_of(views: Sequence[memoryview], index: int, known: BlockTable | None) -> int:
    total = None if known is None else known.sum_of(index)
    if total is None:
        total = checksum(views)
        if known is not None:
            known.learn(index, total)
    return total
