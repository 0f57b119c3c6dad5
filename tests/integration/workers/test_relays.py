"""Who gets an artifact second has it from who gets it first, while that still comes: its source sends it once."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest

from tensorbus.clock import Deadline
from tensorbus.testing._processes import WorkerProgram
from tests.integration.workers.raw import Raw

pytestmark = pytest.mark.integration
Start = Callable[..., WorkerProgram]
MIB = 1 << 20
DATA = random.Random("relays").randbytes(16 * MIB) * 8
BIG = {"pool_bytes": "1GiB"}


async def opening(raw: Raw, artifact: str, at_least: int) -> dict[str, Any]:
    """How it came, once it is there and right."""
    reply = await raw.reply("open", {"artifact": artifact, "at_least": at_least}, timeout_s=60)
    reply.fds.close()
    return dict(reply.data["transfer"])  # type: ignore[call-overload]  # an object


async def takes_bytes(raw: Raw, getting: asyncio.Task[dict[str, Any]]) -> None:
    async with Deadline(20, what="the first bytes").scope():
        while (await raw.stats())["pool"]["busy_bytes"] == 0 and not getting.done():
            await asyncio.sleep(0.001)


async def test_three_workers_one_after_the_other_take_it_from_each_other(start_worker: Start) -> None:
    one, two = start_worker(id="w1", host_id="h1", **BIG), start_worker(id="w2", host_id="h2", **BIG)
    three = start_worker(id="w3", host_id="h3", **BIG)
    async with (
        await Raw.unix(one.socket) as first,
        await Raw.unix(two.socket) as second,
        await Raw.unix(three.socket) as third,
    ):
        taken = await first.put({"w": DATA})
        artifact, position = taken["artifact"]["artifact"], taken["position"]
        await third.call("resolve", ref=artifact, at_least=position)
        to_second = asyncio.create_task(opening(second, artifact, position))
        await takes_bytes(second, to_second)
        one.pause()  # so that the second surely has a part only when the third asks
        to_third = asyncio.create_task(opening(third, artifact, position))
        await third.call("ping")  # its request is there
        one.resume()
        came = await to_second, await to_third
        assert came[0]["sources"] == {"w1": len(DATA)}
        assert came[1]["sources"] == {"w2": len(DATA)}, "the source sends it once"
        async with Deadline(20, what="three replicas").scope():
            while len((await first.resolve(artifact))["replicas"]) < 3:
                await asyncio.sleep(0.02)
        for raw in (second, third):
            assert (await raw.open(artifact)).right()


async def test_who_hands_on_and_dies_is_left_for_the_source(start_worker: Start) -> None:
    one, two = start_worker(id="w1", host_id="h1", **BIG), start_worker(id="w2", host_id="h2", **BIG)
    three = start_worker(id="w3", host_id="h3", **BIG)
    async with await Raw.unix(one.socket) as first, await Raw.unix(three.socket) as third:
        taken = await first.put({"w": DATA})
        artifact, position = taken["artifact"]["artifact"], taken["position"]
        await third.call("resolve", ref=artifact, at_least=position)
        second = await Raw.unix(two.socket)
        to_second = asyncio.create_task(opening(second, artifact, position))
        await takes_bytes(second, to_second)
        one.pause()
        to_third = asyncio.create_task(opening(third, artifact, position))
        await third.call("ping")
        one.resume()
        await takes_bytes(third, to_third)
        two.kill9()
        came = await to_third
        assert sum(came["sources"].values()) == len(DATA)
        assert (await third.open(artifact)).right()
        await asyncio.gather(to_second, return_exceptions=True)
        await second.connection.close()
