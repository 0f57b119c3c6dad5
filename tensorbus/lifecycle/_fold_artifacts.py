"""How facts about artifacts, their replicas and their leases change the Directory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tensorbus.events import (
    ArtifactDestroyed,
    ArtifactDigested,
    ArtifactPut,
    ArtifactRegistered,
    CallerLeaseEnded,
    CallerLeaseGranted,
    DestroyReason,
    Event,
    LeasePurpose,
    Recorded,
    ReplicaAdded,
    ReplicaDropped,
    ViewDefined,
)
from tensorbus.ids import ArtifactId, Incarnation, WorkerId
from tensorbus.lifecycle._records import (
    Artifact,
    CallerLease,
    Key,
    Replica,
    ReplicaKey,
    Touched,
    Verdict,
)

if TYPE_CHECKING:
    from tensorbus.lifecycle._directory import Directory


def evolve(state: Directory, recorded: Recorded[Event]) -> Verdict:
    match recorded.event:
        case ArtifactPut() | ArtifactRegistered() as fact:
            return _born(state, recorded, fact)
        case (
            ArtifactDigested()
            | ViewDefined()
            | ArtifactDestroyed()
            | ReplicaAdded()
            | ReplicaDropped()
            | CallerLeaseGranted()
            | CallerLeaseEnded()
        ) as fact:
            record = state.artifacts.get((fact.tenant, fact.artifact))
            if record is None or not record.live:
                return Verdict(False, "destroyed" if record else "missing")
            return _changed(state, record, recorded)
        case _:
            return Verdict(False, "unknown")


def _born(state: Directory, recorded: Recorded[Event], fact: ArtifactPut | ArtifactRegistered) -> Verdict:
    where = (fact.tenant, fact.artifact)
    before = state.artifacts.get(where)
    if before is not None and before.live:
        return Verdict(False, "conflict")
    if before is not None and (fact.digest is None or before.digest != fact.digest):
        return Verdict(False, "conflict")  # an id names the same bytes for good, also after its artifact ended
    record = Artifact(
        tenant=fact.tenant,
        artifact=fact.artifact,
        digest=fact.digest,
        nbytes=fact.nbytes,
        tensors=fact.tensors,
        manifest=fact.manifest,
        key=fact.key,
        born=recorded.seq,
        born_ns=recorded.time_ns,
        author=recorded.headers.author,
        incarnation=recorded.headers.incarnation,
        principal=recorded.headers.principal,
    )
    state.artifacts[where] = record
    _link(state, record)
    lease = None
    if isinstance(fact, ArtifactRegistered):
        lease = fact.lease
        record.leases[lease] = CallerLease(
            lease, fact.artifact, record.author, LeasePurpose.REGISTER, fact.holder, fact.ttl_ns, recorded.seq
        )
    add_replica(
        state,
        record,
        Replica(record.author, record.incarnation, fact.tier, None, fact.nbytes, lease, recorded.seq),
    )
    return _kept(record)


def _changed(state: Directory, record: Artifact, recorded: Recorded[Event]) -> Verdict:
    author = recorded.headers.author
    match recorded.event:
        case ArtifactDigested() as fact:
            if record.digest is not None:
                return Verdict(False, "duplicate" if record.digest == fact.digest else "conflict")
            record.digest, record.manifest = fact.digest, fact.manifest
            _link(state, record)
        case ViewDefined() as fact:
            if fact.view in record.views:
                return Verdict(False, "duplicate")
            record.views[fact.view] = fact.definition
            state.by_view[fact.tenant, fact.view] = fact.artifact
        case ArtifactDestroyed() as fact:
            return _destroyed(state, record, recorded, fact.reason)
        case ReplicaAdded() as fact:
            if fact.view is not None and fact.view not in record.views:
                return Verdict(False, "missing")
            add_replica(
                state,
                record,
                Replica(author, recorded.headers.incarnation, fact.tier, fact.view, fact.nbytes, None, recorded.seq),
            )
        case ReplicaDropped() as fact:
            if not drop_replica(state, record, ReplicaKey(author, fact.view, fact.tier)):
                return Verdict(False, "missing")
        case CallerLeaseGranted() as fact:
            record.leases[fact.lease] = CallerLease(
                fact.lease, fact.artifact, author, fact.purpose, fact.holder, fact.ttl_ns, recorded.seq
            )
        case CallerLeaseEnded() as fact:
            held = record.leases.get(fact.lease)
            if held is None or held.worker != author:
                return Verdict(False, "missing")
            del record.leases[fact.lease]
            for replica in [r for r in record.replicas.values() if r.lease == fact.lease]:
                drop_replica(state, record, replica.key, (author, recorded.headers.incarnation))
    return _kept(record)


def _destroyed(state: Directory, record: Artifact, recorded: Recorded[Event], reason: DestroyReason) -> Verdict:
    if reason in (DestroyReason.LOST, DestroyReason.LEASE_ENDED) and record.replicas:
        return Verdict(False, "held")
    touched = [Touched("artifact", record.tenant, record.artifact)]
    for key in record.keys:
        state.keys[record.tenant, key] = Key(key, None, recorded.seq, gone=str(reason))
        touched.append(Touched("key", record.tenant, key))
    for name, number in record.versions:
        state.series[record.tenant, name].versions.pop(number, None)
        touched.append(Touched("series", record.tenant, name))
    for replica in list(record.replicas):
        drop_replica(state, record, replica)
    for view in record.views:
        state.by_view.pop((record.tenant, view), None)
    if record.digest is not None:
        linked = state.by_digest.get((record.tenant, record.digest), {})
        linked.pop(record.artifact, None)
        if not linked:
            state.by_digest.pop((record.tenant, record.digest), None)
    for index in (record.keys, record.versions, record.leases, record.views):
        index.clear()
    record.destroyed, record.reason = recorded.seq, reason
    state.orphans.pop((record.tenant, record.artifact), None)
    return Verdict(True, touched=tuple(touched))


def add_replica(state: Directory, record: Artifact, replica: Replica) -> None:
    """Note a copy, and that its worker has something of the artifact."""
    where = (record.tenant, record.artifact)
    record.replicas[replica.key] = replica
    state.by_worker.setdefault(replica.worker, {})[where] = None
    state.orphans.pop(where, None)


def drop_replica(
    state: Directory, record: Artifact, key: ReplicaKey, owed_by: tuple[WorkerId, Incarnation] | None = None
) -> bool:
    """Forget a copy; an artifact whose last one goes becomes an orphan. Says whether it was there."""
    if record.replicas.pop(key, None) is None:
        return False
    where = (record.tenant, record.artifact)
    if not any(other.worker == key.worker for other in record.replicas):
        of_worker = state.by_worker.get(key.worker, {})
        of_worker.pop(where, None)
        if not of_worker:
            state.by_worker.pop(key.worker, None)
    if not record.replicas and record.live:
        state.orphans[where] = owed_by
    return True


def _link(state: Directory, record: Artifact) -> None:
    if record.digest is not None:
        state.by_digest.setdefault((record.tenant, record.digest), {})[record.artifact] = None


def _kept(record: Artifact) -> Verdict:
    return Verdict(True, touched=(Touched("artifact", record.tenant, ArtifactId(record.artifact)),))
