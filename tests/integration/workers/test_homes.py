"""Homes of page shards as real processes on a real bus: they are killed, stopped, leave and come."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from tensorbus.model import PageOutcome, PageState
from tensorbus.testing._processes import WorkerProgram
from tests.integration.workers.pages import Homes, keys_of
from tests.integration.workers.raw import Raw

pytestmark = pytest.mark.integration
Start = Callable[..., WorkerProgram]
PAGES = 100_000


@asynccontextmanager
async def asking(worker: WorkerProgram) -> AsyncIterator[Homes]:
    async with AsyncExitStack() as stack:
        raw = await stack.enter_async_context(await Raw.unix(worker.socket))
        yield Homes(raw, stack)


async def test_pages_are_added_found_and_removed_at_two_homes(start_worker: Start) -> None:
    holder = start_worker("basic", id="w1")
    start_worker("shard-home", id="h1")
    start_worker("shard-home", id="h2")
    keys = keys_of(PAGES)
    async with asking(holder) as homes:
        await homes.served(["h1", "h2"])
        outcomes = await homes.add(keys, holder)
        assert (outcomes == PageOutcome.STORED).all()
        states, places = await homes.look(keys)
        assert (states == PageState.HIT).all()
        assert places == {at: ("w1", at) for at in range(PAGES)}
        states, _ = await homes.look(keys_of(1000, seed=2))
        assert (states == PageState.MISSING).all()
        states, _ = await homes.look(keys[:1000], keyspace="cd" * 32)
        assert (states == PageState.MISSING).all()
