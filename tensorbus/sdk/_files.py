"""safetensors files as sources of bytes, and written. Needs neither torch nor the safetensors package.

Files are read, never mapped: a file that somebody truncates while it is mapped kills whoever touches it.
"""

from __future__ import annotations

import errno
import json
import os
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np

from tensorbus.errors import (
    CorruptError,
    DeniedError,
    InvalidArgumentError,
    NotFoundError,
    OutOfSpaceError,
    TensorbusError,
    UnavailableError,
)
from tensorbus.ids import check_tensor_name
from tensorbus.model import DType, TensorSpec, dtype
from tensorbus.sdk._plain import Buffer, a_type
from tensorbus.sdk._sources import Reader, Source

HEADER_BYTES_MAX: Final = 100_000_000
INDEX_BYTES_MAX: Final = 100_000_000
SUFFIX: Final = ".safetensors"
INDEX_SUFFIX: Final = ".safetensors.index.json"
FILE_NAME: Final = "model.safetensors"
WRITE_BYTES: Final = 16 * 1024 * 1024
_METADATA: Final = "__metadata__"
_ACCEPTED: Final = "there are a .safetensors file, and a directory of them, with or without a *.safetensors.index.json"


class _File:
    """A file that is open for reading as long as a source needs it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._fd).atexit = False
        self.nbytes = os.fstat(self._fd).st_size

    def read_into(self, at: int, room: memoryview) -> None:
        """Fill a buffer from an offset on.

        Raises:
            CorruptError: If the file ends before; UnavailableError: If it cannot be read. Both name it.
        """
        done = 0
        try:
            while done < len(room):
                count = os.preadv(self._fd, [room[done:]], at + done)
                if not count:
                    raise _bad(
                        self.path, f"it was cut short while it was read: {len(room)} bytes at {at} are not there"
                    )
                done += count
        except OSError as exc:
            raise _translated(exc, self.path) from exc


class FileSource(Source):
    """A tensor in a safetensors file; its bytes are read when they are wanted."""

    __slots__ = ("_at", "_file")
    waits: ClassVar[bool] = True

    def __init__(self, name: str, kind: str, shape: tuple[int, ...], file: _File, at: int) -> None:
        no_ties: Hashable | None = None
        super().__init__(name, kind, shape, no_ties)
        self._file = file
        self._at = at

    def view(self) -> None:
        """There is none: the bytes are not in memory."""

    def reader(self) -> Reader:
        file, first = self._file, self._at
        return lambda start, dst: file.read_into(first + start, dst)

    def blocks(self, nbytes_max: int) -> Iterator[tuple[int, Callable[[memoryview], None]]]:
        for start in range(0, self.nbytes, max(nbytes_max, 1)):
            read = partial(self._file.read_into, self._at + start)
            yield min(nbytes_max, self.nbytes - start), read


def open_files(path: str | os.PathLike[str]) -> list[Source]:
    """The tensors of a safetensors file or directory, in the order of the bytes of their names. Reads only headers.

    Args:
        path: A file, or a directory: the shards that its ``*.safetensors.index.json`` names, else all its
            ``*.safetensors``.

    Raises:
        NotFoundError: If it or a shard does not exist; DeniedError: If it may not be read.
        InvalidArgumentError: If it is of another kind, has no tensor, has one that cannot be taken or one name twice.
        CorruptError: If a header or an index does not hold; it names the file.
    """
    where = path_of(path)
    try:
        shards = _shards(where)
        sources: dict[str, Source] = {}
        homes: dict[str, Path] = {}
        for shard in shards:
            for source in _open_file(shard):
                if source.name in homes:
                    both = f"{homes[source.name].name} and {shard.name}"
                    raise InvalidArgumentError(f"tensor {source.name[:80]!r} is in both {both}", path=str(where))
                sources[source.name], homes[source.name] = source, shard
        _check_index(where, homes)
    except OSError as exc:
        raise _translated(exc, where) from exc
    if not sources:
        raise InvalidArgumentError(f"{where} has no tensors", path=str(where))
    return [sources[name] for name in sorted(sources)]


def path_of(path: object) -> Path:
    """The path that a caller gave.

    Raises:
        InvalidArgumentError: If it is none: empty, with a zero byte, or of bytes.
    """
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else path
    if not isinstance(text, str):
        raise InvalidArgumentError(f"a path is a str or a pathlib.Path, not {a_type(path)}")
    if not text or "\0" in text:
        raise InvalidArgumentError(f"{text!r:.80} is no path: {'it has a zero byte' if text else 'it is empty'}")
    return Path(text)


def save_safetensors(
    path: str | os.PathLike[str],
    tensors: Sequence[tuple[TensorSpec, Buffer]],
    *,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Write an artifact's tensors to one safetensors file, in order of item size and name, whole or not at all.

    Args:
        path: A file that ends in ``.safetensors``, or a directory that gets a ``model.safetensors``; made if missing.
        tensors: Each tensor and a buffer of exactly its bytes.
        progress: Called as ``progress(bytes_done, bytes_total)``.

    Returns:
        The file. It and its name are on disk.

    Raises:
        InvalidArgumentError: If the format has no such dtype or name, or the path cannot be; it names the tensor.
        OutOfSpaceError: If the disk is full; DeniedError: If it may not be written.
    """
    where = path_of(path)
    ordered = sorted(tensors, key=lambda item: (-dtype(item[0].dtype).itemsize, item[0].name))
    header = _header_of([spec for spec, _ in ordered])
    try:
        if where.suffix != SUFFIX:
            where.mkdir(parents=True, exist_ok=True)
            where = where / FILE_NAME
        else:
            where.parent.mkdir(parents=True, exist_ok=True)
        _write_whole(where, header, ordered, progress or (lambda _done, _total: None))
    except OSError as exc:
        raise _translated(exc, where) from exc
    return where


