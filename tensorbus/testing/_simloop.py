"""An asyncio event loop on virtual time whose every choice comes from one seed.

It relies on a few private names of ``asyncio`` (``_ready``, ``_scheduled``, ``Handle._context``, ``_run_once``),
because there is no public way to choose which ready callback runs next; the tests would show a change of them.
"""

from __future__ import annotations

import asyncio
import heapq
import random  # noqa: TID251  every source of chance below has a seed
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ParamSpec, TypeVar, cast

T = TypeVar("T")
P = ParamSpec("P")

STALL_STEPS_MAX = 200_000
_CANCELLED_TIMERS_KEPT = 100


class DeadlockError(RuntimeError):
    """Every task waits and no timer is armed, so nothing can ever happen again."""


class LivelockError(RuntimeError):
    """Callbacks keep each other busy while virtual time stands still."""


class LifeState(StrEnum):
    RUNNING = "running"
    PAUSED = "paused"
    DEAD = "dead"


@dataclass(slots=True, eq=False)
class Life:
    """One life of one node, from start to crash: what the loop asks before it runs a callback."""

    node: str
    number: int
    state: LifeState = LifeState.RUNNING
    held: list[asyncio.Handle] = field(default_factory=list)
    """Callbacks that came due while paused or dead. A dead life keeps them, so that no destructor runs its cleanup."""


def seeded(purpose: str, seed: int) -> random.Random:
    """A source of chance of its own for each purpose, so that one more draw for one does not change the others."""
    return random.Random(f"{purpose}/{seed}")


LIFE: ContextVar[Life | None] = ContextVar("tensorbus_sim_life", default=None)


class SimFuture(asyncio.Future[T]):
    """A future with a number for a hash, so that a set of futures has the same order in every process."""

    def __init__(self, *, loop: asyncio.AbstractEventLoop, number: int) -> None:
        self.number = number
        super().__init__(loop=loop)

    def __hash__(self) -> int:
        return self.number


class SimTask(asyncio.Task[T]):
    """A task with a number for a hash (``TaskGroup`` keeps its tasks in a set) and the life it belongs to."""

    def __init__(
        self,
        coro: Coroutine[Any, Any, T],
        *,
        loop: asyncio.AbstractEventLoop,
        number: int,
        name: str,
        context: Context | None,
    ) -> None:
        self.number = number
        self.life = LIFE.get() if context is None else context.get(LIFE)
        super().__init__(coro, loop=loop, name=name, context=context)

    def __hash__(self) -> int:
        return self.number


