"""Copying tensors into a segment, with their digests taken on the way.

Two shapes of work, by what measured best: large tensors one after the other with all threads on each, in blocks so
large that the C library streams past the caches; small tensors shared out among the threads, each copied and hashed
while its bytes are in the cache. Digests are of the destination, so they speak of what is stored even if the source
changes.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from tensorbus.errors import InvalidArgumentError

Bytes = npt.NDArray[np.uint8]
CopyJob = tuple[memoryview | Bytes, memoryview | Bytes]

_CHUNK_BYTES = 1 << 20
_LARGE_BYTES = 64 << 20
_BLOCK_BYTES_PER_THREAD = 128 << 20
_INLINE_BYTES = 4 << 20
_THREADS_MAX = 16


def default_threads() -> int:
    """As many threads as this process may use processors, up to 16."""
    return min(_THREADS_MAX, len(os.sched_getaffinity(0)))


def copy_and_hash(jobs: Sequence[CopyJob], *, threads: int | None = None, digests: bool = True) -> list[bytes | None]:
    """Copy each source over its destination. Blocks, mostly without the interpreter's lock; call it off the loop.

    Args:
        jobs: Pairs of source and destination, contiguous bytes of equal length; destinations do not overlap.
        threads: How many to use; as many as there are processors when ``None``.
        digests: Whether to take digests.

    Returns:
        Per job the 32 bytes of BLAKE3 of the copied bytes, or ``None`` without ``digests``.

    Raises:
        InvalidArgumentError: If a pair differs in length or is not contiguous.
    """
    pairs = [(_as_bytes(source), _as_bytes(destination)) for source, destination in jobs]
    for number, (source, destination) in enumerate(pairs):
        if source.nbytes != destination.nbytes:
            raise InvalidArgumentError(f"copy {number} is from {source.nbytes} to {destination.nbytes} bytes")
    results: list[bytes | None] = [None] * len(pairs)
    total = sum(source.nbytes for source, _ in pairs)
    count = 1 if total <= _INLINE_BYTES else max(1, threads or default_threads())
    large = [n for n, (source, _) in enumerate(pairs) if source.nbytes >= _LARGE_BYTES]
    small = [n for n, (source, _) in enumerate(pairs) if source.nbytes < _LARGE_BYTES]
    for number in large:
        results[number] = _copy_large(*pairs[number], threads=count, digest=digests)
    todo = iter(sorted(small, key=lambda n: -pairs[n][0].nbytes))
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                number = next(todo, None)
            if number is None:
                return
            results[number] = _copy_small(*pairs[number], digest=digests)

    run_threads([work] * min(count, max(1, len(small))))
    return results


def hash_bytes(data: memoryview | Bytes, *, threads: int | None = None) -> bytes:
    """The 32 bytes of BLAKE3 of ``data``. Blocks; call it off the loop."""
    array = _as_bytes(data)
    count = 1 if array.nbytes <= _INLINE_BYTES else threads or default_threads()
    return blake3(array.data, max_threads=count).digest()


def run_threads(works: Sequence[Callable[[], None]]) -> None:
    """Run all to their end, the last one here; then raise the first error, if any."""
    if len(works) == 1:
        works[0]()
        return
    errors: list[BaseException] = []

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as exc:  # noqa: BLE001 - raised again in the thread that waits
            errors.append(exc)

    others = [threading.Thread(target=guarded, args=(work,), daemon=True) for work in works[:-1]]
    for thread in others:
        thread.start()
    if works:
        guarded(works[-1])
    for thread in others:
        thread.join()
    if errors:
        raise errors[0]


def _copy_small(source: Bytes, destination: Bytes, *, digest: bool) -> bytes | None:
    if not digest:
        np.copyto(destination, source)
        return None
    if source.nbytes <= _CHUNK_BYTES:
        np.copyto(destination, source)
        return blake3(destination.data).digest()
    hasher = blake3()
    for start in range(0, source.nbytes, _CHUNK_BYTES):
        chunk = destination[start : start + _CHUNK_BYTES]
        np.copyto(chunk, source[start : start + _CHUNK_BYTES])
        hasher.update(chunk.data)
    return hasher.digest()


def _copy_large(source: Bytes, destination: Bytes, *, threads: int, digest: bool) -> bytes | None:
    if not digest:
        _copy_shared(source, destination, threads=threads)
        return None
    hasher = blake3(max_threads=threads)
    block = _BLOCK_BYTES_PER_THREAD * threads
    for start in range(0, source.nbytes, block):
        piece = destination[start : start + block]
        _copy_shared(source[start : start + block], piece, threads=threads)
        hasher.update(piece.data)
    return hasher.digest()


def _copy_shared(source: Bytes, destination: Bytes, *, threads: int) -> None:
    share = -(-source.nbytes // threads)

    def part(start: int) -> Callable[[], None]:
        return lambda: np.copyto(destination[start : start + share], source[start : start + share])

    run_threads([part(start) for start in range(0, source.nbytes, max(1, share))])


def _as_bytes(data: memoryview | Bytes) -> Bytes:
    if isinstance(data, memoryview):
        if not data.c_contiguous:
            raise InvalidArgumentError("bytes to copy must be contiguous")
        return np.frombuffer(data, dtype=np.uint8)
    if data.dtype != np.uint8 or not data.flags.c_contiguous:
        raise InvalidArgumentError("an array to copy must be contiguous uint8")
    return data.reshape(-1)
