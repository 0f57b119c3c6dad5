"""Bringing a batch of pages here from another host, straight to where they are to lie, over several connections."""

# ruff: noqa: SLF001 - what is asked on a bulk connection is one unit with its client
from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np

from tensorbus.clock import Deadline
from tensorbus.errors import TensorbusError
from tensorbus.transport._bulk import LostError
from tensorbus.transport._bulk_client import BulkClient, Exchange
from tensorbus.transport._bulk_fetch import Origin, Ways
from tensorbus.transport._bulk_frames import BlockHead
from tensorbus.transport._bulk_pages import (
    PAGES_MAX,
    check_states,
    pages_per_block,
    parse_verdict,
    small_head,
    verdict_bytes,
)
from tensorbus.transport._copy import run_threads
from tensorbus.transport._frames import RemoteProtocolError
from tensorbus.transport._page_copy import Blocks, blocks_of
from tensorbus.transport._page_layout import CORRUPT, GONE, LOST, OK, TORN, PagePlaces, Slots, States, Sums

_SHARE_BYTES_MIN: Final = 2 << 20
_SHARE_BYTES_MAX: Final = 16 << 20
_AHEAD: Final = 2
_TRIES_MAX: Final = 2


@dataclass(frozen=True, slots=True)
class PagesCame:
    """What came of a batch.

    Attributes:
        states: Of each page. What lies in the blocks of those that are not ``OK`` is undefined.
        sums: The checksum of each that is ``OK``, as its source has it; the bytes that came fit it.
        failure: Why those that are ``LOST`` did not come.
    """

    states: States
    sums: Sums
    failure: TensorbusError | None


def fetch_pages(
    origin: Origin, places: PagePlaces, out: Any, nbytes: int, *, ways: Ways, deadline: Deadline
) -> PagesCame:
    """Read pages that another host's worker holds. Blocks; no thread touches the memory any more when it returns.

    A page is ``OK`` only if its source vouched for it after the last byte had left, and it fits its checksum here. One
    that does not is asked for once more.

    Args:
        origin: Who holds them; its request carries the permit.
        places: As they are there.
        out: Where they go: ``n`` writable blocks of ``nbytes``, slots of ours for instance; see :func:`blocks_of`.
        ways: With how many connections, and how they are made.

    Raises:
        InvalidArgumentError: If the blocks do not suit.
    """
    blocks = blocks_of(out, len(places), nbytes, writable=True)
    fetch = _Fetch(origin, places, blocks, nbytes, ways=ways, deadline=deadline)
    fetch.bring(np.arange(len(places)))
    if (changed := np.flatnonzero(fetch.states == CORRUPT)).size:
        fetch.bring(changed)
    lost = bool((fetch.states == LOST).any())
    return PagesCame(states=fetch.states, sums=fetch.sums, failure=fetch.failure if lost else None)