class SimLoop(asyncio.BaseEventLoop):
    """Runs one callback at a time; when none is ready, time jumps to the next timer.

    There are no sockets and no threads in it: ``run_in_executor`` (so ``asyncio.to_thread``) runs the function on the
    loop itself, as a step of its own. Use it alone as ``asyncio.Runner(loop_factory=lambda: SimLoop(seed))``, or
    through :func:`tensorbus.testing.run`.

    Args:
        seed: The only source of chance.
        shuffle: Whether to pick among the ready callbacks at random; else in asyncio's own order.
        stall_steps_max: Steps without a move of time after which the run counts as a livelock.

    Raises:
        DeadlockError: From the run, if nothing is ready and no timer is armed.
        LivelockError: From the run, if time stands still for too many steps.
    """

    _ready: deque[asyncio.Handle]
    _scheduled: list[asyncio.TimerHandle]
    _timer_cancelled_count: int
    _stopping: bool
    _thread_id: int | None

    def __init__(self, seed: int, *, shuffle: bool = True, stall_steps_max: int = STALL_STEPS_MAX) -> None:
        super().__init__()
        self.set_debug(False)
        self.steps = 0
        self.on_step: Callable[[str, Life | None], None] | None = None
        self._now = 0.0
        self._rng = seeded("loop", seed) if shuffle else None
        self._stalled = 0
        self._stall_steps_max = stall_steps_max
        self._numbers = 0

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._now

    def create_future(self) -> asyncio.Future[Any]:
        return SimFuture(loop=self, number=self._number())

    def create_task(
        self, coro: Any, *, name: object = None, context: Context | None = None, **_options: object
    ) -> asyncio.Task[Any]:
        number = self._number()
        # asyncio's own default names count for the whole process, and would differ between two runs in it.
        text = f"task-{number}" if name is None else str(name)
        return SimTask(coro, loop=self, number=number, name=text, context=context)

    def run_in_executor(self, executor: object, func: Callable[..., T], *args: object) -> asyncio.Future[T]:
        """Run the function as a later step of this loop; cancelling the future does not stop it, as with a thread."""
        del executor
        future: asyncio.Future[T] = self.create_future()
        self.call_soon(_run_job, future, func, args)
        return future

    def release(self, life: Life) -> None:
        """Make the callbacks that a life held back ready again, in the order in which they came due."""
        self._ready.extend(life.held)
        life.held.clear()

    def tasks_by_age(self) -> list[SimTask[Any]]:
        """The unfinished tasks, oldest first."""
        return sorted((cast("SimTask[Any]", task) for task in asyncio.all_tasks(self)), key=lambda task: task.number)

    def _number(self) -> int:
        self._numbers += 1
        return self._numbers

    def _run_once(self) -> None:
        handle = self._next()
        if handle is None:
            if not self._stopping:
                raise DeadlockError(self._why_nothing_runs())
            return
        label, life = _label(handle), _life_of(handle)
        self.steps += 1
        self._stalled += 1
        handle._run()  # noqa: SLF001  private, see the module's docstring
        if self.on_step is not None:
            self.on_step(label, life)
        if self._stalled > self._stall_steps_max:
            raise LivelockError(f"{self._stalled} steps at {self._now:.6f} s; the last one was {label!r}")

    def _next(self) -> asyncio.Handle | None:
        while True:
            self._fire_due_timers()
            while self._ready:
                handle = self._take()
                if handle.cancelled():
                    continue
                life = _life_of(handle)
                if life is None or life.state is LifeState.RUNNING:
                    return handle
                life.held.append(handle)
            if self._stopping or not self._jump():
                return None

    def _take(self) -> asyncio.Handle:
        if self._rng is not None and len(self._ready) > 1:
            self._ready.rotate(-self._rng.randrange(len(self._ready)))
        return self._ready.popleft()

    def _jump(self) -> bool:
        """Move time to the next timer that can still matter; false if there is none."""
        self._forget_cancelled_timers()
        while self._scheduled:
            timer = self._scheduled[0]
            life = _life_of(timer)
            if timer.cancelled() or (life is not None and life.state is LifeState.DEAD):
                self._pop_timer()
                if life is not None and not timer.cancelled():
                    life.held.append(timer)
                continue
            self._now = max(self._now, timer.when())
            self._stalled = 0
            return True
        return False

    def _fire_due_timers(self) -> None:
        while self._scheduled and self._scheduled[0].when() <= self._now:
            timer = self._pop_timer()
            if not timer.cancelled():
                self._ready.append(timer)

    def _pop_timer(self) -> asyncio.TimerHandle:
        timer = heapq.heappop(self._scheduled)
        timer._scheduled = False  # type: ignore[attr-defined]  # noqa: SLF001  so that a later cancel is not counted
        if timer.cancelled():
            self._timer_cancelled_count -= 1
        return timer

    def _forget_cancelled_timers(self) -> None:
        if self._timer_cancelled_count <= max(_CANCELLED_TIMERS_KEPT, len(self._scheduled) // 2):
            return
        self._scheduled = [timer for timer in self._scheduled if not timer.cancelled()]
        heapq.heapify(self._scheduled)
        self._timer_cancelled_count = 0

    def _why_nothing_runs(self) -> str:
        waiting = [f"{_where(task.life)}{task.get_name()}" for task in self.tasks_by_age()]
        shown = ", ".join(waiting[:20]) + (f" and {len(waiting) - 20} more" if len(waiting) > 20 else "")
        return f"deadlock at {self._now:.6f} s: no timer is armed and {len(waiting)} tasks wait: {shown}"

    def _write_to_self(self) -> None:
        """Called by ``call_soon_threadsafe``: there is no selector to wake, and no other thread may be there."""
        if self._thread_id not in (None, threading.get_ident()):
            raise RuntimeError("another thread called into the simulated loop; its timing cannot be repeated")

    def _process_events(self, event_list: object) -> None:
        """There are no sockets, so there are no events."""


def _run_job(future: asyncio.Future[T], func: Callable[..., T], args: tuple[object, ...]) -> None:
    try:
        result = func(*args)
    except Exception as exc:  # noqa: BLE001  the caller gets it, as from a thread
        if not future.done():
            future.set_exception(exc)
        return
    if not future.done():
        future.set_result(result)


def _life_of(handle: asyncio.Handle) -> Life | None:
    context: Context = handle._context  # type: ignore[attr-defined]  # noqa: SLF001  private, see the module's docstring
    return context.get(LIFE)


def _label(handle: asyncio.Handle) -> str:
    """What a callback is called in the trace; never an address, which would differ between processes."""
    callback: object = handle._callback  # type: ignore[attr-defined]  # noqa: SLF001  private, see the module's docstring
    owner = getattr(callback, "__self__", None)
    if isinstance(owner, asyncio.Task):
        return owner.get_name()
    return str(getattr(callback, "__qualname__", type(callback).__name__))


def _where(life: Life | None) -> str:
    return "" if life is None else f"{life.node}#{life.number}({life.state})/"
