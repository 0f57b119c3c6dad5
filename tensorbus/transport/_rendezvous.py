"""How processes of one home find each other: ``<home>/run`` holds a card, a socket and a lock for each living worker.

The lock (flock) is the truth: the kernel drops it with its process, so a card whose lock nobody holds is stale.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from tensorbus.errors import ConflictError, UnavailableError


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerCard:
    """What a worker tells the processes of its home.

    Attributes:
        socket: File name of its unix socket within the run directory.
        control: ``host:port`` for callers without a worker, or empty.
        data: ``host:port`` where bytes are read, or empty.
    """

    worker: str
    incarnation: str
    host_id: str
    roles: tuple[str, ...]
    pid: int
    socket: str
    control: str
    data: str


def run_dir(home: Path) -> Path:
    """The run directory of a home, made if it is missing, for its owner only.

    Raises:
        UnavailableError: If it cannot be made.
    """
    path = home / "run"
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as exc:
        raise UnavailableError(f"cannot make {path}: {exc.strerror}", path=str(path)) from exc
    return path


@contextmanager
def locked(path: Path, *, what: str) -> Iterator[None]:
    """Hold a lock file for as long as the context is open; the kernel drops it if the process dies.

    Raises:
        ConflictError: If a living process holds it; names its pid.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            pid = os.pread(fd, 32, 0).decode("ascii", "replace").strip() or "?"
            raise ConflictError(f"{what} is running already, as process {pid} ({path})", pid=pid) from exc
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(fd)


def is_locked(path: Path) -> bool:
    """Whether a living process holds the lock file."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    else:
        return False
    finally:
        os.close(fd)


def write_card(directory: Path, card: WorkerCard) -> None:
    """Put the card up, whole or not at all."""
    text = json.dumps(asdict(card))
    new = directory / f".{card.worker}.json.{os.getpid()}"
    new.write_text(text, encoding="utf-8")
    new.replace(directory / f"{card.worker}.json")


def remove_card(directory: Path, card: WorkerCard) -> None:
    """Take down the card and the socket of a worker that ends."""
    for name in (f"{card.worker}.json", card.socket):
        (directory / name).unlink(missing_ok=True)


def living_workers(home: Path) -> list[WorkerCard]:
    """The cards of the workers that live in a home, in order of their ids."""
    directory = home / "run"
    cards = []
    for path in sorted(directory.glob("*.json")):
        card = _read_card(path)
        if card is not None and is_locked(directory / f"{card.worker}.lock"):
            cards.append(card)
    return cards


def _read_card(path: Path) -> WorkerCard | None:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        return WorkerCard(**{**data, "roles": tuple(data["roles"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None  # it is being taken down, or is of another version
