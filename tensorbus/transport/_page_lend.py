"""Pages lent to a reader on another host, for as long as it takes to send them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tensorbus.transport._page_arena import PageArena
from tensorbus.transport._page_copy import page_sum
from tensorbus.transport._page_layout import (
    Generations,
    Mask,
    PagePlaces,
    PageState,
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
        states = np.full(len(places), PageState.GONE, np.uint8)
        sums = np.zeros(len(places), np.uint64)
        views: dict[int, memoryview] = {}
        lent: list[tuple[PageArena, Slots, Generations, Slots]] = []
        for number, at in by_segment(places):
            arena = self._pool.find(number)
            if arena is None or arena.tenant != self._tenant:
                continue
            slots, generations, found = look(arena.table, places[at], nbytes)
            states[at] = found
            ready = np.flatnonzero(found == PageState.OK)
            which = np.arange(len(places))[at][ready]
            sums[which] = arena.table.sums[slots[ready]]
            for n, slot in zip(which.tolist(), slots[ready].tolist(), strict=True):
                views[n] = arena.rows[slot, :nbytes].data
            lent.append((arena, slots[ready], generations[ready], which))
        for n in np.flatnonzero((states == PageState.OK) & (sums == 0)).tolist():
            sums[n] = page_sum(views[n])
        ok = np.flatnonzero(states == PageState.OK)

        def check() -> Mask:
            fence()
            still = np.zeros(len(places), np.bool_)
            for arena, slots, generations, which in lent:
                still[which] = arena.table.readable(slots, generations)
            kept: Mask = still[ok]
            return kept

        return PageLoan(states=states, views=[views[n] for n in ok.tolist()], sums=sums[ok], check=check)
