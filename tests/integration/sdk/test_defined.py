"""Views that others find by their ids, and pins that others end."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch

import tensorbus as tb
from tensorbus.clock import Deadline
from tensorbus.model import Manifest, TensorSpec, ViewSpec, view_id
from tests.integration.sdk.conftest import HOST

pytestmark = pytest.mark.integration

W = torch.arange(32, dtype=torch.float32).reshape(8, 4)


def through_gateway(place: Path, tenant: str) -> tb.Bus:
    return tb.connect(home=place, host_id="elsewhere", tenant=tenant)


def test_a_defined_view_is_found_by_its_id(bus: tb.Bus, place: Path, tenant: str) -> None:
    art = bus.put({"w": W, "b": W[0]}, key="k")
    half = art.view(names=["w"], slices={"w": (slice(0, 4),)})
    with pytest.raises(tb.NotFoundError):
        bus.artifact(half.id)
    position = half.define()
    assert half.define()["TB"] >= position["TB"]
    assert [event.type for event in art.history()].count("ViewDefined") == 1
    for _ in range(2):  # asked for, then followed
        found = bus.artifact(half.id)
        assert (found.id, found.base_id, found.names()) == (half.id, art.id, ("w",))
        assert torch.equal(found["w"], W[:4])
        assert found.nbytes == half.nbytes
    with through_gateway(place, tenant) as other:
        assert torch.equal(other.artifact(half.id, at_least=position)["w"], W[:4])


def test_a_view_ends_with_its_base(bus: tb.Bus) -> None:
    art = bus.put({"w": W})
    half = art.view(slices={"w": 0})
    half.define()
    assert bus.exists(half.id)
    art.destroy()
    with pytest.raises(tb.NotFoundError):
        bus.artifact(half.id)
    with pytest.raises(tb.NotFoundError):
        art.view(slices={"w": 1}).define()


async def test_the_async_handle_defines_views_of_views(abus: tb.AsyncBus) -> None:
    art = await abus.put({"w": W})
    turned = await (await art.view(slices={"w": (slice(2, 6),)})).view(transpose={"w": (1, 0)})
    await turned.define()
    found = await abus.artifact(turned.id)
    assert torch.equal(await found.tensor("w"), W[2:6].t())
    assert await art.define() == art.position


def test_a_view_too_large_for_a_fact_is_refused_and_pickles(bus: tb.Bus) -> None:
    art = bus.put({f"layer.{number:04d}.{'n' * 60}": W[0] for number in range(1200)})
    most = art.view(names=art.names()[1:])
    with pytest.raises(tb.InvalidArgumentError, match="room"):
        most.define()
    assert pickle.loads(pickle.dumps(most)).id == most.id


def test_a_pin_is_ended_by_its_name(bus: tb.Bus, place: Path, tenant: str) -> None:
    art = bus.put({"w": W})
    pin = art.pin()
    assert [lease.lease for lease in art.info().leases] == [pin.lease]
    with through_gateway(place, tenant) as other, pytest.raises(tb.ConflictError, match="w1") as refused:
        other.unpin(pin.lease)
    assert refused.value.details["worker"] == "w1"
    with tb.connect(home=place, host_id=HOST, tenant=tenant) as other:
        other.unpin(pin.lease)
    assert art.info().leases == ()
    with pytest.raises(tb.NotFoundError):
        bus.unpin(pin.lease)
    with pytest.raises(tb.NotFoundError):
        pin.release()


async def test_a_view_that_is_none_is_refused(abus: tb.AsyncBus) -> None:
    art = await abus.put({"w": W})
    half = await art.view(slices={"w": 0})
    assert half._view is not None
    good = {"artifact": art.id, "view": half.id, "definition": half._view.to_json()}
    spaced = good["definition"].replace(",", ", ")
    beyond = ViewSpec.build(Manifest((TensorSpec("w", "f32", (99, 4)),)), slices={"w": 98})
    wrong = {
        "of another id": {"view": half.id[:-1] + "x"},
        "in another spelling": {"definition": spaced},
        "no json": {"definition": "half of it"},
        "outside of the tensor": {"view": view_id(art.id, beyond), "definition": beyond.to_json()},
    }
    deadline = Deadline(10, what="the test")
    for what, args in wrong.items():
        with pytest.raises(tb.InvalidArgumentError):
            await abus._core.ask("define_view", {**good, **args}, deadline=deadline)
            pytest.fail(what)
    await abus._core.ask("define_view", good, deadline=deadline)
    assert await abus.exists(half.id)
