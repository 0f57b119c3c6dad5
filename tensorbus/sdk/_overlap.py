"""Whether tensors that are to be written share memory, so that one write would undo another."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

_PAIRS_MAX: Final = 200_000
_WORK_MAX: Final = 100_000


@dataclass(frozen=True, slots=True)
class Extent:
    """Where the elements of a tensor lie; equal ones are the same elements in the same order.

    Attributes:
        device: Whose addresses are meant.
        address: Of the first element.
        strides: In bytes.
        kind: What else decides how an element is written there: its type, a pending conjugation.
    """

    device: str
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int
    kind: Hashable = None

    @property
    def low(self) -> int:
        """The first byte of all elements."""
        return self.address + sum(min(0, (size - 1) * step) for size, step in self._steps())

    @property
    def end(self) -> int:
        """The byte behind the last."""
        return self.address + self.itemsize + sum(max(0, (size - 1) * step) for size, step in self._steps())

    @property
    def folded(self) -> bool:
        """Whether several of its elements share memory, as far as can be told from its strides."""
        span = self.itemsize
        for step, size in sorted((abs(step), size) for size, step in self._steps() if size > 1):
            if step < span:
                return True
            span += (size - 1) * step
        return False

    def meets(self, other: Extent) -> bool:
        """Whether any byte belongs to both. What is too hard to tell counts as yes."""
        try:
            # The stubs know only the two special bounds.
            return bool(np.shares_memory(_shadow(self), _shadow(other), max_work=_WORK_MAX))  # type: ignore[arg-type]  # any bound
        except np.exceptions.TooHardError:
            return True

    def _steps(self) -> Iterator[tuple[int, int]]:
        return zip(self.shape, self.strides, strict=True)


def collisions(extents: Sequence[Extent]) -> Iterator[tuple[int, int]]:
    """Pairs of places in the sequence, the smaller first, whose elements share memory; none has no elements.

    Where very many lie among each other, neighbours count as sharing without a closer look.
    """
    order = sorted(range(len(extents)), key=lambda number: (extents[number].device, extents[number].low))
    near: list[int] = []
    left = _PAIRS_MAX
    for number in order:
        here = extents[number]
        low, device = here.low, here.device
        near = [other for other in near if extents[other].device == device and extents[other].end > low]
        for other in near:
            left -= 1
            if left < 0 or here == extents[other] or here.meets(extents[other]):
                yield min(number, other), max(number, other)
        near.append(number)


class _Shadow:
    def __init__(self, extent: Extent) -> None:
        self.__array_interface__ = {
            "version": 3,
            "typestr": f"|V{extent.itemsize}",
            "shape": extent.shape,
            "strides": extent.strides,
            "data": (extent.address, True),
        }


def _shadow(extent: Extent) -> Any:
    """An array at that place, of which only the place is looked at."""
    return np.asarray(_Shadow(extent))
