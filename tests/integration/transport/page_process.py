"""The other process of the tests of page memory: it reads or writes an arena whose descriptors it inherits."""

from __future__ import annotations

import json
import sys
import time

import numpy as np

from tensorbus.cli._parent import end_with
from tensorbus.clock import Deadline
from tensorbus.transport import (
    PAGE_PLACE,
    ArenaShape,
    ArenaWriter,
    Lines,
    MappedArena,
    Origin,
    PageState,
    Ways,
    fetch_pages,
)


def pattern(slots: np.ndarray, generations: np.ndarray) -> np.ndarray:
    """What every word of a page is in that use of its slot."""
    return slots.astype(np.uint64) << np.uint64(32) | generations.astype(np.uint64)


def read(arena: MappedArena, nbytes: int, seconds: float, port: int) -> None:
    """Read what the table says is there, as fast as can be, until enough was torn; tell what came of it.

    Args:
        port: Of the server to read from; 0 reads the memory itself.
    """
    origin = Origin(name="owner", addresses=(("127.0.0.1", port),), request={"permit": "t"})
    ways = Ways(connections=2, lines=Lines())
    rng = np.random.default_rng(3)
    counts = dict.fromkeys((*(state.name.lower() for state in PageState), "wrong"), 0)
    out = np.zeros((16, nbytes), np.uint8)
    assert arena._open is not None
    stamps = arena._open[0].stamps
    end = time.monotonic() + seconds
    while time.monotonic() < end and not (counts["ok"] > 500 and counts["torn"] > 20 and counts["gone"] > 20):
        places = np.zeros(16, PAGE_PLACE)
        places["segment"] = 1  # the owner's first
        places["slot"] = rng.permutation(arena.shape.slots)[:16]
        places["generation"] = stamps[places["slot"].astype(np.int64)] & np.uint32(0xFFFF_FFFE)
        if port:
            came = fetch_pages(origin, places, out, nbytes, ways=ways, deadline=Deadline(20.0))
            assert came.failure is None, came.failure
            states = came.states
        else:
            states = arena.read_into(places, out, nbytes, verify=bool(rng.integers(2)))
        for state in PageState:
            counts[state.name.lower()] += int((states == state).sum())
        ok = states == PageState.OK
        words = out.view(np.uint64)[ok]
        counts["wrong"] += int((words != pattern(places["slot"], places["generation"])[ok, None]).any(axis=1).sum())
    print(json.dumps(counts), flush=True)


def write(arena: ArenaWriter, nbytes: int) -> None:
    """Write over and over into the first slots, until killed."""
    blocks = np.full((4, nbytes), 7, np.uint8)
    print("writing", flush=True)
    while True:
        arena.write(np.arange(4), blocks, nbytes, sums=False)


if __name__ == "__main__":
    end_with(int(sys.argv[1]))
    fds, shape = [int(fd) for fd in sys.argv[3].split(",")], ArenaShape(int(sys.argv[4]), int(sys.argv[5]))
    if sys.argv[2] == "read":
        read(MappedArena(*fds, shape), shape.slot_bytes, float(sys.argv[6]), int(sys.argv[7]))
    else:
        write(ArenaWriter(*fds, shape), shape.slot_bytes)
