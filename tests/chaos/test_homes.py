"""Homes of page shards while the bus stands still, is killed, or loses all of its data."""

from __future__ import annotations

import asyncio
import shutil
from contextlib import AsyncExitStack

import numpy as np
import pytest

from tensorbus.clock import Deadline
from tensorbus.model import PageOutcome, PageState
from tests.chaos.conftest import TTL_S, Field
from tests.integration.workers.pages import Homes, keys_of
from tests.integration.workers.raw import Raw
from tests.sizes import SIZES

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(SIZES.timeout_s)]


async def test_a_home_that_does_not_hear_from_the_bus_answers_unavailable_and_goes_on_afterwards(field: Field) -> None:
    holder, _ = field.worker(id="w1"), field.worker("shard-home", id="h1")
    field.worker("shard-home", id="h2")
    keys, late = keys_of(2_000), keys_of(500, seed=2)
    async with AsyncExitStack() as stack:
        homes = Homes(await stack.enter_async_context(await Raw.unix(holder.socket)), stack)
        await homes.served(["h1", "h2"])
        assert (await homes.add(keys, holder, ack="log") == PageOutcome.STORED).all()
        tokens = [token for _, token in homes.table]
        field.pause_bus()
        await asyncio.sleep(TTL_S + 0.5)
        for name in ("h1", "h2"):
            assert not (await homes.status(name))["alive"]
        states, _ = await homes.look(keys, retry=())
        assert (states == PageState.UNAVAILABLE).all()
        adding = asyncio.create_task(homes.add(late, holder))
        field.resume_bus()
        assert (await adding == PageOutcome.STORED).all()
        states, _ = await homes.look(np.concatenate([keys, late]))
        assert (states == PageState.HIT).all()
        await homes.routes()
        assert [token for _, token in homes.table] == tokens, "nobody lost a shard for it"


async def test_what_is_told_while_the_bus_is_dead_is_logged_afterwards(field: Field) -> None:
    holder, _ = field.worker(id="w1"), field.worker("shard-home", id="h1")
    keys, late = keys_of(2_000), keys_of(500, seed=2)
    async with AsyncExitStack() as stack:
        homes = Homes(await stack.enter_async_context(await Raw.unix(holder.socket)), stack)
        await homes.served(["h1"])
        assert (await homes.add(keys, holder, ack="log") == PageOutcome.STORED).all()
        field.kill_bus()
        assert (await homes.add(late, holder) == PageOutcome.STORED).all()  # within the TTL it may
        await asyncio.to_thread(field.server.start)
        assert (await homes.add(keys_of(500, seed=3), holder, ack="log") == PageOutcome.STORED).all()
        field.worker("shard-home", id="h2")
        await homes.served(["h1", "h2"])
        states, _ = await homes.look(np.concatenate([keys, late]))
        assert (states == PageState.HIT).all()


@pytest.mark.soak  # new grants did not come within 30 s in one run of eight on a busy machine: not explained yet
async def test_a_stream_of_pages_that_is_lost_whole_is_made_anew_and_nothing_is_called_missing_before_its_time(
    field: Field,
) -> None:
    holder, _ = field.worker(id="w1"), field.worker("shard-home", id="h1")
    keys = keys_of(2_000)
    async with AsyncExitStack() as stack:
        homes = Homes(await stack.enter_async_context(await Raw.unix(holder.socket)), stack)
        await homes.served(["h1"])
        assert (await homes.add(keys, holder, ack="log") == PageOutcome.STORED).all()
        before = homes.table
        field.kill_bus()
        (folder,) = field.home.rglob("streams/TB_PAGES")
        await asyncio.to_thread(shutil.rmtree, folder)
        await asyncio.to_thread(field.server.start)
        async with Deadline(30, what="new grants").scope():
            while homes.table == before or any(at < 0 for at, _ in homes.table):
                await asyncio.sleep(0.05)
                await homes.routes()
        await homes.served(["h1"])
        states, _ = await homes.look(keys)
        assert (states == PageState.DEGRADED).all()
        await homes.say_all(holder, keys)
        states, _ = await homes.look(keys)
        assert (states == PageState.HIT).all()
        states, _ = await homes.look(keys_of(100, seed=5))
        assert (states == PageState.MISSING).all()
