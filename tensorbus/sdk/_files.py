"""safetensors files as sources of bytes, read in place, and written. Needs neither torch nor the safetensors package.

A file maps read-only; whoever truncates it while it is read breaks the reader, as with every mapped file.
"""

from __future__ import annotations

import json
import mmap
import os
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

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
from tensorbus.sdk._plain import Buffer
from tensorbus.sdk._sources import Source

HEADER_BYTES_MAX: Final = 100_000_000
INDEX_BYTES_MAX: Final = 100_000_000
SUFFIX: Final = ".safetensors"
INDEX_SUFFIX: Final = ".safetensors.index.json"
FILE_NAME: Final = "model.safetensors"
WRITE_BYTES: Final = 16 * 1024 * 1024
_METADATA: Final = "__metadata__"
_ACCEPTED: Final = "there are a .safetensors file, and a directory of them, with or without a *.safetensors.index.json"


class FileSource(Source):
    """A tensor in a mapped safetensors file."""

    __slots__ = ("_bytes",)

    def __init__(self, name: str, kind: str, shape: tuple[int, ...], octets: memoryview) -> None:
        no_ties: Hashable | None = None
        super().__init__(name, kind, shape, no_ties)
        self._bytes = octets

    def view(self) -> memoryview:
        return self._bytes

    def _blocks(self, nbytes_max: int) -> Iterator[tuple[int, Callable[[memoryview], None]]]:
        yield from ()  # its bytes are always in one piece


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
    where = Path(path)
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
        for name, shard_name in _weight_map(where).items():
            if name not in homes or homes[name].name != shard_name:
                raise _bad(where, f"the index says that {name[:80]!r} is in {shard_name}, it is not")
    except OSError as exc:
        raise _translated(exc, where) from exc
    if not sources:
        raise InvalidArgumentError(f"{where} has no tensors", path=str(where))
    return [sources[name] for name in sorted(sources)]


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
    where = Path(path)
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
    body = _json(index.read_bytes(), index)
    shards = body.get("weight_map") if isinstance(body, dict) else None
    if not isinstance(shards, dict) or not all(_plain_file_name(name) for name in shards.values()):
        raise _bad(index, "it has no weight_map from tensors to files beside it")
    return shards


def _plain_file_name(name: object) -> bool:
    return isinstance(name, str) and name.endswith(SUFFIX) and os.sep not in name and "\0" not in name


def _open_file(path: Path) -> list[FileSource]:
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        if size < 8:
            raise _bad(path, f"it has {size} bytes, too few for a safetensors file")
        octets = memoryview(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ))
    length = int.from_bytes(octets[:8], "little")
    if length > HEADER_BYTES_MAX:
        raise _bad(path, f"its header would be {length} bytes, the most is {HEADER_BYTES_MAX}")
    if 8 + length > size:
        raise _bad(path, f"it is cut off: a header of {length} bytes, {size} in all")
    header = _json(bytes(octets[8 : 8 + length]), path)
    if not isinstance(header, dict):
        raise _bad(path, "its header is not a JSON object")
    header.pop(_METADATA, None)
    return _sources(path, header, octets[8 + length :])


def _sources(path: Path, header: dict[str, object], body: memoryview) -> list[FileSource]:
    """One per entry; together they must cover the body without a gap or overlap."""
    out = []
    end = 0
    entries = (_entry(path, name, value) for name, value in header.items())
    for spec, begin, stop in sorted(entries, key=lambda entry: entry[1:]):
        what = f"tensor {spec.name[:80]!r}"
        if begin != end:
            raise _bad(path, f"{what} at {begin} {'overlaps' if begin < end else 'leaves a gap to'} the one before it")
        if stop > len(body):
            raise _bad(path, f"it is cut off: {what} ends at {stop} of {len(body)} bytes")
        if stop - begin != spec.nbytes:
            raise _bad(path, f"{what} has {stop - begin} bytes, {spec.dtype} {spec.shape} needs {spec.nbytes}")
        out.append(FileSource(spec.name, spec.dtype, spec.shape, body[begin:stop]))
        end = stop
    if end != len(body):
        raise _bad(path, f"there are {len(body) - end} bytes after the last tensor")
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


def _json(data: bytes, path: Path) -> object:
    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as exc:
        raise _bad(path, f"its header is not valid JSON: {exc}") from exc


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
    if exc.errno in {28, 122}:  # ENOSPC, EDQUOT
        return OutOfSpaceError(said, path=path)
    return UnavailableError(said, path=path)
