"""Questions over a real server that goes away, comes back, or forbids."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from nats import connect as nats_connect

from tensorbus.bus import EmbeddedServer, NatsBus, provision
from tensorbus.bus import _server as server_module
from tensorbus.clock import Deadline
from tensorbus.errors import DeadlineExceededError, DeniedError, UnavailableError
from tensorbus.testing._bus_contract import echo, fill, soon

pytestmark = pytest.mark.integration

USERS = """
authorization {
  users: [
    { user: admin, password: a }
    { user: w1, password: b, permissions: {
        publish: ["tb.ev.>", "$JS.API.STREAM.INFO.>", "$JS.API.STREAM.MSG.GET.>"], subscribe: "_INBOX_tensorbus.>" } }
  ]
}
"""


@pytest.fixture
async def server(home: Path) -> AsyncIterator[EmbeddedServer]:
    with EmbeddedServer(home / "nats") as server:
        yield server


@pytest.fixture
async def connect(server: EmbeddedServer) -> AsyncIterator[Callable[[], Awaitable[NatsBus]]]:
    buses: list[NatsBus] = []

    async def connect() -> NatsBus:
        buses.append(await NatsBus.connect(server.url))
        return buses[-1]

    yield connect
    for bus in buses:
        await bus.close()


Connect = Callable[[], Awaitable[NatsBus]]


async def kill(server: EmbeddedServer) -> None:
    assert server.pid is not None
    os.kill(server.pid, signal.SIGKILL)
    async with soon().scope():
        while server.pid is not None:
            await asyncio.sleep(0.01)


async def test_questions_outlast_a_killed_server(server: EmbeddedServer, connect: Connect) -> None:
    bus, other = await connect(), await connect()
    subject, go, begun = bus.subjects.rpc("x"), asyncio.Event(), list[bytes]()

    async def handle(question: bytes) -> bytes:
        begun.append(question)
        if question == b"long":
            await go.wait()
        return question

    async with other.answer(subject, handle, queue="q"), asyncio.TaskGroup() as group:
        long = group.create_task(bus.ask(subject, b"long", deadline=soon()))
        for n in range(2):
            await kill(server)
            asking = group.create_task(bus.ask(subject, str(n).encode(), deadline=soon()))
            await asyncio.sleep(0.2)
            assert not asking.done()
            await asyncio.to_thread(server.start)
            assert await asking == str(n).encode()
        go.set()
        assert await long == b"long"
    assert 1 <= begun.count(b"long") <= 3  # asked again after each loss, and mostly known to be under way


async def test_answers_go_on_with_a_new_client(connect: Connect) -> None:
    bus, other = await connect(), await connect()
    subject = bus.subjects.rpc("x")
    async with other.answer(subject, echo, queue="q"):
        for n in range(2):
            generation = other._link.generation
            await other._link.client.close()  # as nats-py does when it gives up
            async with soon().scope():
                while other._link.generation == generation:
                    await asyncio.sleep(0.01)
                while True:  # its keeper has to notice first
                    try:
                        assert await bus.ask(subject, str(n).encode(), deadline=soon()) == str(n).encode()
                        break
                    except UnavailableError:
                        continue


async def test_a_server_that_stays_away(server: EmbeddedServer, connect: Connect) -> None:
    bus, other = await connect(), await connect()
    subject = bus.subjects.rpc("x")
    async with other.answer(subject, echo, queue="q"):
        await kill(server)
        with pytest.raises((UnavailableError, DeadlineExceededError)):
            await bus.ask(subject, b"?", deadline=Deadline(0.5))
    # Who begins to answer while the server is away is heard once it is back.
    async with asyncio.TaskGroup() as group:
        starting = group.create_task(asyncio.to_thread(server.start))
        async with other.answer(subject, echo, queue="q"):
            await starting
            assert await bus.ask(subject, b"?", deadline=soon()) == b"?"


async def test_what_the_server_refuses_is_denied_at_once(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = server_module._config
    monkeypatch.setattr(server_module, "_config", lambda *args, **kwargs: plain(*args, **kwargs) + USERS)
    with EmbeddedServer(home / "nats") as server:
        admin = await NatsBus.connect(server.url.replace("//", "//admin:a@"))
        await provision(admin, deadline=soon())
        bus = await NatsBus.connect(server.url.replace("//", "//w1:b@"))
        written = await fill(bus, 2)
        subject = bus.subjects.rpc("x")
        async with asyncio.timeout(3):
            with pytest.raises(DeniedError):
                await bus.ask(subject, b"?", deadline=soon())
            with pytest.raises(DeniedError):
                async with bus.answer(subject, echo, queue="q"):
                    pass
            with pytest.raises(DeniedError):
                await bus.purge("tb.ev.>", upto=written[0], deadline=soon())
        assert (await admin.log_state(deadline=soon())).messages == 2
        await bus.close()
        await admin.close()


async def test_a_stream_that_denies_purges_says_so(server: EmbeddedServer, connect: Connect) -> None:
    bus = await connect()
    await provision(bus, deadline=soon())
    written = await fill(bus, 2)
    client = await nats_connect(server.url)
    stream = client.jetstream()
    config = (await stream.stream_info("TB")).config
    config.deny_purge = True
    await stream.update_stream(config)
    with pytest.raises(DeniedError):
        await bus.purge("tb.ev.>", upto=written[1], deadline=soon())
    await client.close()
