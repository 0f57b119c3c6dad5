"""Bulk transfers over real TCP sockets: right bytes, or a typed error."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import pytest
import xxhash
from blake3 import blake3

from tensorbus.clock import Deadline
from tensorbus.errors import (
    ConflictError,
    CorruptError,
    DeadlineExceededError,
    FencedError,
    InvalidArgumentError,
    NotFoundError,
    OutOfSpaceError,
    TensorbusError,
    UnavailableError,
)
from tensorbus.transport import BlockTable, BulkClient, BulkServer, BulkSink, BulkSource, SourceTables, encode
from tensorbus.transport._bulk_frames import BlockHead, encode_block_head
from tensorbus.transport._frames import Frame

PARTS = (os.urandom(5_000), os.urandom(9_000_000))
WHOLE = PARTS[0] + bytes(8192 - 5_000) + PARTS[1]


def new_tables() -> SourceTables:
    spans = [(0, len(PARTS[0])), (8192, len(PARTS[1]))]
    return SourceTables(manifest="[]", layout="{}", name="n", blocks=BlockTable(spans))


@dataclass
class Owner:
    """Lends :data:`PARTS` and takes puts in."""

    valid: bool = True
    refuse_commit: bool = False
    opened: int = 0
    released: int = 0
    aborted: int = 0
    checks_until_fenced: int | None = None
    sinks: list[bytearray] = field(default_factory=list)
    tables: SourceTables = field(default_factory=new_tables)

    def open_source(self, request: Mapping[str, object]) -> BulkSource:
        if request.get("artifact") != "a":
            raise NotFoundError("no such artifact", artifact=request.get("artifact"))
        self.opened += 1
        return BulkSource(
            tables=self.tables,
            nbytes=len(WHOLE),
            parts=[memoryview(part) for part in PARTS],
            generation=7,
            valid=self.check,
            release=self.release,
        )

    def check(self) -> bool:
        if self.checks_until_fenced is not None:
            self.checks_until_fenced -= 1
            return self.checks_until_fenced >= 0
        return self.valid

    def release(self) -> None:
        self.released += 1

    def open_sink(self, request: Mapping[str, object], nbytes: int) -> BulkSink:
        if nbytes > 100_000_000:
            raise OutOfSpaceError("too large")
        sink = bytearray(nbytes)
        self.sinks.append(sink)

        def commit(fields: Mapping[str, object]) -> Mapping[str, object]:
            if self.refuse_commit:
                raise UnavailableError("the log is away")
            return {"digest": blake3(sink).hexdigest(), "key": fields["key"], "name": request["name"]}

        return BulkSink(view=memoryview(sink), commit=commit, abort=self.abort)

    def abort(self) -> None:
        self.aborted += 1


def soon(seconds: float = 20.0) -> Deadline:
    return Deadline(seconds, what="the transfer")


@pytest.fixture
def owner() -> Owner:
    return Owner()


@pytest.fixture
def server(owner: Owner) -> Iterator[BulkServer]:
    server = BulkServer("127.0.0.1", 0, owner, connections_max=4, spare_s=60.0)
    yield server
    server.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("bulk")]
    assert owner.released == owner.opened


@pytest.fixture
def client(server: BulkServer) -> Iterator[BulkClient]:
    client = BulkClient.connect(server.host, server.port, deadline=soon())
    yield client
    client.close()


def wait_until(condition: object, *, seconds: float = 10.0) -> None:
    deadline = Deadline(seconds)
    while not condition():  # type: ignore[operator]
        assert deadline.left(), "the condition never held"
        time.sleep(0.005)


def test_spans_arrive_where_they_are_wanted(client: BulkClient, owner: Owner) -> None:
    source = client.open({"artifact": "a"}, deadline=soon())
    assert (source.nbytes, source.generation, source.manifest) == (len(WHOLE), 7, "[]")
    ranges = [(0, 10), (4_990, 20), (0, 0), (8_192, 9_000_000), (len(WHOLE) - 1, 1), (0, len(WHOLE))]
    buffers = [bytearray(nbytes) for _, nbytes in ranges]
    reads = [(offset, memoryview(buffer)) for (offset, _), buffer in zip(ranges, buffers, strict=True)]
    client.read_into(source.source, reads, deadline=soon())
    for (offset, nbytes), buffer in zip(ranges, buffers, strict=True):
        assert buffer == WHOLE[offset : offset + nbytes]
    client.close_source(source.source, deadline=soon())
    assert owner.released == 1
    with pytest.raises(NotFoundError):
        client.read_into(source.source, reads, deadline=soon())


def test_many_small_ranges_arrive_in_order(client: BulkClient) -> None:
    source = client.open({"artifact": "a"}, deadline=soon())
    buffers = [bytearray(37) for _ in range(20_000)]
    reads = [(10_000 + 41 * n, memoryview(buffer)) for n, buffer in enumerate(buffers)]
    client.read_into(source.source, reads, deadline=soon())
    assert all(buffer == WHOLE[offset : offset + 37] for (offset, _), buffer in zip(reads, buffers, strict=True))


def test_an_error_of_the_owner_is_the_answer_and_the_connection_goes_on(client: BulkClient) -> None:
    with pytest.raises(NotFoundError, match="no such artifact"):
        client.open({"artifact": "b"}, deadline=soon())
    source = client.open({"artifact": "a"}, deadline=soon())
    for offset, nbytes in ((-1, 5), (len(WHOLE), 1), (1 << 62, 1)):
        with pytest.raises(InvalidArgumentError):
            client.read_into(source.source, [(offset, memoryview(bytearray(nbytes)))], deadline=soon())
    assert not client.closed


def test_a_source_fenced_before_the_end_gives_no_bytes(client: BulkClient, owner: Owner) -> None:
    source = client.open({"artifact": "a"}, deadline=soon())
    read = [(0, memoryview(bytearray(10)))]
    owner.checks_until_fenced = 2  # valid before the request and before the block, not after it
    with pytest.raises(FencedError):
        client.read_into(source.source, read, deadline=soon())
    owner.checks_until_fenced = 0
    with pytest.raises(FencedError):
        client.read_into(source.source, read, deadline=soon())
    assert not client.closed


def test_a_source_fenced_within_a_read_answers_so_and_the_connection_goes_on(client: BulkClient, owner: Owner) -> None:
    source = client.open({"artifact": "a"}, deadline=soon())
    owner.checks_until_fenced = 2
    with pytest.raises(FencedError):
        client.read_into(source.source, [(0, memoryview(bytearray(len(WHOLE))))], deadline=soon())
    owner.checks_until_fenced = None
    room = bytearray(10)
    client.read_into(source.source, [(0, memoryview(room))], deadline=soon())
    assert room == WHOLE[:10]


def test_a_put_is_committed_by_the_owner(client: BulkClient, owner: Owner) -> None:
    data = os.urandom(6_000_000)
    answer = client.put(
        {"name": "n"}, [memoryview(data)[:10], memoryview(data)[10:]], commit={"key": "k"}, deadline=soon()
    )
    assert answer == {"digest": blake3(data).hexdigest(), "key": "k", "name": "n"}
    assert owner.aborted == 0


def test_a_put_that_is_refused_before_or_after_its_bytes_leaves_the_connection(
    client: BulkClient, owner: Owner
) -> None:
    owner.refuse_commit = True
    with pytest.raises(UnavailableError, match="the log is away"):
        client.put({"name": "n"}, [memoryview(b"x")], commit={"key": "k"}, deadline=soon())
    assert owner.aborted == 1
    assert not client.closed
    owner.refuse_commit = False
    assert client.put({"name": "n"}, [], commit={"key": "k"}, deadline=soon())["key"] == "k"


def test_a_caller_that_dies_within_a_put_is_aborted(server: BulkServer, owner: Owner) -> None:
    with socket.create_connection((server.host, server.port)) as sock:
        for header, body in (({"t": "hello", "version": 2}, b""), ({"t": "put", "nbytes": 5, "name": "n"}, b"")):
            sock.sendall(b"".join(bytes(piece) for piece in encode(Frame(header=header, body=body))))
        wait_until(lambda: owner.sinks)
    wait_until(lambda: owner.aborted == 1)


def test_a_dead_reader_gives_its_sources_back(server: BulkServer, owner: Owner) -> None:
    client = BulkClient.connect(server.host, server.port, deadline=soon())
    client.open({"artifact": "a"}, deadline=soon())
    client.close()
    wait_until(lambda: owner.released == 1)


def test_a_server_that_does_not_greet_runs_into_the_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(DeadlineExceededError):
        BulkClient.connect("127.0.0.1", silent.getsockname()[1], deadline=soon(0.1))


def test_a_close_wakes_the_thread_that_waits(server: BulkServer, owner: Owner) -> None:
    reached, go = threading.Event(), threading.Event()
    errors: list[BaseException] = []

    def wait(fields: Mapping[str, object]) -> Mapping[str, object]:
        reached.set()
        go.wait(10)
        return {}

    owner.open_sink = lambda request, nbytes: BulkSink(  # type: ignore[method-assign]
        view=memoryview(bytearray(nbytes)), commit=wait, abort=owner.abort
    )
    client = BulkClient.connect(server.host, server.port, deadline=soon())

    def put() -> None:
        try:
            client.put({}, [memoryview(b"x")], deadline=soon())
        except TensorbusError as exc:
            errors.append(exc)

    thread = threading.Thread(target=put)
    thread.start()
    assert reached.wait(10)
    client.close()
    thread.join(10)
    go.set()
    assert isinstance(errors[0], UnavailableError)
    assert "closed here" in str(errors[0])


def test_a_server_that_ends_fails_its_readers_and_leaves_nothing(server: BulkServer, owner: Owner) -> None:
    client = BulkClient.connect(server.host, server.port, deadline=soon())
    source = client.open({"artifact": "a"}, deadline=soon())
    server.close()
    with pytest.raises(UnavailableError):
        client.read_into(source.source, [(0, memoryview(bytearray(10)))], deadline=soon())
    with pytest.raises(UnavailableError):
        BulkClient.connect(server.host, server.port, deadline=soon())


def test_connections_over_the_bound_are_told_so(server: BulkServer) -> None:
    clients = [BulkClient.connect(server.host, server.port, deadline=soon()) for _ in range(4)]
    with pytest.raises(UnavailableError):
        BulkClient.connect(server.host, server.port, deadline=soon())
    clients.pop().close()
    wait_until(lambda: len(server._served) == 3)
    clients.append(BulkClient.connect(server.host, server.port, deadline=soon()))
    for client in clients:
        client.close()


def test_connections_that_ask_for_nothing_make_room_for_those_that_do(owner: Owner) -> None:
    server = BulkServer("127.0.0.1", 0, owner, connections_max=4, spare_s=0.0)
    silent = [socket.create_connection((server.host, server.port)) for _ in range(2)]
    greeted = [BulkClient.connect(server.host, server.port, deadline=soon()) for _ in range(2)]
    for _ in range(8):
        client = BulkClient.connect(server.host, server.port, deadline=soon())
        client.open({"artifact": "a"}, deadline=soon())
        client.close()
    for sock in silent:
        sock.close()
    for client in greeted:
        client.close()
    server.close()
    assert owner.released == owner.opened


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + bytes(64), b"\x00" * 64, b"tb"])
def test_garbage_ends_only_its_own_connection(server: BulkServer, garbage: bytes) -> None:
    with socket.create_connection((server.host, server.port)) as sock:
        sock.sendall(garbage)
        sock.settimeout(10)
        with contextlib.suppress(OSError):  # it may have hung up before we are done
            sock.shutdown(socket.SHUT_WR)
            assert sock.recv(10) == b""
    BulkClient.connect(server.host, server.port, deadline=soon()).close()


END = b"".join(map(bytes, encode(Frame(header={"t": "end"}))))
RIGHT = -1


def block(data: bytes, *, request: int = 1, index: int = 0, checksum: int | None = RIGHT) -> bytes:
    total = xxhash.xxh3_64_intdigest(data) if checksum == RIGHT else checksum
    return encode_block_head(BlockHead(request=request, index=index, nbytes=len(data), checksum=total)) + data


def fake_server(*answers: bytes) -> tuple[int, threading.Thread]:
    """A server that greets and then says what it is told, one piece per request."""
    listener = socket.create_server(("127.0.0.1", 0))
    hello = b"".join(bytes(piece) for piece in encode(Frame(header={"t": "hello", "version": 2})))

    def run() -> None:
        with listener, listener.accept()[0] as sock:
            for answer in (hello, *answers):
                sock.recv(65536)
                sock.sendall(answer)

    thread = threading.Thread(target=run)
    thread.start()
    return listener.getsockname()[1], thread


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"\xff" * 64, CorruptError),
        (block(b"too long"), CorruptError),
        (block(b"1234", index=1), CorruptError),
        (block(b"1234", request=2), CorruptError),
        (block(b"1234"), UnavailableError),  # and no end
        (block(b"1234")[:-2], UnavailableError),
        (block(b"1234", checksum=7) + END, CorruptError),
        (block(b"1234", checksum=None) + END, CorruptError),
        (b"".join(map(bytes, encode(Frame(header={"t": "end"})))), CorruptError),
    ],
)
def test_a_broken_answer_is_an_error_and_never_a_result(answer: bytes, error: type[TensorbusError]) -> None:
    port, thread = fake_server(answer)
    client = BulkClient.connect("127.0.0.1", port, deadline=soon())
    with pytest.raises(error):
        client.read_into(1, [(0, memoryview(bytearray(4)))], deadline=soon())
    assert client.closed
    thread.join()


def test_a_taken_port_conflicts(server: BulkServer, owner: Owner) -> None:
    with pytest.raises(ConflictError):
        BulkServer("127.0.0.1", server.port, owner)
