"""Programs of several versions on one log: who does not know a fact reads on, says so, and writes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tensorbus.bus import Appended, Bus, NatsBus, append
from tensorbus.clock import Deadline
from tensorbus.errors import UnavailableError
from tensorbus.events import STORE_ROLE, Aggregate, Event, FoldRaised, Headers, RoleGranted, headers_to_wire
from tensorbus.ids import Incarnation, SystemIds, WorkerId, new_event_id
from tensorbus.lifecycle import FOLD_VERSION
from tests.chaos.conftest import TTL_S, Field, bodies, eventually
from tests.chaos.stores import BUSY, until_store
from tests.integration.workers.actor import data_of
from tests.integration.workers.raw import Raw
from tests.sizes import SIZES

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(SIZES.timeout_s)]
ELSE = WorkerId("newer")
LIFE = Incarnation("0123456789abcdef")
UNAVAILABLE_EXIT = 6


def soon() -> Deadline:
    return Deadline(20, what="a step of a test")


@asynccontextmanager
async def bus_of(field: Field) -> AsyncIterator[Bus]:
    bus = await NatsBus.connect(field.url)
    try:
        yield bus
    finally:
        await bus.close()


def said_by(author: WorkerId, expected: int | None) -> Headers:
    return Headers(event_id=new_event_id(SystemIds()), author=author, incarnation=LIFE, expected=expected)


async def newer_fact(bus: Bus) -> int:
    """A fact such as no program of today knows, about an artifact."""
    about = Aggregate("artifact", "a" * 32)
    wire = headers_to_wire(said_by(ELSE, 0), type_name="ArtifactMoved", fence=bus.subjects.fence(about))
    return await bus.publish(bus.subjects.fact(about, ELSE), b'{"to": "mars"}', headers=wire, deadline=soon())


async def fact(bus: Bus, event: Event, *, author: WorkerId = ELSE) -> int:
    outcome = await append(bus, event, said_by(author, 0), deadline=soon())
    assert isinstance(outcome, Appended)
    return outcome.seq


async def facts_after(bus: Bus, seq: int) -> bool:
    return await bus.first_from(bus.subjects.facts, seq + 1, deadline=soon()) is not None


async def degraded(raw: Raw, *, unknown: int = 1) -> None:
    await eventually(raw, "the unknown fact", "directory", "unknown", equals=unknown)
    assert (await raw.stats())["directory"]["degraded"]


async def refuses(work: Coroutine[Any, Any, Any]) -> None:
    with pytest.raises(UnavailableError, match="upgrade"):
        await work


async def everything_is_refused(raw: Raw, artifact: str) -> None:
    await refuses(raw.put({"w": b"more"}, key="more"))
    await refuses(raw.register({"w": b"leased"}, key="leased"))
    await refuses(raw.call("bind", key="other", artifact=artifact))
    await refuses(raw.call("publish", name="series", artifact=artifact))
    await refuses(raw.call("destroy", artifact=artifact))


async def test_a_fact_of_a_newer_program_makes_workers_and_stores_readers(field: Field) -> None:
    field.configure(**BUSY)
    store, worker = field.worker("gateway,store", id="s1"), field.worker(id="w1")
    dead = field.worker(id="w2", host_id="h2")
    async with bus_of(field) as bus, await Raw.unix(store.socket) as watching, await Raw.unix(worker.socket) as raw:
        artifact = (await raw.put({"w": data_of("kept", 1000)}, key="kept"))["artifact"]["artifact"]
        for n in range(40):
            await raw.call("bind", key=f"more/{n}", artifact=artifact)
        await until_store(watching, "something to keep", keeps_log=True, archived=1)
        await newer_fact(bus)
        for each in (watching, raw):
            await degraded(each)
        last = await bus.last_seq(deadline=soon())  # what was on its way may have come after it
        await everything_is_refused(raw, artifact)
        assert (await raw.open((await raw.resolve("kept"))["artifact"])).bytes("w") == data_of("kept", 1000)
        dead.kill9()
        await asyncio.sleep(TTL_S * 1.5)
        assert await raw.live_workers() == ["s1", "w1", "w2"], "who cannot read everything ends nobody"
        assert await bus.last_seq(deadline=soon()) == last, "no fact, no snapshot, no role"
        assert worker.alive
        assert store.alive


async def test_who_starts_on_a_log_of_newer_facts_says_what_to_do_and_ends(field: Field) -> None:
    async with bus_of(field) as bus:
        field.worker(id="w1").stop()
        last = await newer_fact(bus)
        late = field.worker(id="w2", ready=False)
        assert await asyncio.to_thread(late.wait) == UNAVAILABLE_EXIT
        assert "upgrade" in late.text
        assert not await facts_after(bus, last)


async def test_a_fold_that_was_raised_stops_who_does_not_know_it(field: Field) -> None:
    gate, worker = field.worker("gateway", id="gate"), field.worker(id="w1")
    async with bus_of(field) as bus, await Raw.unix(gate.socket) as watching, await Raw.unix(worker.socket) as raw:
        artifact = (await raw.put({"w": data_of("kept", 1000)}, key="kept"))["artifact"]["artifact"]
        await fact(bus, FoldRaised(stream="TB", version=FOLD_VERSION))
        another = await raw.put({"w": b"the fold in force is known"})
        await watching.resolve(another["artifact"]["artifact"], at_least=another["position"])
        last = await bus.last_on(bus.subjects.fence(Aggregate("fold", "TB")), deadline=soon())
        assert last is not None
        raised = append(
            bus, FoldRaised(stream="TB", version=FOLD_VERSION + 1), said_by(ELSE, last.seq), deadline=soon()
        )
        seq = (await raised).seq
        for each in (watching, raw):
            await degraded(each)
        await everything_is_refused(raw, artifact)
        assert (await raw.open(artifact)).bytes("w") == data_of("kept", 1000)
        late = field.worker(id="w2", ready=False)
        assert await asyncio.to_thread(late.wait) == UNAVAILABLE_EXIT
        assert "upgrade" in late.text
        assert not await facts_after(bus, seq)


async def test_an_old_reader_among_newer_writers_follows_what_it_knows(field: Field) -> None:
    without = "RoleGranted,SnapshotTaken,Archived"
    old = field.worker(id="w1", host_id="h1", program=("-m", "tests.chaos.older", without))
    new = field.worker(id="w2", host_id="h2")
    async with bus_of(field) as bus, await Raw.unix(old.socket) as there, await Raw.unix(new.socket) as here:
        kept = await there.put({"w": data_of("kept", 1000)}, key="kept")
        await here.resolve("kept", at_least=kept["position"])
        await fact(bus, RoleGranted(role=STORE_ROLE))
        await degraded(there)
        await everything_is_refused(there, kept["artifact"]["artifact"])
        taken = await here.put({"w": data_of("new", 1000)}, key="new")
        record = await there.resolve("new", at_least=taken["position"])
        assert record["artifact"] == taken["artifact"]["artifact"]
        assert (await here.open(kept["artifact"]["artifact"])).bytes("w") == data_of("kept", 1000)
        directory = (await here.stats())["directory"]
        assert (directory["unknown"], directory["degraded"]) == (0, False)
        await asyncio.sleep(TTL_S * 1.5)
        assert await here.live_workers() == ["w1", "w2"], "its heartbeats go on: it serves what it has"
        assert await bodies(here, "SessionEnded") == []
