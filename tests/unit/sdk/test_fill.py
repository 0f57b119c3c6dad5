"""Copying sources into memory: right bytes and digests whatever their sizes and kinds, and given up in time."""

from __future__ import annotations

import mmap
import os
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from blake3 import blake3

from tensorbus.errors import CancelledError, CorruptError
from tensorbus.model import TensorSpec
from tensorbus.sdk import _fill
from tensorbus.sdk._files import open_files, save_safetensors
from tensorbus.sdk._fill import Filling
from tensorbus.sdk._sources import Source, collect

RNG = np.random.default_rng(7)


def placed(sources: list[Source]) -> tuple[list[tuple[Source, int]], mmap.mmap]:
    places, end = [], 0
    for source in sources:
        places.append((source, end))
        end += -(-source.nbytes // 64) * 64
    return places, mmap.mmap(-1, max(end, 1))


def wanted(source: Source) -> bytes:
    room = bytearray(source.nbytes)
    source.write_into(memoryview(room))
    return bytes(room)


@pytest.mark.parametrize("digests", [True, False])
@pytest.mark.parametrize("warm", [True, False])
@pytest.mark.parametrize("threads", [1, 3])
def test_every_kind_and_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, digests: bool, warm: bool, threads: int
) -> None:
    monkeypatch.setattr(_fill, "PIECE_BYTES", 8192)
    monkeypatch.setattr(_fill, "_INLINE_BYTES", 0)
    monkeypatch.setattr(_fill, "_COPY_BYTES", 16384)
    monkeypatch.setattr(_fill, "_CHUNK_BYTES", 1000)
    octets = torch.from_numpy(RNG.integers(0, 256, 100_000, dtype=np.uint8))
    content = {
        "empty": torch.empty(0),
        "one": octets[:1],
        "piece": octets[:8192],
        "large": octets[1:70_000],
        "small scattered": octets[:900].reshape(30, 30).T,
        "large scattered": octets.reshape(1000, 100).T,
        **{f"many.{number}": octets[number : 10 * number] for number in range(50)},
    }
    file = save_safetensors(tmp_path, [(TensorSpec("f", "u8", (50_000,)), octets[:50_000].numpy())])
    sources = [*collect(content), *open_files(file)]
    places, memory = placed(sources)
    told: list[tuple[int, int]] = []
    filling = Filling(memory, warm=warm, digests=digests, stop=threading.Event(), threads=threads)
    found = filling.run(places, progress=lambda done, total: told.append((done, total)))
    for (source, offset), digest in zip(places, found, strict=True):
        assert memory[offset : offset + source.nbytes] == wanted(source), source
        assert digest == (blake3(wanted(source)).digest() if digests else None)
    total = sum(source.nbytes for source in sources)
    assert told[-1] == (total, total)
    assert [done for done, _ in told] == sorted(done for done, _ in told)


@pytest.mark.parametrize("scattered", [True, False])
def test_it_stops_at_the_next_piece(monkeypatch: pytest.MonkeyPatch, scattered: bool) -> None:
    monkeypatch.setattr(_fill, "PIECE_BYTES", 4096)
    monkeypatch.setattr(_fill, "_INLINE_BYTES", 0)
    monkeypatch.setattr(_fill, "_COPY_BYTES", 16384)
    array = np.ones((100, 4096), np.uint8)
    sources = collect({"a": array.T if scattered else array})
    places, memory = placed(sources)
    stop = threading.Event()
    asked: list[int] = []

    class Stopping(threading.Event):
        def is_set(self) -> bool:
            asked.append(1)
            return len(asked) > 5

    stop = Stopping()
    with pytest.raises(CancelledError):
        Filling(memory, warm=True, digests=True, stop=stop, threads=1).run(places)
    assert sum(memory[:]) <= 6 * 4096


def test_a_file_that_is_cut_short_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_fill, "PIECE_BYTES", 4096)
    monkeypatch.setattr(_fill, "_INLINE_BYTES", 0)
    monkeypatch.setattr(_fill, "_COPY_BYTES", 16384)
    file = save_safetensors(tmp_path, [(TensorSpec("f", "u8", (50_000,)), bytes(50_000))])
    places, memory = placed(open_files(file))
    filling = Filling(memory, warm=True, digests=True, stop=threading.Event(), threads=2)
    with pytest.raises(CorruptError, match=r"model.safetensors: it was cut short"):
        filling.run(places, progress=lambda done, total: os.truncate(file, 9000))
