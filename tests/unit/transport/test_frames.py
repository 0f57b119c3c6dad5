"""The frame codec: golden bytes, every cut, and what a broken peer may send."""

from __future__ import annotations

import os
import struct
import zlib
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorbus.errors import CorruptError, InvalidArgumentError
from tensorbus.transport import Decoder, Fds, Frame, LocalProtocolError, RemoteProtocolError, encode

GOLDEN = bytes.fromhex(
    "74627573"  # magic
    "01"  # version
    "00"  # flags
    "0000"  # descriptors
    "12000000"  # header length
    "a0094a3b"  # header CRC
    "0300000000000000"  # body length
    "00000000"  # reserved
    "55117add"  # prefix CRC
    "7b2274223a2270757368222c226e223a377d"  # {"t":"push","n":7}
    "010203"
)

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
frames = st.builds(Frame, header=st.dictionaries(st.text(), json_values, max_size=4), body=st.binary(max_size=200))


def wire(frame: Frame) -> bytes:
    return b"".join(bytes(piece) for piece in encode(frame))


def plain(got: list[Frame]) -> list[tuple[dict[str, object], bytes]]:
    return [(frame.header, bytes(frame.body)) for frame in got]


def prefix(*, magic: bytes = b"tbus", version: int = 1, fds: int = 0, header: int = 2, body: int = 0) -> bytes:
    fields = struct.pack("<4sBBHIIQI", magic, version, 0, fds, header, zlib.crc32(b"{}"), body, 0)
    return fields + struct.pack("<I", zlib.crc32(fields))


def test_the_layout_is_the_documented_one() -> None:
    assert wire(Frame(header={"t": "push", "n": 7}, body=b"\x01\x02\x03")) == GOLDEN
    assert plain(Decoder().feed(GOLDEN)) == [({"t": "push", "n": 7}, b"\x01\x02\x03")]


@given(st.lists(frames, max_size=5), st.lists(st.integers(min_value=0, max_value=3000), max_size=8))
def test_any_cut_of_the_stream_gives_the_same_frames(sent: list[Frame], cuts: list[int]) -> None:
    try:
        data = b"".join(wire(frame) for frame in sent)
    except LocalProtocolError:
        return  # a lone surrogate cannot be written as UTF-8
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    decoder = Decoder()
    got = [frame for a, b in pairwise(edges) for frame in decoder.feed(data[a:b])]
    assert plain(got) == plain(sent)
    decoder.eof()


def test_a_stream_cut_at_every_byte_gives_its_frames() -> None:
    decoder = Decoder()
    got = [frame for byte in GOLDEN * 2 for frame in decoder.feed(bytes([byte]))]
    assert len(got) == 2


@pytest.mark.parametrize("at", range(len(GOLDEN) - 3))
def test_a_flipped_bit_outside_the_body_is_an_error(at: int) -> None:
    broken = bytearray(GOLDEN)
    broken[at] ^= 0x10
    with pytest.raises(RemoteProtocolError):
        Decoder().feed(bytes(broken) + bytes(1 << 16))


@pytest.mark.parametrize(
    "data",
    [
        prefix(magic=b"HTTP"),
        prefix(version=2),
        prefix(header=17 << 20),
        prefix(body=1 << 40),
        prefix(fds=65),
        prefix(fds=1) + b"{}",
        prefix(header=1) + b"[",
    ],
)
def test_a_prefix_outside_the_limits_is_refused(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        Decoder().feed(data)


@pytest.mark.parametrize("text", [b"[]", b"{", b"\xff\xff", b'{"a":NaN}', b"[" * 5000])
def test_a_header_that_is_no_object_is_refused(text: bytes) -> None:
    fields = struct.pack("<4sBBHIIQI", b"tbus", 1, 0, 0, len(text), zlib.crc32(text), 0, 0)
    with pytest.raises(RemoteProtocolError):
        Decoder().feed(fields + struct.pack("<I", zlib.crc32(fields)) + text)


def test_frames_before_a_broken_one_are_given_and_the_error_stays() -> None:
    decoder = Decoder()
    assert len(decoder.feed(GOLDEN + bytes(40))) == 1
    assert decoder.error is not None
    with pytest.raises(RemoteProtocolError):
        decoder.feed(GOLDEN)


def test_the_end_of_a_stream_within_a_frame_is_an_error() -> None:
    decoder = Decoder()
    decoder.feed(GOLDEN[:-1])
    with pytest.raises(RemoteProtocolError, match="within a frame"):
        decoder.eof()


@pytest.mark.parametrize("header", [{"x": float("nan")}, {"x": object()}, {"x": "\ud800"}, {"x": b"bytes"}])
def test_a_header_that_is_no_json_is_not_sent(header: dict[str, object]) -> None:
    with pytest.raises(LocalProtocolError):
        encode(Frame(header=header))


def test_a_body_over_the_limit_is_not_sent() -> None:
    with pytest.raises(LocalProtocolError, match="the most is 10"):
        encode(Frame(header={}, body=bytes(11)), body_bytes_max=10)


def test_errors_are_of_the_kinds_that_callers_know() -> None:
    assert issubclass(RemoteProtocolError, CorruptError)
    assert issubclass(LocalProtocolError, InvalidArgumentError)


def test_descriptors_belong_to_frames_in_order() -> None:
    two, one = Frame(header={}, fds=Fds([7, 8], owned=False)), Frame(header={}, fds=Fds([9], owned=False))
    decoder = Decoder(owned_fds=False)
    first = decoder.feed(wire(two)[:5], [7, 8])
    rest = decoder.feed(wire(two)[5:] + wire(one), [9])
    assert first == []
    assert [list(frame.fds) for frame in rest] == [[7, 8], [9]]


def test_descriptors_without_a_frame_are_closed() -> None:
    read, write = os.pipe()
    os.close(write)
    with pytest.raises(RemoteProtocolError):
        Decoder().feed(wire(Frame(header={})), [read]) and Decoder().feed(b"", [read])
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(read)
