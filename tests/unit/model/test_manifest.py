"""Manifests: order, canonical bytes, ids, JSON."""

from __future__ import annotations

import json
import struct

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from tensorbus.errors import CorruptError, InvalidArgumentError, NotFoundError
from tensorbus.model import DTYPES, EMPTY_DIGEST, Manifest, TensorSpec

DIGEST = blake3(b"x").hexdigest()

names = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


@st.composite
def specs(draw: st.DrawFn, name: st.SearchStrategy[str] = names) -> TensorSpec:
    shape = tuple(draw(st.lists(st.integers(0, 2**12), max_size=4)))
    digest = draw(st.binary(min_size=32, max_size=32)).hex()
    kind = draw(st.sampled_from(DTYPES)).name
    return TensorSpec(draw(name), kind, shape, EMPTY_DIGEST if 0 in shape else digest)


manifests = st.lists(specs(), min_size=1, max_size=8, unique_by=lambda spec: spec.name).map(
    lambda found: Manifest(tuple(found))
)


def decode(data: bytes) -> list[tuple[str, str, tuple[int, ...], str]]:
    """The canonical form read by the page docs/spec/ids.md alone."""
    assert data[:4] == b"TBM1"
    (count,) = struct.unpack_from("<Q", data, 4)
    at, rows = 12, []
    for _ in range(count):
        (size,) = struct.unpack_from("<I", data, at)
        name = data[at + 4 : at + 4 + size].decode()
        at += 4 + size
        kind = data[at + 1 : at + 1 + data[at]].decode("ascii")
        at += 1 + data[at]
        shape = struct.unpack_from(f"<{data[at]}Q", data, at + 1)
        at += 1 + 8 * data[at]
        rows.append((name, kind, shape, data[at : at + 32].hex()))
        at += 32
    assert at == len(data)
    return rows


@given(manifests)
def test_the_canonical_form_can_be_read_back(manifest: Manifest) -> None:
    assert decode(manifest.canonical()) == [(t.name, t.dtype, t.shape, t.digest) for t in manifest]


@given(manifests)
def test_json_round_trips_and_is_canonical(manifest: Manifest) -> None:
    text = manifest.to_json()
    assert Manifest.from_json(text) == manifest
    assert Manifest.from_json(memoryview(text.encode())).to_json() == text


@given(manifests, st.randoms(use_true_random=False))
def test_the_order_of_the_caller_does_not_enter(manifest: Manifest, chance: object) -> None:
    mixed = list(manifest.tensors)
    chance.shuffle(mixed)  # type: ignore[attr-defined]
    assert Manifest(tuple(mixed)).content_id() == manifest.content_id()
    assert [t.name.encode() for t in manifest] == sorted(t.name.encode() for t in manifest)


@given(manifests, specs())
def test_find_finds_what_is_there_and_nothing_else(manifest: Manifest, other: TensorSpec) -> None:
    for place, spec in enumerate(manifest):
        assert manifest.find(spec.name) is spec
        assert manifest.index(spec.name) == place
    if other.name not in manifest.names:
        assert other.name not in manifest
        with pytest.raises(NotFoundError, match="there is no tensor"):
            manifest.find(other.name)


def test_sizes_count_once_per_name() -> None:
    manifest = Manifest((TensorSpec("b", "bf16", (3, 2)), TensorSpec("a", "float64", ()), TensorSpec("c", "i8", (0,))))
    assert [(t.name, t.dtype, t.nbytes) for t in manifest] == [("a", "f64", 8), ("b", "bf16", 12), ("c", "i8", 0)]
    assert manifest.nbytes == 20


def test_an_id_needs_every_digest() -> None:
    manifest = Manifest((TensorSpec("a", "f32", (1,)), TensorSpec("b", "f32", (0,), EMPTY_DIGEST)))
    assert not manifest.digested
    with pytest.raises(InvalidArgumentError, match="digest of tensor 'a' is not known"):
        manifest.content_id()
    full = manifest.with_digests([blake3(b"1234").digest(), EMPTY_DIGEST])
    assert full.digested
    assert full.content_id().startswith("tb1:")


