"""A process with a whole directory of its own finds every name in itself, and says how far it is."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import tensorbus as tb
from tensorbus.bus import EmbeddedServer
from tensorbus.testing._processes import Processes, wait_until
from tests.integration.sdk.conftest import HOST
from tests.integration.sdk.test_processes import in_child
from tests.servers import Server

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")]

W = torch.arange(32, dtype=torch.float32).reshape(8, 4)


@pytest.fixture
def full(place: Path, tenant: str, nats_server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[tb.Bus]:
    monkeypatch.setenv("TENSORBUS_NATS_URL", nats_server.url)
    with tb.connect(home=place, host_id=HOST, tenant=tenant, directory="full") as bus:
        yield bus


def test_every_name_is_found_without_a_word_to_the_worker(
    full: tb.Bus, bus: tb.Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    art = bus.put({"w": W}, key="k")
    half = art.view(slices={"w": 0})
    half.define()
    last = bus.publish("policy", art).position
    mute(full, monkeypatch)
    assert full.artifact("k", at_least=last).id == art.id
    assert full.artifact(half.id).id == half.id
    assert full.artifact(id=art.id).info().versions == (("policy", 1),)
    assert full.exists("k") and not full.exists("other")
    assert [item.key for item in full.ls()] == ["k"]
    assert [(item.name, item.last, item.kept) for item in full.ls_series("p")] == [("policy", 1, 1)]
    assert full.latest("policy").version == full.version("policy", 1).version == 1
    assert [worker.worker for worker in full.list_workers() if worker.live] == ["g1", "w1"]
    for missing in (lambda: full.artifact("other"), lambda: full.version("policy", 2), lambda: full.latest("none")):
        with pytest.raises(tb.NotFoundError):
            missing()


def mute(bus: tb.Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refused(op: str, *_: object, **__: object) -> None:
        raise AssertionError(f"the worker was asked: {op}")

    monkeypatch.setattr(bus._core, "ask", refused)


def test_own_changes_are_seen_at_once(full: tb.Bus) -> None:
    for number in range(30):
        first = full.put(torch.tensor([number]), key="k", rebind=True)
        assert full.artifact("k").id == first.id
        assert full.publish("s", first).version == full.latest("s").version
        full.unbind("k")
        assert not full.exists("k")
        full.bind("k", first)
        assert full.artifact("k").id == first.id
        first.destroy()
        assert not full.exists("k") and not first.exists()


def test_a_name_that_others_move_is_followed(full: tb.Bus, bus: tb.Bus) -> None:
    for number in range(20):
        position = bus.put(torch.tensor([number]), key="k", rebind=True).position
        assert full.artifact("k", at_least=position).tensor().item() == number
    position = bus.artifact("k").destroy()
    assert not full.exists("k", at_least=position)
    bus.put(W, key="k")
    wait_until(lambda: full.exists("k"), what="the key")
    bus.put(W[0], key="k", rebind=True)
    wait_until(lambda: full.artifact("k").nbytes == W[0].nbytes, what="the move")


def test_the_directory_is_the_workers_at_the_same_position(full: tb.Bus, bus: tb.Bus) -> None:
    for number in range(5):
        bus.put(torch.tensor([number]), key=f"k{number}").view(slices={"": 0}).define()

    def same() -> bool:
        stats = full.stats()
        mine, theirs = stats["directory_feed"], stats["directory"]
        if mine["position"] != theirs["position"]:
            return False
        assert mine["hash"] == theirs["hash"]
        return True

    wait_until(same, what="the same position")
    feed = full.stats()["directory_feed"]
    assert feed["connected"] and not feed["degraded"] and feed["error"] is None
    assert "directory_feed" not in bus.stats()


def test_threads_look_while_names_move(full: tb.Bus, bus: tb.Bus) -> None:
    """A thread may see the state before or after a move, never anything else."""
    known = {bus.put(torch.tensor([number])).id for number in range(4)}
    full.artifact("k", at_least=bus.bind("k", min(known)).position)
    stop, wrong = threading.Event(), []

    def look() -> None:
        while not stop.is_set():
            found = full.artifact("k", timeout=20).id
            wrong.extend([] if found in known else [found])

    threads = [threading.Thread(target=look) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(10):
            for artifact in known:
                bus.bind("k", artifact, rebind=True)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert wrong == []


def test_a_forked_child_is_refused_and_the_parent_goes_on(full: tb.Bus, bus: tb.Bus) -> None:
    full.put({"w": W}, key="k")
    tensor = full.artifact("k")["w"]
    assert in_child(lambda: full.artifact("k")).startswith("InvalidArgumentError: this bus was connected before")
    assert in_child(lambda: tensor.sum().item()) == str(W.sum().item())
    assert full.artifact("late", at_least=bus.put(W[0], key="late").position).nbytes == W[0].nbytes


def test_handles_travel_without_the_directory(full: tb.Bus) -> None:
    copy = pickle.loads(pickle.dumps(full.put({"w": W}, key="k")))
    assert torch.equal(copy["w"], W)
    assert "directory_feed" not in copy.bus.stats()
    copy.bus.close()


def test_a_bus_that_is_not_there_is_told(place: Path, tenant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(tb.UnavailableError, match="TENSORBUS_NATS_URL"):
        tb.connect(home=place, host_id=HOST, tenant=tenant, directory="full")
    with pytest.raises(tb.InvalidArgumentError, match="TENSORBUS_NATS_URL"):
        tb.connect("tb+tcp://127.0.0.1:1", directory="full")
    monkeypatch.setenv("TENSORBUS_NATS_URL", "nats://127.0.0.1:1")
    with pytest.raises(tb.UnavailableError):
        tb.connect(home=place, host_id=HOST, tenant=tenant, directory="full", timeout=1.0)


def test_a_bus_that_stops_makes_the_directory_stale(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with EmbeddedServer(home / "nats") as server:
        owner = Processes(home / "logs", nats_url=server.url, prefix="stale")
        monkeypatch.setenv("TENSORBUS_NATS_URL", server.url)
        try:
            owner.worker("basic", id="w1", host_id=HOST, home=home, session_ttl_s=60)
            with tb.connect(home=home, host_id=HOST, directory="full") as bus:
                art = bus.put(W, key="k")
                assert bus.stats()["directory_feed"]["lag"] == 0
                server.stop()
                wait_until(lambda: not bus.stats()["directory_feed"]["connected"], what="the loss")
                assert bus.artifact("k").id == art.id  # what was known is still told
                assert bus.ls()[0].artifact == art.id
                assert bus.stats()["directory_feed"]["lag"] is None
                with pytest.raises(tb.UnavailableError, match="position"):
                    bus.artifact("k", at_least=art.position["TB"] + 1, timeout=0.5)
                server.start()
                later = bus.put(W[0], key="later")
                assert bus.artifact("later").id == later.id
        finally:
            owner.close()


async def test_the_async_bus_does_the_same(
    place: Path, tenant: str, nats_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TENSORBUS_NATS_URL", nats_server.url)
    async with tb.aconnect(home=place, host_id="elsewhere", tenant=tenant, directory="full") as bus:  # a gateway's
        art = await bus.put({"w": W}, key="k")
        assert (await bus.artifact("k")).id == art.id
        assert [item.key async for item in bus.ls()] == ["k"]
        assert torch.equal(await art.tensor("w"), W)
