"""A Directory to begin a fold from: the newest stored one at or before a position, or an empty one."""

from __future__ import annotations

import asyncio
import logging

from tensorbus.bus import Archive, Bus
from tensorbus.clock import Deadline
from tensorbus.errors import CorruptError, NotFoundError, UnavailableError
from tensorbus.events import Aggregate, SnapshotTaken
from tensorbus.feeds._decode import decode_one
from tensorbus.feeds._remember import newest_truncation
from tensorbus.feeds._restore import UnusableError, load_stored
from tensorbus.lifecycle import Directory, load

log = logging.getLogger("tensorbus.feeds")

LOAD_S = 300.0


async def base_for(bus: Bus, archive: Archive | None, *, upto: int) -> Directory:
    """The newest snapshot at or before ``upto`` that can be used, from the log or else the archive; else empty.

    One that is missing or damaged is passed over and logged: an older one and the facts after it say the same.

    Raises:
        UnavailableError, DeadlineExceededError: If the bus does not answer.
    """
    if upto == 0:
        return Directory(bus.subjects)
    deadline = Deadline(LOAD_S, what="loading a snapshot")
    message = await bus.last_on(bus.subjects.fence(Aggregate("snap", "directory")), deadline=deadline)
    fact = None if message is None else decode_one(message).event
    if message is not None and isinstance(fact, SnapshotTaken) and fact.upto <= upto:
        try:
            return (await load_stored(bus, message, upto_min=0, deadline=deadline)).state
        except UnusableError as exc:
            log.warning("a snapshot on the log cannot be used: upto=%d reason=%s", fact.upto, exc.problem)
    # One in the archive may be of a part that the log lost since; which one is not known.
    lost = await newest_truncation(bus, deadline=deadline) is not None
    for stored in [] if archive is None or lost else await asyncio.to_thread(archive.list_snapshots):
        if stored.seq > upto:
            continue
        try:
            assert archive is not None
            return await asyncio.to_thread(load, archive.read_snapshot(stored), bus.subjects)
        except (CorruptError, NotFoundError, UnavailableError) as error:
            log.warning("a snapshot in the archive cannot be used: upto=%d reason=%s", stored.seq, error)
    return Directory(bus.subjects)


async def newest_snapshot(bus: Bus) -> tuple[int, SnapshotTaken] | None:
    """The newest snapshot on the log, without its body, and the sequence of its fact."""
    deadline = Deadline(LOAD_S, what="looking for a snapshot")
    message = await bus.last_on(bus.subjects.fence(Aggregate("snap", "directory")), deadline=deadline)
    fact = None if message is None else decode_one(message).event
    return (message.seq, fact) if message is not None and isinstance(fact, SnapshotTaken) else None
