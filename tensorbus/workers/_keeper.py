"""Keeps the log bounded, under the store's role: archive, snapshot, announced purge, in this order and again.

Each step is a fact under the role's token, so a keeper that was replaced is refused by the server; and each can be
repeated, so that a keeper that died leaves nothing that the next one does not finish.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from tensorbus.bus import Archive, ArchiveFile, Message, put_blob
from tensorbus.clock import NS_PER_S, Deadline
from tensorbus.errors import ConflictError, CorruptError, FencedError, TensorbusError, UnavailableError
from tensorbus.events import STORE_ROLE, Archived, Event, LogPurged, PurgeCompleted, SnapshotTaken
from tensorbus.feeds import newest_snapshot
from tensorbus.lifecycle import Directory, RoleLease, dump, log_rules
from tensorbus.workers._core import Core
from tensorbus.workers._fitness import Fitness
from tensorbus.workers._projector import Projector
from tensorbus.workers._purge import Purger

log = logging.getLogger("tensorbus.workers")

STEP_S = 600.0
"""What one step may take: a snapshot of a large state is stored piece by piece."""
LOOK_S = 1.0
RESIGN_S = 10.0
ARCHIVE_FACTS_MAX = 100_000
"""Facts in one file of the archive."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeeperLimits:
    """When the keeper does what.

    Attributes:
        archive_s: Seconds after which facts that are not in the archive yet are written to it.
        snapshot_facts: Facts after which a new snapshot is taken.
        keep_facts: Facts that stay in the log before the newest snapshot; what is beyond is purged.
        purge_delay_s: Seconds between the announcement of a purge and the purge.
        forget_s: Seconds after which what has ended is forgotten altogether.
        resign_s: Seconds for which it may be unable to do any of this before it makes room for another store.
    """

    archive_s: float
    snapshot_facts: int
    keep_facts: int
    purge_delay_s: float
    forget_s: float
    resign_s: float


