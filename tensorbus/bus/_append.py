"""The one function that puts a fact on the log.

A contested aggregate is compared and appended on its fence, always the same filter string; what only the holder of a
role or a shard may write is compared on the grants of that; what only one author writes is told apart by its event id.
After an unknown outcome the log itself says whether the fact is there.
"""

from __future__ import annotations

import asyncio
from typing import Final

from tensorbus.bus._port import Appended, Conflict, Stream, WrongSequenceError
from tensorbus.clock import Deadline
from tensorbus.errors import InvalidArgumentError
from tensorbus.events import MSG_ID, Event, Headers, PageEvent, aggregate_of, encode, headers_to_wire

LOOK_AGAIN_S: Final = 0.02


async def append(
    stream: Stream, event: Event | PageEvent, headers: Headers, *, deadline: Deadline
) -> Appended | Conflict:
    """Propose a fact. Its fold at the returned sequence decides whether it holds.

    Args:
        event: The fact; its kind and identity choose the subject.
        headers: ``event_id`` makes a repetition harmless. ``expected`` is the sequence of the last message of the
            aggregate that the author knows (0: none) where several authors may write, the token of the role or shard
            where only its holder may, and ``None`` where only one author does.
        deadline: Until when to try; a paused or restarting bus is waited for.

    Returns:
        ``Appended`` also if an earlier attempt of the same event id did it; ``Conflict`` if somebody else was first.

    Raises:
        InvalidArgumentError: If ``expected`` is missing or out of place, or the fact is too large.
        DeadlineExceededError: If the outcome is unknown; repeating with the same event id is safe.
        UnavailableError: If nothing was appended, because the bus is not there.
        OutOfSpaceError: If the log is full or too many appends wait.
        DeniedError: If the server refuses the subject.
    """
    about = aggregate_of(event)
    guard = about.guard
    if (guard is None) != (headers.expected is None):
        raise InvalidArgumentError(
            f"a {event.type} is {'not ' if guard is None else ''}compared and appended: "
            f"`expected` must be {'None' if guard is None else 'given'}",
            type=event.type,
        )
    subject = stream.subjects.fact(about, headers.author)
    fence = None if guard is None else stream.subjects.fence(guard)
    own = stream.subjects.fence(about)
    wire = headers_to_wire(headers, type_name=event.type, fence=fence)
    body = encode(event)
    while True:
        try:
            return Appended(await stream.publish(subject, body, headers=wire, deadline=deadline))
        except WrongSequenceError as exc:
            if fence is None or headers.expected is None:
                raise
            if own != fence:  # a newer holder's grant moved the fence, perhaps after an earlier attempt of ours
                mine = await stream.last_on(subject, deadline=deadline)
                stored = mine is not None and mine.headers.get(MSG_ID) == headers.event_id
                return Appended(mine.seq) if mine is not None and stored else Conflict(exc.seq)
            outcome = await _who_was_first(stream, fence, headers.event_id, headers.expected, exc.seq, deadline)
            if outcome is not None:
                return outcome
        async with deadline.scope():
            await asyncio.sleep(LOOK_AGAIN_S)


async def _who_was_first(
    stream: Stream, fence: str, event_id: str, expected: int, said: int, deadline: Deadline
) -> Appended | Conflict | None:
    """What a refusal means: an earlier attempt of our own (one server says so by *wrong sequence*), or another's fact.

    ``None`` if the leader that answers now does not have what the refusal spoke of.
    """
    first = await stream.first_from(fence, expected + 1, deadline=deadline)
    if first is None:
        return Conflict(said) if said < expected else None
    if first.headers.get(MSG_ID) == event_id:
        return Appended(first.seq)
    last = await stream.last_on(fence, deadline=deadline)
    return Conflict(first.seq if last is None else max(last.seq, first.seq))
