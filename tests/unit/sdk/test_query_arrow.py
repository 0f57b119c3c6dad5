"""Arrow streams in pieces: any cut gives the same batches, and what is no stream is said to be none."""

from __future__ import annotations

import io
from datetime import UTC, datetime
from decimal import Decimal
from itertools import pairwise

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorbus.errors import CorruptError, InvalidArgumentError
from tensorbus.sdk import _query_arrow as arrow
from tensorbus.sdk._query_arrow import ArrowStream, rows_of


def table(rows: int) -> pa.Table:
    return pa.table(
        {
            "n": pa.array(range(rows), pa.uint64()),
            "text": pa.array([None if row % 3 == 0 else f"row {row}" for row in range(rows)]),
            "word": pa.array(["abc"[row % 3] for row in range(rows)]).dictionary_encode(),
        }
    )


def stream(found: pa.Table, *, chunk: int = 3) -> bytes:
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, found.schema) as writer:
        writer.write_table(found, max_chunksize=chunk)
    return sink.getvalue()


@given(rows=st.integers(0, 20), cuts=st.lists(st.integers(0, 3000), max_size=12))
def test_any_cut_gives_the_same_rows(rows: int, cuts: list[int]) -> None:
    whole = table(rows)
    data = stream(whole)
    edges = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    decoder, batches = ArrowStream(), []
    for start, end in pairwise(edges):
        batches += decoder.feed(memoryview(data)[start:end])
    decoder.finish()
    assert pa.Table.from_batches(batches, decoder.schema).to_pydict() == whole.to_pydict()


def test_a_batch_comes_out_as_soon_as_it_is_whole() -> None:
    data, decoder = stream(table(9)), ArrowStream()
    counts = [len(decoder.feed(data[at : at + 8])) for at in range(0, len(data), 8)]
    assert sum(counts) == 3
    assert counts[-1] == 0, "the last bytes are the end of the stream"


def test_a_stream_that_stops_early_is_corrupt() -> None:
    data = stream(table(9))
    for end in (0, 5, len(data) // 2, len(data) - 8):
        decoder = ArrowStream()
        decoder.feed(data[:end])
        with pytest.raises(CorruptError, match="ended within"):
            decoder.finish()


@pytest.mark.parametrize(
    "data",
    [b"no stream at all", b"\xff\xff\xff\xff\x10\x00\x00\x00" + b"\xff" * 16, b"\xff\xff\xff\xff\xff\xff\xff\x7f"],
)
def test_what_is_no_stream_is_corrupt(data: bytes) -> None:
    with pytest.raises(CorruptError):
        ArrowStream().feed(data)


def test_bytes_after_the_end_are_corrupt() -> None:
    with pytest.raises(CorruptError, match="follow the end"):
        ArrowStream().feed(stream(table(2)) + b"x")


@given(at=st.integers(0, 500), flip=st.integers(1, 255))
def test_a_flipped_byte_is_corrupt_or_harmless_but_never_another_error(at: int, flip: int) -> None:
    data = bytearray(stream(table(4)))
    data[at % len(data)] ^= flip
    decoder = ArrowStream()
    try:
        for batch in decoder.feed(data):
            batch.validate(full=True)
        decoder.finish()
    except (CorruptError, pa.ArrowInvalid):
        pass


def test_rows_are_plain_values() -> None:
    batch = pa.record_batch(
        {
            "t": pa.array([1_700_000_000_123_456_789, None], pa.timestamp("ns")),
            "z": pa.array([1_700_000_000_123_456_789, None], pa.timestamp("ns", tz="UTC")),
            "h": pa.array([Decimal(7), None], pa.decimal128(38, 0)),
            "d": pa.array([Decimal("1.50"), None], pa.decimal128(4, 2)),
        }
    )
    first, second = rows_of(batch)
    assert first["t"] == datetime(2023, 11, 14, 22, 13, 20, 123456)
    assert first["z"] == datetime(2023, 11, 14, 22, 13, 20, 123456, tzinfo=UTC)
    assert (first["h"], type(first["h"]), first["d"]) == (7, int, Decimal("1.50"))
    assert set(second.values()) == {None}


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(InvalidArgumentError, match=r"tensorbus\[store\]"):
        arrow.pyarrow()
