"""Operations that callers ask a worker for: begun by a fact, carried out once, ended by a fact; relayed to others.

Whoever asks again under the same key gets the same operation. One that is another worker's is asked of it over the bus.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from tensorbus.clock import Deadline
from tensorbus.errors import (
    CancelledError,
    ConflictError,
    CorruptError,
    DeadlineExceededError,
    InvalidArgumentError,
    NotFoundError,
    OutOfSpaceError,
    TensorbusError,
    UnavailableError,
    from_wire,
    to_wire,
)
from tensorbus.events import Event, OperationEnded, OperationOutcome, OperationStarted, StreamPosition
from tensorbus.ids import ArtifactId, WorkerId
from tensorbus.lifecycle import Operation, OperationState, Touched
from tensorbus.workers._core import Core
from tensorbus.workers._executors import Done, Executors, Order, Progress
from tensorbus.workers._puts import known_outcome

log = logging.getLogger("tensorbus.workers")

RUNNING_MAX: Final = 64
"""Operations that a worker carries out at once; further ones are refused."""
ERROR_CHARS_MAX: Final = 4096
CANCEL_PARTS_S: Final = 5.0

Where = tuple[str, str]


@dataclass(slots=True)
class _Running:
    work: asyncio.Task[Done] | None = None
    progress: Progress = field(default_factory=Progress)
    cancelled: bool = False


class Operations:
    """What one process knows of all operations, and carries out of its own worker's.

    Args:
        executors: ``None`` where there is no memory: such a worker only relays.
    """

    def __init__(self, core: Core, executors: Executors | None) -> None:
        self._core = core
        self._executors = executors
        self._starting: dict[Where, tuple[Order, asyncio.Future[None]]] = {}
        self._running: dict[Where, _Running] = {}
        self._waiting: dict[Where, dict[asyncio.Event, None]] = {}

    # -- for callers --------------------------------------------------------------------------------------------------

    async def submit(self, order: Order, *, deadline: Deadline) -> Operation:
        """Have the operation begun, or find it begun.

        Raises:
            ConflictError: If the key is another operation's; NotFoundError: If there is no such worker.
            UnavailableError: If it cannot be reached; OutOfSpaceError: If it is busy.
        """
        if order.worker == self._core.me.worker:
            await self._begin(order, deadline=deadline)
        else:
            self._check_free(order)
            question = {
                "do": "submit", "id": order.id, "operation": order.operation, "artifact": order.artifact,
                "args": order.args, "principal": order.principal, "tenant": order.tenant,
            }  # fmt: skip
            await self._ask(order.worker, question, deadline=deadline)
        return self.find(order.where)

    def find(self, where: Where) -> Operation:
        """An operation by tenant and key.

        Raises:
            NotFoundError: If the log knows none, or forgot it.
        """
        found = self._core.state.operations.get(where)
        if found is None:
            raise NotFoundError(f"there is no operation {where[1]!r}, or it ended long ago", operation=where[1])
        return found

    async def until_ended(self, where: Where, *, deadline: Deadline) -> Operation:
        """Wait for its end, or its worker's."""
        changed = asyncio.Event()
        waiting = self._waiting.setdefault(where, {})
        waiting[changed] = None
        try:
            while (found := self.find(where)).running:
                changed.clear()
                async with deadline.scope():
                    await changed.wait()
            return found
        finally:
            del waiting[changed]
            if not waiting:
                self._waiting.pop(where, None)

    async def cancel(self, where: Where, *, deadline: Deadline) -> Operation:
        """Ask for its end; what was done stays done. One that has ended stays as it ended."""
        if (beginning := self._starting.get(where)) is not None:
            async with deadline.scope():
                await asyncio.wait([beginning[1]])
        found = self.find(where)
        if found.running and found.worker != self._core.me.worker:
            await self._ask_cancel(found.worker, where, deadline=deadline)
        elif (running := self._running.get(where)) is not None:
            running.cancelled = True
            if running.work is not None:
                running.work.cancel()
        return self.find(where)

    async def _ask_cancel(self, worker: WorkerId, where: Where, *, deadline: Deadline) -> None:
        await self._ask(worker, {"do": "cancel", "tenant": where[0], "id": where[1]}, deadline=deadline)

    async def progress(self, where: Where, *, deadline: Deadline) -> tuple[int, int]:
        """Bytes done, and in all (0: not known yet, or nothing was copied); its own worker knows while it runs."""
        found = self.find(where)
        if found.running and found.worker != self._core.me.worker:
            question = {"do": "progress", "tenant": where[0], "id": where[1]}
            answer = await self._ask(found.worker, question, deadline=deadline)
            return int(answer["done"]), int(answer["total"])
        running = self._running.get(where)
        if running is None:
            nbytes = _copied(found)
            return nbytes, nbytes
        progress = running.progress
        done = progress.done + progress.now()
        for part in list(progress.parts):
            done += await self._part_done(part, deadline=deadline)
        return min(done, progress.total), progress.total

    async def _part_done(self, where: Where, *, deadline: Deadline) -> int:
        """Bytes that a part has copied so far, as far as its worker says."""
        try:
            return (await self.progress(where, deadline=deadline))[0]
        except TensorbusError:
            return 0

    def on_change(self, _position: int, touched: tuple[Touched, ...]) -> None:
        """Follower of the Directory."""
        for thing in touched if self._waiting else ():
            if thing.kind == "operation":
                for event in self._waiting.get((thing.tenant, thing.name), ()):
                    event.set()

    async def done(self, order: Order, *, deadline: Deadline) -> Operation:
        """Have a part of another operation done; cancelled, or out of time, it cancels the part too.

        Raises:
            TensorbusError: Why the part did not succeed; UnavailableError: If its worker was lost.
        """
        try:
            await self.submit(order, deadline=deadline)
            found = await self.until_ended(order.where, deadline=deadline)
        except (asyncio.CancelledError, DeadlineExceededError):
            self._core.spawn(self._cancel_part(order), name=f"cancel {order.id}")
            raise
        if found.state is OperationState.SUCCEEDED:
            return found
        raise error_of(found)

    async def _cancel_part(self, order: Order) -> None:
        """Asked of its worker also when its beginning is not known here yet: the question for it may be under way."""
        deadline = Deadline(CANCEL_PARTS_S, what="cancelling a part")
        try:
            if order.worker == self._core.me.worker:
                await self.cancel(order.where, deadline=deadline)
            else:
                await self._ask_cancel(order.worker, order.where, deadline=deadline)
        except TensorbusError as error:
            log.info("part not cancelled: operation=%s reason=%s", order.id, error)

    # -- carrying out -------------------------------------------------------------------------------------------------

    async def _begin(self, order: Order, *, deadline: Deadline) -> None:
        if self._executors is None or order.operation not in self._executors.names:
            raise InvalidArgumentError(f"worker {order.worker} holds no memory, or cannot {order.operation}")
        if self._check_free(order) is not None:
            return
        asked, starting = self._starting.get(order.where, (order, None))
        if asked.body != order.body:
            raise _taken(order)
        if starting is None:
            if len(self._running) + len(self._starting) >= RUNNING_MAX:
                raise OutOfSpaceError(f"worker {order.worker} carries out {RUNNING_MAX} operations already")
            work = self._core.finish(self._start(order, self._executors), name=f"begin {order.id}")
            starting = asyncio.ensure_future(work)
            self._starting[order.where] = order, starting
            starting.add_done_callback(lambda _: self._starting.pop(order.where, None))
            starting.add_done_callback(_looked_at)
        async with deadline.scope():
            await asyncio.shield(starting)

    def _check_free(self, order: Order) -> Operation | None:
        """The operation, if it was begun already and not lost.

        Raises:
            ConflictError: If the key is another's.
        """
        known = self._core.state.operations.get(order.where)
        if known is None:
            return None
        if known.body != order.body:
            raise _taken(order)
        return None if known.state is OperationState.LOST else known

    async def _start(self, order: Order, executors: Executors) -> None:
        try:
            await self._say(partial(_started, order), order)
        except ConflictError as exc:
            raise _taken(order) from exc
        running = self._running[order.where] = _Running()
        self._core.spawn(self._carry_out(order, executors, running), name=f"{order.operation} {order.id}")

    async def _carry_out(self, order: Order, executors: Executors, running: _Running) -> None:
        work = executors.run(order, json.loads(order.args), running.progress, self)
        running.work = task = asyncio.create_task(work, name=f"work on {order.id}")
        if running.cancelled:
            task.cancel()
        try:
            await asyncio.wait({task})
            await self._say_end(order, task)
        except TensorbusError as error:
            log.warning("end of operation not said: operation=%s reason=%s", order.id, error)
        finally:
            self._running.pop(order.where, None)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _say_end(self, order: Order, task: asyncio.Task[Done]) -> None:
        outcome, error, done = OperationOutcome.SUCCEEDED, None, None
        if task.cancelled():
            outcome, error = OperationOutcome.CANCELLED, _error_json(CancelledError("it was cancelled"))
        elif (failure := task.exception()) is not None:
            if not isinstance(failure, TensorbusError):
                log.error("operation failed: operation=%s", order.id, exc_info=failure)
            outcome, error = OperationOutcome.FAILED, _error_json(failure)
        else:
            done = task.result()
        end = partial(_ended, order, outcome, error, done)
        try:
            await self._say(end, order)
        except ConflictError as exc:
            if exc.details.get("reason") != "missing":
                raise
            # The log lost its tail, and the beginning with it.
            await self._say(partial(_started, order), order)
            await self._say(end, order)

    async def _say(self, make: Any, order: Order) -> None:
        await self._core.author.say(make, deadline=known_outcome(), principal=order.principal)

    # -- other workers' -----------------------------------------------------------------------------------------------

    async def _ask(self, worker: WorkerId, question: Mapping[str, object], *, deadline: Deadline) -> dict[str, Any]:
        session = next((s for s in self._core.state.sessions.values() if s.worker == worker), None)
        if session is None:
            raise NotFoundError(f"there is no worker {worker}", worker=worker)
        if not session.live:
            raise UnavailableError(f"worker {worker} does not run", worker=worker)
        subject = self._core.bus.subjects.rpc(f"op.{worker}")
        answer = json.loads(await self._core.bus.ask(subject, json.dumps(question).encode(), deadline=deadline))
        if not isinstance(answer, dict) or type(answer.get("position")) is not int:
            raise CorruptError(f"worker {worker} gave an answer that is none", worker=worker)
        await self._core.feed.reached(answer["position"], deadline=deadline)
        return answer

    @asynccontextmanager
    async def answering(self) -> AsyncIterator[None]:
        """Take what other workers ask of this one, as long as the context is open."""
        me = self._core.me.worker
        async with self._core.bus.answer(self._core.bus.subjects.rpc(f"op.{me}"), self._answer, queue="op"):
            yield

    async def _answer(self, question: bytes) -> bytes:
        deadline = Deadline(None)  # who asked has one, and it is kept where the question came in
        try:
            asked = {str(name): str(value) for name, value in json.loads(question).items()}
            where = asked["tenant"], asked["id"]
            done = total = 0
            match asked["do"]:
                case "submit":
                    order = Order(
                        asked["tenant"], asked["id"], self._core.me.worker, asked["operation"],
                        ArtifactId(asked["artifact"]), asked["args"], asked["principal"],
                    )  # fmt: skip
                    await self._begin(order, deadline=deadline)
                case "cancel":
                    await self.cancel(where, deadline=deadline)
                case _:
                    done, total = await self.progress(where, deadline=deadline)
        except (ValueError, KeyError, AttributeError) as exc:
            raise InvalidArgumentError(f"a question about operations cannot be read: {exc!r}") from exc
        return json.dumps({"position": self._core.live.position, "done": done, "total": total}).encode()


