"""What users import: connecting, artifacts, pins, subscriptions."""

from tensorbus.sdk._artifact import AsyncArtifact
from tensorbus.sdk._async_bus import AsyncBus
from tensorbus.sdk._bus import Bus
from tensorbus.sdk._connect import aconnect, connect
from tensorbus.sdk._events import AsyncEvents
from tensorbus.sdk._files import open_files, save_safetensors
from tensorbus.sdk._handles import Artifact, Events, Pin, Subscription
from tensorbus.sdk._operation_handles import Operation, Worker
from tensorbus.sdk._operation_records import (
    Evicted,
    Migrated,
    OperationInfo,
    OperationProgress,
    Persisted,
    Pinned,
    Prefetched,
    Replicated,
    Unpinned,
    Verified,
)
from tensorbus.sdk._operations import AsyncOperation, AsyncWorker
from tensorbus.sdk._pin import AsyncPin
from tensorbus.sdk._place import Place
from tensorbus.sdk._query import AsyncQueryResult
from tensorbus.sdk._query_arrow import rows_of
from tensorbus.sdk._query_bus import QueryResult
from tensorbus.sdk._query_records import STATE_TABLES, FactRecord, Kind, Moment, State, StateChange
from tensorbus.sdk._records import (
    ArtifactInfo,
    EventRecord,
    KeyInfo,
    Lease,
    Position,
    Quarantine,
    Replica,
    SeriesInfo,
    WorkerInfo,
)
from tensorbus.sdk._series import AsyncSubscription
from tensorbus.transport import TransferReport

__all__ = [
    "STATE_TABLES",
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
    "Kind",
    "Lease",
    "Migrated",
    "Moment",
    "Operation",
    "OperationInfo",
    "OperationProgress",
    "Persisted",
    "Pin",
    "Pinned",
    "Place",
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
    "TransferReport",
    "Unpinned",
    "Verified",
    "Worker",
    "WorkerInfo",
    "aconnect",
    "connect",
    "open_files",
    "rows_of",
    "save_safetensors",
]
