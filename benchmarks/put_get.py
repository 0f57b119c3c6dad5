"""Putting an artifact and getting it on the same host, until a byte of every page was read.

Against Ray's object store and Mooncake Store in venvs of their own, a plain mmap of a file with as many bytes in
``/dev/shm`` (memory of the same kind as the pool's), a copy into warm memory, and BLAKE3 with all processors. A get
begins with the id, in another process than the put: *first get* in a process that has read nothing of this size, *get*
in one that has. Content is new in each repeat; what was put before is destroyed first, here and at the peers, so that
each store uses its memory again. Repeats of all take turns; values are medians.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

import tensorbus as tb
from benchmarks import _store_parts
from benchmarks._crew import READY_S, Crew, Player, crew
from benchmarks._home import Home, running_home
from benchmarks._table import (
    GIB,
    MIB,
    PEERS,
    Options,
    Row,
    find,
    median_of,
    parse_options,
    peer_python,
    repeated,
    run_peer,
    show,
    size,
)
from benchmarks.peers.__main__ import install
from benchmarks.peers._common import touched

BENCH = "put_get"
MS = 1e3
SHM = "/dev/shm"
CALL_S = 120.0

Runs = dict[tuple[str, int], list[float]]
"""The seconds of each repeat, by case and size."""


def ask(player: Player, verb: str, *arguments: object) -> Any:
    player.tell((verb, arguments))
    return player.hear(CALL_S)


class Bench:
    """One home with a process that puts and one that gets, and the files to map."""

    def __init__(self, home: Home, hired: Crew, folder: Path, sizes: list[int]) -> None:
        self._home, self._hired, self._folder = home, hired, folder
        self._value = 1
        self.runs: Runs = defaultdict(list)
        for nbytes in {MIB, *sizes}:
            np.full(nbytes, 7, np.uint8).tofile(self._file(nbytes))
        with tb.connect(home=home.path, host_id="h0") as bus:
            self._small = bus.put({_store_parts.TENSOR: np.full(MIB, 7, np.uint8)}).id
        self._putter = self._ready(_store_parts.put, nbytes_max=max(sizes))
        self._getter = self._new_getter()
        for nbytes in sizes:  # what grows at its first use: mappings, pages, code
            self.repeat(nbytes)
        self.runs.clear()

    def repeat(self, nbytes: int) -> None:
        """Each case of one size once."""
        took, ref = self._put(nbytes, "now")
        self._note("put", nbytes, took)
        self._check("get", nbytes, ask(self._getter, "get", ref), self._value)
        self._check("mmap", nbytes, ask(self._getter, "mmap", str(self._file(nbytes))), 7)
        self._first(nbytes, ref)
        ask(self._putter, "destroy")
        self._note("put later", nbytes, self._put(nbytes, "later")[0])
        ask(self._putter, "destroy")
        for threads in range(1, len(os.sched_getaffinity(0)) + 1):
            self._note(f"memcpy {threads}", nbytes, ask(self._putter, "memcpy", nbytes, threads))
        self._note("blake3", nbytes, ask(self._putter, "blake3", nbytes))

    def _first(self, nbytes: int, ref: str) -> None:
        """The same reads in processes that have read nothing of this size."""
        for verb, case, what, value in (
            ("get", "first get", ref, self._value),
            ("mmap", "first mmap", str(self._file(nbytes)), 7),
        ):
            newcomer = self._new_getter()
            self._check(case, nbytes, ask(newcomer, verb, what), value)
            newcomer.end()

    def _put(self, nbytes: int, digest: str) -> tuple[float, str]:
        self._value = self._value % 250 + 1
        took, ref = ask(self._putter, "put", nbytes, self._value, digest)
        return took, ref

    def _check(self, case: str, nbytes: int, answer: tuple[float, int], value: int) -> None:
        took, total = answer
        if total != touched(nbytes, value):
            raise SystemExit(f"{case} of {nbytes} bytes gave other bytes: {total}")
        self._note(case, nbytes, took)

    def _note(self, case: str, nbytes: int, took: float) -> None:
        self.runs[case, nbytes].append(took)

    def _file(self, nbytes: int) -> Path:
        return self._folder / str(nbytes)

    def _new_getter(self) -> Player:
        return self._ready(_store_parts.get, small=self._small, small_file=str(self._file(MIB)))

    def _ready(self, part: Any, **arguments: object) -> Player:
        player = self._hired.hire(part, name=part.__name__, home=str(self._home.path), **arguments)
        player.hear(READY_S)
        return player


def peers_round(sizes: list[int], repeats: int, runs: Runs) -> None:
    """Have each peer do its repeats; an absent one leaves no trace."""
    arguments = ["--repeats", str(repeats), "--sizes", *map(str, sizes)]
    for peer, script in (("ray", "ray_put_get.py"), ("mooncake", "mooncake_put_get.py")):
        results = run_peer(peer, script, arguments, timeout_s=60 + 30 * repeats * len(sizes))
        for case in ("put", "get", "first_get"):
            for nbytes in sizes:
                runs[f"{peer} {case.replace('_', ' ')}", nbytes].extend(find(results, case=case, nbytes=nbytes))


def measure(options: Options, sizes: list[int]) -> Runs:
    rounds, repeats = (1, 3) if options.quick else (3, 4)
    theirs: Runs = defaultdict(list)
    pool = 3 * max(sizes) + 256 * MIB
    with (
        crew("benchmarks._store_parts") as hired,
        tempfile.TemporaryDirectory(prefix="tb-bench-", dir=SHM) as folder,
        running_home(pool_bytes=pool) as home,
    ):
        bench = Bench(home, hired, Path(folder), sizes)
        for _ in range(rounds):
            for nbytes in sizes:
                for _ in range(repeats if nbytes > 64 * MIB else 3 * repeats):
                    bench.repeat(nbytes)
            peers_round(sizes, repeats, theirs)
    return {**bench.runs, **theirs}


def rows_of(runs: Runs, sizes: list[int]) -> list[Row]:
    return [row for nbytes in sizes for row in _rows_of(runs, nbytes)]


def _rows_of(runs: Runs, nbytes: int) -> list[Row]:
    def row(case: str, against: str, target: float | None, *, name: str = "", value: float | None = None) -> Row:
        ours = runs.get((case, nbytes), [])
        theirs = value if name else median_of(runs.get((against, nbytes), []))
        return _row(f"{case}, {size(nbytes)}", ours, name or against, theirs, target)

    copies = {case: median_of(times) for (case, n), times in runs.items() if n == nbytes and case.startswith("memcpy")}
    memcpy, copying = min((took, case) for case, took in copies.items() if took is not None)
    hashing = median_of(runs["blake3", nbytes]) or 0.0
    slower = (hashing, "BLAKE3") if hashing > memcpy else (memcpy, copying)
    return [
        row("put later", copying, 0.85),
        row("put", "slower", 0.8, name=f"the slower of copy and hash, {slower[1]}", value=slower[0]),
        row("put", "ray put", None),
        row("put", "mooncake put", None),
        row("get", "ray get", 1.0),
        row("get", "mmap", 0.9),
        row("get", "mooncake get", None),
        row("first get", "ray first get", 1.0),
        row("first get", "first mmap", 0.9),
    ]


def _row(case: str, ours: list[float], against: str, theirs: float | None, target: float | None) -> Row:
    return repeated(BENCH, case, ours, "ms", against=against, theirs=theirs, better="lower", target=target, scale=MS)


def main() -> int:
    options = parse_options(__doc__)
    sizes = [MIB, 16 * MIB] if options.quick else [MIB, 16 * MIB, GIB]
    for peer in ("ray", "mooncake"):
        if peer_python(peer) is None:
            print(f"{peer}: {install(peer, PEERS)}", file=sys.stderr)
    return show(rows_of(measure(options, sizes), sizes), options)


if __name__ == "__main__":
    raise SystemExit(main())
