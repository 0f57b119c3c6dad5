"""Operations of workers: asked for at once, found again by their id from any process."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from tensorbus.clock import Deadline
from tensorbus.errors import CorruptError, TensorbusError, UnavailableError, from_wire
from tensorbus.ids import check_worker_id
from tensorbus.sdk._records import parse

if TYPE_CHECKING:
    from tensorbus.sdk._artifact import AsyncArtifact
    from tensorbus.sdk._async_bus import AsyncBus

_WAIT_S: Final = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationInfo:
    """An operation as the log has it.

    Attributes:
        state: ``running``, ``succeeded``, ``failed``, ``cancelled``, or ``lost``: its worker ended before it did.
        result: What came of it; ``docs/operations-api.md`` says what for each.
        error: Why it did not succeed: ``kind``, ``message``, ``retryable``, ``details``.
        positions: Where what it did is on the log.
    """

    id: str
    operation: str
    artifact: str
    args: dict[str, Any]
    worker: str
    incarnation: str
    state: str
    started: int
    started_ns: int
    ended: int | None
    ended_ns: int | None
    result: dict[str, Any] | None
    error: dict[str, Any] | None
    positions: dict[str, int]


class AsyncOperation:
    """One operation. ``await op`` waits for its result and raises why there is none."""

    def __init__(self, bus: AsyncBus, id: str, submitting: asyncio.Task[OperationInfo] | None = None) -> None:
        self._bus = bus
        self._submitting = submitting
        self.id = id

    def __await__(self) -> Generator[Any, None, dict[str, Any]]:
        return self.result().__await__()

    async def result(self, timeout: float | None = None) -> dict[str, Any]:
        """What came of it, once it has ended. A process that stops waiting ends nothing.

        Args:
            timeout: Seconds; the bus's default when ``None``.

        Raises:
            UnavailableError: If it is lost; CancelledError: If it was cancelled; else why it failed.
            DeadlineExceededError: If it still runs then.
        """
        deadline = self._bus._core.begin(timeout, f"operation {self.id}")  # noqa: SLF001 - a bus and its handles are one
        await self._submitted(deadline)
        while True:
            left = deadline.left()
            wait_s = _WAIT_S if left is None else min(_WAIT_S, left)
            found = await self._ask("op_wait", {"id": self.id, "wait_s": wait_s}, deadline)
            if found.state != "running":
                return _outcome(found)

    async def status(self, *, timeout: float | None = None) -> OperationInfo:
        """How it stands."""
        deadline = self._bus._core.begin(timeout, f"operation {self.id}")  # noqa: SLF001
        await self._submitted(deadline)
        return await self._ask("op_find", {"id": self.id}, deadline)

    async def progress(self, *, timeout: float | None = None) -> tuple[int, int]:
        """Bytes that are done, and in all; 0 while that is not known. ``(0, 0)`` once it has ended."""
        deadline = self._bus._core.begin(timeout, f"operation {self.id}")  # noqa: SLF001
        await self._submitted(deadline)
        data = (await self._bus._core.ask("op_progress", {"id": self.id}, deadline=deadline)).data  # noqa: SLF001
        return int(str(data.get("done"))), int(str(data.get("total")))

    async def cancel(self, *, timeout: float | None = None) -> OperationInfo:
        """Ask its worker to stop; what was done stays done. One that has ended stays as it ended."""
        deadline = self._bus._core.begin(timeout, f"operation {self.id}")  # noqa: SLF001
        await self._submitted(deadline)
        return await self._ask("op_cancel", {"id": self.id}, deadline)

    async def _submitted(self, deadline: Deadline) -> None:
        if self._submitting is not None:
            async with deadline.scope():
                await asyncio.shield(self._submitting)

    async def _ask(self, op: str, args: Mapping[str, object], deadline: Deadline) -> OperationInfo:
        reply = await self._bus._core.ask(op, args, deadline=deadline)  # noqa: SLF001
        return parse(OperationInfo, reply.data.get("operation"))


class AsyncWorker:
    """A worker, to ask for operations. They are asked for at once; the handle that is given back waits for the end.

    Each takes ``id``: the caller's idempotency key, random without one. The same id is the same operation, whoever
    asks, and another body under it is a ``ConflictError``.
    """

    def __init__(self, bus: AsyncBus, worker: str) -> None:
        self._bus = bus
        self.id = check_worker_id(worker)

    def prefetch(self, artifact: AsyncArtifact | str, *, id: str | None = None) -> AsyncOperation:
        """Have a copy there."""
        return self._submit("prefetch", artifact, {}, id)

    def replicate(
        self, artifact: AsyncArtifact | str, *, to: list[str] | None = None, n: int | None = None, id: str | None = None
    ) -> AsyncOperation:
        """Have copies on the workers ``to``, or on ``n`` in all."""
        return self._submit("replicate", artifact, {"to": to, "n": n}, id)

    def migrate(self, artifact: AsyncArtifact | str, *, src: str, dst: str, id: str | None = None) -> AsyncOperation:
        """Copy to ``dst``, verify it there, then drop it from ``src``."""
        return self._submit("migrate", artifact, {"src": src, "dst": dst}, id)

    def evict(self, artifact: AsyncArtifact | str, *, id: str | None = None) -> AsyncOperation:
        """Drop the copy there, if it is not pinned and another is left for good."""
        return self._submit("evict", artifact, {}, id)

    def persist(self, artifact: AsyncArtifact | str, *, id: str | None = None) -> AsyncOperation:
        """Have a copy on that worker's disk, which stays as long as the artifact does."""
        return self._submit("persist", artifact, {}, id)

    def verify(self, artifact: AsyncArtifact | str, *, id: str | None = None) -> AsyncOperation:
        """Check the copy there against its digests; a corrupt one is dropped."""
        return self._submit("verify", artifact, {}, id)

    def _submit(self, what: str, artifact: AsyncArtifact | str, args: dict[str, Any], id: str | None) -> AsyncOperation:
        key = secrets.token_hex(16) if id is None else id
        self._bus._core.check_loop()  # noqa: SLF001
        task = asyncio.ensure_future(self._ask(what, artifact, args, key))
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # told to who waits
        return AsyncOperation(self._bus, key, task)

    async def _ask(self, what: str, artifact: AsyncArtifact | str, args: dict[str, Any], key: str) -> OperationInfo:
        core = self._bus._core  # noqa: SLF001
        deadline = core.begin(None, f"{what} on worker {self.id}")
        base = await self._bus._id_of(artifact, deadline)  # noqa: SLF001
        given = {name: value for name, value in args.items() if value is not None}
        asked = {"id": key, "worker": self.id, "operation": what, "artifact": base, "args": given}
        return parse(OperationInfo, (await core.ask("op_submit", asked, deadline=deadline)).data.get("operation"))


def _outcome(found: OperationInfo) -> dict[str, Any]:
    if found.state == "succeeded":
        if found.result is None:
            raise CorruptError(f"operation {found.id} succeeded and has no result")
        return found.result
    raise _error(found)


def _error(found: OperationInfo) -> TensorbusError:
    if found.error is not None:
        return from_wire(found.error)
    return UnavailableError(
        f"operation {found.id} is lost: worker {found.worker} ended before it did; ask again under the same id",
        operation=found.id,
        worker=found.worker,
    )
