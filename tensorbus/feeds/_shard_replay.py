"""A shard's state, made from the newest snapshot of it and what the stream of pages says after that."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Final

from tensorbus.bus import Message, Stream, get_blob
from tensorbus.clock import Deadline
from tensorbus.errors import CorruptError, NotFoundError, UnavailableError
from tensorbus.events import (
    Aggregate,
    AnyPageRecorded,
    Headers,
    Recorded,
    ShardSnapshotTaken,
    UnknownEvent,
    decode_page,
)
from tensorbus.ids import EventId, Incarnation, WorkerId
from tensorbus.lifecycle import ShardState, load_shard

log = logging.getLogger("tensorbus.feeds")

BATCHES_AT_ONCE: Final = 2
"""Messages that are folded before others get their turn on the loop: a few milliseconds' worth."""


async def replay_shard(
    pages: Stream, shard: int, *, upto: int, before: int | None = None, deadline: Deadline
) -> ShardState:
    """The shard with all that the stream has of it up to a sequence, and no message beyond it.

    A state that lacks messages is made once more from the newest snapshot, as a purge may have overtaken the reading.

    Args:
        upto: Sequence of a message of the shard.
        before: Start from no snapshot whose fact has this sequence or a later one.

    Raises:
        DeadlineExceededError: If that takes longer; UnavailableError: If the bus was closed.
    """
    state = await _replayed(pages, shard, upto, before, deadline)
    if state.degraded:
        log.warning("a shard lacks messages, read anew: shard=%d gaps=%d unknown=%d", shard, state.gaps, state.unknown)
        state = await _replayed(pages, shard, upto, before, deadline)
    return state


async def _replayed(pages: Stream, shard: int, upto: int, before: int | None, deadline: Deadline) -> ShardState:
    """From the newest snapshot that can be used and counts, else from nothing."""
    for fact in await shard_snapshots(pages, shard, deadline=deadline):
        if fact.seq > upto or (before is not None and fact.seq >= before):
            continue  # what follows would not show whether it counts
        state = await _loaded(pages, fact.event, deadline)
        if state is not None and await _follow(pages, state, upto, fact.seq, deadline):
            return state
    state = ShardState(shard, pages.subjects)
    await _follow(pages, state, upto, None, deadline)
    return state


async def _follow(pages: Stream, state: ShardState, upto: int, begun_by: int | None, deadline: Deadline) -> bool:
    """Fold what follows; whether the snapshot that it began with, if it did, was its home's to take."""
    if state.seq >= upto:
        return True
    async with pages.read(pages.subjects.shard(state.shard), after=state.seq) as reader, deadline.scope():
        async for batch in reader:
            if not await _apply(state, [message for message in batch if message.seq <= upto], begun_by):
                return False
            if batch[-1].seq >= upto:
                return True
    raise UnavailableError("the reading of a shard has ended", shard=state.shard)


async def _apply(state: ShardState, batch: Sequence[Message], begun_by: int | None) -> bool:
    for at, message in enumerate(batch):
        verdict = state.apply(decode_pages(message))
        if message.seq == begun_by and not verdict.kept:
            log.warning("snapshot passed over: shard=%d seq=%d reason=%s", state.shard, message.seq, verdict.why)
            return False
        if at % BATCHES_AT_ONCE == BATCHES_AT_ONCE - 1:
            await asyncio.sleep(0)
    return True


def decode_pages(message: Message) -> AnyPageRecorded:
    """The page fact in a stored message; one that cannot be read counts as unknown."""
    try:
        return decode_page(
            seq=message.seq,
            time_ns=message.time_ns,
            subject=message.subject,
            headers=message.headers,
            data=message.data,
        )
    except CorruptError as exc:
        log.error("unreadable message: seq=%d subject=%s reason=%s", message.seq, message.subject, exc)
        nobody = Headers(event_id=EventId(""), author=WorkerId(""), incarnation=Incarnation(""))
        return Recorded(message.seq, message.time_ns, message.subject, nobody, UnknownEvent("unreadable"))


async def _loaded(pages: Stream, fact: ShardSnapshotTaken, deadline: Deadline) -> ShardState | None:
    """The state that a snapshot holds, ``None`` if it cannot be used."""
    try:
        state = await _unpacked(await get_blob(pages, fact.blob, deadline=deadline), pages)
        if (state.shard, state.seq, state.state_hash) != (fact.shard, fact.upto, fact.state_hash):
            raise CorruptError("its body is another one than its fact says")
    except (CorruptError, NotFoundError, UnavailableError) as error:
        log.warning("snapshot passed over: shard=%d upto=%d reason=%s", fact.shard, fact.upto, error)
        return None
    return state


async def _unpacked(body: bytes, pages: Stream) -> ShardState:
    for state in load_shard(body, subjects=pages.subjects):
        if state is not None:
            return state
        await asyncio.sleep(0)
    raise CorruptError("the snapshot of a shard has no end")


async def shard_snapshots(pages: Stream, shard: int, *, deadline: Deadline) -> list[Recorded[ShardSnapshotTaken]]:
    """The facts of the snapshots of a shard that the stream still has, the newest first."""
    fence = pages.subjects.fence(Aggregate("psnap", str(shard)))
    found: list[Recorded[ShardSnapshotTaken]] = []
    after = 0
    while (message := await pages.first_from(fence, after + 1, deadline=deadline)) is not None:
        after, recorded = message.seq, decode_pages(message)
        if isinstance(recorded.event, ShardSnapshotTaken):
            found.append(Recorded(recorded.seq, recorded.time_ns, recorded.subject, recorded.headers, recorded.event))
    return found[::-1]
