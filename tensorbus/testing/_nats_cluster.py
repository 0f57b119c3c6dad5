"""Real nats-servers that are one JetStream cluster on loopback, to be killed, paused and wiped by tests."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from tensorbus.bus import EmbeddedServer
from tensorbus.errors import NotFoundError, TensorbusError
from tensorbus.ids import IdSource, SystemIds
from tensorbus.testing._processes import wait_until

HEALTHY_S: Final = 60.0
ANSWER_S: Final = 2.0
_PORTS: Final = range(20_000, 32_000)
"""Below those that the kernel gives to outgoing connections."""

_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class NatsCluster:
    """Some servers that replicate among themselves. Use it as a context manager; all methods block.

    Args:
        home: Each server gets a directory in it.
        n: How many servers.
        extra: Lines for each server's configuration, such as users and TLS.
        ids: Chooses the ports on which the servers find each other.
    """

    def __init__(self, home: Path, n: int = 3, *, extra: str = "", ids: IdSource | None = None) -> None:
        self.home = Path(home)
        ports = _free_ports(n, ids or SystemIds())
        routes = ", ".join(f'"nats://127.0.0.1:{port}"' for port in ports)
        self.servers = [
            EmbeddedServer(
                self.home / f"n{i}",
                name=f"n{i}",
                extra=f'cluster {{ name: tb, listen: "127.0.0.1:{port}", routes: [{routes}] }}\n{extra}',
            )
            for i, port in enumerate(ports)
        ]
        self._paused: set[int] = set()

    def __enter__(self) -> NatsCluster:
        try:
            for server in self.servers:
                server.start(wait=False)
            self.wait_healthy()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        """All servers, as a client takes them."""
        return ",".join(server.url for server in self.servers)

    @property
    def urls(self) -> list[str]:
        return [server.url for server in self.servers]

    @property
    def running(self) -> list[int]:
        """The servers that are there and not paused."""
        return [i for i, server in enumerate(self.servers) if server.pid is not None and i not in self._paused]

    def start(self, i: int) -> None:
        """Start a server again, on its port and with what it has on disk. Does not wait for its health."""
        self.servers[i].start(wait=False)

    def kill(self, i: int) -> None:
        """SIGKILL."""
        self._paused.discard(i)
        self.servers[i].kill()

    def pause(self, i: int) -> None:
        """SIGSTOP; returns when it has stopped."""
        self._signal(i, signal.SIGSTOP)
        stat = Path(f"/proc/{self.servers[i].pid}/stat")
        wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", what=f"the stop of server {i}")
        self._paused.add(i)

    def resume(self, i: int) -> None:
        """SIGCONT."""
        self._signal(i, signal.SIGCONT)
        self._paused.discard(i)

    def wipe(self, i: int) -> None:
        """Kill a server and remove all that it had on disk. :meth:`start` brings it back empty."""
        self.kill(i)
        shutil.rmtree(self.servers[i].home / "jetstream", ignore_errors=True)

    def leader_of(self, stream: str) -> int | None:
        """The server that leads a stream, ``None`` while it is being elected.

        Raises:
            NotFoundError: If no server that answers has the stream.
        """
        found = list(self._details(stream))
        if not found:
            raise NotFoundError(f"no server of the cluster has stream {stream}", stream=stream)
        names = {f"n{i}": i for i in self.running}
        leads = {names.get(str(each["cluster"].get("leader", "")), -1) for each in found} - {-1}
        return leads.pop() if len(leads) == 1 else None

    def wait_leader(self, stream: str, *, but: int | None = None, timeout_s: float = HEALTHY_S) -> int:
        """Wait until a stream has a leader, and which one it is.

        Args:
            but: A server that does not count, such as the one that was killed.
        """
        leader: int | None = None

        def elected() -> bool:
            nonlocal leader
            leader = self.leader_of(stream)
            return leader is not None and leader != but

        wait_until(elected, what=f"a leader of {stream}", timeout_s=timeout_s)
        assert leader is not None
        return leader

    def wait_healthy(self, *, timeout_s: float = HEALTHY_S) -> None:
        """Wait until the running servers have a leader and every stream's replicas on them are current.

        Raises:
            DeadlineExceededError: If they do not within the time.
        """
        wait_until(self._is_healthy, what=f"the health of servers {self.running}", timeout_s=timeout_s)

    def stop(self) -> None:
        """End all servers."""
        self._paused.clear()
        with ThreadPoolExecutor(len(self.servers)) as pool:
            list(pool.map(EmbeddedServer.stop, self.servers))

    def _is_healthy(self) -> bool:
        running = self.running
        if any(self.servers[i].problem() for i in running):
            return False
        names = {f"n{i}" for i in running}
        for i in running:
            state = self._ask(i, "jsz?streams=true")
            if not state.get("meta_cluster", {}).get("leader"):
                return False
            if not all(_is_current(detail, seen_by=f"n{i}", running=names) for detail in _streams(state)):
                return False
        return True

    def _details(self, stream: str) -> Iterator[dict[str, Any]]:
        for i in self.running:
            for detail in _streams(self._ask(i, "jsz?streams=true")):
                if detail["name"] == stream and "cluster" in detail:
                    yield detail

    def _ask(self, i: int, path: str) -> dict[str, Any]:
        try:
            with _opener.open(f"{self.servers[i].monitor}/{path}", timeout=ANSWER_S) as answer:
                found: dict[str, Any] = json.loads(answer.read())
                return found
        except (OSError, ValueError, TensorbusError):
            return {}

    def _signal(self, i: int, number: int) -> None:
        pid = self.servers[i].pid
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


def _streams(state: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for account in state.get("account_details") or ():
        yield from account.get("stream_detail") or ()


def _is_current(detail: dict[str, Any], *, seen_by: str, running: set[str]) -> bool:
    """Whether a stream has a leader, and the leader, if that is who says it, sees the running followers keep up."""
    cluster = detail.get("cluster", {})
    if cluster.get("leader") != seen_by:  # what a follower thinks of the others is old
        return cluster.get("leader") in running
    return all(each.get("current") for each in cluster.get("replicas") or () if each.get("name") in running)


def _free_ports(n: int, ids: IdSource) -> list[int]:
    """Ports that nobody has now; chosen at random, so that clusters side by side rarely choose the same."""
    found: list[int] = []
    while len(found) < n:
        port = _PORTS[int(ids.hex(4), 16) % len(_PORTS)]
        if port not in found and _is_free(port):
            found.append(port)
    return found


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
