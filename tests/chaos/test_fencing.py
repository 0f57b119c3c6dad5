"""One life of a worker counts: zombies and doubles are fenced, say so, and end; witnesses agree."""

from __future__ import annotations

import asyncio
import time

import pytest

from tensorbus.errors import FencedError, TensorbusError, UnavailableError
from tests.chaos.conftest import FENCED_EXIT, TTL_S, Field, bodies, gone
from tests.integration.workers.actor import data_of
from tests.integration.workers.raw import Raw, until
from tests.sizes import SIZES

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(SIZES.timeout_s)]


async def test_a_worker_that_stood_still_past_its_ttl_is_fenced_says_so_and_ends(field: Field) -> None:
    gate = field.worker("gateway", id="gate")
    one, two = field.worker(id="w1", host_id="h1"), field.worker(id="w2", host_id="h2")
    async with (
        await Raw.unix(gate.socket) as watching,
        await Raw.unix(one.socket) as here,
        await Raw.unix(two.socket) as there,
    ):
        kept = await here.put({"w": data_of("kept", 1000)}, key="kept")
        await here.put({"w": data_of("lost", 1000)}, key="lost")
        leased = await here.register({"w": data_of("leased", 1000)}, key="leased")
        await there.open(kept["artifact"]["artifact"], at_least=leased["position"])
        opened = await here.open((await here.resolve("lost"))["artifact"])
        one.pause()
        for key in ("lost", "leased"):
            assert "lost" in str(await gone(watching, key))
        pending = [
            asyncio.create_task(here.put({"w": data_of(n, 100)}, key=f"zombie{n}", timeout_s=20)) for n in range(5)
        ]
        pending.append(asyncio.create_task(here.call("bind", key="zombie", artifact=kept["artifact"]["artifact"])))
        pending.append(asyncio.create_task(here.call("destroy", artifact=kept["artifact"]["artifact"])))
        pending.append(asyncio.create_task(here.call("publish", name="zombie", artifact=kept["artifact"]["artifact"])))
        await asyncio.sleep(0.3)
        one.resume()
        assert await asyncio.to_thread(one.wait) == FENCED_EXIT
        outcomes = await asyncio.gather(*pending, return_exceptions=True)
        assert all(isinstance(outcome, TensorbusError) for outcome in outcomes), outcomes
        assert "fenced" in one.text
        await until(lambda: here.connection.closed, "the end of the connection")
        byes = [push.data["reason"] for push in here.pushes if push.topic == "bye"]
        assert byes == [] or "fenced" in str(byes[0])
        assert not any(key.startswith("zombie") for key in await watching.keys())
        assert (await there.open((await there.resolve("kept"))["artifact"])).bytes("w") == data_of("kept", 1000)
        assert opened.bytes("w") == data_of("lost", 1000)
        ends = await bodies(watching, "SessionEnded")
        assert [(end["worker"], end["reason"]) for end in ends] == [("w1", "expired")]
        back = field.worker(id="w1", host_id="h1")
        async with await Raw.unix(back.socket) as again:
            await again.put({"w": data_of("lost", 1000)}, key="lost")


async def test_a_worker_that_stood_still_for_less_than_its_ttl_goes_on(field: Field) -> None:
    gate, worker = field.worker("gateway", id="gate"), field.worker(id="w1")
    async with await Raw.unix(gate.socket) as watching, await Raw.unix(worker.socket) as raw:
        await raw.put({"w": b"1"}, key="k")
        for _ in range(SIZES.restarts):
            worker.pause()
            await asyncio.sleep(TTL_S * 0.4)
            worker.resume()
            await asyncio.sleep(TTL_S * 0.4)
        await raw.put({"w": b"2"}, key="k2")
        assert await bodies(watching, "SessionEnded") == []


async def test_the_older_of_two_processes_with_one_id_is_fenced_at_once_and_there_is_no_ping_pong(field: Field) -> None:
    gate = field.worker("gateway", id="gate")
    old = field.worker(id="twin", apart=True)
    async with await Raw.unix(gate.socket) as watching, await Raw.unix(old.socket) as raw:
        taken = await raw.put({"w": b"old"}, key="k")
        await watching.resolve("k", at_least=taken["position"])
        new = field.worker(id="twin", apart=True)
        began = time.monotonic()
        assert await asyncio.to_thread(old.wait) == FENCED_EXIT
        assert time.monotonic() - began < 10  # by the fact, not by any timeout
        assert "fenced" in old.text
        assert new.incarnation in old.text
        await gone(watching, "k")
        await asyncio.sleep(TTL_S * 1.5)
        assert new.alive
        openings = [body for body in await bodies(watching, "SessionOpened") if body["worker"] == "twin"]
        assert [body["incarnation"] for body in openings] == [old.incarnation, new.incarnation]
        assert await bodies(watching, "SessionEnded") == []
        async with await Raw.unix(new.socket) as again:
            await again.put({"w": b"new"}, key="k")


