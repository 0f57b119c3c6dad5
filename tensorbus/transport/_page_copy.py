"""Copying batches of pages between slots and a caller's blocks: few calls, on all cores, not holding the interpreter.

Slots that follow each other go in one call where the blocks do too. Where checksums are wanted, each is taken of the
destination right after the copy, while its bytes are in the caches.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from tensorbus.errors import InvalidArgumentError
from tensorbus.transport._copy import Bytes, default_threads, run_threads
from tensorbus.transport._page_layout import Slots, Sums

Rows: TypeAlias = npt.NDArray[np.uint8]
"""``uint8[n, nbytes]``; the bytes of each row lie together, the rows anywhere."""
Blocks: TypeAlias = Rows | Sequence[Bytes]

_INLINE_BYTES: Final = 4 << 20
_PIECE_BYTES: Final = 2 << 20


def blocks_of(data: Any, n: int, nbytes: int, *, writable: bool = False) -> Blocks:
    """``n`` blocks of ``nbytes`` over the caller's memory, without a copy.

    Args:
        data: One array ``[n, ...]`` whose blocks are each contiguous, or a sequence of ``n`` buffers or arrays.
        writable: Whether the blocks are to be filled.

    Raises:
        InvalidArgumentError: If number, size or strides do not suit, or it cannot be written.
    """
    if isinstance(data, np.ndarray):
        plain = data.dtype == np.uint8 and data.ndim == 2 and data.strides[1] == 1
        rows = data if plain else _rows(data) if data.size else np.empty((0, nbytes), np.uint8)
        _check(rows, (n, nbytes), writable=writable)
        return rows
    if len(data) != n:
        raise InvalidArgumentError(f"{n} blocks were expected, {len(data)} given")
    found = [_row(one) for one in data]
    for block in found:
        _check(block, (nbytes,), writable=writable)
    return found


def pick(blocks: Blocks, at: slice | Slots) -> Blocks:
    """Some of the blocks, still over the same memory."""
    if isinstance(at, slice):
        return blocks[at]
    return [blocks[number] for number in at.tolist()]


def copy_in(rows: Rows, slots: Slots, blocks: Blocks, nbytes: int, *, sums: bool, threads: int | None = None) -> Sums:
    """Copy the blocks into the slots; gives each one's checksum, zeros without ``sums``. Blocks."""
    return _copy(rows, slots, blocks, nbytes, into=True, sums=sums, threads=threads)


def copy_out(rows: Rows, slots: Slots, blocks: Blocks, nbytes: int, *, sums: bool, threads: int | None = None) -> Sums:
    """Copy the slots out to the blocks; gives the checksum of each as it arrived, zeros without ``sums``. Blocks."""
    return _copy(rows, slots, blocks, nbytes, into=False, sums=sums, threads=threads)


def page_sum(data: Bytes | memoryview) -> int:
    """XXH3-64 of a page; 1 where that is 0, which says that there is none."""
    return xxhash.xxh3_64_intdigest(data.data if isinstance(data, np.ndarray) else data) or 1


def _copy(
    rows: Rows, slots: Slots, blocks: Blocks, nbytes: int, *, into: bool, sums: bool, threads: int | None
) -> Sums:
    found = np.zeros(len(slots), np.uint64)
    runs = _runs(slots, nbytes) if isinstance(blocks, np.ndarray) and not sums else _singles(slots)
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                run = next(runs, None)
            if run is None:
                return
            first, count, slot = run
            there: Bytes = rows[slot, :nbytes] if count == 1 else rows[slot : slot + count, :nbytes]
            # More than one only of an array.
            here: Any = blocks[first] if count == 1 else blocks[first : first + count]
            target, source = (there, here) if into else (here, there)
            np.copyto(target, source)
            if sums:
                found[first] = page_sum(target)

    total = nbytes * len(slots)
    count = 1 if total <= _INLINE_BYTES else threads or default_threads()
    run_threads([work] * max(1, min(count, total // _PIECE_BYTES)))
    return found


def _singles(slots: Slots) -> Iterator[tuple[int, int, int]]:
    return iter([(first, 1, slot) for first, slot in enumerate(slots.tolist())])


def _runs(slots: Slots, nbytes: int) -> Iterator[tuple[int, int, int]]:
    """Pieces of slots that follow each other: the first's number, how many, and its slot."""
    if len(slots) < 2:
        yield from _singles(slots)
        return
    most = max(1, _PIECE_BYTES // nbytes)
    starts = [0, *(np.flatnonzero(np.diff(slots) != 1) + 1).tolist(), len(slots)]
    for start, end in pairwise(starts):
        for first in range(start, end, most):
            yield first, min(most, end - first), int(slots[first])


def _check(block: npt.NDArray[np.uint8], shape: tuple[int, ...], *, writable: bool) -> None:
    if block.shape != shape:
        raise InvalidArgumentError(f"blocks of {shape} bytes were expected, not {block.shape}")
    if writable and not block.flags.writeable:
        raise InvalidArgumentError("a block to fill cannot be written")


def _rows(data: npt.NDArray[Any]) -> Rows:
    if data.ndim < 1 or data.dtype.hasobject:
        raise InvalidArgumentError(f"blocks are an array with a first axis and plain elements, not {data.dtype}")
    if not data[0].flags.c_contiguous:
        raise InvalidArgumentError("the bytes of each block must lie together; only the first axis may have strides")
    strides = (data.strides[0], data.itemsize)
    return np.lib.stride_tricks.as_strided(data, (len(data), data[0].size), strides).view(np.uint8)


def _row(data: Any) -> Bytes:
    try:
        array = data if isinstance(data, np.ndarray) else np.frombuffer(data, np.uint8)
    except (TypeError, ValueError, BufferError) as exc:
        raise InvalidArgumentError(f"a block is contiguous bytes or an array, not {type(data).__name__}") from exc
    if not array.flags.c_contiguous or array.dtype.hasobject:
        raise InvalidArgumentError("the bytes of each block must lie together")
    return array.reshape(-1).view(np.uint8)
