"""The parts that processes play in ``benchmarks.put_get``: one that puts, and those that get."""

from __future__ import annotations

import gc
import mmap
import os
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from blake3 import blake3

import tensorbus as tb
from benchmarks.peers._common import Bytes, touch, warm

TENSOR = "x"
PRELOADED = tb.connect  # imported before the processes are forked, not in each of them
DIGEST_S = 60.0


def serve(cue: Connection, actor: Any) -> None:
    """Do what is asked, one call after the other, until the line ends."""
    cue.send("ready")
    while True:
        verb, arguments = cue.recv()
        cue.send(getattr(actor, verb)(*arguments))


class Putter:
    """Puts new content of its own warm memory, and does the bare work that a put consists of."""

    def __init__(self, bus: tb.Bus, nbytes_max: int) -> None:
        self._bus = bus
        self._source = warm(nbytes_max, 1)
        self._target = warm(nbytes_max, 1)
        self._artifact: tb.Artifact | None = None

    def put(self, nbytes: int, value: int, digest: Any) -> tuple[float, str]:
        """Seconds of a put, and the artifact's id; the one before is destroyed first."""
        data = self._source[:nbytes]
        data[:] = value
        started = time.perf_counter()
        artifact = self._bus.put({TENSOR: data}, digest=digest)
        took = time.perf_counter() - started
        self._artifact = artifact
        return took, artifact.id

    def destroy(self) -> None:
        """End what was put last, once its digest is there: what the worker does later must not fall into the next."""
        artifact, self._artifact = self._artifact, None
        assert artifact is not None
        ends = time.perf_counter() + DIGEST_S
        while artifact.info().digest is None and time.perf_counter() < ends:
            time.sleep(0.005)
        artifact.destroy()

    def memcpy(self, nbytes: int, threads: int) -> float:
        """Seconds of copying between warm memory with that many threads."""
        source, target = self._source[:nbytes], self._target[:nbytes]
        share = -(-nbytes // threads)
        parts = [(target[at : at + share], source[at : at + share]) for at in range(0, nbytes, share)]
        others = [threading.Thread(target=np.copyto, args=part) for part in parts[1:]]
        started = time.perf_counter()
        for thread in others:
            thread.start()
        np.copyto(*parts[0])
        for thread in others:
            thread.join()
        return time.perf_counter() - started

    def blake3(self, nbytes: int) -> float:
        """Seconds of hashing warm memory with all processors."""
        started = time.perf_counter()
        blake3(self._source[:nbytes].data, max_threads=blake3.AUTO).digest()
        return time.perf_counter() - started


class Getter:
    """Reads artifacts and files until a byte of every page was read."""

    def __init__(self, bus: tb.Bus) -> None:
        self._bus = bus

    def get(self, ref: str) -> tuple[float, int]:
        """Seconds from the id to the last page, and the sum of the bytes read."""
        started = time.perf_counter()
        array = self._bus.artifact(ref).tensor(TENSOR, framework="numpy")
        total = touch(array)
        took = time.perf_counter() - started
        del array
        gc.collect()
        return took, total

    def mmap(self, path: str) -> tuple[float, int]:
        """The same for a file that is mapped by hand."""
        started = time.perf_counter()
        fd = os.open(path, os.O_RDONLY)
        mapping = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
        os.close(fd)
        array: Bytes = np.frombuffer(mapping, np.uint8)
        total = touch(array)
        took = time.perf_counter() - started
        del array
        mapping.close()
        return took, total


def put(cue: Connection, *, home: str, nbytes_max: int) -> None:
    with tb.connect(home=home, host_id="h0", timeout=120) as bus:
        serve(cue, Putter(bus, nbytes_max))


def get(cue: Connection, *, home: str, small: str, small_file: str) -> None:
    """Connections, imports and code are warm before the first that is measured."""
    with tb.connect(home=home, host_id="h0", timeout=120) as bus:
        getter = Getter(bus)
        for _ in range(2):
            getter.get(small)
            getter.mmap(small_file)
        serve(cue, getter)
