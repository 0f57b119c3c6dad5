"""``tensorbus up`` as a process: what it starts, watches, and leaves behind, which is nothing."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tensorbus.testing._processes import Processes, Program, is_alive, wait_until

pytestmark = pytest.mark.integration

UP = [sys.executable, "-m", "tensorbus.cli", "up", "--session-ttl-s", "2", "--pool-bytes", "64MiB"]

Up = Callable[..., Program]


@pytest.fixture
def own(home: Path) -> Iterator[Processes]:
    """Processes that use the home's own bus."""
    owner = Processes(home / "test-logs", nats_url=None)
    yield owner
    owner.close()


@pytest.fixture
def up(own: Processes, home: Path) -> Up:
    def start(*args: str) -> Program:
        program = own.run([*UP, "--home", str(home), "--parent", str(os.getpid()), *args], name="up")
        program.until("\nready" if "--json" not in args else '"event": "ready"')
        return program

    return start


def pids(program: Program) -> list[int]:
    """The processes that it says it started."""
    return [int(found) for found in re.findall(r"process (\d+)", program.text)]


def gone(numbers: list[int]) -> None:
    wait_until(lambda: not any(map(is_alive, numbers)), what=f"the end of {numbers}")


def test_it_starts_three_processes_and_ends_them_in_order(up: Up, home: Path) -> None:
    program = up()
    started = pids(program)
    assert len(started) == 3
    assert all(map(is_alive, started))
    assert "a put survives its caller, not its last worker" in program.text
    assert (home / "bus.url").read_text().startswith("nats://127.0.0.1:")
    program.send(signal.SIGINT)
    assert program.wait() == 0
    gone(started)
    assert not (home / "bus.url").exists()
    assert list((home / "run").glob("*.json")) == []
    assert "without a word" not in (home / "log" / "basic.log").read_text()


def test_a_second_one_on_a_live_home_is_refused(up: Up, own: Processes, home: Path) -> None:
    first = up()
    second = own.run([*UP, "--home", str(home), "--json"], name="second")
    assert second.wait() == 5
    error = json.loads(second.text)["error"]
    assert error["kind"] == "conflict"
    assert error["details"]["pid"] == str(first.pid)
    assert first.alive


def test_nothing_is_left_when_it_is_killed(up: Up) -> None:
    program = up()
    program.kill9()
    gone(pids(program))


def test_a_dead_child_is_reported_and_the_rest_goes_on(up: Up, own: Processes, home: Path) -> None:
    program = up()
    _bus, basic, gateway = pids(program)
    os.kill(basic, signal.SIGKILL)
    program.until("was ended by signal 9")
    program.until("tensorbus worker --roles basic --home")
    assert program.alive
    assert is_alive(gateway)
    again = own.worker(home=home)
    assert again.host_id
    assert program.stop() == 0


def test_a_dead_bus_is_started_again(up: Up) -> None:
    program = up()
    bus = pids(program)[0]
    os.kill(bus, signal.SIGKILL)
    program.until("starting it again")
    wait_until(lambda: len(pids(program)) == 4, what="the new server")
    assert is_alive(pids(program)[3])
    assert program.stop() == 0


def test_an_operators_bus_is_used_and_left_alone(up: Up, processes: Processes, nats_url: str) -> None:
    program = up("--nats-url", nats_url, "--subject-prefix", "upx", "--json")
    said = [json.loads(line) for line in program.text.splitlines()]
    assert [line["event"] for line in said] == ["started", "started", "started", "ready"]
    assert said[0] == {"event": "started", "process": "bus", "url": nats_url, "pid": None}
    os.kill(said[1]["pid"], signal.SIGKILL)
    os.kill(said[2]["pid"], signal.SIGTERM)
    assert program.wait() == 1
    ended = {
        line["process"]: line["code"] for line in map(json.loads, program.text.splitlines()) if line["event"] == "ended"
    }
    assert ended == {"basic": -9, "gateway": 0}


def test_what_cannot_start_ends_it_with_the_reason(own: Processes, home: Path) -> None:
    taken = own.run([*UP, "--home", str(home), "--gateway-host", "203.0.113.1"], name="up")
    assert taken.wait() == 2
    assert "the gateway worker ended with code" in taken.text
    assert "203.0.113.1" in taken.text
    gone([int(found) for found in re.findall(r"process (\d+)", taken.text)])


@pytest.fixture
def nats_url(processes: Processes) -> str:
    url = processes._nats_url
    assert url is not None
    return url
