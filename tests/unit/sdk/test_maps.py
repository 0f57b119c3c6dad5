"""Mapped memory: shared while used, gone when not; parts laid end to end."""

from __future__ import annotations

import gc

import pytest

from tensorbus.model import Layout, Manifest, TensorSpec
from tensorbus.sdk._maps import Opened, ReadMaps, WriteMaps, part_starts
from tensorbus.transport import Fds, Pool, Reply, map_private

MANIFEST = Manifest((TensorSpec("a", "u8", (3,)), TensorSpec("b", "i32", (2,))))


def opened(pool: Pool) -> Opened:
    parts = []
    for fill in (b"abc", (7).to_bytes(4, "little") + (9).to_bytes(4, "little")):
        segment = pool.allocate(len(fill), tenant="t")
        segment.view[:] = fill
        segment.seal()
        fd, pin = segment.open_reader()
        parts.append(map_private(fd, len(fill), pin))
    layout = Layout((0, 4096), 4096 + 8)
    return Opened(manifest=MANIFEST, layout=layout, parts=tuple(parts), starts=(0, 4096), path="shm", why="")


@pytest.fixture
def pool() -> Pool:
    found = Pool(1 << 20)
    yield found
    found.close()


def test_parts_begin_on_pages() -> None:
    assert part_starts([1]) == (0,)
    assert part_starts([0, 4096, 4097, 5]) == (0, 0, 4096, 12288)


def test_tensors_are_found_in_their_parts(pool: Pool) -> None:
    found = opened(pool)
    assert bytes(found.octets(MANIFEST.find("a"))) == b"abc"
    assert found.tensor(MANIFEST.find("b"), "numpy").tolist() == [7, 9]


def test_a_map_is_shared_while_a_tensor_lives_and_gone_after(pool: Pool) -> None:
    maps = ReadMaps()
    first = maps.keep(("a", 1), opened(pool))
    assert maps.find(("a", 1)).parts == first.parts
    assert maps.keep(("a", 1), opened(pool)).parts == first.parts
    tensors = [first.tensor(spec, "numpy") for spec in MANIFEST]
    del first
    gc.collect()
    assert maps.find(("a", 1)) is not None
    assert maps.find(("a", 2)) is None
    tensors.pop()
    gc.collect()
    assert maps.find(("a", 1)) is None  # a part is gone
    del tensors
    gc.collect()
    assert not maps._tables
    pool.reap()
    assert pool.stats().pins == 0


def test_what_was_filled_is_kept_warm_up_to_a_limit(pool: Pool) -> None:
    maps = WriteMaps(limit_bytes=8192)
    for number in range(4):
        segment = pool.allocate(100, tenant="t", writer="me")
        reply = Reply({"nbytes": 100, "capacity": segment.capacity_bytes}, fds=Fds(segment.open_writer()))
        memory = maps.take(number, reply)
        memory[:3] = b"abc"
        assert bytes(segment.view[:3]) == b"abc"
        maps.give_back(number, memory)
        del memory
    pool.reap()
    assert pool.stats().pins == 2
    assert maps.take(3, Reply({"mapped": True})) is not None
    assert maps.take(0, Reply({"mapped": True})) is None
    assert maps.drop([2, 5]) == 1
    assert maps.drop() == 0
    pool.reap()
    assert pool.stats().pins == 0