def _shards(where: Path) -> list[Path]:
    """The files to read."""
    if not where.exists():
        raise NotFoundError(f"there is no file or directory {where}", path=str(where))
    if where.is_file():
        if where.suffix != SUFFIX:
            raise InvalidArgumentError(f"{where} is not taken; {_ACCEPTED}", path=str(where))
        return [where]
    named = sorted(set(_weight_map(where).values()))
    found = [where / name for name in named] or sorted(where.glob(f"*{SUFFIX}"))
    if not found:
        raise InvalidArgumentError(f"{where} has no safetensors files; {_ACCEPTED}", path=str(where))
    for shard in found:
        if not shard.exists():
            raise NotFoundError(f"{where}: the index names {shard.name}, which is not there", path=str(shard))
    return found


def _check_index(where: Path, homes: dict[str, Path]) -> None:
    """See that a directory's index, if it has one, and its shards name the same tensors."""
    shards = _weight_map(where)
    for name, shard_name in shards.items():
        if name not in homes or homes[name].name != shard_name:
            raise _bad(where, f"the index says that {name[:80]!r} is in {shard_name}, it is not")
    for name in homes if shards else ():
        if name not in shards:
            raise _bad(where, f"{homes[name].name} has {name[:80]!r}, of which the index says nothing")


def _weight_map(where: Path) -> dict[str, str]:
    """Tensor to shard as a directory's index says; empty without one."""
    indexes = sorted(where.glob(f"*{INDEX_SUFFIX}")) if where.is_dir() else []
    if not indexes:
        return {}
    index = indexes[0]
    if len(indexes) > 1:
        names = ", ".join(found.name for found in indexes[:5])
        raise InvalidArgumentError(f"{where} has several indexes ({names}); give the shards a directory of their own")
    if index.stat().st_size > INDEX_BYTES_MAX:
        raise _bad(index, f"an index has at most {INDEX_BYTES_MAX} bytes")
    body = _json(index.read_bytes(), index, what="it")
    shards = body.get("weight_map") if isinstance(body, dict) else None
    if shards == {}:
        raise _bad(index, "its weight_map is empty")
    if not isinstance(shards, dict) or not all(_plain_file_name(name) for name in shards.values()):
        raise _bad(index, "it has no weight_map from tensors to files beside it")
    return shards


