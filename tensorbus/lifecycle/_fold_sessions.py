"""How session facts change the Directory: a worker's life begins, ends, or is replaced by its next one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tensorbus.events import Event, Recorded, SessionEnded, SessionOpened, Tier
from tensorbus.ids import WorkerId
from tensorbus.lifecycle._fold_artifacts import drop_lease, drop_quarantine, drop_replica
from tensorbus.lifecycle._fold_operations import lose
from tensorbus.lifecycle._records import Session, Touched, Verdict

if TYPE_CHECKING:
    from tensorbus.lifecycle._directory import Directory


def evolve(state: Directory, recorded: Recorded[Event]) -> Verdict:
    match recorded.event:
        case SessionOpened() as fact:
            return _opened(state, recorded, fact)
        case SessionEnded() as fact:
            return _ended(state, recorded, fact)
        case _:
            return Verdict(False, "unknown")


def _opened(state: Directory, recorded: Recorded[Event], fact: SessionOpened) -> Verdict:
    if recorded.headers.author != fact.worker or recorded.headers.incarnation != fact.incarnation:
        return Verdict(False, "fenced")
    before = state.sessions.get(fact.worker)
    if before is not None and before.incarnation == fact.incarnation:
        return Verdict(False, "duplicate")
    over = before is not None and before.live
    touched = (*_forget_memory(state, fact.worker), *lose(state, fact.worker, recorded)) if over else ()
    state.sessions[fact.worker] = Session(
        worker=fact.worker,
        incarnation=fact.incarnation,
        host=fact.host,
        roles=fact.roles,
        data=fact.data,
        control=fact.control,
        pool_bytes=fact.pool_bytes,
        ttl_ns=fact.ttl_ns,
        pid=fact.pid,
        version=fact.version,
        opened=recorded.seq,
        opened_ns=recorded.time_ns,
    )
    return Verdict(True, touched=(Touched("session", "", fact.worker), *touched))


def _ended(state: Directory, recorded: Recorded[Event], fact: SessionEnded) -> Verdict:
    session = state.sessions.get(fact.worker)
    if session is None or session.incarnation != fact.incarnation or not session.live:
        return Verdict(False, "missing")
    if not state.is_live(recorded.headers.author, recorded.headers.incarnation):
        return Verdict(False, "fenced")
    session.ended = recorded.seq
    touched = (*_forget_memory(state, fact.worker), *lose(state, fact.worker, recorded))
    return Verdict(True, touched=(Touched("session", "", fact.worker), *touched))


def _forget_memory(state: Directory, worker: WorkerId) -> tuple[Touched, ...]:
    """Replicas in memory and leases go with the session; those on disk stay, absent until the worker is back.

    The eldest artifact first: the order of an index is not the same in a state that began with a snapshot.
    """
    # A lease may outlive its replica.
    indexed = [index.get(worker, {}) for index in (state.by_worker, state.by_lessor, state.quarantined)]
    concerned = sorted({where: None for index in indexed for where in index}, key=lambda at: state.artifacts[at].born)
    for where in concerned:
        record = state.artifacts[where]
        for replica in [r for r in record.replicas.values() if r.worker == worker and r.tier != Tier.DISK]:
            drop_replica(state, record, replica.key)
        for mark in [q for q in record.quarantined.values() if q.worker == worker and q.tier != Tier.DISK]:
            drop_quarantine(state, record, mark)
        for lease in [held for held in record.leases.values() if held.worker == worker]:
            drop_lease(state, record, lease)
    return tuple(Touched("artifact", *where) for where in concerned)
