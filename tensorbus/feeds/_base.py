"""A Directory to begin a fold from: the newest stored one at or before a position, or an empty one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from tensorbus.bus import Archive, Bus, read_blob
from tensorbus.clock import Deadline
from tensorbus.errors import CorruptError, NotFoundError, UnavailableError
from tensorbus.events import Aggregate, SnapshotTaken, Subjects
from tensorbus.feeds._decode import decode_one
from tensorbus.lifecycle import Directory, Loader

log = logging.getLogger("tensorbus.feeds")

LOAD_S = 300.0


async def base_for(bus: Bus, archive: Archive | None, *, upto: int) -> Directory:
    """The newest snapshot at or before ``upto`` that can be used, from the log or else the archive; else empty.

    One that is missing or damaged is passed over and logged: an older one and the facts after it say the same.
    """
    if upto == 0:
        return Directory(bus.subjects)
    found = await newest_snapshot(bus)
    if found is not None and found[1].upto <= upto:
        try:
            return await load_snapshot(bus, found[1])
        except (CorruptError, NotFoundError, UnavailableError) as error:
            log.warning("a snapshot on the log cannot be used: upto=%d reason=%s", found[1].upto, error)
    for stored in [] if archive is None else await asyncio.to_thread(archive.list_snapshots):
        if stored.seq > upto:
            continue
        try:
            assert archive is not None
            return await asyncio.to_thread(_load, archive.read_snapshot(stored), bus.subjects)
        except (CorruptError, NotFoundError, UnavailableError) as error:
            log.warning("a snapshot in the archive cannot be used: upto=%d reason=%s", stored.seq, error)
    return Directory(bus.subjects)


async def newest_snapshot(bus: Bus) -> tuple[int, SnapshotTaken] | None:
    """The newest snapshot on the log, without its body, and the sequence of its fact."""
    deadline = Deadline(LOAD_S, what="looking for a snapshot")
    message = await bus.last_on(bus.subjects.fence(Aggregate("snap", "directory")), deadline=deadline)
    fact = None if message is None else decode_one(message).event
    return (message.seq, fact) if message is not None and isinstance(fact, SnapshotTaken) else None


async def load_snapshot(bus: Bus, taken: SnapshotTaken) -> Directory:
    """The state of a snapshot, checked against what its fact says.

    Raises:
        NotFoundError: If its body is not there; CorruptError: If it is not what was stored.
        UnavailableError: If it is of a newer version than this program.
    """
    loader = Loader(bus.subjects)
    async for piece in read_blob(bus, taken.blob, deadline=Deadline(LOAD_S, what="loading a snapshot")):
        loader.feed(piece)
        await asyncio.sleep(0)
    state = loader.finish()
    if (state.seq, state.hash()) != (taken.upto, taken.state_hash):
        raise CorruptError(f"the snapshot at {taken.upto} holds a state at {state.seq} of another hash", seq=taken.upto)
    return state


def _load(pieces: Iterable[bytes], subjects: Subjects) -> Directory:
    loader = Loader(subjects)
    for piece in pieces:
        loader.feed(piece)
    return loader.finish()
