"""``tensorbus bus`` against real servers: init, check, grants, migrate."""

from __future__ import annotations

import json
import stat
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tensorbus.bus import EmbeddedServer
from tensorbus.cli._app import run
from tensorbus.testing._nats_cluster import NatsCluster
from tensorbus.testing._processes import Processes, wait_until
from tensorbus.transport import locked

pytestmark = pytest.mark.integration


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in self.out.splitlines()]


Tb = Callable[..., Ran]


@pytest.fixture
def tb(capsys: pytest.CaptureFixture[str], home: Path, monkeypatch: pytest.MonkeyPatch) -> Tb:
    monkeypatch.setenv("TENSORBUS_HOME", str(home))

    def call(*args: object) -> Ran:
        capsys.readouterr()
        code = run(["bus", *map(str, args)])
        return Ran(code, *capsys.readouterr())

    return call


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsCluster]:
    with NatsCluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


def test_init_says_what_it_made_and_check_that_all_is_well(tb: Tb, home: Path) -> None:
    with EmbeddedServer(home / "nats") as server:
        (home / "bus.url").write_text(server.url)
        found = tb("check", "--json")
        assert found.code == 1
        assert [one["found"] for one in found.lines if one["state"] == "wrong"] == [
            "TB is not there",
            "TB_PAGES is not there",
        ]
        assert [line["made"] for line in tb("init", "--json").lines] == [True, True, True]
        assert "was there" in tb("init").out
        found = tb("check", "--json")
        assert found.code == 0, found.out
        checks = {str(one["check"]): str(one["found"]) for one in found.lines}
        assert "before it is acknowledged" in checks["sync"]
        assert "may do everything" in checks["user"]
        assert {"server", "storage", "stream", "room", "clock", "disk"} <= checks.keys()
        missing = tb("check", "--nats-replicas", "3", "--json")
        assert missing.code == 1
        assert any("1 of the 3 servers" in str(one["found"]) for one in missing.lines)
        assert tb("check", "--monitor", "http://127.0.0.1:1").code == 0
        assert tb("init", "--replicas", "3", "--subject-prefix", "three").code == 2
    assert tb("check", "--timeout", "1").code == 6


def test_check_sees_what_is_wrong_with_three(tb: Tb, cluster: NatsCluster) -> None:
    three = ("--nats-url", cluster.url, "--subject-prefix", "p1")
    assert tb("init", *three, "--replicas", "3").code == 0
    cluster.wait_healthy()
    found = tb("check", *three, "--json")
    assert found.code == 0, found.out
    assert any("current on" in str(one["found"]) for one in found.lines)
    assert any("set nats_replicas to 3" in str(one["advice"]) for one in found.lines)
    short = tb("check", *three, "--nats-replicas", "3", "--session-ttl-s", "2")
    assert short.code == 1 and "set session_ttl_s to 10" in short.out
    away = next(i for i in range(3) if i != cluster.leader_of("TB_p1") and i != cluster.leader_of("TB_LIVE_p1"))
    cluster.kill(away)
    try:
        deadline_said = False

        def said() -> bool:
            nonlocal deadline_said
            ran = tb("check", *three)
            deadline_said = ran.code == 1 and f"n{away} is " in ran.out
            return deadline_said

        wait_until(said, what="that a copy is away")
    finally:
        cluster.start(away)
        cluster.wait_healthy()


def test_grants_are_printed_or_made_with_keys(tb: Tb, home: Path) -> None:
    assert tb("grants", "basic:w1").code == 2
    assert tb("grants", "king:w1").code == 2
    assert tb("grants", "basic:w.1").code == 2
    [user] = tb("grants", "basic:W1", "--json").lines
    assert user["nkey"] is None
    assert "tb.ev.replica.*.W1" in str(user["permissions"])
    keys = home / "keys"
    everybody = ("basic:W1", "gateway+store:g1", "caller:c1", "admin:ops")
    assert tb("grants", *everybody, "--generate", keys).code == 0
    seeds = {name: (keys / f"{name}.nk").read_text() for name in ("W1", "g1", "c1", "ops")}
    assert all(text.startswith("SU") for text in seeds.values())
    assert all(stat.S_IMODE((keys / f"{name}.nk").stat().st_mode) == 0o600 for name in seeds)
    again = tb("grants", "basic:W1", "gateway+store:g1", "--generate", keys, "--json")
    assert (keys / "W1.nk").read_text() == seeds["W1"]
    assert [line["name"] for line in again.lines] == ["W1", "g1"]
    assert json.loads((keys / "users.json").read_text()) == again.lines
    assert tb("grants", *everybody, "--generate", keys).code == 0
    with EmbeddedServer(home / "nats", extra='include "../keys/users.conf"\n') as server:
        url = ("--nats-url", server.url)
        assert tb("init", *url, "--nats-user", "ops", "--nats-nkey-seed", keys / "ops.nk").code == 0
        as_worker = ("--nats-user", "W1", "--nats-nkey-seed", keys / "W1.nk")
        own = tb("check", *url, *as_worker, "--as", "basic:W1", "--json")
        assert [one["found"] for one in own.lines if one["check"] == "permissions"] == [
            "basic:W1 may do all that its roles need"
        ]
        more = tb("check", *url, *as_worker, "--as", "basic+store:W1", "--json")
        lacks = " ".join(str(one["found"]) for one in more.lines if one["state"] == "wrong")
        assert (
            more.code == 1 and "may not publish tb.ev.purge.*.W1" in lacks and "may not listen to tb.rpc.query" in lacks
        )


def test_a_home_moves_to_three_servers(tb: Tb, home: Path, cluster: NatsCluster) -> None:
    owner = Processes(home / "test-logs", nats_url=None)
    three = ("--to", cluster.url)
    try:
        with EmbeddedServer(home / "nats") as server:
            (home / "bus.url").write_text(server.url)
            worker = owner.worker("basic", home=home, id="w1")
            running = tb("migrate", *three)
            assert running.code == 5 and "w1" in running.err and "tensorbus up" not in running.err
            with locked(home / "run" / "up.lock", what="as `tensorbus up` does"):
                running = tb("migrate", *three)
            assert running.code == 5 and "stop it first, and `bus migrate` starts the home's server" in running.err
            assert worker.stop() == 0
        (home / "bus.url").unlink()
        wait_until(lambda: not (home / "nats" / "pid").exists(), what="the end of the server")
        moved = tb("migrate", *three, "--json")  # starts the home's server for the while
        assert moved.code == 0, moved.err
        [line] = moved.lines
        assert (line["replicas"], line["stream"]) == (3, "TB")
        assert tb("migrate", *three).code == 5
        cluster.wait_healthy()
        assert tb("check", "--nats-url", cluster.url, "--nats-replicas", "3").code == 0
        there = Processes(home / "test-logs-3", nats_url=cluster.url)
        try:
            again = there.worker("basic", home=home, id="w1", session_ttl_s=10, nats_replicas=3)
            assert again.worker == "w1"
            assert again.stop() == 0
        finally:
            there.close()
    finally:
        owner.close()
    threading.Event().wait(0)