def _plain_file_name(name: object) -> bool:
    return isinstance(name, str) and name.endswith(SUFFIX) and os.sep not in name and "\0" not in name


def _open_file(path: Path) -> list[FileSource]:
    file = _File(path)
    if file.nbytes < 8:
        raise _bad(path, f"it has {file.nbytes} bytes, too few for a safetensors file")
    length = int.from_bytes(_read(file, 0, 8), "little")
    if length > HEADER_BYTES_MAX:
        raise _bad(path, f"its header would be {length} bytes, the most is {HEADER_BYTES_MAX}")
    if 8 + length > file.nbytes:
        raise _bad(path, f"it is cut off: a header of {length} bytes, {file.nbytes} in all")
    header = _json(_read(file, 8, length), path, what="its header")
    if not isinstance(header, dict):
        raise _bad(path, "its header is not a JSON object")
    _check_metadata(path, header.pop(_METADATA, {}))
    return _sources(file, header, first=8 + length)


def _read(file: _File, at: int, nbytes: int) -> bytes:
    room = bytearray(nbytes)
    file.read_into(at, memoryview(room))
    return bytes(room)


def _check_metadata(path: Path, said: object) -> None:
    if not isinstance(said, dict) or not all(isinstance(value, str) for value in said.values()):
        raise _bad(path, f"its {_METADATA} is not a map of texts")


def _sources(file: _File, header: dict[str, object], *, first: int) -> list[FileSource]:
    """One per entry; together they must cover the body, which begins at ``first``, without a gap or overlap."""
    path, room, out = file.path, file.nbytes - first, []
    end = 0
    entries = (_entry(path, name, value) for name, value in header.items())
    for spec, begin, stop in sorted(entries, key=lambda entry: entry[1:]):
        what = f"tensor {spec.name[:80]!r}"
        if begin != end:
            raise _bad(path, f"{what} at {begin} {'overlaps' if begin < end else 'leaves a gap to'} the one before it")
        if stop > room:
            raise _bad(path, f"it is cut off: {what} ends at {stop} of {room} bytes")
        if stop - begin != spec.nbytes:
            raise _bad(path, f"{what} has {stop - begin} bytes, {spec.dtype} {spec.shape} needs {spec.nbytes}")
        out.append(FileSource(spec.name, spec.dtype, spec.shape, file, first + begin))
        end = stop
    if end != room:
        raise _bad(path, f"there are {room - end} bytes after the last tensor")
    return out


