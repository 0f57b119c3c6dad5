"""A private event loop on its own thread, so that blocking calls work anywhere: in threads and running loops too."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from tensorbus.errors import InvalidArgumentError, UnavailableError

T = TypeVar("T")


class LoopThread:
    """Starts with the first call; a daemon thread, so that a forgotten one does not keep the process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._stopped = False

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Have the work done on the loop, and wait for it. Interrupting the wait cancels the work.

        Raises:
            InvalidArgumentError: If the thread was stopped, or this is it: it cannot wait for itself.
            UnavailableError: If the interpreter is ending and starts no thread for it.
        """
        try:
            loop = self._started()
        except BaseException:
            work.close()
            raise
        future = asyncio.run_coroutine_threadsafe(work, loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def stop(self, last: Callable[[], Coroutine[Any, Any, None]], *, wait: bool) -> None:
        """Do one last thing on the loop and end it. Safe to repeat; without ``wait`` safe in a finalizer."""
        if self._stopped:
            return
        self._stopped = True
        loop, thread = self._loop, self._thread
        if loop is None or thread is None or not thread.is_alive():
            return
        loop.call_soon_threadsafe(lambda: loop.create_task(_last(loop, last)))
        if wait and threading.current_thread() is not thread:
            thread.join()

    def _started(self) -> asyncio.AbstractEventLoop:
        if self._thread is threading.current_thread():
            raise InvalidArgumentError("a blocking call was made on the bus's own thread, for which it would wait")
        with self._lock:
            if self._stopped:
                raise InvalidArgumentError("the bus is closed")
            if self._loop is None:
                loop = asyncio.SelectorEventLoop()
                thread = threading.Thread(target=_serve, args=(loop,), name="tensorbus", daemon=True)
                try:
                    thread.start()
                except RuntimeError as exc:
                    loop.close()
                    raise UnavailableError(f"this process starts no more threads: {exc}") from exc
                self._loop, self._thread = loop, thread
            return self._loop


async def _last(loop: asyncio.AbstractEventLoop, last: Callable[[], Coroutine[Any, Any, None]]) -> None:
    try:
        await last()
    finally:
        loop.stop()


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.run_until_complete(loop.shutdown_default_executor())
    finally:
        loop.close()
