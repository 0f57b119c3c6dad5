"""Running scenarios: one seed, many seeds, and the search for a seed that fails."""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import os
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tensorbus.errors import InvalidArgumentError
from tensorbus.testing._fault_plan import FaultPlan
from tensorbus.testing._simloop import DeadlockError, LifeState, LivelockError, SimLoop, SimTask
from tensorbus.testing._world import InvariantError, World

Scenario = Callable[[World], Coroutine[Any, Any, None]]

SEED_VARIABLE = "TENSORBUS_SIM_SEED"
_LINES_SHOWN = 30
_BURIAL_STEPS_MAX = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What became of one run.

    Attributes:
        digest: Equal for equal code, scenario, options and seed, in every process.
        virtual_s: Simulated seconds.
        covered: How often each counter of :meth:`World.cover` was reached.
        trace: One line for each note, the newest ones if there were very many.
        rerun: A shell command that repeats exactly this run.
    """

    seed: int
    error: BaseException | None
    digest: str
    steps: int
    virtual_s: float
    covered: Mapping[str, int]
    trace: tuple[str, ...]
    rerun: str

    @property
    def ok(self) -> bool:
        return self.error is None

    def missing(self, expected: Iterable[str]) -> tuple[str, ...]:
        """Those of the expected counters that the run never reached."""
        return tuple(name for name in expected if not self.covered.get(name))

    def check(self) -> Report:
        """The report itself, if the run passed.

        Raises:
            InvariantError: If it failed; the text has the error, the last lines of the trace and the command to rerun.
        """
        if self.error is not None:
            raise InvariantError(str(self)) from self.error
        return self

    def __str__(self) -> str:
        head = f"seed {self.seed}: {self.steps} steps, {self.virtual_s:.6f} virtual s, digest {self.digest}"
        if self.error is None:
            return f"{head}: passed"
        lines = "\n".join(f"  {line}" for line in self.trace[-_LINES_SHOWN:])
        return f"{head}: {type(self.error).__name__}: {self.error}\n{lines}\nrerun: {self.rerun}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """What became of many runs of one scenario."""

    runs: int
    failures: tuple[Report, ...]
    covered: Mapping[str, int]

    def missing(self, expected: Iterable[str]) -> tuple[str, ...]:
        """Those of the expected counters that no run reached."""
        return tuple(name for name in expected if not self.covered.get(name))

    def check(self, *, covers: Iterable[str] = ()) -> None:
        """Demand that no run failed, and that together they reached the counters.

        A run of a single seed is a rerun, and need not reach them all.

        Raises:
            InvariantError: If not; the text has the first failure, or what was not reached.
        """
        if self.failures:
            seeds = [report.seed for report in self.failures]
            raise InvariantError(f"{len(seeds)} of {self.runs} seeds failed: {seeds}\n{self.failures[0]}")
        missing = self.missing(covers)
        if missing and self.runs > 1:
            raise InvariantError(f"{self.runs} runs passed and none reached {', '.join(missing)}: they show too little")


def run(
    scenario: Scenario,
    seed: int,
    *,
    shuffle: bool = True,
    plan: FaultPlan | None = None,
    check_every: int = 1,
    virtual_s_max: float = 1e6,
) -> Report:
    """Run a scenario to its end, or to the first thing that goes wrong; raises neither way.

    Args:
        scenario: Called with a fresh world. The run ends when it returns and all it demanded ``eventually`` has come.
        seed: The only source of chance.
        shuffle: Whether ready callbacks run in an order drawn from the seed; else in asyncio's.
        plan: The faults; ``None`` is calm. ``FaultPlan.drawn(seed)`` gives each seed a mix of its own.
        check_every: Check the invariants after every so many steps.
        virtual_s_max: Simulated seconds after which the run counts as failed.
    """
    loop = SimLoop(seed, shuffle=shuffle)
    world = World(
        loop, seed, plan=FaultPlan() if plan is None else plan, check_every=check_every, virtual_s_max=virtual_s_max
    )
    with _collector_off():
        try:
            _drive(world, scenario)
            return _report(world, _rerun_command(scenario, world, shuffle=shuffle, check_every=check_every))
        finally:
            _bury(world)


def sweep(scenario: Scenario, seeds: int | Iterable[int], **options: Any) -> Sweep:
    """Run a scenario under many seeds (a number means the first so many), or only under that of ``TENSORBUS_SIM_SEED``.

    Args:
        options: As :func:`run` takes them; without ``plan`` each seed draws one.
    """
    reports: list[Report] = []
    covered: Counter[str] = Counter()
    count = 0
    for report in _runs(scenario, seeds, options):
        count += 1
        covered.update(report.covered)
        if not report.ok:
            reports.append(report)
    return Sweep(runs=count, failures=tuple(reports), covered=dict(covered))


def search(scenario: Scenario, seeds: int | Iterable[int], **options: Any) -> Report | None:
    """The report of the first seed under which the scenario fails, or ``None``. Arguments as for :func:`sweep`."""
    return next((report for report in _runs(scenario, seeds, options) if not report.ok), None)


def rerun(target: str, seed: int, **options: Any) -> Report:
    """Repeat one run and print its trace and outcome.

    Args:
        target: The scenario as ``path/to/file.py:function``.

    Raises:
        InvalidArgumentError: If there is no such function.
    """
    path, _, name = target.rpartition(":")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    if spec is None or spec.loader is None:
        raise InvalidArgumentError(f"{path!r} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    scenario = getattr(module, name, None)
    if scenario is None:
        raise InvalidArgumentError(f"{path!r} has no function {name!r}")
    report = run(scenario, seed, **_with_plan(options, seed))
    sys.stdout.write("\n".join((*report.trace, str(report), "")))
    return report


def _runs(scenario: Scenario, seeds: int | Iterable[int], options: Mapping[str, Any]) -> Iterator[Report]:
    only = os.environ.get(SEED_VARIABLE)
    if only is not None:
        chosen: Iterable[int] = (int(only),)
    else:
        chosen = range(seeds) if isinstance(seeds, int) else seeds
    for seed in chosen:
        yield run(scenario, seed, **_with_plan(options, seed))


def _with_plan(options: Mapping[str, Any], seed: int) -> dict[str, Any]:
    return {"plan": FaultPlan.drawn(seed), **options}


def _drive(world: World, scenario: Scenario) -> None:
    loop = world.loop

    async def whole() -> None:
        await scenario(world)
        await world.settled()

    def ended(task: asyncio.Task[None]) -> None:
        error = asyncio.CancelledError("the scenario was cancelled") if task.cancelled() else task.exception()
        if error is not None:
            world.fail(error)
        elif not world.over:
            world.check()
            world.finish()

    loop.set_exception_handler(lambda _loop, context: world.fail(_loop_error(context)))
    loop.on_step = world.after_step
    loop.create_task(whole(), name="scenario").add_done_callback(ended)
    try:
        while not world.over:  # a scenario may stop the loop, never the run
            loop.run_forever()
    except (DeadlockError, LivelockError) as exc:
        world.fail(exc)


def _report(world: World, command: str) -> Report:
    return Report(
        seed=world.seed,
        error=world.failure,
        digest=world.digest,
        steps=world.loop.steps,
        virtual_s=world.loop.time(),
        covered=dict(world.covered),
        trace=tuple(world.trace),
        rerun=command,
    )


def _loop_error(context: Mapping[str, Any]) -> BaseException:
    error = context.get("exception")
    return error if isinstance(error, BaseException) else RuntimeError(str(context.get("message")))


def _rerun_command(scenario: Scenario, world: World, *, shuffle: bool, check_every: int) -> str:
    """Under pytest its own test, which knows the options; elsewhere the scenario's file and name with the options."""
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0]
    if test:
        return f"{SEED_VARIABLE}={world.seed} python -m pytest {shlex.quote(test)}"
    code = getattr(scenario, "__code__", None)
    target = f"{getattr(code, 'co_filename', '?')}:{getattr(scenario, '__qualname__', '?')}"
    plan = {FaultPlan(): ", plan=FaultPlan()", FaultPlan.drawn(world.seed): ""}.get(
        world.plan_at_start, f", plan={world.plan_at_start!r}"
    )
    options = (
        f"{plan}{'' if shuffle else ', shuffle=False'}{'' if check_every == 1 else f', check_every={check_every}'}"
    )
    call = f"rerun({target!r}, {world.seed}{options})"
    return f"python -c {shlex.quote(f'from tensorbus.testing import FaultPlan, Wave, rerun; {call}')}"


