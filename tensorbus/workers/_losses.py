"""What a worker does when the log has lost its tail: record it, open its session again, say again what it holds."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

from tensorbus.clock import Deadline
from tensorbus.errors import FencedError, TensorbusError
from tensorbus.feeds import Loss, newest_truncation
from tensorbus.lifecycle import Directory, log_rules
from tensorbus.workers._announce import Announcer
from tensorbus.workers._core import Core

log = logging.getLogger("tensorbus.workers")

RECORD_S: Final = 60.0
RETRY_DELAY_S: Final = 0.5
SETTLE_S: Final = 5.0
"""How long the workers get to say what they hold, before what nobody has is said not to be there."""


class Losses:
    """Owner of all that follows a loss. :meth:`on_loss` is the feed's hook, :meth:`run` an endless task.

    Args:
        announcer: Of a worker with memory.
    """

    def __init__(self, core: Core, announcer: Announcer | None) -> None:
        self._core = core
        self._announcer = announcer
        self._noted: list[Loss] = []
        self._wake = asyncio.Event()
        self._told: list[Callable[[], None]] = []

    def tell(self, callback: Callable[[], None]) -> None:
        """Have somebody called, on the loop and without blocking, as soon as a loss is known."""
        self._told.append(callback)

    async def on_loss(self, old: Directory, loss: Loss) -> None:
        """The log lost what was read of it; ``old`` is the state as it was before."""
        log.error(
            "the log lost its tail: worker=%s fact=%d event=%s last=%d",
            self._core.me.worker, loss.remembered.seq, loss.remembered.event_id, loss.last,
        )  # fmt: skip
        self._core.unsettled = True
        for callback in self._told:
            callback()
        if self._announcer is not None:
            await self._announcer.capture(old, loss)
        self.note(loss)

    def note(self, loss: Loss) -> None:
        """A loss is to be recorded."""
        self._noted.append(loss)
        self._wake.set()

    async def run(self) -> None:
        """Deal with losses for ever.

        Raises:
            FencedError: If the session is over.
        """
        while True:
            await self._wake.wait()
            self._wake.clear()
            await self._core.feed.sure(deadline=Deadline(None))
            while self._noted:
                await self._until_done(partial(self._record, self._noted[0]))
                del self._noted[0]
            if self._announcer is not None:
                await self._announcer.announce()
            await asyncio.sleep(SETTLE_S)
            self._core.unsettled = self._wake.is_set()

    async def _until_done(self, step: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                return await step()
            except FencedError:
                raise
            except TensorbusError as error:
                log.warning("the loss is not recorded yet: reason=%s", error)
                await asyncio.sleep(RETRY_DELAY_S)

    async def _record(self, loss: Loss) -> None:
        """Put the loss on the log, unless somebody has: a record is about this loss if it came after what is missed."""
        deadline = Deadline(RECORD_S, what="recording a loss of the log")
        newest = await newest_truncation(self._core.bus, deadline=deadline)
        lost = loss.remembered
        if newest is not None and newest.time_ns > lost.time_ns:
            return
        if newest is not None:
            await self._core.feed.reached(newest.seq, deadline=deadline)
        rule = partial(
            log_rules.note_truncation,
            stream="TB",
            seq=lost.seq,
            event_id=lost.event_id,
            last=loss.last,
            known=0 if newest is None else newest.seq,
        )
        await self._core.author.decide(rule, deadline=deadline)
