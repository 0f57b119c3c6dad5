"""A hash of a large state that costs as much as the change, not as the state.

The state's hash is the sum, modulo 2**256, of the BLAKE3-256 of each entity's canonical text (an additive multiset hash
after Bellare and Micciancio, 1997). Its use is to tell that two folds agree, not to resist an adversary.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable

from blake3 import blake3

_MODULUS = 1 << 256


class StateHash:
    """Sums entity hashes; entities marked since the last reading are hashed again when it is read.

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
        self._dirty[key] = None

    def hex(self) -> str:
        """The hash of the state as it is now, 64 hexadecimal digits."""
        for key in self._dirty:
            self._sum -= self._terms.pop(key, 0)
            text = self._text(key)
            if text is not None:
                term = _term(text)
                self._terms[key] = term
                self._sum += term
        self._dirty.clear()
        self._sum %= _MODULUS
        return f"{self._sum:064x}"


def hash_of(texts: Iterable[str]) -> str:
    """The same hash from nothing: what a :class:`StateHash` that was told of every change must say."""
    return f"{sum(map(_term, texts)) % _MODULUS:064x}"


def _term(text: str) -> int:
    return int.from_bytes(blake3(text.encode("utf-8", "surrogatepass")).digest(), "little")
