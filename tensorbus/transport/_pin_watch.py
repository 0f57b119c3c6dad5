"""Has an event loop tell a pool of pins that have ended."""

from __future__ import annotations

import asyncio
from typing import Protocol


class Pinned(Protocol):
    """What keeps pins: see :meth:`Pool.fileno` and :meth:`Pool.reap`."""

    def fileno(self) -> int: ...

    def reap(self) -> int: ...


class PinWatch:
    """Has the running loop tell a pool about ended pins, from :meth:`start` to :meth:`close`."""

    def __init__(self, pool: Pinned) -> None:
        self._pool = pool
        self._loop: asyncio.AbstractEventLoop | None = None
        self._fd = pool.fileno()

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._fd, self._pool.reap)

    def close(self) -> None:
        """Stop watching; call it before the pool is closed. Safe to repeat."""
        if self._loop is not None:
            self._loop.remove_reader(self._fd)
            self._loop = None
