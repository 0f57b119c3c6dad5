"""The frame codec: bytes in, frames out, no I/O. The layout is fixed in ``docs/spec/frames.md``.

The same frames go over unix sockets (where a frame may carry descriptors), over TCP, and through memory.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from tensorbus.errors import CorruptError, InvalidArgumentError
from tensorbus.transport._fds import Fds

MAGIC = b"tbus"
VERSION = 1
PREFIX_BYTES = 32
HEADER_BYTES_MAX = 16 * 1024 * 1024
BODY_BYTES_MAX = 64 * 1024 * 1024
FDS_MAX = 64

_FIELDS = struct.Struct("<4sBBHIIQI")
_CHECK = struct.Struct("<I")

BytesLike = bytes | bytearray | memoryview


class LocalProtocolError(InvalidArgumentError):
    """We were asked to send what the frame format cannot carry."""


class RemoteProtocolError(CorruptError):
    """The peer sent what is no frame; the connection cannot be used any more."""


@dataclass(slots=True)
class Frame:
    """One message: a JSON object, raw bytes, and descriptors that whoever wants them must take."""

    header: dict[str, object]
    body: BytesLike = b""
    fds: Fds = field(default_factory=Fds)


@dataclass(frozen=True, slots=True)
class Prefix:
    """The fixed part of a frame: what follows it, and how to check it."""

    header_bytes: int
    header_crc: int
    body_bytes: int
    fd_count: int


def encode_head(header: Mapping[str, object], *, body_bytes: int, fd_count: int = 0) -> bytes:
    """Prefix and header of a frame whose body the caller sends itself.

    Raises:
        LocalProtocolError: If the header is no JSON object or a length is over its limit.
    """
    try:
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode("utf-8")
    except (TypeError, ValueError, RecursionError) as exc:
        raise LocalProtocolError(f"a frame header must be JSON in UTF-8: {exc}") from exc
    if len(text) > HEADER_BYTES_MAX:
        raise LocalProtocolError(f"frame header of {len(text)} bytes, the most is {HEADER_BYTES_MAX}")
    if fd_count > FDS_MAX:
        raise LocalProtocolError(f"{fd_count} descriptors in a frame, the most is {FDS_MAX}")
    fields = _FIELDS.pack(MAGIC, VERSION, 0, fd_count, len(text), zlib.crc32(text), body_bytes, 0)
    return b"".join((fields, _CHECK.pack(zlib.crc32(fields)), text))


def encode(frame: Frame, *, body_bytes_max: int = BODY_BYTES_MAX) -> list[BytesLike]:
    """The frame as pieces to send one after the other. Descriptors go with the first byte.

    Raises:
        LocalProtocolError: If a part of the frame is over its limit or no JSON.
    """
    body = memoryview(frame.body).cast("B") if isinstance(frame.body, memoryview) else frame.body
    if len(body) > body_bytes_max:
        raise LocalProtocolError(f"frame body of {len(body)} bytes, the most is {body_bytes_max}")
    head = encode_head(frame.header, body_bytes=len(body), fd_count=len(frame.fds))
    return [head, body] if len(body) else [head]


def decode_prefix(data: BytesLike) -> Prefix:
    """Check and read the first :data:`PREFIX_BYTES` of a frame.

    Raises:
        RemoteProtocolError: If it is no prefix of this version, or a length is over its limit.
    """
    magic, version, flags, fd_count, header_bytes, header_crc, body_bytes, reserved = _FIELDS.unpack_from(data, 0)
    if magic != MAGIC:
        raise RemoteProtocolError(f"a frame begins with {MAGIC!r}, not {bytes(magic)!r}: is the peer a tensorbus?")
    if _CHECK.unpack_from(data, _FIELDS.size)[0] != zlib.crc32(bytes(data[: _FIELDS.size])):
        raise RemoteProtocolError("the checksum of a frame prefix is wrong")
    if version != VERSION or flags or reserved:
        raise RemoteProtocolError(f"frame of version {version}, flags {flags}; this side speaks version {VERSION}")
    if header_bytes > HEADER_BYTES_MAX or fd_count > FDS_MAX:
        raise RemoteProtocolError(f"frame with a header of {header_bytes} bytes and {fd_count} descriptors")
    return Prefix(header_bytes=header_bytes, header_crc=header_crc, body_bytes=body_bytes, fd_count=fd_count)


def decode_header(prefix: Prefix, text: bytes) -> dict[str, object]:
    """Check and read a frame's header.

    Raises:
        RemoteProtocolError: If the checksum is wrong or the text is no JSON object.
    """
    if zlib.crc32(text) != prefix.header_crc:
        raise RemoteProtocolError("the checksum of a frame header is wrong")
    try:
        header = json.loads(text.decode("utf-8"), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as exc:
        raise RemoteProtocolError(f"a frame header is no JSON in UTF-8: {exc}") from exc
    if not isinstance(header, dict):
        raise RemoteProtocolError("a frame header is no JSON object")
    return header


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is no JSON")


class Decoder:
    """Turns a stream of bytes, cut anywhere, into frames.

    After an error the decoder is broken and raises the same error again: a stream has no place to resume at.

    Args:
        body_bytes_max: Largest body accepted.
        owned_fds: Whether descriptors that nobody takes are closed.
    """

    def __init__(self, *, body_bytes_max: int = BODY_BYTES_MAX, owned_fds: bool = True) -> None:
        self._body_bytes_max = body_bytes_max
        self._owned = owned_fds
        self._data = bytearray()
        self._fds: deque[int] = deque()
        self._prefix: Prefix | None = None
        self.error: RemoteProtocolError | None = None

    def feed(self, data: BytesLike, fds: Iterable[int] = ()) -> list[Frame]:
        """Take in what was received and give the frames that are complete now.

        Args:
            data: The next bytes of the stream.
            fds: Descriptors received with them; the decoder owns them until a frame carries them out.

        Frames before a broken one are given first; the error comes with the next call (see :attr:`error`).

        Raises:
            RemoteProtocolError: If the peer broke the format. All descriptors not handed out are closed.
        """
        self._fds.extend(fds)
        frames: list[Frame] = []
        if self.error is None:
            self._data += data
            try:
                self._cut(frames)
            except RemoteProtocolError as exc:
                self.error = exc
        if self.error is not None:
            self.close()
            if not frames:
                raise self.error
        return frames

    def eof(self) -> None:
        """Say that the stream ended.

        Raises:
            RemoteProtocolError: If it ended within a frame.
        """
        partial = len(self._data)
        self.close()
        if self.error is not None:
            raise self.error
        if partial:
            raise RemoteProtocolError(f"the stream ended within a frame, {partial} bytes into it")

    def close(self) -> None:
        """Drop what is buffered and close the descriptors that came with it."""
        self._data.clear()
        Fds(self._fds, owned=self._owned).close()
        self._fds.clear()

    def _cut(self, frames: list[Frame]) -> None:
        offset = 0
        while (cut := self._next(offset)) is not None:
            frame, offset = cut
            frames.append(frame)
        del self._data[:offset]
        self._check_fds()

    def _next(self, offset: int) -> tuple[Frame, int] | None:
        if self._prefix is None:
            if len(self._data) - offset < PREFIX_BYTES:
                return None
            self._prefix = decode_prefix(memoryview(self._data)[offset : offset + PREFIX_BYTES].tobytes())
            if self._prefix.body_bytes > self._body_bytes_max:
                raise RemoteProtocolError(f"frame body of {self._prefix.body_bytes} bytes, over {self._body_bytes_max}")
        prefix = self._prefix
        body_at = offset + PREFIX_BYTES + prefix.header_bytes
        end = body_at + prefix.body_bytes
        if len(self._data) < end:
            return None
        header = decode_header(prefix, bytes(self._data[offset + PREFIX_BYTES : body_at]))
        body = bytes(memoryview(self._data)[body_at:end])
        frame = Frame(header=header, body=body, fds=self._take_fds(prefix.fd_count))
        self._prefix = None
        return frame, end

    def _take_fds(self, count: int) -> Fds:
        if count > len(self._fds):
            raise RemoteProtocolError(f"a frame names {count} descriptors and {len(self._fds)} came")
        return Fds([self._fds.popleft() for _ in range(count)], owned=self._owned)

    def _check_fds(self) -> None:
        # Descriptors come with the first byte of their frame, so what no begun frame can claim was never asked for.
        if (self._fds and not self._data) or len(self._fds) > 2 * FDS_MAX:
            raise RemoteProtocolError(f"{len(self._fds)} descriptors came without a frame")
