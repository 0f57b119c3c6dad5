"""Taking tensors in: a caller's objects as sources of named bytes.

Bytes never pass through arithmetic, so NaN payloads and signs of zero stay as they are.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeAlias

import numpy as np

from tensorbus.errors import InvalidArgumentError
from tensorbus.ids import check_tensor_name
from tensorbus.model import Manifest, TensorSpec, dtype, itemsize
from tensorbus.sdk._plain import (
    Array,
    Octets,
    a_type,
    bits,
    check_storage,
    flat,
    is_tensor,
    numpy_element,
    over,
    plain_torch,
    refused,
)

if TYPE_CHECKING:
    import torch

PIECE_BYTES: Final = 4 * 1024 * 1024

Reader: TypeAlias = Callable[[int, memoryview], None]
"""Fills a buffer with a tensor's bytes from an offset on."""


class Source(ABC):
    """A tensor whose bytes are to be taken in; it keeps the caller's object alive and never changes it.

    Attributes:
        name: The tensor's name within the artifact.
        dtype: Our name of its element type.
        shape: Its sizes, outermost first.
        nbytes: Bytes of its elements in C order.
        alias: Equal for tensors that are the same elements of the same memory; ``None`` ties with nothing.
        waits: Whether reading may wait for a disk.
    """

    __slots__ = ("alias", "dtype", "name", "nbytes", "shape")
    waits: ClassVar[bool] = False

    def __init__(self, name: str, kind: str, shape: tuple[int, ...], alias: Hashable | None) -> None:
        self.name = name
        self.dtype = kind
        self.shape = shape
        self.nbytes = itemsize(kind) * math.prod(shape)
        self.alias = alias if self.nbytes else None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name[:80]!r} {self.dtype} {self.shape}>"

    @abstractmethod
    def view(self) -> memoryview | None:
        """The C-order little-endian bytes without a copy, or ``None`` where memory does not hold them so."""

    @abstractmethod
    def blocks(self, nbytes_max: int) -> Iterator[tuple[int, Callable[[memoryview], None]]]:
        """The tensor cut along its leading dimensions, in order: the size of a block and what writes its bytes."""

    def reader(self) -> Reader | None:
        """What copies any range of the bytes, from any thread; ``None`` where they do not lie in one piece."""
        plain = self.view()
        if plain is None:
            return None
        octets = _octets(plain)

        def read(start: int, dst: memoryview) -> None:
            np.copyto(_octets(dst), octets[start : start + len(dst)])  # a slice assignment would keep the GIL

        return read

    def write_into(self, dst: memoryview) -> None:
        """Write the bytes to ``dst``, a writable buffer of exactly :attr:`nbytes`."""
        if len(dst) != self.nbytes:
            raise InvalidArgumentError(f"{len(dst)} bytes of room for the {self.nbytes} of tensor {self.name[:80]!r}")
        if not self.nbytes:
            return
        read = self.reader()
        if read is not None:
            read(0, dst)
            return
        for _, write in self.blocks(self.nbytes):
            write(dst)

    def pieces(self, nbytes_max: int = PIECE_BYTES) -> Iterator[memoryview]:
        """The bytes in order, in pieces of at most ``nbytes_max``; each is valid until the next is asked for."""
        plain = self.view()
        if plain is not None:
            yield from (plain[at : at + nbytes_max] for at in range(0, self.nbytes, nbytes_max))
            return
        scratch = memoryview(bytearray(min(self.nbytes, max(nbytes_max, itemsize(self.dtype)))))
        for size, write in self.blocks(len(scratch)):
            write(scratch[:size])
            yield scratch[:size]


class _NumpySource(Source):
    __slots__ = ("_array",)

    def __init__(self, name: str, array: Array) -> None:
        known = numpy_element(name, array)
        self._array = array.view(np.ndarray)
        # A big-endian array is the same memory as its little-endian view, and other elements.
        alias = ("cpu", *_numpy_place(array)) if array.dtype.isnative else None
        super().__init__(name, known.name, array.shape, alias)

    def view(self) -> memoryview | None:
        array = self._array
        if not self.nbytes:
            return memoryview(b"")
        if not (array.flags.c_contiguous and array.dtype.isnative):
            return None
        return array.reshape(-1).view(np.uint8).data

    def blocks(self, nbytes_max: int) -> Iterator[tuple[int, Callable[[memoryview], None]]]:
        little = self._array.dtype.newbyteorder("<")
        for block in cut_leading(self._array, self.shape, itemsize(self.dtype), nbytes_max):

            def write(dst: memoryview, block: Array = block) -> None:
                np.copyto(np.frombuffer(dst, little).reshape(block.shape), block)

            yield block.nbytes, write


