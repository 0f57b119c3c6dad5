"""A purge overtakes a worker that stood still; an aggregate that was emptied by one still says whether it is free."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from tensorbus.bus import Appended, Bus, Conflict, NatsBus, append, provision
from tensorbus.clock import NS_PER_S, Deadline
from tensorbus.events import DestroyReason, Headers, LogPurged, PurgeCompleted, aggregate_of
from tensorbus.feeds import Author
from tensorbus.ids import ArtifactId, SystemIds, WorkerId, new_event_id
from tensorbus.lifecycle import forgettable, rules
from tests.chaos.conftest import Field
from tests.chaos.load import Load, in_step
from tests.chaos.wire import Wire
from tests.integration.workers.raw import Raw
from tests.sizes import SIZES
from tests.unit.feeds.voices import Keeper, reading, settled, speaking
from tests.unit.lifecycle import history as h

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(SIZES.timeout_s)]
DELAY_S = 1.0
STORE, OLD, OTHER = WorkerId("store"), WorkerId("old"), WorkerId("other")
WIDE = "x" * 8000
"""A principal that makes facts so wide that a server soon waits for who does not read them."""


def soon() -> Deadline:
    return Deadline(30, what="a step of a test")


@asynccontextmanager
async def bus_at(url: str) -> AsyncIterator[Bus]:
    bus = await NatsBus.connect(url)
    try:
        await provision(bus, deadline=soon())
        yield bus
    finally:
        await bus.close()


@asynccontextmanager
async def store_at(url: str) -> AsyncIterator[Keeper]:
    """A voice that has the store's role."""
    async with bus_at(url) as bus, speaking(bus, STORE) as author:
        made = Keeper(author)
        await made.take_role()
        yield made


async def announced(store: Keeper, *, forget: int = 0) -> LogPurged:
    """Snapshot all that there is, announce its purge, and wait for the delay to pass."""
    stored = await store.snapshot()
    delay_ns = int(DELAY_S * NS_PER_S)
    fact = LogPurged(stream="TB", upto=stored.fact.upto, snapshot=stored.seq, forget=forget, delay_ns=delay_ns)
    await store.author.decide(lambda _: fact, deadline=soon())
    await asyncio.sleep(DELAY_S * 1.2)
    return fact


async def done(store: Keeper, fact: LogPurged) -> None:
    completed = PurgeCompleted(stream="TB", upto=fact.upto, forget=fact.forget)
    await store.author.decide(lambda _: completed, deadline=soon())


async def emptied(store: Keeper, fact: LogPurged) -> None:
    """Take what is to be forgotten off the log, of which the fold has not heard yet."""
    for _, about in forgettable(store.state, fact.forget):
        await store.bus.purge(store.bus.subjects.fence(about), upto=fact.forget, keep_last=False, deadline=soon())


async def fill(store: Keeper, count: int, *, principal: str = "") -> int:
    """Names that come and go on one artifact."""
    seq = 0
    for n in range(count):
        for fact in (h.bound(f"k{n % 50}", h.X, rebind=True), h.unbound(f"k{n % 50}", h.X)):
            seq, _ = await store.author.decide(lambda _, fact=fact: fact, deadline=soon(), principal=principal)
    return seq


# -- who was overtaken ------------------------------------------------------------------------------------------------


async def test_a_worker_that_stood_still_past_a_purge_begins_anew_and_has_the_same_state(field: Field) -> None:
    field.configure(purge_delay_s=DELAY_S)
    one, two = (field.worker(id=f"w{n}", host_id=f"h{n}", session_ttl_s=60) for n in (1, 2))
    async with AsyncExitStack() as stack:
        raws = [await stack.enter_async_context(await Raw.unix(each.socket)) for each in (one, two)]
        store = await stack.enter_async_context(store_at(field.url))
        await store.author.decide(lambda state: rules.birth(state, h.put(h.X, None)), deadline=soon())
        load = Load(raws)
        for number in range(SIZES.purges):
            for raw in raws:
                await load.put(raw, f"{number}/{raw.said['worker']}")
            one.pause()
            await fill(store, 200, principal=WIDE)
            await load.put(raws[1], f"{number}/meanwhile")
            await store.author.feed.reached(load.position, deadline=soon())
            fact = await announced(store)
            assert await store.purge(fact.upto) > 300
            await done(store, fact)
            await fill(store, 5)
            one.resume()
            await load.put(raws[0], f"{number}/again")
            assert await in_step(raws) == store.state.hash()
            figures = [(await raw.stats())["directory"] for raw in raws]
            assert [(each["rebuilds"], each["gaps"]) for each in figures] == [(number + 1, 0), (0, 0)]
        for raw in raws:
            await load.check(raw)
        assert all(worker.alive for worker in (one, two))


