"""The rules: what fact, if any, follows when somebody asks for a change. Pure; the shell appends what they return.

Each returns the one fact to propose, or ``None`` when the state is as asked already, and raises a typed error when it
cannot be. The fold has the last word at the fact's sequence, by the same conditions.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from tensorbus.errors import ConflictError, CorruptError, NotFoundError
from tensorbus.events import (
    ArtifactDestroyed,
    ArtifactDigested,
    ArtifactPut,
    ArtifactRegistered,
    DestroyReason,
    KeyBound,
    KeyUnbound,
    ManifestRef,
    SessionEnd,
    SessionEnded,
    VersionPublished,
    ViewDefined,
)
from tensorbus.ids import RANDOM_PREFIX, ArtifactId, Incarnation, WorkerId, is_system_id
from tensorbus.lifecycle._directory import Directory
from tensorbus.lifecycle._records import Artifact, Key, Series

NAMES_BYTES_MAX: Final = 16 * 1024
"""Room for the keys, and for the versions, that an :class:`ArtifactDestroyed` lists."""


@dataclass(frozen=True, slots=True)
class Existing:
    """The artifact that was asked for is there already, with the same bytes."""

    artifact: ArtifactId


def birth(state: Directory, fact: ArtifactPut | ArtifactRegistered) -> ArtifactPut | ArtifactRegistered | Existing:
    """Decide on bringing an artifact into being.

    Raises:
        ConflictError: If the id names other bytes, now or in a former life, or the key names another artifact.
    """
    found = same_id(state, tenant=fact.tenant, artifact=fact.artifact)
    if found is None:
        return fact
    if found.digest is None or fact.digest is None or found.digest != fact.digest:
        ended = "" if found.live else f" (of an artifact that ended at {found.destroyed}; an id is never reused)"
        unknown = ": their digest is not known, so they cannot be told to be equal" if found.digest is None else ""
        raise ConflictError(
            f"id {fact.artifact!r} is taken by other bytes{ended}{unknown}",
            artifact=fact.artifact,
            digest=found.digest,
            asked=fact.digest,
        )
    return Existing(found.artifact) if found.live else fact


def same_id(state: Directory, *, tenant: str, artifact: ArtifactId) -> Artifact | None:
    """The artifact that a put of an id meets: that of the very id, or one named at random whose digest is that id.

    One with an id that a caller gave is that caller's: equal bytes do not make it another's.
    """
    found = state.artifact(tenant, artifact)
    if found is None or found.artifact == artifact or found.artifact.startswith(RANDOM_PREFIX):
        return found
    return state.artifacts.get((tenant, artifact))


def named_with_bytes(state: Directory, *, tenant: str, key: str | None, digest: str | None) -> ArtifactId | None:
    """The live artifact that a key names, if it has just these bytes: a put of them under that key is a repetition."""
    known = None if key is None else state.key(tenant, key)
    if known is None or known.artifact is None or digest is None:
        return None
    return known.artifact if state.artifacts[tenant, known.artifact].digest == digest else None


def check_key_free(state: Directory, *, tenant: str, key: str, artifact: ArtifactId, rebind: bool) -> None:
    """Refuse early a put whose key could not be bound afterwards.

    Raises:
        ConflictError: If the key names another artifact and ``rebind`` is false.
    """
    known = state.key(tenant, key)
    if rebind or known is None or known.artifact is None or known.artifact == artifact:
        return
    raise ConflictError(
        f"key {key!r} names {known.artifact!r}; pass rebind=True to move it",
        key=key,
        artifact=known.artifact,
        position={"TB": known.seq},
    )


def bind(state: Directory, *, tenant: str, key: str, artifact: ArtifactId, rebind: bool) -> KeyBound | None:
    """Decide on naming a live artifact.

    Raises:
        NotFoundError: If the artifact is not there.
        ConflictError: If the key names another one and ``rebind`` is false.
    """
    target = live_artifact(state, tenant=tenant, artifact=artifact)
    check_key_free(state, tenant=tenant, key=key, artifact=target.artifact, rebind=rebind)
    known = state.key(tenant, key)
    if known is not None and known.artifact == target.artifact:
        return None
    return KeyBound(tenant=tenant, key=key, artifact=target.artifact, rebind=rebind)


def unbind(state: Directory, *, tenant: str, key: str) -> KeyUnbound:
    """Decide on dropping a name.

    Raises:
        NotFoundError: If it names nothing.
    """
    known = state.key(tenant, key)
    if known is None or known.artifact is None:
        raise missing_key(known, key)
    return KeyUnbound(tenant=tenant, key=key, artifact=known.artifact)


def destroy(state: Directory, *, tenant: str, artifact: ArtifactId, reason: DestroyReason) -> ArtifactDestroyed | None:
    """Decide on ending an artifact everywhere; ``None`` if it has ended already, or outlives that reason.

    Only the artifact of that very id: if a content id led on to another one, asking twice would end two artifacts.

    Raises:
        NotFoundError: If there never was one.
    """
    record = state.artifacts.get((tenant, artifact))
    if record is None:
        raise missing_artifact(None, artifact)
    if not record.live or record.outlives(reason):
        return None
    return ArtifactDestroyed(
        tenant=tenant,
        artifact=record.artifact,
        reason=reason,
        keys=_some(sorted(record.keys)),
        versions=_some(f"{name}@{number}" for name, number in sorted(record.versions)),
    )


def _some(names: Iterable[str]) -> tuple[str, ...]:
    """As many as a fact has room for (:data:`NAMES_BYTES_MAX` of JSON): they are for people, the fold has all."""
    taken: list[str] = []
    room = NAMES_BYTES_MAX
    for name in names:
        room -= len(json.dumps(name)) + 1
        if room < 0:
            break
        taken.append(name)
    return tuple(taken)


def digested(
    state: Directory, *, tenant: str, artifact: ArtifactId, digest: str, manifest: ManifestRef
) -> ArtifactDigested | None:
    """Decide on noting a digest that was computed after the put; ``None`` if it is known or the artifact has ended."""
    record = state.artifacts.get((tenant, artifact))
    if record is None or not record.live or record.digest is not None:
        return None
    return ArtifactDigested(tenant=tenant, artifact=artifact, digest=digest, manifest=manifest)


def define_view(
    state: Directory, *, tenant: str, artifact: ArtifactId, view: ArtifactId, definition: str
) -> ViewDefined | None:
    """Decide on noting a view's definition; ``None`` if it is known.

    Raises:
        NotFoundError: If the base is not there.
        ConflictError: If the id is that of a view of another base.
    """
    record = live_artifact(state, tenant=tenant, artifact=artifact)
    if view in record.views:
        return None
    other = state.by_view.get((tenant, view))
    if other is not None:
        raise ConflictError(f"view id {view!r} is taken by a view of {other!r}", artifact=other, view=view)
    return ViewDefined(tenant=tenant, artifact=record.artifact, view=view, definition=definition)


def publish(state: Directory, *, tenant: str, name: str, artifact: ArtifactId) -> VersionPublished:
    """Decide on the next version of a series.

    Raises:
        NotFoundError: If the artifact is not there.
    """
    target = live_artifact(state, tenant=tenant, artifact=artifact)
    series = state.one_series(tenant, name)
    return VersionPublished(
        tenant=tenant, name=name, version=(series.last if series else 0) + 1, artifact=target.artifact
    )


class Standing(StrEnum):
    """How a session that was opened stands on the log."""

    OPEN = "open"
    OVER = "over"
    LOST = "lost"


def standing(state: Directory, *, worker: WorkerId, incarnation: Incarnation, opened: int, opened_ns: int) -> Standing:
    """Whether a session is open, was ended or replaced, or is not on the log, which lost its tail.

    Args:
        opened: The sequence of its opening. What was forgotten since is over: only what has ended is forgotten.
        opened_ns: When the log took its opening. Whatever opened before it is an older life of the same worker.
    """
    held = state.sessions.get(worker)
    if held is not None and held.incarnation == incarnation:
        return Standing.OPEN if held.live else Standing.OVER
    if held is None:
        return Standing.OVER if opened <= state.log.forgotten else Standing.LOST
    return Standing.LOST if held.opened_ns < opened_ns else Standing.OVER


def end_session(
    state: Directory, *, worker: WorkerId, incarnation: Incarnation, reason: SessionEnd
) -> SessionEnded | None:
    """Decide on ending a worker's session; ``None`` if it is over, or the worker has a newer one."""
    if not state.is_live(worker, incarnation):
        return None
    return SessionEnded(worker=worker, incarnation=incarnation, reason=reason)


