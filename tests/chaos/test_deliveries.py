"""Deliveries that are lost, come twice or out of order, on wires that break: every reader has the same state."""

from __future__ import annotations

from contextlib import AsyncExitStack

import pytest

from tests.chaos.conftest import Field, bodies
from tests.chaos.load import Load, in_step
from tests.chaos.stores import BUSY, store_of, until_store, whole
from tests.chaos.wire import Faults, Wire
from tests.integration.workers.raw import Raw, until
from tests.sizes import SIZES

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(SIZES.timeout_s)]


def bad(connection_s: float) -> Faults:
    return Faults(drop=0.03, repeat=0.03, swap=0.03, connection_s=connection_s)


@pytest.mark.parametrize("seed", range(SIZES.wire_seeds))
async def test_workers_and_stores_on_bad_wires_lose_no_fact_and_take_none_twice(field: Field, seed: int) -> None:
    field.configure(**BUSY)
    async with AsyncExitStack() as stack:
        wires = [await stack.enter_async_context(Wire(field.url, seed=10 * seed + n)) for n in range(3)]
        good = field.worker("gateway", id="gate")
        store = await field.up("gateway,store", id="s1", nats_url=wires[0].url)
        workers = [await field.up(id=f"w{n}", host_id=f"h{n}", nats_url=wires[n].url) for n in (1, 2)]
        raws = [await stack.enter_async_context(await Raw.unix(each.socket)) for each in (good, store, *workers)]
        load = Load(raws[2:], kept=30)
        for wire in wires:
            wire.faults = bad(connection_s=3.0)
            wire.cut()
        async with load.running():
            await load.more(SIZES.wire_puts, timeout_s=SIZES.timeout_s)
            await until(lambda: all(wire.counts["cut"] for wire in wires), "a cut of each wire")
        for wire in wires:
            wire.faults = Faults()
            wire.cut()
        before = await store_of(raws[1])
        await until_store(raws[1], "a purge", purged=max(before["purged"], 1), keeps_log=True)
        await in_step(raws)
        for raw in raws[2:]:
            await load.check(raw)
        assert await bodies(raws[0], "SessionEnded") == []
        hurt = sum((wire.counts for wire in wires), start=wires[0].counts.__class__())
        assert min(hurt[name] for name in ("drop", "repeat", "swap", "cut")) > 0, hurt
        await until_store(raws[1], "the rows", position=load.position)
    store.kill9()
    await whole(field, "s1", at_least=load.position)
