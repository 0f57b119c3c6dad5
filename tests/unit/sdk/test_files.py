"""safetensors files: read in place, checked hard, written whole."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tensorbus.errors import (
    CorruptError,
    DeniedError,
    InvalidArgumentError,
    NotFoundError,
    OutOfSpaceError,
)
from tensorbus.model import DTYPES, TensorSpec
from tensorbus.sdk import _files
from tensorbus.sdk._files import open_files, save_safetensors
from tensorbus.sdk._tensors import collect, manifest_of

SAVED = [known for known in DTYPES if known.safetensors is not None]


def every_dtype() -> dict[str, torch.Tensor]:
    """One tensor per dtype of the format, a scalar and an empty one."""
    out = {}
    for at, known in enumerate(SAVED):
        raw = np.random.default_rng(at).integers(0, 256, 8 * known.itemsize, dtype=np.uint8)
        out[f"é.{known}"] = torch.from_numpy(raw).view(getattr(torch, known.torch)).view(2, 4)
    return {**out, "scalar": torch.tensor(3.5), "none": torch.zeros(0, 3, dtype=torch.bfloat16)}


def file_of(header: object, body: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


def entry(begin: int, end: int, *, kind: object = "U8", shape: object = None) -> dict[str, object]:
    return {"dtype": kind, "shape": [end - begin] if shape is None else shape, "data_offsets": [begin, end]}


def pairs(tensors: dict[str, torch.Tensor]) -> list[tuple[TensorSpec, memoryview]]:
    sources = collect(tensors)
    specs = manifest_of(sources)
    return [(spec, source.view() or memoryview(b"")) for spec, source in zip(specs, sources, strict=True)]


def test_a_file_of_the_reference_is_read(tmp_path: Path) -> None:
    tensors = every_dtype()
    save_file(tensors, tmp_path / "a.safetensors", metadata={"format": "pt"})
    sources = open_files(tmp_path / "a.safetensors")
    assert [(s.name, s.dtype, s.shape) for s in sources] == [(s.name, s.dtype, s.shape) for s in collect(tensors)]
    for source, wanted in zip(sources, collect(tensors), strict=True):
        room = bytearray(source.nbytes)
        source.write_into(memoryview(room))
        assert bytes(wanted.view() or b"") == room == b"".join(map(bytes, source.pieces(5)))


def test_the_reference_reads_what_is_saved(tmp_path: Path) -> None:
    tensors = every_dtype()
    for where, made in ((tmp_path / "new" / "x.safetensors", "x.safetensors"), (tmp_path / "dir", "model.safetensors")):
        path = save_safetensors(where, pairs(tensors))
        assert path.name == made
        loaded = load_file(path)
        assert loaded.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert (loaded[name].dtype, loaded[name].shape) == (tensor.dtype, tensor.shape)
            assert loaded[name].reshape(-1).view(torch.uint8).tolist() == tensor.reshape(-1).view(torch.uint8).tolist()
        with safe_open(path, "np") as file:
            assert not file.metadata()
        assert os.listdir(path.parent) == [made]


def test_saving_twice_replaces_and_gives_the_same_bytes(tmp_path: Path) -> None:
    first = save_safetensors(tmp_path, pairs(every_dtype())).read_bytes()
    assert save_safetensors(tmp_path, list(reversed(pairs(every_dtype())))).read_bytes() == first


def test_writing_tells_how_far_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tensorbus.sdk._files.WRITE_BYTES", 100)
    told: list[tuple[int, int]] = []
    tensors = pairs({"a": torch.zeros(40), "b": torch.ones(10)})
    path = save_safetensors(tmp_path, tensors, progress=lambda done, total: told.append((done, total)))
    assert told == [(100, 200), (160, 200), (200, 200)]
    assert torch.equal(load_file(path)["b"], torch.ones(10))


def test_a_failed_save_leaves_nothing_and_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_safetensors(tmp_path, pairs({"a": torch.zeros(4)}))
    before = path.read_bytes()

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(_files.os, "fsync", full)
    with pytest.raises(OutOfSpaceError, match="No space left"):
        save_safetensors(tmp_path, pairs({"a": torch.ones(4)}))
    assert os.listdir(tmp_path) == [path.name]
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (TensorSpec("w", "c128", (1,)), "tensor 'w' cannot be saved as safetensors: the format has no c128"),
        (TensorSpec("w", "c32", (1,)), "the format has no c32"),
        (TensorSpec("w", "f4_e2m1fn_x2", ()), "has no f4_e2m1fn_x2 without dimensions"),
        (TensorSpec("__metadata__", "f32", (1,)), "keeps that name"),
    ],
)
def test_what_cannot_be_saved(tmp_path: Path, spec: TensorSpec, reason: str) -> None:
    with pytest.raises(InvalidArgumentError, match=reason):
        save_safetensors(tmp_path / "new", [(spec, bytes(spec.nbytes))])
    assert not (tmp_path / "new").exists()


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(InvalidArgumentError, match="file"):
        save_safetensors(tmp_path / "file", pairs({"a": torch.zeros(1)}))


def test_shards_without_an_index(tmp_path: Path) -> None:
    save_file({"b": torch.zeros(2)}, tmp_path / "1.safetensors")
    save_file({"a": torch.ones(2)}, tmp_path / "2.safetensors")
    (tmp_path / "config.json").write_text("{}")
    assert [s.name for s in open_files(tmp_path)] == ["a", "b"]


def index(where: Path, shards: object) -> None:
    (where / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": shards}))


def test_an_index_says_which_shards(tmp_path: Path) -> None:
    save_file({"b": torch.zeros(2)}, tmp_path / "1.safetensors")
    save_file({"a": torch.ones(2)}, tmp_path / "2.safetensors")
    save_file({"other": torch.ones(2)}, tmp_path / "consolidated.safetensors")
    index(tmp_path, {"a": "2.safetensors", "b": "1.safetensors"})
    assert [s.name for s in open_files(str(tmp_path))] == ["a", "b"]
    index(tmp_path, {"a": "1.safetensors", "b": "1.safetensors"})
    with pytest.raises(CorruptError, match=r"says that 'a' is in 1.safetensors, it is not"):
        open_files(tmp_path)
    index(tmp_path, {"a": "3.safetensors"})
    with pytest.raises(NotFoundError, match=r"names 3.safetensors, which is not there"):
        open_files(tmp_path)
    for shards in ({"a": "../x.safetensors"}, {"a": 1}, [], {"a": "x.bin"}):
        index(tmp_path, shards)
        with pytest.raises(CorruptError, match=r"index.json: it has no weight_map"):
            open_files(tmp_path)


def test_a_name_in_two_shards_is_refused(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2)}, tmp_path / "1.safetensors")
    save_file({"a": torch.ones(2)}, tmp_path / "2.safetensors")
    with pytest.raises(InvalidArgumentError, match=r"'a' is in both 1.safetensors and 2.safetensors"):
        open_files(tmp_path)


def test_paths_of_another_kind(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="there is no file or directory"):
        open_files(tmp_path / "nowhere")
    with pytest.raises(InvalidArgumentError, match="has no safetensors files; there are"):
        open_files(tmp_path)
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    with pytest.raises(InvalidArgumentError, match=r"m.gguf is not taken; there are a .safetensors file"):
        open_files(tmp_path / "m.gguf")
    (tmp_path / "e.safetensors").write_bytes(file_of({}))
    with pytest.raises(InvalidArgumentError, match="has no tensors"):
        open_files(tmp_path / "e.safetensors")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read(tmp_path: Path) -> None:
    path = save_safetensors(tmp_path, pairs({"a": torch.zeros(1)}))
    path.chmod(0)
    with pytest.raises(DeniedError):
        open_files(path)


BROKEN = {
    "empty": (b"", "too few"),
    "short": (b"1234567", "too few"),
    "a huge header": ((2**40).to_bytes(8, "little") + b"{}", "the most is"),
    "header cut off": ((100).to_bytes(8, "little") + b"{}", "cut off: a header of 100"),
    "not JSON": (file_of(b"{"), "not valid JSON"),
    "not UTF-8": (file_of(b"\xff\xfe"), "not valid JSON"),
    "deep": (file_of(b"[" * 100_000), "not valid JSON"),
    "a list": (file_of([]), "not a JSON object"),
    "a name twice": (file_of(b'{"a":1,"a":2}'), "twice"),
    "no entry": (file_of({"a": 1}), "entry of tensor 'a'"),
    "a field more": (file_of({"a": {**entry(0, 1), "x": 1}}, b"1"), "entry of tensor 'a'"),
    "offsets of one": (file_of({"a": {**entry(0, 1), "data_offsets": [0]}}, b"1"), "data_offsets"),
    "negative": (file_of({"a": entry(-1, 1, shape=[2])}, b"1"), "data_offsets"),
    "backwards": (file_of({"a": entry(0, 2), "b": entry(2, 1, shape=[1])}, b"12"), "needs"),
    "a fraction": (file_of({"a": entry(0, 1, shape=[1.0])}, b"1"), "wrong dtype"),
    "a flag": (file_of({"a": entry(0, 1, shape=[True])}, b"1"), "wrong dtype"),
    "a dtype of ours": (file_of({"a": entry(0, 1, kind="u8")}, b"1"), "none of the format's"),
    "a dtype of no kind": (file_of({"a": entry(0, 1, kind=[])}, b"1"), "wrong dtype"),
    "another size": (file_of({"a": entry(0, 3, kind="F32", shape=[1])}, b"123"), "needs 4"),
    "overflow": (file_of({"a": entry(0, 1, shape=[2**40, 2**40])}, b"1"), "the most are"),
    "body cut off": (file_of({"a": entry(0, 4)}, b"12"), "cut off: tensor 'a' ends at 4 of 2"),
    "overlap": (file_of({"a": entry(0, 2), "b": entry(1, 3)}, b"123"), "'b' at 1 overlaps"),
    "gap": (file_of({"a": entry(0, 1), "b": entry(2, 3)}, b"123"), "'b' at 2 leaves a gap"),
    "rest": (file_of({"a": entry(0, 1)}, b"123"), "2 bytes after the last"),
    "half a byte": (file_of({"a": entry(0, 1, kind="F4", shape=[1])}, b"1"), "whole bytes"),
    "a name of no text": (file_of({"\ud800": entry(0, 1)}, b"1"), "UTF-8"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_file_is_corrupt_and_named(tmp_path: Path, case: str) -> None:
    data, reason = BROKEN[case]
    path = tmp_path / "broken.safetensors"
    path.write_bytes(data)
    with pytest.raises(CorruptError, match=f"broken.safetensors.*{reason}") as caught:
        open_files(path)
    assert caught.value.details == {"path": str(path)}


def test_a_dtype_that_is_not_taken_names_tensor_and_file(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(file_of({"w": entry(0, 3, kind="F6_E2M3", shape=[4])}, b"123"))
    with pytest.raises(
        InvalidArgumentError, match=r"x.safetensors: tensor 'w' cannot be taken: there is no dtype 'F6_E2M3'"
    ):
        open_files(path)


@given(cut=st.integers(0, 200), at=st.integers(0, 120), byte=st.integers(0, 255))
def test_any_damage_is_an_error_or_tensors(
    tmp_path_factory: pytest.TempPathFactory, cut: int, at: int, byte: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.safetensors"
    data = bytearray(file_of({"a": entry(0, 8, kind="F32", shape=[2]), "b": entry(8, 12)}, b"123456789012"))
    data[min(at, len(data) - 1)] = byte
    path.write_bytes(data[: max(cut, 1)])
    try:
        sources = open_files(path)
    except (CorruptError, InvalidArgumentError):
        return
    assert sum(source.nbytes for source in sources) == 12


def test_a_file_that_goes_while_it_is_read_is_read_to_its_end(tmp_path: Path) -> None:
    path = save_safetensors(tmp_path, pairs({"a": torch.arange(4), "b": torch.ones(4)}))
    source = open_files(path)[0]
    path.unlink()
    room = bytearray(source.nbytes)
    source.write_into(memoryview(room))
    assert np.frombuffer(room, np.int64).tolist() == [0, 1, 2, 3]


def test_a_file_that_is_cut_short_while_it_is_read_is_corrupt_and_named(tmp_path: Path) -> None:
    path = save_safetensors(tmp_path, pairs({"a": torch.arange(4), "b": torch.ones(4)}))
    source = open_files(path)[0]
    os.truncate(path, 100)
    with pytest.raises(CorruptError, match=r"model.safetensors: it was cut short"):
        source.write_into(memoryview(bytearray(source.nbytes)))


@pytest.mark.parametrize(
    ("header", "said"),
    [({"__metadata__": {"a": 1}}, "map of texts"), ({"__metadata__": ["a"]}, "map of texts")],
)
def test_metadata_that_is_none_is_corrupt(tmp_path: Path, header: dict[str, object], said: str) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(file_of({**header, "a": entry(0, 1)}, b"1"))
    with pytest.raises(CorruptError, match=said):
        open_files(path)


def test_an_index_that_says_too_little(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2), "b": torch.zeros(2)}, tmp_path / "1.safetensors")
    index(tmp_path, {})
    with pytest.raises(CorruptError, match=r"index.json: its weight_map is empty"):
        open_files(tmp_path)
    index(tmp_path, {"a": "1.safetensors"})
    with pytest.raises(CorruptError, match=r"1.safetensors has 'b', of which the index says nothing"):
        open_files(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{")
    with pytest.raises(CorruptError, match=r"index.json: it is not valid JSON"):
        open_files(tmp_path)


@pytest.mark.parametrize("path", [None, "", b"x", "a\0b.safetensors", "n" * 300, "n" * 300 + ".safetensors", 5])
def test_what_is_no_path_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: object) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidArgumentError):
        save_safetensors(path, pairs({"a": torch.zeros(1)}))  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError):
        open_files(path)  # type: ignore[arg-type]
    assert os.listdir(tmp_path) == []