class _TorchSource(Source):
    __slots__ = ("_tensor",)

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        plain, known = plain_torch(name, tensor)
        self._tensor = plain
        shape, contiguous = tuple(plain.shape), plain.is_contiguous()
        flags = (plain.is_conj(), plain.is_neg())
        pointer = check_storage(name, plain, what="taken")
        strides = () if contiguous else tuple(step * known.itemsize for step in plain.stride())
        device = plain.device.type if plain.device.type == "cpu" else str(plain.device)
        alias = (device, pointer, known.name, shape, strides) + (flags if any(flags) else ())
        super().__init__(name, known.name, shape, alias)

    def view(self) -> memoryview | None:
        import torch

        tensor = self._tensor
        if not self.nbytes:
            return memoryview(b"")
        if tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            return None
        return flat(tensor).view(torch.uint8).numpy().data

    def blocks(self, nbytes_max: int) -> Iterator[tuple[int, Callable[[memoryview], None]]]:
        for block in cut_leading(self._tensor, self.shape, itemsize(self.dtype), nbytes_max):

            def write(dst: memoryview, block: torch.Tensor = block) -> None:
                whole = bits(block)
                over(_octets(dst), whole.dtype, tuple(whole.shape)).copy_(whole)

            yield block.numel() * itemsize(self.dtype), write


def collect(obj: object) -> list[Source]:
    """The tensors of a dict, or a bare one under the empty name, in the order of the bytes of their names.

    Args:
        obj: ``dict[str, tensor]`` or a tensor of torch or numpy: any strides, any device.

    Raises:
        InvalidArgumentError: If it is anything else or has no tensor, or a tensor or name cannot be taken; it says
            which and why.
    """
    if is_tensor(obj):
        return [_source("", obj)]
    if not isinstance(obj, Mapping):
        raise InvalidArgumentError(
            f"{a_type(obj)} is not taken; there are dicts of tensors, tensors of torch and numpy, and files"
        )
    if not obj:
        raise InvalidArgumentError("an artifact has at least one tensor; the dict is empty")
    sources = [_source(check_tensor_name(name), value) for name, value in obj.items()]
    sources.sort(key=lambda source: source.name)
    return sources


def manifest_of(sources: Iterable[Source]) -> Manifest:
    """The manifest without digests; its order is that of :func:`collect`."""
    return Manifest(tuple(TensorSpec(source.name, source.dtype, source.shape) for source in sources))


def _source(name: str, value: Any) -> Source:
    if isinstance(value, np.ndarray):
        return _NumpySource(name, value)
    if is_tensor(value):
        return _TorchSource(name, value)
    hint = "; give the dict inside by itself or flatten it" if isinstance(value, Mapping) else ""
    raise refused(name, f"{a_type(value)} is not a tensor of torch or numpy{hint}")


def _numpy_place(array: Array) -> tuple[Hashable, ...]:
    strides = () if array.flags.c_contiguous else array.strides
    return array.__array_interface__["data"][0], dtype(array.dtype.name).name, array.shape, strides


def cut_leading(array: Any, shape: tuple[int, ...], size: int, nbytes_max: int) -> Iterator[Any]:
    """Sub-arrays along the leading dimensions, in C order, of at most ``nbytes_max`` each (or of one element)."""
    row = size * math.prod(shape[1:])
    if not shape or row * shape[0] <= nbytes_max:
        yield array
    elif row <= nbytes_max:
        step = nbytes_max // row
        yield from (array[at : at + step] for at in range(0, shape[0], step))
    else:
        for at in range(shape[0]):
            yield from cut_leading(array[at], shape[1:], size, nbytes_max)


def _octets(buffer: memoryview) -> Octets:
    return np.frombuffer(buffer, np.uint8)
