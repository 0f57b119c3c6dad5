"""The twin's faults on virtual time, and what append makes of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import pytest

from tensorbus.bus import Appended, Conflict, Fault, Heartbeat, MemoryBus, MemoryCluster, Message, append, put_blob
from tensorbus.clock import Deadline
from tensorbus.errors import DeadlineExceededError, DeniedError, UnavailableError
from tensorbus.testing import SimLoop
from tensorbus.testing._bus_contract import LIFE, W1, W2, echo, fill, headers, key_bound, replica_added, seqs, take


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    with asyncio.Runner(loop_factory=lambda: SimLoop(1)) as runner:
        runner.run(scenario())


def first_only(fault: Fault) -> Callable[[str, Mapping[str, str]], Fault]:
    faults = [fault]
    return lambda _subject, _headers: faults.pop() if faults else Fault()


@pytest.mark.parametrize("replicated", [False, True])
@pytest.mark.parametrize(
    "fault", [Fault(lose_request=True), Fault(lose_reply=True), Fault(repeat=True), Fault(delay_s=3)]
)
def test_a_disturbed_append_is_done_once(fault: Fault, replicated: bool) -> None:
    async def scenario() -> None:
        cluster = MemoryCluster(replicated=replicated)
        bus = MemoryBus(cluster)
        cluster.on_publish = first_only(fault)
        appended = await append(bus, key_bound(), headers(0), deadline=Deadline(30))
        assert appended == Appended(cluster.log.last_seq)
        cluster.on_publish = first_only(fault)
        await append(bus, replica_added(), headers(), deadline=Deadline(30))
        assert len(cluster.log.after(0, "tb.ev.>", count_max=10)) == 2

    run(scenario)


def test_a_lost_acknowledgement_and_a_successor_still_make_an_append() -> None:
    async def scenario() -> None:
        cluster = MemoryCluster()
        one, two = MemoryBus(cluster), MemoryBus(cluster)
        cluster.on_publish = first_only(Fault(lose_reply=True))
        mine = asyncio.create_task(append(one, key_bound(), headers(0), deadline=Deadline(30)))
        await asyncio.sleep(0.1)
        seq = cluster.log.last_seq
        assert await append(two, key_bound(artifact="b"), headers(seq, author=W2), deadline=Deadline(5)) == Appended(
            seq + 1
        )
        assert await mine == Appended(seq)
        assert await append(one, key_bound(), headers(seq), deadline=Deadline(5)) == Conflict(seq + 1)

    run(scenario)


def test_a_paused_server_stalls_all_and_acts_on_what_waited() -> None:
    async def scenario() -> None:
        cluster = MemoryCluster()
        bus = MemoryBus(cluster)
        cluster.pause()
        with pytest.raises(DeadlineExceededError):
            await append(bus, key_bound(), headers(0), deadline=Deadline(10))
        waiting = asyncio.create_task(append(bus, replica_added(), headers(), deadline=Deadline(60)))
        await asyncio.sleep(20)
        assert not waiting.done()
        cluster.resume()
        assert isinstance(await waiting, Appended)
        assert len(cluster.log.after(0, "tb.ev.>", count_max=10)) == 2

    run(scenario)


def test_a_cut_connection_comes_back_where_it_was() -> None:
    async def scenario() -> None:
        cluster = MemoryCluster()
        bus, other = MemoryBus(cluster), MemoryBus(cluster)
        written = await fill(bus, 2)
        async with bus.read("tb.ev.>", after=0) as reader:
            assert seqs(await take(reader, 2)) == written
            bus.disconnect()
            with pytest.raises(UnavailableError):
                await append(bus, key_bound(), headers(0), deadline=Deadline(1))
            more = await fill(other, 2)
            waiting = asyncio.create_task(take(reader, 2))
            await asyncio.sleep(5)
            assert not waiting.done()
            bus.reconnect()
            assert seqs(await waiting) == more

    run(scenario)


def test_what_is_refused_is_denied() -> None:
    async def scenario() -> None:
        cluster = MemoryCluster()
        cluster.on_publish = first_only(Fault(refuse=True))
        with pytest.raises(DeniedError):
            await append(MemoryBus(cluster), key_bound(), headers(0), deadline=Deadline(1))

    run(scenario)


def test_a_late_delivery_keeps_order() -> None:
    async def scenario() -> None:
        cluster = MemoryCluster()
        bus = MemoryBus(cluster)
        cluster.on_deliver = lambda message: 1.0 if isinstance(message, Message) else 0.0
        async with bus.read("tb.ev.>", after=0) as reader:
            writing = asyncio.create_task(fill(bus, 20))
            found = await take(reader, 20)
            assert seqs(found) == await writing

    run(scenario)


def test_a_paused_bus_expires_everybody_at_once_and_a_restarted_one_nobody() -> None:
    async def scenario() -> None:
        cluster = MemoryCluster()
        bus, seen = MemoryBus(cluster), list[Heartbeat]()

        async def watch() -> None:
            async with bus.watch_live() as beats:
                async for beat in beats:
                    seen.append(beat)

        watching = asyncio.create_task(watch())
        for worker in (W1, W2):
            await bus.beat(bus.subjects.live(LIFE, worker), ttl_s=2, deadline=Deadline(5))
        await asyncio.sleep(1)
        cluster.pause()
        await asyncio.sleep(10)
        assert not any(beat.gone for beat in seen)
        cluster.resume()
        await asyncio.sleep(0.1)
        assert [(beat.worker, beat.gone) for beat in seen[2:]] == [(W1, True), (W2, True)]
        seen.clear()
        before = await bus.beat(bus.subjects.live(LIFE, W1), ttl_s=2, deadline=Deadline(5))
        cluster.restart()
        await asyncio.sleep(10)
        assert not any(beat.gone for beat in seen)
        assert await bus.beat(bus.subjects.live(LIFE, W1), ttl_s=2, deadline=Deadline(5)) > before
        watching.cancel()
        await asyncio.wait({watching})

    run(scenario)


def test_a_blob_survives_lost_chunks() -> None:
    async def scenario() -> None:
        cluster = MemoryCluster()
        faults = iter([Fault(lose_request=True), Fault(lose_reply=True)])
        cluster.on_publish = lambda _subject, _headers: next(faults, Fault())
        ref = await put_blob(MemoryBus(cluster), b"x" * 1000, author=W1, deadline=Deadline(30))
        assert ref.chunks == len(cluster.log.after(0, "tb.blob.>", count_max=10))

    run(scenario)


def test_a_question_outlasts_a_cut_connection_and_a_pause() -> None:
    async def scenario() -> None:
        cluster = MemoryCluster()
        bus, other = MemoryBus(cluster), MemoryBus(cluster)
        async with other.answer("tb.rpc.x", echo, queue="q"):
            other.disconnect()
            bus.disconnect()
            asking = asyncio.create_task(bus.ask("tb.rpc.x", b"1", deadline=Deadline(30)))
            await asyncio.sleep(1)
            bus.reconnect()  # who answers comes back later: that is waited for
            await asyncio.sleep(1)
            other.reconnect()
            assert await asking == b"1"
            cluster.pause()
            asking = asyncio.create_task(bus.ask("tb.rpc.x", b"2", deadline=Deadline(30)))
            await asyncio.sleep(10)
            assert not asking.done()
            cluster.resume()
            assert await asking == b"2"
            other.disconnect()
            with pytest.raises(UnavailableError):
                await bus.ask("tb.rpc.x", b"3", deadline=Deadline(30))

    run(scenario)
