"""The feed keeps a Directory at the head of the log, and knows how far it is."""

from __future__ import annotations

import asyncio

import pytest

from tensorbus.bus import MemoryBus, MemoryCluster, Message, put_blob
from tensorbus.clock import Deadline
from tensorbus.errors import DeadlineExceededError, UnavailableError
from tensorbus.events import UnknownEvent
from tensorbus.feeds import decode_one
from tensorbus.lifecycle import rules
from tests.unit.feeds.voices import feed, soon, voice
from tests.unit.lifecycle import history as h


@pytest.fixture
def cluster() -> MemoryCluster:
    return MemoryCluster()


async def test_a_feed_is_open_once_it_holds_what_was_there(cluster: MemoryCluster) -> None:
    async with voice(cluster), feed(cluster) as late:
        assert late.live.state.is_live(h.W1, h.FIRST)


async def test_a_position_beyond_the_own_filter_is_reached_at_once(cluster: MemoryCluster) -> None:
    async with voice(cluster) as author:
        await put_blob(author.feed.bus, b"a manifest", author=h.W1, deadline=soon())
        beyond = cluster.log.last_seq
        assert beyond > author.feed.live.state.seq
        await author.feed.reached(beyond, deadline=Deadline(2))
        assert author.feed.live.position == beyond


async def test_an_empty_log_is_read_to_its_end(cluster: MemoryCluster) -> None:
    async with feed(cluster) as empty:
        assert empty.live.state.seq == 0
        await empty.reached(cluster.log.last_seq, deadline=Deadline(2))


async def test_a_position_that_the_log_does_not_have_yet_is_waited_for(cluster: MemoryCluster) -> None:
    """Answering at once would count every later fact as read: mutations would return before the fold kept them."""
    async with voice(cluster) as author:
        future = cluster.log.last_seq + 2
        with pytest.raises(DeadlineExceededError):
            await author.feed.reached(future, deadline=Deadline(0.2))
        assert author.feed.live.position < future
        waiting = asyncio.create_task(author.feed.reached(future, deadline=soon()))
        for artifact in (h.X, h.Y):
            assert not waiting.done()
            await author.decide(lambda state, a=artifact: rules.birth(state, h.put(a)), deadline=soon())
        await waiting
        assert author.feed.live.state.seq == future


async def test_a_feed_that_lags_reaches_a_position_when_it_holds_it(cluster: MemoryCluster) -> None:
    async with voice(cluster) as author, feed(cluster) as slow:
        cluster.on_deliver = lambda message: 0.1
        seq, _ = await author.decide(lambda state: rules.birth(state, h.put()), deadline=soon())
        await slow.reached(seq, deadline=soon())
        assert slow.live.state.artifact(h.T, h.X) is not None


async def test_a_disconnected_feed_runs_out_of_time_and_goes_on_later(cluster: MemoryCluster) -> None:
    async with voice(cluster) as author, feed(cluster) as cut:
        assert isinstance(cut.bus, MemoryBus)
        cut.bus.disconnect()
        seq, _ = await author.decide(lambda state: rules.birth(state, h.put()), deadline=soon())
        with pytest.raises(DeadlineExceededError):
            await cut.reached(seq, deadline=Deadline(0.1))
        cut.bus.reconnect()
        await cut.reached(seq, deadline=soon())


async def test_a_feed_whose_bus_was_closed_says_so(cluster: MemoryCluster) -> None:
    async with feed(cluster) as reading:
        await reading.bus.close()
        with pytest.raises(UnavailableError, match="closed"):
            await reading.failed()
        with pytest.raises(UnavailableError, match="closed"):
            await reading.reached(cluster.log.last_seq + 1, deadline=soon())


@pytest.mark.parametrize("subject", ["tb.ev.artifact.a.w1", "tb.ev.nonsense"])
async def test_an_unreadable_message_makes_the_state_degraded_and_stops_nobody(
    cluster: MemoryCluster, subject: str, caplog: pytest.LogCaptureFixture
) -> None:
    message = Message(7, 0, subject, {"Tb-Type": "ArtifactPut"}, b"\xff")
    recorded = decode_one(message)
    assert recorded.event == UnknownEvent("unreadable")
    assert "seq=7" in caplog.text
    async with feed(cluster) as reading:
        reading.live.apply([recorded])
        assert reading.live.state.degraded
