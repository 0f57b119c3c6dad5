"""Ray's object store on one host: put by this process, get by an actor until a byte of every page is read.

``get`` is by a process that has read objects of this size before, so the store's pages may be in its tables already;
``first_get`` by one that has not.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np
import ray
from _common import Bytes, arguments, emit, touch, touched, warm


@ray.remote(num_cpus=0.1)
class Reader:
    """Another process of the same host."""

    def get(self, refs: list[Any]) -> tuple[float, int]:
        """Seconds until every page was read, and their sum. The list keeps Ray from fetching before the call."""
        started = time.perf_counter()
        total = touch(ray.get(refs[0]))
        return time.perf_counter() - started, total


def put(data: Bytes, value: int) -> tuple[Any, float]:
    """A reference to new content, and the seconds that taking it in took."""
    data[:] = value
    started = time.perf_counter()
    ref = ray.put(data)
    return ref, time.perf_counter() - started


def get(reader: Any, ref: Any, data: Bytes, value: int) -> float:
    elapsed, total = ray.get(reader.get.remote([ref]))
    if total != touched(data.nbytes, value):
        raise SystemExit(f"ray gave other bytes: {total}")
    return float(elapsed)


def first_get(ref: Any, data: Bytes, value: int) -> float:
    """A get by a process that has read nothing of this size, so has none of the store's pages in its tables."""
    reader = Reader.remote()
    small = ray.put(np.zeros(1 << 20, np.uint8))
    ray.get(reader.get.remote([small]))  # connections, imports and code are not what is measured
    try:
        return get(reader, ref, data, value)
    finally:
        ray.kill(reader)


def measure(nbytes: int, repeats: int) -> None:
    """Repeats of one size. Each object is gone before the next, so the store's memory is used again."""
    data, reader = warm(nbytes, 1), Reader.remote()
    runs: dict[str, list[float]] = {"put": [], "get": [], "first_get": []}
    for value in range(2, repeats + 3):
        ref, put_s = put(data, value)
        for case, seconds in (
            ("put", put_s),
            ("get", get(reader, ref, data, value)),
            ("first_get", first_get(ref, data, value)),
        ):
            runs[case].append(seconds)
        del ref
    ray.kill(reader)
    for case, seconds_each in runs.items():
        emit("ray", "ray", case=case, nbytes=nbytes, runs_s=seconds_each[1:])


def main() -> int:
    args = arguments(__doc__).parse_args()
    store = max(3 * max(args.sizes), 256 << 20)
    ray.init(
        num_cpus=1, object_store_memory=store, include_dashboard=False, logging_level="ERROR", log_to_driver=False,
        _node_ip_address="127.0.0.1",
    )  # fmt: skip
    try:
        for nbytes in args.sizes:
            measure(nbytes, args.repeats)
    finally:
        ray.shutdown()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
