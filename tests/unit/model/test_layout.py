"""Where tensors lie in a segment."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorbus.errors import CorruptError, InvalidArgumentError
from tensorbus.model import Layout, Manifest, TensorSpec, plan_layout

sizes = st.lists(st.one_of(st.integers(0, 200), st.integers(65_000, 70_000)), min_size=1, max_size=12)


def of_sizes(found: list[int]) -> Manifest:
    return Manifest(tuple(TensorSpec(f"{i:04}", "u8", (size,)) for i, size in enumerate(found)))


@given(sizes)
def test_tensors_are_aligned_inside_and_apart(found: list[int]) -> None:
    manifest = of_sizes(found)
    layout = plan_layout(manifest)
    layout.check(manifest)
    assert all(
        offset % (4096 if size >= 65_536 else 64) == 0 for offset, size in zip(layout.offsets, found, strict=True)
    )
    assert layout.nbytes <= sum(found) + 4096 * len(found)
    assert Layout.from_json(layout.to_json(), manifest) == layout


@given(sizes)
def test_tied_tensors_are_stored_once(found: list[int]) -> None:
    manifest = of_sizes([*found, *found])
    keys = list(range(len(found))) * 2
    layout = plan_layout(manifest, keys)
    layout.check(manifest)
    assert layout.offsets[: len(found)] == layout.offsets[len(found) :]
    assert layout == Layout(layout.offsets, plan_layout(of_sizes(found)).nbytes)


def test_an_alias_of_another_size_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="tied to one of 4"):
        plan_layout(of_sizes([4, 8]), ["k", "k"])
    with pytest.raises(InvalidArgumentError, match="1 alias keys for 2"):
        plan_layout(of_sizes([4, 8]), ["k"])


@pytest.mark.parametrize(
    "body",
    [
        {"nbytes": 192, "offsets": [0]},
        {"nbytes": 192, "offsets": [0, 1]},
        {"nbytes": 100, "offsets": [0, 128]},
        {"nbytes": 192, "offsets": [0, -64]},
        {"nbytes": 192, "offsets": [0, True]},
        {"nbytes": 192, "offsets": [0, 64.0]},
        {"nbytes": 192, "offsets": [0, 0]},
        {"nbytes": 192, "offsets": [0, 64]},
        {"nbytes": 192, "offsets": "00"},
        {"nbytes": None, "offsets": [0, 128]},
        {"nbytes": 192},
        [],
    ],
)
def test_garbage_is_corrupt(body: object) -> None:
    with pytest.raises(CorruptError):
        Layout.from_json(json.dumps(body), of_sizes([100, 64]))


def test_a_good_layout_of_that_manifest() -> None:
    assert Layout.from_json('{"nbytes":192,"offsets":[0,128]}', of_sizes([100, 64])) == Layout((0, 128), 192)


def test_it_travels_within_other_json() -> None:
    manifest = Manifest((TensorSpec("a", "f32", (3,)), TensorSpec("b", "u8", (70_000,))))
    layout = plan_layout(manifest)
    assert Layout.from_value(json.loads(json.dumps({"in": layout.to_value()}))["in"], manifest) == layout
    for wrong in (None, [], {"nbytes": 1}, {"nbytes": 1, "offsets": [0.0, 64]}, {"nbytes": 1, "offsets": [0, -64]}):
        with pytest.raises(CorruptError):
            Layout.from_value(wrong, manifest)
