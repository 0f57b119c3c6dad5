"""Batches of pages on a bulk connection: what is said about them, and the server's side (``docs/spec/frames.md``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Protocol

import numpy as np

from tensorbus.errors import CorruptError, InvalidArgumentError
from tensorbus.transport._blocks import BLOCK_BYTES, SPANS_MAX, checksum
from tensorbus.transport._bulk import Wire
from tensorbus.transport._bulk_frames import REQUEST_MAX, BlockHead
from tensorbus.transport._frames import RemoteProtocolError
from tensorbus.transport._page_layout import OK, PAGE_PLACE, SLOT_BYTES_MAX, TORN, PagePlaces, States, Sums
from tensorbus.transport._page_lend import PageLoan

PAGES_MAX: Final = 1024
"""In one request, so that the next one fits a socket's buffer while the answer to this one comes."""
_VERDICT_BYTES: Final = 9


class PageSource(Protocol):
    """Pages that one reader may read. Called from the server's threads."""

    def lend(self, places: PagePlaces, nbytes: int) -> PageLoan: ...


class PageOwner(Protocol):
    """Who owns the pages that a bulk server sends. Called from the server's threads; raises typed errors."""

    def open_pages(self, request: Mapping[str, object]) -> PageSource: ...


class PageTalk:
    """The part of a conversation that is about pages."""

    def __init__(self, wire: Wire, owner: PageOwner | None) -> None:
        self._wire = wire
        self._owner = owner
        self._known: tuple[object, PageSource] | None = None

    def answer(self, header: Mapping[str, object]) -> None:
        """Answer a request for pages, whose places follow it.

        Raises:
            RemoteProtocolError: If they do not, or nothing like it can be asked.
        """
        request = _within(header, "request", 0, REQUEST_MAX)
        nbytes = _within(header, "nbytes", 1, SLOT_BYTES_MAX)
        count = _within(header, "count", 1, PAGES_MAX)
        places = self._places(request, count)
        loan = self._source(header).lend(places, nbytes)
        self._send(request, 0, loan.states.tobytes())
        size = pages_per_block(nbytes)
        starts = range(0, len(loan.views), size)
        for index, start in enumerate(starts, 1):
            views = loan.views[start : start + size]
            head = BlockHead(request=request, index=index, nbytes=nbytes * len(views), checksum=None)
            self._wire.send_block(head, views, more=True)
        if loan.views:
            self._send(request, len(starts) + 1, verdict(loan))
        self._wire.send({"t": "end", "request": request})

    def _places(self, request: int, count: int) -> PagePlaces:
        head = self._wire.recv()
        wanted = (request, 0, count * PAGE_PLACE.itemsize)
        if not isinstance(head, BlockHead) or (head.request, head.index, head.nbytes) != wanted:
            raise RemoteProtocolError(f"the places of {count} pages were expected, not {head!r:.200}")
        data = bytearray(head.nbytes)
        if self._wire.recv_block([memoryview(data)]) != head.checksum:
            raise CorruptError("the places of pages came with other bytes than were sent")
        return np.frombuffer(data, PAGE_PLACE)

    def _source(self, header: Mapping[str, object]) -> PageSource:
        if self._owner is None:
            raise InvalidArgumentError("this side has no pages")
        permit = header.get("permit")
        if self._known is None or self._known[0] != permit:
            self._known = permit, self._owner.open_pages(header)
        return self._known[1]

    def _send(self, request: int, index: int, data: bytes) -> None:
        self._wire.send_block(small_head(request, index, data), [memoryview(data)], more=True)


def small_head(request: int, index: int, data: bytes) -> BlockHead:
    """The head of a block that is no page."""
    return BlockHead(request=request, index=index, nbytes=len(data), checksum=checksum([memoryview(data)]))


def pages_per_block(nbytes: int) -> int:
    """How many pages of that size come in each block, but the last."""
    return max(1, min(SPANS_MAX, BLOCK_BYTES // nbytes))


def verdict(loan: PageLoan) -> bytes:
    """What is said of pages after their last byte: their checksums, then which of them were right all the time."""
    states = np.where(loan.check(), OK, TORN).astype(np.uint8)
    return loan.sums.astype("<u8").tobytes() + states.tobytes()


def verdict_bytes(count: int) -> int:
    """Its length for so many pages."""
    return _VERDICT_BYTES * count


def parse_verdict(data: bytes, count: int) -> tuple[Sums, States]:
    """Checksums and states.

    Raises:
        RemoteProtocolError: If it says what cannot be.
    """
    states = np.frombuffer(data, np.uint8, count, 8 * count)
    return np.frombuffer(data, "<u8", count).astype(np.uint64), check_states(states, (OK, TORN))


def check_states(states: States, allowed: tuple[np.uint8, np.uint8]) -> States:
    """The states, none of them another than those two.

    Raises:
        RemoteProtocolError: If one is.
    """
    first, second = allowed
    if not ((states == first) | (states == second)).all():
        raise RemoteProtocolError("a page cannot be in such a state")
    return states


def _within(header: Mapping[str, object], name: str, least: int, most: int) -> int:
    value = header.get(name)
    if type(value) is not int or not least <= value <= most:
        raise RemoteProtocolError(
            f"a request for pages with {name} = {value!r:.40}, from {least} to {most} are allowed"
        )
    return value
