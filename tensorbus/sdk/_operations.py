"""Operations of workers: asked for at once, found again by their id from any process."""

# ruff: noqa: SLF001 - a bus, its handles and their mirrors are one unit; what they share is nobody else's
from __future__ import annotations

import asyncio
from collections.abc import Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from tensorbus.clock import Deadline
from tensorbus.errors import InvalidArgumentError
from tensorbus.ids import SystemIds, check_worker_id
from tensorbus.sdk._checks import check_lease_s, check_seconds
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
    result_of,
)
from tensorbus.sdk._records import parse

if TYPE_CHECKING:
    from tensorbus.sdk._artifact import AsyncArtifact
    from tensorbus.sdk._async_bus import AsyncBus

T = TypeVar("T")

_WAIT_S: Final = 10.0


class AsyncOperation(Generic[T]):
    """One operation. ``await op`` waits for what comes of it, and raises why nothing did.

    It is its worker's: a process that stops waiting, or ends, ends nothing.

    Attributes:
        id: The caller's idempotency key; ``bus.operation(id)`` finds it from any process.
    """

    def __init__(self, bus: AsyncBus, id: str, submitting: asyncio.Task[OperationInfo] | None = None) -> None:
        self._bus = bus
        self._submitting = submitting
        self.id = id

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id}>"

    def __await__(self) -> Generator[Any, None, T]:
        return self.result().__await__()

    async def result(self, timeout: float | None = None) -> T:
        """What came of it, once it has ended.

        Args:
            timeout: Seconds to wait; the bus's default when ``None``.

        Raises:
            UnavailableError: If it is lost; CancelledError: If it was cancelled; else why it failed.
            DeadlineExceededError: If it still runs then; it goes on.
        """
        result: T = result_of(await self.settled(timeout=timeout))
        return result

    async def settled(self, *, timeout: float | None = None) -> OperationInfo:
        """How it stands once it has ended, whatever came of it."""
        deadline = self._begin(timeout)
        await self.submitted(deadline)
        while True:
            left = deadline.left()
            wait_s = _WAIT_S if left is None else min(_WAIT_S, left)
            found = await self._ask("op_wait", {"id": self.id, "wait_s": wait_s}, deadline)
            if found.state != "running":
                return found

    async def status(self, *, timeout: float | None = None) -> OperationInfo:
        """How it stands.

        Raises:
            NotFoundError: If the log knows none of that id, or has forgotten it.
        """
        deadline = self._begin(timeout)
        await self.submitted(deadline)
        return await self._ask("op_find", {"id": self.id}, deadline)

    async def progress(self, *, timeout: float | None = None) -> OperationProgress:
        """How many bytes are done, of how many. Of one that has ended and copied nothing, none of none."""
        deadline = self._begin(timeout)
        await self.submitted(deadline)
        data = (await self._bus._core.ask("op_progress", {"id": self.id}, deadline=deadline)).data
        return parse(OperationProgress, {"nbytes_done": data.get("done"), "nbytes_total": data.get("total")})

    async def cancel(self, *, timeout: float | None = None) -> OperationInfo:
        """Ask its worker to stop; what was done stays done. One that has ended stays as it ended."""
        deadline = self._begin(timeout)
        await self.submitted(deadline)
        return await self._ask("op_cancel", {"id": self.id}, deadline)

    async def submitted(self, deadline: Deadline) -> None:
        """Wait until its worker has begun it.

        Raises:
            TensorbusError: Why it was not begun.
        """
        if self._submitting is not None:
            async with deadline.scope():
                await asyncio.shield(self._submitting)

    def _begin(self, timeout: float | None) -> Deadline:
        return self._bus._core.begin(timeout, f"operation {self.id}")

    async def _ask(self, op: str, args: Mapping[str, object], deadline: Deadline) -> OperationInfo:
        reply = await self._bus._core.ask(op, args, deadline=deadline)
        return parse(OperationInfo, reply.data.get("operation"))


