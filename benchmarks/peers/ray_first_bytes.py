"""Ray's object store on one host: objects of several tensors put here, got by an actor until each was read."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
sys.path.insert(0, str(Path(__file__).resolve().parent))

import ray
from _common import arguments, emit, first_bytes, overlapping


@ray.remote(num_cpus=0.1)
class Reader:
    """Another process of the same host. The list keeps Ray from fetching before the call."""

    def get(self, refs: list[Any]) -> tuple[float, int]:
        started = time.perf_counter()
        total = first_bytes(ray.get(refs[0]))
        return time.perf_counter() - started, total


def measure(reader: Any, nbytes: int, *, tensors: int, repeats: int) -> list[float]:
    runs = []
    for value in range(1, repeats + 2):
        data = overlapping(nbytes, tensors, value)
        ref = ray.put(data)
        took, total = ray.get(reader.get.remote([ref]))
        if total != first_bytes(data):
            raise SystemExit(f"ray gave other bytes: {total}")
        runs.append(float(took))
        del ref  # gone before the next, so the store's memory is used again
    return runs[1:]


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--tensors", type=int, default=64)
    args = parser.parse_args()
    store = max(args.sizes) + max(args.sizes) // 4 + (256 << 20)
    ray.init(
        num_cpus=1, object_store_memory=store, include_dashboard=False, logging_level="ERROR", log_to_driver=False,
        _node_ip_address="127.0.0.1",
    )  # fmt: skip
    try:
        reader = Reader.remote()
        for nbytes in args.sizes:
            runs = measure(reader, nbytes, tensors=args.tensors, repeats=args.repeats)
            emit("ray", "ray", case="first bytes", nbytes=nbytes, runs_s=runs)
    finally:
        ray.shutdown()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
