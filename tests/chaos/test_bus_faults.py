"""A bus that stands still, is killed or starts again ends nobody's session, and afterwards all goes on by itself."""

from __future__ import annotations

import asyncio

import pytest

from tensorbus.errors import DeadlineExceededError, UnavailableError
from tests.chaos.conftest import TTL_S, Field, bodies
from tests.integration.workers.actor import data_of
from tests.integration.workers.raw import Raw
from tests.sizes import SIZES

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(SIZES.timeout_s)]


async def nobody_ended(raw: Raw, workers: list[str]) -> None:
    """Look for longer than a TTL: who was thought dead would be ended by then."""
    await asyncio.sleep(TTL_S * 1.5)
    assert await bodies(raw, "SessionEnded") == []
    assert await raw.live_workers() == workers


async def use(raw: Raw, seed: object) -> None:
    taken = await raw.put({"w": data_of(seed, 1000)}, key=f"k/{seed}")
    opened = await raw.open((await raw.resolve(f"k/{seed}", at_least=taken["position"]))["artifact"])
    assert opened.bytes("w") == data_of(seed, 1000)


async def test_a_bus_that_stands_still_for_longer_than_the_ttl_ends_nobody(field: Field) -> None:
    names = ["gate", "w1", "w2"]
    gate, one, two = field.worker("gateway", id="gate"), field.worker(id="w1"), field.worker(id="w2", host_id="h2")
    async with (
        await Raw.unix(gate.socket) as watching,
        await Raw.unix(one.socket) as here,
        await Raw.unix(two.socket) as there,
    ):
        await use(here, "before")
        held = await here.register({"w": data_of("leased", 1000)}, key="leased", lease_s=60)
        await there.open((await there.resolve("k/before"))["artifact"])
        field.pause_bus()
        waiting = [asyncio.create_task(use(raw, f"meanwhile{n}")) for n, raw in enumerate((here, there))]
        with pytest.raises((DeadlineExceededError, UnavailableError)):
            await here.put({"w": b"too late"}, key="late", timeout_s=0.5)
        await here.resolve("k/before")  # what is known is answered all the while
        assert (await there.open((await there.resolve("k/before"))["artifact"])).right()
        assert (await here.call("renew", leases=[held["lease"]]))["ended"] == []
        await asyncio.sleep(SIZES.pause_s)
        assert not any(task.done() for task in waiting)
        field.resume_bus()
        await asyncio.gather(*waiting)
        for raw in (here, there):
            await use(raw, f"after{raw.said['worker']}")
        await nobody_ended(watching, names)
        assert (await here.resolve("leased"))["live"]


@pytest.mark.parametrize("away_s", [0.0, 0.7, TTL_S + 1])
async def test_a_bus_that_is_killed_and_starts_again_ends_nobody(field: Field, away_s: float) -> None:
    names = ["gate", "w1", "w2"]
    gate, one, two = field.worker("gateway", id="gate"), field.worker(id="w1"), field.worker(id="w2", host_id="h2")
    async with (
        await Raw.unix(gate.socket) as watching,
        await Raw.unix(one.socket) as here,
        await Raw.unix(two.socket) as there,
    ):
        for n in range(SIZES.restarts):
            await use(here, f"before{n}")
            field.kill_bus()
            waiting = [asyncio.create_task(use(raw, f"meanwhile{n}-{m}")) for m, raw in enumerate((here, there))]
            await asyncio.sleep(away_s)
            await asyncio.to_thread(field.server.start)
            await asyncio.gather(*waiting)
            await use(there, f"after{n}")
            await nobody_ended(watching, names)
        assert len(await here.keys()) == 4 * SIZES.restarts


async def test_a_worker_that_dies_while_the_bus_stands_still_is_ended_afterwards_and_nobody_else(field: Field) -> None:
    gate, one, two = field.worker("gateway", id="gate"), field.worker(id="w1"), field.worker(id="w2", host_id="h2")
    async with await Raw.unix(gate.socket) as watching, await Raw.unix(two.socket) as there:
        async with await Raw.unix(one.socket) as here:
            await use(here, "mine")
        await use(there, "theirs")
        field.pause_bus()
        one.kill9()
        await asyncio.sleep(SIZES.pause_s)
        field.resume_bus()
        for _ in range(1000):
            if "w1" not in await watching.live_workers():
                break
            await asyncio.sleep(0.02)
        assert [end["worker"] for end in await bodies(watching, "SessionEnded")] == ["w1"]
        await use(there, "after")
        await asyncio.sleep(TTL_S)
        assert await watching.live_workers() == ["gate", "w2"]


async def test_a_worker_can_leave_while_the_bus_is_away(field: Field) -> None:
    worker = field.worker(id="w1")
    async with await Raw.unix(worker.socket) as raw:
        await use(raw, 1)
        field.pause_bus()
        putting = asyncio.create_task(raw.put({"w": b"1"}, key="k"))
        await asyncio.sleep(0.1)
        assert await asyncio.to_thread(worker.stop) == 0
        with pytest.raises(UnavailableError):
            await putting
    field.resume_bus()
