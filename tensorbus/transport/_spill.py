"""A replica on disk: one file, whole or not there, with checksums over its bytes. See ``docs/spec/spill.md``.

Blocking; call it off the loop. Bytes go past the page cache where the file system lets them, from and into the pages of
the pool: what is spilled is not wanted in memory, least of all twice.
"""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import xxhash
from blake3 import blake3

from tensorbus.errors import CorruptError, OutOfSpaceError, TensorbusError, UnavailableError
from tensorbus.transport._copy import run_threads
from tensorbus.transport._segments import PAGE_BYTES, page_round

MAGIC: Final = b"TBSPILL\x01"
SEGMENT_BYTES: Final = 4 << 20
HEADER_BYTES_MAX: Final = 1 << 30
THREADS: Final = 2
_DIRECT_BYTES_MIN: Final = 1 << 20
_PREFIX: Final = struct.Struct("<8sII32s")
_SUM: Final = struct.Struct("<Q")
_DIGEST_BYTES: Final = 32
_NO_DIRECT: Final = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpillHeader:
    """What a spill file says of itself.

    Attributes:
        worker: Whose file it is.
        incarnation: The life of that worker that wrote it.
        born: The sequence at which the artifact's life began.
        born_ns: When that was, by the log's clock.
        must: Whether the bytes were promised to be on disk, so that they are not given up for room.
        layout: JSON, see :class:`tensorbus.model.Layout`.
        manifest: JSON, see :class:`tensorbus.model.Manifest`.
        parts: Bytes of each part of the replica; each begins on a page.
    """

    worker: str
    incarnation: str
    tenant: str
    artifact: str
    born: int
    born_ns: int
    must: bool
    layout: str
    manifest: str
    parts: tuple[int, ...]

    def encode(self) -> bytes:
        """As it stands at the beginning of the file."""
        body = json.dumps(asdict(self), separators=(",", ":")).encode()
        return _PREFIX.pack(MAGIC, len(body), 0, blake3(body).digest()) + body

    @property
    def data_bytes(self) -> int:
        """What the parts take in the file."""
        return sum(page_round(nbytes) for nbytes in self.parts)

    @property
    def segments(self) -> tuple[tuple[int, int, int], ...]:
        """Part, offset within it and bytes of each checksummed piece."""
        return tuple(
            (part, offset, min(SEGMENT_BYTES, nbytes - offset))
            for part, nbytes in enumerate(self.parts)
            for offset in range(0, nbytes, SEGMENT_BYTES)
        )


@dataclass(frozen=True, slots=True)
class Spill:
    """A complete spill file.

    Attributes:
        nbytes: Its size.
        data: Where the first part begins.
    """

    path: Path
    header: SpillHeader
    nbytes: int
    data: int


def write_spill(path: Path, header: SpillHeader, parts: Sequence[memoryview], *, stop: threading.Event) -> Spill:
    """Write a replica. The file is there, and safe from a power cut, when this returns; until then nothing is.

    Args:
        parts: The bytes, which nobody changes meanwhile.
        stop: Ends it soon.

    Raises:
        OutOfSpaceError: If the disk is full; UnavailableError: If it cannot be written, or was stopped.
    """
    head = header.encode()
    data = page_round(len(head))
    draft = path.with_name(path.name + ".tmp")
    try:
        with _opened(draft, os.O_RDWR | os.O_CREAT | os.O_TRUNC, direct=header.data_bytes >= _DIRECT_BYTES_MIN) as file:
            sums = _write_parts(file, data, header, parts, stop)
            table = b"".join(_SUM.pack(one) for one in sums)
            trailer = table + blake3(head + table).digest()
            file.write_plain(head, 0)
            file.write_plain(trailer, data + header.data_bytes)
            os.fsync(file.plain)
        os.replace(draft, path)
        _sync_folder(path.parent)
    except OSError as exc:
        raise _translate(exc, path) from exc
    finally:
        with contextlib.suppress(OSError):
            draft.unlink()
    return Spill(path, header, data + header.data_bytes + len(trailer), data)