# -- what is taken, and what is free ----------------------------------------------------------------------------------


async def propose(bus: Bus, artifact: ArtifactId) -> Appended | Conflict:
    """What somebody would append who believes that an id was never taken."""
    fact = h.put(artifact)
    headers = Headers(event_id=new_event_id(SystemIds()), author=OTHER, incarnation=h.FIRST, expected=0)
    assert aggregate_of(fact).contested
    return await append(bus, fact, headers, deadline=soon())


async def birth(author: Author, artifact: ArtifactId) -> object:
    """Put under a given id; the fact, or the artifact that has it."""
    _, outcome = await author.decide(lambda state: rules.birth(state, h.put(artifact)), deadline=soon())
    return outcome


async def end(author: Author, artifact: ArtifactId) -> int:
    def rule(state: object) -> object:
        return rules.destroy(author.feed.live.state, tenant=h.T, artifact=artifact, reason=DestroyReason.ASKED)

    seq, _ = await author.decide(rule, deadline=soon())  # type: ignore[arg-type]  # a rule of one state
    return seq


LIVING, ENDED = ArtifactId("living"), ArtifactId("ended")


async def test_a_purge_leaves_no_taken_id_looking_free(field: Field) -> None:
    async with store_at(field.url) as store, bus_at(field.url) as bus, speaking(bus, OTHER) as author:
        for artifact in (LIVING, ENDED):
            await birth(author, artifact)
        last = await end(author, ENDED)
        await store.author.feed.reached(last, deadline=soon())
        fact = await announced(store)
        assert await store.purge(fact.upto) > 0
        await done(store, fact)
        for artifact in (LIVING, ENDED):
            assert isinstance(await propose(bus, artifact), Conflict)
        async with bus_at(field.url) as fresh, speaking(fresh, OLD) as late:
            assert late.feed.snapshot_used == fact.upto
            assert isinstance(await birth(late, LIVING), rules.Existing)
            again = await birth(late, ENDED)  # a new life of an id whose former one is known
            assert again == h.put(ENDED)
            assert isinstance(await propose(bus, ENDED), Conflict)


async def test_what_is_forgotten_is_free_and_who_remembers_it_gets_through(field: Field) -> None:
    async with (
        store_at(field.url) as store,
        bus_at(field.url) as bus,
        speaking(bus, OTHER) as author,
        Wire(field.url) as wire,
        bus_at(wire.url) as far,
        speaking(far, OLD) as old,
    ):
        for artifact in (LIVING, ENDED):
            await birth(author, artifact)
        last = await end(author, ENDED)
        for each in (store.author, old):
            await each.feed.reached(last, deadline=soon())
        fact = await announced(store, forget=last)
        await store.purge(fact.upto)
        await emptied(store, fact)
        # The server has no message of it, and every fold still expects one: nobody may hang, nobody may win twice.
        waiting = [asyncio.create_task(birth(each, ENDED)) for each in (author, old)]
        await asyncio.sleep(0.3)
        assert not any(task.done() for task in waiting)
        await done(store, fact)
        outcomes = await asyncio.gather(*waiting)
        assert sorted(isinstance(outcome, rules.Existing) for outcome in outcomes) == [False, True]
        assert isinstance(await propose(bus, ENDED), Conflict)
        assert isinstance(await propose(bus, LIVING), Conflict)
        await settled(lambda: len({each.feed.live.state.hash() for each in (author, old, store.author)}) == 1)


async def test_an_author_who_slept_through_it_all_reads_again_and_gets_through(field: Field) -> None:
    async with (
        store_at(field.url) as store,
        Wire(field.url) as wire,
        bus_at(wire.url) as far,
        speaking(far, OLD) as old,
        bus_at(field.url) as near,
        reading(near) as up,
    ):
        await birth(old, ENDED)
        last = await end(old, ENDED)
        await store.author.feed.reached(last, deadline=soon())
        with wire.pulled():
            fact = await announced(store, forget=last)
            await store.purge(fact.upto)
            await emptied(store, fact)
            await done(store, fact)
            assert old.feed.live.state.head(aggregate_of(h.put(ENDED))) == last
        assert await birth(old, ENDED) == h.put(ENDED)
        assert old.feed.rebuilds <= 1
        await settled(lambda: up.live.state.hash() == old.feed.live.state.hash() == store.state.hash())
