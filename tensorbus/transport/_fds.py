"""Ownership of file descriptors that travel with a frame."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator


class Fds:
    """Descriptors that somebody must close: who takes them, or else this object.

    Args:
        fds: The descriptors.
        owned: Whether to close what was not taken. The in-memory channel passes plain numbers and owns none.
    """

    __slots__ = ("_fds", "_owned")

    def __init__(self, fds: Iterable[int] = (), *, owned: bool = True) -> None:
        self._fds = list(fds)
        self._owned = owned

    def __len__(self) -> int:
        return len(self._fds)

    def __iter__(self) -> Iterator[int]:
        return iter(tuple(self._fds))

    def __repr__(self) -> str:
        return f"Fds({self._fds})"

    def take(self) -> list[int]:
        """Hand the descriptors to the caller, who closes them from now on."""
        taken, self._fds = self._fds, []
        return taken

    def close(self) -> None:
        """Close what nobody took. Safe to repeat."""
        for fd in self.take():
            if self._owned:
                close_quietly(fd)

    def __del__(self) -> None:
        if getattr(self, "_fds", None):
            self.close()


def close_quietly(fd: int) -> None:
    """Close a descriptor that is ours; an error of a late write back cannot be acted on."""
    with contextlib.suppress(OSError):
        os.close(fd)
