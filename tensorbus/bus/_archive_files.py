"""The archive's folder: files that are there whole or not at all, on a local disk or any store that fsspec reaches."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import PurePosixPath
from typing import Any, Final
from urllib.parse import urlsplit

from tensorbus.errors import (
    DeniedError,
    InvalidArgumentError,
    NotFoundError,
    OutOfSpaceError,
    TensorbusError,
    UnavailableError,
)

PIECE_BYTES: Final = 1 << 20
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_PARTIAL: Final = ".partial"
_MODE: Final = 0o640


class Files:
    """Named bodies below one URL.

    Args:
        url: A folder, or a URL such as ``s3://bucket/path`` or ``memory://name``.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        try:
            import fsspec
        except ModuleNotFoundError as exc:
            raise InvalidArgumentError("the archive needs fsspec: pip install 'tensorbus[store]'") from exc
        try:
            self._fs, self._root = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as exc:
            raise InvalidArgumentError(f"the archive {_shown(url)} cannot be opened: {exc}", url=_shown(url)) from exc
        self.local = "file" in _protocols(self._fs)

    def names(self, folder: str) -> list[str]:
        """Names of the files in a folder, in order; an absent folder is empty."""
        with self._errors(folder):
            try:
                found = self._fs.ls(self._path(folder), detail=False, refresh=True)
            except FileNotFoundError:
                return []
        names = sorted(PurePosixPath(str(path)).name for path in found)
        return [name for name in names if not name.endswith(_PARTIAL)]

    def write(self, name: str, pieces: Iterable[bytes]) -> None:
        """Write a file, replacing one of that name. Until it is whole nobody sees it.

        Raises:
            OutOfSpaceError: If there is no room; nothing is left behind.
            DeniedError, UnavailableError: If it cannot be written.
        """
        path = self._path(name)
        with self._errors(name):
            self._fs.makedirs(str(PurePosixPath(path).parent), exist_ok=True)
            if self.local:
                _write_whole(path, pieces)
            else:
                self._fs.pipe_file(path, b"".join(pieces))  # object stores show an object once it is complete

    def read(self, name: str) -> Iterator[bytes]:
        """A file's bytes in pieces of 1 MiB.

        Raises:
            NotFoundError: If it is not there.
        """
        with self._errors(name), self._fs.open(self._path(name), "rb") as file:
            while piece := file.read(PIECE_BYTES):
                yield piece

    def exists(self, name: str) -> bool:
        with self._errors(name):
            return bool(self._fs.exists(self._path(name)))

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}"

    @contextlib.contextmanager
    def _errors(self, name: str) -> Iterator[None]:
        where = f"{_shown(self.url)}/{name}"
        try:
            yield
        except FileNotFoundError as exc:
            raise NotFoundError(f"the archive has no file {where}", file=name) from exc
        except PermissionError as exc:
            raise DeniedError(f"the archive refuses {where}: {exc.strerror or exc}", file=name) from exc
        except OSError as exc:
            if exc.errno in _FULL:
                raise OutOfSpaceError(f"there is no room for {where}", file=name) from exc
            raise UnavailableError(f"the archive does not give {where}: {exc}", file=name) from exc
        except TensorbusError:
            raise
        except Exception as exc:
            if self.local:
                raise
            # Each kind of store has errors of its own, such as those of its credentials.
            raise UnavailableError(f"the archive does not give {where}: {exc!r}", file=name) from exc


def _protocols(fs: Any) -> tuple[str, ...]:
    return (fs.protocol,) if isinstance(fs.protocol, str) else tuple(fs.protocol)


def _write_whole(path: str, pieces: Iterable[bytes]) -> None:
    """Write to another name, sync, rename, and sync the folders: the new name itself must survive a power cut."""
    folder = os.path.dirname(path)
    _remove_left(folder)
    handle, partial = tempfile.mkstemp(dir=folder, suffix=_PARTIAL)
    try:
        with open(handle, "wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            for piece in pieces:
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
            os.fchmod(file.fileno(), _MODE)
            os.rename(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(partial)
        raise
    _sync_folder(folder)
    _sync_folder(os.path.dirname(folder))


def _remove_left(folder: str) -> None:
    """Remove what a writer that was killed has left: nobody holds its lock any more."""
    for entry in os.scandir(folder):
        if not entry.name.endswith(_PARTIAL):
            continue
        with contextlib.suppress(OSError), open(entry.path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(file.fileno()).st_size:  # an empty one's writer may be about to take the lock
                os.unlink(entry.path)


def _sync_folder(path: str) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _shown(url: str) -> str:
    parts = urlsplit(url)
    return url.replace(f"{parts.username}:{parts.password}@", "") if parts.password else url
