"""Giving tensors out: rebuilding them over a map, and filling the caller's own. torch is imported only on demand."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from tensorbus.errors import CancelledError, CorruptError, InvalidArgumentError, NotFoundError
from tensorbus.model import DTYPES, TensorSpec, dtype
from tensorbus.sdk._overlap import Extent, collisions
from tensorbus.sdk._plain import (
    Array,
    Buffer,
    Octets,
    a_type,
    bits,
    check_storage,
    is_tensor,
    numpy_element,
    over,
    plain_torch,
    refused,
    torch_elements,
)
from tensorbus.sdk._sources import PIECE_BYTES, Source, collect, manifest_of

if TYPE_CHECKING:
    import torch

__all__ = [
    "PIECE_BYTES",
    "Framework",
    "Source",
    "check_framework",
    "check_target",
    "collect",
    "default_framework",
    "empty_over",
    "fill_into",
    "manifest_of",
    "rebuild",
]

Framework: TypeAlias = Literal["torch", "numpy"]


def default_framework() -> Framework:
    """``torch`` if it is installed, else ``numpy``."""
    return "torch" if _torch_installed() else "numpy"


def check_framework(framework: str | None) -> Framework:
    """The framework of that name, the default for ``None``.

    Raises:
        InvalidArgumentError: If there is none, or torch is not installed.
    """
    match framework:
        case None:
            return default_framework()
        case "numpy":
            return "numpy"
        case "torch" if _torch_installed():
            return "torch"
        case "torch":
            raise InvalidArgumentError("torch is not installed: pip install 'tensorbus[torch]', or framework=\"numpy\"")
        case _:
            raise InvalidArgumentError(f'there is no framework {framework!r:.40}; there are "torch" and "numpy"')


def rebuild(buffer: Buffer, offset: int, spec: TensorSpec, framework: str | None = None) -> Any:
    """The tensor over the buffer's memory, without a copy; it keeps the buffer alive.

    Args:
        buffer: A writable buffer, such as a private map. A read-only one gives read-only numpy arrays.
        offset: Where the tensor's bytes begin, a multiple of its item size.
        spec: Its dtype and shape.
        framework: ``"torch"`` or ``"numpy"``; the default one when ``None``.

    Returns:
        A contiguous CPU ``torch.Tensor`` or ``numpy.ndarray``.

    Raises:
        InvalidArgumentError: If the framework lacks the dtype; CorruptError: If the buffer ends before the tensor.
    """
    kind = check_framework(framework)
    element = _torch_dtype(spec) if kind == "torch" else _numpy_dtype(spec)
    nbytes = spec.nbytes
    try:
        octets = np.frombuffer(buffer, np.uint8, nbytes, offset) if nbytes else np.empty(0, np.uint8)
    except ValueError as exc:
        raise CorruptError(f"the buffer ends before tensor {spec.name[:80]!r} at {offset}: {exc}") from exc
    if isinstance(element, np.dtype):
        return octets.view(element).reshape(spec.shape)
    return over(octets, element, spec.shape)


def empty_over(buffer: Buffer, shape: tuple[int, ...], kind: object, framework: str | None = None) -> Any:
    """A tensor of that shape and dtype (any spelling of it) over the start of a buffer; its content is the buffer's.

    Raises:
        InvalidArgumentError: If shape or dtype cannot be; CorruptError: If the buffer is too small.
    """
    return rebuild(buffer, 0, TensorSpec("", dtype(kind).name, tuple(shape)), framework)


def fill_into(
    target: Mapping[str, object],
    tensors: Iterable[tuple[TensorSpec, Buffer]],
    *,
    stop: threading.Event | None = None,
) -> None:
    """Copy an artifact's tensors into the caller's own, of any strides and device. Nothing is written if one cannot be.

    Args:
        target: The caller's tensors: the same names, shapes and dtypes as the artifact has. Several may be the same
            elements of the same memory, if the artifact's are equal.
        tensors: Each tensor and a buffer of exactly its bytes.
        stop: Is looked at before each tensor.

    Raises:
        NotFoundError: If one side has a name that the other lacks.
        InvalidArgumentError: If a tensor differs in shape or dtype, cannot be written, or shares memory with another.
        CancelledError: If ``stop`` was set; what was written by then stays.
    """
    check_target(target)
    pairs = list(tensors)
    names = {spec.name for spec, _ in pairs}
    for name in target:
        if name not in names:
            raise NotFoundError(f"the artifact has no tensor {name!r:.80}; into= has one", tensor=str(name))
    writers = [_writer(target, spec) for spec, _ in pairs]
    _check_apart([(spec, buffer, extent) for (spec, buffer), (extent, _) in zip(pairs, writers, strict=True)])
    for (spec, buffer), (_, write) in zip(pairs, writers, strict=True):
        if stop is not None and stop.is_set():
            raise CancelledError("the copy was given up")
        if spec.nbytes:
            write(_octets_of(spec, buffer))


def check_target(target: object) -> None:
    """See that what a caller wants filled is a map of names.

    Raises:
        InvalidArgumentError: If it is none.
    """
    if not isinstance(target, Mapping):
        raise InvalidArgumentError(f"into= is a dict of your own tensors by name, not {a_type(target)}")


def _octets_of(spec: TensorSpec, buffer: Buffer) -> Octets:
    return np.frombuffer(buffer, np.uint8, spec.nbytes)


def _check_apart(targets: Sequence[tuple[TensorSpec, Buffer, Extent]]) -> None:
    """See that no write undoes another: tensors share memory only where they get the same bytes."""
    filled = [(spec, buffer, extent) for spec, buffer, extent in targets if spec.nbytes]
    for spec, _, extent in filled:
        if extent.folded:
            raise refused(
                spec.name,
                "several elements of the tensor in into= share memory: it is expanded or overlaps itself",
                what="filled",
            )
    for one, other in collisions([extent for _, _, extent in filled]):
        (spec, buffer, extent), (other_spec, other_buffer, other_extent) = filled[one], filled[other]
        if extent == other_extent and _equal(spec, buffer, other_spec, other_buffer):
            continue
        why = f"in into= it shares memory with tensor {other_spec.name!r:.80}, which has other bytes or another shape"
        raise refused(spec.name, why, what="filled")


def _equal(spec: TensorSpec, buffer: Buffer, other: TensorSpec, other_buffer: Buffer) -> bool:
    if spec.digest is not None and other.digest is not None:
        return spec.digest == other.digest
    return np.array_equal(_octets_of(spec, buffer), _octets_of(other, other_buffer))


def _writer(target: Mapping[str, object], spec: TensorSpec) -> tuple[Extent, Callable[[Octets], None]]:
    if spec.name not in target:
        raise NotFoundError(f"into= has no tensor {spec.name[:80]!r}; the artifact has one", tensor=spec.name)
    mine: Any = target[spec.name]
    if not is_tensor(mine):
        raise refused(spec.name, f"into= has {a_type(mine)} there", what="filled")
    known = numpy_element(spec.name, mine) if isinstance(mine, np.ndarray) else plain_torch(spec.name, mine)[1]
    shape = tuple(mine.shape)
    if (known.name, shape) != (spec.dtype, spec.shape):
        have, want = f"{known} {shape}", f"{spec.dtype} {spec.shape}"
        raise refused(spec.name, f"into= has {have}, the artifact {want}", what="filled")
    return _into_numpy(spec, mine) if isinstance(mine, np.ndarray) else _into_torch(spec, mine)


def _into_numpy(spec: TensorSpec, mine: Array) -> tuple[Extent, Callable[[Octets], None]]:
    if not mine.flags.writeable:
        raise refused(spec.name, "the array in into= is read-only", what="filled")
    little, size = mine.dtype.newbyteorder("<"), mine.dtype.itemsize
    kind = (spec.dtype, False, False) if mine.dtype.isnative else (spec.dtype, "swapped")
    extent = Extent("cpu", mine.__array_interface__["data"][0], spec.shape, mine.strides, size, kind)
    return extent, lambda octets: np.copyto(mine, octets.view(little).reshape(spec.shape))


def _into_torch(spec: TensorSpec, mine: Any) -> tuple[Extent, Callable[[Octets], None]]:
    plain, known = plain_torch(spec.name, mine)
    address, size = check_storage(spec.name, plain, what="filled"), known.itemsize
    device = plain.device.type if plain.device.type == "cpu" else str(plain.device)
    kind = (spec.dtype, plain.is_conj(), plain.is_neg())
    extent = Extent(device, address, spec.shape, tuple(step * size for step in plain.stride()), size, kind)

    def write(octets: Octets) -> None:
        whole = bits(plain)
        owned = octets if octets.flags.writeable else octets.copy()  # torch takes no read-only memory
        try:
            whole.copy_(over(owned, whole.dtype, tuple(whole.shape)))
        except RuntimeError as exc:
            raise refused(spec.name, f"torch cannot write the tensor in into= ({exc})", what="filled") from exc

    return extent, write


def _numpy_dtype(spec: TensorSpec) -> np.dtype[Any]:
    found = _numpy_dtypes().get(spec.dtype)
    if found is None:
        raise InvalidArgumentError(
            f'tensor {spec.name[:80]!r} is {spec.dtype}, which numpy has not; ask with framework="torch"',
            tensor=spec.name[:1024],
        )
    return found


def _torch_dtype(spec: TensorSpec) -> torch.dtype:
    found = _torch_dtypes().get(spec.dtype)
    if found is None:
        raise InvalidArgumentError(
            f"tensor {spec.name[:80]!r} is {spec.dtype}, which this torch has not; a newer one has it",
            tensor=spec.name[:1024],
        )
    return found


@cache
def _numpy_dtypes() -> dict[str, np.dtype[Any]]:
    return {known.name: np.dtype(known.numpy) for known in DTYPES if known.numpy is not None}


@cache
def _torch_dtypes() -> dict[str, torch.dtype]:
    return {known.name: theirs for theirs, known in torch_elements().items()}


@cache
def _torch_installed() -> bool:
    return importlib.util.find_spec("torch") is not None
