"""Ray's object store on one host: put by this process, get by an actor until a byte of every page is read."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
sys.path.insert(0, str(Path(__file__).resolve().parent))

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


def measure(reader: Any, data: Bytes, value: int) -> tuple[float, float]:
    """Seconds of one put and of one get; the object is gone afterwards."""
    started = time.perf_counter()
    ref = ray.put(data)
    put_s = time.perf_counter() - started
    get_s, total = ray.get(reader.get.remote([ref]))
    if total != touched(data.nbytes, value):
        raise SystemExit(f"ray gave other bytes: {total}")
    return put_s, get_s


def main() -> int:
    args = arguments(__doc__).parse_args()
    store = max(3 * max(args.sizes), 256 << 20)
    ray.init(
        num_cpus=1, object_store_memory=store, include_dashboard=False, logging_level="ERROR", log_to_driver=False,
        _node_ip_address="127.0.0.1",
    )  # fmt: skip
    reader = Reader.remote()
    try:
        for nbytes in args.sizes:
            value = 7
            data = warm(nbytes, value)
            measure(reader, data, value)
            puts, gets = zip(*(measure(reader, data, value) for _ in range(args.repeats)), strict=True)
            emit("ray", "ray", case="put", nbytes=nbytes, runs_s=list(puts))
            emit("ray", "ray", case="get", nbytes=nbytes, runs_s=list(gets))
    finally:
        ray.shutdown()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