def read_header(path: Path) -> Spill:
    """What a file says it is; its bytes are not looked at.

    Raises:
        CorruptError: If it is no complete spill file; UnavailableError: If it cannot be read.
    """
    try:
        with path.open("rb") as file:
            prefix = file.read(_PREFIX.size)
            body = file.read(_header_bytes(prefix, path))
            nbytes = os.fstat(file.fileno()).st_size
    except OSError as exc:
        raise _translate(exc, path) from exc
    if blake3(body).digest() != prefix[-_DIGEST_BYTES:]:
        raise CorruptError(f"{path} is not valid: its header is not that of its digest", path=str(path))
    fields = json.loads(body)
    header = SpillHeader(**{**fields, "parts": tuple(fields["parts"])})
    data = page_round(len(prefix) + len(body))
    expected = data + header.data_bytes + _SUM.size * len(header.segments) + _DIGEST_BYTES
    if nbytes != expected:
        raise CorruptError(f"{path} has {nbytes} bytes, and {expected} are expected", path=str(path))
    return Spill(path, header, nbytes, data)


def read_spill(spill: Spill, into: Sequence[memoryview], *, stop: threading.Event) -> None:
    """Read a replica back, and check every byte.

    Args:
        into: Memory for each part, of its size.

    Raises:
        CorruptError: If the bytes are not those that were written; what ``into`` holds then is of no use.
        UnavailableError: If they cannot be read, or it was stopped.
    """
    header = spill.header
    sums = _read_sums(spill)
    starts = _starts(spill.data, header)
    try:
        with _opened(spill.path, os.O_RDONLY, direct=header.data_bytes >= _DIRECT_BYTES_MIN) as file:

            def work(index: int) -> None:
                part, offset, nbytes = header.segments[index]
                piece = into[part][offset : offset + nbytes]
                file.read(piece, starts[part] + offset)
                if xxhash.xxh3_64_intdigest(piece) != sums[index]:
                    raise CorruptError(
                        f"{spill.path} is corrupt: {nbytes} bytes at {offset} of part {part}", path=str(spill.path)
                    )

            _in_threads(work, len(header.segments), stop)
    except OSError as exc:
        raise _translate(exc, spill.path) from exc


@contextlib.contextmanager
def mapped_spill(spill: Spill) -> Iterator[list[memoryview]]:
    """The parts as they lie in the file, read-only and unchecked; they stay readable when the file is removed.

    Raises:
        UnavailableError: If the file cannot be mapped.
    """
    try:
        with spill.path.open("rb") as file:
            whole = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    except (OSError, ValueError) as exc:  # ValueError: it is empty
        cause = exc if isinstance(exc, OSError) else OSError(errno.EIO, str(exc))
        raise _translate(cause, spill.path) from exc
    views = [
        memoryview(whole)[start : start + nbytes]
        for start, nbytes in zip(_starts(spill.data, spill.header), spill.header.parts, strict=True)
    ]
    try:
        yield views
    finally:
        for view in views:
            view.release()
        whole.close()


def check_spill(spill: Spill, *, stop: threading.Event) -> None:
    """Read all of a file and compare it with its checksums, a segment at a time.

    Raises:
        As :func:`read_spill`.
    """
    sums, starts = _read_sums(spill), _starts(spill.data, spill.header)
    try:
        with _opened(spill.path, os.O_RDONLY, direct=True) as file, mmap.mmap(-1, SEGMENT_BYTES) as room:
            for (part, offset, nbytes), expected in zip(spill.header.segments, sums, strict=True):
                if stop.is_set():
                    raise UnavailableError("the worker ends")
                with memoryview(room)[:nbytes] as piece:
                    file.read(piece, starts[part] + offset)
                    found = xxhash.xxh3_64_intdigest(piece)
                if found != expected:
                    raise CorruptError(
                        f"{spill.path} is corrupt: {nbytes} bytes at {offset} of part {part}", path=str(spill.path)
                    )
    except OSError as exc:
        raise _translate(exc, spill.path) from exc


# -- parts of a file ---------------------------------------------------------------------------------------------------


def _header_bytes(prefix: bytes, path: Path) -> int:
    if len(prefix) == _PREFIX.size:
        magic, nbytes, _, _ = _PREFIX.unpack(prefix)
        if magic == MAGIC and nbytes <= HEADER_BYTES_MAX:
            return int(nbytes)
    raise CorruptError(f"{path} is no spill file of version {MAGIC[-1]}", path=str(path))


def _starts(data: int, header: SpillHeader) -> list[int]:
    starts = []
    for nbytes in header.parts:
        starts.append(data)
        data += page_round(nbytes)
    return starts


