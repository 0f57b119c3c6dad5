"""Which worker should be the home of which shard: rendezvous hashing with bounded load."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from fractions import Fraction
from typing import Final

import numpy as np
import numpy.typing as npt
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
    if not names or not shards:
        return [()] * shards
    weights = np.array([_weights(name, shards) for name in names])
    orders = np.argsort(~weights, axis=0, kind="stable").T
    capacity = -(-LOAD.numerator * shards // (LOAD.denominator * len(names)))
    firsts = _firsts(orders.tolist(), weights.tolist(), capacity)
    best = orders[:, :CANDIDATES].tolist()
    return [
        tuple(names[home] for home in [first, *(home for home in order if home != first)][:CANDIDATES])
        for first, order in zip(firsts, best, strict=True)
    ]


def _weights(name: str, shards: int) -> npt.NDArray[np.uint64]:
    """What each shard thinks of a home."""
    return np.frombuffer(blake3(prefixed("home", name)).digest(length=8 * shards), "<u8")


def _firsts(orders: list[list[int]], weights: list[list[int]], capacity: int) -> list[int]:
    """The home of each shard. Shards propose in their order; a full home keeps the heaviest of those who did."""
    accepted: list[list[tuple[int, int]]] = [[] for _ in weights]
    proposed = [0] * len(orders)
    free = list(range(len(orders)))
    while free:
        shard = free.pop()
        home = orders[shard][proposed[shard]]
        proposed[shard] += 1
        offer, mine = (weights[home][shard], shard), accepted[home]
        if len(mine) < capacity:
            heapq.heappush(mine, offer)
        else:
            free.append(heapq.heappushpop(mine, offer)[1])
    homes = {shard: home for home, mine in enumerate(accepted) for _, shard in mine}
    return [homes[shard] for shard in range(len(orders))]
