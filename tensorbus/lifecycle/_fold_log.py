"""How facts about the log itself change the Directory: who keeps it, what of it is archived, purged and forgotten.

Also what is fixed for the whole cluster.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tensorbus.events import (
    SHARDS_MAX,
    STORE_ROLE,
    Aggregate,
    Archived,
    Event,
    FoldRaised,
    LogPurged,
    LogTruncated,
    PurgeCompleted,
    Recorded,
    RoleGranted,
    RoleResigned,
    ShardsFixed,
    SnapshotTaken,
    aggregate,
)
from tensorbus.ids import ArtifactId, WorkerId
from tensorbus.lifecycle._fold_operations import forget_operations
from tensorbus.lifecycle._records import Purge, RoleLease, Touched, Verdict

if TYPE_CHECKING:
    from tensorbus.lifecycle._directory import Directory

KINDS = frozenset({"role", "snap", "archive", "purge", "trunc", "fold", "cluster"})
LOG = Touched("log", "", "")
CLUSTER = Touched("cluster", "", "")


def evolve(state: Directory, recorded: Recorded[Event]) -> Verdict:
    match recorded.event:
        case RoleGranted() as fact:
            return _granted(state, recorded, fact)
        case RoleResigned() as fact:
            return _resigned(state, recorded, fact)
        case ShardsFixed() as fact:
            if state.shards or not 0 < fact.shards <= SHARDS_MAX:
                return Verdict(False, "conflict")
            state.shards = fact.shards
            return Verdict(True, touched=(CLUSTER,))
        case LogTruncated() | FoldRaised():
            return _raised(state, recorded)
        case SnapshotTaken() | Archived() | LogPurged() | PurgeCompleted():
            return _kept_log(state, recorded) if _holds_store(state, recorded) else Verdict(False, "fenced")
        case _:
            return Verdict(False, "unknown")


def _granted(state: Directory, recorded: Recorded[Event], fact: RoleGranted) -> Verdict:
    """A grant is kept whatever its headers say: in the server too, the last message of the filter is the token."""
    headers = recorded.headers
    state.roles[fact.role] = RoleLease(fact.role, headers.author, headers.incarnation, recorded.seq)
    return Verdict(True, touched=(Touched("role", "", fact.role),))


def _resigned(state: Directory, recorded: Recorded[Event], fact: RoleResigned) -> Verdict:
    """Only who has the role gives it up. A message that does not count ends the token all the same."""
    held, headers = state.roles.get(fact.role), recorded.headers
    if held is None or (held.worker, held.incarnation, held.token) != (
        headers.author,
        headers.incarnation,
        headers.expected,
    ):
        return Verdict(False, "fenced")
    del state.roles[fact.role]
    return Verdict(True, touched=(Touched("role", "", fact.role),))


def _raised(state: Directory, recorded: Recorded[Event]) -> Verdict:
    match recorded.event:
        case LogTruncated() as fact:
            state.log.truncations += 1
            state.log.truncated_from = min(fact.last + 1, fact.seq)
            state.log.truncated_to = max(fact.seq, recorded.seq - 1)
        case FoldRaised() as fact:
            if fact.version <= state.log.fold:
                return Verdict(False, "duplicate")
            state.log.fold = fact.version
    return Verdict(True, touched=(LOG,))


def _holds_store(state: Directory, recorded: Recorded[Event]) -> bool:
    """Whether the author's incarnation has the store's role, and names the token of the grant in force."""
    held, headers = state.roles.get(STORE_ROLE), recorded.headers
    return (
        held is not None
        and held.token == headers.token == headers.expected == state.head(Aggregate("role", STORE_ROLE))
        and (held.worker, held.incarnation) == (headers.author, headers.incarnation)
    )


def _kept_log(state: Directory, recorded: Recorded[Event]) -> Verdict:
    kept = state.log
    match recorded.event:
        case Archived() as fact:
            if kept.archived and fact.first != kept.archived + 1:
                return Verdict(False, "duplicate" if fact.last <= kept.archived else "conflict")
            kept.archive_first = kept.archive_first or fact.first
            kept.archived = fact.last
        case LogPurged() as fact:
            if kept.announced is not None and fact.upto <= kept.announced.upto:
                return Verdict(False, "duplicate")
            kept.announced = Purge(recorded.seq, recorded.time_ns, fact.upto, fact.snapshot, fact.forget, fact.delay_ns)
        case PurgeCompleted() as fact:
            if kept.announced is None or fact.upto != kept.announced.upto or fact.upto <= kept.purged:
                return Verdict(False, "duplicate" if fact.upto <= kept.purged else "missing")
            kept.purged, kept.forgotten = fact.upto, kept.announced.forget
            operations = forget_operations(state, kept.forgotten)
            return Verdict(True, touched=(LOG, *operations, *forget(state, kept.forgotten)))
    return Verdict(True, touched=(LOG,))


def forget(state: Directory, upto: int) -> tuple[Touched, ...]:
    """Drop what ended at or before a sequence, with its head: the server has no message of it any more."""
    gone = forgettable(state, upto)
    for touched, about in gone:
        match touched.kind:
            case "artifact":
                del state.artifacts[touched.tenant, ArtifactId(touched.name)]
            case "key":
                del state.keys[touched.tenant, touched.name]
            case _:
                del state.sessions[WorkerId(touched.name)]
        state.forget(touched, about)
    return tuple(touched for touched, _ in gone)


def forgettable(state: Directory, upto: int) -> list[tuple[Touched, Aggregate]]:
    """What ended at or before a sequence and was not heard of since: artifacts, names and sessions.

    Series stay, so that a version number is never given twice.
    """
    found: list[tuple[Touched, Aggregate]] = []

    def consider(touched: Touched, ended: int | None) -> None:
        about = aggregate(touched.kind, touched.tenant, touched.name)
        if ended is not None and max(ended, state.head(about)) <= upto:
            found.append((touched, about))

    for where, record in state.artifacts.items():
        if not record.live:
            consider(Touched("artifact", *where), record.destroyed)
    for (tenant, name), key in state.keys.items():
        if key.artifact is None:
            consider(Touched("key", tenant, name), key.seq)
    for worker, session in state.sessions.items():
        if not session.live and worker not in state.by_worker:
            consider(Touched("session", "", worker), session.ended)
    return found
