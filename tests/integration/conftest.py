"""A real NATS server for the session, a prefix of its own for each test, and real workers that never outlive it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tensorbus.testing._processes import Processes, WorkerProgram
from tests.servers import Choice, Server, delete_all_streams, serving


@dataclass(frozen=True)
class Nats:
    """Where the bus of one test is."""

    url: str
    prefix: str


@pytest.fixture(scope="session")
def nats_server(pytestconfig: pytest.Config) -> Iterator[Server]:
    """The session's server as ``--nats`` says. A test must leave it as it is; to hurt one, start an EmbeddedServer."""
    with serving(Choice.of(pytestconfig)) as server:
        yield server


@pytest.fixture
def nats(nats_server: Server) -> Iterator[Nats]:
    """The session's server and a subject prefix that only this test uses. Its streams, for each of which the server
    sets memory aside, go at the end."""
    # Also those of earlier tests: a heartbeat that was on its way when a test ended may have made one of them anew.
    asyncio.run(delete_all_streams(nats_server.url, nats_server.run))
    yield Nats(nats_server.url, nats_server.prefix())
    asyncio.run(delete_all_streams(nats_server.url, nats_server.run))


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
