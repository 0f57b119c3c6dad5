"""Calls, answers, pushes and their ends, over memory and over real sockets alike."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from itertools import chain, repeat
from typing import Any

import pytest

from tensorbus.clock import Deadline
from tensorbus.errors import (
    DeadlineExceededError,
    NotFoundError,
    OutOfSpaceError,
    TensorbusError,
    UnavailableError,
)
from tensorbus.ids import SystemIds
from tensorbus.transport import (
    Channel,
    Connection,
    LocalProtocolError,
    PeerSession,
    Push,
    Reply,
    Request,
    SocketChannel,
    memory_pair,
    serve,
)

Handler = Callable[[Request, PeerSession], Coroutine[Any, Any, Reply]]


def soon(what: str = "the test") -> Deadline:
    return Deadline(10, what=what)


def channels(kind: str) -> tuple[Channel, Channel]:
    if kind == "memory":
        return memory_pair()
    a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    return SocketChannel(a), SocketChannel(b)


@asynccontextmanager
async def served(kind: str, handler: Handler, **options: Any) -> AsyncIterator[tuple[Connection, list[PeerSession]]]:
    server, client = channels(kind)
    sessions: list[PeerSession] = []
    task = asyncio.create_task(serve(server, handler, ids=SystemIds(), on_open=sessions.append, **options))
    pushes: asyncio.Queue[Push] = asyncio.Queue()
    connection = Connection(client, on_push=pushes.put_nowait)
    connection.pushes = pushes  # type: ignore[attr-defined]
    try:
        yield connection, sessions
    finally:
        await connection.close()
        async with asyncio.timeout(10):
            await task


async def echo(request: Request, peer: PeerSession) -> Reply:
    match request.op:
        case "echo":
            return Reply({"args": request.args, "session": peer.id}, request.body)
        case "missing":
            raise NotFoundError("no artifact 'x'", artifact="x")
        case "bug":
            raise RuntimeError("our own fault")
        case "odd":
            raise NotFoundError("details that are no JSON", what=object())
        case "push":
            await peer.push("topic", {"n": 1}, body=b"body")
            return Reply()
    await asyncio.sleep(60)
    return Reply()


@pytest.fixture(params=["memory", "unix"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def test_a_call_brings_the_answer_to_its_question(kind: str) -> None:
    async with served(kind, echo) as (connection, sessions):
        replies = await asyncio.gather(
            *(connection.call("echo", {"n": n}, body=bytes([n]), deadline=soon()) for n in range(100))
        )
        assert [(r.data["args"], bytes(r.body)) for r in replies] == [({"n": n}, bytes([n])) for n in range(100)]
        assert {r.data["session"] for r in replies} == {sessions[0].id}


async def test_a_large_body_goes_both_ways(kind: str) -> None:
    body = os.urandom(5_000_000)
    async with served(kind, echo) as (connection, _):
        replies = await asyncio.gather(*(connection.call("echo", body=body, deadline=soon()) for _ in range(4)))
        assert all(reply.body == body for reply in replies)


async def test_an_error_arrives_as_the_class_that_was_raised(kind: str) -> None:
    async with served(kind, echo) as (connection, _):
        with pytest.raises(NotFoundError, match="no artifact") as caught:
            await connection.call("missing", deadline=soon())
        assert caught.value.details == {"artifact": "x"}
        with pytest.raises(NotFoundError, match="no JSON"):
            await connection.call("odd", deadline=soon())
        with pytest.raises(TensorbusError, match="RuntimeError: our own fault"):
            await connection.call("bug", deadline=soon())


async def test_arguments_that_are_no_json_are_refused_here(kind: str) -> None:
    async with served(kind, echo) as (connection, _):
        with pytest.raises(LocalProtocolError):
            await connection.call("echo", {"x": object()}, deadline=soon())
        assert (await connection.call("echo", deadline=soon())).data["args"] == {}


async def test_a_push_reaches_the_callback(kind: str) -> None:
    async with served(kind, echo) as (connection, sessions):
        await connection.call("push", deadline=soon())
        assert sessions[0].try_push("topic", {"n": 2})
        async with asyncio.timeout(10):
            got = [await connection.pushes.get() for _ in range(2)]  # type: ignore[attr-defined]
        assert [(p.topic, p.data["n"], bytes(p.body)) for p in got] == [("topic", 1, b"body"), ("topic", 2, b"")]


async def test_a_call_that_ran_out_of_time_cancels_its_handler(kind: str) -> None:
    ended = asyncio.Event()

    async def slow(request: Request, peer: PeerSession) -> Reply:
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()
        return Reply()

    async with served(kind, slow) as (connection, _):
        with pytest.raises(DeadlineExceededError):
            await connection.call("slow", deadline=Deadline(0.05, what="a slow call"))
        async with asyncio.timeout(10):
            await ended.wait()


async def test_a_cancelled_call_cancels_its_handler(kind: str) -> None:
    started, ended = asyncio.Event(), asyncio.Event()

    async def slow(request: Request, peer: PeerSession) -> Reply:
        started.set()
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()
        return Reply()

    async with served(kind, slow) as (connection, _):
        task = asyncio.create_task(connection.call("slow", deadline=soon()))
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async with asyncio.timeout(10):
            await ended.wait()


async def test_a_lost_connection_fails_its_calls_and_is_told_to_both_sides(kind: str) -> None:
    reasons: list[TensorbusError] = []
    server, client = channels(kind)
    sessions: list[PeerSession] = []
    gone = asyncio.Event()
    task = asyncio.create_task(serve(server, echo, ids=SystemIds(), on_open=sessions.append))
    connection = Connection(client, on_close=reasons.append)
    await connection.call("echo", deadline=soon())
    sessions[0].on_close(gone.set)
    call = asyncio.create_task(connection.call("wait", deadline=soon()))
    await asyncio.sleep(0)
    sessions[0].close()
    with pytest.raises(UnavailableError):
        await call
    with pytest.raises(UnavailableError):
        await connection.call("echo", deadline=soon())
    async with asyncio.timeout(10):
        await task
        await gone.wait()
    assert len(reasons) == 1
    assert sessions[0].closed
    assert not sessions[0].try_push("topic", {})
    await connection.close()
    assert len(reasons) == 1


async def test_requests_over_the_bound_wait_and_then_are_refused(kind: str) -> None:
    running, most = 0, 0
    go = asyncio.Event()

    async def counted(request: Request, peer: PeerSession) -> Reply:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await go.wait()
        running -= 1
        return Reply()

    async with served(kind, counted, concurrent_max=3, waiting_max=5) as (connection, _):
        calls = [asyncio.create_task(connection.call("x", deadline=soon())) for _ in range(12)]
        done, _ = await asyncio.wait(calls, return_when=asyncio.FIRST_EXCEPTION, timeout=10)
        assert all(isinstance(task.exception(), OutOfSpaceError) for task in done)
        go.set()
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(r) for r in results] == [Reply] * 8 + [OutOfSpaceError] * 4
        assert most == 3


async def test_descriptors_travel_both_ways_and_leftovers_are_closed() -> None:
    async def swap(request: Request, peer: PeerSession) -> Reply:
        [given] = request.fds.take()
        os.write(given, b"hello")
        os.close(given)
        return Reply(fds=request.fds.__class__([os.memfd_create("answer")]))

    before = len(os.listdir("/proc/self/fd"))
    async with served("unix", swap) as (connection, _):
        for taken in (True, False):
            read, write = os.pipe()
            reply = await connection.call("swap", fds=[write], deadline=soon())
            assert os.read(read, 10) == b"hello"
            assert os.read(read, 10) == b""  # every copy of the write end is closed
            os.close(read)
            if taken:
                [fd] = reply.fds.take()
                os.close(fd)
            del reply
    assert len(os.listdir("/proc/self/fd")) == before


async def test_a_late_answer_is_dropped_with_its_descriptors() -> None:
    answered = asyncio.Event()

    async def late(request: Request, peer: PeerSession) -> Reply:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            asyncio.current_task().uncancel()  # type: ignore[union-attr]
        answered.set()
        return Reply(fds=request.fds.__class__([os.memfd_create("late")]))

    before = len(os.listdir("/proc/self/fd"))
    async with served("unix", late) as (connection, _):
        with pytest.raises(DeadlineExceededError):
            await connection.call("late", deadline=Deadline(0.02, what="late"))
        async with asyncio.timeout(10):
            await answered.wait()
    assert len(os.listdir("/proc/self/fd")) == before


async def test_descriptors_do_not_go_over_tcp_and_are_closed() -> None:
    a, b = socket.socketpair(socket.AF_UNIX)
    channel, other = SocketChannel(a), SocketChannel(b)
    channel._unix = False
    read, write = os.pipe()
    with pytest.raises(LocalProtocolError):
        await channel.send({}, fds=[write])
    assert os.read(read, 1) == b""
    os.close(read)
    channel.close()
    other.close()


async def test_a_slow_reader_holds_the_writer_back() -> None:
    a, b = socket.socketpair(socket.AF_UNIX)
    sender, receiver = SocketChannel(a, high_water_bytes=10_000), SocketChannel(b)
    sent = 0

    async def pump() -> None:
        nonlocal sent
        for _ in range(1000):
            await sender.send({}, bytes(8_000))
            sent += 1

    task = asyncio.create_task(pump())
    for _ in range(200):
        await asyncio.sleep(0)
    assert sent < 1000  # the reader's backlog of 256 frames and the kernel's buffer are full
    for _ in range(1000):
        assert await receiver.recv() is not None
    await task
    sender.close()
    assert await receiver.recv() is None
    receiver.close()


async def test_garbage_ends_the_connection_with_a_typed_error() -> None:
    a, b = socket.socketpair(socket.AF_UNIX)
    channel = SocketChannel(a)
    connection = Connection(channel)
    call = asyncio.create_task(connection.call("x", deadline=soon()))
    await asyncio.sleep(0)
    b.send(b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(100))
    with pytest.raises(UnavailableError, match="frame begins"):
        await call
    b.close()
    await connection.close()


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n" + bytes(64), b"\x00"])
async def test_a_server_survives_a_peer_that_speaks_something_else(data: bytes) -> None:
    a, b = socket.socketpair(socket.AF_UNIX)
    task = asyncio.create_task(serve(SocketChannel(a), echo, ids=SystemIds()))
    b.send(data)
    b.close()
    async with asyncio.timeout(10):
        await task


async def test_a_delayed_memory_link_keeps_the_order() -> None:
    delays = chain([0.02, 0.0, 0.01], repeat(0.0))
    first, second = memory_pair(delay=lambda: next(delays))
    for n in range(4):
        await first.send({"n": n})
    first.close()
    assert [frame.header["n"] async for frame in second] == [0, 1, 2, 3]
    second.close()
