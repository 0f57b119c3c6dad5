"""The memory pool: what its eviction policies keep of real traces.

Hit ratios of the policies on prefix-block traces (JSON lines with ``hash_ids``, such as those of Mooncake) with room
for a part of the working set, beside least recently used and the limit of Belady, who knows the future.
``TENSORBUS_TRACES`` names the folder of the traces; without it a made-up trace stands in.
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

from benchmarks._table import Options, Row, parse_options, show
from benchmarks._traces import belady, block_requests, flat, hit_ratio
from tensorbus.policies import EVICTIONS

BENCH = "pool"
TRACES_ENV = "TENSORBUS_TRACES"
SHARES = (0.1, 0.3)
WAY_TARGET = 0.2
"""How far from LRU towards Belady another policy must get to be the default."""
QUICK_READS = 20_000
MADE_UP_READS = 100_000


def traces() -> dict[str, list[int]]:
    """The blocks that were read, by the name of the trace."""
    folder = os.environ.get(TRACES_ENV)
    found = sorted(Path(folder).glob("mooncake_*.jsonl")) if folder else []
    if not found:
        return {"made up: Zipf": made_up(MADE_UP_READS)}
    return {path.stem: flat(block_requests(path)) for path in found}


def made_up(reads: int) -> list[int]:
    """Reads of blocks whose popularity falls with their rank."""
    keys = reads // 10
    return random.Random(1).choices(range(keys), weights=[1 / (n + 1) for n in range(keys)], k=reads)


def eviction_rows(options: Options) -> list[Row]:
    """Each policy beside LRU and the limit; its ratio is to LRU, and the note says how far towards Belady it gets."""
    rows = []
    for name, trace in traces().items():
        reads = trace[:QUICK_READS] if options.quick else trace
        for share in SHARES:
            rows += _eviction_rows(name, reads, share)
    return rows


def _eviction_rows(name: str, trace: list[int], share: float) -> list[Row]:
    capacity = int(share * len(set(trace)))
    limit, lru = belady(trace, capacity), hit_ratio("lru", trace, capacity)
    rows = []
    for policy in EVICTIONS:
        ratio = lru if policy == "lru" else hit_ratio(policy, trace, capacity)
        way = (ratio - lru) / (limit - lru) if limit > lru else 0.0
        rows.append(
            Row(
                bench=BENCH,
                case=f"hits of {policy} on {name}, room for {share:.0%}",
                value=100 * ratio,
                unit="%",
                against="LRU",
                against_value=100 * lru,
                ratio=ratio / lru if lru else None,
                target="reported" if policy == "lru" else f"{WAY_TARGET:.0%} of the way",
                met=None if policy == "lru" else way >= WAY_TARGET,
                note=f"Belady {100 * limit:.1f} %; {way:+.0%} of the way",
            )
        )
    return rows


def main() -> int:
    options = parse_options(__doc__)
    return show(eviction_rows(options), options)


if __name__ == "__main__":
    sys.exit(main())
