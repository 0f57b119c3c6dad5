"""What cannot be taken, found or used is refused in words, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
import torch

import tensorbus as tb
from tensorbus.testing._processes import wait_until

pytestmark = pytest.mark.integration

X = torch.arange(3)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({}, "at least one tensor"),
        ({"w": [1, 2]}, "'w'"),
        ({1: X}, "str"),
        (7, "not taken"),
        ({"s": torch.eye(3).to_sparse()}, "'s'"),
    ],
)
def test_what_is_no_tensor_is_refused_by_name(bus: tb.Bus, content: object, said: str) -> None:
    with pytest.raises(tb.InvalidArgumentError, match=said):
        bus.put(content)


def test_names_that_cannot_be_are_refused(bus: tb.Bus) -> None:
    for wrong in ({"key": ""}, {"id": "tb1:x"}, {"key": "k" * 1025}, {"digest": "never"}):
        with pytest.raises(tb.InvalidArgumentError):
            bus.put(X, **wrong)  # type: ignore[arg-type]
    with pytest.raises(tb.InvalidArgumentError):
        bus.subscribe("s", start="first")  # type: ignore[arg-type]
    with pytest.raises(tb.InvalidArgumentError):
        bus.version("s", 0)
    with pytest.raises(tb.InvalidArgumentError, match="view"):
        bus.bind("k", bus.put({"w": X}).view(slices={"w": 0}))


@pytest.mark.parametrize("key", ["a.b", "a b", "*", ">", "line\nbreak", "ключ", "x" * 1024, "tb", "/"])
def test_any_other_text_is_a_key(bus: tb.Bus, key: str) -> None:
    art = bus.put(X, key=key)
    assert bus.artifact(key).id == art.id
    assert key in [item.key for item in bus.ls(key[:1])]


def test_a_put_that_fails_gives_its_memory_back(bus: tb.Bus) -> None:
    bus.put(X, key="k")
    busy = bus.stats()["pool"]["busy_bytes"]
    for _ in range(8):
        with pytest.raises(tb.ConflictError):
            bus.put(torch.zeros(16 << 20, dtype=torch.uint8), key="k")
    wait_until(lambda: bus.stats()["pool"]["busy_bytes"] == busy, what="the memory")


async def test_a_put_that_is_given_up_gives_its_memory_back(abus: tb.AsyncBus) -> None:
    busy = (await abus.stats())["pool"]["busy_bytes"]
    begun = threading.Event()
    putting = asyncio.ensure_future(
        abus.put(
            {name: torch.zeros(8 << 20, dtype=torch.uint8) for name in "abc"}, progress=lambda done, total: begun.set()
        )
    )
    while not begun.is_set():
        await asyncio.sleep(0.001)
    putting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await putting
    async with asyncio.timeout(10):
        while (await abus.stats())["pool"]["busy_bytes"] > busy + (24 << 20):
            await asyncio.sleep(0.01)


def test_tenants_do_not_meet(bus: tb.Bus, place: Path) -> None:
    art = bus.put(X, key="k")
    with tb.connect(home=place, host_id="host-a", tenant="somebody-else") as other:
        assert not other.exists("k")
        assert not other.exists(art.id)
        assert other.ls() == []
        with pytest.raises(tb.NotFoundError):
            other.artifact(id=art.id)


def test_a_key_bound_again_gives_a_new_handle_and_leaves_the_old(bus: tb.Bus) -> None:
    old = bus.put(X, key="k")
    bus.put(X + 1, key="k", rebind=True)
    assert old.tensor().tolist() == [0, 1, 2]
    assert bus.artifact("k").tensor().tolist() == [1, 2, 3]


def test_an_id_stands_for_its_bytes_whenever_they_are_there(bus: tb.Bus) -> None:
    handle = bus.put(X, id="mine")
    handle.destroy()
    with pytest.raises(tb.NotFoundError):
        handle.tensor()
    with pytest.raises(tb.ConflictError):
        bus.put(X + 1, id="mine")
    bus.put(X, id="mine")
    assert handle.exists()
    assert handle.tensor().tolist() == [0, 1, 2]
