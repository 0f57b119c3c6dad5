"""Taking bytes in: a caller's filled segments become an artifact, with its facts, or give their memory back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Protocol

from tensorbus.clock import NS_PER_S, Deadline
from tensorbus.errors import (
    ConflictError,
    DeadlineExceededError,
    InvalidArgumentError,
    TensorbusError,
    UnavailableError,
)
from tensorbus.events import ArtifactPut, ArtifactRegistered, DestroyReason, Event, ReplicaAdded, Tier
from tensorbus.ids import ArtifactId, LeaseId, is_system_id, random_artifact_id
from tensorbus.lifecycle import Directory, Touched, rules
from tensorbus.model import Layout, Manifest
from tensorbus.transport import Segment, hash_bytes
from tensorbus.workers._core import Core, off_loop
from tensorbus.workers._store import Held, Store, Where

log = logging.getLogger("tensorbus.workers")

OUTCOME_S = 3600.0
OUTCOME_TRY_S = 10.0
OUTCOME_RETRY_DELAY_S = 0.2


def known_outcome() -> Deadline:
    """Time enough for a fact about bytes to become known or impossible: until then they must be kept."""
    return Deadline(OUTCOME_S, what="a fact about bytes held here")


class Placement(StrEnum):
    """How a caller wants a tier to have the bytes."""

    MUST = "must"
    SHOULD = "should"
    MAY = "may"


class Persist(Protocol):
    """Have a copy of what is held on disk; gives the position at which it is."""

    def __call__(self, held: Held, *, must: bool) -> Awaitable[int]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """Under which a caller's own memory is registered."""

    id: LeaseId
    holder: str
    ttl_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Incoming:
    """Bytes that a caller wants to become an artifact.

    Attributes:
        given: The caller's own id, or ``None``.
        lease: For registered memory.
        disk: Whether the bytes must be on disk before the put is done, should come there, or may.
    """

    tenant: str
    principal: str
    parts: tuple[Segment, ...]
    layout: Layout
    manifest: Manifest
    given: str | None
    key: str | None
    rebind: bool
    lease: Lease | None = None
    disk: Placement = Placement.MAY


@dataclass(frozen=True, slots=True)
class Taken:
    """The outcome: the artifact, the position at which it holds, and whether its bytes were there before."""

    artifact: ArtifactId
    position: int
    existed: bool


