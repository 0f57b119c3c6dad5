"""Where the session's NATS server comes from: ``--nats=binary|container|url``."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from nats import connect

from tensorbus.bus import EmbeddedServer
from tensorbus.events import Subjects
from tensorbus.ids import SystemIds
from tensorbus.testing._processes import Processes

IMAGE = "nats:2.15-alpine"
PORT = 4222
START_S = 60
API_S = 10
CONFIG = f"port: {PORT}\nmax_payload: 8MB\njetstream {{ store_dir: /data, max_mem: 1GB, max_file: 1TB }}\n"
"""What the tests need of a server, wherever it runs; each test's log may reserve 16 GiB of ``max_file``."""


class Kind(StrEnum):
    BINARY = "binary"
    CONTAINER = "container"
    URL = "url"


@dataclass(frozen=True)
class Choice:
    """What was asked for on the command line."""

    kind: Kind = Kind.BINARY
    url: str = ""

    @classmethod
    def of(cls, config: pytest.Config) -> Choice:
        """What the command line says.

        Raises:
            pytest.UsageError: If the two options do not fit together.
        """
        kind, url = Kind(config.getoption("--nats")), str(config.getoption("--nats-url") or "")
        if (kind is Kind.URL) != bool(url):
            raise pytest.UsageError("--nats=url and --nats-url=nats://host:port go together")
        return cls(kind, url)


@dataclass(frozen=True)
class Server:
    """A running server, and the names that belong to this run of the tests on it: others may share it.

    Attributes:
        run: Begins every prefix that is handed out, and nobody else's.
    """

    url: str
    run: str
    _numbers: Iterator[int] = field(default_factory=lambda: count(1), repr=False)
    _used: set[str] = field(default_factory=set, repr=False)

    @contextlib.contextmanager
    def prefix(self) -> Iterator[str]:
        """A subject prefix that nobody had before. Its streams, for each of which the server sets memory aside, go at
        the end, and so do those that a late heartbeat made anew under a prefix that was given back before."""
        prefix = f"{self.run}x{next(self._numbers)}"
        self._used.add(prefix)
        try:
            yield prefix
        finally:
            self._used.remove(prefix)
            asyncio.run(delete_all_streams(self.url, self.run, keep=self._used))

    @contextlib.contextmanager
    def processes(self, logs: Path) -> Iterator[Processes]:
        """Starts programs under a prefix of their own; all are killed at the end, and their logs shown."""
        with self.prefix() as prefix:
            owner = Processes(logs, nats_url=self.url, prefix=prefix)
            try:
                yield owner
            finally:
                owner.close()


@contextlib.contextmanager
def serving(choice: Choice, *, ci: bool | None = None) -> Iterator[Server]:
    """The server that was chosen. What the run left on it goes at the end.

    Skips the test when a container was asked for and no engine answers; in CI that is a failure.
    """
    ci = bool(os.environ.get("CI")) if ci is None else ci
    with _started(choice, ci=ci) as url:
        server = Server(url, f"t{SystemIds().hex(4)}")
        try:
            yield server
        finally:
            if choice.kind is Kind.URL:
                asyncio.run(delete_all_streams(url, server.run))


def _started(choice: Choice, *, ci: bool) -> AbstractContextManager[str]:
    match choice.kind:
        case Kind.BINARY:
            return _binary()
        case Kind.CONTAINER:
            return _container(ci)
        case Kind.URL:
            return contextlib.nullcontext(choice.url)


@contextlib.contextmanager
def _binary() -> Iterator[str]:
    home = Path(tempfile.mkdtemp(prefix="tb-nats-"))
    try:
        with EmbeddedServer(home) as server:
            yield server.url
    finally:
        shutil.rmtree(home, ignore_errors=True)


@contextlib.contextmanager
def _container(ci: bool) -> Iterator[str]:
    with _quiet():
        container = _new_container()
        gc.collect()  # what the client left open when nobody answered
    if isinstance(container, str):
        (pytest.fail if ci else pytest.skip)(f"--nats=container: {container}")
    try:
        with _quiet():
            container.start()
        yield f"nats://{container.get_container_host_ip()}:{container.get_exposed_port(PORT)}"
    finally:
        container.stop()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Lets the engine's client warn; in the tests a warning is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _new_container() -> Any:
    """A container that has not started; or a text that says why there is none."""
    try:
        from docker.errors import DockerException
        from testcontainers.core.container import DockerContainer
        from testcontainers.core.wait_strategies import LogMessageWaitStrategy
    except ImportError as exc:
        return f"testcontainers is missing, pip install 'tensorbus[containers]' ({exc})"
    try:
        container = DockerContainer(IMAGE, entrypoint=["sh", "-c"])
        container.get_docker_client().client.ping()
    except DockerException as exc:
        return f"no container engine answers ({exc})"
    command = 'printf "%s" "$NATS_CONFIG" > /tmp/nats.conf && exec nats-server -c /tmp/nats.conf'
    ready = LogMessageWaitStrategy("Server is ready").with_startup_timeout(START_S)
    return container.with_env("NATS_CONFIG", CONFIG).with_exposed_ports(PORT).with_command([command]).waiting_for(ready)


async def delete_all_streams(url: str, run: str, *, keep: Collection[str] = ()) -> None:
    """Remove the streams of every prefix of a run but those to ``keep``."""
    begin = tuple(Subjects(f"{run}x").streams)
    kept = {stream for prefix in keep for stream in Subjects(prefix).streams}
    client = await connect(url)
    names: list[str] = []
    while True:
        answer = await client.request(
            "$JS.API.STREAM.NAMES", json.dumps({"offset": len(names)}).encode(), timeout=API_S
        )
        found = json.loads(answer.data)
        names += found.get("streams") or []
        if not found.get("streams") or len(names) >= found["total"]:
            break
    for name in names:
        if name.startswith(begin) and name not in kept:
            await client.request(f"$JS.API.STREAM.DELETE.{name}", b"", timeout=API_S)
    await client.close()
