"""A bus, workers and callers as real processes, to be killed, stopped and cut off."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tensorbus.bus import EmbeddedServer
from tensorbus.clock import Deadline
from tensorbus.errors import NotFoundError
from tensorbus.testing._nats_cluster import NatsCluster
from tensorbus.testing._processes import Processes, Program, WorkerProgram, wait_until
from tests.integration.workers.raw import Raw
from tests.sizes import SIZES

FENCED_EXIT = 4
TTL_S = 2.0
CLUSTER_TTL_S = 10.0
WAIT_S = 60.0
"""A busy machine takes its time; what is waited for is a condition, never this."""


class Place:
    """One home, and the processes of a test in it.

    Attributes:
        processes: Owner of all that is started.
        settings: Given to every worker.
    """

    def __init__(self, home: Path, url: str, **settings: object) -> None:
        self.home = home
        self.url = url
        self.processes = Processes(home / "test-logs", nats_url=url)
        self.settings = settings
        self._homes = 0

    def configure(self, **settings: object) -> None:
        """Settings for all that is started in the home from now on, by its file."""
        lines = (f"{name} = {json.dumps(value)}\n" for name, value in settings.items())
        (self.home / "config.toml").write_text("".join(lines), encoding="utf-8")

    def worker(self, roles: str = "basic", **options: object) -> WorkerProgram:
        """A worker; ``apart=True`` gives it a home of its own, since two of one id cannot share one."""
        home = self.home
        if options.pop("apart", False):
            self._homes += 1
            home = self.home / f"h{self._homes}"
        ready = options.pop("ready", True)
        asked = {**self.settings, **options}
        program = self.processes.worker(roles, home=home, ready=False, **asked)  # type: ignore[arg-type]  # passed on
        if ready:
            program.until('{"event": "ready"', timeout_s=WAIT_S)
            program.await_ready()
        return program

    async def up(self, roles: str = "basic", **options: object) -> WorkerProgram:
        """A worker that is ready, for a test whose own loop carries the worker's connections."""
        program = self.worker(roles, ready=False, **options)
        await asyncio.to_thread(program.until, '{"event": "ready"', timeout_s=WAIT_S)
        program.await_ready()
        return program

    def actor(
        self, verb: str, worker: WorkerProgram, *, env: Mapping[str, str] | None = None, **given: object
    ) -> Program:
        """A caller in a process of its own."""
        words = json.dumps({"socket": str(worker.socket), **given})
        command = [sys.executable, "-m", "tests.integration.workers.actor", verb, words]
        return self.processes.run(command, name=f"actor-{verb}", env=env)


class Field(Place):
    """One home with a NATS server of its own, so that a test may hurt that too.

    Attributes:
        server: The bus.
    """

    def __init__(self, home: Path, server: EmbeddedServer) -> None:
        super().__init__(home, server.url)
        self.server = server

    def pause_bus(self) -> None:
        assert self.server.pid is not None
        os.kill(self.server.pid, signal.SIGSTOP)
        stat = Path(f"/proc/{self.server.pid}/stat")
        wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", what="the stop of the bus")

    def resume_bus(self) -> None:
        assert self.server.pid is not None
        os.kill(self.server.pid, signal.SIGCONT)

    def kill_bus(self) -> None:
        assert self.server.pid is not None
        os.kill(self.server.pid, signal.SIGKILL)
        wait_until(lambda: self.server.pid is None, what="the end of the bus")


class Trio(Place):
    """One home with three servers that replicate among themselves, whose elections take seconds.

    Attributes:
        cluster: The bus.
    """

    def __init__(self, home: Path, cluster: NatsCluster) -> None:
        super().__init__(home, cluster.url, nats_replicas=3, session_ttl_s=CLUSTER_TTL_S)
        self.cluster = cluster


@pytest.fixture
def field(home: Path) -> Iterator[Field]:
    with EmbeddedServer(home / "nats") as server:
        found = Field(home, server)
        try:
            yield found
        finally:
            if server.pid is not None:
                found.resume_bus()
            found.processes.close()


@pytest.fixture
def trio(home: Path) -> Iterator[Trio]:
    with NatsCluster(home / "nats") as cluster:
        found = Trio(home, cluster)
        try:
            yield found
        finally:
            for number in range(len(cluster.servers)):
                cluster.resume(number)
            found.processes.close()


def said(program: Program, event: str) -> dict[str, Any]:
    """The first line of an actor that tells of an event; waits for it."""
    mark = f'"event": "{event}"'
    program.until(mark, timeout_s=SIZES.timeout_s)
    return next(json.loads(line) for line in program.text.splitlines() if mark in line)


def fds(program: Program) -> int:
    return len(os.listdir(f"/proc/{program.pid}/fd"))


async def eventually(raw: Raw, what: str, *path: str, equals: object, timeout_s: float = WAIT_S) -> None:
    """Wait until a figure of ``stats`` is as given."""
    async with Deadline(timeout_s, what=what).scope():
        while True:
            found: Any = await raw.stats()
            for name in path:
                found = found[name]
            if found == equals:
                return
            await asyncio.sleep(0.02)


async def gone(raw: Raw, ref: str, *, timeout_s: float = WAIT_S) -> NotFoundError:
    """Wait until nothing has that name, and give the error that says so."""
    async with Deadline(timeout_s, what=f"the end of {ref}").scope():
        while True:
            try:
                await raw.resolve(ref)
            except NotFoundError as error:
                return error
            await asyncio.sleep(0.02)


async def bodies(raw: Raw, kind: str) -> list[dict[str, Any]]:
    """What the facts of one type say, in the log's order."""
    return [event["body"] for event in await raw.events() if event["type"] == kind]
