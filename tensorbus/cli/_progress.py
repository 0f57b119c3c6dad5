"""A progress bar on standard error, drawn only for a terminal."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Final, Self

from tensorbus.cli._output import size
from tensorbus.clock import NS_PER_S, Clock, SystemClock

_WIDTH: Final = 30
_REDRAW_NS: Final = NS_PER_S // 20


class Progress:
    """``progress(done_bytes, total_bytes)`` from any thread; draws at most 20 times a second.

    Args:
        what: Said before the bar.
        clock: Tells when to redraw, and the rate.
        shown: Whether to draw; only on a terminal when ``None``.
    """

    def __init__(self, what: str, *, clock: Clock | None = None, shown: bool | None = None) -> None:
        self._what = what
        self._clock = clock or SystemClock()
        self._shown = sys.stderr.isatty() if shown is None else shown
        self._began_ns = self._clock.now_ns()
        self._drawn_ns: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._drawn_ns is not None:
            print(file=sys.stderr, flush=True)

    def __call__(self, done: int, total: int) -> None:
        if not self._shown:
            return
        now_ns = self._clock.now_ns()
        if self._drawn_ns is not None and done < total and now_ns - self._drawn_ns < _REDRAW_NS:
            return
        self._drawn_ns = now_ns
        print(f"\r{self._line(done, total, now_ns)}\x1b[K", end="", file=sys.stderr, flush=True)

    def _line(self, done: int, total: int, now_ns: int) -> str:
        part = min(1.0, done / total) if total else 1.0
        bar = "#" * int(part * _WIDTH)
        elapsed_s = max(1e-9, (now_ns - self._began_ns) / NS_PER_S)
        return (
            f"{self._what} [{bar:{_WIDTH}}] {part:4.0%}  {size(done)} of {size(total)}, {size(int(done / elapsed_s))}/s"
        )
