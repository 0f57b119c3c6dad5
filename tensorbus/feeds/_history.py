"""The facts from any position on: from the archive where the log was purged, then from the log."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any

from tensorbus.bus import Archive, ArchiveFile, Bus, Message
from tensorbus.clock import Deadline
from tensorbus.errors import CorruptError, NotFoundError
from tensorbus.events import Aggregate, Archived
from tensorbus.feeds._decode import decode_one
from tensorbus.feeds._lookout import insist
from tensorbus.feeds._restore import Announced, newest_purge

log = logging.getLogger("tensorbus.feeds")

LOOK_S = 30.0
"""A question to the log waits so long for a bus that is away."""
AHEAD_MAX = 16
"""Batches read ahead of who takes them in."""


class History:
    """Reads facts in order from a position, and goes on at the head of the log.

    Args:
        archive: Where purged facts are; ``None`` if there is no archive.
        look_s: How often to look whether a purge overtakes the reading; at most a quarter of the purges' delay. What is
            handed out is younger than twice that.
        on_restart: Called when the log may have become another one, before anything comes of it.
    """

    def __init__(
        self, bus: Bus, archive: Archive | None, *, look_s: float, on_restart: Callable[[], None] | None = None
    ) -> None:
        self._bus = bus
        self._archive = archive
        self._look_s = look_s
        self._on_restart = on_restart
        self._restarts = 0
        self._looked_at = 0.0

    def _note_restart(self) -> None:
        self._restarts += 1
        if self._on_restart is not None:
            self._on_restart()

    async def batches(self, after: int) -> AsyncGenerator[list[Message]]:
        """Non-empty batches of the facts after a sequence, without an end.

        Raises:
            NotFoundError: If the log lost facts after ``after`` to a purge and the archive has not got them, or a file
                of it is missing; CorruptError: If the archive has a hole or a file that is not what was written.
            UnavailableError: If the bus was closed.
        """
        position = after
        while True:
            while (purged := await self._purged()) > position:  # the next one may go while the archive is read
                async with aclosing(self._archived(position, purged)) as old:
                    async for batch in old:
                        yield batch
                position = purged
            async with aclosing(self._live(position)) as live:
                async for batch in live:
                    position = batch[-1].seq
                    yield batch

    async def _purged(self) -> int:
        def ask() -> Coroutine[Any, Any, Announced]:
            return newest_purge(self._bus, deadline=Deadline(LOOK_S, what="looking for purges"))

        self._looked_at = asyncio.get_running_loop().time()  # what is announced later is not in the answer
        return (await insist(ask)).upto

    async def _live(self, position: int) -> AsyncGenerator[list[Message]]:
        """Batches from the log, until a purge is announced beyond what was handed out, or the bus was away: what was
        read ahead before that may be of a part that the log lost."""
        queue: asyncio.Queue[list[Message] | Exception] = asyncio.Queue(AHEAD_MAX)
        loop = asyncio.get_running_loop()
        restarts = self._restarts
        with self._bus.on_lost(self._note_restart):
            reading = asyncio.create_task(self._read(position, queue), name="history")
            try:
                while self._restarts == restarts:
                    due = loop.time() >= self._looked_at + self._look_s
                    if due and (purged := await self._purged()) > position:
                        log.info("a purge overtakes a reading: upto=%d position=%d", purged, position)
                        return
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout_at(self._looked_at + 2 * self._look_s):
                            first = await queue.get()
                        if self._restarts != restarts:
                            return
                        batch = _drained(first, queue)
                        position = batch[-1].seq
                        yield batch
            finally:
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)

    async def _read(self, after: int, queue: asyncio.Queue[list[Message] | Exception]) -> None:
        try:
            async with self._bus.read(self._bus.subjects.facts, after=after) as reader:
                reader.on_restart = self._note_restart
                async for batch in reader:
                    await queue.put(batch)
        except Exception as error:  # noqa: BLE001  handed to the one who reads
            await queue.put(error)

    async def _archived(self, after: int, upto: int) -> AsyncGenerator[list[Message]]:
        """The facts of a purged range, each file's digest checked before anything of it comes out."""
        files = [file for file in await archived_files(self._bus) if file.last > after]
        if self._archive is None or not files or files[0].first > after + 1 or files[-1].last < upto:
            first = files[0].first if files else None
            raise NotFoundError(
                f"the facts from {after + 1} to {upto} were purged from the log, and the archive "
                + (f"begins at {first}" if files and first and first > after + 1 else "has not got them"),
                first=first,
                after=after,
            )
        pieces = self._archive.read(files, after=after, upto=upto)
        while (batch := await asyncio.to_thread(next, pieces, None)) is not None:
            if batch:
                yield batch


def _drained(first: list[Message] | Exception, queue: asyncio.Queue[list[Message] | Exception]) -> list[Message]:
    """What waits in the queue as one batch; an error that is met comes out after what was before it."""
    if isinstance(first, Exception):
        raise first
    batch = list(first)
    while not queue.empty():
        following = queue.get_nowait()
        if isinstance(following, Exception):
            queue.put_nowait(following)
            break
        batch += following
    return batch


async def archived_files(bus: Bus) -> list[ArchiveFile]:
    """The archive's files as the log names them, each following the one before.

    Raises:
        CorruptError: If one does not follow.
    """
    fence = bus.subjects.fence(Aggregate("archive", "TB"))
    deadline = Deadline(LOOK_S, what="reading which files the archive has")
    files: list[ArchiveFile] = []
    if (last := await bus.last_on(fence, deadline=deadline)) is None:
        return files
    async with bus.read(fence, after=0) as reader:
        while reader.position < last.seq:
            async with deadline.scope():
                batch = await anext(aiter(reader))
            for message in batch:
                _add(files, message)
    return files


def _add(files: list[ArchiveFile], message: Message) -> None:
    fact = decode_one(message).event
    if not isinstance(fact, Archived) or (files and fact.first <= files[-1].last):
        return  # a repeat, perhaps of more than the first time, which the fold drops too
    if files and fact.first != files[-1].last + 1:
        raise CorruptError(
            f"the archive has a hole from {files[-1].last + 1} to {fact.first - 1}: no file for it is named on the log",
            first=files[-1].last + 1,
            last=fact.first - 1,
        )
    files.append(
        ArchiveFile(
            file=fact.file,
            first=fact.first,
            last=fact.last,
            count=fact.count,
            digest=fact.digest,
            nbytes=fact.nbytes,
        )
    )
