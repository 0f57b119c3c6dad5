"""Which path brings which blocks: shares that follow the rates measured. Pure: no threads, no sockets, time is given.

Paths take runs of blocks as they finish the last one, so a path gets what it can carry, and a slow one little. Runs get
short towards the end, so that all end together; a path that holds up the others then loses what it has under way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from tensorbus.clock import NS_PER_S

RUN_BLOCKS_MAX: Final = 8
"""Blocks of one request."""
RUN_S: Final = 0.02
"""How long a request should keep a path at work."""
DEPTH: Final = 2
"""Requests under way on a path, so that it never waits for the next."""
AHEAD_S: Final = 0.25
"""A path on which one block takes longer has one request under way."""
HOLDS_UP: Final = 4.0
"""A path holds up the others if it needs that many times what another would."""
PATIENCE_S: Final = 0.5
"""And so much longer: a busy machine is no slow path."""
SPOILT_MAX: Final = 16
"""So often may one block come changed from one source, each time otherwise."""


@dataclass(frozen=True, slots=True)
class Run:
    """Blocks ``[first, first + count)``, asked for together."""

    first: int
    count: int


@dataclass(eq=False, slots=True)
class Path:
    """One connection's part in a transfer.

    Attributes:
        source: Whose bytes it brings.
        rate: Bytes per second as measured; 0 until known.
        brought: Blocks that came over it and were right.
        benched: Whether it held up the others, and gets nothing more as long as they go on.
    """

    source: str
    rate: float = 0.0
    since_ns: int = 0
    brought: int = 0
    benched: bool = False
    runs: list[list[int]] = field(default_factory=list)

    @property
    def under_way(self) -> int:
        """Blocks asked for that have not come."""
        return sum(map(len, self.runs))


class Shares:
    """What is still to come, and who brings it.

    Args:
        sizes: Bytes of each block.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = sizes
        self._todo = [(0, len(sizes))] if sizes else []
        self._todo_blocks = len(sizes)
        self._done = bytearray(len(sizes))
        self._left = len(sizes)
        self._leading = 0
        self._spoilt: dict[tuple[str, int], list[int]] = {}
        self.paths: list[Path] = []
        self.done_bytes: dict[str, int] = {}
        self.repeated = 0
        """Blocks that had to be asked for again."""

    @property
    def finished(self) -> bool:
        return self._left == 0

    @property
    def idle(self) -> bool:
        """Whether nothing waits to be taken."""
        return not self._todo

    def has(self, index: int) -> bool:
        """Whether a block has come."""
        return bool(self._done[index])

    @property
    def leading(self) -> int:
        """How many blocks have come before the first that has not."""
        first = self._done.find(0, self._leading)
        self._leading = len(self._done) if first < 0 else first
        return self._leading

    def join(self, path: Path) -> None:
        self.paths.append(path)

    def leave(self, path: Path) -> None:
        """The path is gone for good; what it had under way is for others."""
        self.lost(path)
        self.paths.remove(path)
        if all(other.benched for other in self.paths):
            for other in self.paths:
                other.benched = False

    def take(self, path: Path, now_ns: int) -> Run | None:
        """The next blocks for a path, if there are any for it now."""
        if path.benched or not self._todo or len(path.runs) >= self._depth(path):
            return None
        first, count = self._todo[0]
        wanted = min(count, self._run_blocks(path))
        if wanted == count:
            self._todo.pop(0)
        else:
            self._todo[0] = (first + wanted, count - wanted)
        self._todo_blocks -= wanted
        if not path.runs:
            path.since_ns = now_ns
        path.runs.append(list(range(first, first + wanted)))
        return Run(first, wanted)

    def claim(self, path: Path, now_ns: int) -> None:
        """The first block was asked for with the opening of the path's source; before anything else is taken."""
        first, count = self._todo.pop(0)
        if count > 1:
            self._todo.insert(0, (first + 1, count - 1))
        self._todo_blocks -= 1
        path.since_ns = now_ns
        path.runs.append([first])

    def came(self, path: Path, index: int, now_ns: int) -> None:
        """A block's bytes are here and right."""
        path.runs[0].remove(index)
        path.brought += 1
        self._measure(path, self._sizes[index], now_ns)
        if not self._done[index]:
            self._done[index] = True
            self._left -= 1
            self.done_bytes[path.source] = self.done_bytes.get(path.source, 0) + self._sizes[index]

    def spoilt(self, path: Path, index: int, found: int, now_ns: int) -> bool:
        """A block came with bytes that are not its checksum's; says whether that is its source's fault.

        What changes on the way does so differently each time; the same wrong bytes twice are what the source has.

        Args:
            found: The checksum of the bytes that came.
        """
        path.runs[0].remove(index)
        self._measure(path, self._sizes[index], now_ns)
        self._again([index])
        before = self._spoilt.setdefault((path.source, index), [])
        before.append(found)
        return before.count(found) > 1 or len(before) >= SPOILT_MAX

    def ended(self, path: Path) -> None:
        """The path's oldest request was answered to its end."""
        self._again(path.runs.pop(0))

    def lost(self, path: Path) -> None:
        """The path's connection is gone, with all that was under way on it."""
        for run in path.runs:
            self._again(run)
        path.runs.clear()

    def holding_up(self, idle: Path, now_ns: int) -> Path | None:
        """The path that should lose its blocks to an idle one, if one holds it up. Benches it."""
        if self._todo or not idle.rate:
            return None
        slowest: tuple[float, Path] | None = None
        for path in self.paths:
            nbytes = sum(self._sizes[index] for run in path.runs for index in run)
            if path is idle or not nbytes:
                continue
            # What it needs at its own rate, and has been silent for: a busy machine is no slow path.
            silence_s = (now_ns - path.since_ns) / NS_PER_S
            seconds = silence_s + (nbytes / path.rate if path.rate else 0.0)
            if seconds > PATIENCE_S + HOLDS_UP * nbytes / idle.rate and (slowest is None or seconds > slowest[0]):
                slowest = (seconds, path)
        if slowest is None:
            return None
        slowest[1].benched = True
        return slowest[1]

    def missing(self) -> Iterator[int]:
        """Blocks that have not come."""
        return (index for index, done in enumerate(self._done) if not done)

    def _measure(self, path: Path, nbytes: int, now_ns: int) -> None:
        rate = nbytes * NS_PER_S / max(now_ns - path.since_ns, 1)
        path.rate = rate if not path.rate else 0.7 * path.rate + 0.3 * rate
        path.since_ns = now_ns

    def _depth(self, path: Path) -> int:
        return 1 if 0 < path.rate * AHEAD_S < max(self._sizes) else DEPTH

    def _run_blocks(self, path: Path) -> int:
        of_rate = int(path.rate * RUN_S) // max(self._sizes)
        fair = self._todo_blocks // (2 * max(1, len(self.paths)))
        return max(1, min(RUN_BLOCKS_MAX, of_rate, fair))

    def _again(self, indexes: Sequence[int]) -> None:
        for index in indexes:
            if not self._done[index]:
                self._todo.insert(0, (index, 1))
                self._todo_blocks += 1
                self.repeated += 1