async def test_of_many_processes_that_start_with_one_id_at_once_one_remains(field: Field) -> None:
    gate = field.worker("gateway", id="gate")
    twins = [field.worker(id="twin", apart=True, ready=False) for _ in range(4)]
    async with await Raw.unix(gate.socket) as watching:
        await until(lambda: sum(twin.alive for twin in twins) == 1, "one of four", timeout_s=60)
        (left,) = [twin for twin in twins if twin.alive]
        left.await_ready()
        assert {twin.wait() for twin in twins if twin is not left} == {FENCED_EXIT}
        await asyncio.sleep(TTL_S)
        assert left.alive
        (session,) = [item for item in (await watching.call("workers"))["items"] if item["worker"] == "twin"]
        assert (session["incarnation"], session["live"]) == (left.incarnation, True)


async def test_two_gateways_that_witness_one_death_say_one_end(field: Field) -> None:
    gates = [field.worker("gateway", id=f"gate{n}") for n in range(2)]
    async with await Raw.unix(gates[0].socket) as watching:
        for n in range(SIZES.restarts):
            worker = field.worker(id=f"w{n}")
            async with await Raw.unix(worker.socket) as raw:
                for m in range(10):
                    await raw.put({"w": data_of((n, m), 100)}, key=f"{n}/{m}")
            worker.kill9()
            await gone(watching, f"{n}/9")
        await asyncio.sleep(TTL_S)
        ends = await bodies(watching, "SessionEnded")
        assert [end["worker"] for end in ends] == [f"w{n}" for n in range(SIZES.restarts)]
        assert len(await bodies(watching, "ArtifactDestroyed")) == 10 * SIZES.restarts


async def test_a_gateway_that_is_killed_while_a_worker_is_silent_is_replaced_by_the_other(field: Field) -> None:
    gates = [field.worker("gateway", id=f"gate{n}") for n in range(2)]
    worker = field.worker(id="w1")
    async with await Raw.unix(worker.socket) as raw:
        await raw.put({"w": b"1"}, key="k")
    worker.pause()
    await asyncio.sleep(TTL_S * 0.5)
    gates[0].kill9()
    async with await Raw.unix(gates[1].socket) as watching:
        await gone(watching, "k")
        for _ in range(1000):
            if await watching.live_workers() == ["gate1"]:
                break
            await asyncio.sleep(0.02)
        ends = [end["worker"] for end in await bodies(watching, "SessionEnded")]
        assert sorted(ends) == ["gate0", "w1"]
    worker.resume()
    assert await asyncio.to_thread(worker.wait) == FENCED_EXIT


async def test_without_any_witness_nobody_is_ended_and_the_next_one_catches_up(field: Field) -> None:
    gate, one, two = field.worker("gateway", id="gate"), field.worker(id="w1"), field.worker(id="w2", host_id="h2")
    async with await Raw.unix(one.socket) as raw:
        await raw.put({"w": b"1"}, key="k")
    gate.kill9()
    one.kill9()
    async with await Raw.unix(two.socket) as raw:
        await asyncio.sleep(TTL_S * 1.5)
        assert await raw.live_workers() == ["gate", "w1", "w2"]
        assert (await raw.resolve("k"))["live"]
        field.worker("gateway", id="gate2")
        await gone(raw, "k")
        ends = [end["worker"] for end in await bodies(raw, "SessionEnded")]
        assert sorted(ends) in (["gate", "w1"], ["w1"])


async def test_a_witness_that_stood_still_ends_nobody(field: Field) -> None:
    """It wakes with a long silence behind it, which was its own."""
    gate, worker = field.worker("gateway", id="gate"), field.worker(id="w1")
    async with await Raw.unix(worker.socket) as raw:
        for _ in range(SIZES.restarts):
            gate.pause()
            await asyncio.sleep(TTL_S * 1.5)
            gate.resume()
            await asyncio.sleep(TTL_S * 1.5)
        assert await bodies(raw, "SessionEnded") == []
        assert worker.alive
        assert gate.alive


async def test_callers_of_a_fenced_worker_are_told_and_no_put_of_theirs_counts(field: Field) -> None:
    old = field.worker(id="twin", apart=True)
    async with await Raw.unix(old.socket) as raw, await Raw.unix(old.socket) as idle:
        putting = asyncio.create_task(keep_putting(raw))
        new = field.worker(id="twin", apart=True)
        assert await asyncio.to_thread(old.wait) == FENCED_EXIT
        assert isinstance(await putting, FencedError | UnavailableError)
        await until(lambda: idle.connection.closed, "the end of the connection")
        (bye,) = [push.data["reason"] for push in idle.pushes if push.topic == "bye"]
        assert new.incarnation in str(bye)
    async with await Raw.unix(new.socket) as raw:
        assert (await raw.stats())["directory"]["replicas"] == 0
        await raw.put({"w": b"new"}, key="new")


async def keep_putting(raw: Raw) -> TensorbusError:
    n = 0
    while True:
        try:
            await raw.put({"w": data_of(n, 1000)}, key=f"k{n}")
        except TensorbusError as error:
            return error
        n += 1
