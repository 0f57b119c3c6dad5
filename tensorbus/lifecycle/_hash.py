"""A hash of a large state that costs as much as the change, not as the state.

The state's hash is the sum, modulo 2**256, of the BLAKE3-256 of each entity's canonical text (an additive multiset hash
after Bellare and Micciancio, 1997). Its use is to tell that two folds agree, not to resist an adversary.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from itertools import islice

from blake3 import blake3

_MODULUS = 1 << 256
DIRTY_MAX = 1024
"""How many changed entities may wait: else the first reading of a large state would hold its thread for seconds."""


class StateHash:
    """Sums entity hashes. Marked entities are hashed again when it is read, or one by one when many of them wait.

    Args:
        text: Gives the canonical text of the entity under a key, or ``None`` if there is none any more.
    """

    __slots__ = ("_dirty", "_sum", "_terms", "_text")

    def __init__(self, text: Callable[[Hashable], str | None]) -> None:
        self._text = text
        self._terms: dict[Hashable, int] = {}
        self._dirty: dict[Hashable, None] = {}
        self._sum = 0

    def mark(self, key: Hashable) -> None:
        dirty = self._dirty
        dirty[key] = None
        if len(dirty) > DIRTY_MAX:
            self._settle(next(iter(dirty)))

    def hex(self) -> str:
        """The hash of the state as it is now, 64 hexadecimal digits."""
        for key in list(self._dirty):
            self._settle(key)
        return f"{self._sum:064x}"

    def settle(self, count: int) -> bool:
        """Hash at most ``count`` of the entities that wait; whether none is left, so that :meth:`hex` is at hand."""
        for key in list(islice(self._dirty, count)):
            self._settle(key)
        return not self._dirty

    @property
    def terms(self) -> Mapping[Hashable, int]:
        """What each entity adds, as it was when the entity was last hashed."""
        return self._terms

    def restored(self, terms: dict[Hashable, int], total: int) -> None:
        """Go on from the terms of a snapshot and their sum."""
        self._terms, self._sum = terms, total % _MODULUS
        self._dirty.clear()

    def take(self, other: StateHash) -> None:
        """Exchange what was hashed with another state's; each goes on reading its own."""
        self._terms, other._terms = other._terms, self._terms
        self._dirty, other._dirty = other._dirty, self._dirty
        self._sum, other._sum = other._sum, self._sum

    def _settle(self, key: Hashable) -> None:
        del self._dirty[key]
        text = self._text(key)
        new = 0 if text is None else _term(text)
        old = self._terms.pop(key, 0)
        if text is not None:
            self._terms[key] = new
        self._sum = (self._sum + new - old) % _MODULUS


def hash_of(texts: Iterable[str]) -> str:
    """The same hash from nothing: what a :class:`StateHash` that was told of every change must say."""
    return f"{sum(map(_term, texts)) % _MODULUS:064x}"


def _term(text: str) -> int:
    return int.from_bytes(blake3(text.encode("utf-8", "surrogatepass")).digest(), "little")
