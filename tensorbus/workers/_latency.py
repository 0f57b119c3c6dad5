"""How long a repeated act took lately, in figures for people and dashboards."""

from __future__ import annotations

from collections import deque

WINDOW = 256


class LatencyWindow:
    """The durations of the last 256 times that something was done.

    Attributes:
        count: How often it was done in all.
    """

    def __init__(self) -> None:
        self.count = 0
        self._last_ns: deque[int] = deque(maxlen=WINDOW)

    def note(self, nanoseconds: int) -> None:
        self.count += 1
        self._last_ns.append(nanoseconds)

    def figures(self) -> dict[str, float]:
        """Count of all; median, 95th percentile and greatest of the last ones, in seconds; 0 before the first."""
        ordered = sorted(self._last_ns) or [0]
        middle, high = (ordered[max(0, -(-len(ordered) * share // 100) - 1)] for share in (50, 95))
        return {"count": self.count, "p50_s": middle / 1e9, "p95_s": high / 1e9, "max_s": ordered[-1] / 1e9}