class Keeper:
    """Takes the store's role when nobody living has it, and then keeps the log until it cannot.

    Attributes:
        trouble: Why the last step failed, or ``None``.
    """

    def __init__(self, core: Core, projector: Projector, archive: Archive, limits: KeeperLimits) -> None:
        self._core = core
        self._projector = projector
        self._archive = archive
        self._limits = limits
        self._purger = Purger(core.bus, projector)
        self._fitness = Fitness(core.clock, patience_s=limits.resign_s)
        self._leaving = False
        self._stepped_ns: int | None = None
        self._archived_ns = 0
        self._purge_seen: tuple[int, int] = (0, 0)
        self._snapshot: tuple[int, int] | None = None
        self._doubts = 0
        self.trouble: TensorbusError | None = None

    def on_loss(self) -> None:
        """The log lost its tail, perhaps with the newest snapshot: look again before anything is announced."""
        self._snapshot = None
        self._purge_seen = (0, 0)

    @property
    def holds(self) -> bool:
        """Whether this incarnation has the role."""
        me = self._core.me
        return log_rules.has_role(self._core.state, role=STORE_ROLE, worker=me.worker, incarnation=me.incarnation)

    async def run(self) -> None:
        """Keep the log for ever. A step that fails is said and tried again; losing the role is no trouble."""
        while True:
            failed: TensorbusError | None = None
            try:
                await self._turn()
            except FencedError as error:
                if not self._core.state.is_live(self._core.me.worker, self._core.me.incarnation):
                    raise
                log.info("another store keeps the log: reason=%s", error)
            except ConflictError as error:
                log.info("an earlier attempt was known late: reason=%s", error)
            except TensorbusError as error:
                if self.trouble is None or error.kind != self.trouble.kind:  # its text may differ at each try
                    log.error("keeping the log failed: reason=%s", error)
                failed = self.trouble = error
            self._stepped_ns = None
            await self._judge(failed or self._projector.unfit)
            await asyncio.sleep(LOOK_S)

    async def mind(self) -> None:
        """Also give the role up when a thread does not come back, which neither fails nor ends. Runs for ever."""
        while True:
            await asyncio.sleep(LOOK_S)
            stuck = self._projector.stuck or self._stuck()
            if stuck is not None:
                self.trouble = stuck
                await self._judge(stuck)

    async def leave(self, *, deadline: Deadline) -> None:
        """Give the role up for good.

        Raises:
            DeadlineExceededError: If the bus does not take it in time.
        """
        self._leaving = True
        await self._resign(deadline)

    async def _turn(self) -> None:
        """Ask for the role, if this store can do its work, and do it."""
        if not self._projector.follows or not (self.holds or self._may_ask()):
            return
        if await self._take_role():
            await self._steps()
        self.trouble = None

    def _may_ask(self) -> bool:
        return not self._leaving and not self._fitness.rests and self._projector.unfit is None

    async def _judge(self, trouble: TensorbusError | None) -> None:
        """Give the role up if something has been wrong for too long. It is kept on and tried again if that fails."""
        if not self.holds:
            self._fitness.lost()
        elif self._fitness.note(trouble):
            try:
                await self._resign(Deadline(RESIGN_S, what="giving up the store's role"))
            except TensorbusError as error:
                log.warning("the store's role cannot be given up: reason=%s", error)
                return
            log.warning("gave up the store's role for another store to take: reason=%s", trouble)
            self._fitness.resigned()

    async def _resign(self, deadline: Deadline) -> None:
        me = self._core.me

        def rule(state: Directory) -> Event | None:
            return log_rules.resign_role(state, role=STORE_ROLE, worker=me.worker, incarnation=me.incarnation)

        await self._core.author.decide(rule, deadline=deadline)

    def _stuck(self) -> TensorbusError | None:
        """What to say of a step that has not come to its end for longer than any wait within it may last."""
        now_ns = self._core.clock.now_ns()
        if self._stepped_ns is None or now_ns - self._stepped_ns < 2 * STEP_S * NS_PER_S:
            return None
        return UnavailableError(f"a step of keeping the log has not ended for {2 * STEP_S:g} s")

    async def _take_role(self) -> bool:
        """Whether the role is ours, after asking for it."""
        me = self._core.me

        def rule(state: Directory) -> Event | RoleLease:
            return log_rules.take_role(state, role=STORE_ROLE, worker=me.worker, incarnation=me.incarnation)

        if self.holds:
            return True
        await self._core.author.decide(rule, deadline=self._deadline("taking the store's role"))
        return self.holds

    async def _steps(self) -> None:
        if self._core.feed.unsure or not (self._projector.sure and self._projector.ready):
            return  # perhaps the log lost what the rows say, or they are made anew and say too little
        self._doubts = self._core.feed.doubts
        for step in (self.archive, self.snapshot, self.announce, self.purge):
            self._stepped_ns = self._core.clock.now_ns()
            await step()

    # -- the steps -----------------------------------------------------------------------------------------------------

    async def archive(self, *, now: bool = False) -> None:
        """Write what the rows hold and the archive does not, if it is due."""
        clock_ns = self._core.clock.now_ns()
        while True:
            done, upto = self._core.state.log.archived, self._projector.position
            waiting = await self._purger.count(done, upto)
            due = now or clock_ns - self._archived_ns >= self._limits.archive_s * NS_PER_S
            if waiting == 0 or not (due or waiting >= ARCHIVE_FACTS_MAX):
                return
            await self._archive_one(done, upto)
            self._stepped_ns = self._core.clock.now_ns()
            self._archived_ns = clock_ns

    async def _archive_one(self, done: int, upto: int) -> None:
        """One file of at most :data:`ARCHIVE_FACTS_MAX` facts after ``done``, and its fact."""
        messages: list[Message] = []
        async with self._core.bus.read(self._core.bus.subjects.facts, after=done) as reader:
            deadline = self._deadline("reading facts for the archive")
            while len(messages) < ARCHIVE_FACTS_MAX and reader.position < upto:
                async with deadline.scope():
                    messages += [message for message in await anext(aiter(reader)) if message.seq <= upto]
        # The first file speaks for all that comes before it too: where the log begins, nothing does.
        file = await asyncio.to_thread(self._archive.write, messages, first=done + 1, last=messages[-1].seq)
        await self._say(_archived(file))
        log.info("archived: file=%s facts=%d nbytes=%d", file.file, file.count, file.nbytes)

    async def snapshot(self, *, now: bool = False) -> None:
        """Store the Directory as the rows have it, if enough facts came since the last time."""
        if self._snapshot is None and (found := await newest_snapshot(self._core.bus)) is not None:
            self._snapshot = (found[1].upto, found[0])
        since, position = self._snapshot[0] if self._snapshot else 0, self._projector.position
        waiting = await self._purger.count(since, position)
        if waiting < (1 if now else self._limits.snapshot_facts):
            return
        upto, state_hash, pieces = await self._projector.in_fold(_dumped)
        blob = await put_blob(
            self._core.bus, pieces, author=self._core.me.worker, deadline=self._deadline("storing a snapshot")
        )
        fold = self._core.state.log.fold
        await asyncio.to_thread(self._archive.put_snapshot, upto, state_hash, pieces)
        seq = await self._say(SnapshotTaken(what="directory", upto=upto, fold=fold, state_hash=state_hash, blob=blob))
        self._snapshot = (upto, seq)
        log.info("snapshot: upto=%d facts=%d nbytes=%d", upto, waiting, blob.nbytes)

    async def announce(self, *, now: bool = False) -> None:
        """Say which part of the log is going to go: what a snapshot and the archive hold, but for the newest facts."""
        kept = self._core.state.log
        if self._snapshot is None or (kept.announced is not None and kept.announced.upto > kept.purged):
            return
        covered = min(self._snapshot[0], kept.archived)
        keep = 0 if now else self._limits.keep_facts
        upto = await self._purger.upto(kept.purged, covered, keep_facts=keep)
        if upto <= kept.purged:
            return
        before_ns = self._core.clock.wall_ns() - int(self._limits.forget_s * NS_PER_S)
        forget = await self._purger.before(before_ns, at_most=upto)
        await self._say(
            LogPurged(
                stream="TB",
                upto=upto,
                snapshot=self._snapshot[1],
                forget=max(forget, kept.forgotten),
                delay_ns=int(self._limits.purge_delay_s * NS_PER_S),
            )
        )
        log.info("purge announced: upto=%d forget=%d", upto, forget)

    async def purge(self) -> None:
        """Carry out the announced purge once its delay has passed since this process learnt of it."""
        announced = self._core.state.log.announced
        if announced is None or announced.upto <= self._core.state.log.purged:
            await self._purger.sweep(now_ns=self._core.clock.now_ns())
            return
        if self._purge_seen[0] != announced.seq:
            self._purge_seen = (announced.seq, self._core.clock.now_ns())
        if self._core.clock.now_ns() - self._purge_seen[1] < announced.delay_ns:
            return
        removed = await self._purger.carry_out(self._core.state, announced)
        await self._say(PurgeCompleted(stream="TB", upto=announced.upto, forget=announced.forget))
        log.info("purged: upto=%d messages=%d", announced.upto, removed)

    # -- helpers -------------------------------------------------------------------------------------------------------

    async def _say(self, fact: Event) -> int:
        """Append as the keeper.

        Raises:
            FencedError: If another has the role now.
            UnavailableError: If the log may have lost its tail since the step began: what it says may not be so now.
        """
        me = self._core.me

        def rule(state: Directory) -> Event:
            if self._core.feed.doubts != self._doubts:
                raise UnavailableError(f"the bus was away, and may have lost what a {fact.type} rests on")
            return log_rules.as_keeper(state, fact, worker=me.worker, incarnation=me.incarnation)

        seq, _ = await self._core.author.decide(rule, deadline=self._deadline(f"saying {fact.type}"))
        return seq

    def _deadline(self, what: str) -> Deadline:
        return Deadline(STEP_S, what=what)


def _dumped(state: Directory) -> tuple[int, str, list[bytes]]:
    """A state's position, hash and bytes.

    Raises:
        CorruptError: If the hash kept along the way is not that of the state: such a state is never stored.
    """
    state_hash = state.full_hash()
    if state_hash != state.hash():
        raise CorruptError(f"the directory at {state.seq} has another hash than was kept along the way", seq=state.seq)
    return state.seq, state_hash, list(dump(state))


def _archived(file: ArchiveFile) -> Archived:
    return Archived(
        stream="TB",
        first=file.first,
        last=file.last,
        count=file.count,
        file=file.file,
        digest=file.digest,
        nbytes=file.nbytes,
    )
