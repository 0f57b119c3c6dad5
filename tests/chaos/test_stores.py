"""Stores that are killed, stopped and doubled: their rows are those of all history, and one of them keeps the log."""

from __future__ import annotations

import asyncio
import random
from contextlib import AsyncExitStack

import pyarrow as pa
import pytest

from tensorbus.bus import Bus, append
from tensorbus.clock import Deadline
from tensorbus.errors import OutOfSpaceError
from tensorbus.events import STORE_ROLE, Aggregate, Headers, RoleGranted
from tensorbus.feeds import archived_files
from tensorbus.ids import Incarnation, SystemIds, WorkerId, new_event_id
from tensorbus.testing._processes import WorkerProgram
from tests.chaos.conftest import FENCED_EXIT, TTL_S, Field, bodies
from tests.chaos.load import Load, in_step
from tests.chaos.stores import BUSY, bus_of, store_of, until_store, whole
from tests.integration.workers.actor import data_of
from tests.integration.workers.raw import Raw
from tests.sizes import SIZES

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(SIZES.timeout_s)]
STORE = "gateway,store"
LARGE = 64 * 1024


def soon() -> Deadline:
    return Deadline(20, what="a step of a test")


async def connected(stack: AsyncExitStack, *workers: WorkerProgram) -> list[Raw]:
    return [await stack.enter_async_context(await Raw.unix(each.socket)) for each in workers]


# -- bus and store at once --------------------------------------------------------------------------------------------


async def fill(raw: Raw, stem: str) -> int:
    """Put until there is no room; how many fitted."""
    count = 0
    try:
        while True:
            await raw.put({"w": data_of((stem, count), LARGE)}, key=f"{stem}/{count}")
            count += 1
    except OutOfSpaceError:
        return count


async def test_bus_and_store_killed_at_once_lose_nothing_and_no_live_byte_is_overwritten(field: Field) -> None:
    field.configure(**BUSY)
    pool_bytes = SIZES.lives // 2 * LARGE + (2 << 20)
    workers = [field.worker(id=f"w{n}", host_id=f"h{n}", pool_bytes=pool_bytes) for n in (1, 2)]
    store = field.worker(STORE, id="s1")
    async with AsyncExitStack() as stack:
        raws = await connected(stack, *workers)
        put = [await raws[n % 2].put({"w": data_of(n, LARGE)}, key=f"life/{n}") for n in range(SIZES.lives)]
        artifacts = [taken["artifact"]["artifact"] for taken in put]
        mapped = [await raws[n % 2].open(artifact) for n, artifact in enumerate(artifacts)]
        field.kill_bus()
        store.kill9()
        await asyncio.to_thread(field.server.start)
        store = field.worker(STORE, id="s1")
        assert all([await fill(raw, f"more/{n}") > 10 for n, raw in enumerate(raws)])
        for n, artifact in enumerate(artifacts):
            assert (await raws[n % 2].resolve(f"life/{n}"))["artifact"] == artifact
            assert (await raws[n % 2].open(artifact)).bytes("w") == mapped[n].bytes("w") == data_of(n, LARGE)
        (keeping,) = await connected(stack, store)
        await in_step([*raws, keeping])
        position = (await raws[0].stats())["directory"]["position"]
        await until_store(keeping, "the rows", position=position, keeps_log=True, purged=1)
        lives = [item["worker"] for item in await bodies(keeping, "SessionEnded")]
        assert lives == [], "the store's former life was followed by the next, and nobody else ended"
    assert store.stop() == 0
    await whole(field, "s1", at_least=position)


# -- a projector that is killed again and again ------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(SIZES.store_seeds))
async def test_a_store_killed_at_random_points_has_the_rows_of_a_full_replay(field: Field, seed: int) -> None:
    field.configure(**BUSY)
    rng = random.Random(seed)
    worker = field.worker(id="w1")
    async with AsyncExitStack() as stack:
        (raw,) = await connected(stack, worker)
        load = Load([raw], kept=20)
        async with load.running():
            for _ in range(SIZES.store_kills):
                store = field.worker(STORE, id="s1", ready=False)
                # From before its file is open until it has archived and purged.
                await asyncio.sleep(rng.uniform(0.5, 3.0))
                store.kill9()
            store = field.worker(STORE, id="s1")
            (keeping,) = await connected(stack, store)
            before = await until_store(keeping, "the role", keeps_log=True)
            await until_store(keeping, "a purge", purged=before["purged"] + 1)
        await in_step([raw, keeping])
        await load.check(raw)
        await until_store(keeping, "the rows", position=load.position)
    store.kill9()
    await whole(field, "s1", at_least=load.position)


# -- two stores --------------------------------------------------------------------------------------------------------


async def two(field: Field, stack: AsyncExitStack) -> tuple[list[WorkerProgram], list[Raw]]:
    """Two stores; the first one keeps the log."""
    stores = [field.worker(STORE, id="s1")]
    raws = await connected(stack, stores[0])
    await until_store(raws[0], "the role", keeps_log=True)
    stores.append(field.worker(STORE, id="s2"))
    raws += await connected(stack, stores[1])
    return stores, raws


