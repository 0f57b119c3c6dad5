"""The live Directory: waiters, followers and verdicts, batch by batch."""

from __future__ import annotations

import asyncio

import pytest

from tensorbus.clock import Deadline
from tensorbus.errors import DeadlineExceededError
from tensorbus.lifecycle import Directory, Touched
from tensorbus.projections import LiveDirectory, _live
from tests.unit.lifecycle import history as h


@pytest.fixture
def log() -> h.Log:
    """A log with a session, a put, a put that did not count, and a key."""
    log = h.Log()
    log.open()
    log.append(h.put())
    log.append(h.put(digest=h.D2))
    log.append(h.bound())
    return log


@pytest.fixture
def live() -> LiveDirectory:
    return LiveDirectory(Directory())


def test_followers_hear_once_per_batch_what_changed(log: h.Log, live: LiveDirectory) -> None:
    heard: list[tuple[int, tuple[Touched, ...]]] = []
    with live.followed(lambda position, touched: heard.append((position, touched))):
        live.apply(log.messages)
        live.apply([])
        live.apply(log.messages)
    live.apply(h.write([]).messages)
    artifact, key = Touched("artifact", h.T, "x"), Touched("key", h.T, "k")
    assert heard == [(4, (Touched("session", "", "w1"), artifact, key))]


def test_a_batch_without_a_change_is_not_heard_of(log: h.Log, live: LiveDirectory) -> None:
    heard: list[int] = []
    live.apply(log.messages[:2])
    with live.followed(lambda position, touched: heard.append(position)):
        live.apply(log.messages[2:3])
    assert heard == []


def test_a_follower_may_leave_while_it_is_told(log: h.Log, live: LiveDirectory) -> None:
    heard: list[str] = []
    with live.followed(lambda position, touched: heard.append("first")):
        leaving = live.followed(lambda position, touched: leaving.__exit__(None, None, None))
        leaving.__enter__()
        with live.followed(lambda position, touched: heard.append("last")):
            live.apply(log.messages)
    assert heard == ["first", "last"]


def test_each_sequence_has_its_verdict_also_when_delivered_again(log: h.Log, live: LiveDirectory) -> None:
    for _ in range(2):
        live.apply(log.messages)
        assert [live.verdict(seq).why for seq in (1, 2, 3, 4)] == ["", "", "conflict", ""]


def test_only_the_newest_drops_are_remembered(log: h.Log, live: LiveDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_live, "DROPPED_KEPT", 2)
    for _ in range(3):
        log.append(h.put(digest=h.D2))
    live.apply(log.messages)
    assert [live.verdict(seq).kept for seq in (3, 5, 6, 7)] == [True, True, False, False]


async def test_waiters_wake_at_their_position(log: h.Log, live: LiveDirectory) -> None:
    waiting = {seq: asyncio.create_task(live.reached(seq, deadline=Deadline(10))) for seq in (4, 2, 1)}
    await asyncio.sleep(0)
    live.apply(log.messages[:2])
    await asyncio.gather(waiting[1], waiting[2])
    assert not waiting[4].done()
    live.apply(log.messages[2:])
    await waiting[4]
    await live.reached(3, deadline=Deadline(0))


async def test_waiters_wake_when_the_leader_has_nothing_for_us(live: LiveDirectory) -> None:
    waiting = asyncio.create_task(live.reached(9, deadline=Deadline(10)))
    await asyncio.sleep(0)
    live.advance(9)
    await waiting
    live.advance(3)
    assert live.position == 9


async def test_who_gave_up_is_forgotten(log: h.Log, live: LiveDirectory) -> None:
    """A position that never comes, asked for again and again, must not fill the memory."""
    kept = asyncio.create_task(live.reached(4, deadline=Deadline(10)))
    for _ in range(50):
        with pytest.raises(DeadlineExceededError):
            await live.reached(1_000_000, deadline=Deadline(0))
    assert len(live._waiters) <= 3
    live.apply(log.messages)
    await kept
