"""Filling the caller's own tensors: by several threads, in pieces, and given up in the middle."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from tensorbus.errors import CancelledError
from tensorbus.model import TensorSpec
from tensorbus.sdk import _into as module
from tensorbus.sdk._into import fill_into


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, nbytes in (("_PIECE_BYTES", 64), ("_COPY_BYTES", 256), ("_INLINE_BYTES", 0)):
        monkeypatch.setattr(module, name, nbytes)


def frozen(count: int) -> tuple[bytes, TensorSpec]:
    """Read-only bytes, as a map gives them, of a tensor of two dimensions."""
    return np.random.default_rng(count).bytes(4 * count * 6), TensorSpec("w", "i32", (count, 6))


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize(
    "room",
    [
        lambda: np.zeros((100, 6), np.int32),
        lambda: np.zeros((6, 100), np.int32).T,
        lambda: np.zeros((100, 6), ">i4"),
        lambda: np.zeros((200, 12), np.int32)[::2, 3:9],
        lambda: torch.zeros(100, 6, dtype=torch.int32),
        lambda: torch.zeros(6, 100, dtype=torch.int32).T,
    ],
)
def test_pieces_fill_any_layout(room: object, threads: int) -> None:
    raw, spec = frozen(100)
    mine = room()  # type: ignore[operator]
    fill_into({"w": mine}, [(spec, raw)], threads=threads)
    got = mine.numpy() if isinstance(mine, torch.Tensor) else mine
    assert got.astype("<i4").tobytes() == raw


def test_several_threads_fill_one_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    both, seen = threading.Barrier(2, timeout=20), set()
    copy = np.copyto

    def meet(room: object, data: object) -> None:
        if threading.get_ident() not in seen:
            seen.add(threading.get_ident())
            both.wait()
        copy(room, data)  # type: ignore[call-overload]

    monkeypatch.setattr(module.np, "copyto", meet)
    raw, spec = frozen(100)
    mine = np.zeros((100, 6), np.int32)
    fill_into({"w": mine}, [(spec, raw)], threads=2)
    assert len(seen) == 2
    assert mine.tobytes() == raw


def test_it_is_given_up_between_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    stop, copy, pieces = threading.Event(), np.copyto, list[object]()

    def once(room: object, data: object) -> None:
        pieces.append(room)
        stop.set()
        copy(room, data)  # type: ignore[call-overload]

    monkeypatch.setattr(module.np, "copyto", once)
    raw, spec = frozen(100)
    with pytest.raises(CancelledError):
        fill_into({"w": np.zeros((100, 6), np.int32)}, [(spec, raw)], stop=stop, threads=1)
    assert len(pieces) == 1
