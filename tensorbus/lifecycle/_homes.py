"""Which worker should be the home of which shard: rendezvous hashing with bounded load."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from fractions import Fraction
from typing import Final

from blake3 import blake3

from tensorbus.ids import prefixed

CANDIDATES: Final = 3
"""How many compete for a shard, best first."""
LOAD: Final = Fraction(9, 8)
"""The most that a home gets, as a share of the mean."""


def assign(shards: int, homes: Iterable[str]) -> list[tuple[str, ...]]:
    """The candidates of each shard, best first: at most 3, fewer if there are fewer homes.

    Every shard has its own order of preference of the homes (rendezvous hashing, Thaler and Ravishankar 1998), and a
    home takes at most ``ceil(9/8 * shards / homes)`` as the first candidate: those that prefer it most by the same
    weights (deferred acceptance, Gale and Shapley 1962). The result depends on nothing but the set of homes, and a
    home that comes or goes moves few shards that it is not about.

    Args:
        shards: How many there are.
        homes: The living workers with the role, in any order.
    """
    names = sorted(set(homes))
    if not names:
        return [()] * shards
    orders = [_order(shard, names) for shard in range(shards)]
    capacity = -(-LOAD.numerator * shards // (LOAD.denominator * len(names)))
    firsts = _firsts(orders, capacity)
    return [
        (first, *[name for _, name in order if name != first][: CANDIDATES - 1])
        for first, order in zip(firsts, orders, strict=True)
    ]


def _order(shard: int, names: list[str]) -> list[tuple[int, str]]:
    """Weight and name of each home for a shard, the heaviest first."""
    weights = [
        (int.from_bytes(blake3(prefixed("home", str(shard), name)).digest(length=8), "little"), name) for name in names
    ]
    return sorted(weights, reverse=True)


def _firsts(orders: list[list[tuple[int, str]]], capacity: int) -> list[str]:
    """The home of each shard. Shards propose in their order; a full home keeps the heaviest of those who did."""
    accepted: dict[str, list[tuple[int, int]]] = {name: [] for _, name in orders[0]} if orders else {}
    proposed = [0] * len(orders)
    free = list(range(len(orders)))
    while free:
        shard = free.pop()
        weight, name = orders[shard][proposed[shard]]
        proposed[shard] += 1
        mine = accepted[name]
        if len(mine) < capacity:
            heapq.heappush(mine, (weight, shard))
        else:
            free.append(heapq.heappushpop(mine, (weight, shard))[1])
    home = {shard: name for name, mine in accepted.items() for _, shard in mine}
    return [home[shard] for shard in range(len(orders))]
