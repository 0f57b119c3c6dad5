"""The memory pool: what its eviction policies keep of real traces.

Hit ratios of the policies on prefix-block traces (JSON lines with ``hash_ids``, such as those of Mooncake) with room
for a part of the working set, beside least recently used and the limit of Belady, who knows the future. Allocating and
freeing the pages of the same requests under least recently used, beside a free-list that never joins what was freed.
``TENSORBUS_TRACES`` names the folder of the traces; without it a made-up trace stands in.
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

from benchmarks._pages import FreeList, Step, overhead_of, page_steps, seconds_of
from benchmarks._table import GIB, Options, Row, bounded, compare, parse_options, show, spread
from benchmarks._traces import belady, block_requests, flat, hit_ratio, token_requests
from tensorbus.policies import EVICTIONS
from tensorbus.transport._arena import PageSpace

BENCH = "pool"
TRACES_ENV = "TENSORBUS_TRACES"
SHARES = (0.1, 0.3)
WAY_TARGET = 0.2
"""How far from LRU towards Belady another policy must get to be the default."""
QUICK_READS = 20_000
PAGE_STEPS = 1_000_000
PAGES_BYTES = 4 * GIB
PAGES_REPEATS = 5
FREE_LIST_TARGET = 0.5
OVERHEAD_MAX = 5.0
MADE_UP_READS = 100_000


def trace_files() -> list[Path]:
    folder = os.environ.get(TRACES_ENV)
    return sorted(Path(folder).glob("mooncake_*.jsonl")) if folder else []


def traces() -> dict[str, list[int]]:
    """The blocks that were read, by the name of the trace."""
    found = trace_files()
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


def page_requests() -> dict[str, list[tuple[int, list[int]]]]:
    found = trace_files()
    if not found:
        chance = random.Random(2)
        return {"made up": [(chance.randrange(100, 20_000), [40 * n + m for m in range(40)]) for n in range(5000)]}
    return {path.stem: token_requests(path) for path in found}


def page_rows(options: Options) -> list[Row]:
    rows = []
    for name, requests in page_requests().items():
        steps = page_steps(requests, capacity_bytes=PAGES_BYTES, steps_max=PAGE_STEPS // (10 if options.quick else 1))
        rows += _page_rows(name, steps)
    return rows


def _page_rows(name: str, steps: list[Step]) -> list[Row]:
    overhead, arenas = overhead_of(steps, PageSpace())
    ours, plain, span = [], [], 0
    for _ in range(PAGES_REPEATS):
        free_list, space = FreeList(), PageSpace()
        for _ in range(arenas):
            space.grow()
        plain.append(seconds_of(steps, free_list.allocate, free_list.free))
        ours.append(seconds_of(steps, space.allocate, space.free))
        span = free_list.span_bytes
    what = f"pages of {name}"
    return [
        compare(
            BENCH,
            f"allocate and free {what}",
            min(ours) * 1e9 / len(steps),
            "ns",
            against="plain free-list",
            against_value=min(plain) * 1e9 / len(steps),
            better="lower",
            target=FREE_LIST_TARGET,
            spread=spread([seconds * 1e9 / len(steps) for seconds in ours]),
            note=f"{len(steps):,} operations; the free-list came to span {span / PAGES_BYTES:.2f}x what lived",
        ),
        bounded(BENCH, f"memory beyond {what}", 100 * overhead, "%", limit=OVERHEAD_MAX, better="lower"),
    ]


def main() -> int:
    options = parse_options(__doc__)
    return show([*eviction_rows(options), *page_rows(options)], options)


if __name__ == "__main__":
    sys.exit(main())
