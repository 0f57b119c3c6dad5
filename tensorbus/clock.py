"""The only reader of time.

Leases and heartbeats are counted in CLOCK_BOOTTIME, which goes on while the machine sleeps and never jumps.
Wall-clock time is for people only; folds take time from the stream.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Protocol

from tensorbus.errors import DeadlineExceededError

NS_PER_S = 1_000_000_000


class Clock(Protocol):
    """What a shell may ask about time. A simulator passes its own."""

    def now_ns(self) -> int:
        """Nanoseconds that only grow, also across suspend; no relation to the calendar."""
        ...

    def wall_ns(self) -> int:
        """Nanoseconds since the Unix epoch, as good as the machine's clock is."""
        ...


class SystemClock:
    """The machine's own clocks."""

    def now_ns(self) -> int:
        return time.clock_gettime_ns(time.CLOCK_BOOTTIME)

    def wall_ns(self) -> int:
        return time.time_ns()


class LoopClock:
    """Reads the running event loop's time: real in production, virtual under the simulator."""

    def now_ns(self) -> int:
        return int(asyncio.get_running_loop().time() * NS_PER_S)

    def wall_ns(self) -> int:
        return 1_700_000_000 * NS_PER_S + self.now_ns()


def _monotonic_s() -> float:
    """The running loop's time, virtual under the simulator; elsewhere the clock that asyncio's loops read too."""
    try:
        return asyncio.get_running_loop().time()
    except RuntimeError:
        return time.monotonic()


class Deadline:
    """A budget of time that is handed down a call chain, never restarted. Counted in the running loop's time.

    Args:
        seconds: What is left; ``None`` means no limit.
        what: Names the work in the error, e.g. ``"put of 'demo/linear'"``.
    """

    __slots__ = ("_ends", "_seconds", "what")

    def __init__(self, seconds: float | None, *, what: str = "the call") -> None:
        self._seconds = seconds
        self._ends = None if seconds is None else _monotonic_s() + seconds
        self.what = what

    def left(self) -> float | None:
        """Seconds left (never negative), or ``None`` without a limit."""
        return None if self._ends is None else max(0.0, self._ends - _monotonic_s())

    def error(self) -> DeadlineExceededError:
        return DeadlineExceededError(f"{self.what} did not finish within {self._seconds} s", timeout_s=self._seconds)

    @asynccontextmanager
    async def scope(self) -> AsyncIterator[None]:
        """Run the body within what is left; on expiry raise :class:`DeadlineExceededError`."""
        timer = asyncio.timeout(self.left())
        try:
            async with timer:
                yield
        except TimeoutError as exc:
            if timer.expired():
                raise self.error() from exc
            raise
