"""Nodes on one bus in memory, through a faulty network: what was acknowledged is there, once, and read by all."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from tensorbus.bus import Bus, MemoryBus, MemoryCluster, Message, WrongSequenceError
from tensorbus.clock import Deadline
from tensorbus.errors import TensorbusError
from tensorbus.events import MSG_ID
from tensorbus.events._envelope import EXPECTED_FILTER, EXPECTED_SEQ
from tensorbus.ids import WorkerId
from tensorbus.testing import FaultPlan, Node, Report, SimBus, World, disturb, run, search, sweep

FENCE = "tb.ev.key.counter.*"
FAULTS = ("loss", "lost_ack", "duplicate", "slow", "partition_drop", "partition_clog", "repeated")
INTENT = "Intent"
WAVES = ("partition", "pause", "bus_pause", "crash")


async def increment(bus: Bus, node: Node, *, careful: bool) -> str:
    """Append on condition that nobody wrote in between; returns the event's id once it is known to be there."""
    intent = event_id = node.ids.hex(8)
    subject = f"tb.ev.key.counter.{node.name}"
    while True:
        last = await bus.last_on(FENCE, deadline=Deadline(20))
        expected = {EXPECTED_SEQ: str(last.seq if last else 0), EXPECTED_FILTER: FENCE}
        try:
            headers = {MSG_ID: event_id, INTENT: intent, **expected}
            await bus.publish(subject, b"", headers=headers, deadline=Deadline(20))
        except WrongSequenceError:
            node.world.cover("conflict")
        else:
            return event_id
        if not careful:
            event_id = node.ids.hex(8)  # the planted bug: an earlier attempt of ours may have been stored
            continue
        mine = await bus.last_on(subject, deadline=Deadline(20))
        if mine is not None and mine.headers[MSG_ID] == event_id:
            node.world.cover("own_attempt")
            return event_id


def counting(*, careful: bool, for_s: float = 60.0) -> Callable[[World], Coroutine[Any, Any, None]]:
    """Two nodes increment, a third reads, while faults come over them; then all heals and the books are checked."""

    async def scenario(world: World) -> None:
        shared = MemoryBus(MemoryCluster())
        promised: list[str] = []
        read: list[int] = []

        async def writer(node: Node) -> None:
            bus = SimBus(node, shared)
            while True:
                await asyncio.sleep(1.0)
                try:
                    promised.append(await increment(bus, node, careful=careful))
                except TensorbusError:
                    world.cover("gave_up")

        async def reader(node: Node) -> None:
            read.clear()
            async with SimBus(node, shared).read(FENCE, after=0) as reading:
                async for batch in reading:
                    assert reading.position == batch[-1].seq
                    read.extend(message.seq for message in batch)

        def stored() -> list[Message]:
            return shared.cluster.log.after(0, FENCE, count_max=1 << 20)

        def once() -> bool:
            intents = [message.headers[INTENT] for message in stored()]
            return len(intents) == len(set(intents))

        world.always("each increment is stored once", once)
        for name in ("a", "b"):
            world.node(name).start(writer)
        world.node("c").start(reader)
        await disturb(world, ["a", "b", "c"], for_s=for_s)
        world.crash("a")
        world.crash("b")
        await asyncio.sleep(60)  # what is still on its way arrives
        assert set(promised) <= {message.headers[MSG_ID] for message in stored()}
        written = [message.seq for message in stored()]
        await world.eventually("everything is read, in order", lambda: read == written, within_s=30)

    return scenario


def test_an_acknowledged_append_is_there_once_whatever_the_network_does() -> None:
    covers = [f"fault.{name}" for name in (*FAULTS, *WAVES)]
    sweep(counting(careful=True), 25, check_every=20).check(covers=[*covers, "conflict", "own_attempt", "gave_up"])


def test_a_writer_that_misreads_a_refusal_is_found() -> None:
    found = search(counting(careful=False), 100, check_every=20)
    assert found is not None
    assert "each increment is stored once" in str(found)


def test_a_calm_network_loses_nothing_and_repeats_itself_exactly() -> None:
    def once() -> Report:
        return run(counting(careful=True, for_s=20), 5, plan=FaultPlan(), check_every=20).check()

    first, second = once(), once()
    assert first.digest == second.digest
    assert not [name for name in first.covered if name.startswith("fault.")]


def test_a_reader_knows_when_it_has_caught_up() -> None:
    async def scenario(world: World) -> None:
        shared = MemoryBus(MemoryCluster())
        bus = SimBus(world.node("a"), shared)

        async def follow(reading_at: asyncio.Future[None]) -> None:
            async with bus.read(FENCE, after=0) as reading:
                collected = asyncio.create_task(anext(aiter(reading)))
                await reading.reached(seq, deadline=Deadline(10))
                await asyncio.wait_for(reading.caught_up.wait(), 10)
                assert [message.seq for message in await collected] == [seq]
            reading_at.set_result(None)

        seq = await bus.publish("tb.ev.key.counter.a", b"x", headers={MSG_ID: "1"}, deadline=Deadline(5))
        done: asyncio.Future[None] = world.loop.create_future()
        world.node("a").spawn(follow(done), name="follow")
        await done

    run(scenario, 1).check()


def test_heartbeats_pass_and_run_out() -> None:
    async def scenario(world: World) -> None:
        bus = SimBus(world.node("a"), MemoryBus(MemoryCluster()))
        seen: list[bool] = []

        async def watch() -> None:
            async with bus.watch_live() as beats:
                async for beat in beats:
                    seen.append(beat.gone)

        world.node("a").spawn(watch(), name="watch")
        await bus.beat(bus.subjects.live("00" * 8, WorkerId("a")), ttl_s=3, deadline=Deadline(5))
        await world.eventually("gone", lambda: seen == [False, True], within_s=10)

    run(scenario, 1).check()


def asking(for_s: float) -> Callable[[World], Coroutine[Any, Any, None]]:
    """Two nodes ask what two others answer, while faults come over all four."""

    async def scenario(world: World) -> None:
        shared = MemoryBus(MemoryCluster())
        answers: list[int] = []

        async def answerer(node: Node) -> None:
            async def square(question: bytes) -> bytes:
                await asyncio.sleep(node.world.rng(f"work/{question!r}").uniform(0, 3))
                return str(int(question) ** 2).encode()

            async with SimBus(node, shared).answer("tb.rpc.square", square, queue="q"):
                await asyncio.Event().wait()

        async def asker(node: Node) -> None:
            bus = SimBus(node, shared)
            for n in range(1_000_000):
                await asyncio.sleep(0.5)
                try:
                    answer = await bus.ask("tb.rpc.square", str(n).encode(), deadline=Deadline(15))
                except TensorbusError:
                    world.cover("gave_up")
                    continue
                assert int(answer) == n * n
                answers.append(n)

        for name in ("s1", "s2"):
            world.node(name).start(answerer)
        for name in ("a", "b"):
            world.node(name).start(asker)
        await disturb(world, ["a", "b", "s1", "s2"], for_s=for_s)
        healed = len(answers)
        await world.eventually("questions are answered again", lambda: len(answers) > healed + 3, within_s=60)

    return scenario


def test_a_question_gets_its_own_answer_or_an_error_whatever_the_network_does() -> None:
    covers = [f"fault.{name}" for name in ("loss", "lost_ack", "slow", "partition_drop", "partition_clog", *WAVES)]
    sweep(asking(60.0), 15, check_every=20).check(covers=[*covers, "gave_up"])
