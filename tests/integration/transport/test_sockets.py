"""Listening and connecting on this machine's real sockets."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
from pathlib import Path

import pytest

from tensorbus.clock import Deadline
from tensorbus.errors import ConflictError, InvalidArgumentError, UnavailableError
from tensorbus.ids import SystemIds
from tensorbus.transport import (
    Connection,
    PeerSession,
    Reply,
    Request,
    connect_tcp,
    connect_unix,
    listen_tcp,
    listen_unix,
    serve_listener,
)


def soon() -> Deadline:
    return Deadline(10, what="the test")


async def who(request: Request, peer: PeerSession) -> Reply:
    return Reply({"pid": peer.info.pid, "uid": peer.info.uid})


async def test_a_long_path_serves_this_user_and_knows_the_peer(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 100) / ("y" * 100)
    folder.mkdir(parents=True)
    path = folder / "worker.sock"
    listener = await listen_unix(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    async with asyncio.TaskGroup() as group:
        task = group.create_task(serve_listener(listener, who, ids=SystemIds()))
        async with Connection(await connect_unix(path, deadline=soon())) as connection:
            reply = await connection.call("who", deadline=soon())
        task.cancel()
    assert reply.data == {"pid": os.getpid(), "uid": os.getuid()}
    assert not path.exists()


async def test_a_second_listener_is_refused_and_a_stale_socket_replaced(tmp_path: Path) -> None:
    path = tmp_path / "s"
    first = await listen_unix(path)
    with pytest.raises(ConflictError, match="already"):
        await listen_unix(path)
    assert path.exists()
    first._sock.close()  # as a killed process leaves it
    with pytest.raises(UnavailableError):
        await connect_unix(path, deadline=soon())
    second = await listen_unix(path)
    first.close()
    assert path.exists()  # the first one's end does not take the second one's path
    second.close()
    assert not path.exists()


async def test_what_is_no_socket_is_not_removed(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_text("precious")
    with pytest.raises(ConflictError, match="no socket"):
        await listen_unix(path)
    assert path.read_text() == "precious"


async def test_missing_places_are_typed_errors(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError):
        await connect_unix(tmp_path / "none", deadline=soon())
    with pytest.raises(UnavailableError):
        await connect_unix(tmp_path / "no" / "folder", deadline=soon())
    with pytest.raises(UnavailableError):
        await listen_unix(tmp_path / "no" / "folder")
    with pytest.raises(InvalidArgumentError):
        await listen_unix(tmp_path / ("z" * 90))
    with pytest.raises(InvalidArgumentError):
        await listen_tcp("192.0.2.1", 0)


async def test_tcp_serves_without_delay_and_a_taken_port_conflicts() -> None:
    listener = await listen_tcp("127.0.0.1")
    with pytest.raises(ConflictError):
        await listen_tcp("127.0.0.1", listener.port)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(serve_listener(listener, who, ids=SystemIds()))
        channel = await connect_tcp("127.0.0.1", listener.port, deadline=soon())
        assert channel._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        async with Connection(channel) as connection:
            reply = await connection.call("who", deadline=soon())
        task.cancel()
    assert reply.data == {"pid": None, "uid": None}
    with pytest.raises(UnavailableError):
        await connect_tcp("127.0.0.1", listener.port, deadline=soon())


async def test_connections_beyond_the_backlog_wait_for_their_turn(tmp_path: Path) -> None:
    path = tmp_path / "s"
    listener = await listen_unix(path)
    listener._sock.listen(1)
    connecting = [asyncio.create_task(connect_unix(path, deadline=soon())) for _ in range(8)]
    accepted = [await listener.accept() for _ in range(8)]
    for channel in [*accepted, *await asyncio.gather(*connecting)]:
        channel.close()
    listener.close()
