"""Tensors that outlive the process that made them; every lifecycle change is a fact on NATS JetStream.

``import tensorbus as tb`` is quick and needs neither torch nor a bus: what speaks to one is loaded at first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from tensorbus import errors
from tensorbus.errors import (
    CancelledError,
    ConflictError,
    CorruptError,
    DeadlineExceededError,
    DeniedError,
    ErrorKind,
    ExpiredError,
    FencedError,
    InvalidArgumentError,
    NotFoundError,
    OutOfSpaceError,
    PlanFailedError,
    TensorbusError,
    UnavailableError,
)

if TYPE_CHECKING:
    from tensorbus.model import TensorSpec
    from tensorbus.sdk import (
        Artifact,
        ArtifactInfo,
        AsyncArtifact,
        AsyncBus,
        AsyncEvents,
        AsyncOperation,
        AsyncPin,
        AsyncQueryResult,
        AsyncSubscription,
        AsyncWorker,
        Bus,
        EventRecord,
        Events,
        Evicted,
        FactRecord,
        KeyInfo,
        Lease,
        Migrated,
        Operation,
        OperationInfo,
        OperationProgress,
        Persisted,
        Pin,
        Pinned,
        Position,
        Prefetched,
        Quarantine,
        QueryResult,
        Replica,
        Replicated,
        SeriesInfo,
        State,
        StateChange,
        Subscription,
        TransferReport,
        Unpinned,
        Verified,
        Worker,
        WorkerInfo,
        aconnect,
        connect,
    )

__version__ = "0.1.0"

_LATER = {"TensorSpec": "tensorbus.model"}
_LATER |= dict.fromkeys(
    (
        "Artifact",
        "ArtifactInfo",
        "AsyncArtifact",
        "AsyncBus",
        "AsyncEvents",
        "AsyncOperation",
        "AsyncPin",
        "AsyncQueryResult",
        "AsyncSubscription",
        "AsyncWorker",
        "Bus",
        "EventRecord",
        "Events",
        "Evicted",
        "FactRecord",
        "KeyInfo",
        "Lease",
        "Migrated",
        "Operation",
        "OperationInfo",
        "OperationProgress",
        "Persisted",
        "Pin",
        "Pinned",
        "Position",
        "Prefetched",
        "QueryResult",
        "Quarantine",
        "Replica",
        "Replicated",
        "SeriesInfo",
        "State",
        "StateChange",
        "Subscription",
        "TransferReport",
        "Unpinned",
        "Verified",
        "Worker",
        "WorkerInfo",
        "aconnect",
        "connect",
    ),
    "tensorbus.sdk",
)

__all__ = [
    "Artifact",
    "ArtifactInfo",
    "AsyncArtifact",
    "AsyncBus",
    "AsyncEvents",
    "AsyncOperation",
    "AsyncPin",
    "AsyncQueryResult",
    "AsyncSubscription",
    "AsyncWorker",
    "Bus",
    "CancelledError",
    "ConflictError",
    "CorruptError",
    "DeadlineExceededError",
    "DeniedError",
    "ErrorKind",
    "EventRecord",
    "Events",
    "Evicted",
    "ExpiredError",
    "FactRecord",
    "FencedError",
    "InvalidArgumentError",
    "KeyInfo",
    "Lease",
    "Migrated",
    "NotFoundError",
    "Operation",
    "OperationInfo",
    "OperationProgress",
    "OutOfSpaceError",
    "Persisted",
    "Pin",
    "Pinned",
    "PlanFailedError",
    "Position",
    "Prefetched",
    "Quarantine",
    "QueryResult",
    "Replica",
    "Replicated",
    "SeriesInfo",
    "State",
    "StateChange",
    "Subscription",
    "TensorSpec",
    "TensorbusError",
    "TransferReport",
    "UnavailableError",
    "Unpinned",
    "Verified",
    "Worker",
    "WorkerInfo",
    "__version__",
    "aconnect",
    "connect",
    "errors",
]


def __getattr__(name: str) -> object:
    place = _LATER.get(name)
    if place is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(place), name)
    globals()[name] = value  # the next look finds it without asking here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
