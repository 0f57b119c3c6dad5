"""The example's conversion of a shipped checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from examples.checkpoint import Tensor, figures, hf_name, to_bf16, unpermute, write_safetensors

torch = pytest.importorskip("torch")


def test_bf16_is_rounded_as_torch_does() -> None:
    bits = np.arange(0, 2**32, 65_521, dtype=np.uint32)
    values = bits.view(np.float32)
    values = values[np.isfinite(values)]
    expected = torch.from_numpy(values.copy()).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    assert np.array_equal(to_bf16(values), expected)


def test_names_are_those_of_transformers() -> None:
    assert hf_name("blk.12.attn_q.weight") == "model.layers.12.self_attn.q_proj.weight"
    assert hf_name("token_embd.weight") == "model.embed_tokens.weight"
    with pytest.raises(ValueError, match="no tensor 'blk"):
        hf_name("blk.0.experts.weight")


def test_unpermute_puts_the_halves_of_rotary_pairs_back() -> None:
    rows = np.arange(8, dtype=np.float32)[:, None]
    assert unpermute(rows, 2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_the_file_is_safetensors_and_the_same_each_time(tmp_path: Path) -> None:
    content = [
        Tensor(name="a", bits=to_bf16(np.ones((2, 3), np.float32))),
        Tensor(name="b", bits=to_bf16(np.zeros(4, np.float32))),
    ]
    for name in ("x", "y"):
        write_safetensors(tmp_path / name, content)
    assert (tmp_path / "x").read_bytes() == (tmp_path / "y").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x", "y"]
    loaded = pytest.importorskip("safetensors.torch").load_file(tmp_path / "x")
    assert torch.equal(loaded["a"], torch.ones(2, 3, dtype=torch.bfloat16))
    assert figures(tmp_path / "x")["parameters"] == 10
    header = json.loads((tmp_path / "x").read_bytes()[8:].split(b"}}")[0] + b"}}")
    assert header["b"]["data_offsets"] == [12, 20]
