"""The caller's own memory under a lease, and pins."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import pytest
import torch

import tensorbus as tb
from tensorbus.sdk._leases import Leases
from tensorbus.testing._processes import wait_until

pytestmark = pytest.mark.integration


def test_memory_from_empty_is_served_in_place(bus: tb.Bus, place: Path, tenant: str) -> None:
    mine = bus.empty((4, 8), "bf16")
    mine.fill_(3)
    art = bus.register({"kv": mine}, key="kv", lease_s=2.0)
    assert art.lease is not None
    with tb.connect(home=place, host_id="host-a", tenant=tenant) as other:
        assert torch.equal(other.artifact("kv")["kv"], mine)
    assert art.replicas()[0].leased
    art.release()
    wait_until(lambda: not bus.exists("kv"), what="the end of the artifact")
    assert mine[0, 0] == 3


def test_parts_of_several_empties_make_one_artifact(bus: tb.Bus) -> None:
    a, b = bus.empty((64, 16)), bus.empty(100, "i32", framework="numpy")
    a.copy_(torch.randn(64, 16))
    b[:] = np.arange(100)
    art = bus.register({"a.low": a[:32], "a.high": a[32:], "a.tied": a[32:], "b": b}, sealed=True)
    assert art.id.startswith("tb1:")
    found = art.tensor_dict()
    assert torch.equal(found["a.low"], a[:32])
    assert torch.equal(found["a.high"], a[32:])
    assert torch.equal(found["a.tied"], a[32:])
    assert found["b"].tolist() == list(range(100))
    art.release()


def test_a_lease_is_renewed_and_ends_with_the_bus(
    bus: tb.Bus, place: Path, tenant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    renewals: list[float] = []
    renew = Leases._renew_all

    async def counted(self: Leases, period_s: float) -> None:
        await renew(self, period_s)
        renewals.append(period_s)

    monkeypatch.setattr(Leases, "_renew_all", counted)
    with tb.connect(home=place, host_id="host-a", tenant=tenant) as owner:
        art = owner.register(owner.empty(10), key="kv", lease_s=0.6)
        wait_until(lambda: len(renewals) >= 6, what="twice the lease's length")
        assert art.exists()
        assert bus.exists("kv")
    wait_until(lambda: not bus.exists("kv"), what="the end of the artifact")


def test_other_memory_is_refused_by_name_or_copied(bus: tb.Bus) -> None:
    plain = torch.arange(6.0)
    with pytest.raises(tb.InvalidArgumentError, match=r"'x'.*copy=True"):
        bus.register({"x": plain})
    art = bus.register({"x": plain}, copy=True)
    plain.zero_()
    assert art["x"].tolist() == list(range(6))
    art.release()


def test_memory_is_registered_once(bus: tb.Bus) -> None:
    mine = bus.empty(8)
    bus.register(mine).release()
    with pytest.raises(tb.InvalidArgumentError, match="before"):
        bus.register(mine)


def test_a_dropped_registration_warns_and_ends(bus: tb.Bus) -> None:
    art = bus.register(bus.empty(4), key="kv")
    with pytest.warns(ResourceWarning, match="without release"):
        del art
    wait_until(lambda: not bus.exists("kv"), what="the end of the artifact")


def test_memory_that_is_dropped_goes_back_to_the_pool(bus: tb.Bus) -> None:
    for _ in range(20):  # five times the pool
        mine = bus.empty(16 << 20, "u8")
        del mine
        gc.collect()


def test_a_pin_is_a_fact_and_ends_once(bus: tb.Bus) -> None:
    art = bus.put(torch.arange(3), key="k")
    with art.pin(ttl_s=None) as pin:
        assert pin.held
        assert [lease.lease for lease in art.info().leases] == [pin.lease]
    assert not pin.held
    wait_until(lambda: not art.info().leases, what="the end of the pin")
    pin.release()
    pin = art.pin(ttl_s=30)
    pin.release()
    with pytest.warns(ResourceWarning, match="without release"):
        art.pin()
    wait_until(lambda: not art.info().leases, what="the end of the dropped pin")


async def test_an_async_pin_is_awaited_or_entered(abus: tb.AsyncBus) -> None:
    art = await abus.put(torch.arange(3))
    async with art.pin(ttl_s=5) as pin:
        assert pin.artifact == art.id
    pin = await art.pin()
    await pin.release()


def test_a_released_handle_is_of_no_use(bus: tb.Bus) -> None:
    art = bus.put(torch.arange(3))
    tensor = art.tensor()
    art.release()
    art.release()
    with pytest.raises(tb.InvalidArgumentError, match="released"):
        art.tensor()
    assert tensor.tolist() == [0, 1, 2]
