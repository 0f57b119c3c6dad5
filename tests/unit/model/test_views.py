"""Views against what torch and numpy do with the same indices."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tensorbus.errors import CorruptError, InvalidArgumentError, NotFoundError
from tensorbus.model import EMPTY_DIGEST, Manifest, TensorSpec, ViewSpec, view_id

BASE = Manifest(
    (TensorSpec("w", "f32", (10, 6)), TensorSpec("b", "f32", (6,)), TensorSpec("é", "i8", (0, 3), EMPTY_DIGEST))
)

bounds = st.none() | st.integers(-12, 12)
slices = st.builds(slice, bounds, bounds, st.none() | st.integers(1, 4))


@st.composite
def indices(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[object, ...]:
    kept = draw(st.integers(0, len(shape)))
    items: list[object] = []
    dotted = draw(st.booleans())
    sizes = shape[len(shape) - kept :] if dotted else shape[:kept]
    for size in sizes:
        items.append(draw(slices | st.integers(-size, size - 1) if size else slices))
    return (..., *items) if dotted else tuple(items)


def wanted(array: np.ndarray, index: tuple[object, ...], perm: list[int]) -> np.ndarray:
    return array[(*index, ...) if ... not in index else index].transpose(perm)


@st.composite
def steps(draw: st.DrawFn, shape: tuple[int, ...], count: int) -> list[tuple[tuple[object, ...], list[int]]]:
    out, array = [], np.empty(shape)
    for _ in range(count):
        index = draw(indices(array.shape))
        array = array[(*index, ...) if ... not in index else index]
        perm = draw(st.permutations(range(array.ndim)))
        array = array.transpose(perm)
        out.append((index, perm))
    return out


shapes = st.lists(st.integers(0, 7), max_size=4).map(tuple)


@given(st.data(), shapes, st.integers(1, 4))
def test_views_of_views_are_one_view_of_the_base(data: st.DataObject, shape: tuple[int, ...], count: int) -> None:
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    base = Manifest((TensorSpec("t", "i64", shape), TensorSpec("u", "i64", ())))
    spec, current, expected = ViewSpec.build(base), base, array
    for index, perm in data.draw(steps(shape, count)):
        outer = ViewSpec.build(current, slices={"t": index}, transpose={"t": perm})
        spec = spec.compose(outer)
        expected = wanted(expected, index, perm)
        current = spec.manifest_of(base)
        assert current.find("t").shape == expected.shape
    view = spec.of("t")
    got = array if view is None else view.apply(array)
    np.testing.assert_array_equal(got, expected)
    assert isinstance(got, np.ndarray)
    assert got.size == 0 or np.shares_memory(got, array)
    from_torch = torch.from_numpy(array) if view is None else view.apply(torch.from_numpy(array))
    np.testing.assert_array_equal(from_torch.numpy(), expected)
    assert ViewSpec.from_json(spec.to_json()) == spec
    assert (view is None) == spec.whole


@given(st.data())
def test_equal_selections_have_one_id(data: st.DataObject) -> None:
    one, other = data.draw(slices), data.draw(slices)
    specs = [ViewSpec.build(BASE, slices={"w": (item,)}) for item in (one, other)]
    equal = range(10)[one] == range(10)[other]
    assert (view_id("x", specs[0]) == view_id("x", specs[1])) == equal


def test_spellings_of_the_same_selection() -> None:
    spellings = (
        slice(0, 8),
        slice(None, 8),
        slice(-10, 8),
        slice(-100, -2),
        slice(0, 8, 1),
        (slice(0, 8), ...),
        (..., slice(0, 8), slice(None)),
        (slice(0, 8), slice(-6, 99)),
    )
    assert len({view_id("k", ViewSpec.build(BASE, slices={"w": item})) for item in spellings}) == 1
    one = ViewSpec.build(BASE, slices={"w": slice(0, 8)})
    assert one.to_json() == '{"v":1,"names":null,"tensors":{"w":{"dims":[[0,1,8],null],"axes":[0,1]}}}'
    assert view_id("k", one) != view_id("other", one)


def test_a_view_of_everything_is_its_base() -> None:
    for spec in (
        ViewSpec.build(BASE),
        ViewSpec.build(BASE, names=["w", "b", "é", "b"]),
        ViewSpec.build(BASE, slices={"w": (), "b": slice(-6, 6), "é": (slice(3, 9), ...)}, transpose={"w": (0, -1)}),
        ViewSpec.build(BASE, transpose={"w": ((0, 1), (0, 1))}),
    ):
        assert view_id("tbr:7", spec) == "tbr:7"
        assert spec.manifest_of(BASE) == BASE
    turned = ViewSpec.build(BASE, transpose={"w": (1, 0)})
    back = turned.compose(ViewSpec.build(turned.manifest_of(BASE), transpose={"w": (1, 0)}))
    assert back.whole


def test_names_compose() -> None:
    some = ViewSpec.build(BASE, names=["w", "é"], slices={"w": 3})
    manifest = some.manifest_of(BASE)
    assert [(t.name, t.dtype, t.shape, t.digest) for t in manifest] == [
        ("w", "f32", (6,), None),
        ("é", "i8", (0, 3), EMPTY_DIGEST),
    ]
    assert some.compose(ViewSpec.build(manifest)) == some
    fewer = some.compose(ViewSpec.build(manifest, names=["é"]))
    assert fewer == ViewSpec.build(BASE, names=["é"])
    with pytest.raises(NotFoundError, match="there is no tensor 'b'"):
        ViewSpec.build(manifest, names=["b"])


def test_swaps_are_told_from_permutations() -> None:
    base = Manifest((TensorSpec("t", "u8", (2, 3, 4)),))
    for transpose, shape in (((2, 0, 1), (4, 2, 3)), (((0, 2),), (4, 3, 2)), ([[0, 1], [-1, 0]], (4, 2, 3))):
        spec = ViewSpec.build(base, transpose={"t": transpose})
        assert spec.manifest_of(base).find("t").shape == shape


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"slices": {"w": slice(None, None, -1)}}, "step of .* must be 1 or more"),
        ({"slices": {"w": slice(None, None, 0)}}, "step of .* must be 1 or more"),
        ({"slices": {"w": 10}}, r"tensor 'w' of shape \(10, 6\): index 10 is outside a dimension of 10"),
        ({"slices": {"w": -11}}, "outside"),
        ({"slices": {"w": (0, 0, 0)}}, "too many"),
        ({"slices": {"w": (..., ...)}}, "Ellipsis"),
        ({"slices": {"w": None}}, "not an index"),
        ({"slices": {"w": True}}, "not an index"),
        ({"slices": {"w": [0, 1]}}, "not an index"),
        ({"slices": {"w": 1.5}}, "not an index"),
        ({"slices": {"w": slice(0.5, 2)}}, "not an index"),
        ({"slices": {"w": torch.ones(3)}}, "not a whole number"),
        ({"transpose": {"w": (0, 0)}}, "each of the 2 dimensions"),
        ({"transpose": {"w": (0,)}}, "each of the 2 dimensions"),
        ({"transpose": {"w": (0, 2)}}, "no dimension 2"),
        ({"transpose": {"w": ((0, 1, 1),)}}, "not a pair"),
        ({"transpose": {"w": ((0, 2),)}}, "no dimension 2"),
        ({"transpose": {"w": "ab"}}, "no transposition"),
        ({"transpose": {"w": 5}}, "no transposition"),
        ({"names": 5}, "several names"),
        ({"names": [1]}, "is a str"),
        ({"slices": [0]}, "slices must be a dict"),
        ({"slices": {"w": torch.tensor(True)}}, "not an index"),
        ({"slices": {"w": slice(0, 5, 0)}}, "is 0; it must be 1 or more"),
        ({"slices": {"w": 0}, "transpose": {"w": (0, 1)}}, "no dimension 1"),
        ({"names": ["b"], "slices": {"w": 0}}, "not among names"),
        ({"names": []}, "at least one"),
        ({"names": "w"}, "several names"),
    ],
)
def test_what_cannot_be_selected(asked: dict[str, object], reason: str) -> None:
    with pytest.raises(InvalidArgumentError, match=reason):
        ViewSpec.build(BASE, **asked)  # type: ignore[arg-type]


@pytest.mark.parametrize("asked", [{"names": ["x"]}, {"slices": {"x": 0}}, {"transpose": {"x": (0,)}}])
def test_unknown_tensors_are_not_found(asked: dict[str, object]) -> None:
    with pytest.raises(NotFoundError, match="there are 3: 'b', 'w', 'é'"):
        ViewSpec.build(BASE, **asked)  # type: ignore[arg-type]


def test_whole_numbers_of_other_types_are_taken() -> None:
    items = (np.int64(3), torch.tensor(3), slice(np.int8(3), 4))
    shapes = [ViewSpec.build(BASE, slices={"w": item}).manifest_of(BASE).find("w").shape for item in items]
    assert shapes == [(6,), (6,), (1, 6)]


def tensors(dims: object, axes: object) -> str:
    return json.dumps({"v": 1, "names": None, "tensors": {"w": {"dims": dims, "axes": axes}}}, separators=(",", ":"))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"v":2,"names":null,"tensors":{}}',
        '{"v": 1,"names":null,"tensors":{}}',
        '{"v":1,"names":[],"tensors":{}}',
        '{"v":1,"names":[1],"tensors":{}}',
        '{"v":1,"names":["b","a"],"tensors":{}}',
        '{"v":1,"names":null,"tensors":[]}',
        '{"v":1,"names":null,"tensors":{},"x":0}',
        '{"v":1,"names":["a"],"tensors":{"b":{"dims":[1],"axes":[]}}}',
        tensors([None, None], [0, 1]),
        tensors([None, None], [0]),
        tensors([3, None], [0, 1]),
        tensors([-3, None], [1]),
        tensors([True, None], [1]),
        tensors([3.0, None], [1]),
        tensors([[0, 2, 1], None], [0, 1]),
        tensors([[4, 1, 0], None], [0, 1]),
        tensors([[0, 1], None], [0, 1]),
        tensors([[0, 0, 2], None], [0, 1]),
        tensors([None, 1], ["0"]),
        tensors(5, [0]),
    ],
)
def test_garbage_is_corrupt(text: str) -> None:
    with pytest.raises(CorruptError):
        ViewSpec.from_json(text)


def test_a_definition_of_another_base_does_not_fit() -> None:
    for dims, axes in (([10, None], [1]), ([[8, 2, 2], None], [0, 1]), ([1], [])):
        with pytest.raises(InvalidArgumentError, match="does not fit tensor 'w'"):
            ViewSpec.from_json(tensors(dims, axes)).manifest_of(BASE)