def live_artifact(state: Directory, *, tenant: str, artifact: ArtifactId) -> Artifact:
    """The live artifact under an id.

    Raises:
        NotFoundError: If there is none; the message says whether there ever was.
    """
    record = state.artifact(tenant, artifact)
    if record is None or not record.live:
        raise missing_artifact(record, artifact)
    return record


def resolve(state: Directory, *, tenant: str, ref: str, by: str = "any") -> Artifact:
    """The live artifact that a caller means: an id by its prefix, else a key, else a given id.

    Args:
        by: ``any`` as above, or ``id`` or ``key`` outright.

    Raises:
        NotFoundError: If nothing has that name, saying what became of it where that is known.
    """
    known = None if by == "id" or is_system_id(ref) else state.key(tenant, ref)
    if known is not None and known.artifact is not None:
        return live_artifact(state, tenant=tenant, artifact=known.artifact)
    if by == "key":
        raise missing_key(known, ref)
    artifact = ArtifactId(ref)
    base = state.by_view.get((tenant, artifact), artifact)
    record = state.artifact(tenant, base)
    if record is not None and record.live:
        return record
    if record is None and not is_system_id(ref):
        raise missing_key(known, ref)
    raise missing_artifact(record, artifact)


def version(state: Directory, *, tenant: str, name: str, number: int | None) -> tuple[int, Artifact]:
    """A version of a series; the newest that is there when ``number`` is ``None``.

    Raises:
        NotFoundError: If the series or that version is not there, or is gone.
    """
    series = state.one_series(tenant, name)
    if series is None:
        raise NotFoundError(f"there is no series {name!r}", name=name)
    if number is None:
        if not series.versions:
            what = f"no version of {name!r} is left: their artifacts were destroyed"
            raise NotFoundError(what, name=name, last=series.last)
        number = max(series.versions)
    found = series.versions.get(number)
    if found is None:
        raise _missing_version(series, name, number)
    return number, live_artifact(state, tenant=tenant, artifact=found)