@contextmanager
def _collector_off() -> Iterator[None]:
    """Python collects cycles when it has made enough objects, so destructors would run at moments no seed decides."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _bury(world: World) -> None:
    """Unwind what is left, dead nodes included, now that nothing it does can count any more."""
    loop = world.loop
    world.over = True
    loop.on_step = None
    loop.set_exception_handler(lambda _loop, _context: None)
    for life in world.lives():
        life.state = LifeState.RUNNING
        loop.release(life)
    for _ in range(3):
        pending = loop.tasks_by_age()
        if not pending:
            break
        for task in pending:
            task.cancel()
        _drain(loop)
    for task in loop.tasks_by_age():
        _abandon(task)
    with suppress(Exception):
        loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()


def _drain(loop: SimLoop) -> None:
    """Run until nothing is left to run, within reason."""
    ends = loop.steps + _BURIAL_STEPS_MAX
    loop.on_step = lambda _label, _life: loop.stop() if loop.steps >= ends else None
    with suppress(DeadlockError, LivelockError):
        loop.run_forever()
    loop.on_step = None


def _abandon(task: SimTask[Any]) -> None:
    """A task that does not end on cancellation is closed by force."""
    task._log_destroy_pending = False  # type: ignore[attr-defined]  # noqa: SLF001  it is no news that it is pending
    coro = task.get_coro()
    with suppress(RuntimeError, ValueError, BaseExceptionGroup):  # a group of tasks wraps what closes it
        if coro is not None:
            coro.close()
