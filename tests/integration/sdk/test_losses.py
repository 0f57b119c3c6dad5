"""What callers know of names stays right when the log loses its tail and positions go down."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

import tensorbus as tb
from tensorbus.bus import EmbeddedServer
from tensorbus.clock import Deadline
from tensorbus.testing._processes import Processes
from tests.integration.workers.test_losses import Field, callers, settled

pytestmark = pytest.mark.integration


@pytest.fixture
def field(tmp_path: Path, home: Path) -> Iterator[Field]:
    with EmbeddedServer(tmp_path / "nats") as server:
        home.mkdir(parents=True, exist_ok=True)
        (home / "bus.url").write_text(server.url)
        processes = Processes(home / "test-logs", nats_url=None)
        try:
            yield Field(server, processes, home)
        finally:
            processes.close()


async def is_now(bus: tb.AsyncBus, key: str, artifact: str) -> None:
    """Wait until a plain look finds it."""
    async with Deadline(20, what=f"{key} to be {artifact}").scope():
        while (await bus.artifact(key)).id != artifact:
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("directory", ["followed", "full"])
async def test_names_that_are_followed_go_back_and_on(
    field: Field, home: Path, directory: Literal["followed", "full"]
) -> None:
    worker = field.worker("basic,gateway", "w1")
    async with callers(worker) as (raw,), tb.aconnect(home=home, host_id="h-w1", directory=directory) as bus:
        first = await bus.put({"w": np.arange(10)}, key="k")
        second = await bus.put({"w": np.arange(20)})
        copy = field.keep()
        for n in range(30):
            await bus.put({"w": np.arange(100 + n)}, key=f"n/{n}")
        await bus.bind("k", second.id, rebind=True)
        await is_now(bus, "k", second.id)
        field.set_back(copy)
        await settled(raw)
        await is_now(bus, "k", second.id)
        assert tuple((await (await bus.artifact("n/7")).info()).keys) == ("n/7",)
        await raw.call("bind", key="k", artifact=first.id, rebind=True)
        await is_now(bus, "k", first.id)
        third = await bus.put({"w": np.arange(30)}, key="k", rebind=True)
        await is_now(bus, "k", third.id)
        array = await (await bus.artifact("n/3")).tensor("w", framework="numpy")
        assert list(array) == list(range(103))


async def test_a_reading_of_the_log_ends_with_a_typed_error(field: Field, home: Path) -> None:
    worker = field.worker("basic,gateway", "w1")
    async with callers(worker) as (raw,), tb.aconnect(home=home, host_id="h-w1") as bus:
        await bus.put({"w": np.arange(10)}, key="k")
        copy = field.keep()
        await bus.put({"w": np.arange(20)}, key="l")
        cursor = (await raw.call("events_open", after=0, follow=True))["cursor"]
        while (await raw.call("events_next", cursor=cursor, wait_s=0.5))["items"]:
            pass
        waiting = asyncio.create_task(raw.call("events_next", cursor=cursor, wait_s=20))
        await asyncio.sleep(0.1)
        field.set_back(copy)
        with pytest.raises(tb.UnavailableError, match="lost its tail"):
            await waiting
        await settled(raw)
