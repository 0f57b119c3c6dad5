"""A real NATS server for the session, a prefix of its own for each test, and real workers that never outlive it."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import pytest
from nats import connect

from tensorbus.bus import EmbeddedServer
from tensorbus.events import Subjects
from tensorbus.testing._processes import Processes, WorkerProgram

_numbers = count(1)


@dataclass(frozen=True)
class Nats:
    """Where the bus of one test is."""

    server: EmbeddedServer
    prefix: str

    @property
    def url(self) -> str:
        return self.server.url


@pytest.fixture(scope="session")
def nats_server() -> Iterator[EmbeddedServer]:
    home = Path(tempfile.mkdtemp(prefix="tb-nats-"))
    with EmbeddedServer(home) as server:
        yield server
    shutil.rmtree(home, ignore_errors=True)


@pytest.fixture
def nats(nats_server: EmbeddedServer) -> Iterator[Nats]:
    """The session's server and a subject prefix that only this test uses. Its streams, for each of which the server
    sets memory aside, go at the end."""
    prefix = f"t{next(_numbers)}"
    yield Nats(nats_server, prefix)
    asyncio.run(_delete_streams(nats_server.url, prefix))


async def _delete_streams(url: str, prefix: str) -> None:
    client = await connect(url)
    for stream in Subjects(prefix).streams:
        await client.request(f"$JS.API.STREAM.DELETE.{stream}", b"", timeout=10)
    await client.close()


@pytest.fixture
def processes(nats: Nats, home: Path) -> Iterator[Processes]:
    """Starts programs and workers; all are killed at the end, and their logs shown if the test failed."""
    owner = Processes(home / "test-logs", nats_url=nats.url, prefix=nats.prefix)
    yield owner
    owner.close()


@pytest.fixture
def start_worker(processes: Processes, home: Path) -> Callable[..., WorkerProgram]:
    """``start_worker("basic,gateway", id="w1", host_id="h", ...)``: a worker of the test's home that is ready."""

    def start(roles: str = "basic", **options: object) -> WorkerProgram:
        return processes.worker(roles, **{"home": home, **options})  # type: ignore[arg-type]

    return start
