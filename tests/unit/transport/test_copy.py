"""Copies and their digests, whatever the sizes and the number of threads."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from blake3 import blake3

from tensorbus.errors import InvalidArgumentError
from tensorbus.transport import _copy as module
from tensorbus.transport import copy_and_hash, hash_bytes

SIZES = (0, 1, 1000, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, 3_500_000)


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("digests", [True, False])
@pytest.mark.parametrize("large_bytes", [1 << 30, 1 << 20])
def test_every_destination_is_its_source(
    threads: int, digests: bool, large_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_LARGE_BYTES", large_bytes)
    monkeypatch.setattr(module, "_BLOCK_BYTES_PER_THREAD", 1_000_000)
    monkeypatch.setattr(module, "_INLINE_BYTES", 100)
    random = np.random.default_rng(1)
    sources = [random.integers(0, 256, size, dtype=np.uint8) for size in SIZES]
    targets = [bytearray(size) for size in SIZES]
    jobs = [(source, memoryview(target)) for source, target in zip(sources, targets, strict=True)]
    results = copy_and_hash(jobs, threads=threads, digests=digests)
    assert all(bytes(source) == target for source, target in zip(sources, targets, strict=True))
    assert results == [blake3(bytes(source)).digest() if digests else None for source in sources]


def test_nothing_to_copy_is_no_work() -> None:
    assert copy_and_hash([]) == []


def test_pairs_that_do_not_match_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="from 3 to 4"):
        copy_and_hash([(memoryview(b"abc"), memoryview(bytearray(4)))])
    with pytest.raises(InvalidArgumentError, match="contiguous"):
        copy_and_hash([(np.zeros((4, 4), np.uint8)[:, ::2], memoryview(bytearray(8)))])
    with pytest.raises(InvalidArgumentError, match="contiguous"):
        copy_and_hash([(memoryview(b"abcdef")[::2], memoryview(bytearray(3)))])


def test_an_error_in_any_thread_is_raised_and_all_have_ended() -> None:
    target = np.zeros(5_000_000, np.uint8)
    target.flags.writeable = False
    before = threading.active_count()
    with pytest.raises(ValueError, match="read-only"):
        copy_and_hash([(np.ones(5_000_000, np.uint8), target)] * 3, threads=3)
    assert threading.active_count() == before


def test_a_digest_is_blake3() -> None:
    data = bytes(range(256)) * 30_000
    assert hash_bytes(memoryview(data)) == blake3(data).digest()
