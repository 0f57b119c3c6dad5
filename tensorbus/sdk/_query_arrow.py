"""Arrow IPC streams that arrive in pieces: bytes in, record batches out; and batches as rows of Python values."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from decimal import Decimal
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

from tensorbus.errors import CorruptError, InvalidArgumentError

if TYPE_CHECKING:
    import pyarrow as pa

_CONTINUATION: Final = 0xFFFFFFFF
_PREFIX: Final = struct.Struct("<II")
_RECORD_BATCH: Final = 3
_METADATA_BYTES_MAX: Final = 64 << 20
_BODY_BYTES_MAX: Final = 1 << 40


def pyarrow() -> ModuleType:
    """The library that reads answers to queries; loaded at first use.

    Raises:
        InvalidArgumentError: If it is not installed; names the extra.
    """
    try:
        import pyarrow as found
        import pyarrow.ipc
    except ImportError as exc:
        raise InvalidArgumentError(
            "queries need pyarrow, which is not installed here: pip install 'tensorbus[store]'", extra="store"
        ) from exc
    return found  # type: ignore[no-any-return]  # it has no types of its own


class ArrowStream:
    """Decodes one IPC stream that is cut into pieces anywhere. Copies each byte once.

    Attributes:
        schema: The columns, once their message has come.
    """

    def __init__(self) -> None:
        self._arrow = pyarrow()
        self._waiting = bytearray()
        self._whole = _Whole()
        self._reader: Any = None
        self._ended = False
        self.schema: pa.Schema | None = None

    def feed(self, data: bytes | bytearray | memoryview) -> list[pa.RecordBatch]:
        """Take in the next bytes and give the batches that are complete now.

        Raises:
            CorruptError: If they are no such stream.
        """
        self._waiting += data
        batches, offset = 0, 0
        while not self._ended and (found := _next_message(self._waiting, offset)) is not None:
            end, kind = found
            self._whole.messages.append(bytes(memoryview(self._waiting)[offset:end]))
            offset, batches = end, batches + (kind == _RECORD_BATCH)
            self._ended = kind is None
        del self._waiting[:offset]
        if self._ended and self._waiting:
            raise CorruptError(f"{len(self._waiting)} bytes follow the end of the answer")
        return self._decoded(batches)

    def finish(self) -> None:
        """Say that there is no more.

        Raises:
            CorruptError: If the stream is not complete.
        """
        if not self._ended or self.schema is None:
            raise CorruptError("the answer ended within its rows")

    def _decoded(self, batches: int) -> list[pa.RecordBatch]:
        """Called with so many whole batches at hand, so the reader never meets an end that is not one."""
        if self._reader is None and self._whole.messages:
            with _translated(self._arrow):
                self._reader = self._arrow.ipc.open_stream(self._arrow.PythonFile(self._whole, mode="r"))
                self.schema = self._reader.schema
        with _translated(self._arrow):
            return [self._reader.read_next_batch() for _ in range(batches)]


class _Whole:
    """A file of whole messages, as far as a reader of Arrow looks."""

    def __init__(self) -> None:
        self.messages: list[bytes] = []
        self._offset = 0
        self.closed = False

    def read(self, nbytes: int = -1) -> bytes:
        if not self.messages:
            return b""
        first = self.messages[0]
        part = first[self._offset : self._offset + nbytes] if nbytes >= 0 else first[self._offset :]
        self._offset += len(part)
        if self._offset == len(first):
            del self.messages[0]
            self._offset = 0
        return part

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self.closed = True


@contextmanager
def _translated(arrow: ModuleType) -> Iterator[None]:
    try:
        yield
    except (arrow.ArrowException, OSError, ValueError) as exc:
        raise CorruptError(f"the answer's rows cannot be read: {exc}") from exc


def _next_message(data: bytearray, offset: int) -> tuple[int, int | None] | None:
    """End and kind of the encapsulated message at an offset, ``None`` as kind for the end of the stream.

    Its layout is Arrow's: 0xFFFFFFFF, length of the metadata, the metadata (a flatbuffer ``Message``), the body.
    """
    if len(data) < offset + _PREFIX.size:
        return None
    mark, length = _PREFIX.unpack_from(data, offset)
    if mark != _CONTINUATION or length > _METADATA_BYTES_MAX:
        raise CorruptError("the answer's rows are no Arrow stream")
    start = offset + _PREFIX.size
    if length == 0:
        return start, None
    if len(data) < start + length:
        return None
    kind, body = _message(bytes(memoryview(data)[start : start + length]))
    end = start + length + body
    return (end, kind) if len(data) >= end else None


def _message(metadata: bytes) -> tuple[int, int]:
    """Kind and body length of a message: fields 1 (byte) and 3 (long) of the flatbuffer's root table."""
    try:
        (root,) = struct.unpack_from("<I", metadata, 0)
        (back,) = struct.unpack_from("<i", metadata, root)
        vtable = root - back
        (size,) = struct.unpack_from("<H", metadata, vtable)
        offsets = struct.unpack_from(f"<{max(0, size - 4) // 2}H", metadata, vtable + 4)
        kind_at, body_at = (offsets[field] if field < len(offsets) else 0 for field in (1, 3))
        kind = metadata[root + kind_at] if kind_at else 0
        (body,) = struct.unpack_from("<q", metadata, root + body_at) if body_at else (0,)
    except (struct.error, IndexError) as exc:
        raise CorruptError("the answer's rows are no Arrow stream: a message cannot be read") from exc
    if not 0 <= body <= _BODY_BYTES_MAX:
        raise CorruptError(f"the answer's rows are no Arrow stream: a message of {body} bytes")
    return kind, body


def rows_of(batch: pa.RecordBatch) -> Iterator[dict[str, Any]]:
    """The batch's rows as dicts. Times become ``datetime`` to the microsecond, and whole decimals ``int``."""
    arrow = pyarrow()
    columns = [_values(arrow, column) for column in batch.columns]
    for values in zip(*columns, strict=True):
        yield dict(zip(batch.schema.names, values, strict=True))


def _values(arrow: ModuleType, column: Any) -> list[Any]:
    kind = column.type
    if arrow.types.is_timestamp(kind) and kind.unit == "ns":
        # Else the answer would depend on whether pandas is installed.
        column = column.cast(arrow.timestamp("us", tz=kind.tz), safe=False)
    values: list[Any] = column.to_pylist()
    if arrow.types.is_decimal(kind) and kind.scale == 0:  # a HUGEINT, as sum() gives
        return [int(value) if isinstance(value, Decimal) else value for value in values]
    return values
