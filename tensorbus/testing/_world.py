"""The simulated machines: nodes that stop, stand still and start again, the trace, and what must hold meanwhile."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import hashlib
from collections import Counter, deque
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from tensorbus.clock import NS_PER_S
from tensorbus.errors import ConflictError, InvalidArgumentError, UnavailableError
from tensorbus.testing._fault_plan import FaultPlan
from tensorbus.testing._simloop import LIFE, Life, LifeState, SimLoop, SimTask, seeded

if TYPE_CHECKING:
    import random  # noqa: TID251  for annotations only

T = TypeVar("T")
Main = Callable[["Node"], Coroutine[Any, Any, None]]

BUS = "bus"
WALL_START_NS = 1_700_000_000 * NS_PER_S
TRACE_LINES_MAX = 20_000
_COLLECT_EVERY_STEPS = 5_000


class InvariantError(AssertionError):
    """Something that must always hold did not, or something that must happen did not in time."""


class SimClock:
    """A node's clocks: the loop's virtual time, drifting, and for the wall clock off by a constant skew."""

    def __init__(self, loop: SimLoop, *, skew_ns: int = 0, drift_ppm: float = 0.0) -> None:
        self._loop = loop
        self._skew_ns = skew_ns
        self._drift = 1.0 + drift_ppm / 1e6

    def now_ns(self) -> int:
        """Virtual nanoseconds by this node's oscillator; goes on while the node is paused or down."""
        return int(self._loop.time() * self._drift * NS_PER_S)

    def wall_ns(self) -> int:
        return WALL_START_NS + self._skew_ns + self.now_ns()


class SimIds:
    """Ids from a seed; they never repeat within a run, also not after a crash."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def hex(self, nbytes: int) -> str:
        return self._rng.randbytes(nbytes).hex()


class Node:
    """One simulated process, life after life. Made by :meth:`World.node`.

    Attributes:
        clock: The machine's clocks, the same ones in every life.
        ids: Its source of ids.
        disk: What survives a crash. Everything else that its coroutines hold does not.
    """

    def __init__(self, world: World, name: str, *, plan: FaultPlan) -> None:
        rng = world.rng(f"clock/{name}")
        self.world = world
        self.name = name
        self.clock = SimClock(
            world.loop,
            skew_ns=int(rng.uniform(-plan.skew_s_max, plan.skew_s_max) * NS_PER_S),
            drift_ppm=rng.uniform(-plan.drift_ppm_max, plan.drift_ppm_max),
        )
        self.ids = SimIds(world.rng(f"ids/{name}"))
        self.disk: dict[str, object] = {}
        self.lives = [Life(name, 1)]
        self.connected = asyncio.Event()
        self.connected.set()
        self._main: Main | None = None
        self._outcomes: dict[asyncio.Future[Any], None] = {}
        self._on_crash: dict[Callable[[], object], None] = {}
        self._graveyard: list[SimTask[Any]] = []

    @property
    def life(self) -> Life:
        """The present life, or the last one while the node is down."""
        return self.lives[-1]

    @property
    def is_up(self) -> bool:
        return self.life.state is not LifeState.DEAD

    def start(self, main: Main) -> None:
        """Run the node's main, and again at each restart. Its end without an error ends nothing else."""
        self._main = main
        self.background(main(self), name="main")

    def background(self, coro: Coroutine[Any, Any, None], *, name: str) -> Callable[[], None]:
        """Run a coroutine as :meth:`spawn` does; returns what cancels it."""
        outcome = self.spawn(coro, name=name)

        def cancel() -> None:
            outcome.cancel()

        return cancel

    def spawn(
        self, coro: Coroutine[Any, Any, T], *, name: str, may_raise: tuple[type[BaseException], ...] = ()
    ) -> asyncio.Future[T]:
        """Run a coroutine as a task of this node's present life.

        An error that it raises fails the whole run, unless ``may_raise`` names it.

        Returns:
            The task's outcome, to be awaited or cancelled from outside. It fails with UnavailableError if the node
            crashes first.

        Raises:
            UnavailableError: If the node is down.
        """
        if not self.is_up:
            coro.close()
            raise UnavailableError(f"node {self.name} is down", node=self.name)
        loop = self.world.loop
        context = contextvars.copy_context()
        context.run(LIFE.set, self.life)
        task = loop.create_task(coro, name=f"{self.name}#{self.life.number}/{name}", context=context)
        outcome: asyncio.Future[T] = loop.create_future()
        outcome.add_done_callback(lambda done: done.cancelled() and task.cancel(), context=self.world.context)
        self._outcomes[outcome] = None

        def settle(done: asyncio.Task[T]) -> None:
            self._outcomes.pop(outcome, None)
            self.world.settle(outcome, done, may_raise=may_raise)

        task.add_done_callback(settle, context=self.world.context)
        return outcome

    def on_crash(self, broken: Callable[[], object]) -> Callable[[], object]:
        """Call ``broken`` once if the node crashes (a peer sees its connection end); returns what takes that back."""
        self._on_crash[broken] = None
        return lambda: self._on_crash.pop(broken, None)

    def crash(self) -> None:
        """End this life at once. None of its code runs again, not even ``finally``; connections break."""
        if not self.is_up:
            return
        self.world.note("crash", self.name)
        # A task that nothing refers to is destroyed, and then its cleanup runs: keep the dead until the run is over.
        self._graveyard += [task for task in self.world.loop.tasks_by_age() if task.life is self.life]
        self.life.state = LifeState.DEAD
        broken, self._on_crash = list(self._on_crash), {}
        for callback in broken:
            self.world.context.run(callback)
        outcomes, self._outcomes = list(self._outcomes), {}
        for outcome in outcomes:
            if not outcome.done():
                outcome.set_exception(UnavailableError(f"node {self.name} crashed", node=self.name))
                outcome.exception()  # nobody need await it

    def restart(self) -> None:
        """Begin the next life of a crashed node, with its disk and nothing else; its main runs again."""
        if self.is_up:
            raise ConflictError(f"node {self.name} is not down", node=self.name)
        self.lives.append(Life(self.name, self.life.number + 1))
        self.world.note("restart", self.name)
        if self._main is not None:
            self.start(self._main)

    def pause(self) -> None:
        """Hold back all its callbacks while time goes on, as SIGSTOP does; no effect unless it is running."""
        if self.life.state is LifeState.RUNNING:
            self.world.note("pause", self.name)
            self.life.state = LifeState.PAUSED

    def resume(self) -> None:
        """Let a paused node go on; what came due meanwhile runs now."""
        if self.life.state is LifeState.PAUSED:
            self.world.note("resume", self.name)
            self.life.state = LifeState.RUNNING
            self.world.loop.release(self.life)

    def partition(self) -> None:
        """Cut the node off from the bus."""
        if self.connected.is_set():
            self.world.note("partition", self.name)
            self.connected.clear()

    def mend(self) -> None:
        if not self.connected.is_set():
            self.world.note("mend", self.name)
            self.connected.set()


