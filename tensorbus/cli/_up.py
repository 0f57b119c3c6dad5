"""``tensorbus up``: an embedded bus, a worker, and a gateway with a home of pages and the store, as long as it runs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Final

import click

from tensorbus.cli._children import Child, outcome
from tensorbus.cli._errors import EXIT_INTERRUPTED, EXIT_OTHER, from_exit_code
from tensorbus.cli._options import WORKER, flag_of, json_option, takes_settings
from tensorbus.cli._output import size
from tensorbus.cli._parent import end_with
from tensorbus.cli._probes import bus_limits
from tensorbus.cli._say import Say
from tensorbus.cli._up_bus import OwnBus
from tensorbus.cli._urls import without_password
from tensorbus.clock import Deadline
from tensorbus.config import Resolved, Settings
from tensorbus.errors import UnavailableError
from tensorbus.transport import WorkerCard, locked, run_dir
from tensorbus.workers import default_worker_id, missing_for_store

READY_S: Final = 90.0
LEAVE_S: Final = 15.0
POLL_S: Final = 0.1
START_POLL_S: Final = 0.02
NOTE: Final = "Replicas are in DRAM: a put survives its caller, not its last worker."
NO_STORE: Final = (
    "No store: the log grows, and `query`, `state` and `why` have no answer; {} is missing: "
    "pip install 'tensorbus[store]'"
)


@click.command(short_help="Run a bus, a worker and a gateway in one home.")
@click.option("--parent", type=int, hidden=True, help="End when this process, which started it, ends.")
@takes_settings("worker_id", *WORKER)
@json_option
@click.pass_context
def up(ctx: click.Context, resolved: Resolved, *, parent: int | None, as_json: bool) -> None:
    """Run a whole system in one home: an embedded NATS server, a worker, and a gateway that is the store too.

    That one is the home of pages as well. With --nats-url it uses your NATS instead of an embedded one. It prints
    `ready` when callers can connect, reports a process that ends and goes on, and ends everything in order on Ctrl-C or
    SIGTERM.
    """
    if parent is not None:
        end_with(parent)
    settings = resolved.settings
    stop = Stop()
    with locked(run_dir(settings.home) / "up.lock", what=f"`tensorbus up` of home {settings.home}"), stop.watching():
        ctx.exit(Up(resolved, stop=stop, say=Say(as_json=as_json)).run())


class Stop:
    """Whether the user or the system asked for the end. Asked twice, this process ends at once."""

    def __init__(self) -> None:
        self._asked = threading.Event()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Take SIGINT, SIGTERM and SIGHUP while the context is open."""
        before = {number: signal.signal(number, self._on_signal) for number in _ENDS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def wait(self, seconds: float) -> bool:
        """Sleep, but not beyond the moment of being asked; says whether it was asked."""
        return self._asked.wait(seconds)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        if self._asked.is_set():
            os._exit(EXIT_INTERRUPTED)
        self._asked.set()


_ENDS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Up:
    """One run of `up`: what it started, in the order in which it did."""

    def __init__(self, resolved: Resolved, *, stop: Stop, say: Say) -> None:
        self._resolved = resolved
        self._settings = resolved.settings
        self._stop = stop
        self._say = say
        self._bus = None if self._settings.nats_url is not None else OwnBus(self._settings.home, say=say)
        self._children = _children(resolved)
        self._reported: set[str] = set()

    def run(self) -> int:
        """Start all, watch until asked to stop, end all. Returns the exit code."""
        try:
            self._start_bus()
            for child in self._children:
                child.start()
            if self._await_ready():
                missing = missing_for_store()
                note = NOTE if missing is None else f"{NOTE}\n{NO_STORE.format(missing)}"
                self._say.event("ready", f"{note}\nready", note=note, home=str(self._settings.home))
                return self._watch()
            return 0
        finally:
            self._end()

    # -- start --------------------------------------------------------------------------------------------------------

    def _start_bus(self) -> None:
        if self._bus is not None:
            self._bus.start()
            return
        url = without_password(str(self._settings.nats_url))
        self._say.event("started", f"bus      {url}, not started here", process="bus", url=url, pid=None)
        for problem in asyncio.run(bus_limits(str(self._settings.nats_url))):
            self._say.trouble("warning", problem, process="bus")

    def _await_ready(self) -> bool:
        """Wait until callers can connect to every child; ``False`` if asked to stop before.

        Raises:
            TensorbusError: If one ends, of the kind that its exit code tells; UnavailableError: If it takes too long.
        """
        deadline = Deadline(READY_S)
        waiting = list(self._children)
        while waiting:
            child = waiting[0]
            code = child.ended()
            if code is not None:
                raise from_exit_code(code, _failed(child, outcome(code)), process=child.role)
            if not deadline.left():
                raise UnavailableError(_failed(child, f"was not ready within {READY_S:g} s"), process=child.role)
            card = child.card()
            if card is not None:
                self._started(child, card)
                waiting.pop(0)
            elif self._stop.wait(START_POLL_S):
                return False
        return True

    def _started(self, child: Child, card: WorkerCard) -> None:
        pool = self._settings.pool_bytes if child.role == "basic" else 0
        use = f"{size(pool)} for tensors, bytes at {card.data}" if pool else f"callers at tb+tcp://{card.control}"
        self._say.event(
            "started",
            f"{child.role:8} {card.worker}, process {card.pid}, host id {card.host_id}, {use}",
            process=child.role,
            worker=card.worker,
            incarnation=card.incarnation,
            pid=card.pid,
            host_id=card.host_id,
            data=card.data,
            control=card.control,
            pool_bytes=pool,
            log=str(child.log),
        )

    # -- watch --------------------------------------------------------------------------------------------------------

    def _watch(self) -> int:
        """Until asked to stop, report what ends; 0, or 1 when nothing is left to watch."""
        while not self._stop.wait(POLL_S):
            for child in self._children:
                code = child.ended()
                if code is not None and child.role not in self._reported:
                    self._reported.add(child.role)
                    self._report(child, code)
            if self._bus is not None:
                self._bus.look()
            elif len(self._reported) == len(self._children):
                self._say.trouble("failed", "no process is left")
                return EXIT_OTHER
        return 0

    def _report(self, child: Child, code: int) -> None:
        tail = child.log_tail()
        again = ["tensorbus", "worker", "--roles", child.roles, *_shown_flags(self._resolved, child)]
        lines = "\n".join(f"  {line}" for line in tail) or "  (empty)"
        self._say.trouble(
            "ended",
            f"the {child.role} worker {child.worker} {outcome(code)}, the rest goes on; start it again with\n"
            f"  {shlex.join(again)}\nThe end of its log, {child.log}:\n{lines}",
            process=child.role,
            worker=child.worker,
            code=code,
            log=str(child.log),
            tail=tail,
        )

    # -- end ----------------------------------------------------------------------------------------------------------

    def _end(self) -> None:
        """Workers first, so that they can say that they leave; then the bus."""
        for child in self._children:
            child.terminate()
        deadline = Deadline(LEAVE_S)
        for child in self._children:
            child.join(deadline.left() or 0.0)
        if self._bus is not None:
            self._bus.stop()
        self._say.event("stopped", "stopped")


def _children(resolved: Resolved) -> list[Child]:
    """A basic worker and one process for the other roles. Environment and file are theirs too; flags are passed on."""
    settings, flags = resolved.settings, _flags(resolved)
    ids = {role: _worker_id(settings, role) for role in ("basic", "gateway")}
    roles = {"gateway": "gateway,shard-home" + (",store" if missing_for_store() is None else "")}
    return [
        Child(role, roles=roles.get(role), worker=worker, home=settings.home, flags=flags)
        for role, worker in ids.items()
    ]


def _flags(resolved: Resolved) -> list[str]:
    """The settings that were given as flags, and the home, as flags again."""
    flags = ["--home", str(resolved.settings.home)]
    for name in WORKER:
        if resolved.origins[name] == "flag" and name != "home":
            flags += [flag_of(name), _text(resolved.settings, name)]
    return flags


def _shown_flags(resolved: Resolved, child: Child) -> list[str]:
    """What starts a child again by hand: the same flags, but no password."""
    flags = _flags(resolved)
    for place, word in enumerate(flags):
        if word == flag_of("nats_url"):
            flags[place + 1] = without_password(flags[place + 1])
    named = resolved.settings.worker_id is not None or child.roles != child.role
    return [*flags, *([flag_of("worker_id"), child.worker] if named else [])]


def _failed(child: Child, what: str) -> str:
    tail = "\n".join(f"  {line}" for line in child.log_tail()) or "  (empty)"
    return f"the {child.role} worker {what}; the end of {child.log}:\n{tail}"


def _worker_id(settings: Settings, role: str) -> str:
    if settings.worker_id is None:
        return default_worker_id(settings, (role,))
    return settings.worker_id if role == "basic" else f"{settings.worker_id[:56]}-{role}"


def _text(settings: Settings, name: str) -> str:
    value = getattr(settings, name)
    return repr(value) if isinstance(value, float) else str(value)
