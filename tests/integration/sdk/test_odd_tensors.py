"""Odd tensors through a real worker: they come back bit by bit, on this host and over TCP, or are refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import tensorbus as tb
from tensorbus.model import DTYPES
from tests.integration.sdk.conftest import HOST
from tests.servers import Server

pytestmark = pytest.mark.integration

SPECIAL = [0x7FC00001, 0xFFC12345, 0x7F800001, 0x80000000, 0x00000001, 0x7F800000]
"""Float bits: NaNs with payloads, quiet and signalling, -0.0, the least subnormal, infinity."""
GRID = torch.arange(2 * 3 * 4 * 5, dtype=torch.float32).reshape(2, 3, 4, 5)
ODD_NAMES = [
    "",
    "w" * 10_000,
    "W",
    "w",
    "слой.0",
    "重み",
    "a\nb",
    "a/../b",
    "nul\0byte",
    "\u0301",
    "é",
    "e\u0301",
    "🦀",
]


def of_bytes(name: str, count: int) -> torch.Tensor:
    """A tensor of the dtype with every byte in it (bools: 0 and 1 only)."""
    known = next(one for one in DTYPES if one.name == name)
    octets = torch.arange(count * known.itemsize, dtype=torch.int64).remainder(2 if name == "bool" else 256)
    return octets.to(torch.uint8).view(getattr(torch, str(known.torch)))


def bits(tensor: torch.Tensor) -> bytes:
    whole = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return bytes(whole.reshape(-1).view(torch.uint8).numpy()) if whole.numel() else b""


def check(art: tb.Artifact, content: dict[str, torch.Tensor]) -> None:
    came = art.tensor_dict(framework="torch")
    assert set(came) == set(content)
    for name, tensor in content.items():
        got = came[name]
        assert (got.dtype, got.shape, bits(got)) == (tensor.dtype, tensor.shape, bits(tensor)), name[:80]


@pytest.fixture
def round_trip(bus: tb.Bus, place: Path, tenant: str) -> Callable[[dict[str, torch.Tensor]], tb.Artifact]:
    """Puts tensors and sees that they come back the same, mapped and over TCP."""

    def trip(content: dict[str, torch.Tensor]) -> tb.Artifact:
        art = bus.put(content)
        check(bus.artifact(art.id), content)
        with tb.connect(home=place, host_id="elsewhere", tenant=tenant) as far:
            check(far.artifact(id=art.id, at_least=art.position), content)
        return art

    return trip


Trip = Callable[[dict[str, torch.Tensor]], tb.Artifact]


def test_every_dtype(round_trip: Trip) -> None:
    there = [one for one in DTYPES if hasattr(torch, str(one.torch))]
    assert {"bf16", "f8_e4m3fn", "f8_e5m2", "bool", "c64", "c128", "u64"} <= {one.name for one in there}
    round_trip({one.name: of_bytes(one.name, 32) for one in there})


def test_scalars_and_empties(round_trip: Trip) -> None:
    empties = {f"empty.{shape}": torch.empty(shape, dtype=torch.bfloat16) for shape in [(0,), (3, 0), (0, 5, 2)]}
    round_trip({"scalar": torch.tensor(3.5, dtype=torch.float64), "flag": torch.tensor(True), **empties})


def test_nans_and_negative_zeros_keep_their_bits(round_trip: Trip) -> None:
    raw = torch.from_numpy(np.array(SPECIAL, np.uint32).view(np.int32)).view(torch.float32)
    half = torch.from_numpy(np.array([0x7E01, 0xFD55, 0x8000, 0x0001], np.uint16).view(np.int16))
    art = round_trip({"f32": raw, "f16": half.view(torch.float16), "bf16": half.view(torch.bfloat16)})
    assert art.tensor("f32", framework="numpy").view(np.uint32).tolist() == SPECIAL


def test_strides_of_every_kind(round_trip: Trip) -> None:
    content = {
        "plain": GRID,
        "transposed": GRID.transpose(1, 3),
        "permuted": GRID.permute(3, 0, 2, 1),
        "stepped": GRID[:, ::2, 1::2],
        "offset": GRID[1:, 2:, 1:3],
        "expanded": GRID[:, :1, :1].expand(2, 6, 7, 5),
        "row": torch.tensor([1.0, 2.0]).expand(1000, 2),
        "channels_last": GRID.contiguous(memory_format=torch.channels_last),
        "conjugated": torch.view_as_complex(GRID[..., :2].contiguous()).conj(),
        "negated": torch.view_as_complex(GRID[..., :2].contiguous()).conj().imag,
    }
    art = round_trip(content)
    assert art.id == art.bus.put({name: tensor.clone() for name, tensor in content.items()}).id  # bytes, not strides


def test_tied_weights_are_stored_once(bus: tb.Bus, place: Path, tenant: str) -> None:
    weight = torch.arange(1 << 20, dtype=torch.float32)
    before = bus.stats()["pool"]["busy_bytes"]
    art = bus.put({"embed": weight, "head": weight, "again": torch.nn.Parameter(weight)})
    assert bus.stats()["pool"]["busy_bytes"] - before < 1.5 * weight.nbytes
    assert art.nbytes == 3 * weight.nbytes
    assert art["embed"].data_ptr() == art["head"].data_ptr()
    assert torch.equal(art["again"], weight)
    with tb.connect(home=place, host_id="elsewhere", tenant=tenant) as far:
        far_art = far.artifact(art.id)
        assert torch.equal(far_art["head"], weight)
        assert far_art["embed"].data_ptr() == far_art["head"].data_ptr()


def test_names_of_every_kind(round_trip: Trip, bus: tb.Bus) -> None:
    art = round_trip({name: torch.tensor([number]) for number, name in enumerate(ODD_NAMES)})
    assert art.names() == tuple(sorted(ODD_NAMES, key=str.encode))
    few = art.view(names=["w" * 10_000, "重み"])
    few.define()
    assert bus.artifact(few.id).tensor("重み").item() == ODD_NAMES.index("重み")


@pytest.mark.parametrize(
    "key", ["a.b", "two words", "*", ">", "tb.ev.>", "line\nbreak", "\t", "нет", "k" * 1024, "$JS"]
)
def test_keys_of_every_kind(bus: tb.Bus, key: str) -> None:
    art = bus.put(GRID, key=key)
    assert bus.artifact(key).id == bus.artifact(key=key).id == art.id
    assert bus.publish(key, art).version == 1
    assert [item.key for item in bus.ls(key)] == [key]
    bus.unbind(key)
    assert not bus.exists(key)


@pytest.mark.parametrize(
    ("tensor", "why"),
    [
        (torch.eye(3).to_sparse(), "sparse"),
        (torch.empty(3, device="meta"), "meta"),
        (np.array(["text"]), "str128"),
        (np.array([object()], dtype=object), "object"),
        ([1.0, 2.0], "list"),
        (None, "NoneType"),
        ({"inner": GRID}, "flatten"),
    ],
)
def test_what_cannot_be_taken_is_refused_by_name(bus: tb.Bus, tensor: object, why: str) -> None:
    with pytest.raises(tb.InvalidArgumentError, match=r"layer\.7") as refused:
        bus.put({"fine": GRID, "layer.7": tensor})
    assert why in str(refused.value)


@pytest.mark.timeout(300)
def test_a_hundred_thousand_tensors_do_not_hold_the_worker_up(bus: tb.Bus, place: Path, tenant: str) -> None:
    """The sessions live for 2 s without a heartbeat, and a gateway watches: they are the same ones afterwards."""
    lives = {worker.worker: worker.incarnation for worker in bus.list_workers() if worker.live}
    flat = torch.arange(200_000, dtype=torch.int16).reshape(100_000, 2)
    art = bus.put({f"layer.{number:06d}.weight": flat[number] for number in range(100_000)}, key="many")
    assert (len(art), art.nbytes) == (100_000, flat.nbytes)
    assert art["layer.054321.weight"].equal(flat[54_321])
    few = art.view(names=["layer.000007.weight"])
    few.define()
    with tb.connect(home=place, host_id="elsewhere", tenant=tenant) as far:
        assert far.artifact("many").tensor("layer.099999.weight").equal(flat[99_999])
        assert far.artifact(few.id)["layer.000007.weight"].equal(flat[7])
    art.destroy()
    assert {worker.worker: worker.incarnation for worker in bus.list_workers() if worker.live} == lives


@pytest.mark.soak
@pytest.mark.big
@pytest.mark.timeout(900)
def test_a_tensor_of_more_than_4_gib(nats_server: Server, home: Path) -> None:
    nbytes = (4 << 30) + 12_345
    places = [0, 1, (2 << 30) - 1, 2 << 30, (4 << 30) - 1, 4 << 30, nbytes - 1]
    big = torch.zeros(nbytes, dtype=torch.uint8)
    big[places] = torch.arange(1, len(places) + 1, dtype=torch.uint8)
    with nats_server.processes(home / "logs") as owner:
        for number in (1, 2):
            owner.worker("basic", id=f"w{number}", host_id=f"{HOST}{number}", home=home, pool_bytes="5GiB")
        with tb.connect(home=home, host_id=f"{HOST}1", timeout=300) as bus:
            art = bus.put({"small": torch.tensor([7]), "big": big}, key="big")
            assert art["big"].shape == (nbytes,)
            assert art["big"][places].tolist() == big[places].tolist()
            with tb.connect(home=home, host_id=f"{HOST}2", timeout=300) as far:
                came = far.artifact("big", at_least=art.position)
                assert came["big"][places].tolist() == big[places].tolist()
                assert came["small"].item() == 7
                came.prefetch("w2")  # a copy that is there by now; its fact too
                assert {replica.worker for replica in came.replicas()} == {"w1", "w2"}
