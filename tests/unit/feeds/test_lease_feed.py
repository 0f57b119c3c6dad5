"""Who has which shard, as it is followed on the stream of pages."""

from __future__ import annotations

import asyncio

from tensorbus.bus import Appended, MemoryBus, MemoryCluster, append
from tensorbus.clock import Deadline
from tensorbus.events import Headers, LeaseGranted
from tensorbus.feeds import LeaseFeed, ShardGrant
from tensorbus.ids import Incarnation, SystemIds, WorkerId, new_event_id

IDS = SystemIds()


def soon() -> Deadline:
    return Deadline(20, what="a step of a test")


async def grant(bus: MemoryBus, shard: int, author: str, *, after: int = 0) -> int:
    headers = Headers(
        event_id=new_event_id(IDS), author=WorkerId(author), incarnation=Incarnation("i-" + author), expected=after
    )
    outcome = await append(bus.pages, LeaseGranted(shard=shard), headers, deadline=soon())
    assert isinstance(outcome, Appended)
    return outcome.seq


async def test_the_last_grant_of_each_shard_is_known_and_changes_are_told() -> None:
    bus = MemoryBus(MemoryCluster())
    first = await grant(bus, 1, "h1")
    feed = LeaseFeed(bus.pages)
    told: list[tuple[ShardGrant, ...]] = []
    async with feed.running(deadline=soon()):
        assert (feed.leases[1].holder, feed.leases[1].incarnation, feed.leases[1].token) == ("h1", "i-h1", first)
        with feed.followed(told.append):
            second = await grant(bus, 1, "h2", after=first)
            other = await grant(bus, 5, "h1")
            await feed.reached(other, deadline=soon())
        assert {shard: lease.token for shard, lease in feed.leases.items()} == {1: second, 5: other}
        assert [lease.token for changed in told for lease in changed] == [second, other]
    await bus.close()


async def test_a_message_that_is_no_grant_takes_the_shard_all_the_same() -> None:
    bus = MemoryBus(MemoryCluster())
    token = await grant(bus, 1, "h1")
    odd = await bus.publish("tb.lease.1.h9", b"?", headers={"Nats-Msg-Id": "odd"}, deadline=soon())
    async with LeaseFeed(bus.pages).running(deadline=soon()) as feed:
        assert odd > token
        assert (feed.leases[1].holder, feed.leases[1].incarnation, feed.leases[1].token) == ("h9", "", odd)
    await bus.close()


async def test_grants_that_the_stream_lost_are_forgotten() -> None:
    cluster = MemoryCluster()
    bus = MemoryBus(cluster)
    kept = await grant(bus, 1, "h1")
    told: list[tuple[ShardGrant, ...]] = []
    async with LeaseFeed(bus.pages).running(deadline=soon()) as feed:
        await feed.reached(await grant(bus, 2, "h2"), deadline=soon())
        with feed.followed(told.append):
            cluster.pages.truncate(kept)
            bus.disconnect()
            bus.reconnect()
            async with soon().scope():
                while () not in told or 1 not in feed.leases:
                    await asyncio.sleep(0.01)
        assert {shard: lease.token for shard, lease in feed.leases.items()} == {1: kept}
    await bus.close()