def _entry(path: Path, name: str, value: object) -> tuple[TensorSpec, int, int]:
    """The tensor, and where its bytes begin and end."""
    what = f"the entry of tensor {name[:80]!r}"
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise _bad(path, f"{what} is not dtype, shape and data_offsets")
    kind, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(kind, str) or not _whole_numbers(shape) or not _whole_numbers(offsets) or len(offsets) != 2:
        raise _bad(path, f"{what} has a wrong dtype, shape or data_offsets")
    known = _element(path, name, kind)
    if known.packed > 1:
        if not shape or shape[-1] % known.packed:
            raise _bad(path, f"{what} of shape {shape} does not fill whole bytes")
        shape = [*shape[:-1], shape[-1] // known.packed]
    try:
        return TensorSpec(name, known.name, tuple(shape)), offsets[0], offsets[1]
    except InvalidArgumentError as exc:
        raise _bad(path, str(exc)) from exc


def _element(path: Path, name: str, text: str) -> DType:
    try:
        known = dtype(text)
    except InvalidArgumentError as exc:
        raise InvalidArgumentError(f"{path}: tensor {name[:80]!r} cannot be taken: {exc}", tensor=name[:1024]) from exc
    if known.safetensors != text:
        raise _bad(path, f"tensor {name[:80]!r} has the dtype {text[:40]!r}, which is none of the format's")
    return known


def _bad(path: Path, what: str) -> CorruptError:
    return CorruptError(f"{path}: {what}", path=str(path))


def _whole_numbers(value: object) -> bool:
    return isinstance(value, list) and all(type(number) is int and number >= 0 for number in value)


def _json(data: bytes, path: Path, *, what: str) -> object:
    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as exc:
        raise _bad(path, f"{what} is not valid JSON: {exc}") from exc


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name comes twice")
    return found


def _header_of(specs: Sequence[TensorSpec]) -> bytes:
    entries: dict[str, object] = {}
    at = 0
    for spec in specs:
        known = dtype(spec.dtype)
        why = None
        if known.safetensors is None or (known.packed > 1 and not spec.shape):
            why = f"the format has no {known}" + (" without dimensions" if known.safetensors else "")
        elif check_tensor_name(spec.name) == _METADATA or spec.name in entries:
            why = "the format keeps that name for itself" if spec.name == _METADATA else "its name comes twice"
        if why is not None:
            raise InvalidArgumentError(f"tensor {spec.name[:80]!r} cannot be saved as safetensors: {why}")
        shape = [*spec.shape[:-1], spec.shape[-1] * known.packed] if known.packed > 1 else list(spec.shape)
        end = at + spec.nbytes
        entries[spec.name] = {"dtype": known.safetensors, "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
    text += b" " * (-len(text) % 8)  # so that the first tensor is aligned
    if len(text) > HEADER_BYTES_MAX:
        raise InvalidArgumentError(f"the header would be {len(text)} bytes, the format's most is {HEADER_BYTES_MAX}")
    return len(text).to_bytes(8, "little") + text


def _write_whole(
    where: Path,
    header: bytes,
    tensors: Sequence[tuple[TensorSpec, Buffer]],
    progress: Callable[[int, int], None],
) -> None:
    """Under another name first, so that nobody sees a part of it, also after a crash."""
    done, total = 0, sum(spec.nbytes for spec, _ in tensors)
    hidden = where.with_name(f".{where.name}.{os.getpid()}-{threading.get_native_id()}.part")
    try:
        with hidden.open("wb", buffering=0) as file:
            _write(file.fileno(), memoryview(header))
            for spec, buffer in tensors:
                data = np.frombuffer(buffer, np.uint8, spec.nbytes).data if spec.nbytes else memoryview(b"")
                for start in range(0, spec.nbytes, WRITE_BYTES):
                    _write(file.fileno(), data[start : start + WRITE_BYTES])
                    progress(done + min(start + WRITE_BYTES, spec.nbytes), total)
                done += spec.nbytes
            os.fsync(file.fileno())
        hidden.replace(where)
    except BaseException:
        with suppress(OSError):
            hidden.unlink()
        raise
    folder = os.open(where.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _write(fd: int, data: memoryview) -> None:
    while data:
        data = data[os.write(fd, data[:WRITE_BYTES]) :]


def _translated(exc: OSError, where: Path) -> TensorbusError:
    path = str(exc.filename or where)
    said = f"{path}: {exc.strerror or exc}"
    match exc:
        case FileNotFoundError():
            return NotFoundError(said, path=path)
        case PermissionError():
            return DeniedError(said, path=path)
        case FileExistsError() | NotADirectoryError() | IsADirectoryError():
            return InvalidArgumentError(said, path=path)
    if exc.errno in {errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL}:
        return InvalidArgumentError(said[:1024], path=path[:1024])
    if exc.errno in {errno.ENOSPC, errno.EDQUOT}:
        return OutOfSpaceError(said, path=path)
    return UnavailableError(said, path=path)
