"""A real NATS server for the session, a prefix of its own for each test, and real workers that never outlive it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tensorbus.testing._processes import Processes, WorkerProgram
from tests.servers import Choice, Server, serving


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
    """The session's server and a subject prefix that only this test uses."""
    with nats_server.prefix() as prefix:
        yield Nats(nats_server.url, prefix)


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
