"""A server that knows its users: what it refuses is told at once, not by a timeout."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tensorbus.bus import EmbeddedServer, NatsBus, append, provision
from tensorbus.bus import _server as server_module
from tensorbus.clock import Deadline
from tensorbus.errors import DeadlineExceededError, DeniedError, OutOfSpaceError, UnavailableError
from tensorbus.testing._bus_contract import LIFE, W1, W2, headers, replica_added, soon

pytestmark = pytest.mark.integration

USERS = """
authorization {
  users: [
    { user: admin, password: a }
    { user: w1, password: b, permissions: {
        publish: ["tb.ev.*.*.w1", "tb.live.*.w1", "$JS.API.STREAM.>"], subscribe: "_INBOX_w1.>" } }
  ]
}
"""


@pytest.fixture
def server(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EmbeddedServer]:
    plain = server_module._config
    monkeypatch.setattr(server_module, "_config", lambda *args, **kwargs: plain(*args, **kwargs) + USERS)
    with EmbeddedServer(home / "nats") as server:
        yield server


def url(server: EmbeddedServer, user: str) -> str:
    return server.url.replace("//", f"//{user}@")


async def test_what_the_server_refuses_is_denied_at_once(server: EmbeddedServer) -> None:
    with pytest.raises(DeniedError):
        await NatsBus.connect(url(server, "w1:wrong"), deadline=soon())
    with pytest.raises(DeniedError):
        await NatsBus.connect(server.url, deadline=soon())
    admin = await NatsBus.connect(url(server, "admin:a"))
    await provision(admin, deadline=soon())
    bus = await NatsBus.connect(url(server, "w1:b"), name="w1")
    await append(bus, replica_added(), headers(author=W1), deadline=soon())
    async with asyncio.timeout(2):
        with pytest.raises(DeniedError, match=r"replica.*w2"):
            await append(bus, replica_added(), headers(author=W2), deadline=soon())
        with pytest.raises(DeniedError):
            await bus.beat(bus.subjects.live(LIFE, W2), ttl_s=2, deadline=soon())
        async with bus.read(bus.subjects.facts, after=0) as reader:
            with pytest.raises(DeniedError):
                await anext(aiter(reader))
    await bus.close()
    await admin.close()


async def test_a_connection_that_is_refused_for_a_while_comes_back(server: EmbeddedServer) -> None:
    admin = await NatsBus.connect(url(server, "admin:a"))
    await provision(admin, deadline=soon())
    await asyncio.to_thread(server.stop)
    config, users = server_module._config, USERS
    try:
        server_module._config = lambda *args, **kwargs: config(*args, **kwargs).replace("password: a ", "password: c ")
        await asyncio.to_thread(server.start)
        with pytest.raises((UnavailableError, DeadlineExceededError)):
            await append(admin, replica_added(), headers(), deadline=Deadline(1.0))
        await asyncio.to_thread(server.stop)
    finally:
        server_module._config = config
    assert users == USERS
    await asyncio.to_thread(server.start)
    await append(admin, replica_added(), headers(), deadline=soon())
    await admin.close()


async def test_a_server_without_room_is_out_of_space(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = server_module._config

    def small(*args: object, **kwargs: object) -> str:
        text = plain(*args, **kwargs)  # type: ignore[arg-type]
        assert "max_file: 1TB" in text
        return text.replace("max_file: 1TB", "max_file: 1MB")

    monkeypatch.setattr(server_module, "_config", small)
    with EmbeddedServer(home / "small") as server:
        bus = await NatsBus.connect(server.url)
        with pytest.raises(OutOfSpaceError):
            await provision(bus, deadline=soon())
        await bus.close()
    assert json.loads((home / "small" / "server.json").read_text())["port"] > 0
