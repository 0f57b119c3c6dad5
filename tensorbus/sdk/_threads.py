"""Blocking work beside the loop, in daemon threads of the package's own.

asyncio's own executor takes no work once the main thread has ended; a bus may still be used then, by other threads and
by exit handlers.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future
from contextlib import suppress
from typing import Any, Final, TypeVar

from tensorbus.errors import UnavailableError

T = TypeVar("T")

_THREADS_MAX: Final = 32
_IDLE_S: Final = 10.0


class DaemonThreads(Executor):
    """Threads that start when needed, end when idle, and never keep the process.

    What waits for a thread is bounded by those who wait for its result.
    """

    def __init__(self, threads_max: int = _THREADS_MAX) -> None:
        self._threads_max = threads_max
        self._changed = threading.Condition()
        self._todo: deque[Callable[[], None]] = deque()
        self._count = 0
        self._idle = 0

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Have a call made.

        Raises:
            UnavailableError: If the interpreter is ending and starts no thread for it.
        """
        future: Future[T] = Future()

        def work() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = fn(*args, **kwargs)
            except BaseException as exc:  # noqa: BLE001 - raised again for whoever waits
                future.set_exception(exc)
            else:
                future.set_result(result)

        with self._changed:
            if self._idle <= len(self._todo) and self._count < self._threads_max:
                self._start()
            self._todo.append(work)
            self._changed.notify()
        return future

    def _start(self) -> None:
        try:
            threading.Thread(target=self._serve, name="tensorbus-work", daemon=True).start()
        except RuntimeError as exc:
            if not self._count:
                raise UnavailableError(f"this process starts no more threads: {exc}") from exc
        else:
            self._count += 1

    def _serve(self) -> None:
        while (work := self._next()) is not None:
            work()
            del work  # or its result would live until the next one comes

    def _next(self) -> Callable[[], None] | None:
        with self._changed:
            self._idle += 1
            waited = True
            while not self._todo and waited:
                waited = self._changed.wait(_IDLE_S)
            self._idle -= 1
            if self._todo:
                return self._todo.popleft()
            self._count -= 1
            return None


_threads = DaemonThreads()


def _after_fork() -> None:
    global _threads
    _threads = DaemonThreads()  # the parent's threads are not here


os.register_at_fork(after_in_child=_after_fork)


async def in_thread(work: Callable[[], T]) -> T:
    """Run blocking work. A cancelled caller does not wait for it; it goes on, and its result is dropped.

    Raises:
        UnavailableError: If the interpreter is ending and starts no thread for it.
    """
    context = contextvars.copy_context()
    return await asyncio.get_running_loop().run_in_executor(_threads, lambda: context.run(work))


async def in_thread_to_its_end(work: Callable[[threading.Event], T]) -> T:
    """Run blocking work that looks at ``stop`` now and then; it has ended when this returns, also if cancelled.

    Raises:
        UnavailableError: If the interpreter is ending and starts no thread for it.
    """
    stop = threading.Event()
    running = asyncio.ensure_future(in_thread(lambda: work(stop)))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        stop.set()
        while not running.done():
            with suppress(asyncio.CancelledError):  # a second one changes nothing: the memory must be still first
                await asyncio.wait([running])
        if not running.cancelled():
            running.exception()  # looked at, so that the loop does not report it
        raise


def share_out(works: Iterable[Callable[[], None]], *, threads: int) -> None:
    """Run all, by several threads at once, of which this is one; then raise the first error, if any."""
    todo, lock = iter(works), threading.Lock()
    errors: list[BaseException] = []

    def serve() -> None:
        while not errors:
            with lock:
                work = next(todo, None)
            if work is None:
                return
            try:
                work()
            except BaseException as exc:  # noqa: BLE001 - raised again in the thread that waits
                errors.append(exc)

    others = [threading.Thread(target=serve, name="tensorbus-share", daemon=True) for _ in range(threads - 1)]
    started: list[threading.Thread] = []
    for thread in others:
        with suppress(RuntimeError):  # the interpreter is ending: then this thread does it all
            thread.start()
            started.append(thread)
    serve()
    for thread in started:
        thread.join()
    if errors:
        raise errors[0]
