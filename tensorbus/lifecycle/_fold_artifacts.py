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
    DropReason,
    Event,
    LeasePurpose,
    Recorded,
    ReplicaAdded,
    ReplicaDropped,
    ReplicaQuarantined,
    ViewDefined,
)
from tensorbus.ids import ArtifactId, Incarnation, WorkerId
from tensorbus.lifecycle._records import (
    Artifact,
    CallerLease,
    Key,
    Quarantine,
    Replica,
    ReplicaKey,
    Session,
    Touched,
    Verdict,
)

if TYPE_CHECKING:
    from tensorbus.lifecycle._directory import Directory


def evolve(state: Directory, recorded: Recorded[Event], author: Session) -> Verdict:
    match recorded.event:  # what there is most of comes first, here and below
        case (
            ReplicaAdded()
            | ReplicaDropped()
            | ReplicaQuarantined()
            | ArtifactDigested()
            | ViewDefined()
            | ArtifactDestroyed()
            | CallerLeaseGranted()
            | CallerLeaseEnded()
        ) as fact:
            record = state.artifacts.get((fact.tenant, fact.artifact))
            if record is None or record.destroyed is not None:
                return Verdict(False, "destroyed" if record else "missing")
            return _changed(state, record, recorded, author)
        case ArtifactPut() | ArtifactRegistered() as fact:
            return _born(state, recorded, fact, author)
        case _:
            return Verdict(False, "unknown")


def _born(
    state: Directory, recorded: Recorded[Event], fact: ArtifactPut | ArtifactRegistered, author: Session
) -> Verdict:
    where = (fact.tenant, fact.artifact)
    before = state.artifacts.get(where)
    if before is not None and before.live:
        return Verdict(False, "conflict")
    if before is not None and (fact.digest is None or before.digest != fact.digest):
        return Verdict(False, "conflict")  # an id names the same bytes for good, also after its artifact ended
    record = Artifact(
        where=where,
        tenant=fact.tenant,
        artifact=fact.artifact,
        digest=fact.digest,
        nbytes=fact.nbytes,
        tensors=fact.tensors,
        manifest=fact.manifest,
        key=fact.key,
        born=recorded.seq,
        born_ns=recorded.time_ns,
        author=author.worker,
        incarnation=author.incarnation,
        principal=recorded.headers.principal,
    )
    state.artifacts[where] = record
    _link(state, record)
    lease = None
    if isinstance(fact, ArtifactRegistered):
        lease = fact.lease
        purpose = LeasePurpose.REGISTER
        add_lease(
            state,
            record,
            CallerLease(lease, record.artifact, record.author, purpose, fact.holder, fact.ttl_ns, recorded.seq),
        )
    add_replica(
        state,
        record,
        Replica(record.author, record.incarnation, fact.tier, None, fact.nbytes, lease, recorded.seq),
    )
    return _kept(record)


def _changed(state: Directory, record: Artifact, recorded: Recorded[Event], author: Session) -> Verdict:
    match recorded.event:
        case ReplicaAdded() as fact:
            if fact.view is not None and fact.view not in record.views:
                return Verdict(False, "missing")
            nbytes = record.nbytes if fact.nbytes == record.nbytes else fact.nbytes  # one int object for all copies
            for mark in [q for q in record.quarantined.values() if (q.worker, q.view) == (author.worker, fact.view)]:
                _lift(state, record, mark)
            add_replica(
                state,
                record,
                Replica(author.worker, author.incarnation, fact.tier, fact.view, nbytes, None, recorded.seq),
            )
        case ArtifactDigested() as fact:
            if record.digest is not None:
                return Verdict(False, "duplicate" if record.digest == fact.digest else "conflict")
            record.digest, record.manifest = fact.digest, fact.manifest
            _link(state, record)
        case ViewDefined() as fact:
            if fact.view in record.views:
                return Verdict(False, "duplicate")
            if (fact.tenant, fact.view) in state.by_view:
                return Verdict(False, "conflict")  # an id is made from base and definition: never of two bases
            record.views[fact.view] = fact.definition
            state.by_view[fact.tenant, fact.view] = record.artifact
        case ArtifactDestroyed() as fact:
            return _destroyed(state, record, recorded, fact.reason)
        case ReplicaDropped() as fact:
            if fact.reason is DropReason.ASKED and not spare(state, record, author.worker):
                return Verdict(False, "held")
            if not drop_replica(state, record, ReplicaKey(author.worker, fact.view, fact.tier)):
                return Verdict(False, "missing")
        case ReplicaQuarantined() as fact:
            if not _quarantine(state, record, fact, recorded.seq, author):
                return Verdict(False, "missing")
        case CallerLeaseGranted() as fact:
            known = record.leases.get(fact.lease)
            if known is not None:
                return Verdict(False, "duplicate" if known.worker == author.worker else "conflict")
            add_lease(
                state,
                record,
                CallerLease(
                    fact.lease, record.artifact, author.worker, fact.purpose, fact.holder, fact.ttl_ns, recorded.seq
                ),
            )
        case CallerLeaseEnded() as fact:
            held = record.leases.get(fact.lease)
            if held is None or held.worker != author.worker:
                return Verdict(False, "missing")
            drop_lease(state, record, held)
            for replica in [r for r in record.replicas.values() if r.lease == fact.lease]:
                drop_replica(state, record, replica.key, (author.worker, author.incarnation))
            for mark in [q for q in record.quarantined.values() if q.lease == fact.lease]:
                drop_quarantine(state, record, mark, (author.worker, author.incarnation))
    return _kept(record)


