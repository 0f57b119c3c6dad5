"""How far a reading came, and who waits for it. Shared by the real reader and its twin."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from tensorbus.bus._port import Message
from tensorbus.clock import Deadline


class _Leader(Protocol):
    async def first_from(self, filter_subject: str, seq: int, *, deadline: Deadline) -> Message | None: ...


class Position:
    """The position of a reading of one filter of the log."""

    def __init__(self, leader: _Leader, filter_subject: str, *, after: int) -> None:
        self._leader = leader
        self._filter = filter_subject
        self._position = after
        self._moved = asyncio.Event()
        self._caught_up = asyncio.Event()
        self.on_restart: Callable[[], None] | None = None

    @property
    def position(self) -> int:
        return self._position

    @property
    def caught_up(self) -> asyncio.Event:
        return self._caught_up

    def _advance(self, seq: int) -> None:
        self._position = seq
        self._moved.set()
        self._moved = asyncio.Event()

    async def reached(self, seq: int, *, deadline: Deadline) -> None:
        """See :meth:`tensorbus.bus.Reader.reached`."""
        while self._position < seq:
            moved = self._moved
            following = await self._leader.first_from(self._filter, self._position + 1, deadline=deadline)
            if following is None or following.seq > seq:
                return
            async with deadline.scope():
                await moved.wait()
