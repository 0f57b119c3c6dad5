"""Operations as the log has them, and what comes of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tensorbus.errors import CorruptError, TensorbusError, UnavailableError, from_wire
from tensorbus.sdk._records import parse


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationInfo:
    """An operation as the log has it.

    Attributes:
        args: Its other arguments, as ``docs/operations-api.md`` has them.
        principal: The caller's session that asked for it.
        state: ``running``, ``succeeded``, ``failed``, ``cancelled``, or ``lost``: its worker ended before it did.
        started: Sequence of the fact that it began on; ``started_ns`` is stream time.
        ended: Sequence of the fact that ended it, or its worker's session.
        result: What came of it, as JSON.
        error: Why it did not succeed: ``kind``, ``message``, ``retryable``, ``details``.
        positions: Where what it did is on the log.
    """

    id: str
    operation: str
    artifact: str
    args: dict[str, Any]
    worker: str
    incarnation: str
    principal: str | None
    state: str
    started: int
    started_ns: int
    ended: int | None
    ended_ns: int | None
    result: dict[str, Any] | None
    error: dict[str, Any] | None
    positions: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationProgress:
    """How far an operation is, in bytes; ``nbytes_total`` is 0 until it is known."""

    nbytes_done: int
    nbytes_total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefetched:
    """A copy is in the worker's memory; ``path`` is how it came there, and ``why`` so."""

    worker: str
    nbytes: int
    path: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Pinned:
    """A replica stays on the worker until the pin runs out or is ended.

    Attributes:
        artifact: Id of the artifact.
        lease: The pin's name on the log; who has it can end the pin.
        ttl_s: After how many seconds from its beginning it ends by itself.
    """

    worker: str
    artifact: str
    nbytes: int
    lease: str
    ttl_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Unpinned:
    """A pin is over; ``ended`` is whether it was this operation that ended it."""

    worker: str
    lease: str
    ended: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicated:
    """Copies are on these workers; ``nbytes`` is what was copied for that."""

    workers: tuple[str, ...]
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Migrated:
    """The copy of ``src`` is on ``dst`` now, whole and verified."""

    src: str
    dst: str
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Evicted:
    """The worker has no copy; ``evicted`` is whether it had one."""

    worker: str
    evicted: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Persisted:
    """A copy is on the worker's disk, and stays as long as the artifact lives."""

    worker: str
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """Every copy on the worker has the bytes that its digests promise.

    Attributes:
        nbytes: Size of one copy.
        tensors: Tensors in it.
        tiers: Where the copies are: ``dram``, ``disk``.
    """

    worker: str
    nbytes: int
    tensors: int
    tiers: tuple[str, ...]


RESULTS: dict[str, type[Any]] = {
    "prefetch": Prefetched,
    "pin": Pinned,
    "unpin": Unpinned,
    "replicate": Replicated,
    "migrate": Migrated,
    "evict": Evicted,
    "persist": Persisted,
    "verify": Verified,
}


def result_of(found: OperationInfo) -> Any:
    """What came of an operation that has ended.

    Raises:
        TensorbusError: Why it did not succeed.
    """
    if found.state != "succeeded":
        raise _error(found)
    kind = RESULTS.get(found.operation)
    if kind is None or found.result is None:
        raise CorruptError(f"operation {found.id} ({found.operation}) succeeded, and its result cannot be read")
    return parse(kind, found.result)


def _error(found: OperationInfo) -> TensorbusError:
    if found.error is not None:
        return from_wire(found.error)
    return UnavailableError(
        f"operation {found.id} is lost: the session of worker {found.worker} ended at position {found.ended}, before "
        "it did, and what was done is unknown; ask again under the same id",
        operation=found.id,
        worker=found.worker,
        ended=found.ended,
    )
