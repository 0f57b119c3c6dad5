"""Least recently used."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class Lru(Generic[K]):
    """What was not read for the longest time goes first."""

    def __init__(self) -> None:
        self._order: OrderedDict[K, None] = OrderedDict()

    def add(self, key: K, nbytes: int) -> None:
        self._order[key] = None
        self._order.move_to_end(key)

    def use(self, key: K) -> None:
        if key in self._order:
            self._order.move_to_end(key)

    def remove(self, key: K) -> None:
        self._order.pop(key, None)

    def evict(self, may: Callable[[K], bool]) -> K | None:
        key = next((key for key in self._order if may(key)), None)
        if key is not None:
            del self._order[key]
        return key
