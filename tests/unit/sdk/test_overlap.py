"""Tensors to be filled that share memory: what would undo itself is refused, what would not is filled."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tensorbus.errors import InvalidArgumentError
from tensorbus.model import DTYPES, TensorSpec
from tensorbus.sdk._into import fill_into
from tensorbus.sdk._overlap import Extent, collisions
from tensorbus.sdk._sources import collect

strided = np.lib.stride_tricks.as_strided


def octets(*values: float) -> bytes:
    return np.array(values, "f4").tobytes()


def nine(value: float = 1.0) -> tuple[TensorSpec, bytes]:
    return TensorSpec("b", "f32", (3, 3)), octets(*[value + step for step in range(9)])


@pytest.mark.parametrize(
    "target",
    [
        torch.as_strided(torch.zeros(9), (3, 3), (1, 1)),
        torch.as_strided(torch.zeros(9), (3, 3), (3, 0)),
        torch.zeros(3, 1).expand(3, 3),
        torch.zeros(5).unfold(0, 3, 1),
        strided(np.zeros(5, np.float32), (3, 3), (4, 4)),
        strided(np.zeros(5, np.float32), (3, 3), (0, 0)),
        strided(np.zeros(9, np.float32)[8:], (3, 3), (-4, -4)),
    ],
)
def test_elements_that_share_memory_are_refused_before_anything_is_written(target: object) -> None:
    other = torch.zeros(2)
    with pytest.raises(InvalidArgumentError, match="tensor 'b' cannot be filled: several elements"):
        fill_into({"a": other, "b": target}, [(TensorSpec("a", "f32", (2,)), octets(1, 2)), nine()])
    assert other.tolist() == [0, 0]


def test_names_over_one_memory_are_refused_if_they_get_other_bytes() -> None:
    memory = torch.zeros(9)
    pair = TensorSpec("a", "f32", (2,)), octets(1, 2)
    for a, b in ((memory[:2], memory.view(3, 3)), (memory[7:].numpy(), memory.view(3, 3))):
        with pytest.raises(InvalidArgumentError, match=r"shares memory with tensor '[ab]'"):
            fill_into({"a": a, "b": b}, [pair, nine()])
    again = TensorSpec("c", "f32", (3, 3)), nine(5.0)[1]
    with pytest.raises(InvalidArgumentError, match="shares memory"):
        fill_into({"b": memory.view(3, 3), "c": memory.view(3, 3)}, [nine(), again])
    turned = TensorSpec("c", "f32", (3, 3)), nine()[1]
    with pytest.raises(InvalidArgumentError, match="shares memory"):
        fill_into({"b": memory.view(3, 3), "c": memory.view(3, 3).T}, [nine(), turned])
    assert memory.tolist() == [0] * 9


def test_tied_and_interleaved_targets_are_filled() -> None:
    memory = torch.zeros(3, 3)
    tied = TensorSpec("c", "f32", (3, 3)), nine()[1]
    fill_into({"b": memory, "c": torch.nn.Parameter(memory)}, [nine(), tied])
    assert memory.flatten().tolist() == list(range(1, 10))
    wide = torch.zeros(3, 4)
    columns = {"a": wide[:, :1], "b": wide[:, 1:]}
    fill_into(columns, [(TensorSpec("a", "f32", (3, 1)), octets(7, 8, 9)), nine()])
    assert wide.tolist() == [[7, 1, 2, 3], [8, 4, 5, 6], [9, 7, 8, 9]]


def test_many_interleaved_columns_are_told_apart() -> None:
    wide = torch.zeros(50, 300)
    specs = [(TensorSpec(f"{n:03}", "f32", (50,)), octets(*[n] * 50)) for n in range(300)]
    fill_into({f"{n:03}": wide[:, n] for n in range(300)}, specs)
    assert torch.equal(wide, torch.arange(300.0).expand(50, 300))


def test_a_storage_that_was_freed_or_cut_is_refused() -> None:
    for nbytes, said in ((0, "freed"), (100, "cut to 100 bytes")):
        gone = torch.zeros(1000)
        gone.untyped_storage().resize_(nbytes)
        with pytest.raises(InvalidArgumentError, match=f"'w' cannot be filled: .*{said}"):
            fill_into({"w": gone}, [(TensorSpec("w", "f32", (1000,)), bytes(4000))])
        with pytest.raises(InvalidArgumentError, match=f"'w' cannot be taken: .*{said}"):
            collect({"w": gone})


@pytest.mark.parametrize("target", [5, [torch.zeros(1)], torch.zeros(1), None])
def test_what_is_no_map_of_tensors_is_refused(target: object) -> None:
    with pytest.raises(InvalidArgumentError, match="into= is a dict"):
        fill_into(target, [(TensorSpec("", "f32", (1,)), octets(1))])  # type: ignore[arg-type]


@st.composite
def views(draw: st.DrawFn) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Offset, sizes and strides (of elements) of a torch tensor."""
    ndim = draw(st.integers(0, 4))
    sizes = tuple(draw(st.lists(st.integers(0, 4), min_size=ndim, max_size=ndim)))
    strides = tuple(draw(st.lists(st.integers(0, 12), min_size=ndim, max_size=ndim)))
    return draw(st.integers(0, 5)), sizes, strides


