"""A reader begins at a snapshot, and begins anew when a purge overtook it or facts are missing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from blake3 import blake3

from tensorbus.bus import MemoryBus, MemoryCluster
from tensorbus.clock import Deadline
from tensorbus.errors import CorruptError, NotFoundError, TensorbusError, UnavailableError
from tensorbus.feeds import DirectoryFeed
from tensorbus.lifecycle import SNAPSHOT_FORMAT, Directory, Touched, dump, rules
from tests.unit.feeds.voices import Keeper, Stored, feed, keeper, settled, soon, voice
from tests.unit.lifecycle import history as h


@pytest.fixture
def cluster() -> MemoryCluster:
    return MemoryCluster()


@pytest.fixture
async def store(cluster: MemoryCluster) -> AsyncIterator[Keeper]:
    async with keeper(cluster) as made:
        yield made


async def put(store: Keeper, *names: str) -> int:
    """Put artifacts and name them; the last sequence."""
    seq = 0
    for name in names:
        fact = h.put(h.ArtifactId(name), None)
        await store.author.decide(lambda state, fact=fact: rules.birth(state, fact), deadline=soon())
        bound = h.bound(f"key-{name}", h.ArtifactId(name))
        seq, _ = await store.author.decide(lambda _, bound=bound: bound, deadline=soon())
    return seq


async def replay(cluster: MemoryCluster) -> Directory:
    """Everything that the log has, folded from nothing."""
    async with feed(cluster) as reading:
        assert reading.snapshot_used is None
        return reading.live.state


def disconnect(reading: DirectoryFeed) -> MemoryBus:
    assert isinstance(reading.bus, MemoryBus)
    reading.bus.disconnect()
    return reading.bus


async def purged(store: Keeper) -> Stored:
    """Take a snapshot, and take what it holds off the log."""
    artifact = next(record.artifact for record in store.state.artifacts.values() if record.live)
    for fact in (h.bound("passing", artifact), h.unbound("passing", artifact)):
        await store.author.decide(lambda _, fact=fact: fact, deadline=soon())
    stored = await store.snapshot()
    await store.announce(stored)
    assert await store.purge(stored.fact.upto) > 0
    return stored


# -- start --------------------------------------------------------------------------------------------------------


async def test_a_start_from_a_snapshot_gives_the_state_of_the_whole_log(cluster: MemoryCluster, store: Keeper) -> None:
    await put(store, "a", "b")
    whole = await replay(cluster)
    stored = await store.snapshot()
    await put(store, "c")
    async with feed(cluster) as reading:
        assert reading.snapshot_used == stored.fact.upto == whole.seq
        assert reading.live.state.hash() == reading.live.state.full_hash() == store.state.hash()
        reading.live.state.validate()
        await put(store, "d")
        await reading.reached(store.state.seq, deadline=soon())
        assert reading.live.state.hash() == store.state.hash()
        assert not reading.degraded
        assert reading.rebuilds == 0


async def test_a_start_after_a_purge_needs_only_the_rest(cluster: MemoryCluster, store: Keeper) -> None:
    await put(store, "a", "b")
    stored = await purged(store)
    await put(store, "c")
    async with feed(cluster) as reading:
        assert reading.snapshot_used == stored.fact.upto
        assert reading.live.state.hash() == store.state.hash()


async def test_the_newest_snapshot_is_taken(cluster: MemoryCluster, store: Keeper) -> None:
    await put(store, "a")
    await purged(store)
    await put(store, "b")
    newest = await store.snapshot()
    async with feed(cluster) as reading:
        assert reading.snapshot_used == newest.fact.upto
        assert reading.live.state.hash() == store.state.hash()


def without_blob(cluster: MemoryCluster, stored: Stored) -> None:
    cluster.log.purge(f"{cluster.subjects.prefix}.blob.{stored.fact.blob.digest}.>", upto=1 << 62, keep_last=False)


def sealed(body: bytes) -> bytes:
    """With a trailer that fits what it says now."""
    lines = body.splitlines(keepends=True)
    said = b"".join(lines[:-1])
    return said + f'["end",{len(lines) - 1},"{blake3(said).hexdigest()}"]\n'.encode()


async def unusable(cluster: MemoryCluster, store: Keeper, how: str) -> Stored:
    """A snapshot that cannot be used, the newest one."""
    written = b"".join(dump(store.state))
    if how == "missing":
        stored = await store.snapshot()
        without_blob(cluster, stored)
        return stored
    if how == "corrupt":
        return await store.snapshot(written[:-200] + b"x" + written[-199:])
    if how == "newer fold":
        return await store.snapshot(sealed(written.replace(b'"fold":1', b'"fold":2')))
    if how == "newer format":
        now, newer = (f'"format":{number}'.encode() for number in (SNAPSHOT_FORMAT, SNAPSHOT_FORMAT + 1))
        return await store.snapshot(sealed(written.replace(now, newer)))
    assert how == "another state"
    return await store.snapshot(b"".join(dump(Directory(cluster.subjects))))


WAYS = [
    ("missing", NotFoundError, "not in the log"),
    ("corrupt", CorruptError, "corrupt"),
    ("newer fold", UnavailableError, "upgrade"),
    ("newer format", UnavailableError, "upgrade"),
    ("another state", CorruptError, "another state"),
]


@pytest.mark.parametrize(("how", "error", "text"), WAYS)
async def test_without_a_usable_snapshot_a_whole_log_is_replayed(
    cluster: MemoryCluster, store: Keeper, how: str, error: type[TensorbusError], text: str,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    await put(store, "a")
    await unusable(cluster, store, how)
    async with feed(cluster) as reading:
        assert reading.snapshot_used is None
        assert reading.live.state.hash() == store.state.hash()
    assert "cannot be used" in caplog.text
    assert text in caplog.text


@pytest.mark.parametrize(("how", "error", "text"), WAYS)
async def test_without_a_usable_snapshot_a_purged_log_is_an_error_that_says_so(
    cluster: MemoryCluster, store: Keeper, how: str, error: type[TensorbusError], text: str
) -> None:
    await put(store, "a")
    stored = await unusable(cluster, store, how)
    await store.announce(stored)
    with pytest.raises(error, match=f"purged up to {stored.fact.upto} and no snapshot can be used.*{text}"):
        async with feed(cluster):
            pass


async def test_a_purged_log_without_any_snapshot_is_an_error(cluster: MemoryCluster, store: Keeper) -> None:
    await put(store, "a")
    stored = await purged(store)
    cluster.log.remove(stored.seq)
    with pytest.raises(NotFoundError, match="no snapshot can be used"):
        async with feed(cluster):
            pass


async def test_the_snapshot_that_the_purge_named_serves_if_the_newest_does_not(
    cluster: MemoryCluster, store: Keeper
) -> None:
    await put(store, "a")
    stored = await purged(store)
    await put(store, "b")
    await store.snapshot(b"no snapshot\n")
    async with feed(cluster) as reading:
        assert reading.snapshot_used == stored.fact.upto
        assert reading.live.state.hash() == store.state.hash()


async def test_a_snapshot_older_than_the_purge_is_not_taken(cluster: MemoryCluster, store: Keeper) -> None:
    await put(store, "a")
    old = await store.snapshot()
    await put(store, "b")
    newer = await purged(store)
    cluster.log.remove(newer.seq)
    assert cluster.log.get(old.seq) is not None
    with pytest.raises(NotFoundError, match="older"):
        async with feed(cluster):
            pass


# -- rebuild ------------------------------------------------------------------------------------------------------


async def test_a_reader_that_was_cut_off_during_a_purge_begins_anew(
    cluster: MemoryCluster, store: Keeper, caplog: pytest.LogCaptureFixture
) -> None:
    await put(store, "a", "b")
    async with feed(cluster) as reading:
        await reading.reached(store.state.seq, deadline=soon())
        before, heard = reading.live.state, dict[Touched, None]()
        bus = disconnect(reading)
        await store.author.decide(lambda state: h.destroyed(h.ArtifactId("a")), deadline=soon())
        await put(store, "c")
        stored = await purged(store)
        seq = await put(store, "d")
        waiting = asyncio.create_task(reading.reached(seq, deadline=soon()))
        with reading.live.followed(lambda _, touched: heard.update(dict.fromkeys(touched))):
            bus.reconnect()
            await waiting
            await settled(lambda: not reading.rebuilding)
        assert reading.live.state is before
        assert reading.live.state.hash() == reading.live.state.full_hash() == store.state.hash()
        reading.live.state.validate()
        assert (reading.rebuilds, reading.snapshot_used, reading.degraded) == (1, stored.fact.upto, False)
        assert {touched.name for touched in heard} >= {"a", "c", "d", "key-a", "key-c", "key-d"}
        assert "is rebuilt" in caplog.text
        await put(store, "e")
        await reading.reached(store.state.seq, deadline=soon())
        assert reading.live.state.hash() == store.state.hash()


async def test_a_reader_that_is_up_to_date_has_no_part_in_a_purge(cluster: MemoryCluster, store: Keeper) -> None:
    async with feed(cluster, purge_delay_s=0.1) as reading:
        for name in "abc":
            await put(store, name)
            await purged(store)
            await reading.reached(store.state.seq, deadline=soon())
            disconnect(reading).reconnect()
            await asyncio.sleep(0.12)
        await put(store, "d")
        await reading.reached(store.state.seq, deadline=soon())
        assert reading.rebuilds == 0
        assert reading.live.state.hash() == store.state.hash()


async def test_a_reader_that_lags_looks_before_it_folds_on(cluster: MemoryCluster, store: Keeper) -> None:
    """Its connection holds, and nothing tells it that what it would have read next is gone."""
    async with feed(cluster, purge_delay_s=0.1) as reading:
        cluster.on_deliver = lambda message: 0.3 if message.subject.startswith("tb.ev.artifact") else 0.0
        async with voice(cluster, h.W1) as author:
            seen = reading.live.state.seq
            await author.decide(lambda state: rules.birth(state, h.put()), deadline=soon())
            await put(store, "a")
            stored = await store.snapshot()
            await store.announce(stored)
            if reading.live.state.seq < stored.fact.upto:
                await store.purge(stored.fact.upto)
            assert seen < stored.fact.upto
            cluster.on_deliver = None
            await reading.reached(store.state.seq, deadline=soon())
            assert reading.live.state.hash() == store.state.hash()


async def test_a_position_inside_a_purge_does_not_count_as_read(cluster: MemoryCluster, store: Keeper) -> None:
    await put(store, "a")
    async with feed(cluster) as reading:
        here = reading.live.state.seq
        bus = disconnect(reading)
        for _ in range(3):
            await store.author.decide(lambda _: h.bound("k", h.ArtifactId("a")), deadline=soon())
            await store.author.decide(lambda _: h.unbound("k", h.ArtifactId("a")), deadline=soon())
        await purged(store)
        cluster.on_deliver = lambda message: 0.2
        bus.reconnect()
        await reading.reached(here + 2, deadline=soon())
        assert reading.live.state.hash() == store.state.hash()
        await settled(lambda: reading.rebuilds == 1)


async def test_what_became_of_facts_is_known_from_the_snapshot_on(cluster: MemoryCluster, store: Keeper) -> None:
    await put(store, "a")
    async with feed(cluster) as reading:
        bus = disconnect(reading)
        stored = await purged(store)
        async with voice(cluster, h.W1) as author:
            kept, _ = await author.decide(lambda state: rules.birth(state, h.put()), deadline=soon())
            second = voice(cluster, h.W1, h.SECOND)
            async with second:
                dropped = cluster.log.store("tb.ev.replica.x.w1", b"{}", {"Tb-Type": "FromTheFuture"})
                cluster.wake()
                bus.reconnect()
                await settled(lambda: reading.rebuilds == 1)
                await reading.reached(dropped, deadline=soon())
        assert reading.live.verdict(kept).kept
        assert reading.live.verdict(dropped).why == "unknown"
        with pytest.raises(UnavailableError, match="not known"):
            reading.live.verdict(stored.fact.upto)


async def test_a_reader_that_cannot_begin_anew_says_why_and_ends(cluster: MemoryCluster, store: Keeper) -> None:
    await put(store, "a")
    async with feed(cluster) as reading:
        bus = disconnect(reading)
        await put(store, "b")
        stored = await purged(store)
        without_blob(cluster, stored)
        bus.reconnect()
        with pytest.raises(NotFoundError, match="no snapshot can be used"):
            await asyncio.wait_for(reading.failed(), 10)
        with pytest.raises(NotFoundError, match="no snapshot can be used"):
            await reading.reached(store.state.seq, deadline=Deadline(10))


async def test_a_loss_during_a_rebuild_delays_it(cluster: MemoryCluster, store: Keeper) -> None:
    await put(store, "a", "b")
    async with feed(cluster) as reading:
        bus = disconnect(reading)
        await put(store, "c")
        await purged(store)
        bus.reconnect()
        while not reading.rebuilding:
            await asyncio.sleep(0)
        bus.disconnect()
        await asyncio.sleep(0.05)
        bus.reconnect()
        await reading.reached(store.state.seq, deadline=soon())
        assert reading.live.state.hash() == store.state.hash()


async def test_facts_that_were_missed_are_made_good_from_a_snapshot(cluster: MemoryCluster, store: Keeper) -> None:
    await put(store, "a")
    async with feed(cluster) as reading:
        bus = disconnect(reading)
        artifact = h.ArtifactId("a")
        first, _ = await store.author.say(lambda n: h.added(n, artifact, tier=h.Tier.DISK), deadline=soon())
        await store.snapshot()
        cluster.log.remove(first)
        bus.reconnect()
        seq, _ = await store.author.say(lambda n: h.added(n, artifact, tier=h.Tier.VRAM), deadline=soon())
        await settled(lambda: reading.rebuilds == 1)
        await reading.reached(seq, deadline=soon())
        assert reading.live.state.hash() == store.state.hash()
        assert (reading.live.state.gaps, reading.degraded) == (0, False)


async def test_facts_that_the_log_itself_lacks_are_looked_for_once(
    cluster: MemoryCluster, store: Keeper, caplog: pytest.LogCaptureFixture
) -> None:
    await put(store, "a")
    async with feed(cluster) as reading:
        for tier in (h.Tier.DISK, h.Tier.VRAM):
            make = lambda n, tier=tier: h.added(n + 1, h.ArtifactId("a"), tier=tier)  # noqa: E731
            await store.author.say(make, deadline=soon())
        await settled(lambda: reading.rebuilds == 1 and not reading.rebuilding)
        await put(store, "b")
        await reading.reached(store.state.seq, deadline=soon())
        assert (reading.rebuilds, reading.live.state.gaps, reading.degraded) == (1, 1, True)
        assert "stays degraded" in caplog.text
    async with feed(cluster) as late:
        await put(store, "c")
        await late.reached(store.state.seq, deadline=soon())
        assert (late.rebuilds, late.degraded) == (0, True)
