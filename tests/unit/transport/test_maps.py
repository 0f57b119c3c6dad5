"""Mapped segments: private to their reader, and pinned in every process that has them."""

from __future__ import annotations

import os
import select
import signal

import numpy as np
import pytest

from tensorbus.errors import OutOfSpaceError, UnavailableError
from tensorbus.transport import PinnedMap, Pool, Segment, map_private, page_round

PAGE = page_round(1)


def filled(pool: Pool, byte: int, *, pages: int = 2) -> Segment:
    segment = pool.allocate(pages * PAGE, tenant="t")
    segment.view[:] = bytes([byte]) * (pages * PAGE)
    segment.seal()
    return segment


def mapped(segment: Segment) -> PinnedMap:
    fd, pin = segment.open_reader()
    return map_private(fd, segment.nbytes, pin)


def test_what_a_reader_writes_is_seen_by_nobody_else() -> None:
    pool = Pool(8 * PAGE)
    segment = filled(pool, 7)
    mine, yours = np.frombuffer(mapped(segment), np.uint8), np.frombuffer(mapped(segment), np.uint8)
    mine[:] = 9
    assert (mine == 9).all()
    assert (yours == 7).all()
    assert bytes(segment.view) == b"\x07" * segment.nbytes
    del mine, yours
    pool.close()


def test_the_pin_lasts_as_long_as_any_array_over_the_map() -> None:
    pool = Pool(8 * PAGE)
    segment = filled(pool, 7)
    array = np.frombuffer(mapped(segment), np.uint8)
    part = array[5:10]
    del array
    pool.reap()
    assert segment.pins == 1
    del part
    pool.reap()
    assert segment.pins == 0
    pool.close()


def test_closing_a_map_unpins_unless_it_is_in_use() -> None:
    pool = Pool(8 * PAGE)
    segment = filled(pool, 7)
    mapping = mapped(segment)
    view = memoryview(mapping)
    with pytest.raises(BufferError):
        mapping.close()
    pool.reap()
    assert segment.pins == 1
    view.release()
    mapping.close()
    mapping.close()
    pool.reap()
    assert segment.pins == 0
    pool.close()


def test_a_descriptor_that_cannot_be_mapped_costs_no_descriptor() -> None:
    before = len(os.listdir("/proc/self/fd"))
    read, write = os.pipe()
    with pytest.raises(UnavailableError):
        map_private(read, 0, write)
    fd = os.memfd_create("short")
    read, write = os.pipe()
    with pytest.raises(UnavailableError, match="has only 0"):
        map_private(fd, 100, write)
    os.close(read)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_forked_child_keeps_the_bytes_after_its_parent_is_gone() -> None:
    pool = Pool(6 * PAGE)
    segment = filled(pool, 7)
    fd, pin = segment.open_reader()
    to_child, from_test = os.pipe()
    from_child, to_test = os.pipe()
    parent = os.fork()
    if parent == 0:
        _parent_and_child(pool, fd, pin, segment.nbytes, to_child, to_test)
    for mine in (fd, pin, to_child, to_test):
        os.close(mine)
    assert os.read(from_child, 1) == b"r"  # the child has the map
    assert os.waitpid(parent, 0)[1] == 0  # its parent is gone
    segment.release()
    for byte in range(20):  # pressure: everything else is used over and over
        filled(pool, byte).release()
    with pytest.raises(OutOfSpaceError):
        pool.allocate(6 * PAGE, tenant="t")
    assert segment.pins == 1
    os.write(from_test, b"g")
    assert os.read(from_child, 1) == b"y"
    while os.read(from_child, 1):  # until the child goes; the kernel closes its pin a moment before or after this
        pass
    patience = select.poll()
    patience.register(pool.fileno(), select.POLLIN)
    assert patience.poll(10_000)
    pool.reap()
    assert pool.allocate(6 * PAGE, tenant="t").generation == 1
    os.close(from_test)
    os.close(from_child)
    pool.close()


def _parent_and_child(pool: Pool, fd: int, pin: int, nbytes: int, to_child: int, to_test: int) -> None:
    """A reader process that maps, forks, and leaves; its child reads when told to. Never returns."""
    try:
        signal.alarm(30)
        pool.close()
        array = np.frombuffer(map_private(fd, nbytes, pin), np.uint8)
        if os.fork() != 0:
            os._exit(0)
        signal.alarm(30)
        os.write(to_test, b"r")
        os.read(to_child, 1)
        os.write(to_test, b"y" if (array == 7).all() and len(array) == nbytes else b"n")
        os._exit(0)
    finally:
        os._exit(1)
