"""Records as callers see them (``docs/spec/control.md``), made from the Directory."""

from __future__ import annotations

from tensorbus.clock import NS_PER_S
from tensorbus.events import LeasePurpose
from tensorbus.ids import ArtifactId
from tensorbus.lifecycle import Artifact, CallerLease, Directory, Quarantine, Replica, Series, Session

Json = dict[str, object]


def artifact_info(state: Directory, record: Artifact) -> Json:
    """The ``ArtifactInfo`` of one artifact."""
    return {
        "artifact": record.artifact,
        "digest": record.digest,
        "nbytes": record.nbytes,
        "tensors": record.tensors,
        "born": record.born,
        "created_ns": record.born_ns,
        "author": record.author,
        "principal": record.principal,
        "live": record.live,
        "reason": None if record.reason is None else str(record.reason),
        "replicas": [_replica(state, replica) for replica in record.replicas.values()],
        "quarantined": [_quarantine(mark) for mark in record.quarantined.values()],
        "keys": sorted(record.keys),
        "versions": [list(version) for version in sorted(record.versions)],
        "leases": [_lease(lease) for lease in record.leases.values()],
    }


def view_info(record: Artifact, ref: str) -> Json | None:
    """The view that ``ref`` names, if it is the id of one of the artifact's: its id and definition."""
    definition = record.views.get(ArtifactId(ref))
    return None if definition is None else {"id": ref, "definition": definition}


def _replica(state: Directory, replica: Replica) -> Json:
    session = state.sessions.get(replica.worker)
    return {
        "worker": replica.worker,
        "incarnation": replica.incarnation,
        "host": session.host if session else "",
        "data": session.data if session else "",
        "tier": str(replica.tier),
        "view": replica.view,
        "nbytes": replica.nbytes,
        "leased": replica.lease is not None,
    }


def _quarantine(mark: Quarantine) -> Json:
    return {
        "worker": mark.worker,
        "tier": str(mark.tier),
        "view": mark.view,
        "cause": str(mark.cause),
        "position": mark.seq,
    }


def _lease(lease: CallerLease) -> Json:
    return {
        "lease": lease.lease,
        "worker": lease.worker,
        "purpose": str(lease.purpose),
        "holder": lease.holder,
        "ttl_s": None if lease.ttl_ns is None else lease.ttl_ns / NS_PER_S,
        "pin": lease.purpose == LeasePurpose.PIN,
    }


def session_info(state: Directory, session: Session) -> Json:
    """One worker as ``workers`` lists it."""
    return {
        "worker": session.worker,
        "incarnation": session.incarnation,
        "host": session.host,
        "roles": list(session.roles),
        "live": session.live,
        "data": session.data,
        "control": session.control,
        "pool_bytes": session.pool_bytes,
        "ttl_s": session.ttl_ns / NS_PER_S,
        "opened": session.opened,
        "opened_ns": session.opened_ns,
        "ended": session.ended,
        "pid": session.pid,
        "version": session.version,
        "replicas": len(state.by_worker.get(session.worker, ())),
    }


def series_news(state: Directory, tenant: str, series: Series, after: int) -> Json:
    """Versions of a series above ``after``: those that are there, and the numbers that are gone."""
    fresh = sorted(number for number in series.versions if number > after)
    new = []
    for number in fresh:
        record = state.artifacts[tenant, series.versions[number]]
        new.append([number, artifact_info(state, record)])
    there = set(fresh)
    gone = [number for number in range(max(after, 0) + 1, series.last + 1) if number not in there]
    return {"name": series.name, "last": series.last, "new": new, "gone": gone}