def _write_parts(
    file: _File, data: int, header: SpillHeader, parts: Sequence[memoryview], stop: threading.Event
) -> list[int]:
    segments, starts = header.segments, _starts(data, header)
    sums = [0] * len(segments)

    def work(index: int) -> None:
        part, offset, nbytes = segments[index]
        piece = parts[part][offset : offset + nbytes]
        sums[index] = xxhash.xxh3_64_intdigest(piece)
        file.write(piece, starts[part] + offset)

    os.posix_fallocate(file.plain, 0, data + header.data_bytes)  # a full disk says so before anything was copied
    _in_threads(work, len(segments), stop)
    return sums


def _read_sums(spill: Spill) -> list[int]:
    """The checksums, which are bound to the header.

    Raises:
        CorruptError: If they are not.
    """
    count = len(spill.header.segments)
    try:
        with spill.path.open("rb") as file:
            head = file.read(_PREFIX.size)
            head += file.read(_header_bytes(head, spill.path))
            file.seek(spill.data + spill.header.data_bytes)
            table, digest = file.read(_SUM.size * count), file.read(_DIGEST_BYTES)
    except OSError as exc:
        raise _translate(exc, spill.path) from exc
    if blake3(head + table).digest() != digest:
        raise CorruptError(f"{spill.path} is corrupt: its table of checksums", path=str(spill.path))
    return [one for (one,) in _SUM.iter_unpack(table)]


def _in_threads(work: Callable[[int], None], count: int, stop: threading.Event) -> None:
    """Do numbered work in a few threads; the first failure ends all."""
    todo, lock = iter(range(count)), threading.Lock()
    failed = threading.Event()

    def some() -> None:
        while not failed.is_set():
            if stop.is_set():
                raise UnavailableError("the worker ends")
            with lock:
                index = next(todo, None)
            if index is None:
                return
            try:
                work(index)
            except BaseException:
                failed.set()
                raise

    run_threads([some] * max(1, min(THREADS, count)))


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _translate(exc: OSError, path: Path) -> TensorbusError:
    if exc.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return OutOfSpaceError(f"no room on the disk of {path}: {exc.strerror}", path=str(path))
    return UnavailableError(f"cannot use {path}: {exc.strerror}", path=str(path))


# -- a file past the page cache ----------------------------------------------------------------------------------------


class _File:
    """An open file, by a descriptor that goes past the page cache if there is one, and a plain one for odd sizes."""

    def __init__(self, plain: int, direct: int | None) -> None:
        self.plain = plain
        self._direct = direct

    def write_plain(self, data: bytes, offset: int) -> None:
        view = memoryview(data)
        while view:
            done = os.pwrite(self.plain, view, offset)
            view, offset = view[done:], offset + done

    def write(self, piece: memoryview, offset: int) -> None:
        while piece:
            fd, nbytes = self._for(len(piece))
            try:
                done = os.pwrite(fd, piece[:nbytes], offset)
            except OSError as exc:
                self._no_direct(fd, exc)
                continue
            piece, offset = piece[done:], offset + done

    def read(self, piece: memoryview, offset: int) -> None:
        while piece:
            fd, nbytes = self._for(len(piece))
            try:
                done = os.preadv(fd, [piece[:nbytes]], offset)
            except OSError as exc:
                self._no_direct(fd, exc)
                continue
            if done == 0:
                raise CorruptError("a spill file ends early")
            piece, offset = piece[done:], offset + done

    def _for(self, nbytes: int) -> tuple[int, int]:
        """The descriptor for so many bytes, and how many of them it takes: whole pages, past the cache."""
        if self._direct is None or nbytes < PAGE_BYTES:
            return self.plain, nbytes
        return self._direct, nbytes // PAGE_BYTES * PAGE_BYTES

    def _no_direct(self, fd: int, exc: OSError) -> None:
        """The file system took the flag and not the call: go through the cache. Anything else is an error."""
        if fd == self.plain or exc.errno not in _NO_DIRECT:
            raise exc
        self._direct = None


@contextlib.contextmanager
def _opened(path: Path, flags: int, *, direct: bool) -> Iterator[_File]:
    plain = os.open(path, flags | os.O_CLOEXEC, 0o600)
    past: int | None = None
    try:
        if direct:
            with contextlib.suppress(OSError):  # tmpfs, say, has none
                past = os.open(path, (flags & os.O_ACCMODE) | os.O_DIRECT | os.O_CLOEXEC)
        yield _File(plain, past)
    finally:
        os.close(plain)
        if past is not None:
            os.close(past)
