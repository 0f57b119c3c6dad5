"""``tensorbus worker`` as a process."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tensorbus.testing._processes import Processes, WorkerProgram, is_alive, wait_until
from tensorbus.transport import living_workers

pytestmark = pytest.mark.integration

StartWorker = Callable[..., WorkerProgram]

PARENT = """
import subprocess, sys, time, os
child = subprocess.Popen([*sys.argv[1:], "--parent", str(os.getpid())])
print(child.pid, flush=True)
time.sleep(60)
"""


def test_it_says_what_it_is_and_leaves_nothing(start_worker: StartWorker, home: Path) -> None:
    worker = start_worker("basic,gateway", id="w1", host_id="h1")
    (card,) = living_workers(home)
    assert (worker.worker, worker.host_id, worker.data, worker.control) == ("w1", "h1", card.data, card.control)
    assert (card.pid, card.incarnation) == (worker.pid, worker.incarnation)
    assert worker.socket.is_socket()
    assert worker.stop() == 0
    assert not worker.socket.exists()
    assert living_workers(home) == []


def test_a_second_of_the_same_id_is_refused(start_worker: StartWorker) -> None:
    first = start_worker(id="w1")
    second = start_worker(id="w1", ready=False)
    assert second.wait() == 5
    assert f"as process {first.pid}" in second.text


def test_unknown_roles_and_a_home_without_a_bus(processes: Processes, home: Path) -> None:
    command = [sys.executable, "-m", "tensorbus.cli", "worker", "--home", str(home)]
    odd = processes.run([*command, "--roles", "basic,king"])
    bare = processes.run(command)
    assert odd.wait() == 2
    assert "king" in odd.text
    assert bare.wait() == 6
    assert "tensorbus up" in bare.text


def test_it_ends_when_its_parent_is_killed(processes: Processes, nats_url: str, home: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "tensorbus.cli",
        "worker",
        "--home",
        str(home),
        "--nats-url",
        nats_url,
        "--id",
        "w1",
    ]
    parent = processes.python(PARENT, *command)
    parent.until("ready worker=w1")
    pid = int(parent.text.split()[0])
    os.kill(parent.pid, signal.SIGKILL)
    wait_until(lambda: not is_alive(pid), what="the end of the orphan")
    assert living_workers(home) == []


@pytest.fixture
def nats_url(processes: Processes) -> str:
    url = processes._nats_url
    assert url is not None
    return url
