"""Peers that break the bulk protocol, dawdle, or come in crowds: they end themselves, and nobody else."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tensorbus.clock import Deadline
from tensorbus.errors import TensorbusError
from tensorbus.testing._processes import Processes
from tensorbus.transport import BulkServer, Transfer, Ways
from tensorbus.transport._blocks import BlockTable
from tensorbus.transport._bulk_frames import BlockHead, encode_block_head, encode_message
from tests.paths import Lender, lending, origin, wait_for
from tests.sizes import SIZES

ROOT = Path(__file__).resolve().parents[3]
DATA = random.Random(1).randbytes(300_000)
HELLO = encode_message({"t": "hello", "version": 2})
TALK = [
    HELLO,
    encode_message({"t": "open", "tables": True}),
    encode_message({"t": "read", "source": 1, "request": 1, "sums": True, "blocks": [0, 1]}),
    encode_message({"t": "read", "source": 1, "request": 2, "sums": True, "spans": [[0, 100], [7, 100_000]]}),
    encode_message({"t": "put", "nbytes": 10}),
    encode_block_head(BlockHead(request=0, index=0, nbytes=10, checksum=None)) + bytes(10),
    encode_message({"t": "commit"}),
    encode_message({"t": "close", "source": 1}),
    encode_message({"t": "pages", "request": 3, "nbytes": 10, "count": 1}),
    encode_block_head(BlockHead(request=3, index=0, nbytes=16, checksum=None)) + bytes(16),
]
VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**70), 2**70),
        st.floats(allow_nan=False, allow_infinity=False),
        st.text(max_size=5),
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=6,
)
REQUESTS = st.fixed_dictionaries(
    {"t": st.sampled_from(["open", "read", "close", "put", "pages", "commit", "hello", "data", "", 7, None])},
    optional=dict.fromkeys(
        ("source", "request", "sums", "blocks", "spans", "tables", "nbytes", "count", "version", "manifest"), VALUES
    ),
)


@pytest.fixture(scope="module")
def server() -> Iterator[BulkServer]:
    with lending(Lender(bytearray(DATA)), hello_s=2.0, idle_s=2.0, stall_s=2.0) as found:
        yield found


def good(server: BulkServer) -> None:
    """A reader that keeps to the protocol gets the bytes."""
    room = bytearray(len(DATA))
    transfer = Transfer(BlockTable([(0, len(DATA))]).blocks, memoryview(room), tables="n", ways=Ways())
    transfer.run([origin("w1", (server.host, server.port))], deadline=Deadline(20))
    assert room == DATA


def say(server: BulkServer, data: bytes) -> bytes:
    """Send it all, hang up on this side, and read until the server does on its."""
    came = b""
    with socket.create_connection((server.host, server.port), timeout=10) as sock:
        try:
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            while got := sock.recv(65536):
                came += got
        except TimeoutError:
            raise
        except OSError:
            return came  # it hung up first
    return came


FUZZ = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


@FUZZ
@given(data=st.binary(max_size=300))
def test_any_bytes_end_only_their_own_connection(server: BulkServer, data: bytes) -> None:
    say(server, data)
    say(server, HELLO + data)


@FUZZ
@given(st.data())
def test_a_talk_that_is_cut_repeated_and_flipped_ends_only_its_own_connection(
    server: BulkServer, draw: st.DataObject
) -> None:
    order = draw.draw(st.lists(st.integers(0, len(TALK) - 1), max_size=10))
    talk = bytearray(b"".join([HELLO, *(TALK[number] for number in order)]))
    for bit in draw.draw(st.lists(st.integers(0, 8 * len(talk) - 1), max_size=3)):
        talk[bit // 8] ^= 1 << bit % 8
    say(server, bytes(talk[: draw.draw(st.integers(0, len(talk)))]))


@FUZZ
@given(requests=st.lists(REQUESTS, max_size=6))
def test_requests_of_any_content_get_an_answer_or_end_the_connection(
    server: BulkServer, requests: list[dict[str, object]]
) -> None:
    say(server, HELLO + TALK[1] + b"".join(encode_message(request) for request in requests))


def test_afterwards_the_server_is_as_good_as_before(server: BulkServer) -> None:
    good(server)
    wait_for(lambda: len(server._served) <= 1)


@pytest.mark.parametrize(
    "talk",
    [
        encode_message({"t": "hello", "version": 2, "x": "y" * 5000}),  # too much before the greeting
        HELLO + TALK[1] + encode_message({"t": "read", "source": 1, "request": 1, "spans": [[0, 1]] * 9000}),
        HELLO + encode_message({"t": "open", "x": "y" * (2 << 20)}),
        HELLO + encode_block_head(BlockHead(0, 0, 4 << 20, None)),
        encode_message({"t": "hello", "version": 1}),
    ],
)
def test_what_is_too_much_is_refused(server: BulkServer, talk: bytes) -> None:
    assert len(say(server, talk)) < 2000
    good(server)


@pytest.mark.parametrize("talk", [b"", HELLO[:20], HELLO, HELLO + TALK[1][:-3]])
def test_who_dawdles_is_closed(talk: bytes) -> None:
    with lending(Lender(bytearray(DATA)), hello_s=0.2, idle_s=0.3, stall_s=0.2) as server:
        with socket.create_connection((server.host, server.port), timeout=10) as sock:
            sock.sendall(talk)
            while sock.recv(65536):
                pass
        good(server)


def test_who_takes_his_bytes_one_by_one_is_closed() -> None:
    lender = Lender(bytearray(64 << 20))
    with lending(lender, stall_s=0.1) as server, socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.settimeout(10)
        sock.connect((server.host, server.port))
        ask = encode_message({"t": "read", "source": 1, "request": 1, "sums": False, "blocks": [0, 16]})
        sock.sendall(HELLO + TALK[1] + ask)
        with contextlib.suppress(ConnectionError):
            while server._served:
                sock.recv(500)
                threading.Event().wait(0.01)


def test_many_transfers_leave_nothing(server: BulkServer) -> None:
    def left() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    good(server)
    wait_for(lambda: len(server._served) <= 1)
    before = left()
    for _ in range(5 * SIZES.transfers):
        good(server)
    wait_for(lambda: left() <= (before[0] + 2, before[1] + 2))


LENDING = """
import sys
from tests.paths import Lender
from tensorbus.transport import BulkServer
server = BulkServer("127.0.0.1", 0, Lender(bytearray(range(256)) * 16384), connections_max=32)
print("at", server.port, flush=True)
sys.stdin.read() or __import__("threading").Event().wait()
"""


@pytest.mark.timeout(SIZES.timeout_s)
def test_a_crowd_is_served_in_turn_from_bounded_memory(tmp_path: Path) -> None:
    owner = Processes(tmp_path, nats_url=None)
    try:
        program = owner.python(LENDING, env={**os.environ, "PYTHONPATH": str(ROOT)})
        program.until("at ")
        port = int(program.text.split()[1])
        before, failed = high_water_bytes(program.pid), []

        def read() -> None:
            room = bytearray(4 << 20)
            table = BlockTable([(0, len(room))])
            transfer = Transfer(table.blocks, memoryview(room), tables="n", ways=Ways(connections=1))
            try:
                transfer.run([origin("w1", ("127.0.0.1", port))], deadline=Deadline(SIZES.timeout_s))
                if room != bytearray(range(256)) * 16384:
                    failed.append("other bytes")
            except TensorbusError as error:
                failed.append(str(error))

        threads = [threading.Thread(target=read) for _ in range(SIZES.clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failed == []
        assert high_water_bytes(program.pid) < before + (64 << 20)
    finally:
        owner.close()


def high_water_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmHWM"))) * 1024