def test_empty_artifacts_and_repeated_names_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="at least one tensor"):
        Manifest(())
    with pytest.raises(InvalidArgumentError, match="two tensors have the name 'a'"):
        Manifest((TensorSpec("a", "f32", ()), TensorSpec("b", "f32", ()), TensorSpec("a", "i8", ())))


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (("a", "f32", (-1,), None), "shape is a tuple"),
        (("a", "f32", (True,), None), "shape is a tuple"),
        (("a", "f32", [1], None), "shape is a tuple"),
        (("a", "f32", (2**62,), None), "the most are"),
        (("a", "f32", (2**64, 0), None), "the most are"),
        (("a", "f32", (1,) * 65, None), "the most are"),
        (("a", "qint8", (1,), None), "qint8 is not taken"),
        (("a", "f32", (1,), "0" * 63), "64 lower-case"),
        (("a", "f32", (1,), "A" * 64), "64 lower-case"),
        (("a", "f32", (0,), DIGEST), "only be that of none"),
        (("\ud800", "f32", (1,), None), "UTF-8"),
        (("a" * 65537, "f32", (1,), None), "65537 bytes"),
        ((b"a", "f32", (1,), None), "must be a str"),
    ],
)
def test_what_a_tensor_cannot_be(spec: tuple[object, ...], reason: str) -> None:
    with pytest.raises(InvalidArgumentError, match=reason):
        TensorSpec(*spec)  # type: ignore[arg-type]


GOOD = ["a", "f32", [2], DIGEST]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[" * 100_000,
        b"\xff\xfe",
        json.dumps({"v": 1}),
        json.dumps({"v": 2, "tensors": [GOOD]}),
        json.dumps({"v": True, "tensors": [GOOD]}),
        json.dumps({"v": 1, "tensors": [GOOD], "x": 1}),
        json.dumps({"v": 1, "tensors": []}),
        json.dumps({"v": 1, "tensors": {"a": 1}}),
        json.dumps({"v": 1, "tensors": [GOOD[:3]]}),
        json.dumps({"v": 1, "tensors": [GOOD, GOOD]}),
        json.dumps({"v": 1, "tensors": [["b", *GOOD[1:]], GOOD]}),
        json.dumps({"v": 1, "tensors": [["a", "float32", [2], DIGEST]]}),
        json.dumps({"v": 1, "tensors": [["a", [], [2], DIGEST]]}),
        json.dumps({"v": 1, "tensors": [["a", "f32", [2.0], DIGEST]]}),
        json.dumps({"v": 1, "tensors": [["a", "f32", ["2"], DIGEST]]}),
        json.dumps({"v": 1, "tensors": [["a", "f32", 2, DIGEST]]}),
        json.dumps({"v": 1, "tensors": [["a", "f32", [2], 7]]}),
        json.dumps({"v": 1, "tensors": [[None, "f32", [2], DIGEST]]}),
        json.dumps({"v": 1, "tensors": [["\ud800", "f32", [2], DIGEST]]}),
    ],
)
def test_garbage_is_corrupt(text: str | bytes) -> None:
    with pytest.raises(CorruptError):
        Manifest.from_json(text)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_manifest_or_corrupt(data: bytes) -> None:
    with pytest.raises(CorruptError):
        Manifest.from_json(data)


def test_a_hundred_thousand_tensors() -> None:
    manifest = Manifest(tuple(TensorSpec(f"layers.{i}.w", "bf16", (4, 4), DIGEST) for i in range(100_000)))
    again = Manifest.from_json(manifest.to_json())
    assert again == manifest
    assert again.nbytes == 3_200_000
    assert again.find("layers.77777.w").name == "layers.77777.w"
    assert len(decode(again.canonical())) == 100_000
