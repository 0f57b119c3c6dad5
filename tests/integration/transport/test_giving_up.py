"""Calls that are given up: nothing of them stays on either side."""

from __future__ import annotations

import asyncio
import os
import socket

import pytest

from tensorbus.clock import Deadline
from tensorbus.errors import DeadlineExceededError, TensorbusError
from tensorbus.ids import SystemIds
from tensorbus.transport import (
    Connection,
    PeerSession,
    Reply,
    Request,
    SocketChannel,
    serve,
)


class Granting:
    """A server that grants something with each answer and counts what is out."""

    def __init__(self) -> None:
        self.out = 0
        self.pause_s = 0.0

    async def __call__(self, request: Request, session: PeerSession) -> Reply:
        await asyncio.sleep(self.pause_s)
        return self.grant()

    def grant(self) -> Reply:
        self.out += 1
        return Reply({}, undo=self._take_back)

    def _take_back(self) -> None:
        self.out -= 1


def pair() -> tuple[SocketChannel, SocketChannel]:
    one, other = socket.socketpair()
    return SocketChannel(one), SocketChannel(other)


async def test_thousands_of_calls_given_up_at_once_leave_the_connection_usable() -> None:
    here, there = pair()
    granting = Granting()
    server = asyncio.create_task(serve(there, granting, ids=SystemIds()))
    async with Connection(here) as connection:
        for _ in range(5000):
            call = asyncio.ensure_future(connection.call("x", deadline=Deadline(5)))
            await asyncio.sleep(0)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
        await connection.call("x", deadline=Deadline(5))
        async with asyncio.timeout(5):
            while granting.out != 1:
                await asyncio.sleep(0.01)
    await server


async def test_an_answer_that_comes_too_late_is_taken_back() -> None:
    here, there = pair()
    granting = Granting()
    granting.pause_s = 0.002
    server = asyncio.create_task(serve(there, granting, ids=SystemIds()))
    kept = 0
    async with Connection(here) as connection:
        for number in range(300):
            try:
                await connection.call("x", deadline=Deadline(0.001 + number % 30 * 0.0001))
                kept += 1
            except DeadlineExceededError:
                continue
        async with asyncio.timeout(5):
            while granting.out != kept:
                await asyncio.sleep(0.01)
    await server


async def test_an_answer_is_taken_back_at_the_moment_at_which_it_is_given() -> None:
    """The word that the caller gives up comes between the answer and the end of its task."""
    here, there = pair()
    granting = Granting()

    async def handler(request: Request, session: PeerSession) -> Reply:
        here.post({"t": "cancel", "id": 1})
        there._on_readable()
        return granting.grant()

    server = asyncio.create_task(serve(there, handler, ids=SystemIds()))
    here.post({"t": "call", "id": 1, "op": "x", "args": {}, "timeout_s": 5.0})
    async with asyncio.timeout(5):
        assert (await here.recv()) is not None
        while granting.out != 0:
            await asyncio.sleep(0)
    here.close()
    await server


async def test_an_answer_that_waits_for_a_slow_reader_is_taken_back() -> None:
    here, there = pair()
    granting = Granting()

    async def handler(request: Request, session: PeerSession) -> Reply:
        return Reply({}, bytes(8 << 20), undo=granting.grant().undo)

    server = asyncio.create_task(serve(there, handler, ids=SystemIds()))
    here._read(False)
    here.post({"t": "call", "id": 1, "op": "x", "args": {}, "timeout_s": 5.0})
    async with asyncio.timeout(5):
        while granting.out != 1:
            await asyncio.sleep(0)
        here.post({"t": "cancel", "id": 1})
        while granting.out != 0:
            await asyncio.sleep(0)
    here.close()
    await server


@pytest.mark.parametrize("timeout", ["1" + "0" * 400, "-1", "1e300", "NaN", '"x"'])
async def test_a_senseless_timeout_ends_that_connection_alone(timeout: str) -> None:
    from tensorbus.transport._frames import PREFIX_BYTES, encode_head

    here, there = pair()
    server = asyncio.create_task(serve(there, Granting(), ids=SystemIds()))
    good = encode_head({"t": "call", "id": 1, "op": "x", "args": {}, "timeout_s": 7777}, body_bytes=0)
    text = bytes(good[PREFIX_BYTES:]).replace(b"7777", timeout.encode())
    raw = _with_header(text)
    sock = here._sock
    sock.setblocking(True)
    sock.sendall(raw)
    await asyncio.wait_for(server, 5)  # it ends by itself, and without an error of its own
    sock.close()


def _with_header(text: bytes) -> bytes:
    import struct
    import zlib

    front = struct.pack("<4sBBHIIQI", b"tbus", 1, 0, 0, len(text), zlib.crc32(text), 0, 0)
    return front + struct.pack("<I", zlib.crc32(front)) + text


async def test_descriptors_of_a_call_that_is_cancelled_before_its_handler_starts_are_closed() -> None:
    here, there = pair()
    server = asyncio.create_task(serve(there, Granting(), ids=SystemIds()))
    before = len(os.listdir("/proc/self/fd"))
    async with Connection(here) as connection:
        for _ in range(50):
            fd = os.open("/dev/null", os.O_RDONLY)
            call = asyncio.ensure_future(connection.call("x", fds=[fd], deadline=Deadline(5)))
            await asyncio.sleep(0)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
        await connection.call("x", deadline=Deadline(5))
        assert len(os.listdir("/proc/self/fd")) <= before + 1
    try:
        await server
    except TensorbusError:
        pytest.fail("the server must outlive its peers")
