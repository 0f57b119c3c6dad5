"""Giving tensors out: rebuilding them over a map. torch is imported only on demand."""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from tensorbus.errors import CorruptError, InvalidArgumentError
from tensorbus.model import DTYPES, TensorSpec, dtype
from tensorbus.sdk._plain import Buffer, over, torch_elements
from tensorbus.sdk._sources import PIECE_BYTES, Source, collect, manifest_of

if TYPE_CHECKING:
    import torch

__all__ = [
    "PIECE_BYTES",
    "Framework",
    "Source",
    "check_framework",
    "collect",
    "default_framework",
    "empty_over",
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
