"""Traces of what was read, and how often a policy of eviction has it there."""

from __future__ import annotations

import heapq
import json
from collections.abc import Sequence
from pathlib import Path

from tensorbus.policies import eviction

NEVER = 1 << 62


def block_requests(path: Path) -> list[list[int]]:
    """The prefix blocks of each request of a trace: JSON lines with ``hash_ids``."""
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line)["hash_ids"] for line in lines]


def token_requests(path: Path) -> list[tuple[int, list[int]]]:
    """The prompt's tokens and the prefix blocks of each request of a trace."""
    with path.open(encoding="utf-8") as lines:
        found = [json.loads(line) for line in lines]
    return [(one["input_length"], one["hash_ids"]) for one in found]


def flat(requests: Sequence[Sequence[int]]) -> list[int]:
    return [block for request in requests for block in request]


def hit_ratio(name: str, trace: Sequence[int], capacity: int) -> float:
    """The share of reads that found their block, with room for ``capacity`` blocks of one size."""
    policy, there, hits = eviction(name, nbytes=capacity), set[int](), 0
    for key in trace:
        if key in there:
            hits += 1
            policy.use(key)
            continue
        if len(there) >= capacity:
            gone: int | None = policy.evict(lambda _: True)
            assert gone is not None, "it is full"
            there.remove(gone)
        there.add(key)
        policy.add(key, 1)
    return hits / len(trace)


def belady(trace: Sequence[int], capacity: int) -> float:
    """The most that any policy could reach: it knows when each block is read next, and need not keep a new one."""
    following, last = [NEVER] * len(trace), dict[int, int]()
    for at in range(len(trace) - 1, -1, -1):
        following[at] = last.get(trace[at], NEVER)
        last[trace[at]] = at
    there: dict[int, int] = {}
    latest: list[tuple[int, int]] = []
    hits = 0
    for at, key in enumerate(trace):
        if key in there:
            hits += 1
        elif len(there) >= capacity:
            while there.get(latest[0][1]) != -latest[0][0]:
                heapq.heappop(latest)
            if -latest[0][0] <= following[at]:
                continue
            del there[heapq.heappop(latest)[1]]
        there[key] = following[at]
        heapq.heappush(latest, (-following[at], key))
    return hits / len(trace)