@pytest.mark.filterwarnings("ignore:ComplexHalf support:UserWarning")
@pytest.mark.parametrize("known", DTYPES, ids=str)
@given(view=views())
def test_any_strides_are_taken_and_filled_or_refused(
    known: object, view: tuple[int, tuple[int, ...], tuple[int, ...]]
) -> None:
    name, size = known.name, known.itemsize  # type: ignore[attr-defined]
    offset, sizes, strides = view
    count = offset + sum(max(0, n - 1) * step for n, step in zip(sizes, strides, strict=True)) + 1
    raw = (np.arange(count * size) % (2 if name == "bool" else 251)).astype(np.uint8)
    flat = torch.from_numpy(raw.copy()).view(getattr(torch, known.torch))  # type: ignore[attr-defined]
    tensor = flat.as_strided(sizes, strides, offset)
    grid = np.zeros(sizes, int) + offset
    for axis, (n, step) in enumerate(zip(sizes, strides, strict=True)):
        grid += (np.arange(n) * step).reshape([-1 if axis == other else 1 for other in range(len(sizes))])
    elements = raw.reshape(count, size)[grid.reshape(-1)].tobytes()

    (source,) = collect(tensor)
    room = bytearray(source.nbytes)
    source.write_into(memoryview(room))
    assert room == elements
    assert b"".join(map(bytes, source.pieces(5))) == elements

    spec = TensorSpec("", name, sizes)
    new = ((np.arange(len(elements)) * 7 + 3) % (2 if name == "bool" else 249)).astype(np.uint8)
    folds = len(set(grid.reshape(-1).tolist())) < grid.size
    try:
        fill_into({"": tensor}, [(spec, new)])
    except InvalidArgumentError:
        return  # sometimes more is refused than must be: strides that only look as if
    assert not folds
    raw.reshape(count, size)[grid.reshape(-1)] = new.reshape(-1, size)
    assert flat.view(torch.uint8).numpy().tobytes() == raw.tobytes()


extents = st.builds(
    lambda address, dims, size: (
        Extent("cpu", address * size + 4096, *map(tuple, zip(*dims, strict=True)), size)
        if dims
        else Extent("cpu", address * size + 4096, (), (), size)
    ),
    st.integers(0, 30),
    st.lists(st.tuples(st.integers(1, 4), st.integers(-20, 20)), max_size=3),
    st.sampled_from([1, 4]),
)


def covered(extent: Extent) -> set[int]:
    places = {extent.address}
    for size, step in zip(extent.shape, extent.strides, strict=True):
        places = {place + step * number for place in places for number in range(size)}
    return {place + byte for place in places for byte in range(extent.itemsize)}


@given(found=st.lists(extents, max_size=6))
def test_collisions_are_those_of_the_bytes(found: list[Extent]) -> None:
    want = {
        (one, other)
        for one in range(len(found))
        for other in range(one + 1, len(found))
        if covered(found[one]) & covered(found[other])
    }
    assert set(collisions(found)) == want
    for extent in found:
        bytes_of = covered(extent)
        assert (min(bytes_of), max(bytes_of) + 1) == (extent.low, extent.end)
        if not extent.folded:
            assert len(bytes_of) == extent.itemsize * int(np.prod(extent.shape, dtype=int))
