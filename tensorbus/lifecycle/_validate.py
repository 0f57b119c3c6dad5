"""What always holds in a Directory, whatever was on the log: each index agrees with what it indexes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from tensorbus.events import Tier
from tensorbus.lifecycle._fold_operations import FINISHED_MAX
from tensorbus.lifecycle._records import Artifact, Operation

if TYPE_CHECKING:
    from tensorbus.lifecycle._directory import Directory


def violations(state: Directory) -> Iterator[str]:
    """Each way in which the state contradicts itself, in words; nothing for a sound one. Costs as much as the state."""
    yield from _artifact_violations(state)
    yield from _name_violations(state)
    yield from _index_violations(state)
    yield from _operation_violations(state)
    for about, seq in state.heads.items():
        if not (about.contested and 0 < seq <= state.seq):
            yield f"head of {about} is {seq} in a state at {state.seq}"
    if state.hash() != state.full_hash():
        yield "the hash kept along the way is not that of the state"


def _artifact_violations(state: Directory) -> Iterator[str]:
    for where, record in state.artifacts.items():
        if record.where != where or where != (record.tenant, record.artifact):
            yield f"{where} holds the record of {record.where}"
        left = (record.replicas, record.quarantined, record.leases, record.views, record.keys, record.versions)
        if not record.live and any(left):
            yield f"{where} has ended and still has replicas, leases, views or names"
        yield from _holding_violations(state, record)


def _holding_violations(state: Directory, record: Artifact) -> Iterator[str]:
    for key, replica in record.replicas.items():
        if key != replica.key:
            yield f"{record.where}: {replica} lies under {key}"
        if replica.tier is not Tier.DISK and not state.is_live(replica.worker, replica.incarnation):
            yield f"{record.where}: {replica} outlived its session"
        if replica.view is not None and replica.view not in record.views:
            yield f"{record.where}: {replica} is of an unknown view"
    for key, mark in record.quarantined.items():
        if key != mark.key or key in record.replicas:
            yield f"{record.where}: {mark} lies under {key}, or is read from"
        if mark.tier is not Tier.DISK and not state.is_live(mark.worker, mark.incarnation):
            yield f"{record.where}: {mark} outlived its session"
    for name, lease in record.leases.items():
        session = state.sessions.get(lease.worker)
        if name != lease.lease or lease.artifact != record.artifact:
            yield f"{record.where}: {lease} lies under {name}"
        if session is None or not session.live or lease.seq < session.opened:
            yield f"{record.where}: {lease} outlived its session"


def _name_violations(state: Directory) -> Iterator[str]:
    bound = {(t, k): key.artifact for (t, k), key in state.keys.items() if key.artifact is not None}
    named = {(r.tenant, key): r.artifact for r in state.artifacts.values() for key in r.keys}
    yield from _difference("keys", bound, named)
    present = {(t, n, v): a for (t, n), series in state.series.items() for v, a in series.versions.items()}
    published = {(r.tenant, *version): r.artifact for r in state.artifacts.values() for version in r.versions}
    yield from _difference("versions", present, published)
    for (_, name), series in state.series.items():
        if any(not 0 < number <= series.last for number in series.versions):
            yield f"series {name!r} has a version outside of 1..{series.last}"


def _operation_violations(state: Directory) -> Iterator[str]:
    indexed = {(w, o): True for w, of in state.running.items() for o in of}
    yield from _difference("running", indexed, {(o.worker, o.where): True for o in _operations(state, running=True)})
    indexed = {(w, o): True for w, of in state.finished.items() for o in of}
    yield from _difference("finished", indexed, {(o.worker, o.where): True for o in _operations(state, running=False)})
    for where, operation in state.operations.items():
        if operation.where != where:
            yield f"operation {where} holds {operation.where}"
        if operation.running and not state.is_live(operation.worker, operation.incarnation):
            yield f"operation {where} outlived its session"
    for of in (*state.running.values(), *state.finished.values()):
        if not len(of) > 0:
            yield "operations keep an empty entry"
    if any(len(of) > FINISHED_MAX for of in state.finished.values()):
        yield "more operations are kept than should be"


def _operations(state: Directory, *, running: bool) -> list[Operation]:
    return [operation for operation in state.operations.values() if operation.running == running]


def _index_violations(state: Directory) -> Iterator[str]:
    live = [record for record in state.artifacts.values() if record.live]
    digests = {(r.tenant, r.digest, r.artifact): True for r in live if r.digest is not None}
    indexed = {(*digest, artifact): True for digest, linked in state.by_digest.items() for artifact in linked}
    yield from _difference("by_digest", indexed, digests)
    yield from _difference("by_view", state.by_view, {(r.tenant, v): r.artifact for r in live for v in r.views})
    holders = {(replica.worker, r.where): True for r in live for replica in r.replicas.values()}
    yield from _difference("by_worker", {(w, a): True for w, of in state.by_worker.items() for a in of}, holders)
    marked = {(mark.worker, r.where): True for r in live for mark in r.quarantined.values()}
    yield from _difference("quarantined", {(w, a): True for w, of in state.quarantined.items() for a in of}, marked)
    lessors = {(lease.worker, r.where): True for r in live for lease in r.leases.values()}
    yield from _difference("by_lessor", {(w, a): True for w, of in state.by_lessor.items() for a in of}, lessors)
    empty = {r.where: None for r in live if not r.replicas and not r.quarantined}
    yield from _difference("orphans", dict.fromkeys(state.orphans), empty)
    for name in ("by_digest", "by_worker", "quarantined", "by_lessor"):
        if not all(getattr(state, name).values()):
            yield f"{name} keeps an empty entry"


def _difference(name: str, kept: Mapping[Any, object], true: Mapping[Any, object]) -> Iterator[str]:
    if kept != true:
        more = {key: value for key, value in kept.items() if true.get(key) != value or key not in true}
        less = {key: value for key, value in true.items() if kept.get(key) != value or key not in kept}
        yield f"{name} has {more} too much and {less} too little"
