"""Spilling a replica and reading it back, beside ``dd`` with direct I/O on the same disk."""

from __future__ import annotations

import resource
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tensorbus.transport._pool import Pool, Segment
from tensorbus.transport._spill import SpillHeader, read_spill, write_spill

GO = threading.Event()
BLOCK = "4M"


@dataclass(slots=True)
class Cost:
    """Repeats of one piece of work.

    Attributes:
        cpu_s: Processor seconds of each, of all threads, in user and system mode.
        wall_s: Seconds of each.
    """

    cpu_s: list[float] = field(default_factory=list)
    wall_s: list[float] = field(default_factory=list)

    def of(self, work: Callable[[], object], *, who: int = resource.RUSAGE_SELF) -> None:
        before, started = resource.getrusage(who), time.perf_counter()
        work()
        after = resource.getrusage(who)
        self.wall_s.append(time.perf_counter() - started)
        self.cpu_s.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


@dataclass(slots=True)
class Spilling:
    """What was measured."""

    spill: Cost = field(default_factory=Cost)
    reload: Cost = field(default_factory=Cost)
    dd_write: Cost = field(default_factory=Cost)
    dd_read: Cost = field(default_factory=Cost)
    checksum: Cost = field(default_factory=Cost)


def measure(nbytes: int, *, repeats: int, folder: Path | None = None) -> Spilling:
    """Spill, reload and ``dd`` in turns, in a folder that goes afterwards."""
    found, pool = Spilling(), Pool(2 * nbytes)
    place = Path(tempfile.mkdtemp(prefix="tensorbus-bench-", dir=folder))
    try:
        source, target = (_warm(pool, nbytes) for _ in range(2))
        source.view[:] = np.random.default_rng(1).integers(0, 256, nbytes, np.uint8).data
        for _ in range(repeats):
            _one(found, place, source, target, nbytes)
    finally:
        pool.close()
        shutil.rmtree(place)
    return found


def _warm(pool: Pool, nbytes: int) -> Segment:
    segment = pool.allocate(nbytes, tenant="bench")
    segment.prefault()
    return segment


def _one(found: Spilling, place: Path, source: Segment, target: Segment, nbytes: int) -> None:
    path, other = place / "a.tbs", place / "dd"
    header = SpillHeader(
        worker="bench", incarnation="1", tenant="bench", artifact="a", born=1, born_ns=1, must=False, layout="{}",
        manifest="{}", parts=(nbytes,),
    )  # fmt: skip
    found.spill.of(lambda: write_spill(path, header, [source.view], stop=GO))
    count = str(nbytes // (4 << 20))
    dd = ["dd", f"bs={BLOCK}", f"count={count}", "status=none"]
    write = [*dd, "if=/dev/zero", f"of={other}", "oflag=direct", "conv=fsync"]
    found.dd_write.of(lambda: subprocess.run(write, check=True), who=resource.RUSAGE_CHILDREN)
    spill = write_spill(path, header, [source.view], stop=GO)
    found.reload.of(lambda: read_spill(spill, [target.view], stop=GO))
    read = [*dd, f"if={other}", "of=/dev/null", "iflag=direct"]
    found.dd_read.of(lambda: subprocess.run(read, check=True), who=resource.RUSAGE_CHILDREN)
    found.checksum.of(lambda: _checksums(source.view))
    if target.view != source.view:
        raise RuntimeError("what was spilled came back wrong")


def _checksums(view: memoryview) -> None:
    import xxhash

    for offset in range(0, len(view), 4 << 20):
        xxhash.xxh3_64_intdigest(view[offset : offset + (4 << 20)])


def touch_seconds(nbytes: int) -> tuple[float, float, float]:
    """Seconds to write memory of the pool: fresh, made ready before, and used before."""
    pool = Pool(2 * nbytes)
    data = np.ones(nbytes, np.uint8)
    try:
        fresh, ready = pool.allocate(nbytes, tenant="bench"), _warm(pool, nbytes)
        return _copy_s(data, fresh), _copy_s(data, ready), _copy_s(data, fresh)
    finally:
        pool.close()


def _copy_s(data: np.ndarray[tuple[int], np.dtype[np.uint8]], segment: Segment) -> float:
    into = np.frombuffer(segment.view, np.uint8)
    started = time.perf_counter()
    np.copyto(into, data)
    return time.perf_counter() - started
