"""Rules about the log itself: who keeps it, what its keeper may say, and what is fixed for the cluster."""

from __future__ import annotations

from typing import Literal

from tensorbus.errors import ConflictError, FencedError, InvalidArgumentError
from tensorbus.events import (
    SHARDS_MAX,
    STORE_ROLE,
    Aggregate,
    Archived,
    Event,
    LogPurged,
    LogTruncated,
    PurgeCompleted,
    RoleGranted,
    RoleResigned,
    ShardsFixed,
    StreamName,
)
from tensorbus.ids import EventId, Incarnation, WorkerId
from tensorbus.lifecycle._directory import Directory
from tensorbus.lifecycle._records import LogState, RoleLease


def take_role(
    state: Directory, *, role: Literal["store"], worker: WorkerId, incarnation: Incarnation
) -> Event | RoleLease:
    """Take a role for a worker's incarnation, unless a living one has it: then that one's lease."""
    return role_holder(state, role) or RoleGranted(role=role)


def resign_role(
    state: Directory, *, role: Literal["store"], worker: WorkerId, incarnation: Incarnation
) -> RoleResigned | None:
    """Give a role up that a worker's incarnation has; ``None`` if it has it not, or not any more."""
    return RoleResigned(role=role) if has_role(state, role=role, worker=worker, incarnation=incarnation) else None


def has_role(state: Directory, *, role: str, worker: WorkerId, incarnation: Incarnation) -> bool:
    """Whether the grant in force is that of a worker's incarnation: the last message about the role is its grant."""
    held = _in_force(state, role)
    return held is not None and (held.worker, held.incarnation) == (worker, incarnation)


def role_holder(state: Directory, role: str) -> RoleLease | None:
    """Who has a role: whose grant is in force and whose session is open."""
    held = _in_force(state, role)
    return held if held is not None and state.is_live(held.worker, held.incarnation) else None


def _in_force(state: Directory, role: str) -> RoleLease | None:
    held = state.roles.get(role)
    return held if held is not None and held.token == role_token(state, role) else None


def as_keeper(state: Directory, fact: Event, *, worker: WorkerId, incarnation: Incarnation) -> Event:
    """A fact that only the store may say, if this incarnation has the store's role.

    Raises:
        FencedError: If it has not, or not any more.
        ConflictError: If the log says already what the fact is about, perhaps by an earlier attempt of its own.
    """
    if not has_role(state, role=STORE_ROLE, worker=worker, incarnation=incarnation):
        held = state.roles.get(STORE_ROLE)
        who = "nobody" if held is None else f"worker {held.worker} (incarnation {held.incarnation})"
        raise FencedError(
            f"worker {worker} does not keep the log now, {who} does", worker=worker, incarnation=incarnation
        )
    if not _follows(state.log, fact):
        raise ConflictError(f"a {fact.type} was decided on what the log was before: it would not count", type=fact.type)
    return fact


def _follows(kept: LogState, fact: Event) -> bool:
    """Whether the fold would keep what the log's keeper says, next."""
    match fact:
        case Archived():
            return not kept.archived or fact.first == kept.archived + 1
        case LogPurged():
            return kept.announced is None or fact.upto > kept.announced.upto
        case PurgeCompleted():
            return kept.announced is not None and fact.upto == kept.announced.upto and fact.upto > kept.purged
        case _:
            return True


def fix_shards(state: Directory, *, shards: int) -> Event | int:
    """Fix the number of the cluster's shards, unless it is: then that number.

    Raises:
        InvalidArgumentError: If it is no power of two from 1 to 65,536.
        ConflictError: If the cluster has another number, which cannot be changed.
    """
    if not 1 <= shards <= SHARDS_MAX or shards & (shards - 1):
        raise InvalidArgumentError(f"the number of shards must be a power of two up to {SHARDS_MAX}, not {shards}")
    if state.shards and state.shards != shards:
        raise ConflictError(
            f"this cluster's pages are in {state.shards} shards, not {shards}: the number is fixed for ever, set it so",
            shards=state.shards,
        )
    return state.shards or ShardsFixed(shards=shards)


def note_truncation(
    state: Directory, *, stream: StreamName, seq: int, event_id: EventId, last: int, known: int
) -> Event | None:
    """Record that a remembered fact is gone; ``None`` if somebody else has recorded a loss meanwhile.

    Args:
        last: The last sequence that the log had when the fact was missed.
        known: Sequence of the newest :class:`LogTruncated`, which was about an earlier loss; 0 if there was none.
    """
    if state.head(Aggregate("trunc", stream)) != known:
        return None
    return LogTruncated(stream=stream, seq=seq, event_id=event_id, last=last)


def role_token(state: Directory, role: str) -> int:
    """The fencing token in force for a role: the sequence of the last message on its subject, 0 if there is none."""
    return state.head(Aggregate("role", role))