async def kept_facts_of(bus: Bus, author: str, *, after: int) -> list[int]:
    """What somebody said as the log's keeper after a sequence, as far as the log still has it."""
    found = []
    for kind, about in (("archive", "TB"), ("purge", "TB"), ("snap", "directory")):
        fence = bus.subjects.fence(Aggregate(kind, about))
        last = await bus.last_on(f"{fence.removesuffix('*')}{author}", deadline=soon())
        found += [] if last is None or last.seq <= after else [last.seq]
    return found


async def answers(raw: Raw, store: str | None = None) -> str:
    """Ask how many facts there are, by way of a worker; who answered."""
    asked = {"what": "query", "sql": "SELECT count(*) AS n FROM facts", "store": store}
    reply = await raw.reply("query_open", asked)
    assert pa.ipc.open_stream(reply.body).read_all().to_pylist()[0]["n"] > 0
    return str(reply.data["store"])


async def test_the_other_store_keeps_the_log_when_its_keeper_dies(field: Field) -> None:
    field.configure(**BUSY)
    worker = field.worker(id="w1")
    async with AsyncExitStack() as stack:
        (raw,) = await connected(stack, worker)
        stores, raws = await two(field, stack)
        load = Load([raw], kept=20)
        async with load.running():
            for n in range(SIZES.store_hand_overs):
                keeper, other = n % 2, 1 - n % 2
                before = await until_store(raws[keeper], "a purge", keeps_log=True, purged=1)
                assert not (await store_of(raws[other]))["keeps_log"]
                assert await answers(raw, f"s{other + 1}") == f"s{other + 1}"
                stores[keeper].kill9()
                assert await answers(raw) == f"s{other + 1}"
                await until_store(raws[other], "the role", keeps_log=True, timeout_s=TTL_S + 20)
                await until_store(raws[other], "a purge", purged=before["purged"] + 1, archived=before["archived"] + 1)
                stores[keeper] = field.worker(STORE, id=f"s{keeper + 1}")
                (raws[keeper],) = await connected(stack, stores[keeper])
        await in_step([raw, *raws])
        for each in raws:
            await until_store(each, "the rows", position=load.position)
        await load.check(raw)
    for store in stores:
        store.kill9()
    await whole(field, "s1", "s2", at_least=load.position)


@pytest.mark.parametrize("seed", range(SIZES.store_seeds))
async def test_a_keeper_that_stood_still_is_refused_when_it_wakes(field: Field, seed: int) -> None:
    field.configure(**BUSY)
    worker = field.worker(id="w1")
    async with AsyncExitStack() as stack:
        (raw,) = await connected(stack, worker)
        stores, raws = await two(field, stack)
        load = Load([raw], kept=20)
        async with load.running(), bus_of(field) as bus:
            await until_store(raws[0], "a purge", purged=1)
            await asyncio.sleep(random.Random(seed).uniform(0, 1.5))
            stores[0].pause()
            taken = await until_store(raws[1], "the role", keeps_log=True)
            grant = await bus.last_on(bus.subjects.fence(Aggregate("role", STORE_ROLE)), deadline=soon())
            assert grant is not None
            await until_store(raws[1], "its own purge", purged=taken["purged"] + 1)
            stores[0].resume()
            assert await asyncio.to_thread(stores[0].wait) == FENCED_EXIT
            assert await kept_facts_of(bus, "s1", after=grant.seq) == []
            await archived_files(bus)
        await in_step([raw, raws[1]])
        await load.check(raw)
        await until_store(raws[1], "the rows", position=load.position)
    stores[1].kill9()
    await whole(field, "s2", at_least=load.position)


async def test_a_living_keeper_whose_role_is_granted_to_another_stops_keeping(field: Field) -> None:
    """As after a grant by an operator's hand: the newest grant counts, whoever wrote it, until its holder is dead."""
    field.configure(**BUSY)
    store = field.worker(STORE, id="s1")
    worker = field.worker(id="w1")
    async with AsyncExitStack() as stack:
        keeping, raw = await connected(stack, store, worker)
        held = await until_store(keeping, "the role", keeps_log=True)
        load = Load([raw], kept=20)
        async with load.running(), bus_of(field) as bus:
            fence = bus.subjects.fence(Aggregate("role", STORE_ROLE))
            last = await bus.last_on(fence, deadline=soon())
            assert last is not None
            headers = Headers(
                event_id=new_event_id(SystemIds()), author=WorkerId("w1"), incarnation=Incarnation(worker.incarnation),
                expected=last.seq,
            )  # fmt: skip
            outcome = await append(bus, RoleGranted(role=STORE_ROLE), headers, deadline=soon())
            await until_store(keeping, "the loss", keeps_log=False)
            await load.more(100)
            assert store.alive
            assert await kept_facts_of(bus, "s1", after=outcome.seq) == []
            await until_store(keeping, "the rows meanwhile", position=outcome.seq)
        worker.stop()
        await until_store(keeping, "the role again", keeps_log=True, archived=held["archived"] + 1)
