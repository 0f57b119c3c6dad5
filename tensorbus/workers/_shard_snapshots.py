"""Snapshots of shards: taken by homes, confirmed by somebody else, and what they stand for purged by the store."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Final

from tensorbus.bus import Appended, append, put_blob
from tensorbus.clock import NS_PER_S, Deadline
from tensorbus.errors import TensorbusError
from tensorbus.events import (
    Aggregate,
    Headers,
    PageEvent,
    Recorded,
    ShardSnapshotConfirmed,
    ShardSnapshotTaken,
)
from tensorbus.feeds import decode_pages, replay_shard, shard_snapshots
from tensorbus.ids import WorkerId, new_event_id
from tensorbus.lifecycle import CANDIDATES, PAGES_FOLD_VERSION, assign, dump_shard
from tensorbus.workers._core import Core
from tensorbus.workers._home import HomeRole
from tensorbus.workers._home_shard import HomeShard

log = logging.getLogger("tensorbus.workers")

LOOK_S: Final = 1.0
STEP_S: Final = 120.0
RETRY_DELAY_S: Final = 1.0


class SnapshotTaker:
    """Stores a home's shards as they are on the stream, each again after so many batches.

    Args:
        every: Batches after which a shard is stored again.
    """

    def __init__(self, core: Core, home: HomeRole, *, every: int) -> None:
        self._core = core
        self._home = home
        self._every = every
        self._stored: dict[int, int] = {}

    async def run(self) -> None:
        """Take snapshots for ever; what fails is tried again."""
        while True:
            for shard, home in list(self._home.serving.items()):
                if home.log.number - self._stored.get(shard, home.stored) >= self._every:
                    try:
                        await self._take(home)
                    except TensorbusError as error:
                        log.warning("shard not stored: shard=%d reason=%s", shard, error)
            await asyncio.sleep(LOOK_S)

    async def _take(self, home: HomeShard) -> None:
        """From the stream, not from the index: that one is ahead of it, and this is a check of both."""
        pages, me = self._core.bus.pages, self._core.me
        deadline = Deadline(STEP_S, what=f"storing shard {home.shard}")
        state = await replay_shard(pages, home.shard, upto=home.log.position, deadline=deadline)
        number, upto, state_hash = state.number, state.seq, state.state_hash
        blob = await put_blob(pages, dump_shard(state), author=me.worker, deadline=deadline)
        fact = ShardSnapshotTaken(
            shard=home.shard, upto=upto, fold=PAGES_FOLD_VERSION, state_hash=state_hash, blob=blob
        )
        if await say(self._core, fact, token=home.token, deadline=deadline) is not None:
            self._stored[home.shard] = number
            log.info(
                "shard stored: shard=%d upto=%d pages=%d nbytes=%d", home.shard, upto, len(state.pages), blob.nbytes
            )


class SnapshotConfirmer:
    """Replays what others store, and says when it comes to the same.

    For each snapshot one worker is to do so: the first living candidate for the shard that is not its author, else a
    store, else a worker with memory. It never starts from the snapshot itself.
    """

    def __init__(self, core: Core) -> None:
        self._core = core

    async def run(self) -> None:
        """Confirm snapshots for ever, the newest of each shard."""
        async for fact in newest(self._core, "psnap", None):
            if isinstance(fact.event, ShardSnapshotTaken):
                await self._confirm(fact.event, fact.seq, fact.headers.author)

    async def _confirm(self, fact: ShardSnapshotTaken, seq: int, author: WorkerId) -> None:
        if fact.fold != PAGES_FOLD_VERSION or self._chosen(fact.shard, author) != self._core.me.worker:
            return
        deadline = Deadline(STEP_S, what=f"confirming a snapshot of shard {fact.shard}")
        try:
            pages = self._core.bus.pages
            state = await replay_shard(pages, fact.shard, upto=fact.upto, before=seq, deadline=deadline)
            if state.degraded or (state.seq, state.state_hash) != (fact.upto, fact.state_hash):
                log.error(
                    "snapshot not confirmed: shard=%d seq=%d upto=%d here=%d gaps=%d",
                    fact.shard, seq, fact.upto, state.seq, state.gaps,
                )  # fmt: skip
                return
            confirmed = ShardSnapshotConfirmed(shard=fact.shard, snapshot=seq, state_hash=fact.state_hash)
            await say(self._core, confirmed, token=None, deadline=deadline)
            log.info("snapshot confirmed: shard=%d upto=%d author=%s", fact.shard, fact.upto, author)
        except TensorbusError as error:
            log.warning("snapshot not confirmed yet: shard=%d seq=%d reason=%s", fact.shard, seq, error)

    def _chosen(self, shard: int, author: WorkerId) -> str | None:
        """Who is to confirm what an author stored."""
        living = list(self._core.state.live_sessions())
        homes = [one.worker for one in living if "shard-home" in one.roles]
        candidates = list(assign(self._core.state.shards, homes)[shard][:CANDIDATES]) if homes else []
        others = [one.worker for role in ("store", "basic") for one in living if role in one.roles]
        return next((name for name in [*candidates, *others] if name != author), None)


class PagePurger:
    """Purges what confirmed snapshots stand for, after a delay: who reads from an older one meanwhile comes through.

    Args:
        delay_s: Seconds from when this process learns of the confirmation.
        may: Whether this store keeps the log now.
    """

    def __init__(self, core: Core, *, delay_s: float, may: Callable[[], bool]) -> None:
        self._core = core
        self._delay_ns = int(delay_s * NS_PER_S)
        self._may = may
        self._due: dict[int, tuple[int, int, int]] = {}

    async def run(self) -> None:
        """Purge for ever; what fails is tried again."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._listen(), name="confirmed snapshots")
            while True:
                await asyncio.sleep(min(LOOK_S, self._delay_ns / NS_PER_S))
                for shard, (due_ns, snapshot, confirmed) in list(self._due.items()):
                    if self._core.clock.now_ns() >= due_ns and self._may():
                        await self._purge(shard, snapshot, confirmed)

    async def _listen(self) -> None:
        async for fact in newest(self._core, "pconf", None):
            if isinstance(fact.event, ShardSnapshotConfirmed):
                due_ns = self._core.clock.now_ns() + self._delay_ns
                self._due[fact.event.shard] = due_ns, fact.event.snapshot, fact.seq

    async def _purge(self, shard: int, snapshot: int, confirmed: int) -> None:
        pages, subjects = self._core.bus.pages, self._core.bus.subjects
        deadline = Deadline(STEP_S, what=f"purging shard {shard}")
        try:
            stored = await shard_snapshots(pages, shard, deadline=deadline)
            kept = next((fact for fact in stored if fact.seq == snapshot), None)
            if kept is not None and await self._counts(shard, confirmed, snapshot, deadline):
                fence = subjects.fence(Aggregate("shard", str(shard)))
                removed = await pages.purge(fence, upto=kept.event.upto, keep_last=False, deadline=deadline)
                for older in (fact for fact in stored if fact.seq < snapshot):
                    if older.event.blob.digest not in {
                        fact.event.blob.digest for fact in stored if fact.seq >= snapshot
                    }:
                        blob = f"{subjects.prefix}.pblob.{older.event.blob.digest}.*.*"
                        await pages.purge(blob, upto=kept.event.upto, keep_last=False, deadline=deadline)
                for kind, upto in (("psnap", snapshot - 1), ("pconf", confirmed - 1)):
                    await pages.purge(subjects.fence(Aggregate(kind, str(shard))), upto=upto, deadline=deadline)
                log.info("purged: shard=%d upto=%d messages=%d", shard, kept.event.upto, removed)
            self._due.pop(shard, None)
        except TensorbusError as error:
            log.warning("shard not purged yet: shard=%d reason=%s", shard, error)

    async def _counts(self, shard: int, confirmed: int, snapshot: int, deadline: Deadline) -> bool:
        """Whether the shard's fold takes the confirmation for one."""
        state = await replay_shard(self._core.bus.pages, shard, upto=confirmed, before=snapshot, deadline=deadline)
        found = state.snapshot
        return found is not None and found.seq == snapshot and found.confirmed


async def newest(core: Core, kind: str, after: int | None) -> AsyncIterator[Recorded[PageEvent]]:
    """The facts of a kind about all shards as they come, of those that are there the newest of each shard."""
    filter_subject = f"{core.bus.subjects.prefix}.{kind}.*.*"
    async with core.bus.pages.read(filter_subject, after=after or 0) as reader:
        async for batch in reader:
            last = {message.subject.split(".")[-2]: message for message in batch}
            for message in last.values():
                yield decode_pages(message)  # type: ignore[misc]  # who asks looks at the type


async def say(core: Core, fact: PageEvent, *, token: int | None, deadline: Deadline) -> int | None:
    """Append a fact about a shard, under its grant or as one's own; its sequence, ``None`` if the grant is over."""
    headers = Headers(
        event_id=new_event_id(core.ids),
        author=core.me.worker,
        incarnation=core.me.incarnation,
        token=token or 0,
        expected=token,
    )
    outcome = await append(core.bus.pages, fact, headers, deadline=deadline)
    return outcome.seq if isinstance(outcome, Appended) else None
