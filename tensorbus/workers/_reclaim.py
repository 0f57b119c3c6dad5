"""Keeps the memory of a worker in step with the log: what has ended there gives its memory back here."""

from __future__ import annotations

import logging

from tensorbus.clock import Deadline
from tensorbus.errors import TensorbusError
from tensorbus.events import DropReason, Event, ReplicaDropped, Tier
from tensorbus.ids import ArtifactId, Incarnation, WorkerId
from tensorbus.lifecycle import Replica, Touched
from tensorbus.workers._core import Core
from tensorbus.workers._disk import DiskTier
from tensorbus.workers._leases import Leases
from tensorbus.workers._store import Store, Where

log = logging.getLogger("tensorbus.workers")

UNTIL_SAID_S = 600.0


class Reclaim:
    """Follower of the Directory on behalf of the store. What was put is held from the moment that the fold knows it."""

    def __init__(self, core: Core, store: Store, leases: Leases, disk: DiskTier | None = None) -> None:
        self._core = core
        self._store = store
        self._leases = leases
        self._disk = disk
        self._dropping: set[tuple[Where, Tier]] = set()

    def on_change(self, _position: int, touched: tuple[Touched, ...]) -> None:
        for thing in touched:
            if thing.kind == "artifact":
                self._look(thing.tenant, ArtifactId(thing.name))

    def _look(self, tenant: str, artifact: ArtifactId) -> None:
        record = self._core.state.artifacts.get((tenant, artifact))
        if record is None:
            return
        where, held = (tenant, artifact), self._store.get(tenant, artifact)
        if held is not None and held.settling:
            if record.live and (record.author, record.incarnation) == self._life:
                self._store.born(where, at=(self._core.live.replaced, record.born))
            return
        if not record.live or (held is not None and held.life < record.born):
            self._leases.forget_artifact(tenant, artifact)
            self._store.drop(tenant, artifact)
        if not record.live:
            if self._disk is not None:
                self._disk.ended(record)
            return
        if self._store.get(*where) is None and (record.author, record.incarnation) == self._life:
            self._store.born(where, at=(self._core.live.replaced, record.born))
        for replica in [replica for replica in record.replicas.values() if self._is_mine(replica)]:
            if self._is_there(where, replica.tier) or (where, replica.tier) in self._dropping:
                continue
            # Said, but not held: a put that was given up and counted all the same. Nobody may be sent here for it.
            self._dropping.add((where, replica.tier))
            self._core.spawn(self._disown(tenant, artifact, replica), name=f"disown {artifact}")

    def _is_there(self, where: Where, tier: Tier) -> bool:
        if tier is Tier.DISK and self._disk is not None:
            return self._disk.holds(where)
        return self._store.get(*where) is not None or self._store.is_aside(where)

    @property
    def _life(self) -> tuple[WorkerId, Incarnation]:
        return self._core.me.worker, self._core.me.incarnation

    def _is_mine(self, replica: Replica) -> bool:
        return (replica.worker, replica.incarnation) == self._life and replica.lease is None

    async def _disown(self, tenant: str, artifact: ArtifactId, replica: Replica) -> None:
        def fact(number: int) -> Event:
            return ReplicaDropped(
                tenant=tenant,
                artifact=artifact,
                view=replica.view,
                tier=replica.tier,
                reason=DropReason.EVICTED,
                number=number,
            )

        try:
            await self._core.author.say(fact, deadline=Deadline(UNTIL_SAID_S))
        except TensorbusError as error:
            log.info("replica not disowned: artifact=%s reason=%s", artifact, error)
        finally:
            self._dropping.discard(((tenant, artifact), replica.tier))
