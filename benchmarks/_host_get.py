"""Getting artifacts of many tensors on their own host: mapped, until the first byte of each was read, and copied out.

Each was put anew and is read for the first time; a get begins with the id. Beside Ray and Vineyard in their own venvs,
and memory's own rate. The tensors share their source's memory, so that what is stored is all that takes room.
"""

from __future__ import annotations

import gc
import os
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

import tensorbus as tb
from benchmarks import _store_parts
from benchmarks._crew import READY_S, Player, crew
from benchmarks._home import running_home
from benchmarks._table import GIB, MIB, Row, bounded, find, median_of, repeated, run_peer, size, spread
from benchmarks.peers._common import first_bytes, overlapping, warm

BENCH = "transfer"
TENSORS = 64
GET_MS_MAX = 2.0
SAME_TARGET = 0.8
"""A get of the largest is to take no longer than one of the smallest: within what repeats differ by."""
CALL_S = 120.0
PRELOADED = tb.connect  # imported before the processes are forked, not in each of them
SCRIPTS = (("ray", "ray_first_bytes.py"), ("vineyard", "vineyard_get.py"))


class Putter:
    """Puts artifacts of many tensors, each once the one before has gone."""

    def __init__(self, bus: tb.Bus) -> None:
        self._bus = bus
        self._artifact: tb.Artifact | None = None

    def put(self, nbytes: int, value: int) -> tuple[str, int]:
        """The artifact's id and the sum of its tensors' first bytes."""
        data = overlapping(nbytes, TENSORS, value)
        self._artifact = self._bus.put({f"t{n:02}": tensor for n, tensor in enumerate(data)})
        return self._artifact.id, first_bytes(data)

    def destroy(self) -> None:
        assert self._artifact is not None
        self._artifact.destroy()


