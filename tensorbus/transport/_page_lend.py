"""Pages lent to a reader on another host, for as long as it takes to send them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tensorbus.transport._page_copy import page_sum
from tensorbus.transport._page_layout import (
    GONE,
    OK,
    Generations,
    Mask,
    PagePlaces,
    PageTable,
    Slots,
    States,
    Sums,
    by_segment,
    fence,
)
from tensorbus.transport._page_maps import look
from tensorbus.transport._page_pool import PagePool


@dataclass(frozen=True, slots=True)
class PageLoan:
    """A batch of pages on its way to somebody else. Nothing keeps them from being freed meanwhile.

    Attributes:
        states: Of each place asked for: ``OK`` or ``GONE``.
        views: The bytes of each that is ``OK``, in order.
        sums: The checksum of each of those.
        check: Which of those were right while they were sent; asked once the last byte has left.
    """

    states: States
    views: list[memoryview]
    sums: Sums
    check: Callable[[], Mask]


class TenantPages:
    """One tenant's pages in a pool; those of others are gone as if they had never been."""

    def __init__(self, pool: PagePool, tenant: str) -> None:
        self._pool = pool
        self._tenant = tenant

    def lend(self, places: PagePlaces, nbytes: int) -> PageLoan:
        """See what can be sent. Takes checksums of pages that have none.

        Raises:
            InvalidArgumentError: If pages in those arenas cannot be so large.
        """
        states = np.full(len(places), GONE, np.uint8)
        sums = np.zeros(len(places), np.uint64)
        views: dict[int, memoryview] = {}
        lent: list[tuple[PageTable, slice | Slots, Slots, Generations]] = []
        for number, at in by_segment(places):
            arena = self._pool.find(number)
            if arena is None or arena.tenant != self._tenant:
                continue
            slots, generations, found = look(arena.table, places[at], nbytes)
            states[at] = found
            sums[at] = arena.table.sums[slots]
            lent.append((arena.table, at, slots, generations))
            numbers = range(len(places))[at] if isinstance(at, slice) else at.tolist()
            for n, slot, state in zip(numbers, slots.tolist(), found.tolist(), strict=True):
                if state == OK:
                    views[n] = arena.rows[slot, :nbytes].data
        for n in np.flatnonzero((states == OK) & (sums == 0)).tolist():
            sums[n] = page_sum(views[n])
        ok = states == OK

        def check() -> Mask:
            fence()
            still = np.zeros(len(places), np.bool_)
            for table, at, slots, generations in lent:
                still[at] = table.readable(slots, generations)
            kept: Mask = still[ok]
            return kept

        return PageLoan(states=states, views=[views[n] for n in sorted(views)], sums=sums[ok], check=check)
