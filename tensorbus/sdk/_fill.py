"""Copying sources into memory, with digests on the way: by all processors, in pieces between which it can be given up.

Digests are of the destination, so they speak of what is stored even if the source changes meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from mmap import mmap
from typing import Final, TypeAlias

from blake3 import blake3

from tensorbus.errors import CancelledError
from tensorbus.sdk._sources import Reader, Source
from tensorbus.sdk._threads import share_out
from tensorbus.transport import default_threads, populate

Progress: TypeAlias = Callable[[int, int], None]

PIECE_BYTES: Final = 16 << 20
_COPY_BYTES: Final = 128 << 20
"""The most that one thread copies in one go from memory: the C library streams past the caches from about there on."""
_CHUNK_BYTES: Final = 1 << 20
_INLINE_BYTES: Final = 4 << 20


@dataclass(slots=True)
class _Piece:
    """A part of one source: how it is read from ``start`` on, and where it goes. Without a reader it is the whole."""

    number: int
    source: Source
    reader: Reader | None
    start: int
    offset: int
    room: memoryview

    @property
    def whole(self) -> bool:
        return len(self.room) == self.source.nbytes

    @property
    def last(self) -> bool:
        return self.start + len(self.room) == self.source.nbytes


class _Told:
    """What was said of progress: piece after piece, by one thread at a time, and not of every small tensor."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self.total = total
        self._progress = progress
        self._lock = threading.Lock()
        self._done = 0
        self._said = 0

    def more(self, nbytes: int) -> None:
        if self._progress is None:
            return
        with self._lock:
            self._done += nbytes
            if self._done - self._said >= PIECE_BYTES or self._done == self.total:
                self._said = self._done
                self._progress(self._done, self.total)


class Filling:
    """One copy of several sources into memory.

    Args:
        memory: Where to.
        warm: Whether its pages are there; else they are asked for, piece by piece.
        digests: Whether to take digests.
        stop: Is looked at before each piece: of 16 MiB, and where plain memory is copied of up to 128 MiB.
        threads: How many to use; as many as there are processors when ``None``.
    """

    def __init__(
        self, memory: mmap, *, warm: bool, digests: bool, stop: threading.Event, threads: int | None = None
    ) -> None:
        self._memory = memory
        self._warm = warm
        self._digests = digests
        self._stop = stop
        self._threads = threads or default_threads()
        self._results: dict[int, bytes | None] = {}
        self._hasher = blake3()
        self._told = _Told(0, None)

    def run(self, places: list[tuple[Source, int]], *, progress: Progress | None = None) -> list[bytes | None]:
        """Copy each source to its offset. Blocks, mostly without the interpreter's lock; call it off the loop.

        Returns:
            Per source the 32 bytes of BLAKE3 of the copied bytes, or ``None`` without ``digests``.

        Raises:
            CancelledError: If ``stop`` was set. OutOfSpaceError: If the machine has no memory for it.
            CorruptError: If a file was cut short.
        """
        self._told = _Told(sum(source.nbytes for source, _ in places), progress)
        if self._told.total <= _INLINE_BYTES:
            self._threads = 1
        for batch in self._batches(places):
            self._copy(batch)
        return [self._results.get(number) for number in range(len(places))]

    def _pieces(self, places: Iterable[tuple[Source, int]]) -> Iterator[_Piece]:
        memory = memoryview(self._memory)
        for number, (source, offset) in enumerate(places):
            reader, nbytes = source.reader(), source.nbytes
            step = max(nbytes, 1)
            if reader is not None:
                share = PIECE_BYTES if source.waits else min(_COPY_BYTES, -(-nbytes // self._threads))
                step = max(PIECE_BYTES, share)
            for start in range(0, max(nbytes, 1), step):
                room = memory[offset + start : offset + min(start + step, nbytes)]
                yield _Piece(number, source, reader, start, offset + start, room)

    def _batches(self, places: Iterable[tuple[Source, int]]) -> Iterator[list[_Piece]]:
        """What the threads copy before they meet to hash what is large; what is large and scattered comes by itself."""
        batch: list[_Piece] = []
        size = 0
        for piece in self._pieces(places):
            alone = piece.reader is None and len(piece.room) > PIECE_BYTES
            if batch and (alone or size + len(piece.room) > self._threads * _COPY_BYTES):
                yield batch
                batch, size = [], 0
            batch.append(piece)
            size += len(piece.room)
        if batch:
            yield batch

    def _copy(self, batch: list[_Piece]) -> None:
        self._go_on()
        (first, *more) = batch
        if first.reader is None and not more and len(first.room) > PIECE_BYTES:
            self._copy_scattered(first)
            return
        if not self._warm:
            self._populate(batch)
        share_out((partial(self._copy_one, piece) for piece in batch), threads=self._threads)
        for piece in batch if self._digests else ():
            if not piece.whole:
                self._hash(piece.number, piece.room, first=not piece.start, last=piece.last)

    def _populate(self, batch: list[_Piece]) -> None:
        begin = min(piece.offset for piece in batch)
        end = max(piece.offset + len(piece.room) for piece in batch)
        parts = range(begin, end, PIECE_BYTES)
        share_out((partial(self._touch, at, min(PIECE_BYTES, end - at)) for at in parts), threads=self._threads)

    def _touch(self, at: int, nbytes: int) -> None:
        self._go_on()
        populate(self._memory, at, nbytes)

    def _copy_one(self, piece: _Piece) -> None:
        """Copy a piece; one that is a whole source is hashed while its bytes are in the cache."""
        self._go_on()
        room = piece.room
        if piece.reader is None:
            piece.source.write_into(room)
            if self._digests:
                self._results[piece.number] = blake3(room).digest()
        elif self._digests and piece.whole:
            hasher = blake3()
            for start in range(0, len(room), _CHUNK_BYTES):
                self._go_on()
                chunk = room[start : start + _CHUNK_BYTES]
                piece.reader(start, chunk)
                hasher.update(chunk)
            self._results[piece.number] = hasher.digest()
        else:
            piece.reader(piece.start, room)
        self._told.more(len(room))

    def _copy_scattered(self, piece: _Piece) -> None:
        """Gather what does not lie in memory as it is to be stored."""
        done = 0
        for size, write in piece.source.blocks(PIECE_BYTES):
            self._go_on()
            room = piece.room[done : done + size]
            if not self._warm:
                populate(self._memory, piece.offset + done, size)
            write(room)
            if self._digests:
                self._hash(piece.number, room, first=not done, last=done + size == len(piece.room))
            done += size
            self._told.more(size)

    def _hash(self, number: int, room: memoryview, *, first: bool, last: bool) -> None:
        """Hash a large source piece after piece; there is one at a time."""
        if first:
            self._hasher = blake3(max_threads=self._threads)
        for start in range(0, len(room), PIECE_BYTES):
            self._go_on()
            self._hasher.update(room[start : start + PIECE_BYTES])
        if last:
            self._results[number] = self._hasher.digest()

    def _go_on(self) -> None:
        if self._stop.is_set():
            raise CancelledError("the copy was given up")