class Getter:
    """Reads, and copies into memory that is warm."""

    def __init__(self, bus: tb.Bus, nbytes: int) -> None:
        self._bus = bus
        self._room, self._other = warm(nbytes, 1), warm(nbytes, 2)
        each = nbytes // TENSORS
        self._rooms = {f"t{n:02}": self._room[n * each : (n + 1) * each] for n in range(TENSORS)}

    def get(self, ref: str) -> tuple[float, int]:
        """Seconds from the id to the first byte of the last tensor, and the sum of those bytes."""
        started = time.perf_counter()
        tensors = self._bus.artifact(ref).tensor_dict(framework="numpy")
        total = first_bytes(tensors.values())
        took = time.perf_counter() - started
        del tensors
        gc.collect()
        return took, total

    def fill(self, ref: str) -> tuple[float, int]:
        """The same for a copy into tensors that are there."""
        started = time.perf_counter()
        tensors = self._bus.artifact(ref).tensor_dict(into=self._rooms)
        took = time.perf_counter() - started
        return took, first_bytes(tensors.values())

    def memcpy(self) -> float:
        """Seconds of copying as much between warm memory, with a thread for each processor."""
        threads = len(os.sched_getaffinity(0))
        share = -(-len(self._room) // threads)
        parts = [(self._room[at : at + share], self._other[at : at + share]) for at in range(0, len(self._room), share)]
        others = [threading.Thread(target=np.copyto, args=part) for part in parts]
        started = time.perf_counter()
        for thread in others:
            thread.start()
        for thread in others:
            thread.join()
        return time.perf_counter() - started


class Bench:
    """One home, with a process that puts and one that gets.

    Attributes:
        runs: Seconds of each repeat, by case and size.
    """

    def __init__(self, putter: Player, getter: Player) -> None:
        self._putter, self._getter = putter, getter
        self._value = 0
        self.runs: dict[tuple[str, int], list[float]] = defaultdict(list)

    def once(self, case: str, nbytes: int, *, counts: bool = True) -> None:
        """Put what was not there before, and read it."""
        self._value += 1
        ref, expected = self._ask(self._putter, "put", nbytes, self._value)
        took, total = self._ask(self._getter, case, ref)
        if total != expected:
            raise SystemExit(f"{case} of {nbytes} bytes gave other bytes: {total}")
        if counts:
            self.runs[case, nbytes].append(took)
        self._ask(self._putter, "destroy")

    def memcpy(self, nbytes: int) -> None:
        self.runs["memcpy", nbytes].append(self._ask(self._getter, "memcpy"))

    @staticmethod
    def _ask(player: Player, verb: str, *arguments: object) -> Any:
        player.tell((verb, arguments))
        return player.hear(CALL_S)


def host_rows(sizes: Sequence[int], rounds: int) -> list[Row]:
    """Gets of every size beside the peers', and copies of one size beside memory's own rate."""
    filled = max(nbytes for nbytes in sizes if nbytes <= GIB)
    with (
        crew("benchmarks._host_get") as hired,
        running_home(pool_bytes=max(sizes) + max(sizes) // 4 + 256 * MIB) as home,
    ):
        putter = hired.hire(put, name="put", home=str(home.path))
        getter = hired.hire(get, name="get", home=str(home.path), nbytes=filled)
        for player in (putter, getter):
            player.hear(READY_S)
        bench = Bench(putter, getter)
        bench.once("fill", filled, counts=False)
        for _ in range(rounds):
            _round(bench, sizes, filled)
    return [row for nbytes in sizes for row in _get_rows(bench.runs, nbytes)] + _other_rows(bench.runs, sizes, filled)


def _round(bench: Bench, sizes: Sequence[int], filled: int) -> None:
    """As the peers do: one repeat of each size that does not count, then some in a row."""
    for nbytes in sizes:
        bench.once("get", nbytes, counts=False)
        for _ in range(3):
            bench.once("get", nbytes)
    for _ in range(3):
        bench.memcpy(filled)
        bench.once("fill", filled)
    arguments = ["--repeats", "3", "--tensors", str(TENSORS), "--sizes", *map(str, sizes)]
    for peer, script in SCRIPTS:
        said = run_peer(peer, script, arguments)
        for nbytes in sizes:
            bench.runs[peer, nbytes] += find(said, case="first bytes", nbytes=nbytes)


def _get_rows(runs: dict[tuple[str, int], list[float]], nbytes: int) -> list[Row]:
    case, ours = f"get on the host, {TENSORS} tensors, {size(nbytes)}", runs["get", nbytes]
    rows = [
        repeated(
            BENCH, case, ours, "ms", against=f"{peer} get", theirs=median_of(runs[peer, nbytes]), better="lower",
            target=1.0, scale=1e3,
        )
        for peer, _ in SCRIPTS
    ]  # fmt: skip
    middle = (median_of(ours) or 0.0) * 1e3
    return [*rows, bounded(BENCH, case, middle, "ms", limit=GET_MS_MAX, better="lower", spread=spread(ours, scale=1e3))]


def _other_rows(runs: dict[tuple[str, int], list[float]], sizes: Sequence[int], filled: int) -> list[Row]:
    least, most = min(sizes), max(sizes)
    copying = [filled / took / 1e9 for took in runs["fill", filled]]
    bare = [filled / took / 1e9 for took in runs["memcpy", filled]]
    return [
        repeated(
            BENCH, f"get on the host, {size(most)}", runs["get", most], "ms", against=f"that of {size(least)}",
            theirs=median_of(runs["get", least]), better="lower", target=SAME_TARGET, scale=1e3,
        ),
        repeated(
            BENCH, f"copy into own tensors, {size(filled)}", copying, "GB/s", against="memcpy, all processors",
            theirs=median_of(bare), better="higher",
        ),
    ]  # fmt: skip


def put(cue: Connection, *, home: str) -> None:
    with tb.connect(home=home, host_id="h0", timeout=CALL_S) as bus:
        _store_parts.serve(cue, Putter(bus))


def get(cue: Connection, *, home: str, nbytes: int) -> None:
    with tb.connect(home=home, host_id="h0", timeout=CALL_S) as bus:
        _store_parts.serve(cue, Getter(bus, nbytes))
