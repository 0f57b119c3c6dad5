"""The memory pool: what its eviction policies keep of real traces.

Hit ratios of the policies on prefix-block traces (JSON lines with ``hash_ids``, such as those of Mooncake) with room
for a part of the working set, beside least recently used and the limit of Belady, who knows the future. Allocating and
freeing the pages of the same requests under least recently used, beside a free-list that never joins what was freed.
Spilling 4 GiB to disk and reading them back, beside ``dd`` with direct I/O: processor seconds count, the rate of the
disk is reported. The first touch of memory, beside memory that was made ready.
``TENSORBUS_TRACES`` names the folder of the traces; without it a made-up trace stands in.
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

from benchmarks._pages import FreeList, Step, overhead_of, page_steps, seconds_of
from benchmarks._spill import Cost, measure, touch_seconds
from benchmarks._table import GIB, MIB, Options, Row, bounded, compare, median_of, parse_options, show, spread
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
SPILL_REPEATS = 5
CPU_TARGET = 1 / 1.3
TOUCH_BYTES = GIB
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


def spill_rows(options: Options) -> list[Row]:
    nbytes = 256 * MIB if options.quick else 4 * GIB
    found = measure(nbytes, repeats=1 if options.quick else SPILL_REPEATS)
    checksum_s = _per_gib(found.checksum, nbytes)
    note = f"of it {checksum_s:.3f} s for checksums, which dd has not"
    return [
        _cpu_row("spill", found.spill, "dd of zeros, direct", found.dd_write, nbytes, note),
        _cpu_row("reload", found.reload, "dd to nowhere, direct", found.dd_read, nbytes, note),
        _rate_row("spill", found.spill, found.dd_write, nbytes),
        _rate_row("reload", found.reload, found.dd_read, nbytes),
    ]


def _per_gib(cost: Cost, nbytes: int) -> float:
    median = median_of(cost.cpu_s)
    assert median is not None, "it was measured"
    return median * GIB / nbytes


def _cpu_row(what: str, ours: Cost, against: str, dd: Cost, nbytes: int, note: str) -> Row:
    return compare(
        BENCH,
        f"{what} {nbytes / GIB:g} GiB, processor time",
        _per_gib(ours, nbytes),
        "s/GiB",
        against=against,
        against_value=_per_gib(dd, nbytes),
        better="lower",
        target=CPU_TARGET,
        spread=spread([seconds * GIB / nbytes for seconds in ours.cpu_s]),
        note=note,
    )


def _rate_row(what: str, ours: Cost, dd: Cost, nbytes: int) -> Row:
    rates = [nbytes / seconds / 1e9 for seconds in ours.wall_s]
    plain = median_of([nbytes / seconds / 1e9 for seconds in dd.wall_s])
    return compare(
        BENCH, f"{what} {nbytes / GIB:g} GiB, rate", median_of(rates), "GB/s", against="dd", against_value=plain,
        better="higher", spread=spread(rates),
    )  # fmt: skip


def touch_rows(options: Options) -> list[Row]:
    nbytes = TOUCH_BYTES // (4 if options.quick else 1)
    fresh, ready, used = touch_seconds(nbytes)
    gb = nbytes / 1e9
    case = f"write {nbytes / GIB:g} GiB of pool memory"
    return [
        compare(BENCH, f"{case} that was made ready", gb / ready, "GB/s", against="first touch",
                against_value=gb / fresh, better="higher"),
        compare(BENCH, f"{case} that was used before", gb / used, "GB/s", against="first touch",
                against_value=gb / fresh, better="higher"),
    ]  # fmt: skip


def main() -> int:
    options = parse_options(__doc__)
    rows = [*eviction_rows(options), *page_rows(options), *spill_rows(options), *touch_rows(options)]
    return show(rows, options)


if __name__ == "__main__":
    sys.exit(main())
