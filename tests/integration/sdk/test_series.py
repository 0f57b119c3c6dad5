"""Versions: published, found, subscribed to."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
import torch

import tensorbus as tb

pytestmark = pytest.mark.integration


def content(number: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((4,), float(number))}


def test_versions_are_numbered_and_found(bus: tb.Bus) -> None:
    published = [bus.publish("policy", content(number)) for number in (1, 2, 3)]
    assert [art.version for art in published] == [1, 2, 3]
    assert bus.latest("policy").version == 3
    assert bus.version("policy", 2).id == published[1].id
    assert bus.publish("policy", published[0]).version == 4
    assert [item.name for item in bus.ls_series("pol")] == ["policy"]
    with pytest.raises(tb.NotFoundError):
        bus.version("policy", 9)
    with pytest.raises(tb.NotFoundError):
        bus.latest("absent")


def test_a_subscriber_sees_each_version_in_order(bus: tb.Bus, place: Path, tenant: str) -> None:
    seen: list[int] = []

    def follow() -> None:
        with tb.connect(home=place, host_id="host-a", tenant=tenant) as mine:
            for art in mine.subscribe("policy", start="earliest", timeout=30):
                assert art["w"][0] == art.version
                seen.append(art.version or 0)
                if art.version == 20:
                    return

    reader = threading.Thread(target=follow)
    reader.start()
    for number in range(1, 21):
        bus.publish("policy", content(number))
    reader.join(30)
    assert seen == list(range(1, 21))


async def test_where_a_subscription_begins(abus: tb.AsyncBus) -> None:
    for number in (1, 2, 3):
        await abus.publish("policy", content(number))
    assert (await abus.subscribe("policy").next()).version == 3
    assert (await abus.subscribe("policy", start="earliest").next()).version == 1
    second = abus.subscribe("policy", start=2)
    assert (await second.next()).version == 2
    assert second.position == 2
    resumed = abus.subscribe("policy", start=second.position + 1)
    assert (await resumed.next()).version == 3
    with pytest.raises(tb.DeadlineExceededError):
        await resumed.next(timeout=0.05)
    with pytest.raises(tb.InvalidArgumentError):
        abus.subscribe("policy", start=0)


async def test_gone_versions_are_passed_over_and_counted(abus: tb.AsyncBus) -> None:
    arts = [await abus.publish("policy", content(number)) for number in (1, 2, 3, 4)]
    await arts[0].destroy()
    await arts[2].destroy()
    every = abus.subscribe("policy", start="earliest")
    assert [(await every.next()).version, (await every.next()).version] == [2, 4]
    assert every.gone == 2
    await arts[1].destroy()
    await arts[3].destroy()
    after = abus.subscribe("policy", timeout=20)
    waiting = asyncio.ensure_future(after.next())
    await asyncio.sleep(0)
    assert (await abus.publish("policy", content(5))).version == 5
    assert (await waiting).version == 5
    assert after.gone == 0


async def test_coalescing_skips_to_the_newest(abus: tb.AsyncBus) -> None:
    newest = abus.subscribe("policy", start="earliest", coalesce=True, timeout=20)
    for number in range(1, 6):
        await abus.publish("policy", content(number))
    assert (await newest.next()).version == 5
    assert newest.skipped == 4


async def test_more_versions_than_the_queue_holds(abus: tb.AsyncBus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tensorbus.sdk._series.WAITING_MAX", 3)
    slow = abus.subscribe("policy", start="earliest", timeout=20)
    art = await abus.publish("policy", content(1))
    assert (await slow.next()).version == 1
    for _ in range(10):
        await abus.publish("policy", art)
    assert [(await slow.next()).version for _ in range(10)] == list(range(2, 12))


async def test_a_subscription_waits_for_the_first_version(abus: tb.AsyncBus) -> None:
    async with abus.subscribe("later", timeout=20) as first:
        waiting = asyncio.ensure_future(first.next())
        await asyncio.sleep(0)
        await abus.publish("later", content(1))
        assert (await waiting).version == 1
    assert [art async for art in first] == []
