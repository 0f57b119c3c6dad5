"""S3-FIFO (Yang et al., SOSP 2023): a small queue for newcomers, a main one for the proven, a memory of who left."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

SMALL_SHARE = 0.1
USES_MAX = 3


class S3Fifo(Generic[K]):
    """What is never read again after it came leaves early; what was read, or comes back soon, has the main part.

    Args:
        nbytes: Size of the tier; a tenth of it is for newcomers, and as much as all of it is remembered of who left.
    """

    def __init__(self, nbytes: int, *, small_share: float = SMALL_SHARE) -> None:
        self._small_bytes_max = int(nbytes * small_share)
        self._ghost_bytes_max = nbytes
        self._sizes: dict[K, int] = {}
        self._uses: dict[K, int] = {}
        self._small: OrderedDict[K, None] = OrderedDict()
        self._main: OrderedDict[K, None] = OrderedDict()
        self._ghosts: OrderedDict[K, int] = OrderedDict()
        self._small_bytes = 0
        self._ghost_bytes = 0

    def add(self, key: K, nbytes: int) -> None:
        if key in self._sizes:
            self.use(key)
            return
        self._sizes[key], self._uses[key] = nbytes, 0
        left = self._ghosts.pop(key, None)
        if left is not None:
            self._ghost_bytes -= left
            self._main[key] = None
        else:
            self._small[key] = None
            self._small_bytes += nbytes

    def use(self, key: K) -> None:
        if key in self._uses:
            self._uses[key] = min(USES_MAX, self._uses[key] + 1)

    def remove(self, key: K) -> None:
        if key not in self._sizes:
            return
        if key in self._small:
            self._leave_small(key)
        else:
            del self._main[key]
        del self._sizes[key], self._uses[key]

    def evict(self, may: Callable[[K], bool]) -> K | None:
        newcomers_first = self._small_bytes > self._small_bytes_max or not self._main
        # A look at the small queue moves what was read to the main one, so that one is looked at last.
        for take in (() if newcomers_first else (self._from_main,)) + (self._from_small, self._from_main):
            found = take(may)
            if found is not None:
                return found
        return None

    def _from_small(self, may: Callable[[K], bool]) -> K | None:
        for key in list(self._small):
            if self._uses[key]:
                self._leave_small(key)
                self._main[key] = None
                self._uses[key] = 0
            elif may(key):
                self._remember(key)
                self.remove(key)
                return key
        return None

    def _from_main(self, may: Callable[[K], bool]) -> K | None:
        for _ in range((USES_MAX + 1) * len(self._main)):
            key = next(iter(self._main))
            if not self._uses[key] and may(key):
                self.remove(key)
                return key
            self._main.move_to_end(key)
            self._uses[key] = max(0, self._uses[key] - 1)
        return None

    def _leave_small(self, key: K) -> None:
        del self._small[key]
        self._small_bytes -= self._sizes[key]

    def _remember(self, key: K) -> None:
        self._ghosts[key] = self._sizes[key]
        self._ghost_bytes += self._sizes[key]
        while self._ghost_bytes > self._ghost_bytes_max:
            _, nbytes = self._ghosts.popitem(last=False)
            self._ghost_bytes -= nbytes