def error_of(found: Operation) -> TensorbusError:
    """Why an operation that has ended did not succeed."""
    if found.state is OperationState.LOST or found.error is None:
        return UnavailableError(
            f"operation {found.where[1]} is lost: worker {found.worker} ended before it did; what was done is unknown",
            operation=found.where[1],
            worker=found.worker,
        )
    return from_wire(json.loads(found.error))


def _copied(found: Operation) -> int:
    nbytes = json.loads(found.result).get("nbytes", 0) if found.result is not None else 0
    return nbytes if isinstance(nbytes, int) else 0


def _started(order: Order, number: int) -> Event:
    return OperationStarted(
        tenant=order.tenant, id=order.id, operation=order.operation, artifact=order.artifact, args=order.args,
        number=number,
    )  # fmt: skip


def _ended(order: Order, outcome: OperationOutcome, error: str | None, done: Done | None, number: int) -> Event:
    position = done.position if done is not None else 0
    return OperationEnded(
        tenant=order.tenant,
        id=order.id,
        outcome=outcome,
        error=error,
        result=None if done is None else json.dumps(done.result, sort_keys=True),
        positions=(StreamPosition(stream="TB", seq=position),) if position else (),
        number=number,
    )


def _error_json(failure: BaseException) -> str:
    error = failure if isinstance(failure, TensorbusError) else TensorbusError(f"it failed: {failure!r:.1000}")
    text = json.dumps(to_wire(error), default=str)
    if len(text) > ERROR_CHARS_MAX:
        text = json.dumps(to_wire(type(error)(error.message[:1000])), default=str)
    return text


def _taken(order: Order) -> ConflictError:
    return ConflictError(f"{order.id!r} is the key of another operation", operation=order.id)


def _looked_at(future: asyncio.Future[None]) -> None:
    if not future.cancelled():
        future.exception()
