"""The questions about one stream in memory, the same for each of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TypeVar

from tensorbus.bus._memory_stream import MemoryStream
from tensorbus.bus._port import LogInfo, Message
from tensorbus.clock import Deadline
from tensorbus.errors import InvalidArgumentError

T = TypeVar("T")


class MemoryReads(ABC):
    """What :class:`tensorbus.bus.Stream` asks of what is stored."""

    @property
    @abstractmethod
    def _stored(self) -> MemoryStream:
        """The stream as the server has it now: a server that died may have made it anew."""

    @abstractmethod
    async def _request(self, action: Callable[[], T], deadline: Deadline) -> T:
        """Have the server do something."""

    async def get(self, seq: int, *, deadline: Deadline) -> Message | None:
        return await self._request(lambda: self._stored.get(seq), deadline)

    async def first_from(self, filter_subject: str, seq: int, *, deadline: Deadline) -> Message | None:
        def look() -> Message | None:
            found = self._stored.after(seq - 1, filter_subject, count_max=1)
            return found[0] if found else None

        return await self._request(look, deadline)

    async def last_on(self, filter_subject: str, *, deadline: Deadline) -> Message | None:
        return await self._request(lambda: self._stored.last_on(filter_subject), deadline)

    async def subjects_on(self, filter_subject: str, *, deadline: Deadline) -> list[str]:
        return await self._request(lambda: self._stored.subjects_on(filter_subject), deadline)

    async def last_seq(self, *, deadline: Deadline) -> int:
        return await self._request(lambda: self._stored.last_seq, deadline)

    async def log_state(self, *, deadline: Deadline) -> LogInfo:
        return await self._request(lambda: self._stored.info(), deadline)

    async def purge(self, filter_subject: str, *, upto: int, keep_last: bool = True, deadline: Deadline) -> int:
        if not filter_subject:
            raise InvalidArgumentError("a purge needs a filter")
        stored = self._stored
        return await self._request(lambda: stored.purge(filter_subject, upto=upto, keep_last=keep_last), deadline)
