"""The DuckDB file below the global store: how it is opened, and its errors in our words."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import duckdb

from tensorbus.errors import (
    ConflictError,
    CorruptError,
    DeadlineExceededError,
    InvalidArgumentError,
    NotFoundError,
    OutOfSpaceError,
    TensorbusError,
    UnavailableError,
)

Params = Sequence[object] | Mapping[str, object]
REBUILD: Final = "run `tensorbus store rebuild`"
_FULL: Final = re.compile(r"No space left|File too large|[Dd]isk quota|Out of Memory", re.ASCII)
_BROKEN: Final = re.compile(
    r"not a valid DuckDB|[Cc]orrupt|checksum|version number|[Dd]eserializ|replaying WAL", re.ASCII
)
_MAGIC: Final = b"DUCK"
_MAGIC_AT: Final = 8
_LOCKED: Final = re.compile(r"Could not set lock on file.*?held in (.*?)\.? See", re.ASCII | re.DOTALL)


def connect(path: Path, *, memory_bytes: int, threads: int | None) -> duckdb.DuckDBPyConnection:
    """Open the file, creating it if need be, so that no statement can reach anything but it.

    Raises:
        ConflictError: If another process has it open; CorruptError: If it is no sound database.
        OutOfSpaceError: If the disk is full; UnavailableError: If it cannot be opened otherwise.
    """
    config: dict[str, str | bool | int | float | list[str]] = {
        "memory_limit": f"{max(memory_bytes // 1_000_000, 16)}MB",
        "temp_directory": "",  # a query that needs more memory than it may have fails, rather than fill the disk
        "checkpoint_threshold": "64MB",
        "python_enable_replacements": False,  # a name in SQL is a table, never a variable of this program
        "autoinstall_known_extensions": False,
        "autoload_known_extensions": False,
    }
    if threads is not None:
        config["threads"] = threads
    with file_errors(path):
        conn = duckdb.connect(str(path), config=config)
        conn.execute("SET enable_external_access = false")
        conn.execute("SET lock_configuration = true")
        return conn


def check_database(path: Path) -> None:
    """See that a file is there and is a DuckDB database, before DuckDB would make one of it.

    Raises:
        NotFoundError: If there is no file; InvalidArgumentError: If it is something else.
    """
    try:
        with path.open("rb") as file:
            head = file.read(_MAGIC_AT + len(_MAGIC))
    except FileNotFoundError as exc:
        raise NotFoundError(f"there is no file {path}", path=str(path)) from exc
    except OSError as exc:
        raise InvalidArgumentError(f"{path} cannot be read: {exc.strerror or exc}", path=str(path)) from exc
    if head[_MAGIC_AT:] != _MAGIC:
        raise InvalidArgumentError(f"{path} is no DuckDB database", path=str(path))


def one(cursor: duckdb.DuckDBPyConnection, sql: str, params: Params | None = None) -> tuple[Any, ...] | None:
    """The first row of an answer, all of which is fetched: an unfinished one blocks the connection."""
    rows = cursor.execute(sql, params).fetchall()
    return rows[0] if rows else None


@contextmanager
def file_errors(path: Path) -> Iterator[None]:
    """Translate what DuckDB and the system say about the file, when it is opened, written or deleted."""
    try:
        yield
    except (duckdb.Error, OSError) as exc:
        raise _about_file(exc, path) from exc


def _about_file(exc: duckdb.Error | OSError, path: Path) -> TensorbusError:
    text, where = str(exc), str(path)
    if locked := _LOCKED.search(text):
        return ConflictError(f"the store {where} is open in another process: {locked[1]}", path=where, holder=locked[1])
    if isinstance(exc, duckdb.OutOfMemoryException) or _FULL.search(text):
        return OutOfSpaceError(f"the store {where} cannot be written: {_first_line(text)}", path=where)
    if isinstance(exc, (duckdb.InternalException, duckdb.SerializationException)) or _BROKEN.search(text):
        return CorruptError(f"the store {where} is damaged, {REBUILD}: {_first_line(text)}", path=where)
    return UnavailableError(f"the store {where} cannot be used: {_first_line(text)}", path=where)


@contextmanager
def query_errors(seconds: float) -> Iterator[None]:
    """Translate what DuckDB says about a caller's query. Arrow's reader passes it on as an ``OSError``."""
    try:
        yield
    except (duckdb.Error, OSError, RuntimeError) as exc:
        raise _about_query(exc, seconds) from exc


def _about_query(exc: Exception, seconds: float) -> TensorbusError:
    text = str(exc)
    if isinstance(exc, duckdb.InterruptException) or text.startswith("INTERRUPT"):
        return DeadlineExceededError(f"the query did not finish within {seconds} s", timeout_s=seconds)
    if isinstance(exc, duckdb.OutOfMemoryException) or text.startswith("Out of Memory"):
        return OutOfSpaceError(f"the query needs more memory than it may have: {_first_line(text)}")
    if isinstance(exc, (duckdb.InternalException, duckdb.FatalException, duckdb.IOException)):
        return UnavailableError(f"the store could not answer: {text}")
    return InvalidArgumentError(text)


def _first_line(text: str) -> str:
    return text.partition("\n")[0]


def remove(path: Path) -> None:
    """Delete a database that nobody has open, with its logs."""
    path.unlink(missing_ok=True)
    _remove_logs(path)


def replace(new: Path, path: Path) -> None:
    """Put one database in the place of another. Both are closed, the new one without a log.

    The old one's logs go first: beside the new file they would be taken for that one's.
    """
    _remove_logs(path)
    os.replace(new, path)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _remove_logs(path: Path) -> None:
    for ending in (".wal", ".wal.checkpoint", ".wal.recovery"):
        path.with_name(path.name + ending).unlink(missing_ok=True)
