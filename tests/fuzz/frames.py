"""A target for atheris: any bytes are messages or a RemoteProtocolError, in both decoders. Run by a soak test.

``python -m tests.fuzz.frames -max_total_time=60``
"""

from __future__ import annotations

import contextlib
import sys

import atheris

with atheris.instrument_imports(include=["tensorbus.transport"]):
    from tensorbus.transport._bulk_frames import BlockHead, BulkDecoder, encode_block_head, encode_message
    from tensorbus.transport._frames import Decoder, RemoteProtocolError

GOOD = (encode_message({"t": "x"}), encode_block_head(BlockHead(1, 2, 3, 4)) + b"abc")


def one(data: bytes) -> None:
    provider = atheris.FuzzedDataProvider(data)
    start = GOOD[provider.ConsumeIntInRange(0, 1)][: provider.ConsumeIntInRange(0, 40)]
    tail = provider.ConsumeBytes(4096)
    with contextlib.suppress(RemoteProtocolError):
        list(BulkDecoder().feed(start + tail))
    whole, pieces = [], []
    for cut, found in ((len(tail), whole), (7, pieces)):
        decoder = Decoder()
        with contextlib.suppress(RemoteProtocolError):
            stream = start + tail
            for at in range(0, len(stream), max(1, cut)):
                found += [frame.header for frame in decoder.feed(stream[at : at + max(1, cut)])]
    assert whole == pieces


if __name__ == "__main__":
    atheris.Setup(sys.argv, one)
    atheris.Fuzz()