class AsyncWorker:
    """A worker, to ask for operations. They are asked for at once; the handle that is given back waits for the end.

    Each takes an artifact by its handle, a key or an id, and:

    * ``id``: the caller's idempotency key, random without one. The same id is the same operation, whoever asks, and
      another body under it is a ``ConflictError``.
    * ``deadline_s``: seconds from its beginning after which the worker gives up; an hour without one.

    Attributes:
        id: Its id.
    """

    def __init__(self, bus: AsyncBus, worker: str) -> None:
        self._bus = bus
        self.id = check_worker_id(worker)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id}>"

    def prefetch(
        self,
        artifact: AsyncArtifact | str,
        *,
        device: str = "cpu",
        id: str | None = None,
        deadline_s: float | None = None,
    ) -> AsyncOperation[Prefetched]:
        """Have a copy in its memory.

        Args:
            device: Which memory; ``"cpu"`` is the only one that workers keep copies in.
            artifact, id, deadline_s: See the class.
        """
        args = {"device": None if device == "cpu" else device}
        return self._submit("prefetch", artifact, args, id, deadline_s)

    def pin(
        self, artifact: AsyncArtifact | str, *, ttl_s: float, id: str | None = None, deadline_s: float | None = None
    ) -> AsyncOperation[Pinned]:
        """Have a copy in its memory that is neither evicted nor spilled for a time.

        The pin is the worker's: it outlives the caller, and ends when its time is over, by :meth:`unpin`, or with the
        worker's session. (``art.pin()`` is the caller's own: renewed by its process, on its own worker.)

        Args:
            ttl_s: Seconds until it ends by itself, 0.1 to a year.
            artifact, id, deadline_s: See the class.
        """
        return self._submit("pin", artifact, {"ttl_s": check_lease_s(ttl_s, "ttl_s")}, id, deadline_s)

    def unpin(
        self, pin: Pinned | str, *, id: str | None = None, deadline_s: float | None = None
    ) -> AsyncOperation[Unpinned]:
        """End a pin on it, by what :meth:`pin` gave or the name of its lease; one that has run out stays so."""
        lease, artifact = (pin.lease, _Id(pin.artifact)) if isinstance(pin, Pinned) else (pin, None)
        return self._submit("unpin", artifact, {"lease": lease}, id, deadline_s)

    def replicate(
        self,
        artifact: AsyncArtifact | str,
        *,
        to: Sequence[AsyncWorker | str] | None = None,
        n: int | None = None,
        id: str | None = None,
        deadline_s: float | None = None,
    ) -> AsyncOperation[Replicated]:
        """Have copies on the workers ``to``, or on ``n`` in all; this worker sees to it."""
        args = {"to": None if to is None else [worker_id(one) for one in to], "n": n}
        return self._submit("replicate", artifact, args, id, deadline_s)

    def migrate(
        self,
        artifact: AsyncArtifact | str,
        *,
        src: AsyncWorker | str,
        dst: AsyncWorker | str,
        id: str | None = None,
        deadline_s: float | None = None,
    ) -> AsyncOperation[Migrated]:
        """Copy to ``dst``, verify it there, then drop it from ``src``; this worker sees to it."""
        args = {"src": worker_id(src), "dst": worker_id(dst)}
        return self._submit("migrate", artifact, args, id, deadline_s)

    def evict(
        self, artifact: AsyncArtifact | str, *, id: str | None = None, deadline_s: float | None = None
    ) -> AsyncOperation[Evicted]:
        """Drop its copies, in memory and on disk, if none is pinned or read and another worker has one."""
        return self._submit("evict", artifact, {}, id, deadline_s)

    def persist(
        self, artifact: AsyncArtifact | str, *, id: str | None = None, deadline_s: float | None = None
    ) -> AsyncOperation[Persisted]:
        """Have a copy on its disk, which stays as long as the artifact does."""
        return self._submit("persist", artifact, {}, id, deadline_s)

    def verify(
        self, artifact: AsyncArtifact | str, *, id: str | None = None, deadline_s: float | None = None
    ) -> AsyncOperation[Verified]:
        """Read its copies, in memory and on disk, and compare them with the artifact's digests.

        A copy with other bytes is ``CorruptError``, whose details name tiers and tensors, and is given up.
        """
        return self._submit("verify", artifact, {}, id, deadline_s)

    def _submit(
        self,
        what: str,
        artifact: AsyncArtifact | _Id | str | None,
        args: dict[str, Any],
        id: str | None,
        deadline_s: float | None,
    ) -> AsyncOperation[Any]:
        key = SystemIds().hex(16) if id is None else id
        core = self._bus._core
        deadline = core.begin(None, f"{what} on worker {self.id}")
        if deadline_s is not None:
            args = {**args, "deadline_s": check_seconds(deadline_s, "deadline_s")}
        task = core.submit(self._ask(what, artifact, args, key, deadline), name=f"submit {key}")
        return AsyncOperation(self._bus, key, task)

    async def _ask(
        self, what: str, artifact: AsyncArtifact | _Id | str | None, args: dict[str, Any], key: str, deadline: Deadline
    ) -> OperationInfo:
        given = {name: value for name, value in args.items() if value is not None}
        asked: dict[str, object] = {"id": key, "worker": self.id, "operation": what, "args": given}
        if artifact is not None:
            known = isinstance(artifact, _Id)
            asked["artifact"] = str(artifact) if known else await self._bus._id_of(artifact, deadline)
        reply = await self._bus._core.ask("op_submit", asked, deadline=deadline)
        return parse(OperationInfo, reply.data.get("operation"))


class _Id(str):
    """An artifact's id that was told by a worker: there is no name to resolve."""

    __slots__ = ()


def worker_id(worker: object) -> str:
    """The id of a worker that a caller gave as a handle or an id.

    Raises:
        InvalidArgumentError: If it is neither.
    """
    found = getattr(worker, "id", worker)
    if not isinstance(found, str):
        raise InvalidArgumentError(f"a worker is a handle or an id, not {type(worker).__name__}")
    return check_worker_id(found)
