"""A worker as a process: signals, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import resource
import signal
from collections.abc import Callable

from tensorbus.config import Settings
from tensorbus.transport import WorkerCard
from tensorbus.workers._memory import MakeOrder
from tensorbus.workers._worker import Worker


def run_process(
    settings: Settings,
    *,
    roles: tuple[str, ...],
    ready: Callable[[WorkerCard], None],
    eviction: MakeOrder | None = None,
) -> None:
    """Run a worker until SIGTERM or SIGINT, then leave in good order. A second signal ends it at once.

    Args:
        ready: Called once callers can connect.
        eviction: As for :class:`Worker`.

    Raises:
        FencedError: If another process took its id over; ConflictError: If it runs already.
        UnavailableError: If there is no bus.
    """
    _raise_file_limit()
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_run(Worker(settings, roles=roles, on_rebuilt=gc.freeze, eviction=eviction), ready))


async def _run(worker: Worker, ready: Callable[[WorkerCard], None]) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, lambda: os._exit(130) if stop.is_set() else stop.set())

    def announce(card: WorkerCard) -> None:
        # What start-up made lives as long as the process: a full collection that walks a large Directory would hold
        # the interpreter for most of a second, and the loop owes the bus a heartbeat.
        gc.collect()
        gc.freeze()
        ready(card)

    await worker.run(stop=stop, ready=announce)


def _raise_file_limit() -> None:
    """Each artifact has a memfd and each reader a pin: take as many descriptors as the machine gives."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
