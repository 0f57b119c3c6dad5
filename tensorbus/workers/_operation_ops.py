"""What callers ask about operations: to begin one, to find, await or cancel it, how far it is, and which there are."""

from __future__ import annotations

import json
from typing import Annotated, Any, Final, Literal

from pydantic import Field

from tensorbus.clock import Deadline
from tensorbus.errors import DeadlineExceededError, InvalidArgumentError, NotFoundError
from tensorbus.ids import ArtifactId, LeaseId, WorkerId, check_worker_id
from tensorbus.lifecycle import Operation, rules
from tensorbus.projections import Json
from tensorbus.transport import Reply, Request
from tensorbus.workers._callers import Caller
from tensorbus.workers._core import Core
from tensorbus.workers._directory_ops import Op
from tensorbus.workers._executors import Order
from tensorbus.workers._operations import Operations
from tensorbus.workers._requests import LIST_LIMIT_MAX, Ask, LeaseSeconds, Ref, parse

WAIT_S_MAX: Final = 20.0
WORKERS_MAX: Final = 64
DEADLINE_S_MAX: Final = 30 * 86_400.0

OperationId = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
WorkerName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]


class Args(Ask):
    """The arguments of every operation but the artifact."""

    to: Annotated[list[WorkerName], Field(min_length=1, max_length=WORKERS_MAX)] | None = None
    n: Annotated[int, Field(ge=1, le=WORKERS_MAX)] | None = None
    src: WorkerName | None = None
    dst: WorkerName | None = None
    device: Annotated[str, Field(pattern=r"^[a-z]{1,16}(:[0-9]{1,4})?$")] | None = None
    ttl_s: LeaseSeconds | None = None
    lease: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    deadline_s: Annotated[float, Field(strict=False, ge=0, le=DEADLINE_S_MAX, allow_inf_nan=False)] | None = None


class Submit(Ask):
    id: OperationId
    worker: WorkerName
    operation: Literal["prefetch", "pin", "unpin", "replicate", "migrate", "evict", "persist", "verify"]
    artifact: Ref | None = None
    args: Args = Args()


class OneOperation(Ask):
    id: OperationId


class Wait(Ask):
    id: OperationId
    wait_s: float = Field(0.0, strict=False, ge=0, le=WAIT_S_MAX)


class ListOperations(Ask):
    worker: WorkerName | None = None
    running: bool = False
    limit: Annotated[int, Field(ge=1, le=LIST_LIMIT_MAX)] = 100


