"""The folder of one worker's spill files: its own, locked while it lives, and known again by its next life."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from blake3 import blake3

from tensorbus.errors import ConflictError, CorruptError, UnavailableError
from tensorbus.ids import b32, prefixed
from tensorbus.transport._rendezvous import locked
from tensorbus.transport._spill import Spill, read_header

SUFFIX: Final = ".tbs"
OWNER_FILE: Final = "owner.json"
CORRUPT_FOLDER: Final = "corrupt"
CORRUPT_KEPT: Final = 4
VERSION: Final = 1


class SpillFolder:
    """``<disk_dir>/<worker>``, held by one process at a time. Blocking; call it off the loop.

    Args:
        home: The worker's home, and ``prefix`` its system on the bus: a worker of the same id elsewhere is another.

    Attributes:
        fresh: Whether it was made just now, and so says nothing of what was spilled before: a disk that is not mounted
            looks like this.
    """

    def __init__(self, root: Path, worker: str, *, home: Path, prefix: str) -> None:
        self.path = root / worker
        self._owner = {"version": VERSION, "worker": worker, "home": str(home), "prefix": prefix}
        self._held = ExitStack()
        self.fresh = True

    def open(self) -> None:
        """Make it ours, and remove what was not finished.

        Raises:
            ConflictError: If a living process holds it, or it is another worker's.
            UnavailableError: If it cannot be used.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._held.enter_context(locked(self.path / "lock", what=f"the worker with the disk folder {self.path}"))
            self._check_owner()
            for draft in self.path.glob("*.tmp"):
                draft.unlink()
        except OSError as exc:
            self._held.close()
            raise UnavailableError(f"cannot use {self.path}: {exc.strerror}", path=str(self.path)) from exc
        except BaseException:
            self._held.close()
            raise

    def _check_owner(self) -> None:
        place = self.path / OWNER_FILE
        try:
            found = json.loads(place.read_text(encoding="utf-8"))
        except FileNotFoundError:
            draft = place.with_suffix(".tmp")
            draft.write_text(json.dumps(self._owner), encoding="utf-8")
            os.replace(draft, place)
            return
        except ValueError:
            found = None
        if found != self._owner:
            raise ConflictError(
                f"{self.path} belongs to another: it says {found}, and this is {self._owner}; give this worker a "
                f"disk_dir of its own, or remove {place} if its files are this worker's",
                path=str(self.path),
            )
        self.fresh = False

    def close(self) -> None:
        """Let go of it; the files stay. Safe to repeat."""
        self._held.close()

    def place(self, tenant: str, artifact: str) -> Path:
        """Where the file of an artifact lies."""
        return self.path / f"{b32(blake3(prefixed('spill', tenant, artifact)).digest(length=20))}{SUFFIX}"

    def spills(self) -> Iterator[Spill]:
        """All complete files. What is none is put aside."""
        for path in sorted(self.path.glob(f"*{SUFFIX}")):
            try:
                spill = read_header(path)
            except CorruptError:
                self.put_aside(path)
                continue
            if self.place(spill.header.tenant, spill.header.artifact) == path:
                yield spill

    def put_aside(self, path: Path) -> Path | None:
        """Move a corrupt file where people can look at it; only the newest few are kept. Gives its new place."""
        aside = self.path / CORRUPT_FOLDER
        try:
            aside.mkdir(exist_ok=True, mode=0o700)
            os.replace(path, aside / path.name)
            kept = sorted(aside.iterdir(), key=lambda one: one.stat().st_mtime_ns)
            for old in kept[:-CORRUPT_KEPT]:
                old.unlink()
        except OSError:
            with contextlib.suppress(OSError):
                path.unlink()
            return None
        return aside / path.name

    def remove(self, path: Path) -> None:
        """Give a file's room back. Safe to repeat."""
        with contextlib.suppress(OSError):
            path.unlink()
