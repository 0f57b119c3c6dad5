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

BATCHES_AT_ONCE: Final = 4
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
    state = await _base(pages, shard, upto, before, deadline)
    if state.seq >= upto:
        return state
    async with pages.read(pages.subjects.shard(shard), after=state.seq) as reader, deadline.scope():
        async for batch in reader:
            await _apply(state, [message for message in batch if message.seq <= upto])
            if batch[-1].seq >= upto:
                return state
    raise UnavailableError("the reading of a shard has ended", shard=shard)


async def _apply(state: ShardState, batch: Sequence[Message]) -> None:
    for at, message in enumerate(batch):
        state.apply(_decoded(message))
        if at % BATCHES_AT_ONCE == BATCHES_AT_ONCE - 1:
            await asyncio.sleep(0)


def _decoded(message: Message) -> AnyPageRecorded:
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


async def _base(pages: Stream, shard: int, upto: int, before: int | None, deadline: Deadline) -> ShardState:
    """The newest snapshot that can be used, else an empty state."""
    for fact in await shard_snapshots(pages, shard, deadline=deadline):
        event = fact.event
        if event.upto > upto or (before is not None and fact.seq >= before):
            continue
        try:
            return await _loaded(await get_blob(pages, event.blob, deadline=deadline), pages)
        except (CorruptError, NotFoundError, UnavailableError) as error:
            log.warning("a shard's snapshot cannot be used: shard=%d upto=%d reason=%s", shard, event.upto, error)
    return ShardState(shard, pages.subjects)


async def _loaded(body: bytes, pages: Stream) -> ShardState:
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
        after, recorded = message.seq, _decoded(message)
        if isinstance(recorded.event, ShardSnapshotTaken):
            found.append(Recorded(recorded.seq, recorded.time_ns, recorded.subject, recorded.headers, recorded.event))
    return found[::-1]
