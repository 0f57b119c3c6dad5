"""Putting, finding and reading artifacts through a real worker."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import pytest
import torch

import tensorbus as tb

pytestmark = pytest.mark.integration

W = torch.arange(32, dtype=torch.float32).reshape(8, 4)
B = torch.linspace(0, 1, 4, dtype=torch.float64)


def test_a_dict_is_put_found_and_read(bus: tb.Bus) -> None:
    put = bus.put({"w": W, "b": B}, key="demo/linear")
    found = bus.artifact("demo/linear")
    assert found.id == put.id
    assert found.id.startswith("tb1:")
    assert found.nbytes == W.nbytes + B.nbytes
    assert torch.equal(found["w"], W)
    assert torch.equal(found.tensor("b"), B)
    assert "w" in found
    assert "x" not in found
    assert len(found) == 2
    assert found.names() == ("b", "w")
    assert found.tensor_meta()["w"].shape == (8, 4)
    assert {name: tuple(t.shape) for name, t in found.tensor_dict().items()} == {"b": (4,), "w": (8, 4)}
    assert np.array_equal(found.tensor("w", framework="numpy"), W.numpy())


async def test_the_async_bus_does_the_same(abus: tb.AsyncBus) -> None:
    put = await abus.put({"w": W, "b": B}, key="demo/linear")
    found = await abus.artifact("demo/linear")
    assert found.id == put.id
    assert torch.equal(await found.tensor("w"), W)
    assert "b" in found
    assert await abus.exists("demo/linear")
    assert [item.key async for item in abus.ls("demo/")] == ["demo/linear"]
    assert [item.key for item in await abus.ls()] == ["demo/linear"]
    await found.destroy()
    assert not await abus.exists("demo/linear")
    assert not await found.exists()


async def test_the_blocking_bus_works_inside_a_running_loop(bus: tb.Bus) -> None:
    bus.put(W, key="w")
    assert torch.equal(bus.artifact("w").tensor(), W)


def test_equal_content_is_one_artifact(bus: tb.Bus) -> None:
    assert bus.put({"w": W}).id == bus.put({"w": W.clone()}).id


def test_a_key_moves_only_when_told_to(bus: tb.Bus) -> None:
    first = bus.put(W, key="k")
    with pytest.raises(tb.ConflictError):
        bus.put(B, key="k")
    second = bus.put(B, key="k", rebind=True)
    assert first.id != second.id
    assert bus.artifact("k").id == second.id
    assert bus.bind("k", first, rebind=True).id == first.id
    assert bus.artifact("k").id == first.id
    bus.unbind("k")
    with pytest.raises(tb.NotFoundError):
        bus.artifact("k")
    assert first.exists()


def test_a_given_id_has_one_content(bus: tb.Bus) -> None:
    first = bus.put(W, id="mine")
    assert bus.put(W, id="mine", digest="later").id == first.id == "mine"
    with pytest.raises(tb.ConflictError):
        bus.put(B, id="mine")


def test_a_digest_can_come_later(bus: tb.Bus) -> None:
    art = bus.put(W, digest="later")
    assert art.id.startswith("tbr:")
    assert torch.equal(art.tensor(), W)


def test_writing_into_a_tensor_changes_nobody_elses(bus: tb.Bus, place: Path, tenant: str) -> None:
    bus.put({"w": W}, key="k")
    mine = bus.artifact("k")["w"]
    mine.zero_()
    with tb.connect(home=place, host_id="host-a", tenant=tenant) as other:
        assert torch.equal(other.artifact("k")["w"], W)


def test_reading_again_shares_the_map_while_a_tensor_lives(bus: tb.Bus) -> None:
    bus.put({"w": W}, key="k")
    first = bus.artifact("k")["w"]
    assert bus.artifact("k")["w"].data_ptr() == first.data_ptr()


def test_tensors_outlive_handle_bus_and_artifact(bus: tb.Bus) -> None:
    bus.put({"w": W}, key="k")
    art = bus.artifact("k")
    tensor = art["w"]
    art.destroy()
    del art
    bus.close()
    gc.collect()
    assert torch.equal(tensor, W)


def test_the_callers_own_memory_is_filled(bus: tb.Bus) -> None:
    module = torch.nn.Linear(4, 3)
    other = torch.nn.Linear(4, 3)
    art = bus.put(module.state_dict(), key="m")
    art.tensor_dict(into=other.state_dict())
    assert torch.equal(module.weight, other.weight)
    assert torch.equal(module.bias, other.bias)
    wrong = {"weight": torch.zeros(3, 4), "bias": torch.zeros(4)}
    with pytest.raises(tb.InvalidArgumentError, match="bias"):
        art.tensor_dict(into=wrong)
    assert not wrong["weight"].any()


def test_tied_and_odd_tensors_round_trip(bus: tb.Bus) -> None:
    content = {
        "tied.a": W,
        "tied.b": W,
        "t": W.t(),
        "scalar": torch.tensor(3.0),
        "none": torch.empty(0, 3),
        "half": torch.randn(5).to(torch.bfloat16),
        "flags": torch.tensor([True, False]),
    }
    art = bus.put(content)
    for name, tensor in art.tensor_dict().items():
        assert torch.equal(tensor, content[name]), name


def test_a_safetensors_file_is_put(bus: tb.Bus, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    path = tmp_path / "model.safetensors"
    save_file({"w": W, "b": B}, path)
    assert bus.put(path, key="file").id == bus.put({"w": W, "b": B}).id
    with pytest.raises(tb.NotFoundError):
        bus.put(tmp_path / "absent.safetensors")


def test_views_select_and_compose(bus: tb.Bus) -> None:
    art = bus.put({"w": W, "b": B}, key="k")
    half = art.view(names=["w"], slices={"w": (slice(0, 4),)})
    assert half.id.startswith("tbv:")
    assert half.id == art.view(names=["w"], slices={"w": (slice(None, -4), ...)}).id
    assert half.base_id == art.id
    assert torch.equal(half["w"], W[:4])
    assert half.nbytes == W[:4].nbytes
    assert half.names() == ("w",)
    turned = half.view(slices={"w": (slice(1, None),)}, transpose={"w": (1, 0)})
    assert torch.equal(turned["w"], W[1:4].t())
    assert turned.id == art.view(names=["w"], slices={"w": (slice(1, 4),)}, transpose={"w": (1, 0)}).id
    mine = {"w": torch.zeros(4, 3)}
    turned.tensor_dict(into=mine)
    assert torch.equal(mine["w"], W[1:4].t())
    assert art.view().id == art.id
    with pytest.raises(tb.NotFoundError):
        half["b"]
    with pytest.raises(tb.InvalidArgumentError):
        half.destroy()


def test_a_missing_tensor_names_near_ones(bus: tb.Bus) -> None:
    art = bus.put({"model.weight": W})
    with pytest.raises(tb.NotFoundError, match=r"model\.weight"):
        art["model.wieght"]


def test_history_and_replicas_tell_what_happened(bus: tb.Bus) -> None:
    art = bus.put({"w": W}, key="k")
    assert [event.type for event in art.history()] == ["ArtifactPut", "KeyBound"]
    assert [replica.worker for replica in art.replicas()] == ["w1"]
    assert art.info().keys == ("k",)
    assert {worker.worker for worker in bus.list_workers()} == {"g1", "w1"}
    assert {"SessionOpened", "ArtifactPut", "KeyBound"} <= {event.type for event in bus.events()}
    assert bus.stats()["directory"]["artifacts"] >= 1


def test_progress_is_told(bus: tb.Bus) -> None:
    seen: list[tuple[int, int]] = []
    bus.put({"w": W, "b": B}, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (W.nbytes + B.nbytes, W.nbytes + B.nbytes)


def test_a_full_pool_says_so_and_stays_usable(bus: tb.Bus) -> None:
    with pytest.raises(tb.OutOfSpaceError):
        bus.put(torch.zeros(65 << 20, dtype=torch.uint8))
    for number in range(6):  # twice the pool, one after the other
        bus.put(torch.full((24 << 20,), number, dtype=torch.uint8)).destroy()
    assert torch.equal(bus.put(W).tensor(), W)


def test_many_tensors_in_one_artifact(bus: tb.Bus) -> None:
    content = {f"t{number:05d}": np.full(2, number, np.int32) for number in range(5000)}
    art = bus.put(content, key="many")
    assert art.tensor("t04321", framework="numpy").tolist() == [4321, 4321]
