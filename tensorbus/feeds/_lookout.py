"""Sees whether a reading may go on where it is: does the log have what was read, and what is still to be read?"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from tensorbus.bus import Bus, Message, Reader
from tensorbus.clock import NS_PER_S, Deadline
from tensorbus.errors import DeadlineExceededError, UnavailableError
from tensorbus.feeds._decode import decode_all
from tensorbus.feeds._remember import Loss, Remembered, check, remember
from tensorbus.feeds._restore import Restored, newest_purge
from tensorbus.projections import LiveDirectory

log = logging.getLogger("tensorbus.feeds")

LOOK_S: Final = 10.0
LOOK_EVERY_S_MIN: Final = 0.05
RETRY_DELAY_S: Final = 0.5

T = TypeVar("T")


@dataclass(slots=True)
class Reading:
    """A Directory that is fed, and the last message that it was fed with."""

    live: LiveDirectory
    remembered: Remembered | None = None

    @classmethod
    def of(cls, restored: Restored) -> Reading:
        """Begins where a snapshot ends; until a fact follows, the snapshot's own message stands for what was read."""
        message = restored.message
        return cls(LiveDirectory(restored.state), None if message is None else remember(message, snapshot=True))

    def apply(self, batch: Sequence[Message]) -> None:
        self.live.apply(decode_all(batch))
        self.remembered = remember(batch[-1])


class Lookout:
    """Looks for losses and purges: after each sign that the bus was away, and every half of a purge's delay.

    Args:
        purge_delay_s: The delay between a purge's announcement and its execution, if the log says nothing shorter.
        on_loss: Called when the log has lost what a reading was fed with.

    Attributes:
        cause: Why a reading must begin anew, or empty.
        doubts: How often the log may have become another one.
        wake: Set when it is time to look, or something was found.
    """

    def __init__(self, bus: Bus, *, purge_delay_s: float, on_loss: Callable[[Loss, Reading], None]) -> None:
        self.cause = ""
        self.wake = asyncio.Event()
        self._bus = bus
        self._purge_delay_s = purge_delay_s
        self._on_loss = on_loss
        self._looking = asyncio.Lock()
        self.doubts = 0
        self._checked = 0
        self._looked_at = 0.0

    @property
    def unsure(self) -> bool:
        """Whether the bus was away since it was last seen that the log has what was read of it, or has it not."""
        return self.doubts != self._checked or bool(self.cause)

    def suspect(self) -> None:
        """The log may not be what it was: look before anything more is folded."""
        self.doubts += 1
        self.wake.set()

    def begin(self) -> None:
        """From here on, what is asked of the bus is asked anew: what comes later counts again."""
        self.cause = ""
        self._checked = self.doubts
        self._looked_at = asyncio.get_running_loop().time()

    def again_at(self, reading: Reading) -> float:
        """When to look again, by the loop's time."""
        if self.doubts != self._checked:
            return self._looked_at
        announced = reading.live.state.log.announced
        said_s = math.inf if announced is None else announced.delay_ns / NS_PER_S
        return self._looked_at + max(min(self._purge_delay_s, said_s) / 2, LOOK_EVERY_S_MIN)

    async def look(self, reading: Reading, *, deadline: Deadline | None = None) -> str:
        """Look, if it is time to; the cause to begin anew, or nothing.

        What was read within half a purge's delay of such a look cannot lack anything: a later announcement has not
        been carried out yet.
        """
        async with self._looking:
            now = asyncio.get_running_loop().time()
            if self.cause or now < self.again_at(reading):
                return self.cause
            heard, deadline = self.doubts, deadline or look_deadline()
            loss = None
            if reading.remembered is not None:
                loss = await check(self._bus, reading.remembered, deadline=deadline)
            purge = await newest_purge(self._bus, deadline=deadline)
            self._looked_at, self._checked = now, heard
            if loss is not None:
                self.note(loss, reading)
            elif purge.upto > reading.live.state.seq:
                self.cause = f"the log was purged up to {purge.upto}, past {reading.live.state.seq}"
                self.wake.set()
            return self.cause

    def note(self, loss: Loss, reading: Reading) -> None:
        """What was read of the log is not there any more."""
        self.cause = f"the log lost the fact at {loss.remembered.seq} and ends at {loss.last}"
        self.wake.set()
        self._on_loss(loss, reading)

    async def next(self, reader: Reader, reading: Reading) -> Sequence[Message] | str:
        """The next batch to fold; or why it must not be.

        A batch that came before the bus was away may be of the part that the log lost, though what was folded before
        it is still there.

        Raises:
            UnavailableError: If the bus was closed.
        """
        reader.on_restart = self.suspect
        heard = self.doubts
        try:
            batch = await anext(aiter(reader))
        except StopAsyncIteration:
            raise UnavailableError("the reading of the log has ended") from None
        while True:
            if cause := await insist(lambda: self.look(reading)):
                return cause
            if heard == self.doubts:
                return batch
            heard = self.doubts
            loss = await insist(lambda: check(self._bus, remember(batch[-1]), deadline=look_deadline()))
            if loss is not None:
                self.note(loss, reading)


async def insist(ask: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Ask the bus until it answers."""
    while True:
        try:
            return await ask()
        except (UnavailableError, DeadlineExceededError) as error:
            log.debug("the bus does not answer yet: reason=%s", error)
            await asyncio.sleep(RETRY_DELAY_S)


def look_deadline() -> Deadline:
    return Deadline(LOOK_S, what="looking at the log")
