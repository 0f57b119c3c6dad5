"""The codec of bulk connections: golden bytes, any cut gives the same messages, and broken bytes are an error."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorbus.transport import LocalProtocolError, RemoteProtocolError, encode
from tensorbus.transport._blocks import BLOCK_BYTES
from tensorbus.transport._bulk_frames import (
    HEAD_BYTES,
    BlockHead,
    BulkDecoder,
    Parser,
    decode_block_head,
    encode_block_head,
    encode_message,
)
from tensorbus.transport._frames import Frame

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "bulk_frames.json").read_text())
U32, U64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
HEADS = st.builds(BlockHead, request=U32, index=U32, nbytes=st.integers(1, 50), checksum=st.one_of(st.none(), U64))


@pytest.mark.parametrize("case", GOLDEN["blocks"], ids=lambda case: str(case["why"]))
def test_golden_heads_of_blocks_stay_readable(case: dict[str, object]) -> None:
    fields = case["head"]
    assert isinstance(fields, dict)
    head = BlockHead(**fields)
    assert decode_block_head(bytes.fromhex(str(case["hex"]))) == head
    assert encode_block_head(head).hex() == case["hex"]


@pytest.mark.parametrize("case", GOLDEN["messages"], ids=lambda case: str(case["header"]["t"]))
def test_golden_messages_stay_readable(case: dict[str, object]) -> None:
    ((message, body),) = BulkDecoder().feed(bytes.fromhex(str(case["hex"])))
    assert (message, body) == (case["header"], b"")


@given(st.lists(st.one_of(HEADS, st.just({"t": "x", "n": 1})), max_size=6), st.data())
def test_a_stream_cut_anywhere_gives_the_same_messages(messages: list[object], data: st.DataObject) -> None:
    stream, expected = b"", []
    for message in messages:
        body = b""
        if isinstance(message, BlockHead):
            body = bytes(index % 251 for index in range(message.nbytes))
            stream += encode_block_head(message) + body
        else:
            stream += encode_message({"t": "x", "n": 1})
        expected.append((message, body))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    decoder, found = BulkDecoder(), []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        found += list(decoder.feed(stream[start:end]))
    assert found == expected


@given(HEADS, st.integers(0, HEAD_BYTES * 8 - 1))
def test_a_flipped_bit_in_a_head_is_an_error(head: BlockHead, bit: int) -> None:
    data = bytearray(encode_block_head(head))
    data[bit // 8] ^= 1 << bit % 8
    with pytest.raises(RemoteProtocolError):
        Parser().take(bytes(data))


@given(st.binary(max_size=200))
def test_any_bytes_are_messages_or_an_error(data: bytes) -> None:
    with contextlib.suppress(RemoteProtocolError):
        list(BulkDecoder().feed(data))


@given(st.binary(max_size=64), st.binary(max_size=200))
def test_any_bytes_behind_a_good_beginning_are_messages_or_an_error(tail: bytes, more: bytes) -> None:
    for good in (encode_message({"t": "x"}), encode_block_head(BlockHead(1, 2, 3, None))):
        for keep in (4, 8, 28, len(good)):
            with contextlib.suppress(RemoteProtocolError):
                list(BulkDecoder().feed(good[:keep] + tail + more))


@pytest.mark.parametrize(
    "head",
    [
        BlockHead(1, 1, 0, None),
        BlockHead(1, 1, BLOCK_BYTES + 1, None),
        BlockHead(2**32, 1, 1, None),
        BlockHead(1, -1, 1, None),
    ],
)
def test_what_does_not_fit_is_not_sent(head: BlockHead) -> None:
    with pytest.raises(LocalProtocolError):
        encode_block_head(head)


def test_a_frame_with_a_body_and_one_over_the_limit_are_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="body"):
        list(BulkDecoder().feed(b"".join(map(bytes, encode(Frame(header={"t": "x"}, body=b"1"))))))
    with pytest.raises(RemoteProtocolError, match="the most is 10"):
        Parser(header_bytes_max=10).take(encode_message({"t": "a long one"})[:HEAD_BYTES])
    with pytest.raises(LocalProtocolError):
        Parser().take(b"short")
