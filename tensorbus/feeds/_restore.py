"""Where a reader of the log begins: at the newest snapshot that it can use, or at the log's beginning if that is there.

A purge is announced long before it is carried out. From then on the log counts as purged: a reading that begins before
what goes could be overtaken.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import Final

from tensorbus.bus import Bus, Message, read_blob
from tensorbus.clock import Deadline
from tensorbus.errors import CorruptError, NotFoundError, TensorbusError
from tensorbus.events import Aggregate, BlobRef, LogPurged, PurgeCompleted, SnapshotTaken
from tensorbus.feeds._decode import decode_one
from tensorbus.lifecycle import Directory, Loader

log = logging.getLogger("tensorbus.feeds")

SLICE_BYTES: Final = 16 * 1024
"""How much of a snapshot is read before others get their turn on the loop: about a millisecond."""

_PURGES: Final = Aggregate("purge", "TB")
_SNAPSHOTS: Final = Aggregate("snap", "directory")


@dataclass(frozen=True, slots=True)
class Announced:
    """The newest purge that was announced: what it takes, and the message of the snapshot to start from (0: unsaid)."""

    upto: int = 0
    snapshot: int = 0


@dataclass(frozen=True, slots=True)
class Restored:
    """Where to begin.

    Attributes:
        state: A state at the snapshot's sequence, or an empty one.
        snapshot: The snapshot's sequence; ``None`` if the reading begins at the log's beginning.
        message: The message that named the snapshot.
    """

    state: Directory
    snapshot: int | None
    message: Message | None = None


async def newest_purge(bus: Bus, *, deadline: Deadline) -> Announced:
    """What the newest announcement says, whether it was carried out or not.

    Raises:
        UnavailableError, DeadlineExceededError: If the bus does not answer.
    """
    message = await bus.last_on(bus.subjects.fence(_PURGES), deadline=deadline)
    if message is None:
        return Announced()
    match decode_one(message).event:
        case LogPurged() as fact:
            return Announced(fact.upto, fact.snapshot)
        case PurgeCompleted() as fact:
            return Announced(fact.upto)
        case _:  # from a newer program: whoever has read that far knows as much as there is to know
            return Announced(message.seq - 1)


async def restore(bus: Bus, *, deadline: Deadline) -> Restored | TensorbusError:
    """Find the state to begin with. The interpreter is held for a few milliseconds at a time.

    Returns:
        Or, if the log was purged and no snapshot can be used, the error that says why.

    Raises:
        UnavailableError, DeadlineExceededError: If the bus does not answer.
    """
    purged = await newest_purge(bus, deadline=deadline)
    problem: TensorbusError | None = None
    async for message in _candidates(bus, purged, deadline):
        try:
            return await load_stored(bus, message, upto_min=purged.upto, deadline=deadline)
        except UnusableError as exc:
            problem = problem or exc.problem
            log.warning("a snapshot cannot be used: seq=%d reason=%s", message.seq, exc.problem)
    if not purged.upto:
        return Restored(Directory(bus.subjects), None)
    problem = problem or NotFoundError("there is none")
    what = f"the log was purged up to {purged.upto} and no snapshot can be used to start from: {problem}"
    error = type(problem)(what, purged_upto=purged.upto)
    error.__cause__ = problem
    return error


@contextmanager
def without_collections() -> Iterator[None]:
    """Keep the garbage collector away: while millions of records are made it would walk them all, again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class UnusableError(Exception):
    """A snapshot that nobody can start from; ``problem`` says why. (Not so if the bus does not answer.)"""

    def __init__(self, problem: TensorbusError) -> None:
        super().__init__(str(problem))
        self.problem = problem


async def _candidates(bus: Bus, purged: Announced, deadline: Deadline) -> AsyncIterator[Message]:
    """The newest snapshot, again if a newer one came meanwhile, and the one that the purge named."""
    tried = 0
    while True:
        newest = await bus.last_on(bus.subjects.fence(_SNAPSHOTS), deadline=deadline)
        if newest is None or newest.seq <= tried:
            break
        tried = newest.seq
        yield newest
    if purged.snapshot and purged.snapshot != tried:
        named = await bus.get(purged.snapshot, deadline=deadline)
        if named is not None:
            yield named


async def load_stored(bus: Bus, message: Message, *, upto_min: int, deadline: Deadline) -> Restored:
    """The state that a snapshot's message names, checked against what it says.

    Raises:
        UnusableError: If it is missing, damaged, too old, or of a newer version than this program.
        UnavailableError, DeadlineExceededError: If the bus does not answer.
    """
    fact = decode_one(message).event
    if not isinstance(fact, SnapshotTaken):
        raise UnusableError(CorruptError(f"message {message.seq} is no readable snapshot", seq=message.seq))
    if fact.upto >= message.seq:
        raise UnusableError(CorruptError(f"the snapshot of {fact.upto} is newer than its own fact", seq=fact.upto))
    if fact.upto < upto_min:
        raise UnusableError(NotFoundError(f"the snapshot of {fact.upto} is older than that", seq=fact.upto))
    loader = Loader(bus.subjects)
    async with aclosing(_body(bus, fact.blob, deadline)) as pieces:
        async for piece in pieces:
            try:
                loader.feed(piece)
            except TensorbusError as exc:
                raise UnusableError(exc) from exc
            await asyncio.sleep(0)
    try:
        state = loader.finish()
    except TensorbusError as exc:
        raise UnusableError(exc) from exc
    if (loader.seq, loader.hash, loader.fold) != (fact.upto, fact.state_hash, fact.fold):
        what = f"the snapshot of {fact.upto} is that of another state, at {loader.seq}"
        raise UnusableError(CorruptError(what, seq=fact.upto))
    return Restored(state, fact.upto, message)


async def _body(bus: Bus, blob: BlobRef, deadline: Deadline) -> AsyncGenerator[bytes]:
    try:
        async for piece in read_blob(bus, blob, deadline=deadline):
            for at in range(0, len(piece), SLICE_BYTES):
                yield piece[at : at + SLICE_BYTES]
    except (NotFoundError, CorruptError) as exc:
        raise UnusableError(exc) from exc
