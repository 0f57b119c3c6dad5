"""The public names of the package: a new one is a decision."""

from __future__ import annotations

import subprocess
import sys

import tensorbus as tb

PUBLIC = {
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
    "QueryResult",
    "Quarantine",
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
}


def test_the_list_of_public_names() -> None:
    assert set(tb.__all__) == PUBLIC


def test_every_public_name_is_there() -> None:
    for name in tb.__all__:
        assert getattr(tb, name) is not None
    assert set(tb.__all__) <= set(dir(tb))


def test_connecting_needs_no_torch() -> None:
    code = "import sys, tensorbus as tb; tb.connect; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
