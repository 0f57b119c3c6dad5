"""The commands against a real worker: what they print, for people and as JSON, and their exit codes."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from tensorbus.cli._app import run
from tensorbus.model import TensorSpec
from tensorbus.sdk import save_safetensors
from tensorbus.testing._processes import WorkerProgram
from tests.servers import Server

pytestmark = pytest.mark.integration

ODD_KEY = "od d\nkey.*>\u202e"


@dataclass(frozen=True)
class Place:
    """A home with a worker that is also the gateway."""

    home: Path
    worker: WorkerProgram
    file: Path
    prefix: str


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, object]:
        found = json.loads(self.out)
        assert isinstance(found, dict)
        return found

    @property
    def lines(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in self.out.splitlines()]


Tb = Callable[..., Ran]


@pytest.fixture(scope="module")
def place(nats_server: Server) -> Iterator[Place]:
    home = Path(tempfile.mkdtemp(prefix="tb-"))
    weights = np.arange(1 << 16, dtype=np.uint16)
    spec = [TensorSpec("w", "bf16", (256, 256)), TensorSpec("new\nline", "f32", ())]
    file = save_safetensors(home / "in.safetensors", [(spec[0], weights), (spec[1], np.float32(1.5).tobytes())])
    with nats_server.processes(home / "test-logs") as owner:
        worker = owner.worker("basic,gateway", home=home, id="w1")
        yield Place(home, worker, file, owner.prefix)
    shutil.rmtree(home, ignore_errors=True)


@pytest.fixture
def tb(place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Tb:
    """Runs a command line in this process."""
    for name in [name for name in os.environ if name.startswith("TENSORBUS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("TENSORBUS_HOME", str(place.home))

    def call(*args: object) -> Ran:
        capsys.readouterr()
        code = run([str(arg) for arg in args])
        out, err = capsys.readouterr()
        return Ran(code, out, err)

    return call


def put(tb: Tb, place: Place, *args: str) -> str:
    return str(tb("put", place.file, *args, "--json").json["id"])


def test_put_and_get_give_the_same_bytes(tb: Tb, place: Place, tmp_path: Path) -> None:
    told = tb("put", place.file, "--key", "a/b")
    assert told.code == 0
    assert told.out.startswith("tb1:")
    assert "2 tensors, 128.0 KiB, in memory of worker w1 as a/b" in told.out
    got = tb("get", "a/b", "-o", tmp_path / "out")
    assert (got.code, (tmp_path / "out" / "model.safetensors").read_bytes()) == (0, place.file.read_bytes())
    one = tb("get", "a/b", "-o", tmp_path / "one.safetensors", "--json").json
    assert one == {"id": told.out.split()[0], "path": str(tmp_path / "one.safetensors"), "nbytes": 131076, "tensors": 2}
    assert (tmp_path / "one.safetensors").read_bytes() == place.file.read_bytes()


def test_put_says_what_it_made(tb: Tb, place: Place) -> None:
    told = tb("put", place.file, "--id", "given", "--key", "g", "--json").json
    assert told["id"] == "given"
    assert str(told["digest"]).startswith("tb1:")
    assert (told["key"], told["nbytes"], told["tensors"]) == ("g", 131076, 2)
    assert put(tb, place, "--digest", "later").startswith("tbr:")


def test_a_bound_key_moves_only_when_asked(tb: Tb, place: Place) -> None:
    first = put(tb, place, "--key", "moves")
    refused = tb("put", place.file, "--id", "another", "--key", "moves")
    assert refused.code == 5
    assert "moves" in refused.err
    assert put(tb, place, "--id", "another", "--key", "moves", "--rebind") == "another" != first


def test_ls_quotes_odd_keys_and_lists_by_prefix(tb: Tb, place: Place) -> None:
    put(tb, place, "--key", ODD_KEY)
    put(tb, place, "--key", "zz/plain")
    shown = tb("ls").out
    assert '"od d\\nkey.*>\\u202e"' in shown
    assert len(shown.splitlines()) == len(tb("ls", "--json").lines) + 1
    (only,) = tb("ls", "zz/", "--json").lines
    assert (only["key"], only["nbytes"], only["tensors"]) == ("zz/plain", 131076, 2)
    (odd,) = tb("ls", "od d", "--json").lines
    assert odd["key"] == ODD_KEY


def test_show_tells_tensors_replicas_keys_and_leases(tb: Tb, place: Place) -> None:
    put(tb, place, "--key", "shown")
    lease = tb("pin", "shown").out.strip()
    text = tb("show", "shown").out
    assert '"new\\nline"  f32    scalar' in text
    assert "256x256" in text
    assert lease in text
    assert "until released" not in text
    told = tb("show", "shown", "--json").json
    assert [tensor["name"] for tensor in told["tensors"]] == ["new\nline", "w"]  # type: ignore[attr-defined]
    assert told["replicas"][0]["worker"] == "w1"  # type: ignore[index]
    assert tb("unpin", lease).code == 0
    assert tb("unpin", lease).code == 3


def test_operations_are_asked_for_listed_shown_and_found_again(tb: Tb, place: Place) -> None:
    id = put(tb, place, "--key", "ops")
    told = tb("prefetch", "ops", "--id", "first", "--json").json
    assert (told["id"], told["worker"], told["operation"]) == (id, "w1", "first")
    assert told["result"]["path"] == "shm"  # type: ignore[index]
    assert tb("evict", "ops", "--id", "first").code == 5
    assert "2 tensors in dram" in tb("verify", "ops").out
    refused = tb("evict", "ops")
    assert (refused.code, "last one" in refused.err) == (5, True)
    assert "disk_bytes" in tb("persist", "ops").err
    assert tb("replicate", "ops").code == 2
    assert "is on w1; 0 B were copied" in tb("replicate", "ops", "--to", "w1").out
    assert tb("migrate", "ops", "--src", "w9", "--dst", "w1").code == 3
    assert tb("prefetch", "ops", "--id", "later", "--detach").out == "later\n"
    assert "succeeded" in tb("op", "show", "later", "--wait").out
    pinned = tb("pin", "ops", "--ttl", "60", "--json").json
    assert (pinned["ttl_s"], pinned["result"]["worker"]) == (60.0, "w1")  # type: ignore[index]
    assert tb("stats", "--json").json["pins"] == {"artifacts": 1, "leases": 1, "pinned_bytes": 131076}
    assert tb("unpin", pinned["lease"], "--json").json["lease"] == pinned["lease"]

    listed = tb("op", "ls", "--json").lines
    assert {"first", "later"} <= {one["id"] for one in listed}
    assert "prefetch" in tb("op", "ls", "--worker", "w1").out
    assert tb("op", "ls", "--running", "--json").lines == []
    shown = tb("op", "show", "first", "--json").json
    assert (shown["state"], shown["operation"], shown["nbytes_done"]) == ("succeeded", "prefetch", 131076)
    assert "w1" in tb("op", "show", "first").out
    assert tb("op", "cancel", "first").out == "first succeeded\n"
    assert tb("op", "show", "nobody").code == 3


def test_bind_and_the_two_kinds_of_rm(tb: Tb, place: Place) -> None:
    put(tb, place, "--id", "short", "--key", "k1")
    assert tb("bind", "k2", "k1", "--json").json["id"] == "short"
    assert "lives on" in tb("rm", "k2", "--key-only").out
    assert tb("show", "k2").code == 3
    gone = tb("rm", "k1", "--json").json
    assert (gone["id"], gone["destroyed"]) == ("short", True)
    after = tb("show", "short", "--json")
    assert after.code == 3
    assert json.loads(after.err)["error"]["kind"] == "not_found"


def test_versions(tb: Tb, place: Place) -> None:
    assert tb("publish", "pol", place.file, "--json").json["version"] == 1
    put(tb, place, "--id", "v2")
    assert "pol v2 is v2" in tb("publish", "pol", "--artifact", "v2").out
    assert [line["version"] for line in tb("versions", "pol", "--json").lines] == [1, 2]
    assert tb("versions", "pol").out.splitlines()[0].split() == ["VERSION", "ID", "SIZE", "PUT", "AGO"]
    assert {"name": "pol", "last": 2, "kept": 2} in tb("ls", "--series", "--json").lines
    assert tb("versions", "nothing").code == 3
    assert tb("publish", "pol").code == 2


def test_events_by_artifact_position_and_number(tb: Tb, place: Place) -> None:
    put(tb, place, "--id", "evented", "--key", "e")
    events = tb("events", "--artifact", "e", "--json").lines
    assert [event["type"] for event in events] == ["ArtifactPut", "KeyBound"]
    later = tb("events", "--since", events[0]["seq"], "--json").lines
    assert later[0]["seq"] == events[1]["seq"]
    assert len(tb("events", "--limit", "2").out.splitlines()) == 2
    assert "KeyBound" in tb("events", "--artifact", "evented").out
    tb("rm", "evented")
    ended = tb("events", "--artifact", "evented", "--json")
    assert (ended.code, ended.lines[-1]["type"]) == (0, "ArtifactDestroyed")


def test_workers_and_stats(tb: Tb, place: Place) -> None:
    (told,) = tb("workers", "--json").lines
    assert (told["worker"], told["live"], told["pid"]) == ("w1", True, place.worker.pid)
    assert "basic+gateway" in tb("workers").out
    stats = tb("stats", "--json").json
    assert len(stats["directory"]["hash"]) == 64  # type: ignore[index]
    assert "directory.hash" in tb("stats").out


def test_config_tells_value_and_origin(tb: Tb, place: Place) -> None:
    told = tb("config", "--json", "--pool-bytes", "2MiB", "--nats-url", "nats://me:secret@h:1").json
    assert told["pool_bytes"] == {"value": 2 << 20, "origin": "flag"}
    assert told["home"] == {"value": str(place.home), "origin": "env TENSORBUS_HOME"}
    assert told["nats_url"] == {"value": "nats://me:***@h:1", "origin": "flag"}
    assert "2097152 (2.0 MiB)" in tb("config", "--pool-bytes", "2MiB").out
    assert tb("config", "--pool-bytes", "many").code == 2


def test_through_the_gateway(tb: Tb, place: Place, tmp_path: Path) -> None:
    url = f"tb+tcp://{place.worker.control}"
    assert put(tb, place, "--key", "far", "--url", url).startswith("tb1:")
    assert tb("get", "far", "-o", tmp_path, "--url", url).code == 0
    assert (tmp_path / "model.safetensors").read_bytes() == place.file.read_bytes()


def test_doctor_finds_what_is_wrong(tb: Tb, place: Place, monkeypatch: pytest.MonkeyPatch, nats_server: Server) -> None:
    flags = ("--nats-url", nats_server.url, "--subject-prefix", place.prefix)
    well = tb("doctor", *flags)
    assert well.code == 0, well.out
    assert "w1 (basic, gateway)" in well.out
    place.worker.pause()
    stopped = {line["advice"] for line in tb("doctor", *flags, "--json").lines if line["state"] == "wrong"}
    place.worker.resume()
    assert stopped == {f"kill -CONT {place.worker.pid}"}
    monkeypatch.setenv("TENSORBUS_POOL_BITES", "1")
    odd = tb("doctor", *flags)
    assert odd.code == 1
    assert "did you mean TENSORBUS_POOL_BYTES?" in odd.out


def test_doctor_of_a_home_without_anything(tb: Tb, tmp_path: Path) -> None:
    stale = tmp_path / "run" / "old.json"
    stale.parent.mkdir(mode=0o700)
    stale.write_text("{}")
    found = tb("doctor", "--home", tmp_path)
    assert found.code == 1
    assert "old.json" in found.out
    assert f"tensorbus up --home {tmp_path}" in found.out


def test_errors_say_what_to_do(tb: Tb, tmp_path: Path) -> None:
    nobody = tb("ls", "--home", tmp_path)
    assert nobody.code == 6
    assert f"tensorbus up --home {tmp_path}" in nobody.err
    assert tb("put", tmp_path / "none.safetensors").code == 3
    assert tb("put").code == 2
    assert tb("frobnicate").code == 2
    usage = tb("put", "--json")
    assert json.loads(usage.err)["error"]["kind"] == "invalid_argument"
    assert usage.out == ""


def command(place: Place, *args: str) -> list[str]:
    return [sys.executable, "-m", "tensorbus.cli", *args, "--home", str(place.home)]


def test_a_reader_that_goes_away_is_no_error(place: Place) -> None:
    with subprocess.Popen(
        command(place, "events", "--follow"), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        subprocess.run(command(place, "bind", "pipe", "none"), capture_output=True, check=False, timeout=30)
        subprocess.run(
            command(place, "put", str(place.file), "--id", "pipe"), capture_output=True, check=True, timeout=30
        )
        assert process.wait(30) == 141
        assert process.stderr.read() == b""


def test_ctrl_c_ends_a_command_quietly(place: Place) -> None:
    with subprocess.Popen(
        command(place, "events", "--follow"), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
        assert (process.returncode, process.stderr.read()) == (130, b"")


def test_paths_that_cannot_be_are_refused(tb: Tb, place: Place, tmp_path: Path) -> None:
    assert (tb("put", "").code, tb("publish", "s", "").code) == (2, 2)
    assert "must not be empty" in tb("get", "x", "-o", "").err
    assert "neither a directory nor" in tb("get", "x", "-o", "/dev/null").err
    (tmp_path / "plain").touch()
    assert tb("get", "x", "-o", tmp_path / "plain").code == 2


@pytest.mark.parametrize("ttl", ["nan", "inf", "-1", "0", "1e300"])
def test_a_pin_ends_some_day(tb: Tb, ttl: str) -> None:
    refused = tb("pin", "x", "--ttl", ttl)
    assert refused.code == 2
    assert "is not a number of seconds above 0" in refused.err


def test_advice_is_for_the_command_line(tb: Tb, place: Place) -> None:
    put(tb, place, "--id", "one-of-two", "--key", "held")
    refused = tb("put", place.file, "--id", "two-of-two", "--key", "held")
    assert "use --rebind to move it" in refused.err
    assert "rebind=True" not in refused.err
    no_key = tb("rm", "one-of-two", "--key-only")
    assert no_key.code == 3
    assert "tensorbus rm one-of-two" in no_key.err
    assert "nothing has the key" in tb("rm", "nobody-at-all", "--key-only").err


def test_a_stopped_worker_is_named(tb: Tb, place: Place) -> None:
    place.worker.pause()
    try:
        silent = tb("ls", "--timeout", "1", "--json")
    finally:
        place.worker.resume()
    assert silent.code in (6, 7)
    assert f"kill -CONT {place.worker.pid}" in json.loads(silent.err)["error"]["message"]


def test_a_follower_ends_with_its_reader(place: Place) -> None:
    with subprocess.Popen(
        command(place, "events", "--follow"), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(30) == 141  # though nothing more is printed
        assert process.stderr.read() == b""


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_closed_streams_stay_closed(place: Place, closed: str) -> None:
    for words, code in ((command(place, "ls"), 0), (command(place, "show", "nobody-at-all"), 3)):
        ran = subprocess.run(["sh", "-c", f'"$@" {closed}', "sh", *words], capture_output=True, text=True, timeout=30)
        assert ran.returncode == code
        assert "Traceback" not in ran.stderr
        assert "nobody-at-all" not in ran.stdout


@pytest.mark.parametrize("bad", ["/dev/null", "/dev/null/x", "/proc/nohome", "/tmp/" + "x" * 300])
def test_doctor_of_a_home_that_cannot_be(tb: Tb, bad: str) -> None:
    found = tb("doctor", "--home", bad, "--json")
    assert found.code == 1
    home = next(line for line in found.lines if line["check"] == "home")
    assert (home["state"], home["advice"]) == ("wrong", "name another with --home")


def test_a_full_disk_of_the_reader_has_its_code(place: Place) -> None:
    ran = subprocess.run(
        ["sh", "-c", '"$@" > /dev/full', "sh", *command(place, "config")], capture_output=True, text=True, timeout=30
    )
    assert ran.returncode == 8
    assert "Traceback" not in ran.stderr
