"""Tensors to bytes and back, bit for bit, and what is refused."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from tensorbus.errors import CorruptError, InvalidArgumentError, NotFoundError
from tensorbus.model import DTYPES, DType, TensorSpec, dtype, plan_layout
from tensorbus.sdk import _tensors
from tensorbus.sdk._into import fill_into
from tensorbus.sdk._tensors import Source, collect, empty_over, manifest_of, rebuild

ROOT = Path(__file__).resolve().parents[3]
TORCH_DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
all_dtypes = pytest.mark.parametrize("known", DTYPES, ids=str)


def random_bytes(count: int) -> np.ndarray:
    return np.random.default_rng(count).integers(0, 256, count, dtype=np.uint8)


def of_bits(known: DType, *shape: int) -> torch.Tensor:
    """A tensor of every bit pattern that chance gives, NaNs among them."""
    raw = random_bytes(known.itemsize * int(np.prod(shape, dtype=int)))
    return torch.tensor(raw.tolist(), dtype=torch.uint8).view(getattr(torch, known.torch)).view(shape)


def logical(tensor: torch.Tensor) -> bytes:
    """The C-order bytes, element by element through the raw storage."""
    size = tensor.element_size()
    raw = bytes(tensor.untyped_storage().tolist())
    where = np.zeros(tuple(tensor.shape), dtype=int) + tensor.storage_offset()
    for axis, (step, length) in enumerate(zip(tensor.stride(), tensor.shape, strict=True)):
        where += (np.arange(length) * step).reshape([-1 if axis == other else 1 for other in range(tensor.ndim)])
    return b"".join(raw[at * size : (at + 1) * size] for at in where.reshape(-1).tolist())


def taken(source: Source, piece: int = 7) -> bytes:
    """The bytes as each of the ways gives them; they must agree."""
    out = bytearray(source.nbytes)
    source.write_into(memoryview(out))
    assert b"".join(map(bytes, source.pieces(piece))) == out
    assert b"".join(map(bytes, source.pieces())) == out
    plain = source.view()
    assert plain is None or bytes(plain) == out
    return bytes(out)


def only(obj: object) -> Source:
    (source,) = collect(obj)
    return source


half_complex_warns = pytest.mark.filterwarnings("ignore:ComplexHalf support:UserWarning")  # in the test's own clone

STRIDES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda t: t,
    "transposed": lambda t: t.permute(3, 1, 0, 2),
    "strided": lambda t: t[::2, :, 1:, ::3],
    "expanded": lambda t: t[:, :1].expand(-1, 5, -1, -1),
    "offset": lambda t: t[1:],
    "channels_last": lambda t: t.permute(0, 2, 3, 1).clone().permute(0, 3, 1, 2),
    "column": lambda t: t[:, 0, 0, 0],
    "one": lambda t: t[1, 1, 1, 1],
}


@half_complex_warns
@all_dtypes
@pytest.mark.parametrize("strides", STRIDES)
def test_every_dtype_and_stride_round_trips(known: DType, strides: str) -> None:
    tensor = STRIDES[strides](of_bits(known, 3, 2, 2, 4))
    source = only(tensor)
    assert (source.name, source.dtype, source.shape) == ("", known.name, tuple(tensor.shape))
    data = taken(source)
    assert data == logical(tensor)
    again = rebuild(bytearray(data), 0, manifest_of([source]).find(""), "torch")
    assert (again.dtype, again.shape) == (tensor.dtype, tensor.shape)
    assert logical(again) == data


@all_dtypes
def test_numpy_round_trips_or_says_that_it_cannot(known: DType) -> None:
    spec = TensorSpec("w", known.name, (3, 2))
    raw = bytearray(random_bytes(spec.nbytes).tobytes())
    if known.numpy is None:
        with pytest.raises(
            InvalidArgumentError, match=f"tensor 'w' is {known}, which numpy has not.*framework=\"torch\""
        ):
            rebuild(raw, 0, spec, "numpy")
        return
    array = rebuild(raw, 0, spec, "numpy")
    assert (array.dtype, array.shape) == (np.dtype(known.numpy), (3, 2))
    for strided in (array, array.T, array[::2], array[:, 1:], np.broadcast_to(array[:, :1], (3, 4))):
        assert taken(only(strided)) == strided.tobytes()
        swapped = strided.astype(strided.dtype.newbyteorder(">"))
        assert taken(only(swapped)) == strided.tobytes()


@pytest.mark.parametrize("theirs", TORCH_DTYPES, ids=str)
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_each_torch_dtype_is_taken_or_refused_by_name(theirs: torch.dtype) -> None:
    try:
        known = dtype(theirs)
    except InvalidArgumentError:
        name = str(theirs).removeprefix("torch.")
        with pytest.raises(InvalidArgumentError, match=f"tensor 'w' cannot be taken: dtype {name} is not taken: "):
            collect({"w": torch.empty(4, dtype=theirs)})
    else:
        assert taken(only(of_bits(known, 4))) == logical(of_bits(known, 4))


@all_dtypes
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1, 1)])
@pytest.mark.parametrize("framework", ["torch", "numpy"])
def test_scalars_and_empties(known: DType, shape: tuple[int, ...], framework: str) -> None:
    tensor = of_bits(known, *shape)
    source = only(tensor)
    assert taken(source) == logical(tensor)
    assert (source.alias is None) == (0 in shape)
    if framework == "torch" or known.numpy is not None:
        spec = manifest_of([source]).find("")
        again = rebuild(bytearray(b"12345678" + taken(source)), 8, spec, framework)
        assert tuple(again.shape) == shape
        assert taken(only(again)) == taken(source)


@pytest.mark.parametrize("known", [k for k in DTYPES if k.name in {"c64", "c128"}], ids=str)
def test_pending_conjugations_and_negations_have_the_bytes_of_their_values(known: DType) -> None:
    tensor = torch.tensor([[1 + 2j, -0.0 - 3j], [float("inf"), 0]], dtype=getattr(torch, known.torch))
    assert taken(only(tensor.conj())) == logical(tensor.conj().resolve_conj())
    assert taken(only(tensor.mH)) == logical(tensor.mH.resolve_conj().contiguous())
    assert taken(only(tensor.conj().imag)) == logical(tensor.conj().imag.resolve_neg().contiguous())
    assert only(tensor).alias != only(tensor.conj()).alias


def test_a_conjugated_half_complex() -> None:
    tensor = of_bits(dtype("c32"), 3, 2).T
    want = bytearray(logical(tensor))
    want[3::4] = bytes(byte ^ 0x80 for byte in want[3::4])
    assert taken(only(tensor.conj())) == bytes(want)


def test_contiguous_memory_is_not_copied() -> None:
    for obj in (torch.zeros(4), np.zeros(4, np.float32)):
        view = only(obj).view()
        assert view is not None
        obj[1] = 1
        assert view[4:8] == np.float32(1).tobytes()


def test_tied_tensors_have_one_alias() -> None:
    w = torch.zeros(4, 4)
    sources = collect(
        {
            "w": w,
            "tied": torch.nn.Parameter(w),
            "array": w.numpy(),
            "turned": w.T,
            "turned again": w.T,
            "row": w[0],
            "bits": w.view(torch.int32),
            "other": torch.zeros(4, 4),
            "swapped": w.numpy().view(">f4"),
        }
    )
    groups: dict[object, list[str]] = {}
    for source in sources:
        groups.setdefault(source.alias or source.name, []).append(source.name)
    assert sorted(group for group in groups.values() if len(group) > 1) == [
        ["array", "tied", "w"],
        ["turned", "turned again"],
    ]
    layout = plan_layout(manifest_of(sources), [source.alias for source in sources])
    assert len(set(layout.offsets)) == 6


def test_parameters_buffers_and_subclasses_without_dispatch_are_taken() -> None:
    class Named(torch.Tensor):
        pass

    plain = torch.arange(4.0)
    for tensor in (
        torch.nn.Parameter(plain),
        plain.clone().requires_grad_(),
        plain.as_subclass(Named),
        (plain.clone().requires_grad_() * 1),
        np.arange(4, dtype=np.float32).view(np.matrix),
    ):
        assert taken(only(tensor)) == plain.numpy().tobytes()
    model = torch.nn.Linear(2, 3)
    assert [s.name for s in collect(model.state_dict())] == ["bias", "weight"]


def refused() -> dict[str, tuple[object, str]]:
    tensor = torch.zeros(2, 2)
    freed = torch.zeros(8)
    freed.untyped_storage().resize_(0)
    with FakeTensorMode():
        fake = torch.empty(2)
    return {
        "sparse": (tensor.to_sparse(), "layout is torch.sparse_coo"),
        "csr": (torch.sparse_compressed_tensor([0, 1], [0], [1.0], (1, 1), layout=torch.sparse_csr), "sparse_csr"),
        "meta": (tensor.to("meta"), "meta device"),
        "fake": (fake, "FakeTensor keeps its elements elsewhere"),
        "nested": (torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged), "nested"),
        "lazy": (torch.nn.LazyLinear(2).weight, "not initialised"),
        "freed": (freed, "storage was freed"),
        "objects": (np.array([object()]), "there is no dtype 'object'"),
        "strings": (np.array(["a"]), "there is no dtype 'str"),
        "dates": (np.array(["2020-01-01"], "datetime64[D]"), "datetime64"),
        "records": (np.zeros(2, [("a", "i4")]), "void32"),
        "long doubles": (np.zeros(2, np.longdouble), "there is no dtype"),
        "masked": (np.ma.masked_array([1.0], [True]), "mask beside"),
        "scalar": (np.float32(1), "numpy.float32 is not a tensor"),
        "list": ([1.0], "a list is not a tensor"),
        "nothing": (None, "NoneType"),
        "dict": ({"a": tensor}, "flatten it"),
    }


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_is_refused_by_name_with_the_reason() -> None:
    for name, (obj, reason) in refused().items():
        with pytest.raises(InvalidArgumentError, match=f"tensor '{name}' cannot be taken: .*{reason}") as caught:
            collect({"good": torch.zeros(1), name: obj})
        assert caught.value.details == {"tensor": name}


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_quantised_tensors_are_refused() -> None:
    quantised = torch.quantize_per_tensor(torch.zeros(2), 0.1, 0, torch.qint8)
    with pytest.raises(InvalidArgumentError, match=r"dtype qint8 is not taken: .*int_repr"):
        collect({"q": quantised})


@pytest.mark.parametrize(
    ("obj", "reason"),
    [
        ({}, "the dict is empty"),
        ([torch.zeros(1)], "a list is not taken"),
        ("model.gguf", "a str is not taken"),
        (None, "NoneType is not taken"),
        ({1: torch.zeros(1)}, "name must be a str, not int"),
        ({"\ud800": torch.zeros(1)}, "UTF-8"),
        ({"a" * 65_537: torch.zeros(1)}, "65537 bytes"),
    ],
)
def test_objects_and_names_that_are_refused(obj: object, reason: str) -> None:
    with pytest.raises(InvalidArgumentError, match=reason):
        collect(obj)


def test_names_differ_by_any_byte() -> None:
    names = ["n" * 10_000, "Weight", "weight", "é", "e\u0301", "", "a b.\n*>", "\U0001f600", "\uffff"]
    sources = collect({name: torch.zeros(1) for name in names})
    assert [s.name for s in sources] == sorted(names, key=str.encode)


def test_rebuilt_tensors_share_and_keep_the_map() -> None:
    room = mmap.mmap(-1, 4096)
    tensor = rebuild(room, 64, TensorSpec("w", "bf16", (4,)), "torch")
    array = rebuild(room, 64, TensorSpec("w", "u16", (4,)), "numpy")
    tensor[1] = 1
    assert array[1] == 0x3F80
    array[2] = 0x4000
    assert tensor[2] == 2
    assert tensor.untyped_storage().nbytes() == 8
    with pytest.raises(BufferError):
        room.close()
    del array
    with pytest.raises(BufferError):
        room.close()
    del tensor
    room.close()


def test_a_buffer_that_is_too_short_is_corrupt() -> None:
    for framework in ("torch", "numpy"):
        with pytest.raises(CorruptError, match="the buffer ends before tensor 'w'"):
            rebuild(bytearray(8), 4, TensorSpec("w", "f32", (2,)), framework)


def test_empty_over_takes_any_spelling() -> None:
    tensor = empty_over(bytearray(64), (4, 8), torch.bfloat16, "torch")
    assert (tensor.dtype, tensor.shape) == (torch.bfloat16, (4, 8))
    assert empty_over(bytearray(64), (2,), "float64", "numpy").dtype == np.float64
    with pytest.raises(CorruptError):
        empty_over(bytearray(8), (4, 8), "bf16", "torch")


def test_frameworks() -> None:
    spec = TensorSpec("", "f32", (1,))
    assert isinstance(rebuild(bytearray(4), 0, spec), torch.Tensor)
    with pytest.raises(InvalidArgumentError, match='there are "torch" and "numpy"'):
        rebuild(bytearray(4), 0, spec, "jax")


def test_without_torch_numpy_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_tensors, "_torch_installed", lambda: False)
    assert isinstance(rebuild(bytearray(4), 0, TensorSpec("", "f32", (1,))), np.ndarray)
    with pytest.raises(InvalidArgumentError, match="torch is not installed"):
        rebuild(bytearray(4), 0, TensorSpec("", "f32", (1,)), "torch")


@half_complex_warns
@all_dtypes
@pytest.mark.parametrize("strides", [name for name in STRIDES if name != "expanded"])
def test_the_callers_own_tensors_are_filled(known: DType, strides: str) -> None:
    target = {
        "w": STRIDES[strides](
            of_bits(known, 3, 2, 2, 4).zero_() if known.name[0] != "c" else of_bits(known, 3, 2, 2, 4)
        )
    }
    spec = TensorSpec("w", known.name, tuple(target["w"].shape))
    raw = random_bytes(spec.nbytes).tobytes()
    fill_into(target, [(spec, memoryview(raw))])
    assert logical(target["w"]) == raw


def test_parameters_and_arrays_are_filled() -> None:
    model = torch.nn.Linear(2, 1)
    array = np.zeros((3, 2), ">f4").T
    target = {**model.state_dict(keep_vars=True), "array": array, "none": torch.zeros(0, 3)}
    pairs = [
        (TensorSpec("weight", "f32", (1, 2)), np.array([1, 2], "f4").tobytes()),
        (TensorSpec("bias", "f32", (1,)), np.array([3], "f4").tobytes()),
        (TensorSpec("array", "f32", (2, 3)), np.arange(6, dtype="f4").tobytes()),
        (TensorSpec("none", "f32", (0, 3)), b""),
    ]
    fill_into(target, pairs)
    assert model(torch.ones(2)).item() == 6
    np.testing.assert_array_equal(array, np.arange(6).reshape(2, 3))


def test_nothing_is_written_if_one_tensor_does_not_fit() -> None:
    good = torch.zeros(2)
    frozen = np.zeros(2, np.float32)
    frozen.flags.writeable = False
    spec, raw = TensorSpec("good", "f32", (2,)), np.ones(2, "f4").tobytes()
    for other, reason in (
        (torch.zeros(3), r"tensor 'x' cannot be filled: into= has f32 \(3,\), the artifact f32 \(2,\)"),
        (torch.zeros(2, dtype=torch.int32), r"into= has i32 \(2,\)"),
        (torch.zeros(1).expand(2), "expanded"),
        (torch.zeros(2, device="meta"), "meta device"),
        (frozen, "read-only"),
        ([0.0, 0.0], "into= has a list there"),
    ):
        with pytest.raises(InvalidArgumentError, match=reason):
            fill_into({"good": good, "x": other}, [(spec, raw), (TensorSpec("x", "f32", (2,)), raw)])
    with pytest.raises(NotFoundError, match="into= has no tensor 'x'"):
        fill_into({"good": good}, [(spec, raw), (TensorSpec("x", "f32", (2,)), raw)])
    with pytest.raises(NotFoundError, match="the artifact has no tensor 'more'"):
        fill_into({"good": good, "more": good}, [(spec, raw)])
    assert good.tolist() == [0, 0]


@given(st.data())
def test_pieces_of_any_size_join_to_the_bytes(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    tensor = of_bits(dtype("i16"), *shape).permute(data.draw(st.permutations(range(len(shape)))))
    size = data.draw(st.integers(1, 64))
    pieces = [bytes(piece) for piece in only(tensor).pieces(size)]
    assert b"".join(pieces) == logical(tensor)
    assert all(len(piece) <= max(size, 2) for piece in pieces)


def test_a_wrong_room_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="3 bytes of room for the 4"):
        only(torch.zeros(1)).write_into(memoryview(bytearray(3)))


def test_a_hundred_thousand_tensors() -> None:
    base = torch.arange(200_000, dtype=torch.int16)
    sources = collect({f"t{i}": base[2 * i : 2 * i + 2] for i in range(100_000)})
    assert len(manifest_of(sources)) == 100_000
    assert len({source.alias for source in sources}) == 100_000


TORCHLESS = """
import sys
import numpy as np
from tensorbus.sdk._files import open_files, save_safetensors
from tensorbus.sdk._tensors import collect, manifest_of, rebuild
sources = collect({"w": np.arange(6, dtype="f4").reshape(2, 3).T})
spec = manifest_of(sources).find("w")
room = bytearray(spec.nbytes)
sources[0].write_into(memoryview(room))
assert rebuild(room, 0, spec, "numpy")[1, 1] == 4
assert "torch" not in sys.modules
"""


def test_numpy_alone_does_not_import_torch() -> None:
    subprocess.run([sys.executable, "-c", TORCHLESS], env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)


def test_digests_are_those_of_the_logical_bytes() -> None:
    tensor = of_bits(dtype("f32"), 8, 8)
    assert blake3(taken(only(tensor.T))).digest() == blake3(taken(only(tensor.T.contiguous()))).digest()