def _missing_version(series: Series, name: str, number: int) -> NotFoundError:
    if 0 < number <= series.last:
        what = f"version {number} of {name!r} is gone: its artifact was destroyed"
    else:
        what = f"there is no version {number} of {name!r}; the last is {series.last}"
    return NotFoundError(what, name=name, version=number, last=series.last)


def corrupt_artifact(record: Artifact) -> CorruptError:
    """What a reader is told of an artifact whose last copies have wrong bytes."""
    marks = sorted(record.quarantined.values(), key=lambda mark: mark.seq)
    copies = ", ".join(f"worker {mark.worker} ({mark.tier}, since {mark.seq})" for mark in marks)
    return CorruptError(
        f"artifact {record.artifact!r} has no right copy left; those with wrong bytes were on {copies}. Put the same "
        "bytes again to heal it, or destroy it",
        artifact=record.artifact,
        quarantined=[{"worker": mark.worker, "tier": str(mark.tier), "position": {"TB": mark.seq}} for mark in marks],
    )


def missing_key(known: Key | None, key: str) -> NotFoundError:
    fate = {
        "unbound": "it was unbound",
        "asked": "its artifact was destroyed",
        "lost": "its artifact was lost with the last worker that held it",
        "lease_ended": "its artifact ended with its caller's lease",
        "abandoned": "its put was abandoned",
    }
    if known is None or not known.gone:
        return NotFoundError(f"nothing has the key or id {key!r}", key=key)
    return NotFoundError(f"key {key!r} names nothing: {fate.get(known.gone, known.gone)}", key=key, reason=known.gone)


def missing_artifact(record: Artifact | None, artifact: ArtifactId) -> NotFoundError:
    if record is None or record.reason is None:
        return NotFoundError(f"there is no artifact {artifact!r}", artifact=artifact)
    fate = {
        DestroyReason.ASKED: "it was destroyed",
        DestroyReason.LOST: "it was lost with the last worker that held it",
        DestroyReason.LEASE_ENDED: "it ended with its caller's lease",
        DestroyReason.ABANDONED: "its put was abandoned",
    }[record.reason]
    return NotFoundError(
        f"there is no artifact {artifact!r} any more: {fate}",
        artifact=artifact,
        reason=str(record.reason),
        position={"TB": record.destroyed},
    )