class World:
    """What a scenario is given: nodes, faults, a trace, invariants and counters of what was reached.

    Attributes:
        plan: The faults in force; :meth:`heal` replaces it.
        over: Whether the run's outcome is settled; from then on nothing may have an effect.
    """

    def __init__(
        self, loop: SimLoop, seed: int, *, plan: FaultPlan, check_every: int = 1, virtual_s_max: float = 1e6
    ) -> None:
        self.loop = loop
        self.seed = seed
        self.plan = self.plan_at_start = plan
        self.over = False
        self.failure: BaseException | None = None
        self.covered: Counter[str] = Counter()
        self.context = contextvars.copy_context()
        self.nodes: dict[str, Node] = {}
        self.trace: deque[str] = deque(maxlen=TRACE_LINES_MAX)
        self._digest = hashlib.blake2b(digest_size=16)
        self._check_every = check_every
        self._virtual_s_max = virtual_s_max
        self._always: list[tuple[str, Callable[[], object]]] = []
        self._eventually: dict[asyncio.Future[None], tuple[str, Callable[[], object]]] = {}

    def node(self, name: str) -> Node:
        """The node of that name, made on first use and up. ``"bus"`` is where the bus's own work runs."""
        if name not in self.nodes:
            self.nodes[name] = Node(self, name, plan=self.plan)
        return self.nodes[name]

    def rng(self, name: str) -> random.Random:
        """A source of chance of its own for each purpose, so that one more draw for one does not change the others."""
        return seeded(name, self.seed)

    def crash(self, name: str) -> None:
        """Crash a node, see :meth:`Node.crash`; the bus can be paused and cut off, never crashed."""
        if name == BUS:
            raise InvalidArgumentError("the bus has no crash here; pause it, or partition the nodes from it")
        self.node(name).crash()

    def restart(self, name: str) -> None:
        self.node(name).restart()

    def pause(self, name: str) -> None:
        self.node(name).pause()

    def resume(self, name: str) -> None:
        self.node(name).resume()

    def partition(self, name: str) -> None:
        self.node(name).partition()

    def mend(self, name: str) -> None:
        self.node(name).mend()

    def heal(self) -> None:
        """End all faults: nothing is lost any more, everything is connected, running and up. Clocks stay wrong."""
        self.note("heal")
        self.plan = self.plan.calmed()
        for node in self.nodes.values():
            node.mend()
            node.resume()
            if not node.is_up:
                node.restart()

    def note(self, what: str, *details: object) -> None:
        """Add a line to the trace, and so to the digest. Details must print the same in every process."""
        line = f"{self.loop.time():.6f} {' '.join((what, *map(str, details)))}"
        self.trace.append(line)
        self._digest.update(line.encode() + b"\n")

    def cover(self, name: str) -> None:
        """Count that the run reached something, so that a suite can demand it."""
        self.covered[name] += 1

    def always(self, name: str, holds: Callable[[], object]) -> None:
        """Check after every step that ``holds()`` neither returns ``False`` nor raises AssertionError."""
        self._always.append((name, holds))

    def eventually(self, name: str, holds: Callable[[], object], *, within_s: float) -> asyncio.Future[None]:
        """Demand that ``holds()`` is true within some virtual seconds from now; the run goes on until it is.

        Returns:
            A future that is done as soon as it holds; awaiting it is optional.
        """
        done: asyncio.Future[None] = self.loop.create_future()
        if holds():
            done.set_result(None)
            return done
        self._eventually[done] = (name, holds)
        text = f"{name!r} did not come about within {within_s} s"
        timer = self.context.run(self.loop.call_later, within_s, self._too_late, done, text)
        done.add_done_callback(lambda _: timer.cancel(), context=self.context)
        return done

    @property
    def digest(self) -> str:
        """Names everything that happened so far: each step, its time and order, and each note."""
        return self._digest.hexdigest()

    def fail(self, error: BaseException) -> None:
        """End the run as failed; the first failure counts."""
        if not self.over:
            self.failure = error
            self.note("failed", type(error).__name__)  # not its text, which may differ from process to process
            self.finish()

    def finish(self) -> None:
        """Settle the outcome and stop the loop."""
        self.over = True
        self.loop.stop()

    def after_step(self, label: str, life: Life | None) -> None:
        """The loop's hook: note the step, then check what must hold."""
        if self.over:
            return
        where = "" if life is None else f"{life.node}#{life.number}"
        self._digest.update(f"{self.loop.time():.9f} {where} {label}\n".encode())
        if self.loop.steps % _COLLECT_EVERY_STEPS == 0:
            gc.collect(1)  # automatic collection is off during a run, see run()
        if self.loop.time() > self._virtual_s_max:
            self.fail(InvariantError(f"the scenario did not end within {self._virtual_s_max} virtual seconds"))
        elif self.loop.steps % self._check_every == 0:
            self.check()

    def check(self) -> None:
        """Check everything that must hold now, and look whether what must happen has."""
        try:
            for name, holds in self._always:
                if holds() is False:
                    raise InvariantError(f"{name!r} does not hold")
            for done, (_name, holds) in list(self._eventually.items()):
                if done.done() or holds():
                    del self._eventually[done]
                    if not done.done():
                        done.set_result(None)
        except Exception as exc:  # noqa: BLE001  whatever a check raises is the run's outcome
            self.fail(exc)

    def lives(self) -> list[Life]:
        """All lives of all nodes, past and present."""
        return [life for node in self.nodes.values() for life in node.lives]

    async def settled(self) -> None:
        """Wait until all that must happen has."""
        while self._eventually:
            await next(iter(self._eventually))

    def _too_late(self, done: asyncio.Future[None], text: str) -> None:
        self.check()  # it may have come about since the last check, when not every step is checked
        if not done.done():
            self.fail(InvariantError(text))

    def settle(
        self, outcome: asyncio.Future[T], done: asyncio.Task[T], *, may_raise: tuple[type[BaseException], ...]
    ) -> None:
        """Hand a task's end to its outcome; an error that was not to be expected ends the run."""
        error = None if done.cancelled() else done.exception()
        if error is not None and not isinstance(error, may_raise):
            error.add_note(f"raised by the simulated task {done.get_name()}")
            self.fail(error)
        if outcome.done():
            return
        if done.cancelled():
            outcome.cancel()
        elif error is not None:
            outcome.set_exception(error)
            outcome.exception()  # nobody need await it
        else:
            outcome.set_result(done.result())
