"""How facts about operations change the Directory: who began what, and what came of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from tensorbus.events import Event, OperationEnded, OperationStarted, Recorded
from tensorbus.ids import WorkerId
from tensorbus.lifecycle._records import Operation, OperationState, Session, Touched, Verdict

if TYPE_CHECKING:
    from tensorbus.lifecycle._directory import Directory

FINISHED_MAX: Final = 1024
"""How many operations that have ended are kept of a worker: the newest."""

Where = tuple[str, str]


def evolve(state: Directory, recorded: Recorded[Event], author: Session) -> Verdict:
    match recorded.event:
        case OperationStarted() as fact:
            return _started(state, recorded, fact, author)
        case OperationEnded() as fact:
            return _ended(state, recorded, fact, author)
        case _:
            return Verdict(False, "unknown")


def _started(state: Directory, recorded: Recorded[Event], fact: OperationStarted, author: Session) -> Verdict:
    where = (fact.tenant, fact.id)
    begun = Operation(
        where=where,
        operation=fact.operation,
        artifact=fact.artifact,
        args=fact.args,
        worker=author.worker,
        incarnation=author.incarnation,
        principal=recorded.headers.principal,
        started=recorded.seq,
        started_ns=recorded.time_ns,
    )
    before = state.operations.get(where)
    if before is not None:
        if before.body != begun.body:
            return Verdict(False, "conflict")
        if before.state is not OperationState.LOST:
            return Verdict(False, "duplicate")
        _drop(state, before)  # the worker is back, and was asked for it again
    state.operations[where] = begun
    state.running.setdefault(author.worker, {})[where] = None
    return Verdict(True, touched=(_touched(where),))


def _ended(state: Directory, recorded: Recorded[Event], fact: OperationEnded, author: Session) -> Verdict:
    where = (fact.tenant, fact.id)
    operation = state.operations.get(where)
    if operation is None or operation.worker != author.worker:
        return Verdict(False, "missing")
    if not operation.running:
        return Verdict(False, "duplicate")
    outcome = OperationState(fact.outcome.value)
    said = {"error": fact.error, "result": fact.result, "positions": fact.positions}
    return Verdict(True, touched=tuple(_finish(state, operation, recorded, outcome, **said)))


def lose(state: Directory, worker: WorkerId, recorded: Recorded[Event]) -> tuple[Touched, ...]:
    """A worker's session ended: what it was doing, nobody will say the end of."""
    running = [state.operations[where] for where in state.running.get(worker, ())]
    touched: dict[Touched, None] = {}
    for operation in running:
        touched.update(dict.fromkeys(_finish(state, operation, recorded, OperationState.LOST)))
    return tuple(touched)


def _finish(
    state: Directory, operation: Operation, recorded: Recorded[Event], outcome: OperationState, **said: Any
) -> Iterator[Touched]:
    where, worker = operation.where, operation.worker
    _unindex(state.running, worker, where)
    ended = replace(operation, state=outcome, ended=recorded.seq, ended_ns=recorded.time_ns, **said)
    state.operations[where] = ended
    finished = state.finished.setdefault(worker, {})
    finished[where] = None
    yield _touched(where)
    if len(finished) > FINISHED_MAX:
        oldest = next(iter(finished))
        _drop(state, state.operations[oldest])
        yield _touched(oldest)


def forget_operations(state: Directory, upto: int) -> tuple[Touched, ...]:
    """Drop what ended at or before a sequence."""
    gone = [o for o in state.operations.values() if o.ended is not None and o.ended <= upto]
    for operation in gone:
        _drop(state, operation)
    return tuple(_touched(operation.where) for operation in gone)


def _drop(state: Directory, operation: Operation) -> None:
    del state.operations[operation.where]
    _unindex(state.finished, operation.worker, operation.where)


def _unindex(index: dict[WorkerId, dict[Where, None]], worker: WorkerId, where: Where) -> None:
    of_worker = index[worker]
    of_worker.pop(where)
    if not of_worker:
        del index[worker]


def _touched(where: Where) -> Touched:
    return Touched("operation", *where)
