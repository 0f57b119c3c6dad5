"""What goes first when memory is short: one small protocol, and the policies by name."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Final, Protocol, TypeVar

from tensorbus.errors import InvalidArgumentError
from tensorbus.policies._eviction_lfu import Lfu
from tensorbus.policies._eviction_lru import Lru
from tensorbus.policies._eviction_s3fifo import S3Fifo

K = TypeVar("K", bound=Hashable)

May = Callable[[K], bool]


class Eviction(Protocol[K]):
    """Order in which things leave a tier. It is told of every change, and asked for one victim at a time.

    Keys that it does not know are ignored by :meth:`use` and :meth:`remove`, so that who tells it need not keep count.
    """

    def add(self, key: K, nbytes: int) -> None:
        """Something came in; a key that is there already is used once more."""

    def use(self, key: K) -> None:
        """Something was read."""

    def remove(self, key: K) -> None:
        """Something went for another reason."""

    def evict(self, may: Callable[[K], bool]) -> K | None:
        """The one to go now, of those for which ``may`` says yes; forgotten by this. ``None`` if there is none."""


EVICTIONS: Final[dict[str, Callable[[int], Any]]] = {
    "lru": lambda _: Lru(),
    "lfu": lambda _: Lfu(),
    "s3fifo": lambda nbytes: S3Fifo(nbytes),
}


def eviction(name: str, *, nbytes: int) -> Eviction[Any]:
    """A policy by its name.

    Args:
        name: One of :data:`EVICTIONS`.
        nbytes: Size of the tier that it is for.

    Raises:
        InvalidArgumentError: If there is none of that name.
    """
    make = EVICTIONS.get(name)
    if make is None:
        raise InvalidArgumentError(f"there is no eviction policy {name!r:.80}; there are {', '.join(EVICTIONS)}")
    made: Eviction[Any] = make(nbytes)
    return made
