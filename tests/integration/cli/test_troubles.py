"""What `up` and `doctor` say and do when the machine is in trouble."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tensorbus.model import TensorSpec
from tensorbus.sdk import save_safetensors
from tensorbus.testing._processes import Processes, Program, is_alive, wait_until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

TB = [sys.executable, "-m", "tensorbus.cli"]
SMALL = ("--session-ttl-s", "2", "--pool-bytes", "64MiB")
READY_S = 60.0


@pytest.fixture
def own(home: Path) -> Iterator[Processes]:
    """Processes that use the home's own bus."""
    owner = Processes(home / "test-logs", nats_url=None)
    yield owner
    owner.close()


@pytest.fixture
def small_disk() -> Iterator[Path]:
    """A file system of 6 MB."""
    folder = Path(tempfile.mkdtemp(prefix="tb-small-"))
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6M", "tmpfs", str(folder)], capture_output=True)
    if made.returncode != 0:
        folder.rmdir()
        pytest.skip("mounting needs root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)
    folder.rmdir()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    weights = np.arange(16, dtype=np.float32)
    return save_safetensors(tmp_path / "in.safetensors", [(TensorSpec("w", "f32", (16,)), weights)])


def up(own: Processes, home: Path, *args: str) -> Program:
    program = own.run([*TB, "up", *SMALL, "--home", str(home), "--parent", str(os.getpid()), *args], name="up")
    program.until("\nready", timeout_s=READY_S)
    return program


def tb(*args: object, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [*TB, *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=90, env={**os.environ, **(env or {})})


def doctor(home: Path, *args: str) -> dict[str, list[dict[str, str]]]:
    """What is not well, by check."""
    found: dict[str, list[dict[str, str]]] = {}
    for line in tb("doctor", "--home", home, "--json", *args).stdout.splitlines():
        verdict = json.loads(line)
        if verdict["state"] != "ok":
            found.setdefault(verdict["check"], []).append(verdict)
    return found


def started(program: Program) -> dict[str, int]:
    return {role: int(pid) for role, pid in re.findall(r"^(bus|basic|gateway) .*?process (\d+)", program.text, re.M)}


@pytest.mark.chaos
def test_a_full_disk_is_said_and_room_mends_it(own: Processes, small_disk: Path, file: Path) -> None:
    home = small_disk / "home"
    program = up(own, home)
    assert tb("put", file, "--home", home, "--key", "first").returncode == 0
    fill = small_disk / "fill"
    with fill.open("wb", buffering=0) as hole:
        hole.write(b"x" * (shutil.disk_usage(small_disk).free - 8192))
    for number in range(40):
        if tb("put", file, "--home", home, "--id", f"a{number}", "--timeout", "2").returncode != 0:
            break
    program.until("the NATS server takes no facts: the disk of")
    (wrong,) = doctor(home)["server"]
    assert "is full" in wrong["found"]
    assert "make room" in wrong["advice"]
    assert program.text.count("takes no facts") == 1
    fill.unlink()
    program.until("starting it again")
    wait_until(lambda: program.text.count("bus      nats://") == 2, what="the server's restart")
    again = tb("put", file, "--home", home, "--key", "again", "--timeout", "30")
    assert again.returncode == 0, again.stderr
    assert tb("get", "first", "-o", home / "out", "--home", home).returncode == 0
    assert "server" not in doctor(home) or "left" in doctor(home)["server"][0]["found"]
    assert program.stop() == 0


def test_doctor_without_a_witness_or_memory(own: Processes, home: Path) -> None:
    program = up(own, home)
    second = own.worker(home=home, id="w2")
    os.kill(started(program)["gateway"], signal.SIGKILL)
    program.until("the gateway worker")
    second.kill9()
    found = doctor(home)
    assert "no witness" in found["witness"][0]["found"]
    assert "tensorbus worker --roles gateway --home" in found["witness"][0]["advice"]
    assert any("w2" in verdict["found"] for verdict in found["sessions"])
    own.worker("gateway", home=home, id="g2")
    wait_until(lambda: "sessions" not in doctor(home), what="the end of the dead sessions", timeout_s=60)
    os.kill(started(program)["basic"], signal.SIGKILL)
    program.until("the basic worker")
    wait_until(lambda: "shm" in doctor(home), what="the missing memory")
    assert doctor(home)["shm"][0]["state"] == "wrong"
    assert program.stop() == 0


def test_a_stopped_server_is_told(own: Processes, home: Path) -> None:
    program = up(own, home)
    pid = started(program)["bus"]
    os.kill(pid, signal.SIGSTOP)
    try:
        assert doctor(home)["server"][0]["advice"] == f"kill -CONT {pid}"
        program.until(f"kill -CONT {pid}", timeout_s=40)
    finally:
        os.kill(pid, signal.SIGCONT)
    program.until("is well again", timeout_s=40)
    assert program.stop() == 0


def test_a_home_in_any_script_and_with_spaces(own: Processes, home: Path, file: Path) -> None:
    odd = home / "é 日本 $HOME"
    program = up(own, odd, "--worker-id", "mine", "--host-id", "h 1".replace(" ", "-"))
    assert tb("put", file, "--home", odd, "--key", "k", "--host-id", "h-1").returncode == 0
    assert not doctor(odd, "--host-id", "h-1").keys() - {"memory", "files", "server"}
    os.kill(started(program)["basic"], signal.SIGKILL)
    program.until("start it again with")
    program.until("The end of its log")
    advice = next(line for line in program.text.splitlines() if line.startswith("  tensorbus worker"))
    words = shlex.split(advice)
    assert words[words.index("--home") + 1] == str(odd)
    assert words[words.index("--host-id") + 1] == "h-1"
    assert words[words.index("--worker-id") + 1] == "mine"
    assert words[words.index("--session-ttl-s") + 1] == "2.0"
    again = own.run([*TB, *words[1:], "--parent", str(os.getpid())], name="again")
    again.until("ready worker=mine", timeout_s=READY_S)
    assert program.stop() == 0


def test_the_reason_of_a_child_is_the_reason_of_up(own: Processes, home: Path) -> None:
    (home / "log").mkdir()
    (home / "log" / "gateway.log").write_text("an old story\n")
    bad = own.run([*TB, "up", *SMALL, "--home", str(home), "--gateway-host", "203.0.113.1"], name="up")
    assert bad.wait(READY_S) == 2
    assert "an old story" not in bad.text
    with_port = own.worker("gateway", home=home / "other", id="g", ready=False)
    assert with_port.wait(READY_S) == 6  # no bus there
    first = up(own, home)
    port = re.search(r"tb\+tcp://127.0.0.1:(\d+)", first.text)
    assert port is not None
    taken = own.run([*TB, "up", *SMALL, "--home", str(home / "b"), "--gateway-port", port[1]], name="taken")
    assert taken.wait(READY_S) == 5
    assert first.stop() == 0


@pytest.fixture
def other_nats(home: Path) -> Iterator[tuple[Path, list[subprocess.Popen[bytes]]]]:
    running: list[subprocess.Popen[bytes]] = []
    yield home / "other-nats", running
    for process in running:
        process.kill()
        process.wait()


def serve(folder: Path, running: list[subprocess.Popen[bytes]], config: str) -> str:
    """Start a NATS server of an operator; its URL."""
    from tensorbus.bus._server import find_binary

    folder.mkdir(parents=True)
    (folder / "nats.conf").write_text(f'listen: "127.0.0.1:-1"\nports_file_dir: "{folder}"\n{config}')
    running.append(subprocess.Popen([str(find_binary()), "-c", str(folder / "nats.conf"), "-l", str(folder / "log")]))
    ports = folder / f"nats-server_{running[-1].pid}.ports"
    wait_until(lambda: ports.exists() and ports.read_text().strip().endswith("}"), what="the server's start")
    return str(json.loads(ports.read_text())["nats"][0])


def test_a_server_without_jetstream_is_told_at_once(
    own: Processes, home: Path, other_nats: tuple[Path, list[subprocess.Popen[bytes]]]
) -> None:
    url = serve(*other_nats, "")
    program = own.run([*TB, "up", *SMALL, "--home", str(home), "--nats-url", url], name="up")
    assert program.wait(30) == 6
    assert "JetStream is off in the NATS server" in program.text
    assert "JetStream is off" in doctor(home, "--nats-url", url)["log"][0]["found"]


def test_wrong_credentials_and_small_messages(
    own: Processes, home: Path, other_nats: tuple[Path, list[subprocess.Popen[bytes]]]
) -> None:
    folder, running = other_nats
    store = f'jetstream {{ store_dir: "{folder / "js"}" }}\n'
    closed = serve(folder / "closed", running, store + 'authorization { token: "right" }\n')
    refused = own.run(
        [*TB, "up", *SMALL, "--home", str(home), "--nats-url", closed.replace("//", "//wrong@")], name="refused"
    )
    assert refused.wait(30) == 10
    small = serve(folder / "small", running, store.replace("/js", "/js2") + "max_payload: 65536\n")
    program = up(own, home, "--nats-url", small)
    assert "max_payload" in program.text
    assert "max_payload" in doctor(home, "--nats-url", small)["nats"][0]["found"]
    pids = started(program)
    assert program.stop() == 0
    assert not any(map(is_alive, pids.values()))
