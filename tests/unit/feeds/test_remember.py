"""What counts as a loss of the log's tail, and what does not."""

from __future__ import annotations

import pytest

from tensorbus.bus import MemoryBus, MemoryCluster
from tensorbus.feeds._remember import Found, Loss, Remembered, check, judge, newest_truncation, remember
from tensorbus.ids import EventId
from tests.unit.feeds.voices import keeper, soon, voice
from tests.unit.lifecycle import history as h

MINE, ANOTHER = EventId("mine"), EventId("another")
SAME, OTHER, LATER = Remembered(50, MINE, 7), Remembered(50, ANOTHER, 7), Remembered(50, MINE, 8)
FACT, SNAPSHOT = Remembered(50, MINE, 7), Remembered(50, MINE, 7, snapshot=True)


@pytest.mark.parametrize(
    ("remembered", "found", "lost"),
    [
        (FACT, Found(SAME, 60), False),
        (FACT, Found(SAME, 50, purged=55), False),
        (FACT, Found(LATER, 60), True),
        (Remembered(50, MINE, 0), Found(LATER, 60), False),
        (FACT, Found(None, 60, purged=50), False),
        (FACT, Found(None, 60, purged=49), True),
        (FACT, Found(None, 40), True),
        (FACT, Found(None, 49, purged=10), True),
        (FACT, Found(OTHER, 60), True),
        (FACT, Found(OTHER, 60, purged=55), True),
        (FACT, Found(None, 60, purged=40, snapshot=58), True),
        (SNAPSHOT, Found(None, 60, purged=40, snapshot=58), False),
        (SNAPSHOT, Found(None, 60, purged=40, snapshot=50), True),
        (SNAPSHOT, Found(None, 60, purged=40, snapshot=41), True),
    ],
)  # fmt: skip
def test_what_is_lost(remembered: Remembered, found: Found, lost: bool) -> None:
    assert judge(remembered, found) == (Loss(remembered, found.last) if lost else None)


async def test_a_message_is_read_again() -> None:
    cluster = MemoryCluster()
    async with voice(cluster) as author:
        bus, seq = author.feed.bus, cluster.log.last_seq
        message = await bus.get(seq, deadline=soon())
        assert message is not None
        kept = remember(message)
        assert await check(bus, kept, deadline=soon()) is None
        cluster.truncate(seq - 1)
        loss = await check(bus, kept, deadline=soon())
        assert loss == Loss(kept, seq - 1)


async def test_what_a_purge_took_is_no_loss() -> None:
    cluster = MemoryCluster()
    async with keeper(cluster) as store:
        artifact = h.ArtifactId("a")
        await store.author.decide(lambda _: h.put(artifact, None), deadline=soon())
        seq, _ = await store.author.decide(lambda _: h.bound("k", artifact), deadline=soon())
        message = await store.bus.get(seq, deadline=soon())
        await store.author.decide(lambda _: h.unbound("k", artifact), deadline=soon())
        await store.announce(await store.snapshot())
        assert message is not None
        cluster.log.remove(seq)
        assert await check(store.bus, remember(message), deadline=soon()) is None


async def test_the_log_knows_its_own_losses() -> None:
    cluster = MemoryCluster()
    assert await newest_truncation(MemoryBus(cluster), deadline=soon()) is None
