"""Blocks on a wire: sent from the pieces of memory they lie in, however little the kernel takes at once."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from tensorbus.transport._blocks import checksum
from tensorbus.transport._bulk import Wire
from tensorbus.transport._bulk_frames import BlockHead


class Counting(socket.socket):
    """A socket that counts what it is told."""

    told = 0

    def setsockopt(self, *args: object) -> None:  # type: ignore[override]
        self.told += 1
        super().setsockopt(*args)  # type: ignore[call-overload]


@pytest.fixture
def ends() -> Iterator[tuple[Wire, Wire, Counting]]:
    one, other = socket.socketpair()
    first = Counting(fileno=one.detach())
    first.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    first.told = 0
    with first, other:
        sender, receiver = (Wire(sock, peer="p", header_bytes_max=4096) for sock in (first, other))
        yield sender, receiver, first


@pytest.mark.parametrize("sizes", [[1 << 20], [1, 300_000, 1], [511] * 3000, [1] * 5])
def test_a_block_comes_as_it_lies_in_memory(ends: tuple[Wire, Wire, Counting], sizes: list[int]) -> None:
    sender, receiver, _ = ends
    data = memoryview(np.random.default_rng(len(sizes)).bytes(sum(sizes)))
    starts = np.cumsum([0, *sizes])
    views = [data[start : start + size] for start, size in zip(starts.tolist(), sizes, strict=False)]
    head = BlockHead(request=3, index=7, nbytes=len(data), checksum=checksum(views))
    room = bytearray(len(data))
    sending = threading.Thread(target=sender.send_block, args=(head, views))
    sending.start()
    assert receiver.recv() == head
    assert receiver.recv_block([memoryview(room)]) == head.checksum
    sending.join()
    assert room == data


def test_the_kernel_is_told_of_a_wait_when_it_changes(ends: tuple[Wire, Wire, Counting]) -> None:
    sender, _, sock = ends
    for seconds in (10.0, 10.0, 10.0, 2.5, 2.5, 10.0):
        sender.set_timeout(seconds)
    assert sock.told == 2 * 3
