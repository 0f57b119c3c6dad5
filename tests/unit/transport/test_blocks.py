"""Blocks: both sides cut the same bytes the same way, and nothing is lost, doubled or added by it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorbus.errors import InvalidArgumentError
from tensorbus.transport import _blocks
from tensorbus.transport._blocks import BLOCK_BYTES, SPANS_MAX, BlockTable, block_bytes, checksum, cut, merged, pieces

SPANS = st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 60)), max_size=30)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_blocks, "BLOCK_BYTES", 16)
    monkeypatch.setattr(_blocks, "SPANS_MAX", 3)


def octets(spans: list[tuple[int, int]]) -> list[int]:
    return [at for offset, nbytes in spans for at in range(offset, offset + nbytes)]


@given(SPANS)
def test_merged_spans_have_every_byte_once_in_order(spans: list[tuple[int, int]]) -> None:
    assert octets(merged(spans)) == sorted(set(octets(spans)))


@given(SPANS)
def test_blocks_have_the_bytes_of_the_spans_in_their_order(spans: list[tuple[int, int]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_blocks, "BLOCK_BYTES", 16)
        patch.setattr(_blocks, "SPANS_MAX", 3)
        blocks = cut(spans)
        assert octets([span for block in blocks for span in block]) == octets(spans)
        assert all(0 < block_bytes(block) <= 16 and len(block) <= 3 for block in blocks)
        # Who is asked for the spans of some blocks cuts them into the same blocks again.
        assert cut([span for block in blocks for span in block]) == blocks


def test_a_large_span_is_cut_into_full_blocks() -> None:
    blocks = cut([(10, 2 * BLOCK_BYTES + 5)])
    assert blocks == [((10, BLOCK_BYTES),), ((10 + BLOCK_BYTES, BLOCK_BYTES),), ((10 + 2 * BLOCK_BYTES, 5),)]
    assert [len(block) for block in cut([(64 * n, 8) for n in range(SPANS_MAX + 1)])] == [SPANS_MAX, 1]


def test_a_checksum_is_of_the_bytes_however_they_lie() -> None:
    data = bytes(range(256))
    assert checksum([memoryview(data)]) == checksum([memoryview(data)[:7], memoryview(data)[7:]])
    assert checksum([memoryview(data)]) != checksum([memoryview(data)[:-1]])


def test_a_table_learns_a_checksum_for_good() -> None:
    table = BlockTable([(64, 5), (0, 10), (64, 5)])
    assert (table.blocks, table.nbytes, len(table)) == ([((0, 10), (64, 5))], 15, 1)
    assert table.sum_of(0) is None
    table.learn(0, 2**64 - 1)
    assert table.sum_of(0) == 2**64 - 1


def test_pieces_run_over_parts_that_end_on_pages() -> None:
    parts = [memoryview(b"a" * 5000), memoryview(b"b" * 10)]
    assert b"".join(pieces(parts, 4998, 4)) == b"aa\0\0"
    assert b"".join(pieces(parts, 8190, 6)) == b"\0\0bbbb"
    for offset, nbytes in ((-1, 2), (8192, 11), (0, -1)):
        with pytest.raises(InvalidArgumentError):
            pieces(parts, offset, nbytes)
