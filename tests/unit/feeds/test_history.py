"""The facts from any position on, whatever a store takes off the log meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import pytest

from tensorbus.bus import Archive, MemoryBus, MemoryCluster, append
from tensorbus.events import STORE_ROLE, Aggregate, Archived, Headers, LogPurged
from tensorbus.feeds import History, archived_files
from tensorbus.ids import SystemIds, new_event_id
from tensorbus.lifecycle import rules
from tests.unit.feeds.voices import Keeper, keeper, soon
from tests.unit.lifecycle import history as h

LOOK_S = 0.05


@pytest.fixture
def cluster() -> MemoryCluster:
    return MemoryCluster()


@pytest.fixture
def archive(tmp_path: Path) -> Archive:
    return Archive.open(str(tmp_path))


@pytest.fixture
async def store(cluster: MemoryCluster) -> AsyncIterator[Keeper]:
    async with keeper(cluster) as made:
        yield made


async def write(store: Keeper, stem: str) -> None:
    """Facts of which a purge takes most."""
    await store.author.decide(lambda state: rules.birth(state, h.put(h.ArtifactId(stem), None)), deadline=soon())
    for artifact in (h.ArtifactId(stem),) * 5:
        for fact in (h.bound("passing", artifact), h.unbound("passing", artifact)):
            await store.author.decide(lambda _, fact=fact: fact, deadline=soon())


async def purge(cluster: MemoryCluster, store: Keeper, archive: Archive) -> None:
    """Archive and purge all that there is. The announcement's delay has passed for everybody who reads."""
    done, upto = store.state.log.archived, store.state.seq
    messages = [m for m in cluster.log.after(done, "tb.ev.>", count_max=1 << 20) if m.seq <= upto]
    file = archive.write(messages, first=done + 1, last=upto)
    named = Archived(
        stream="TB", first=file.first, last=file.last, count=file.count, file=file.file, digest=file.digest,
        nbytes=file.nbytes,
    )  # fmt: skip
    await store.author.decide(lambda _: named, deadline=soon())
    stored = await store.snapshot()
    announced = LogPurged(stream="TB", upto=upto, snapshot=stored.seq, forget=0, delay_ns=1)
    await store.author.decide(lambda _: announced, deadline=soon())
    for kind in ("artifact", "key", "session"):
        for place in dict.fromkeys(m.subject.rpartition(".")[0] for m in messages if f".{kind}." in m.subject):
            await store.bus.purge(f"{place}.*", upto=upto, deadline=soon())


async def read_until(
    history: History, cluster: MemoryCluster, *, first_batch: asyncio.Event | None = None
) -> list[int]:
    seqs: list[int] = []
    async with soon().scope(), aclosing(history.batches(0)) as batches:
        async for batch in batches:
            if first_batch is not None and not seqs:
                await first_batch.wait()
            seqs += [message.seq for message in batch]
            if seqs[-1] == cluster.log.last_seq:
                return seqs
    raise AssertionError("the history has ended")


def everything(cluster: MemoryCluster) -> list[int]:
    """What the fold of an attentive reader has seen: every sequence that is a fact's."""
    return sorted(set(range(1_700_000_000_000_000, cluster.log.last_seq + 1)) - set(not_facts(cluster)))


def not_facts(cluster: MemoryCluster) -> list[int]:
    """Snapshots and their bodies, none of which these purges take."""
    return [m.seq for pattern in ("tb.snap.>", "tb.blob.>") for m in cluster.log.after(0, pattern, count_max=1 << 20)]


async def test_history_is_the_archive_and_then_the_log(cluster: MemoryCluster, store: Keeper, archive: Archive) -> None:
    await write(store, "a")
    await purge(cluster, store, archive)
    await write(store, "b")
    seqs = await read_until(History(MemoryBus(cluster), archive, look_s=LOOK_S), cluster)
    assert seqs == everything(cluster)


async def test_a_purge_while_the_archive_is_read_takes_nothing_from_it(
    cluster: MemoryCluster, store: Keeper, archive: Archive
) -> None:
    """Reading the archive may take longer than a purge's delay."""
    await write(store, "a")
    await purge(cluster, store, archive)
    go = asyncio.Event()
    history = History(MemoryBus(cluster), archive, look_s=LOOK_S)
    reading = asyncio.create_task(read_until(history, cluster, first_batch=go))
    await write(store, "b")
    await purge(cluster, store, archive)
    await write(store, "c")
    go.set()
    assert await reading == everything(cluster)


async def test_a_purge_that_overtakes_a_reading_sends_it_to_the_archive(
    cluster: MemoryCluster, store: Keeper, archive: Archive
) -> None:
    await write(store, "a")
    go = asyncio.Event()
    history = History(MemoryBus(cluster), archive, look_s=LOOK_S)
    reading = asyncio.create_task(read_until(history, cluster, first_batch=go))
    await asyncio.sleep(LOOK_S)
    await write(store, "b")
    await purge(cluster, store, archive)
    await write(store, "c")
    await asyncio.sleep(4 * LOOK_S)
    go.set()
    assert await reading == everything(cluster)


async def test_a_file_that_begins_within_another_was_dropped_by_the_fold_and_is_passed_over(
    cluster: MemoryCluster, store: Keeper
) -> None:
    """A keeper that did not hear of its own fact said it once more, of more facts."""
    files = [(1, 4), (5, 8), (5, 12), (9, 15)]
    for first, last in files:
        await append(store.bus, h.archived(first, last), store_headers(store), deadline=soon())
    found = [(file.first, file.last) for file in await archived_files(store.bus)]
    assert found == [(1, 4), (5, 8), (9, 15)]


def store_headers(store: Keeper) -> Headers:
    token = store.state.head(Aggregate("role", STORE_ROLE))
    return Headers(event_id=new_event_id(SystemIds()), author=h.W2, incarnation=h.FIRST, token=token, expected=token)
