"""What a home says arrives once, in order and under its grant, whatever the bus does; and is found again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress

import numpy as np
import numpy.typing as npt
import pytest
from blake3 import blake3

from tensorbus.bus import Appended, Fault, MemoryBus, MemoryCluster, append, put_blob
from tensorbus.clock import Deadline
from tensorbus.errors import DeadlineExceededError, FencedError, UnavailableError
from tensorbus.events import (
    MSG_ID,
    RECORD,
    Headers,
    LeaseGranted,
    PageHolder,
    PageOp,
    PagesChanged,
    ShardSnapshotTaken,
    page_records,
)
from tensorbus.feeds import PageLog, decode_pages, replay_shard
from tensorbus.ids import Incarnation, SystemIds, WorkerId, new_event_id
from tensorbus.lifecycle import PAGES_FOLD_VERSION, ShardState, dump_shard

IDS = SystemIds()
H1, H2 = WorkerId("h1"), WorkerId("h2")
LIFE = Incarnation("0" * 16)
W1 = PageHolder(worker=WorkerId("w1"), incarnation=LIFE)
NAMES = ("0" * 64,)
SHARD = 7


def soon(seconds: float = 20.0) -> Deadline:
    return Deadline(seconds, what="a step of a test")


def records(count: int, *, first: int = 0, op: PageOp = PageOp.ADD) -> npt.NDArray[np.void]:
    out = np.zeros(count, RECORD)
    out["key"] = [blake3((first + n).to_bytes(8, "little")).digest() for n in range(count)]
    out["op"], out["slot"] = op, np.arange(first, first + count)
    return out


def headers(author: WorkerId, expected: int, *, token: int = 0) -> Headers:
    return Headers(event_id=new_event_id(IDS), author=author, incarnation=LIFE, expected=expected, token=token)


@pytest.fixture(params=["one server", "three servers"])
async def cluster(request: pytest.FixtureRequest) -> MemoryCluster:
    return MemoryCluster(replicated=request.param == "three servers")


@pytest.fixture
async def bus(cluster: MemoryCluster) -> AsyncIterator[MemoryBus]:
    bus = MemoryBus(cluster)
    yield bus
    await bus.close()


async def grant(bus: MemoryBus, author: WorkerId = H1, *, after: int = 0) -> int:
    outcome = await append(bus.pages, LeaseGranted(shard=SHARD), headers(author, after), deadline=soon())
    assert isinstance(outcome, Appended)
    return outcome.seq


class Home:
    """A log that runs, and whether it was told that it is over."""

    def __init__(self, bus: MemoryBus, token: int, *, number: int = 0, author: WorkerId = H1, **options: int) -> None:
        self.fenced = 0
        self.log = PageLog(
            bus.pages,
            shard=SHARD,
            token=token,
            number=number,
            author=author,
            incarnation=LIFE,
            ids=IDS,
            on_fenced=self._on_fenced,
            **options,
        )

    def _on_fenced(self) -> None:
        self.fenced += 1

    @asynccontextmanager
    async def running(self) -> AsyncIterator[PageLog]:
        task = asyncio.create_task(self.log.run())
        try:
            yield self.log
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    def put(self, count: int, *, first: int = 0) -> int:
        return self.log.put(records(count, first=first), NAMES, (W1,))


async def stored(bus: MemoryBus) -> list[PagesChanged]:
    found = bus.cluster.pages.after(0, f"tb.shard.{SHARD}.*", count_max=10_000)
    return [fact for message in found if isinstance(fact := decode_pages(message).event, PagesChanged)]


async def state_of(bus: MemoryBus) -> ShardState:
    last = await bus.pages.last_on(bus.subjects.shard(SHARD), deadline=soon())
    assert last is not None
    return await replay_shard(bus.pages, SHARD, upto=last.seq, deadline=soon())


async def test_what_is_put_at_once_is_one_message(bus: MemoryBus) -> None:
    home = Home(bus, await grant(bus))
    async with home.running() as log:
        for n in range(10):
            home.put(80, first=80 * n)
        await log.flush(deadline=soon())
        [batch] = await stored(bus)
        assert page_records(batch)["slot"].tolist() == list(range(800))
        assert (batch.number, log.number, log.waiting) == (1, 1, 0)
        home.put(5000, first=1000)
        await log.flush(deadline=soon())
    facts = await stored(bus)
    assert [fact.number for fact in facts] == list(range(1, len(facts) + 1))
    assert len(facts) == 1 + 5
    assert len((await state_of(bus)).pages) == 5800


async def test_one_append_is_in_flight(bus: MemoryBus, cluster: MemoryCluster) -> None:
    home, flying, most = Home(bus, await grant(bus)), 0, 0
    inner = bus.publish

    async def publish(*args: object, **kwargs: object) -> int:
        nonlocal flying, most
        flying += 1
        most = max(most, flying)
        try:
            return await inner(*args, **kwargs)  # type: ignore[arg-type]
        finally:
            flying -= 1

    bus.publish = publish  # type: ignore[method-assign]
    async with home.running() as log:
        for n in range(20):
            home.put(1000, first=1000 * n)
        await log.flush(deadline=soon())
    assert most == 1


async def test_a_newer_grant_ends_it_once_and_for_all(bus: MemoryBus) -> None:
    token = await grant(bus)
    home = Home(bus, token)
    async with home.running() as log:
        home.put(3)
        await log.flush(deadline=soon())
        newer = await grant(bus, H2, after=token)
        upto = home.put(3, first=3)
        with pytest.raises(FencedError) as caught:
            await log.logged(upto, deadline=soon())
        assert caught.value.details["in_force"] == newer
        with pytest.raises(FencedError):
            await log.logged(home.put(1), deadline=soon())
        assert home.fenced == 1
    assert len((await state_of(bus)).pages) == 3


@pytest.mark.parametrize("fault", [Fault(lose_reply=True), Fault(lose_request=True), Fault(repeat=True)])
async def test_a_batch_of_unknown_outcome_is_there_once(bus: MemoryBus, cluster: MemoryCluster, fault: Fault) -> None:
    home, hurt = Home(bus, await grant(bus)), 0

    def once(subject: str, _headers: Mapping[str, str]) -> Fault:
        nonlocal hurt
        hurt += subject.startswith("tb.shard")
        return fault if hurt <= 1 and subject.startswith("tb.shard") else Fault()

    cluster.on_publish = once
    async with home.running() as log:
        home.put(5)
        await log.flush(deadline=soon())
        assert log.trouble is None
        home.put(5, first=5)
        await log.flush(deadline=soon())
    assert [fact.number for fact in await stored(bus)] == [1, 2]
    assert len((await state_of(bus)).pages) == 10


async def test_a_batch_that_was_stored_before_the_shard_was_lost_is_known_to_be(
    bus: MemoryBus, cluster: MemoryCluster
) -> None:
    token = await grant(bus)
    home = Home(bus, token)
    async with home.running() as log:
        bus.cluster.on_publish = lambda subject, _: Fault(lose_reply=subject.startswith("tb.shard"))
        upto = home.put(5)
        async with soon().scope():
            while not await stored(bus):
                await asyncio.sleep(0.001)
        newer = MemoryBus(cluster)
        cluster.on_publish = None
        await grant(newer, H2, after=token)
        await log.logged(upto, deadline=soon())
        assert home.fenced == 0, "it said nothing since"
        await newer.close()


async def test_the_bus_may_be_away_for_a_while(bus: MemoryBus, cluster: MemoryCluster) -> None:
    home = Home(bus, await grant(bus))
    async with home.running() as log:
        home.put(5)
        await log.flush(deadline=soon())
        bus.disconnect()
        upto = home.put(5, first=5)
        with pytest.raises(DeadlineExceededError):
            await log.logged(upto, deadline=Deadline(0.05))
        bus.reconnect()
        await log.logged(upto, deadline=soon())
    assert [fact.number for fact in await stored(bus)] == [1, 2]


async def test_a_stream_that_lost_the_last_batch_gets_nothing_more(bus: MemoryBus, cluster: MemoryCluster) -> None:
    """Else there would be a gap for ever: the shard must be granted again, and all said anew."""
    home = Home(bus, await grant(bus))
    async with home.running() as log:
        for n in range(3):
            home.put(5, first=5 * n)
            await log.flush(deadline=soon())
        cluster._die()
        cluster.pages.truncate(log.position - 1)
        async with soon().scope():
            while log.ended is None:
                await asyncio.sleep(0.001)
        assert isinstance(log.ended, UnavailableError)
        with pytest.raises(UnavailableError, match="tail"):
            await log.logged(home.put(5), deadline=soon())
    assert home.fenced == 1
    assert [fact.number for fact in await stored(bus)] == [1, 2]


async def test_a_stream_without_the_grant_gets_nothing_more(bus: MemoryBus, cluster: MemoryCluster) -> None:
    home = Home(bus, await grant(bus))
    async with home.running() as log:
        cluster.lose()
        async with soon().scope():
            while log.ended is None:
                await asyncio.sleep(0.001)
    assert home.fenced == 1


async def test_it_says_when_the_bus_must_catch_up_first(bus: MemoryBus) -> None:
    home = Home(bus, await grant(bus), waiting_max=10)
    home.put(9)
    assert not home.log.full
    home.put(1, first=9)
    assert home.log.full
    async with home.running() as log:
        await log.flush(deadline=soon())
        assert not log.full


async def test_what_is_not_said_when_it_ends_fails(bus: MemoryBus, cluster: MemoryCluster) -> None:
    home = Home(bus, await grant(bus))
    cluster.pause()
    async with home.running():
        waiting = asyncio.create_task(home.log.logged(home.put(3), deadline=soon()))
        await asyncio.sleep(0)
    with pytest.raises(UnavailableError, match="nothing more"):
        await waiting


# -- made from the stream ---------------------------------------------------------------------------------------------


async def take_snapshot(bus: MemoryBus, token: int, *, author: WorkerId = H1, fence: int | None = None) -> int:
    state = await state_of(bus)
    blob = await put_blob(bus.pages, b"".join(dump_shard(state)), author=author, deadline=soon())
    fact = ShardSnapshotTaken(
        shard=SHARD, upto=state.seq, fold=PAGES_FOLD_VERSION, state_hash=state.state_hash, blob=blob
    )
    said = headers(author, token if fence is None else fence, token=token)
    outcome = await append(bus.pages, fact, said, deadline=soon())
    assert isinstance(outcome, Appended)
    return state.seq


async def said(home: Home, first: int, count: int = 5) -> None:
    home.put(count, first=first)
    await home.log.flush(deadline=soon())


async def test_a_shard_begins_at_its_snapshot_and_is_the_same(bus: MemoryBus) -> None:
    token = await grant(bus)
    home = Home(bus, token)
    async with home.running():
        await said(home, 0)
        await said(home, 5)
        upto = await take_snapshot(bus, token)
        await said(home, 10)
    whole = await state_of(bus)
    await bus.pages.purge(f"tb.shard.{SHARD}.*", upto=upto, deadline=soon())
    state = await state_of(bus)
    assert (state.state_hash, state.gaps, len(state.pages)) == (whole.state_hash, 0, 15)


async def test_a_batch_that_was_purged_is_not_lost(bus: MemoryBus) -> None:
    token = await grant(bus)
    home = Home(bus, token)
    async with home.running() as log:
        await said(home, 0)
        upto = await take_snapshot(bus, token)
        await bus.pages.purge(f"tb.shard.{SHARD}.*", upto=upto, keep_last=False, deadline=soon())
        bus.disconnect()
        bus.reconnect()
        await said(home, 5)
        assert (log.number, log.ended) == (2, None)
    assert len((await state_of(bus)).pages) == 10


async def test_a_snapshot_of_who_is_not_the_home_is_passed_over(bus: MemoryBus) -> None:
    """The server stores it, as a fence header is chosen by who writes it."""
    token = await grant(bus)
    home = Home(bus, token)
    async with home.running():
        await said(home, 0)
        await take_snapshot(bus, token)
        await said(home, 5)
        newer = await grant(bus, H2, after=token)
        await take_snapshot(bus, token, fence=newer)
        later = Home(bus, newer, number=2, author=H2)
        async with later.running():
            await said(later, 10)
    state = await state_of(bus)
    assert (state.number, state.gaps, len(state.pages)) == (3, 0, 15)
    assert state.snapshot is not None and not state.snapshot.confirmed
    assert state.dropped == {"fenced": 1}


async def test_no_state_begins_with_a_snapshot_that_what_follows_cannot_vouch_for(bus: MemoryBus) -> None:
    token = await grant(bus)
    home = Home(bus, token)
    async with home.running():
        await said(home, 0)
    newer = await grant(bus, H2, after=token)
    lie = await state_of(bus)
    lie.pages.add(records(1, first=99))
    blob = await put_blob(bus.pages, b"".join(dump_shard(lie)), author=H1, deadline=soon())
    fact = ShardSnapshotTaken(shard=SHARD, upto=newer, fold=PAGES_FOLD_VERSION, state_hash=lie.state_hash, blob=blob)
    assert isinstance(await append(bus.pages, fact, headers(H1, newer, token=newer), deadline=soon()), Appended)
    assert len((await replay_shard(bus.pages, SHARD, upto=newer, deadline=soon())).pages) == 5
    assert len((await state_of(bus)).pages) == 5


async def test_a_snapshot_without_its_body_is_passed_over(bus: MemoryBus) -> None:
    token = await grant(bus)
    home = Home(bus, token)
    async with home.running():
        await said(home, 0)
        await take_snapshot(bus, token)
        last = await bus.pages.last_seq(deadline=soon())
        await bus.pages.purge("tb.pblob.*.*.*", upto=last, keep_last=False, deadline=soon())
        await said(home, 5)
    assert len((await state_of(bus)).pages) == 10


async def test_what_the_stream_lacks_is_said_and_not_looked_for_for_ever(bus: MemoryBus) -> None:
    token = await grant(bus)
    home = Home(bus, token)
    async with home.running():
        await said(home, 0)
        await said(home, 5)
        first = await bus.pages.first_from(f"tb.shard.{SHARD}.*", 0, deadline=soon())
        assert first is not None
        await bus.pages.purge(f"tb.shard.{SHARD}.*", upto=first.seq, keep_last=False, deadline=soon())
    state = await state_of(bus)
    assert (state.gaps, state.degraded, len(state.pages)) == (1, True, 5)


async def test_what_cannot_be_read_under_the_lease_fences(bus: MemoryBus) -> None:
    token = await grant(bus)
    home = Home(bus, token)
    async with home.running():
        await said(home, 0)
        await bus.pages.publish("tb.lease.7.h9", b"?", headers={MSG_ID: "x"}, deadline=soon())
        upto = home.put(1, first=5)
        with pytest.raises(FencedError):
            await home.log.logged(upto, deadline=soon())
    state = await state_of(bus)
    assert state.lease is not None and (state.lease.holder, state.lease.incarnation) == ("h9", "")
