"""What a process knows of the directory by itself: kept up to date, and never older than asked for."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import tensorbus as tb
from tensorbus.testing._processes import WorkerProgram, wait_until

pytestmark = pytest.mark.integration

X, Y = torch.zeros(3), torch.ones(3)


@pytest.fixture
def other(place: Path, tenant: str) -> tb.Bus:
    with tb.connect(home=place, host_id="host-a", tenant=tenant) as found:
        yield found


def test_a_followed_key_is_answered_here_and_kept_up_to_date(bus: tb.Bus, other: tb.Bus) -> None:
    first = other.put(X, key="k")
    assert bus.artifact("k").id == first.id
    assert len(bus._core.followed) == 1
    second = other.put(Y, key="k", rebind=True)
    wait_until(lambda: bus._core.followed.look(("any", "k")).info.artifact == second.id, what="the push")
    assert bus.artifact("k").id == second.id
    other.unbind("k")
    wait_until(lambda: not len(bus._core.followed), what="the push")
    with pytest.raises(tb.NotFoundError):
        bus.artifact("k")


def test_an_answer_is_as_new_as_asked_for(bus: tb.Bus, other: tb.Bus) -> None:
    other.put(X, key="k")
    for number in range(50):
        art = other.put(torch.full((2,), float(number)), key="k", rebind=True)
        assert bus.artifact("k", at_least=art.position).id == art.id
        assert bus.artifact("k", at_least=art.position["TB"]).tensor()[0] == number
    gone = other.unbind("k")
    assert not bus.exists("k", at_least=gone)
    with pytest.raises(tb.InvalidArgumentError):
        bus.artifact("k", at_least="now")


def test_own_changes_are_seen_at_once(bus: tb.Bus) -> None:
    for number in range(30):
        art = bus.put(torch.full((2,), float(number)), key="k", rebind=True)
        assert bus.artifact("k").id == art.id
        bus.unbind("k")
        assert not bus.exists("k")
        bus.bind("k", art)
        assert bus.artifact("k").key == "k"
        art.destroy()
        assert not bus.exists("k")


def test_ids_and_keys_are_told_apart(bus: tb.Bus) -> None:
    by_id = bus.put(X, id="name")
    assert bus.artifact("name").id == "name"
    by_key = bus.put(Y, key="name")
    assert bus.artifact("name", at_least=by_key.position).id == by_key.id
    assert bus.artifact(key="name").id == by_key.id
    assert bus.artifact(id="name").id == by_id.id
    for wrong in ({}, {"ref": "a", "key": "b"}, {"ref": ""}):
        with pytest.raises(tb.InvalidArgumentError):
            bus.artifact(**wrong)


def test_a_restarted_worker_is_found_again(
    home: Path, start_worker: Callable[..., WorkerProgram], tmp_path: Path
) -> None:
    worker = start_worker("basic,gateway", id="w1", host_id="h")
    with tb.connect(home=home, host_id="h", timeout=20) as bus:
        bus.publish("policy", X)
        subscription = bus.subscribe("policy", timeout=30)
        assert subscription.next().version == 1
        tensor = bus.put(Y, key="k").tensor()
        worker.kill9()
        start_worker("basic,gateway", id="w1", host_id="h")
        assert torch.equal(tensor, Y)
        wait_until(lambda: not bus.exists("k"), what="the loss of what only the old worker held")
        bus.put(Y, key="k", rebind=True)
        assert torch.equal(bus.artifact("k").tensor(), Y)
        bus.publish("policy", Y)
        assert subscription.next().version == 2


def test_without_its_worker_a_call_ends_in_time(home: Path, start_worker: Callable[..., WorkerProgram]) -> None:
    worker = start_worker("basic", id="w1", host_id="h")
    with tb.connect(home=home, host_id="h") as bus:
        bus.put(X, key="k")
        worker.kill9()
        wait_until(lambda: not bus._core.link.connected, what="the end of the connection")
        with pytest.raises((tb.UnavailableError, tb.DeadlineExceededError)):
            bus.artifact("k", timeout=0.3)
        with pytest.raises((tb.UnavailableError, tb.DeadlineExceededError)):
            bus.put(X, timeout=0.3)


def test_a_gateway_serves_whoever_has_no_worker(bus: tb.Bus, place: Path, tenant: str) -> None:
    content = {"w": torch.arange(40000.0), "t": torch.arange(12).reshape(3, 4).t(), "none": torch.empty(0)}
    art = bus.put(content, key="k")
    with tb.connect(home=place, host_id="elsewhere", tenant=tenant) as remote:
        found = remote.artifact("k")
        assert found.id == art.id
        for name, tensor in found.tensor_dict().items():
            assert torch.equal(tensor, content[name]), name
        sent = remote.put({"x": Y, "y": content["t"]}, key="sent")
        assert sent.id == bus.put({"x": Y, "y": content["t"]}).id
        assert torch.equal(bus.artifact("sent")["x"], Y)
        assert [event.type for event in found.history()] == ["ArtifactPut", "KeyBound"]
        with pytest.raises(tb.InvalidArgumentError, match="gateway"):
            remote.empty(3)
        sent.destroy()
        with pytest.raises((tb.NotFoundError, tb.UnavailableError)):
            sent.tensor("x")


async def test_events_are_followed(abus: tb.AsyncBus) -> None:
    start = (await abus.put(X)).position
    async with abus.events(follow=True, since=start, timeout=20) as events:
        art = await abus.put(Y, key="k")
        first = await anext(events)
        assert (first.type, first.body["artifact"]) == ("ArtifactPut", art.id)
        assert (await anext(events)).type == "KeyBound"
        assert events.position["TB"] > start["TB"]


def test_what_a_stopped_worker_told_is_not_relied_on(home: Path, start_worker: Callable[..., WorkerProgram]) -> None:
    worker = start_worker("basic", id="w1", host_id="h")
    with tb.connect(home=home, host_id="h") as bus:
        bus.put(X, key="k")
        assert bus.artifact("k").nbytes == X.nbytes
        os.kill(worker.pid, signal.SIGSTOP)
        try:
            wait_until(lambda: not len(bus._core.followed), what="doubt")
            with pytest.raises(tb.DeadlineExceededError):
                bus.artifact("k", timeout=0.3)
        finally:
            os.kill(worker.pid, signal.SIGCONT)
        assert bus.artifact("k").nbytes == X.nbytes
        assert len(bus._core.followed) == 1
