"""What a worker says of artifacts, workers, keys and facts, as frozen records (``docs/spec/control.md``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from tensorbus.errors import CorruptError, InvalidArgumentError

Position: TypeAlias = Mapping[str, int]
"""Where in the log something holds: a sequence for each stream."""

LOG_STREAM = "TB"
_SEQ_MAX = 2**63 - 1

R = TypeVar("R")


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """A complete copy of an artifact on one worker.

    Attributes:
        host: Host id of the worker.
        data: ``host:port`` where its bytes are read, or empty.
        tier: ``vram``, ``dram``, ``disk`` or ``source``.
        view: Id of the view that it is a copy of, or ``None`` for the whole.
        leased: Whether it is the caller's own memory, there while a lease lives.
    """

    worker: str
    incarnation: str
    host: str
    data: str
    tier: str
    view: str | None
    nbytes: int
    leased: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Quarantine:
    """A copy that its worker found to have other bytes than the artifact's: nobody is served from it.

    Attributes:
        tier: ``vram``, ``dram``, ``disk`` or ``source``.
        view: Id of the view that it was a copy of, or ``None`` for the whole.
        cause: What showed it: ``verify``, ``spill`` (the checksums of its file) or ``reader``.
        position: Sequence of the fact that says so.
    """

    worker: str
    tier: str
    view: str | None
    cause: str
    position: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """A caller's lease on one worker's replica; ``ttl_s`` is ``None`` for one that holds until released."""

    lease: str
    worker: str
    purpose: str
    holder: str
    ttl_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ArtifactInfo:
    """An artifact as a worker's directory had it at some position.

    Attributes:
        digest: Its content id, or ``None`` until known.
        born: Sequence of the fact that made it.
        created_ns: Stream time of that fact, nanoseconds since the Unix epoch.
        reason: Why it ended, if it did.
        versions: Name and number of each version that it is.
        quarantined: Copies with wrong bytes; without replicas beside them, reading is ``CorruptError``.
    """

    artifact: str
    digest: str | None
    nbytes: int
    tensors: int
    born: int
    created_ns: int
    author: str
    principal: str
    live: bool
    reason: str | None
    replicas: tuple[Replica, ...]
    keys: tuple[str, ...]
    versions: tuple[tuple[str, int], ...]
    leases: tuple[Lease, ...]
    quarantined: tuple[Quarantine, ...] = ()  # an older worker knows of none


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyInfo:
    """A key and what it is bound to."""

    key: str
    artifact: str
    nbytes: int
    tensors: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SeriesInfo:
    """A series of versions: its name, the last number given, and how many versions are there."""

    name: str
    last: int
    kept: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerInfo:
    """A worker's newest session on the log.

    Attributes:
        host: Host id; equal means that memory can be shared.
        live: Whether the session is open.
        data: ``host:port`` where its bytes are read, or empty.
        control: ``host:port`` where callers connect, or empty.
        opened_ns: Stream time of its start, nanoseconds since the Unix epoch.
        replicas: How many copies it holds.
    """

    worker: str
    incarnation: str
    host: str
    roles: tuple[str, ...]
    live: bool
    data: str
    control: str
    pool_bytes: int
    opened_ns: int
    pid: int
    version: str
    replicas: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EventRecord:
    """A fact on the log.

    Attributes:
        seq: Its sequence; the log's order.
        time_ns: Stream time, nanoseconds since the Unix epoch.
        type: What happened, e.g. ``ArtifactPut``.
        author: The worker that wrote it; ``principal`` is for whom.
        cause: Id of the event that led to this one, or empty.
        body: The fact's own fields.
    """

    seq: int
    time_ns: int
    type: str
    subject: str
    author: str
    incarnation: str
    principal: str | None
    cause: str | None
    traceparent: str | None
    event_id: str
    body: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """What a worker says of itself first.

    Attributes:
        session: The caller's session with it.
        prefix: First tokens of the system's subjects.
        descriptors: Whether memory can be passed on this connection.
        ttl_s: After how many seconds of silence its session may be ended.
    """

    worker: str
    incarnation: str
    host: str
    roles: tuple[str, ...]
    session: str
    position: int
    prefix: str
    descriptors: bool
    ttl_s: float = 15.0


def parse(kind: type[R], data: object) -> R:
    """The record in a peer's JSON value.

    Raises:
        CorruptError: If it is no such record.
    """
    from pydantic import ValidationError

    try:
        record: R = _adapter(kind).validate_python(data)
    except ValidationError as exc:
        raise CorruptError(
            f"the worker's answer is not valid: {exc.errors()[0]['loc']} {exc.errors()[0]['msg']}"
        ) from exc
    return record


def _adapter(kind: type[Any]) -> Any:
    found = _adapters.get(kind)
    if found is None:
        from pydantic import TypeAdapter  # late: parsing is first needed once a bus is used

        found = _adapters[kind] = TypeAdapter(kind)
    return found


_adapters: dict[type[Any], Any] = {}


def position_of(data: Mapping[str, object]) -> int:
    """The position that an answer holds at.

    Raises:
        CorruptError: If it has none.
    """
    seq = data.get("position")
    if type(seq) is not int:
        raise CorruptError(f"the worker's answer has no position, but {str(seq)[:40]!r}")
    return seq


def at_least_seq(position: Position | int | None, *, what: str = "at_least") -> int | None:
    """The sequence of the log that a caller's ``at_least`` (or ``what``) names.

    Raises:
        InvalidArgumentError: If it is no position.
    """
    seq: object = position.get(LOG_STREAM) if isinstance(position, Mapping) else position
    if position is not None and (type(seq) is not int or not 0 <= seq <= _SEQ_MAX):
        raise InvalidArgumentError(
            f'{what} is a position such as {{"{LOG_STREAM}": 7}}, as mutations give it, not {_shown(position)}'
        )
    return seq if isinstance(seq, int) else None


def _shown(value: object) -> str:
    try:
        return f"{value!r:.80}"
    except ValueError:  # Python refuses to write thousands of digits
        return "a number of that size"