def _destroyed(state: Directory, record: Artifact, recorded: Recorded[Event], reason: DestroyReason) -> Verdict:
    if record.outlives(reason):
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
    for mark in list(record.quarantined.values()):
        _lift(state, record, mark)
    for lease in list(record.leases.values()):
        drop_lease(state, record, lease)
    for view in record.views:
        state.by_view.pop((record.tenant, view), None)
    if record.digest is not None:
        linked = state.by_digest.get((record.tenant, record.digest), {})
        linked.pop(record.artifact, None)
        if not linked:
            state.by_digest.pop((record.tenant, record.digest), None)
    for index in (record.keys, record.versions, record.views):
        index.clear()
    record.destroyed, record.reason = recorded.seq, reason
    state.orphans.pop(record.where, None)
    return Verdict(True, touched=tuple(touched))


def add_replica(state: Directory, record: Artifact, replica: Replica) -> None:
    """Note a copy, and that its worker has something of the artifact."""
    record.replicas[state.shared_key(replica.key)] = replica
    state.by_worker.setdefault(replica.worker, {})[record.where] = None
    state.orphans.pop(record.where, None)


def spare(state: Directory, record: Artifact, worker: WorkerId) -> bool:
    """Whether a worker's copy can go: it granted no lease on it, and another living worker has a whole one of its own.

    Of two that give up the last two copies at once, the log keeps the first.
    """
    if any(lease.worker == worker for lease in record.leases.values()):
        return False
    others = (r for r in record.replicas.values() if r.worker != worker and r.view is None and r.lease is None)
    return any(state.is_live(other.worker, other.incarnation) for other in others)


def drop_replica(
    state: Directory, record: Artifact, key: ReplicaKey, owed_by: tuple[WorkerId, Incarnation] | None = None
) -> bool:
    """Forget a copy; an artifact whose last one goes becomes an orphan. Says whether it was there."""
    if record.replicas.pop(key, None) is None:
        return False
    if not any(other.worker == key.worker for other in record.replicas):
        _unindex(state.by_worker, key.worker, record)
    _orphaned(state, record, owed_by)
    return True


def _orphaned(state: Directory, record: Artifact, owed_by: tuple[WorkerId, Incarnation] | None) -> None:
    """An artifact of which there is nothing left ends; one with a corrupt copy says so to its readers meanwhile."""
    if record.live and not record.replicas and not record.quarantined:
        state.orphans[record.where] = owed_by


def _quarantine(state: Directory, record: Artifact, fact: ReplicaQuarantined, seq: int, author: Session) -> bool:
    """Read from a copy no more; says whether it was there."""
    key = state.shared_key(ReplicaKey(author.worker, fact.view, fact.tier))
    replica = record.replicas.get(key)
    if replica is None:
        return False
    mark = Quarantine(author.worker, author.incarnation, fact.tier, fact.view, fact.cause, replica.lease, seq)
    record.quarantined[key] = mark
    state.quarantined.setdefault(author.worker, {})[record.where] = None
    return drop_replica(state, record, key)


def drop_quarantine(
    state: Directory, record: Artifact, mark: Quarantine, owed_by: tuple[WorkerId, Incarnation] | None = None
) -> None:
    """Forget a copy with wrong bytes; an artifact of which nothing is left becomes an orphan."""
    _lift(state, record, mark)
    _orphaned(state, record, owed_by)


def _lift(state: Directory, record: Artifact, mark: Quarantine) -> None:
    del record.quarantined[mark.key]
    if not any(other.worker == mark.worker for other in record.quarantined):
        _unindex(state.quarantined, mark.worker, record)


def add_lease(state: Directory, record: Artifact, lease: CallerLease) -> None:
    record.leases[lease.lease] = lease
    state.by_lessor.setdefault(lease.worker, {})[record.where] = None


def drop_lease(state: Directory, record: Artifact, lease: CallerLease) -> None:
    del record.leases[lease.lease]
    if not any(other.worker == lease.worker for other in record.leases.values()):
        _unindex(state.by_lessor, lease.worker, record)


def _unindex(index: dict[WorkerId, dict[tuple[str, ArtifactId], None]], worker: WorkerId, record: Artifact) -> None:
    of_worker = index.get(worker, {})
    of_worker.pop(record.where, None)
    if not of_worker:
        index.pop(worker, None)


def _link(state: Directory, record: Artifact) -> None:
    if record.digest is not None:
        state.by_digest.setdefault((record.tenant, record.digest), {})[record.artifact] = None


def _kept(record: Artifact) -> Verdict:
    return Verdict(True, "", (Touched("artifact", record.tenant, record.artifact),))