class _Fetch:
    def __init__(
        self, origin: Origin, places: PagePlaces, blocks: Blocks, nbytes: int, *, ways: Ways, deadline: Deadline
    ) -> None:
        self.states = np.full(len(places), LOST, np.uint8)
        self.sums = np.zeros(len(places), np.uint64)
        self.failure: TensorbusError | None = None
        self._origin = origin
        self._places = places
        self._blocks = blocks
        self._nbytes = nbytes
        self._ways = ways
        self._deadline = deadline
        self._lock = threading.Lock()
        self._todo: deque[Slots] = deque()

    def bring(self, which: Slots) -> None:
        """Ask for those pages, in shares that the connections take as they finish the last."""
        each = -(-len(which) * self._nbytes // max(1, self._ways.connections))
        share = max(1, min(PAGES_MAX, min(max(each, _SHARE_BYTES_MIN), _SHARE_BYTES_MAX) // self._nbytes))
        self._todo.extend(which[start : start + share] for start in range(0, len(which), share))
        count = min(self._ways.connections, len(self._todo))
        run_threads([partial(self._work, number) for number in range(count)])
        self._todo.clear()  # what nobody could bring stays lost

    def _work(self, number: int) -> None:
        for attempt in range(_TRIES_MAX):
            asked: deque[tuple[int, Slots]] = deque()
            try:
                if self._deadline.left() == 0:
                    raise self._deadline.error()
                with self._ways.borrow(self._origin, number, fresh=attempt > 0, deadline=self._deadline) as client:
                    self._pump(client, asked)
                return
            except TensorbusError as exc:
                with self._lock:
                    self.failure = exc
                    self._todo.extendleft(share for _, share in reversed(asked))
                if not isinstance(exc, LostError):
                    return

    def _pump(self, client: BulkClient, asked: deque[tuple[int, Slots]]) -> None:
        while True:
            while len(asked) < _AHEAD and (share := self._take()) is not None:
                asked.append((0, share))
                asked[-1] = ask_pages(client, self._origin, self._places[share], self._nbytes, self._deadline), share
            if not asked:
                return
            request, share = asked[0]
            views = [self._blocks[n].data for n in share.tolist()]
            states, sums = receive_pages(client, request, views, self._nbytes, self._deadline)
            self.states[share], self.sums[share] = states, sums
            asked.popleft()

    def _take(self) -> Slots | None:
        with self._lock:
            return self._todo.popleft() if self._todo else None


def ask_pages(client: BulkClient, origin: Origin, places: PagePlaces, nbytes: int, deadline: Deadline) -> int:
    """Ask for up to :data:`PAGES_MAX` pages; gives the number of the request."""
    with Exchange(client, deadline):
        client._requests += 1
        request = client._requests
        data = places.tobytes()
        header = {**origin.request, "t": "pages", "request": request, "nbytes": nbytes, "count": len(places)}
        client._wire.send(header, more=True)
        client._wire.send_block(small_head(request, 0, data), [memoryview(data)])
        return request


def receive_pages(
    client: BulkClient, request: int, views: Sequence[memoryview], nbytes: int, deadline: Deadline
) -> tuple[States, Sums]:
    """Take in the oldest request's answer: the pages' bytes into the views of those that come, and what came of each.

    Raises:
        TensorbusError: What the owner answered; UnavailableError: If the peer is gone; RemoteProtocolError.
    """
    with Exchange(client, deadline) as exchange:
        said = np.frombuffer(_small(client, request, 0, len(views)), np.uint8)
        states = check_states(said, (OK, GONE)).copy()
        coming = np.flatnonzero(states == OK)
        sums = np.zeros(len(views), np.uint64)
        found: list[int] = []
        size = pages_per_block(nbytes)
        starts = range(0, len(coming), size)
        for index, start in enumerate(starts, 1):
            some = [views[n] for n in coming[start : start + size].tolist()]
            _expect(client._head(), request, index, nbytes * len(some))
            exchange.bound()
            found += client._wire.recv_pages(some)
        if len(coming):
            verdict = _small(client, request, len(starts) + 1, verdict_bytes(len(coming)))
            sums[coming], after = parse_verdict(verdict, len(coming))
            fits = sums[coming] == np.array(found, np.uint64)
            states[coming] = np.where(after == TORN, after, np.where(fits, OK, CORRUPT))
        client._expect("end")
        return states, sums


def _small(client: BulkClient, request: int, index: int, nbytes: int) -> bytes:
    head = client._head()
    _expect(head, request, index, nbytes)
    data = bytearray(nbytes)
    if client._wire.recv_block([memoryview(data)]) != head.checksum:
        raise LostError(f"what {client.peer} says of its pages changed on the way", peer=client.peer)
    return bytes(data)


def _expect(head: BlockHead, request: int, index: int, nbytes: int) -> None:
    if (head.request, head.index, head.nbytes) != (request, index, nbytes):
        raise RemoteProtocolError(f"block {index} of {nbytes} bytes was expected, not {head}")
