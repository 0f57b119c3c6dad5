"""What makes a caller's object a tensor of plain memory, and its bits. torch is imported only for its own objects."""

from __future__ import annotations

import sys
from functools import cache
from mmap import mmap
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from tensorbus.errors import InvalidArgumentError
from tensorbus.model import DTYPES, DType, dtype

if TYPE_CHECKING:
    import torch

Array: TypeAlias = npt.NDArray[Any]
Octets: TypeAlias = npt.NDArray[np.uint8]
Buffer: TypeAlias = bytes | bytearray | memoryview | mmap | Array


def is_tensor(obj: object) -> bool:
    """Whether it is an array of numpy or a tensor of torch, taken or not."""
    if isinstance(obj, np.ndarray):
        return True
    torch = sys.modules.get("torch")
    kind = getattr(torch, "Tensor", None)  # None while torch is being imported by another thread
    return isinstance(kind, type) and isinstance(obj, kind)


def numpy_element(name: str, array: Array) -> DType:
    """Its element type, if it is taken."""
    if isinstance(array, np.ma.MaskedArray):
        raise refused(name, "a masked array has a mask beside its elements; store .data and .mask")
    try:
        return dtype(array.dtype.name)
    except InvalidArgumentError as exc:
        raise refused(name, str(exc)) from exc


def plain_torch(name: str, tensor: Any) -> tuple[torch.Tensor, DType]:
    """The tensor without autograd and subclass, over the same memory, if it is one with elements in plain memory."""
    import torch

    reason = _why_not_plain(tensor)
    if reason is not None:
        raise refused(name, reason)
    try:
        known = torch_elements()[tensor.dtype]
    except KeyError:
        try:
            known = dtype(tensor.dtype)
        except InvalidArgumentError as exc:
            raise refused(name, str(exc)) from exc
    plain: torch.Tensor = tensor.detach() if type(tensor) is torch.Tensor else tensor.detach().as_subclass(torch.Tensor)
    return plain, known


def _why_not_plain(tensor: Any) -> str | None:
    import torch

    kind = type(tensor)
    if tensor.is_nested:
        return "it is nested; store its values and offsets"
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return f"{a_type(tensor)} keeps its elements elsewhere; give the plain tensors inside"
    if torch.nn.parameter.is_lazy(tensor):
        return "it is not initialised yet"
    if tensor.layout is not torch.strided:
        return f"its layout is {tensor.layout}; store its parts, or to_dense()"
    if tensor.is_meta:
        return "it is on the meta device and has no elements"
    return None


def refused(name: object, reason: str, *, what: str = "taken") -> InvalidArgumentError:
    return InvalidArgumentError(f"tensor {name!r:.80} cannot be {what}: {reason}", tensor=str(name)[:1024])


def type_name(obj: object) -> str:
    kind = type(obj)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def a_type(obj: object) -> str:
    """The name of an object's type with its article: ``an int``."""
    name = type_name(obj)
    return f"{'an' if name[0] in 'aeioAEIO' else 'a'} {name}"


def check_storage(name: str, tensor: torch.Tensor, *, what: str) -> int:
    """The address of the first element, once all of them are known to lie in memory that is there.

    Raises:
        InvalidArgumentError: If the storage was freed or cut short, or torch gives no access to it.
    """
    try:
        pointer = tensor.data_ptr()
        there = tensor.untyped_storage().nbytes()
    except (RuntimeError, NotImplementedError) as exc:
        raise refused(name, f"torch gives no access to its memory ({exc})", what=what) from exc
    if not tensor.numel():
        return pointer
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    wanted = (tensor.storage_offset() + last + 1) * tensor.element_size()
    if not pointer or not there:
        raise refused(name, "its storage was freed (resized to nothing)", what=what)
    if there < wanted:
        raise refused(name, f"its storage was cut to {there} bytes, its elements reach to {wanted}", what=what)
    return pointer


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor in one dimension. ``reshape`` would keep the stride of a single element, which none views."""
    return tensor.as_strided((tensor.numel(),), (1,))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as whole numbers, so that a copy moves bits and nothing else."""
    import torch

    if tensor.is_conj() or tensor.is_neg():
        return tensor  # the copy itself turns the sign
    if tensor.dtype is torch.complex128:
        return torch.view_as_real(tensor).view(torch.int64)
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.dtype.itemsize])


def over(octets: Octets, kind: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """The tensor of that type and shape over those bytes."""
    import torch

    # By way of numpy: it holds an export of the buffer, so that a map cannot be closed under the tensor. Without
    # elements numpy's stride can be 0, which torch does not view as wider types.
    flat = torch.from_numpy(octets) if octets.size else torch.empty(0, dtype=torch.uint8)
    return flat.view(kind).view(shape)


@cache
def torch_elements() -> dict[torch.dtype, DType]:
    """This torch's element types that are taken."""
    import torch

    return {getattr(torch, known.torch): known for known in DTYPES if hasattr(torch, known.torch)}
