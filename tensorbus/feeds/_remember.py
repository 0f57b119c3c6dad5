"""Whether the log still has what was read of it: a position is kept with the id of its fact, and read again.

A server that died, or was restored from a copy, may come back with a log that ends earlier, or with another one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tensorbus.bus import Bus, Message
from tensorbus.clock import Deadline
from tensorbus.errors import UnavailableError
from tensorbus.events import MSG_ID, Aggregate
from tensorbus.feeds._restore import newest_purge
from tensorbus.ids import EventId

_SNAPSHOTS: Final = Aggregate("snap", "directory")
_TRUNCATIONS: Final = Aggregate("trunc", "TB")


@dataclass(frozen=True, slots=True)
class Remembered:
    """A message of the log that was read.

    Attributes:
        seq: Its sequence.
        event_id: Its id.
        time_ns: When the log took it, by the server's clock; 0 if that is not known. A request that is repeated after a
            loss can give the same message at the same sequence, at another time.
        snapshot: Whether it is a snapshot's, which goes as soon as there is a newer one.
    """

    seq: int
    event_id: EventId
    time_ns: int
    snapshot: bool = False


@dataclass(frozen=True, slots=True)
class Loss:
    """The log lost a fact that was read of it, and so all that it had after that one.

    Attributes:
        remembered: That fact.
        last: The last sequence that the log had when it was missed.
    """

    remembered: Remembered
    last: int


@dataclass(frozen=True, slots=True)
class Found:
    """What the log says of a remembered message.

    Attributes:
        there: The message that is there now, ``None`` if none is.
        last: The log's last sequence.
        purged: Up to where a purge was announced.
        snapshot: Sequence of the newest snapshot's fact.
    """

    there: Remembered | None
    last: int
    purged: int = 0
    snapshot: int = 0


class LostPositionError(UnavailableError):
    """What was waited for may have been in the part of the log that was lost. Look before repeating."""

    def __init__(self, seq: int, loss: Loss) -> None:
        super().__init__(
            f"the log lost its tail: the fact at {loss.remembered.seq} is gone, and position {seq} may be gone with "
            "it; look again before repeating",
            position={"TB": seq},
            lost=loss.remembered.seq,
            last=loss.last,
        )


def remember(message: Message, *, snapshot: bool = False) -> Remembered:
    """What to keep of a message."""
    return Remembered(message.seq, EventId(message.headers.get(MSG_ID, "")), message.time_ns, snapshot)


def judge(remembered: Remembered, found: Found) -> Loss | None:
    """Whether what the log says means that it lost the message: neither there, nor purged as was announced."""
    if found.there is not None and _same(found.there, remembered):
        return None
    purged = found.purged
    if remembered.snapshot:
        purged = max(purged, found.snapshot - 1)
    if found.there is None and remembered.seq <= purged:
        return None
    return Loss(remembered, found.last)


def _same(there: Remembered, remembered: Remembered) -> bool:
    return there.event_id == remembered.event_id and remembered.time_ns in (0, there.time_ns)


async def check(bus: Bus, remembered: Remembered, *, deadline: Deadline) -> Loss | None:
    """Read the message again; the loss, if the log has lost it.

    Raises:
        UnavailableError, DeadlineExceededError: If the bus or its stream is not there: that is no loss yet.
    """
    message = await bus.get(remembered.seq, deadline=deadline)
    there = None if message is None else remember(message)
    if there is not None and _same(there, remembered):
        return None
    last = await bus.last_seq(deadline=deadline)
    purge = await newest_purge(bus, deadline=deadline)
    newest = await bus.last_on(bus.subjects.fence(_SNAPSHOTS), deadline=deadline)
    return judge(remembered, Found(there, last, purge.upto, 0 if newest is None else newest.seq))


async def newest_truncation(bus: Bus, *, deadline: Deadline) -> Remembered | None:
    """The newest loss that the log itself speaks of.

    Raises:
        UnavailableError, DeadlineExceededError: If the bus does not answer.
    """
    message = await bus.last_on(bus.subjects.fence(_TRUNCATIONS), deadline=deadline)
    return None if message is None else remember(message)
