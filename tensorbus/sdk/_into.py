"""Filling the caller's own tensors with an artifact's, by all processors. torch is imported only on demand."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeAlias

import numpy as np

from tensorbus.errors import CancelledError, InvalidArgumentError, NotFoundError
from tensorbus.model import TensorSpec
from tensorbus.sdk._overlap import Extent, collisions
from tensorbus.sdk._plain import (
    Array,
    Buffer,
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
from tensorbus.sdk._sources import cut_leading
from tensorbus.sdk._threads import share_out
from tensorbus.transport import default_threads

_INLINE_BYTES: Final = 4 << 20
_PIECE_BYTES: Final = 16 << 20
_COPY_BYTES: Final = 128 << 20
"""The most that one thread copies in one go: the C library streams past the caches from about there on."""

_Write: TypeAlias = Callable[[Any, Octets], None]


@dataclass(frozen=True, slots=True)
class _Target:
    """One of the caller's tensors.

    Attributes:
        extent: The memory of its elements.
        plain: That memory where it is the tensor's bytes as they are stored; ``None`` where a copy must rearrange them.
        whole: What is cut along its leading dimensions otherwise.
        write: Writes stored bytes to such a cut.
    """

    spec: TensorSpec
    extent: Extent
    plain: Octets | None
    whole: Any
    write: _Write

    def writes(self, octets: Octets, step: int) -> Iterator[Callable[[], None]]:
        """What fills it, in pieces that any thread may take in any order."""
        if self.plain is not None:
            for at in range(0, self.spec.nbytes, step):
                yield partial(np.copyto, self.plain[at : at + step], octets[at : at + step])
            return
        at, size = 0, self.extent.itemsize
        for block in cut_leading(self.whole, self.spec.shape, size, _PIECE_BYTES):
            nbytes = size * int(np.prod(block.shape, dtype=np.int64))
            yield partial(self.write, block, octets[at : at + nbytes])
            at += nbytes


def fill_into(
    target: Mapping[str, object],
    tensors: Iterable[tuple[TensorSpec, Buffer]],
    *,
    stop: threading.Event | None = None,
    threads: int | None = None,
) -> None:
    """Copy an artifact's tensors into the caller's own, of any strides and device. Nothing is written if one cannot be.

    Blocks, mostly without the interpreter's lock; call it off the loop.

    Args:
        target: The caller's tensors: the same names, shapes and dtypes as the artifact has. Several may be the same
            elements of the same memory, if the artifact's are equal.
        tensors: Each tensor and a buffer of exactly its bytes.
        stop: Is looked at before each piece of up to 128 MiB.
        threads: How many to use; as many as there are processors when ``None``.

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
    found = [_target(target, spec) for spec, _ in pairs]
    filled = [(one, buffer) for one, (spec, buffer) in zip(found, pairs, strict=True) if spec.nbytes]
    _check_apart(filled)
    count = threads or default_threads()
    total = sum(one.spec.nbytes for one, _ in filled)
    writes = _writes(filled, threads=count, stop=stop)
    share_out(writes, threads=1 if total <= _INLINE_BYTES else count)


def check_target(target: object) -> None:
    """See that what a caller wants filled is a map of names.

    Raises:
        InvalidArgumentError: If it is none.
    """
    if not isinstance(target, Mapping):
        raise InvalidArgumentError(f"into= is a dict of your own tensors by name, not {a_type(target)}")


def _writes(
    filled: Sequence[tuple[_Target, Buffer]], *, threads: int, stop: threading.Event | None
) -> Iterator[Callable[[], None]]:
    """All the pieces, the largest tensors first: what is left at the end is small for every thread."""
    for one, buffer in sorted(filled, key=lambda pair: -pair[0].spec.nbytes):
        share = -(-one.spec.nbytes // threads)
        for write in one.writes(_octets_of(one.spec, buffer), max(_PIECE_BYTES, min(_COPY_BYTES, share))):
            if stop is not None and stop.is_set():
                raise CancelledError("the copy was given up")
            yield write


def _octets_of(spec: TensorSpec, buffer: Buffer) -> Octets:
    return np.frombuffer(buffer, np.uint8, spec.nbytes)


def _check_apart(filled: Sequence[tuple[_Target, Buffer]]) -> None:
    """See that no write undoes another: tensors share memory only where they get the same bytes."""
    for one, _ in filled:
        if one.extent.folded:
            raise refused(
                one.spec.name,
                "several elements of the tensor in into= share memory: it is expanded or overlaps itself",
                what="filled",
            )
    for first, second in collisions([one.extent for one, _ in filled]):
        (one, buffer), (other, other_buffer) = filled[first], filled[second]
        if one.extent == other.extent and _equal(one.spec, buffer, other.spec, other_buffer):
            continue
        why = f"in into= it shares memory with tensor {other.spec.name!r:.80}, which has other bytes or another shape"
        raise refused(one.spec.name, why, what="filled")


def _equal(spec: TensorSpec, buffer: Buffer, other: TensorSpec, other_buffer: Buffer) -> bool:
    if spec.digest is not None and other.digest is not None:
        return spec.digest == other.digest
    return np.array_equal(_octets_of(spec, buffer), _octets_of(other, other_buffer))


def _target(target: Mapping[str, object], spec: TensorSpec) -> _Target:
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
    return _numpy_target(spec, mine) if isinstance(mine, np.ndarray) else _torch_target(spec, mine)


def _numpy_target(spec: TensorSpec, mine: Array) -> _Target:
    if not mine.flags.writeable:
        raise refused(spec.name, "the array in into= is read-only", what="filled")
    little, size = mine.dtype.newbyteorder("<"), mine.dtype.itemsize
    kind = (spec.dtype, False, False) if mine.dtype.isnative else (spec.dtype, "swapped")
    extent = Extent("cpu", mine.__array_interface__["data"][0], spec.shape, mine.strides, size, kind)
    array = mine.view(np.ndarray)
    as_stored = array.flags.c_contiguous and array.dtype.isnative

    def write(block: Array, octets: Octets) -> None:
        np.copyto(block, octets.view(little).reshape(block.shape))

    plain = array.reshape(-1).view(np.uint8) if as_stored and array.size else None
    return _Target(spec, extent, plain, array[...], write)


def _torch_target(spec: TensorSpec, mine: Any) -> _Target:
    import torch

    tensor, known = plain_torch(spec.name, mine)
    address, size = check_storage(spec.name, tensor, what="filled"), known.itemsize
    device = tensor.device.type if tensor.device.type == "cpu" else str(tensor.device)
    signs = (tensor.is_conj(), tensor.is_neg())
    extent = Extent(
        device, address, spec.shape, tuple(step * size for step in tensor.stride()), size, (spec.dtype, *signs)
    )

    def write(block: torch.Tensor, octets: Octets) -> None:
        whole = bits(block)
        owned = octets if octets.flags.writeable else octets.copy()  # torch takes no read-only memory
        try:
            whole.copy_(over(owned, whole.dtype, tuple(whole.shape)))
        except RuntimeError as exc:
            raise refused(spec.name, f"torch cannot write the tensor in into= ({exc})", what="filled") from exc

    as_stored = device == "cpu" and tensor.is_contiguous() and not any(signs)
    plain = flat(tensor).view(torch.uint8).numpy() if as_stored and spec.nbytes else None
    return _Target(spec, extent, plain, tensor, write)