@dataclass(eq=False, slots=True)
class _Turn:
    """The lock of one id, for as long as somebody has it or waits for it."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    users: int = 0


class Puts:
    """Carries incoming bytes through their facts. Each runs to its end, whatever becomes of the caller."""

    def __init__(self, core: Core, store: Store, *, persist: Persist | None = None) -> None:
        self._core = core
        self._store = store
        self._persist = persist
        self._digesting = asyncio.Semaphore(1)
        self._births: dict[Where, _Turn] = {}

    async def take(self, incoming: Incoming, *, deadline: Deadline) -> Taken:
        """Make the bytes an artifact and bind its key.

        Args:
            deadline: Long enough for the outcome to become known: until then the bytes must be here.

        Raises:
            ConflictError: If the id names other bytes or the key another artifact; the memory is given back then.
        """
        try:
            for part in incoming.parts:
                part.seal()
            while True:
                incoming = await self._comparable(incoming, deadline=deadline)
                taken = await self._take(incoming, deadline=deadline)
                if taken is not None:
                    return taken
        except (DeadlineExceededError, UnavailableError):
            # A fact about the bytes may be on the log, or on its way there.
            self._core.spawn(self._settle(incoming), name="settle a put")
            raise
        except BaseException:
            self._give_back(incoming.parts)
            raise

    def _give_back(self, parts: tuple[Segment, ...]) -> None:
        if not self._store.owns(parts):
            for part in parts:
                part.release()

    async def _settle(self, incoming: Incoming) -> None:
        """Wait until the outcome of a put is known: its bytes stay if they became an artifact, else they go."""
        await self._outcome_known()
        expected = self._store.expected_with(incoming.parts)
        if expected is not None:
            self._store.forget(expected)
        self._give_back(incoming.parts)

    async def _outcome_known(self) -> None:
        """Wait until the bus answers and the own fold holds everything that was on it. A fact that comes still later
        finds its bytes gone, and is disowned."""
        while True:
            try:
                deadline = Deadline(OUTCOME_TRY_S, what="reading the end of the log")
                last = await self._core.bus.last_seq(deadline=deadline)
                return await self._core.feed.reached(last, deadline=deadline)
            except (DeadlineExceededError, UnavailableError):
                await asyncio.sleep(OUTCOME_RETRY_DELAY_S)

    async def _take(self, incoming: Incoming, *, deadline: Deadline) -> Taken | None:
        """One attempt; ``None`` if an artifact whose digest must be compared first came in between."""
        manifest = incoming.manifest
        digest = None
        if manifest.digested:
            digest = await off_loop(Manifest.content_id, manifest, weight=len(manifest))
        state, tenant, key = self._core.state, incoming.tenant, incoming.key
        artifact = ArtifactId(incoming.given or digest or random_artifact_id(self._core.ids))
        if incoming.given is None and incoming.lease is None:
            artifact = rules.named_with_bytes(state, tenant=tenant, key=key, digest=digest) or artifact
        if key is not None:
            known_as = self._known_as(tenant, artifact)
            rules.check_key_free(state, tenant=tenant, key=key, artifact=known_as, rebind=incoming.rebind)
        doubts = self._core.feed.doubts
        fact = await self._birth_fact(incoming, artifact, digest, deadline=deadline)
        held = Held(incoming.tenant, artifact, incoming.parts, incoming.layout, manifest)
        held.lease = incoming.lease.id if incoming.lease else None
        try:
            position, existing = await self._be_born(held, fact, incoming, deadline=deadline)
        except ConflictError:
            if self._undecided(incoming):
                return None
            raise
        await self._core.keep_manifest(manifest, doubts=doubts, deadline=deadline)
        if existing is not None:
            artifact, position = await self._join(incoming, existing, position, deadline=deadline)
        elif digest is None and incoming.lease is None:
            self._core.spawn(self._digest_later(held), name=f"digest {artifact}")
        position = await self._place(incoming, artifact, position, born=existing is None)
        position = await self._bind(incoming, artifact, position, born=existing is None, deadline=deadline)
        return Taken(artifact, position, existing is not None)

    async def _be_born(
        self, held: Held, fact: ArtifactPut | ArtifactRegistered, incoming: Incoming, *, deadline: Deadline
    ) -> tuple[int, ArtifactId | None]:
        """Append the birth. The bytes are served from the moment that a reader can learn of them, and not before."""
        async with self.one_at_a_time(held.where):
            before = self._store.expected(held.where)
            if before is not None:
                # Of an earlier put that was given up: two must not wait for one birth.
                async with deadline.scope():
                    await self._outcome_known()
                self._store.forget(before)
            self._store.expect(held, after=(self._core.live.replaced, self._core.state.seq))
            try:
                fact_or_known = await self._decide_birth(fact, incoming, deadline)
            except (DeadlineExceededError, UnavailableError):
                raise
            except BaseException:
                self._store.forget(held)
                raise
            self._store.forget(held)
        return fact_or_known

    async def _decide_birth(
        self, fact: ArtifactPut | ArtifactRegistered, incoming: Incoming, deadline: Deadline
    ) -> tuple[int, ArtifactId | None]:
        position, outcome = await self._core.author.decide(
            lambda state: rules.birth(state, fact), deadline=deadline, principal=incoming.principal
        )
        return position, outcome.artifact if isinstance(outcome, rules.Existing) else None

    @asynccontextmanager
    async def one_at_a_time(self, where: Where) -> AsyncIterator[None]:
        """Facts about one id's bytes here, one after the other: two puts must not both hold its place in the store."""
        turn = self._births.setdefault(where, _Turn())
        turn.users += 1
        try:
            async with turn.lock:
                yield
        finally:
            turn.users -= 1
            if not turn.users:  # an open lock tells less: the next one may be about to take it
                del self._births[where]

    async def _join(
        self, incoming: Incoming, existing: ArtifactId, position: int, *, deadline: Deadline
    ) -> tuple[ArtifactId, int]:
        """The same bytes are an artifact already: keep ours as one more replica, or give the memory back."""
        tenant = incoming.tenant
        if incoming.lease is not None:
            raise ConflictError(
                f"the same bytes are artifact {existing!r} already; a put of them joins it, a registration cannot",
                artifact=existing,
            )
        held = Held(tenant, existing, incoming.parts, incoming.layout, incoming.manifest)
        async with deadline.scope(), self.one_at_a_time(held.where):
            # A copy that is here now counts: whoever brought it has heard so.
            here = self._store.get(tenant, existing)
            if here is not None:
                here.joined = True
                if here.parts is not incoming.parts:
                    for part in incoming.parts:
                        part.release()
                return existing, position
            _, position = await self._add_replica(held, incoming.principal, deadline=deadline)
        return existing, position

    async def add_replica(
        self, held: Held, *, on_held: Callable[[Held], None] | None = None, deadline: Deadline
    ) -> tuple[Held, int]:
        """Hold a copy of an artifact that exists, and say so. If there is one here by now, that one stays.

        Args:
            on_held: Called once it is in the store, before it is said.

        Raises:
            ConflictError: If the artifact was destroyed meanwhile; the memory is given back then.
        """
        try:
            async with deadline.scope(), self.one_at_a_time(held.where):
                there = self._store.get(*held.where)
                if there is not None and there is not held:
                    held.release()
                    return there, self._core.live.position
                return await self._add_replica(held, "", on_held=on_held, deadline=deadline)
        except DeadlineExceededError:
            if self._store.get(*held.where) is not held:  # its turn did not come
                held.release()
            raise

    async def _add_replica(
        self, held: Held, principal: str, *, on_held: Callable[[Held], None] | None = None, deadline: Deadline
    ) -> tuple[Held, int]:
        record = self._core.state.artifact(held.tenant, held.artifact)
        self._store.add(held, life=0 if record is None else record.born)
        if on_held is not None:
            on_held(held)

        def fact(number: int) -> Event:
            return ReplicaAdded(
                tenant=held.tenant,
                artifact=held.artifact,
                view=None,
                tier=held.tier,
                nbytes=held.manifest.nbytes,
                number=number,
            )

        try:
            position, _ = await self._core.author.say(fact, deadline=deadline, principal=principal)
        except ConflictError:
            # By now its id may live again here, with bytes of its own.
            if self._store.get(*held.where) is held:
                self._store.drop(held.tenant, held.artifact)
            else:
                held.release()
            raise
        return held, position

    async def _place(self, incoming: Incoming, artifact: ArtifactId, position: int, *, born: bool) -> int:
        """Have the bytes on disk, if the put asks for it; if they must be and cannot, the artifact goes again."""
        held, persist = self._store.get(incoming.tenant, artifact), self._persist
        if incoming.disk is Placement.MAY or held is None or persist is None:
            return position
        if incoming.disk is Placement.SHOULD:
            self._core.spawn(self._place_later(held, persist), name=f"persist {artifact}")
            return position
        try:
            return max(position, await persist(held, must=True))
        except TensorbusError:
            if born:
                await self.abandon(incoming.tenant, artifact, born=position, principal=incoming.principal)
            raise

    async def _place_later(self, held: Held, persist: Persist) -> None:
        try:
            await persist(held, must=False)
        except TensorbusError as error:
            log.warning("not on disk, as it should be: artifact=%s reason=%s", held.artifact, error)

    async def _bind(
        self, incoming: Incoming, artifact: ArtifactId, position: int, *, born: bool, deadline: Deadline
    ) -> int:
        """Bind the key that the put named; if that cannot be, the artifact that it made goes again."""
        key = incoming.key
        if key is None:
            return position

        def rule(state: Directory) -> Event | None:
            return rules.bind(state, tenant=incoming.tenant, key=key, artifact=artifact, rebind=incoming.rebind)

        try:
            bound, _ = await self._core.author.decide(rule, deadline=deadline, principal=incoming.principal)
        except TensorbusError:
            if born:
                await self.abandon(incoming.tenant, artifact, born=position, principal=incoming.principal)
            raise
        return max(position, bound)

    async def abandon(self, tenant: str, artifact: ArtifactId, *, born: int, principal: str) -> None:
        """Destroy what a put made that did not come to its end, unless somebody else has come to count on it.

        Args:
            born: The sequence of its birth: a later life of the same id is somebody else's.
        """

        def rule(state: Directory) -> Event | None:
            here, record = self._store.get(tenant, artifact), state.artifact(tenant, artifact)
            if record is None or record.born != born or (here is not None and here.joined):
                return None
            return rules.destroy(state, tenant=tenant, artifact=artifact, reason=DestroyReason.ABANDONED)

        async with self.one_at_a_time((tenant, artifact)):  # who puts the same bytes now waits, and does not join them
            await self._core.author.decide(rule, deadline=known_outcome(), principal=principal)

    async def _birth_fact(
        self, incoming: Incoming, artifact: ArtifactId, digest: str | None, *, deadline: Deadline
    ) -> ArtifactPut | ArtifactRegistered:
        manifest = await self._core.store_manifest(incoming.manifest, deadline=deadline)
        nbytes, tensors = incoming.manifest.nbytes, len(incoming.manifest)
        lease = incoming.lease
        if lease is None:
            return ArtifactPut(
                tenant=incoming.tenant,
                artifact=artifact,
                digest=digest,
                nbytes=nbytes,
                tensors=tensors,
                manifest=manifest,
                tier=Tier.DRAM,
                key=incoming.key,
            )
        return ArtifactRegistered(
            tenant=incoming.tenant,
            artifact=artifact,
            digest=digest,
            nbytes=nbytes,
            tensors=tensors,
            manifest=manifest,
            tier=Tier.DRAM,
            key=incoming.key,
            lease=lease.id,
            holder=lease.holder,
            ttl_ns=int(lease.ttl_s * NS_PER_S),
        )

    # -- digests ------------------------------------------------------------------------------------------------------

    async def _comparable(self, incoming: Incoming, *, deadline: Deadline) -> Incoming:
        """Under a taken given id only digests can tell whether the bytes are the same, so both are computed first."""
        if incoming.given is None:
            return incoming
        if is_system_id(incoming.given):
            raise InvalidArgumentError(f"{incoming.given!r} is not an id that a caller may give")
        where = incoming.tenant, ArtifactId(incoming.given)
        found = self._core.state.artifact(*where)
        if found is None:
            return incoming
        held = self._store.get(*where)
        if found.live and found.digest is None and held is not None:
            await self._digest(held)
        elif found.live and found.digest is None:
            await self._until_digested(*where, deadline=deadline)
        return await self.digested(incoming)

    async def digested(self, incoming: Incoming) -> Incoming:
        """The same with its digests computed, if they are not known; the memory is given back if that fails."""
        if incoming.manifest.digested:
            return incoming
        probe = Held(incoming.tenant, ArtifactId(""), incoming.parts, incoming.layout, incoming.manifest)
        try:
            return replace(incoming, manifest=await asyncio.to_thread(digest_held, probe))
        except BaseException:
            self._give_back(incoming.parts)
            raise

    async def _until_digested(self, tenant: str, artifact: ArtifactId, *, deadline: Deadline) -> None:
        """Wait for the worker that holds the artifact to say its digest, or for the artifact's end."""
        changed = asyncio.Event()
        touched = Touched("artifact", tenant, artifact)
        with self._core.live.followed(lambda _, things: changed.set() if touched in things else None):
            while True:
                changed.clear()
                found = self._core.state.artifact(tenant, artifact)
                if found is None or not found.live or found.digest is not None:
                    return
                async with deadline.scope():
                    await changed.wait()

    def _undecided(self, incoming: Incoming) -> bool:
        """Whether a conflict came only from a digest that is not known yet."""
        if incoming.given is None:
            return False
        found = self._core.state.artifact(incoming.tenant, ArtifactId(incoming.given))
        return found is not None and found.live and (found.digest is None or not incoming.manifest.digested)

    async def _digest_later(self, held: Held) -> None:
        """Compute and note the digest of bytes that were put without one; one artifact at a time."""
        try:
            async with self._digesting:
                await self._digest(held)
        except TensorbusError:
            return  # the artifact or the session ended meanwhile

    async def _digest(self, held: Held) -> None:
        if held.manifest.digested or not held.valid:
            return
        manifest = await asyncio.to_thread(digest_held, held)
        deadline, doubts = known_outcome(), self._core.feed.doubts
        ref = await self._core.store_manifest(manifest, deadline=deadline)

        digest = await off_loop(Manifest.content_id, manifest, weight=len(manifest))

        def rule(state: Directory) -> Event | None:
            return rules.digested(state, tenant=held.tenant, artifact=held.artifact, digest=digest, manifest=ref)

        await self._core.author.decide(rule, deadline=deadline)
        await self._core.keep_manifest(manifest, doubts=doubts, deadline=deadline)
        held.manifest = manifest

    def _known_as(self, tenant: str, artifact: ArtifactId) -> ArtifactId:
        """The id under which the same bytes are known already, if they are."""
        found = rules.same_id(self._core.state, tenant=tenant, artifact=artifact)
        return found.artifact if found is not None and found.live else artifact


def digest_held(held: Held) -> Manifest:
    """The manifest with each tensor's digest computed from the bytes. Blocks without the interpreter's lock."""
    with held.reading() as parts:
        places = [held.part_of(offset) for offset in held.layout.offsets]
        views = [
            parts[index][offset : offset + spec.nbytes]
            for (index, offset), spec in zip(places, held.manifest, strict=True)
        ]
        try:
            return held.manifest.with_digests(hash_bytes(view) for view in views)
        finally:
            for view in views:
                view.release()


def wrong_tensors(held: Held) -> list[str]:
    """The tensors whose bytes are not those of their digests. Blocks as :func:`digest_held` does."""
    found = digest_held(held)
    return [now.name for now, then in zip(found, held.manifest, strict=True) if now.digest != then.digest]
