"""A log that lost its tail, or all of it: readers begin anew, authors say again what was lost in between."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from tensorbus.bus import MemoryBus, MemoryCluster
from tensorbus.clock import Deadline
from tensorbus.feeds import Author, Loss, LostPositionError
from tensorbus.lifecycle import Directory, rules
from tests.unit.feeds.voices import feed, settled, soon, voice
from tests.unit.lifecycle import history as h


@pytest.fixture
def cluster() -> MemoryCluster:
    return MemoryCluster()


@pytest.fixture
async def author(cluster: MemoryCluster) -> AsyncIterator[Author]:
    async with voice(cluster) as made:
        yield made


async def put(author: Author, name: str) -> int:
    fact = h.put(h.ArtifactId(name), None)
    seq, _ = await author.decide(lambda state: rules.birth(state, fact), deadline=soon())
    return seq


async def same_as_the_log(cluster: MemoryCluster, state: Directory) -> None:
    async with feed(cluster) as fresh:
        assert state.hash() == state.full_hash() == fresh.live.state.hash()


async def test_a_reader_goes_back_with_the_log(cluster: MemoryCluster, author: Author) -> None:
    kept = await put(author, "a")
    async with feed(cluster) as reading:
        told: list[tuple[int, Loss]] = []

        async def on_loss(old: Directory, loss: Loss) -> None:
            told.append((old.seq, loss))

        reading.on_loss = on_loss
        lost = await put(author, "b")
        await reading.reached(lost, deadline=soon())
        waiting = asyncio.create_task(reading.reached(lost + 1, deadline=soon()))
        await asyncio.sleep(0)
        cluster.truncate(kept)
        with pytest.raises(LostPositionError, match="lost its tail"):
            await waiting
        await reading.checked(deadline=soon())
        assert (reading.live.position, reading.losses, reading.rebuilds) == (kept, 1, 1)
        assert [(seq, loss.remembered.seq, loss.last) for seq, loss in told] == [(lost, lost, kept)]
        await same_as_the_log(cluster, reading.live.state)


async def test_a_log_that_was_made_anew_is_read_from_its_beginning(cluster: MemoryCluster, author: Author) -> None:
    await put(author, "a")
    async with feed(cluster) as reading:
        cluster.lose()
        await settled(lambda: reading.losses == 1 and not reading.unsure)
        assert not reading.live.state.artifacts
        async with voice(cluster, h.W2) as other:
            seq = await put(other, "b")
            await reading.reached(seq, deadline=soon())
            await same_as_the_log(cluster, reading.live.state)


async def test_a_log_that_grew_again_beyond_what_was_read_is_not_taken_for_the_old_one(
    cluster: MemoryCluster, author: Author
) -> None:
    kept = await put(author, "a")
    async with feed(cluster) as reading:
        await reading.reached(await put(author, "b"), deadline=soon())
        bus = reading.bus
        assert isinstance(bus, MemoryBus)
        cluster.connections.pop(bus)  # it hears of nothing yet
        bus.disconnect()
        cluster.truncate(kept)
        for name in "cde":
            seq = await put(author, name)
        bus.reconnect()
        await settled(lambda: reading.losses == 1 and not reading.unsure)
        await reading.reached(seq, deadline=soon())
        await same_as_the_log(cluster, reading.live.state)


async def test_a_batch_that_came_before_the_loss_is_not_folded_after_it(cluster: MemoryCluster, author: Author) -> None:
    """What was folded before is still there, so only the batch itself tells."""
    async with feed(cluster) as reading:
        kept = await put(author, "a")
        await reading.reached(kept, deadline=soon())
        cluster.on_deliver = lambda _: 0.2
        lost = cluster.log.last_seq + 1
        putting = asyncio.create_task(put(author, "b"))
        await settled(lambda: cluster.log.last_seq == lost)
        await asyncio.sleep(0.05)
        cluster.truncate(kept)
        await asyncio.sleep(0.3)
        cluster.on_deliver = None
        await putting
        await put(author, "c")
        await reading.reached(cluster.log.last_seq, deadline=soon())
        await settled(lambda: not reading.unsure)
        await same_as_the_log(cluster, reading.live.state)


async def test_two_losses_in_a_row(cluster: MemoryCluster, author: Author) -> None:
    kept = [await put(author, name) for name in "abc"]
    async with feed(cluster) as reading:
        cluster.truncate(kept[1])
        while not reading.rebuilding:
            await asyncio.sleep(0)
        cluster.truncate(kept[0])
        await reading.checked(deadline=soon())
        await settled(lambda: not reading.unsure)
        assert reading.live.position == kept[0]
        await same_as_the_log(cluster, reading.live.state)


async def test_a_fact_whose_outcome_was_lost_is_decided_again(cluster: MemoryCluster, author: Author) -> None:
    kept = await put(author, "a")
    cluster.on_deliver = lambda message: 0.2 if message.seq > kept else 0.0
    putting = asyncio.create_task(put(author, "b"))
    await settled(lambda: cluster.log.last_seq > kept)
    cluster.truncate(kept)
    cluster.on_deliver = None
    seq = await putting
    assert author.feed.live.state.artifacts[h.T, h.ArtifactId("b")].born == seq
    assert cluster.log.get(seq) is not None
    await same_as_the_log(cluster, author.feed.live.state)


async def test_the_running_number_goes_back_with_the_log(cluster: MemoryCluster, author: Author) -> None:
    artifact = h.ArtifactId("a")
    await put(author, "a")
    await author.say(lambda n: h.added(n, artifact, tier=h.Tier.DISK), deadline=soon())
    kept = cluster.log.last_seq
    for tier in (h.Tier.VRAM, h.Tier.SOURCE):
        await author.say(lambda n, tier=tier: h.added(n, artifact, tier=tier), deadline=soon())
    cluster.truncate(kept)
    await author.say(lambda n: h.added(n, artifact, tier=h.Tier.VRAM), deadline=soon())
    state = author.feed.live.state
    assert (state.gaps, state.sessions[h.W1].number) == (0, 2)
    await same_as_the_log(cluster, state)


async def test_a_fact_in_the_lane_that_the_log_lost_is_said_again(cluster: MemoryCluster, author: Author) -> None:
    artifact = h.ArtifactId("a")
    kept = await put(author, "a")
    cluster.on_deliver = lambda message: 0.2 if message.seq > kept else 0.0
    saying = asyncio.create_task(author.say(lambda n: h.added(n, artifact, tier=h.Tier.DISK), deadline=soon()))
    await settled(lambda: cluster.log.last_seq > kept)
    cluster.truncate(kept)
    cluster.on_deliver = None
    await saying
    state = author.feed.live.state
    assert any(replica.tier is h.Tier.DISK for replica in state.artifacts[h.T, artifact].replicas.values())
    assert state.gaps == 0
    await same_as_the_log(cluster, state)


async def test_who_lost_its_session_waits_for_it_to_be_open_again(cluster: MemoryCluster, author: Author) -> None:
    await put(author, "a")
    cluster.lose()
    putting = asyncio.create_task(put(author, "b"))
    saying = asyncio.create_task(author.say(lambda n: h.added(n, h.ArtifactId("b"), tier=h.Tier.DISK), deadline=soon()))
    await settled(lambda: author.feed.losses == 1 and not author.feed.unsure)
    await asyncio.sleep(0.05)
    assert not putting.done()
    await author.decide(lambda _: h.opened(h.W1, h.FIRST), deadline=soon())
    await putting
    await asyncio.gather(saying, return_exceptions=True)
    assert author.feed.live.state.gaps == 0


async def test_a_loss_while_the_stream_is_away_is_found_when_it_is_back(cluster: MemoryCluster, author: Author) -> None:
    kept = await put(author, "a")
    lost = await put(author, "b")
    async with feed(cluster) as reading:
        cluster.pause()
        cluster.truncate(kept)
        with pytest.raises(TimeoutError):
            await reading.checked(deadline=Deadline(0.1))
        assert (reading.losses, reading.live.position) == (0, lost)
        cluster.resume()
        await reading.checked(deadline=soon())
        assert (reading.losses, reading.live.position) == (1, kept)
