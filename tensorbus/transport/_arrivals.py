"""Comparing tensors with their digests while their blocks still come: only the last of them are waited for."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from blake3 import blake3

from tensorbus.transport._blocks import Block
from tensorbus.transport._bulk_fetch import Transfer, TransferReport
from tensorbus.transport._copy import default_threads

_STEP_BYTES: Final = 16 << 20
_ALONE_BYTES: Final = 4 << 20
"""Less is hashed by one thread."""


class Place(NamedTuple):
    """Where a tensor's bytes come to lie, and their BLAKE3 in lower-case hex."""

    offset: int
    nbytes: int
    digest: str


class Arrivals:
    """Tensors that a transfer brings, and which of them are wrong.

    Args:
        blocks: Those of the transfer, in order of their offsets.
        room: Where they come to lie.
    """

    def __init__(self, blocks: Sequence[Block], room: memoryview, places: Sequence[Place]) -> None:
        self._ends = [sum(block[-1]) for block in blocks]
        self._room = room
        self._places = places
        self._came = 0
        self.wrong: list[int] = []
        """The numbers of the places whose bytes are not those of their digests."""

    def run(self, transfer: Transfer, bring: Callable[[], TransferReport]) -> TransferReport:
        """Run a transfer and look at what comes. Blocks; nothing touches the memory any more when it ends.

        Args:
            bring: Runs the transfer.

        Raises:
            TensorbusError: As the transfer.
        """
        if len(self._ends) <= 1:  # nothing to look at meanwhile
            report = bring()
            self._look(transfer)
            return report
        looking = threading.Thread(target=self._look, args=(transfer,), name="digests", daemon=True)
        looking.start()
        try:
            return bring()
        finally:
            transfer.cancel()  # over in any case, also for who looks
            looking.join()

    def _look(self, transfer: Transfer) -> None:
        for number in sorted(range(len(self._places)), key=self._places.__getitem__):
            place = self._places[number]
            digest = self._digest(transfer, place)
            if digest is None:
                return
            if digest != place.digest:
                self.wrong.append(number)

    def _digest(self, transfer: Transfer, place: Place) -> str | None:
        """Of a tensor once it has come; ``None`` if the transfer ended before."""
        at, end = place.offset, place.offset + place.nbytes
        hasher = blake3(max_threads=1 if place.nbytes <= _ALONE_BYTES else default_threads())
        while at < end:
            stop = min(at + _STEP_BYTES, end)
            needed = bisect_left(self._ends, stop) + 1
            if self._came < needed:
                self._came = transfer.until_came(needed)
            if self._came < needed:
                return None
            with self._room[at:stop] as piece:
                hasher.update(piece)
            at = stop
        return hasher.hexdigest()
