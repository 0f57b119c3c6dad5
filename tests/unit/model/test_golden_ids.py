"""The recorded ids of ``tests/golden/ids.json``, made again by the package and by a second reading of the spec."""

from __future__ import annotations

import base64
import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from blake3 import blake3

from tensorbus.ids import prefixed, run_id, subject_token
from tensorbus.model import DTYPES, Manifest, TensorSpec, ViewSpec, view_id

ROOT = Path(__file__).resolve().parents[3]
GOLDEN = json.loads((ROOT / "tests/golden/ids.json").read_text("utf-8"))


def framed(*parts: str) -> bytes:
    return b"".join(struct.pack("<I", len(part.encode())) + part.encode() for part in parts)


def canonical(tensors: list[dict[str, object]]) -> bytes:
    """The canonical manifest as ``docs/spec/ids.md`` says it, without the package."""
    out = b"TBM1" + struct.pack("<Q", len(tensors))
    for tensor in sorted(tensors, key=lambda t: str(t["name"]).encode()):
        name, kind, shape = str(tensor["name"]).encode(), str(tensor["dtype"]).encode(), tensor["shape"]
        assert isinstance(shape, list)
        out += struct.pack("<I", len(name)) + name + bytes([len(kind)]) + kind + bytes([len(shape)])
        out += b"".join(struct.pack("<Q", size) for size in shape)
        out += blake3(bytes.fromhex(str(tensor["bytes"]))).digest()
    return out


@pytest.mark.parametrize("case", GOLDEN["artifacts"], ids=lambda case: case["about"])
def test_content_ids(case: dict[str, object]) -> None:
    tensors = case["tensors"]
    assert isinstance(tensors, list)
    digests = [blake3(bytes.fromhex(t["bytes"])).hexdigest() for t in tensors]
    manifest = Manifest(
        tuple(TensorSpec(t["name"], t["dtype"], tuple(t["shape"]), d) for t, d in zip(tensors, digests, strict=True))
    )
    assert manifest.canonical().hex() == case["canonical"] == canonical(tensors).hex()
    assert manifest.content_id() == case["id"] == "tb1:" + blake3(canonical(tensors)).hexdigest()


@pytest.mark.parametrize("case", GOLDEN["views"], ids=lambda case: case["definition"])
def test_view_ids(case: dict[str, str]) -> None:
    spec = ViewSpec.from_json(case["definition"])
    assert view_id(case["base"], spec) == case["id"]
    assert case["id"] == "tbv:" + blake3(framed(case["base"], case["definition"])).hexdigest()


@pytest.mark.parametrize("case", GOLDEN["subjects"], ids=lambda case: case["token"])
def test_subject_tokens_and_runs(case: dict[str, str]) -> None:
    kind, tenant, text = case["kind"], case["tenant"], case["text"]
    made = run_id(tenant, text) if kind == "run" else subject_token(kind, tenant, text)
    raw = blake3(framed(kind, tenant, text)).digest()[:20]
    assert prefixed(kind, tenant, text) == framed(kind, tenant, text)
    assert made == case["token"] == base64.b32encode(raw).decode().lower()


def test_every_dtype_name_is_recorded() -> None:
    assert [known.name for known in DTYPES] == GOLDEN["dtypes"]


IDS = """
import json, sys
from tensorbus.ids import subject_token
from tensorbus.model import Manifest, TensorSpec, ViewSpec, view_id
names = {f"t{i}" for i in range(50)}
base = Manifest(tuple(TensorSpec(name, "f32", (4, 4), f"{hash_:064x}") for hash_, name in enumerate(sorted(names))))
mixed = Manifest(tuple(base.find(name) for name in names))
view = ViewSpec.build(mixed, names={"t3", "t1", "t2"}, slices={name: slice(0, 2) for name in {"t1", "t2", "t3"}})
print(base.content_id(), mixed.content_id(), view_id("b", view), subject_token("key", "t", "k"), mixed.to_json())
"""


def test_ids_are_equal_under_any_hash_seed() -> None:
    outputs = {
        subprocess.run(
            [sys.executable, "-c", IDS],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for seed in ("0", "1", "4242")
    }
    assert len(outputs) == 1
