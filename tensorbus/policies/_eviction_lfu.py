"""Least frequently used, with age: counts fade as others leave, so that what was popular once goes in the end."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

STALE_MIN = 64


@dataclass(slots=True)
class _Score:
    value: int
    uses: int
    turn: int


class Lfu(Generic[K]):
    """What was read least goes first; of equals, what was not read for longer.

    A thing's score is its number of reads on top of the score of the last one that left ("LFU with dynamic ageing").
    """

    def __init__(self) -> None:
        self._scores: dict[K, _Score] = {}
        self._heap: list[tuple[int, int, K]] = []
        self._floor = 0
        self._turn = 0

    def add(self, key: K, nbytes: int) -> None:
        known = self._scores.get(key)
        self._put(key, 1 if known is None else known.uses + 1)

    def use(self, key: K) -> None:
        known = self._scores.get(key)
        if known is not None:
            self._put(key, known.uses + 1)

    def remove(self, key: K) -> None:
        self._scores.pop(key, None)

    def evict(self, may: Callable[[K], bool]) -> K | None:
        spared: list[tuple[int, int, K]] = []
        try:
            while self._heap:
                entry = heapq.heappop(self._heap)
                if not self._stands(entry):
                    continue
                value, _, key = entry
                if may(key):
                    del self._scores[key]
                    self._floor = max(self._floor, value)
                    return key
                spared.append(entry)
            return None
        finally:
            for entry in spared:
                heapq.heappush(self._heap, entry)

    def _put(self, key: K, uses: int) -> None:
        self._turn += 1  # no two are equal, so that keys are never compared
        score = self._scores[key] = _Score(self._floor + uses, uses, self._turn)
        heapq.heappush(self._heap, (score.value, score.turn, key))
        if len(self._heap) > 2 * len(self._scores) + STALE_MIN:
            self._heap = [(one.value, one.turn, name) for name, one in self._scores.items()]
            heapq.heapify(self._heap)

    def _stands(self, entry: tuple[int, int, K]) -> bool:
        known = self._scores.get(entry[2])
        return known is not None and known.turn == entry[1]
