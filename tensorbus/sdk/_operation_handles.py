"""The blocking mirrors of workers and their operations."""

# ruff: noqa: SLF001 - a bus, its handles and their mirrors are one unit; what they share is nobody else's
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from tensorbus.sdk._handles import Artifact
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
from tensorbus.sdk._operations import AsyncOperation, AsyncWorker, worker_id

if TYPE_CHECKING:
    from tensorbus.sdk._bus import Bus

T = TypeVar("T")


class Operation(Generic[T]):
    """One operation: the blocking mirror of :class:`AsyncOperation`; see there. ``op.result()`` waits for its end."""

    def __init__(self, bus: Bus, operation: AsyncOperation[T]) -> None:
        self._bus = bus
        self._operation = operation

    @property
    def id(self) -> str:
        """The caller's idempotency key; ``bus.operation(id)`` finds it from any process."""
        return self._operation.id

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id}>"

    def result(self, timeout: float | None = None) -> T:
        """What came of it, once it has ended; see :meth:`AsyncOperation.result`."""
        return self._bus._run(self._operation.result(timeout))

    def settled(self, *, timeout: float | None = None) -> OperationInfo:
        """How it stands once it has ended, whatever came of it."""
        return self._bus._run(self._operation.settled(timeout=timeout))

    def status(self, *, timeout: float | None = None) -> OperationInfo:
        """How it stands."""
        return self._bus._run(self._operation.status(timeout=timeout))

    def progress(self, *, timeout: float | None = None) -> OperationProgress:
        """How many bytes are done, of how many."""
        return self._bus._run(self._operation.progress(timeout=timeout))

    def cancel(self, *, timeout: float | None = None) -> OperationInfo:
        """Ask its worker to stop; see :meth:`AsyncOperation.cancel`."""
        return self._bus._run(self._operation.cancel(timeout=timeout))


class Worker:
    """A worker, to ask for operations: the blocking mirror of :class:`AsyncWorker`; see there for the arguments.

    Each method returns once the worker has begun the operation, and raises why it has not; ``.result()`` of what it
    returns waits for the end.
    """

    def __init__(self, bus: Bus, worker: AsyncWorker) -> None:
        self._bus = bus
        self._worker = worker

    @property
    def id(self) -> str:
        """Its id."""
        return self._worker.id

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id}>"

    def prefetch(
        self, artifact: Artifact | str, *, device: str = "cpu", id: str | None = None, deadline_s: float | None = None
    ) -> Operation[Prefetched]:
        """Have a copy in its memory; see :meth:`AsyncWorker.prefetch`."""
        art = inner(artifact)
        return self._begun(lambda: self._worker.prefetch(art, device=device, id=id, deadline_s=deadline_s))

    def pin(
        self, artifact: Artifact | str, *, ttl_s: float, id: str | None = None, deadline_s: float | None = None
    ) -> Operation[Pinned]:
        """Have a copy in its memory that stays there for a time; see :meth:`AsyncWorker.pin`."""
        art = inner(artifact)
        return self._begun(lambda: self._worker.pin(art, ttl_s=ttl_s, id=id, deadline_s=deadline_s))

    def unpin(
        self, pin: Pinned | str, *, id: str | None = None, deadline_s: float | None = None
    ) -> Operation[Unpinned]:
        """End a pin on it; see :meth:`AsyncWorker.unpin`."""
        return self._begun(lambda: self._worker.unpin(pin, id=id, deadline_s=deadline_s))

    def replicate(
        self,
        artifact: Artifact | str,
        *,
        to: Sequence[Worker | str] | None = None,
        n: int | None = None,
        id: str | None = None,
        deadline_s: float | None = None,
    ) -> Operation[Replicated]:
        """Have copies on the workers ``to``, or on ``n`` in all; see :meth:`AsyncWorker.replicate`."""
        art, workers = inner(artifact), None if to is None else [worker_id(one) for one in to]
        return self._begun(lambda: self._worker.replicate(art, to=workers, n=n, id=id, deadline_s=deadline_s))

    def migrate(
        self,
        artifact: Artifact | str,
        *,
        src: Worker | str,
        dst: Worker | str,
        id: str | None = None,
        deadline_s: float | None = None,
    ) -> Operation[Migrated]:
        """Copy to ``dst``, verify it there, then drop it from ``src``; see :meth:`AsyncWorker.migrate`."""
        art, source, target = inner(artifact), worker_id(src), worker_id(dst)
        return self._begun(lambda: self._worker.migrate(art, src=source, dst=target, id=id, deadline_s=deadline_s))

    def evict(
        self, artifact: Artifact | str, *, id: str | None = None, deadline_s: float | None = None
    ) -> Operation[Evicted]:
        """Drop its copies; see :meth:`AsyncWorker.evict`."""
        art = inner(artifact)
        return self._begun(lambda: self._worker.evict(art, id=id, deadline_s=deadline_s))

    def persist(
        self, artifact: Artifact | str, *, id: str | None = None, deadline_s: float | None = None
    ) -> Operation[Persisted]:
        """Have a copy on its disk; see :meth:`AsyncWorker.persist`."""
        art = inner(artifact)
        return self._begun(lambda: self._worker.persist(art, id=id, deadline_s=deadline_s))

    def verify(
        self, artifact: Artifact | str, *, id: str | None = None, deadline_s: float | None = None
    ) -> Operation[Verified]:
        """Compare its copies with the artifact's digests; see :meth:`AsyncWorker.verify`."""
        art = inner(artifact)
        return self._begun(lambda: self._worker.verify(art, id=id, deadline_s=deadline_s))

    def _begun(self, ask: Callable[[], AsyncOperation[T]]) -> Operation[T]:
        async def begin() -> AsyncOperation[T]:
            operation = ask()
            await operation.submitted(self._bus._core.begin(None, f"operation {operation.id}"))
            return operation

        return Operation(self._bus, self._bus._run(begin()))


def inner(content: Any) -> Any:
    """The asynchronous handle in a blocking one; anything else as it is."""
    return content._artifact if isinstance(content, Artifact) else content
