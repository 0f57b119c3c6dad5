"""The codec of bulk connections: bytes in, messages out, no I/O. The layout is fixed in ``docs/spec/frames.md``.

Two kinds of messages share a connection: the JSON frames of every connection, without a body, and *blocks*, whose head
is as long as a frame's prefix. The body of a block goes straight from memory to memory and never through here.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from tensorbus.transport._blocks import BLOCK_BYTES
from tensorbus.transport._frames import (
    MAGIC,
    PREFIX_BYTES,
    BytesLike,
    LocalProtocolError,
    Prefix,
    RemoteProtocolError,
    decode_header,
    decode_prefix,
    encode_head,
)

BLOCK_MAGIC: Final = b"tbbk"
BLOCK_VERSION: Final = 1
HEAD_BYTES: Final = PREFIX_BYTES
BULK_VERSION: Final = 2
HEADER_BYTES_MAX: Final = 16 << 20
REQUEST_MAX: Final = 0xFFFF_FFFF

_FIELDS = struct.Struct("<4sBBHIIIQ")
_CHECK = struct.Struct("<I")
_SUMMED = 1


@dataclass(frozen=True, slots=True)
class BlockHead:
    """What comes before the bytes of a block.

    Attributes:
        request: Which request it answers.
        index: The block's number: within the source, or within the request if that named spans.
        nbytes: Length of the bytes that follow.
        checksum: XXH3-64 of them; ``None`` where none was asked for.
    """

    request: int
    index: int
    nbytes: int
    checksum: int | None


Message = Mapping[str, object] | BlockHead


def encode_block_head(head: BlockHead) -> bytes:
    """The :data:`HEAD_BYTES` before a block's bytes.

    Raises:
        LocalProtocolError: If a number does not fit.
    """
    if not 0 < head.nbytes <= BLOCK_BYTES or not (0 <= head.request <= REQUEST_MAX and 0 <= head.index <= REQUEST_MAX):
        raise LocalProtocolError(f"a block cannot be sent as {head}")
    flags, checksum = (0, 0) if head.checksum is None else (_SUMMED, head.checksum)
    data = _FIELDS.pack(BLOCK_MAGIC, BLOCK_VERSION, flags, 0, head.request, head.index, head.nbytes, checksum)
    return data + _CHECK.pack(zlib.crc32(data))


def decode_block_head(data: BytesLike) -> BlockHead:
    """Check and read the head of a block.

    Raises:
        RemoteProtocolError: If it is none, or its length is over the limit.
    """
    magic, version, flags, reserved, request, index, nbytes, checksum = _FIELDS.unpack_from(data, 0)
    if magic != BLOCK_MAGIC:
        raise RemoteProtocolError(f"a block begins with {BLOCK_MAGIC!r}, not {bytes(magic)!r}")
    if _CHECK.unpack_from(data, _FIELDS.size)[0] != zlib.crc32(bytes(data[: _FIELDS.size])):
        raise RemoteProtocolError("the checksum of a block's head is wrong")
    if version != BLOCK_VERSION or flags not in (0, _SUMMED) or reserved or (checksum and not flags):
        raise RemoteProtocolError(
            f"block of version {version}, flags {flags}; this side speaks version {BLOCK_VERSION}"
        )
    if not 0 < nbytes <= BLOCK_BYTES:
        raise RemoteProtocolError(f"block of {nbytes} bytes, from 1 to {BLOCK_BYTES} are allowed")
    return BlockHead(request=request, index=index, nbytes=nbytes, checksum=checksum if flags else None)


def encode_message(header: Mapping[str, object]) -> bytes:
    """A message without bytes."""
    return encode_head(header, body_bytes=0)


class Parser:
    """Tells what to read next and makes messages of it.

    ``wants`` is the number of bytes to give :meth:`take` next; it gives a message once one is whole. After a
    :class:`BlockHead` its bytes come, which the caller reads itself; then the next message begins.
    """

    def __init__(self, *, header_bytes_max: int = HEADER_BYTES_MAX) -> None:
        self.wants = HEAD_BYTES
        self.header_bytes_max = header_bytes_max
        self._prefix: Prefix | None = None

    def take(self, data: BytesLike) -> Message | None:
        """Take in exactly ``wants`` bytes.

        Raises:
            RemoteProtocolError: If the peer broke the format; the connection cannot be used any more.
        """
        if len(data) != self.wants:
            raise LocalProtocolError(f"{self.wants} bytes were wanted, {len(data)} given")
        if self._prefix is not None:
            prefix, self._prefix, self.wants = self._prefix, None, HEAD_BYTES
            return decode_header(prefix, bytes(data))
        if bytes(data[: len(MAGIC)]) != MAGIC:
            return decode_block_head(data)
        prefix = decode_prefix(data)
        if prefix.fd_count or prefix.body_bytes:
            raise RemoteProtocolError(
                f"a frame with {prefix.fd_count} descriptors and {prefix.body_bytes} bytes of body"
            )
        if prefix.header_bytes > self.header_bytes_max:
            raise RemoteProtocolError(f"a header of {prefix.header_bytes} bytes, the most is {self.header_bytes_max}")
        self._prefix, self.wants = prefix, prefix.header_bytes
        return None


class BulkDecoder:
    """Turns a stream of bytes, cut anywhere, into messages, each with its bytes: for who can hold it all."""

    def __init__(self) -> None:
        self._parser = Parser()
        self._data = bytearray()
        self._head: BlockHead | None = None

    def feed(self, data: BytesLike) -> Iterator[tuple[Message, bytes]]:
        """The messages that are whole now.

        Raises:
            RemoteProtocolError: If the peer broke the format.
        """
        self._data += data
        while len(self._data) >= (wanted := self._parser.wants if self._head is None else self._head.nbytes):
            taken = bytes(self._data[:wanted])
            del self._data[:wanted]
            if self._head is not None:
                head, self._head = self._head, None
                yield head, taken
                continue
            message = self._parser.take(taken)
            if isinstance(message, BlockHead):
                self._head = message
            elif message is not None:
                yield message, b""