class OperationOps:
    """Operations on operations, for any worker's callers."""

    def __init__(self, core: Core, operations: Operations) -> None:
        self._core = core
        self._operations = operations

    def table(self) -> dict[str, Op]:
        return {
            "op_submit": self.submit,
            "op_find": self.find,
            "op_wait": self.wait,
            "op_cancel": self.cancel,
            "op_progress": self.progress,
            "op_ls": self.ls,
        }

    async def submit(self, caller: Caller, request: Request) -> Reply:
        asked = parse(Submit, request.args, op="op_submit")
        order = Order(
            tenant=caller.tenant,
            id=asked.id,
            worker=check_worker_id(asked.worker),
            operation=asked.operation,
            artifact=self._about(caller.tenant, asked),
            args=_canonical(asked),
            principal=caller.id,
        )
        return self._answer(await self._operations.submit(order, deadline=request.deadline))

    def _about(self, tenant: str, asked: Submit) -> ArtifactId:
        """The artifact that an operation is on; a repetition is answered also when it has ended since."""
        known = self._core.state.operations.get((tenant, asked.id))
        if asked.operation == "unpin":
            if known is not None:
                return known.artifact
            return self._pinned(tenant, asked) if asked.artifact is None else self._known(tenant, asked.artifact)
        if asked.artifact is None:
            raise InvalidArgumentError(f"op_submit: {asked.operation} needs an artifact", argument="artifact")
        if known is not None:
            return ArtifactId(asked.artifact)
        return rules.resolve(self._core.state, tenant=tenant, ref=asked.artifact, by="id").artifact

    def _known(self, tenant: str, artifact: str) -> ArtifactId:
        """An artifact that there is or was: a pin may have ended with it, which is what is asked for."""
        record = self._core.state.artifact(tenant, ArtifactId(artifact))
        if record is None:
            raise rules.missing_artifact(None, ArtifactId(artifact))
        return record.artifact

    def _pinned(self, tenant: str, asked: Submit) -> ArtifactId:
        state, lease = self._core.state, LeaseId(asked.args.lease or "")
        for where in state.by_lessor.get(WorkerId(asked.worker), ()):
            if where[0] == tenant and lease in state.artifacts[where].leases:
                return where[1]
        text = f"worker {asked.worker} has no pin {lease!r}: it was ended, ran out, or never was"
        raise NotFoundError(text, lease=lease, worker=asked.worker)

    async def find(self, caller: Caller, request: Request) -> Reply:
        return self._answer(self._operations.find(_where(caller, request, "op_find")))

    async def wait(self, caller: Caller, request: Request) -> Reply:
        """The operation at its end, or as it is when the caller should ask again."""
        asked = parse(Wait, request.args, op="op_wait")
        where = caller.tenant, asked.id
        try:
            found = await self._operations.until_ended(where, deadline=Deadline(asked.wait_s))
        except DeadlineExceededError:
            found = self._operations.find(where)
        return self._answer(found)

    async def cancel(self, caller: Caller, request: Request) -> Reply:
        where = _where(caller, request, "op_cancel")
        return self._answer(await self._operations.cancel(where, deadline=request.deadline))

    async def progress(self, caller: Caller, request: Request) -> Reply:
        where = _where(caller, request, "op_progress")
        done, total = await self._operations.progress(where, deadline=request.deadline)
        return Reply({"done": done, "total": total, "position": self._core.live.position})

    async def ls(self, caller: Caller, request: Request) -> Reply:
        asked = parse(ListOperations, request.args, op="op_ls")
        found = [
            operation
            for operation in reversed(self._core.state.operations.values())
            if operation.where[0] == caller.tenant
            and asked.worker in (None, operation.worker)
            and (operation.running or not asked.running)
        ]
        items = [operation_info(operation) for operation in found[: asked.limit]]
        return Reply({"items": items, "position": self._core.live.position})

    def _answer(self, found: Operation) -> Reply:
        return Reply({"operation": operation_info(found), "position": self._core.live.position})


def operation_info(found: Operation) -> Json:
    """An operation as callers see it."""
    return {
        "id": found.where[1],
        "operation": found.operation,
        "artifact": found.artifact,
        "args": json.loads(found.args),
        "worker": found.worker,
        "incarnation": found.incarnation,
        "principal": found.principal,
        "state": str(found.state),
        "started": found.started,
        "started_ns": found.started_ns,
        "ended": found.ended,
        "ended_ns": found.ended_ns,
        "error": None if found.error is None else json.loads(found.error),
        "result": None if found.result is None else json.loads(found.result),
        "positions": {at.stream: at.seq for at in found.positions},
    }


def _where(caller: Caller, request: Request, op: str) -> tuple[str, str]:
    return caller.tenant, parse(OneOperation, request.args, op=op).id


def _canonical(asked: Submit) -> str:
    """The arguments as the fact has them; which ones there must be depends on the operation."""
    given: dict[str, Any] = asked.args.model_dump(exclude_none=True)
    own = set(given) - {"deadline_s"}
    match asked.operation:
        case "prefetch":
            fits = own <= {"device"}
        case "pin":
            fits = own == {"ttl_s"}
        case "unpin":
            fits = own == {"lease"}
        case "replicate":
            fits = own in ({"to"}, {"n"})
        case "migrate":
            fits = own == {"src", "dst"} and given["src"] != given["dst"]
        case _:
            fits = not own
    if not fits:
        raise InvalidArgumentError(
            f"op_submit: {asked.operation} does not go with {', '.join(sorted(own)) or 'no arguments'}: prefetch may "
            "have a device, pin takes a ttl_s, unpin a lease, replicate to or n, migrate a src and another dst",
            argument="args",
        )
    return json.dumps(given, sort_keys=True)
