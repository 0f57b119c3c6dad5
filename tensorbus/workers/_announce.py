"""After the log lost its tail: what this worker holds in memory is said again, with the names that it had."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import Final

from tensorbus.clock import Deadline
from tensorbus.errors import ConflictError, FencedError, NotFoundError, TensorbusError
from tensorbus.events import (
    ArtifactPut,
    ArtifactRegistered,
    CallerLeaseGranted,
    DestroyReason,
    Event,
    KeyBound,
    ReplicaAdded,
    VersionPublished,
)
from tensorbus.feeds import Loss
from tensorbus.ids import RANDOM_PREFIX
from tensorbus.lifecycle import Artifact, CallerLease, Directory, Key, rules
from tensorbus.model import Manifest
from tensorbus.workers._core import Core, off_loop
from tensorbus.workers._disk import DiskTier
from tensorbus.workers._leases import Leases
from tensorbus.workers._puts import digest_held, known_outcome
from tensorbus.workers._store import Held, Store, Where

log = logging.getLogger("tensorbus.workers")

AT_ONCE: Final = 4
CAPTURED_AT_ONCE: Final = 128
RETRY_DELAY_S: Final = 0.5
LOOK_AGAIN_S: Final = 0.05
VERSIONS_S: Final = 10.0
"""How long the next version of a series waits for the one before, which another worker may hold."""
ENDS_DELAY_S: Final = 1.0


@dataclass(slots=True)
class Past:
    """What the state before the loss said of something that is held here.

    Attributes:
        record: The artifact.
        keys: Its keys.
        versions: The versions that it was.
        time_ns: What the log took after this, by its clock, came after the loss.
    """

    record: Artifact
    keys: tuple[str, ...]
    versions: tuple[tuple[str, int], ...]
    time_ns: int

    @classmethod
    def of(cls, record: Artifact | None, loss: Loss, before: Past | None) -> Past:
        """With what an earlier loss left to be said: what was known then is the most that was ever known."""
        first = record if before is None else before.record
        assert first is not None, "there is something to be said"
        past = cls(first, tuple(first.keys), tuple(first.versions), loss.remembered.time_ns)
        if before is not None:
            now = record if record is not None and record.live else first
            past.keys = tuple(dict.fromkeys((*before.keys, *now.keys)))
            past.versions = tuple(dict.fromkeys((*before.versions, *now.versions)))
            past.time_ns = min(past.time_ns, before.time_ns)
        return past


class Fate(StrEnum):
    """What became of an artifact on the log that lost its tail."""

    UNKNOWN = "unknown"
    LIVES = "lives"
    ENDED = "ended"
    TAKEN = "taken"


def fate(before: Artifact, now: Artifact | None, digest: str | None) -> Fate:
    """What became of an artifact that is held here.

    Args:
        before: As it was before the loss.
        now: What the log says of its id.
        digest: Of the bytes that are held, ``None`` if it was not computed.
    """
    if now is None:
        return Fate.UNKNOWN
    same_life = (now.born, now.born_ns) == (before.born, before.born_ns)
    same_bytes = same_life or (digest is not None and now.digest == digest) or before.artifact.startswith(RANDOM_PREFIX)
    if not same_bytes:
        return Fate.TAKEN
    if now.live:
        return Fate.LIVES
    if now.digest is None or now.digest != digest:
        return Fate.ENDED
    older = now.born_ns < before.born_ns
    return Fate.UNKNOWN if older or now.reason is DestroyReason.LOST else Fate.ENDED


class Announcer:
    """Says again what is held. Each step asks the state first, so that all of it can be repeated and interrupted.

    Attributes:
        told: How many artifacts were said again so far.
    """

    def __init__(self, core: Core, store: Store, leases: Leases, disk: DiskTier | None = None) -> None:
        self._core = core
        self._store = store
        self._disk = disk
        self._leases = leases
        self._past: dict[Where, Past] = {}
        self.told = 0

    async def capture(self, old: Directory, loss: Loss) -> None:
        """Keep what the state before a loss says of what is held here. The bytes go on being served."""
        spilled = () if self._disk is None else self._disk.artifacts()
        for n, where in enumerate(dict.fromkeys((*(held.where for held in self._store.all()), *spilled))):
            if n % CAPTURED_AT_ONCE == 0:
                await asyncio.sleep(0)
            before, record, held = self._past.get(where), old.artifacts.get(where), self._store.get(*where)
            if before is not None or (record is not None and record.live):
                if held is not None:
                    held.settling = True
                self._past[where] = Past.of(record, loss, before)

    async def announce(self) -> None:
        """Say all that was kept, a few artifacts at a time.

        Raises:
            FencedError: If the session is over.
        """
        position = self._core.live.position
        todo = sorted(self._past.items(), key=lambda item: item[1].record.born)
        rest = iter(todo)
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(AT_ONCE):
                    group.create_task(self._some(rest), name="announce")
        except* FencedError as fenced:
            raise fenced.exceptions[0] from None
        await self._versions(todo)
        await self._ends(position)
        for where, past in todo:
            if self._past.get(where) is past:
                del self._past[where]

    async def _some(self, rest: Iterator[tuple[Where, Past]]) -> None:
        for where, past in rest:
            if not await self._until_done(partial(self._one, where, past), what=where[1]):
                held = self._store.get(*where)
                if held is not None:
                    held.settling = False

    async def _until_done(self, step: Callable[[], Awaitable[None]], *, what: str) -> bool:
        """Whether it was done, sooner or later; else it cannot be."""
        while True:
            try:
                await step()
            except FencedError:
                raise
            except TensorbusError as error:
                log.warning("not said again: what=%s reason=%s", what, error)
                if not error.retryable:
                    return False
                await asyncio.sleep(RETRY_DELAY_S)
            else:
                return True

    # -- one artifact -------------------------------------------------------------------------------------------------

    async def _one(self, where: Where, past: Past) -> None:
        held = await self._hold(where, past)
        if held is not None:
            await self._name(held, past)

    async def _at_hand(self, where: Where, past: Past) -> Held | None:
        """What is held in memory, else what is on disk only, which has no parts."""
        held = self._store.get(*where)
        if held is not None or self._disk is None:
            return held if held is not None and held.valid else None
        return await self._disk.described(past.record)

    async def _hold(self, where: Where, past: Past) -> Held | None:
        """Have the log say that the bytes are here, or give them up, if they are no artifact's any more."""
        while (held := await self._at_hand(where, past)) is not None:
            if held.parts and not held.settling:
                return held  # put again meanwhile
            digest = await self._digest(held, past)
            now = self._core.state.artifacts.get(where)
            found = fate(past.record, now, digest)
            if found is Fate.TAKEN and now is not None and now.live and now.digest is None:
                await asyncio.sleep(LOOK_AGAIN_S)  # whose bytes these are is known with its digest
            elif found in (Fate.TAKEN, Fate.ENDED):
                self._give_up(held, str(found))
                return None
            elif found is Fate.UNKNOWN:
                await self._bear(held, past, digest)
            elif now is not None and await self._has_replica(held, now):
                if self._disk is not None:  # before memory may rely on it
                    await self._disk.tell(where)
                held.life, held.settling = now.born, False
                self.told += 1
                return held
        return None

    def _give_up(self, held: Held, why: str) -> None:
        """What is on disk is the disk tier's to give up, which looks at its files after each loss."""
        log.warning("what was held is given up: artifact=%s its id is %s", held.artifact, why)
        self._leases.forget_artifact(*held.where)
        self._store.drop(*held.where)

    async def _digest(self, held: Held, past: Past) -> str | None:
        """The digest of bytes that the worker owns; a caller may still write to what it registered."""
        if held.parts and held.lease is None and not held.manifest.digested:
            held.manifest = await asyncio.to_thread(digest_held, held)
        if past.record.digest is not None or not held.manifest.digested:
            return past.record.digest
        return await off_loop(Manifest.content_id, held.manifest, weight=len(held.manifest))

    async def _bear(self, held: Held, past: Past, digest: str | None) -> None:
        """Bring the artifact into being again, if it still is not there."""
        doubts = self._core.feed.doubts
        fact = await self._birth(held, past.record, digest)
        if fact is None:
            return

        def rule(state: Directory) -> Event | None:
            now = state.artifacts.get(held.where)
            return fact if fate(past.record, now, digest) is Fate.UNKNOWN else None

        await self._core.author.decide(rule, deadline=known_outcome(), principal=past.record.principal)
        await self._core.keep_manifest(held.manifest, doubts=doubts, deadline=known_outcome())

    async def _birth(self, held: Held, before: Artifact, digest: str | None) -> ArtifactPut | ArtifactRegistered | None:
        """The fact, as it was; ``None`` if the caller's lease is over, and the bytes with it."""
        lease = None if held.lease is None else before.leases.get(held.lease)
        if held.lease is not None and (lease is None or held.lease not in self._leases):
            self._give_up(held, "its caller's no more")
            return None
        put = ArtifactPut(
            tenant=held.tenant,
            artifact=held.artifact,
            digest=digest,
            nbytes=before.nbytes,
            tensors=before.tensors,
            manifest=await self._core.store_manifest(held.manifest, deadline=known_outcome()),
            tier=held.tier,
            key=before.key,
        )
        if lease is None or lease.ttl_ns is None:
            return put
        return ArtifactRegistered(
            tenant=put.tenant,
            artifact=put.artifact,
            digest=put.digest,
            nbytes=put.nbytes,
            tensors=put.tensors,
            manifest=put.manifest,
            tier=put.tier,
            key=put.key,
            lease=lease.lease,
            holder=lease.holder,
            ttl_ns=lease.ttl_ns,
        )

    async def _has_replica(self, held: Held, now: Artifact) -> bool:
        """Whether the log has our copy; else it is said, and to be looked at again."""
        me, tier = (self._core.me.worker, self._core.me.incarnation), held.tier
        if any((r.worker, r.incarnation, r.view, r.tier) == (*me, None, tier) for r in now.replicas.values()):
            return True
        if held.lease is not None:
            # Another's copy was first, so that the caller's memory is no replica of it: a registration cannot join.
            self._give_up(held, "held by another, and the registration over")
            return False

        def fact(number: int) -> Event:
            return ReplicaAdded(
                tenant=held.tenant, artifact=held.artifact, view=None, tier=held.tier, nbytes=held.manifest.nbytes,
                number=number,
            )  # fmt: skip

        with suppress(ConflictError):  # it ended meanwhile
            await self._core.author.say(fact, deadline=known_outcome())
        return False

    # -- its names, views and leases ----------------------------------------------------------------------------------

    async def _name(self, held: Held, past: Past) -> None:
        where = tenant, artifact = held.where
        await self._say_digest(held, past)
        for view, definition in past.record.views.items():
            define = partial(rules.define_view, tenant=tenant, artifact=artifact, view=view, definition=definition)
            await self._decide(define)
        for key in past.keys:
            await self._bind(where, past, key)
        for granted in self._leases.pins_of(tenant, artifact):
            await self._pin(where, granted)

    async def _say_digest(self, held: Held, past: Past) -> None:
        record = self._core.state.artifacts.get(held.where)
        digest = await self._digest(held, past)
        if record is None or record.digest is not None or digest is None or not held.manifest.digested:
            return
        doubts = self._core.feed.doubts
        ref = await self._core.store_manifest(held.manifest, deadline=known_outcome())
        say = partial(rules.digested, tenant=held.tenant, artifact=held.artifact, digest=digest, manifest=ref)
        await self._decide(say)
        await self._core.keep_manifest(held.manifest, doubts=doubts, deadline=known_outcome())

    async def _bind(self, where: Where, past: Past, key: str) -> None:
        """Bind a key again, unless somebody has used it since the loss."""
        tenant, artifact = where
        known = self._core.state.key(tenant, key)
        if known is not None and (known.artifact == artifact or not await self._is_of_old(known, past)):
            return

        def rule(state: Directory) -> Event | None:
            record = state.artifacts.get(where)
            if record is None or not record.live or state.key(tenant, key) is not known:
                return None
            return KeyBound(tenant=tenant, key=key, artifact=artifact, rebind=known is not None)

        await self._decide(rule)

    async def _is_of_old(self, known: Key, past: Past) -> bool:
        """Whether what the log says of a key is older than what it lost, or ended only with the loss."""
        if known.artifact is None and known.gone == DestroyReason.LOST:
            return True
        message = await self._core.bus.get(known.seq, deadline=known_outcome())
        return message is None or message.time_ns <= past.time_ns

    async def _pin(self, where: Where, granted: CallerLeaseGranted) -> None:
        record = self._core.state.artifacts.get(where)
        if record is None or granted.lease in record.leases or granted.lease not in self._leases:
            return
        try:
            await self._core.author.say(lambda n: replace(granted, number=n), deadline=known_outcome())
        except ConflictError as error:
            log.info("a pin was not granted again: lease=%s reason=%s", granted.lease, error)

    async def _decide(self, rule: Callable[[Directory], Event | None]) -> None:
        try:
            await self._core.author.decide(rule, deadline=known_outcome())
        except (ConflictError, NotFoundError) as error:
            log.info("a name was not given again: reason=%s", error)

    # -- versions -----------------------------------------------------------------------------------------------------

    async def _versions(self, todo: list[tuple[Where, Past]]) -> None:
        """Publish the versions again, each when it is the next of its series."""
        waiting = sorted((name, number, where) for where, past in todo for name, number in past.versions)
        patience = Deadline(VERSIONS_S)
        while waiting:
            await self._core.feed.sure(deadline=Deadline(None))
            before = len(waiting)
            waiting = [one for one in waiting if not await self._published(*one)]
            if len(waiting) == before:
                if patience.left() == 0:
                    break
                await asyncio.sleep(LOOK_AGAIN_S)
        for name, number, (_, artifact) in waiting:
            log.warning("a version stays lost, that before it is gone: %s@%d artifact=%s", name, number, artifact)

    async def _published(self, name: str, number: int, where: Where) -> bool:
        """Whether a version needs no more: it is there, another's, or its artifact is gone."""
        tenant, artifact = where
        record, series = self._core.state.artifacts.get(where), self._core.state.one_series(tenant, name)
        last = 0 if series is None else series.last
        if record is None or not record.live:
            return True
        if number <= last:
            if series is not None and series.versions.get(number) != artifact:
                log.warning("a version stays lost, its number is taken: %s@%d artifact=%s", name, number, artifact)
            return True
        if number > last + 1:
            return False

        def rule(state: Directory) -> Event | None:
            now = state.one_series(tenant, name)
            there = state.artifacts.get(where)
            if (0 if now is None else now.last) != number - 1 or there is None or not there.live:
                return None
            return VersionPublished(tenant=tenant, name=name, version=number, artifact=artifact)

        await self._until_done(lambda: self._decide(rule), what=f"{name}@{number}")
        return False

    # -- leases that are over -----------------------------------------------------------------------------------------

    async def _ends(self, position: int) -> None:
        """End the leases that the log has again and that were over here before the loss."""
        if self._over(position):
            await asyncio.sleep(ENDS_DELAY_S)  # one that was granted just now is counted in a moment
        for tenant, lease in self._over(position):
            await self._leases.end_again(tenant, lease)

    def _over(self, position: int) -> list[tuple[str, CallerLease]]:
        state, me = self._core.state, self._core.me.worker
        return [
            (tenant, lease)
            for tenant, artifact in state.by_lessor.get(me, ())
            for lease in state.artifacts[tenant, artifact].leases.values()
            if lease.worker == me and lease.lease not in self._leases and lease.seq <= position
        ]
