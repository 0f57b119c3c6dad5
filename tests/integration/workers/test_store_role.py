"""The store role in a process of its own: rows, archive, snapshots and purges of a log that real workers write."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tensorbus as tb
from tensorbus.bus import Archive, Bus, NatsBus
from tensorbus.clock import Deadline
from tensorbus.events import Subjects
from tensorbus.feeds import archived_files, decode_all
from tensorbus.lifecycle import Directory
from tensorbus.projections import GlobalStore, RowTracker
from tensorbus.testing._processes import WorkerProgram
from tests.integration.conftest import Nats
from tests.integration.workers.raw import Raw

pytestmark = pytest.mark.integration
Start = Callable[..., WorkerProgram]

BUSY = {"archive_s": 0.3, "snapshot_facts": 20, "keep_facts": 10, "purge_delay_s": 1.0, "forget_s": 0.5}
"""A store that archives, stores and purges all the time."""


async def rows(bus: Any, sql: str, *params: object) -> list[dict[str, Any]]:
    async with await bus.query(sql, *params) as result:
        return await result.dicts()


async def until(ask: Callable[[], Awaitable[object]], what: str) -> None:
    async with Deadline(60, what=what).scope():
        while True:
            try:
                if await ask():
                    return
            except tb.UnavailableError:
                pass
            await asyncio.sleep(0.1)


async def purged(bus: Any) -> bool:
    found = await rows(bus, "SELECT count(*) AS n FROM purges WHERE type = 'PurgeCompleted'")
    return bool(found[0]["n"])


async def messages(bus: Bus, archive: Archive, *, upto: int) -> AsyncIterator[list[Any]]:
    """Everything that ever was, from the archive and what is left of the log."""
    seq = 0
    for batch in archive.read(await archived_files(bus), upto=upto):
        seq = batch[-1].seq
        yield decode_all(batch)
    async with bus.read(bus.subjects.facts, after=seq) as reader:
        while reader.position < upto:
            yield [recorded for recorded in decode_all(await anext(aiter(reader))) if recorded.seq <= upto]


async def folded(bus: Bus, archive: Archive, *, upto: int) -> Directory:
    state = Directory(bus.subjects)
    async for batch in messages(bus, archive, upto=upto):
        for recorded in batch:
            state.apply(recorded)
    return state


async def projected(path: Path, bus: Bus, archive: Archive, *, upto: int) -> str:
    """The hash of a store that is fed with all of history."""
    store, state = GlobalStore.open(path, subjects=bus.subjects), Directory(bus.subjects)
    tracker = RowTracker(state)
    async for batch in messages(bus, archive, upto=upto):
        store.apply([tracker.applied(recorded, state.apply(recorded)) for recorded in batch])
    told = store.hash()
    store.close()
    return told


@pytest.fixture
async def bus(nats: Nats) -> AsyncIterator[NatsBus]:
    made = await NatsBus.connect(nats.url, subjects=Subjects(nats.prefix))
    yield made
    await made.close()


@pytest.fixture
def archive(nats: Nats, home: Path) -> Archive:
    return Archive.open(str(home / "archive"), prefix=nats.prefix)


async def churn(bus: Any, count: int) -> None:
    for n in range(count):
        key = f"k/{n % 7}"
        made = await bus.put({"w": np.full(n + 1, n)}, key=key, rebind=True)
        if n % 3 == 0:
            await bus.unbind(key)
            await made.destroy()


async def test_what_is_purged_is_in_the_archive_and_every_state_can_be_told(
    start_worker: Start, bus: NatsBus, archive: Archive, home: Path
) -> None:
    worker = start_worker("basic", id="w")
    start_worker("gateway,store", id="s", **BUSY)
    async with tb.aconnect(home=home) as caller:
        await churn(caller, 40)
        middle = (await caller.stats())["directory"]["position"]
        before = await caller.state(at=middle)
        await until(lambda: purged(caller), "a purge")
        await churn(caller, 10)
        assert await caller.state(at=middle) == before, "a purge changes nothing about the past"
        facts = (await rows(caller, "SELECT count(*) AS n, count(DISTINCT seq) AS d FROM facts"))[0]
        assert facts["n"] == facts["d"]
    assert (await bus.log_state(deadline=Deadline(10))).messages < facts["n"], "the log is smaller than its history"
    async with await Raw.unix(worker.socket) as raw:
        now = (await raw.stats())["directory"]
    whole = await folded(bus, archive, upto=now["position"])
    assert (whole.seq, whole.hash()) == (now["position"], now["hash"])
    assert archive.verify(await archived_files(bus)).problems == []


async def test_replay_parity_a_store_fed_with_all_of_history_has_the_same_rows(
    start_worker: Start, bus: NatsBus, archive: Archive, home: Path
) -> None:
    start_worker("basic", id="w")
    store = start_worker("gateway,store", id="s", **BUSY)
    async with tb.aconnect(home=home) as caller:
        for _ in range(3):
            await churn(caller, 20)
            store.kill9()
            store = start_worker("gateway,store", id="s", **BUSY)
        await until(lambda: purged(caller), "a purge")
    assert store.stop() == 0
    was = GlobalStore.open(home / "store" / "s.duckdb", subjects=bus.subjects)
    position, told = was.position[0], was.hash()
    was.close()
    assert await projected(home / "anew.duckdb", bus, archive, upto=position) == told


async def test_a_store_is_made_anew_from_archive_and_log(start_worker: Start, home: Path) -> None:
    start_worker("basic", id="w")
    start_worker("gateway,store", id="s", **BUSY)
    async with tb.aconnect(home=home) as caller:
        await churn(caller, 30)
        await until(lambda: purged(caller), "a purge")
        before = await rows(caller, "SELECT seq, type, kept, body FROM facts ORDER BY seq LIMIT 50")
        mark = home / "store" / "s.rebuild"
        mark.touch()
        await churn(caller, 1)

        async def anew() -> bool:
            found = await rows(caller, "SELECT seq, type, kept, body FROM facts ORDER BY seq LIMIT 50")
            return not mark.exists() and found == before

        await until(anew, "the rows of all history")


async def test_a_worker_that_comes_later_starts_from_the_snapshot(start_worker: Start, home: Path) -> None:
    start_worker("basic", id="w")
    start_worker("gateway,store", id="s", **BUSY)
    async with tb.aconnect(home=home) as caller:
        await churn(caller, 30)
        await until(lambda: purged(caller), "a purge")
    late = start_worker("basic", id="late", host_id="elsewhere")
    async with await Raw.unix(late.socket) as raw:
        told = (await raw.stats())["directory"]
        assert told["snapshot"] is not None
        assert not told["degraded"]


async def test_there_is_one_keeper_and_two_that_answer(start_worker: Start, home: Path) -> None:
    start_worker("basic", id="w")
    start_worker("gateway,store", id="s1", **BUSY)
    start_worker("store", id="s2", **BUSY)
    async with tb.aconnect(home=home) as caller:
        await churn(caller, 20)
        await until(lambda: purged(caller), "a purge")
        authors = await rows(caller, "SELECT DISTINCT author FROM facts WHERE kind IN ('archive', 'purge')")
        assert len(authors) == 1
        for store in ("s1", "s2"):
            async with await caller.query("SELECT count(*) AS n FROM facts", store=store) as result:
                assert (await result.dicts())[0]["n"] > 0


async def test_a_store_that_misses_a_part_of_history_does_not_answer_and_says_why(
    start_worker: Start, home: Path
) -> None:
    start_worker("basic", id="w")
    store = start_worker("gateway,store", id="s", **BUSY)
    async with tb.aconnect(home=home) as caller:
        await churn(caller, 30)
        await until(lambda: purged(caller), "a purge")
        assert store.stop() == 0
        for file in (home / "store").iterdir():
            file.unlink()
        first = min((home / "archive").rglob("*.parquet"))
        away = first.rename(home / first.name)
        start_worker("gateway,store", id="s", **BUSY)
        for ask in (caller.state(), caller.history("k/1", kind="key"), rows(caller, "SELECT 1")):
            with pytest.raises(tb.UnavailableError, match=first.name):
                await ask
        away.rename(first)
        await until(lambda: caller.state(), "the answer of a store whose archive is whole again")
        assert await rows(caller, "SELECT count(*) AS n FROM facts") != [{"n": 0}]


async def test_of_two_stores_the_sound_one_answers(start_worker: Start, home: Path) -> None:
    start_worker("basic", id="w")
    start_worker("gateway,store", id="s1")
    async with tb.aconnect(home=home) as caller:
        await churn(caller, 3)
        broken = home / "store" / "s2.duckdb"
        broken.write_bytes(b"this is no database" * 1000)
        start_worker("store", id="s2")
        for _ in range(10):
            assert (await rows(caller, "SELECT count(*) > 0 AS there FROM facts"))[0]["there"]
        with pytest.raises(tb.UnavailableError, match="damaged|rebuild"):
            await caller.query("SELECT 1", store="s2")
