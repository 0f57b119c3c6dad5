"""A real server that is killed, stopped, full, emptied or forbidding, and what the bus makes of it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from tensorbus.bus import Appended, EmbeddedServer, Heartbeat, Message, NatsBus, Reader, append, provision
from tensorbus.bus import _reader as reader_module
from tensorbus.clock import Deadline
from tensorbus.errors import (
    ConflictError,
    DeadlineExceededError,
    InvalidArgumentError,
    OutOfSpaceError,
    UnavailableError,
)
from tensorbus.events import MSG_ID
from tensorbus.testing._bus_contract import LIFE, W1, W2, fill, headers, key_bound, replica_added, seqs, soon, take

pytestmark = pytest.mark.integration


@pytest.fixture
async def server(home: Path) -> AsyncIterator[EmbeddedServer]:
    with EmbeddedServer(home / "nats") as server:
        yield server


@pytest.fixture
async def connect(server: EmbeddedServer) -> AsyncIterator[Callable[[], Awaitable[NatsBus]]]:
    buses: list[NatsBus] = []

    async def connect() -> NatsBus:
        bus = await NatsBus.connect(server.url)
        buses.append(bus)
        await provision(bus, deadline=soon())
        return bus

    yield connect
    for bus in buses:
        await bus.close()


Connect = Callable[[], Awaitable[NatsBus]]


async def kill(server: EmbeddedServer) -> None:
    assert server.pid is not None
    os.kill(server.pid, signal.SIGKILL)
    async with soon().scope():
        while server.pid is not None:
            await asyncio.sleep(0.01)


async def follow(reader: Reader, into: list[Message]) -> None:
    async for batch in reader:
        into.extend(batch)


async def until(condition: Callable[[], bool]) -> None:
    async with soon().scope():
        while not condition():
            await asyncio.sleep(0.01)


async def test_a_killed_server_comes_back_and_nothing_is_lost_or_read_twice(
    server: EmbeddedServer, connect: Connect
) -> None:
    bus, url = await connect(), server.url
    written, found = await fill(bus, 50), []
    async with bus.read(bus.subjects.facts, after=0) as reader:
        following = asyncio.create_task(follow(reader, found))
        await until(lambda: len(found) == 50)
        for _ in range(3):
            await kill(server)
            writing = asyncio.create_task(fill(bus, 20))  # waits within its deadline
            await asyncio.sleep(0.1)
            assert not writing.done()
            await asyncio.to_thread(server.start)
            assert server.url == url
            written += await writing
        await until(lambda: len(found) >= 110)
        following.cancel()
        await asyncio.wait({following})
    assert seqs(found) == written


async def test_kills_between_send_and_acknowledgement_append_each_fact_once(
    server: EmbeddedServer, connect: Connect
) -> None:
    bus = await connect()
    stop = asyncio.Event()

    async def author(n: int) -> list[int]:
        mine: list[int] = []
        while not stop.is_set():
            expected = mine[-1] if mine else 0
            outcome = await append(bus, key_bound(f"k{n}", str(len(mine))), headers(expected), deadline=soon())
            assert isinstance(outcome, Appended)  # nobody else writes there
            mine.append(outcome.seq)
        return mine

    authors = [asyncio.create_task(author(n)) for n in range(8)]
    for _ in range(4):
        await asyncio.sleep(0.2)
        await kill(server)
        await asyncio.to_thread(server.start)
    await asyncio.sleep(0.2)
    stop.set()
    acknowledged = sorted(seq for mine in await asyncio.gather(*authors) for seq in mine)
    async with bus.read(bus.subjects.facts, after=0) as reader:
        stored = seqs(await take(reader, len(acknowledged)))
    assert stored == acknowledged


async def test_a_stopped_server_is_waited_for_and_goes_on(server: EmbeddedServer, connect: Connect) -> None:
    bus = await connect()
    written, found = await fill(bus, 5), []
    assert server.pid is not None
    async with bus.read(bus.subjects.facts, after=0) as reader:
        following = asyncio.create_task(follow(reader, found))
        await until(lambda: len(found) == 5)
        os.kill(server.pid, signal.SIGSTOP)
        stat = Path(f"/proc/{server.pid}/stat")
        await until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T")
        writing = asyncio.create_task(fill(bus, 5))
        with pytest.raises(DeadlineExceededError):
            await append(bus, replica_added(), headers(), deadline=Deadline(0.3))
        await asyncio.sleep(2.5)  # past the silence after which the reader makes a new consumer
        os.kill(server.pid, signal.SIGCONT)
        await writing
        written += await fill(bus, 5)
        last = await bus.last_seq(deadline=soon())
        await reader.reached(last, deadline=soon())
        await until(lambda: found[-1].seq == last)
        following.cancel()
        await asyncio.wait({following})
    assert len(set(seqs(found))) == len(found)
    assert seqs(found) == sorted(seqs(found))
    assert len(found) == 16  # the append that nobody waited for was in the stopped server's socket


async def test_a_polite_restart_is_survived_too(server: EmbeddedServer, connect: Connect) -> None:
    bus = await connect()
    written = await fill(bus, 3)
    async with bus.read(bus.subjects.facts, after=0) as reader:
        assert seqs(await take(reader, 3)) == written
        await asyncio.to_thread(server.stop)
        with pytest.raises(UnavailableError):
            await append(bus, replica_added(), headers(), deadline=Deadline(0.2))
        await asyncio.to_thread(server.start)
        more = await fill(bus, 3)
        assert seqs(await take(reader, 3)) == more


async def test_the_live_stream_is_made_anew_and_its_watchers_go_on(server: EmbeddedServer, connect: Connect) -> None:
    bus, other = await connect(), await connect()
    seen: list[Heartbeat] = []

    async def watch() -> None:
        async with other.watch_live() as beats:
            async for beat in beats:
                seen.append(beat)

    watching = asyncio.create_task(watch())
    before = await bus.beat(bus.subjects.live(LIFE, W1), ttl_s=10, deadline=soon())
    await until(lambda: len(seen) == 1)
    await kill(server)
    await asyncio.to_thread(server.start)
    after = await bus.beat(bus.subjects.live(LIFE, W2), ttl_s=10, deadline=soon())
    assert after > before
    await until(lambda: len(seen) == 2)
    watching.cancel()
    await asyncio.wait({watching})
    assert [beat.worker for beat in seen] == [W1, W2]
    assert not any(beat.gone for beat in seen)


async def test_a_watcher_alone_makes_the_live_stream(server: EmbeddedServer, connect: Connect) -> None:
    bus = await connect()
    await kill(server)
    await asyncio.to_thread(server.start)
    async with bus.watch_live() as beats:
        first = asyncio.create_task(anext(aiter(beats)))
        await asyncio.sleep(0.3)
        seq = await bus.beat(bus.subjects.live(LIFE, W1), ttl_s=10, deadline=soon())
        assert (await first).seq == seq


async def test_a_deleted_consumer_is_replaced(connect: Connect) -> None:
    bus = await connect()
    written = await fill(bus, 2)
    async with bus.read(bus.subjects.facts, after=0) as reader:
        assert seqs(await take(reader, 2)) == written
        requests = bus._requests
        await requests.api(f"CONSUMER.DELETE.TB.{reader._consumer}", deadline=soon())  # type: ignore[attr-defined]
        more = await fill(bus, 2)
        assert seqs(await take(reader, 2)) == more


async def test_a_slow_caller_is_waited_for(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_module, "BUFFER_MAX", 100)
    bus = await connect()
    async with bus.read(bus.subjects.facts, after=0) as reader:
        found = await take_slowly(reader, bus, count=1000)
    assert seqs(found) == sorted(set(seqs(found)))
    assert len(found) == 1000


async def take_slowly(reader: Reader, bus: NatsBus, *, count: int) -> list[Message]:
    """Read while others write more than the buffer holds between two batches."""
    first = await fill(bus, 1)
    found = await take(reader, 1)
    assert seqs(found) == first
    lots = [fill(bus, 111, subject=f"tb.ev.replica.x{n}.w1") for n in range(9)]
    await asyncio.gather(*lots)
    return found + await take(reader, count - 1)


async def test_consumers_do_not_pile_up(connect: Connect) -> None:
    bus = await connect()
    await fill(bus, 2)
    for _ in range(20):
        async with bus.read(bus.subjects.facts, after=0) as reader:
            await take(reader, 2)

    async def consumers() -> int:
        info = await bus._requests.api("STREAM.INFO.TB", deadline=soon())
        return int(info["state"]["consumer_count"])

    async with soon().scope():
        while await consumers():
            await asyncio.sleep(0.02)


async def test_the_log_needs_jetstream_and_a_usable_stream(connect: Connect) -> None:
    bus = await connect()
    requests = bus._requests
    await requests.api("STREAM.DELETE.TB", deadline=soon())
    with pytest.raises(UnavailableError, match="no stream"):
        await bus.publish("tb.ev.replica.x.w1", b"", headers={MSG_ID: "x"}, deadline=soon())
    foreign = {"name": "TB", "subjects": ["tb.ev.>"], "storage": "file"}
    await requests.api("STREAM.CREATE.TB", foreign, deadline=soon())
    with pytest.raises(ConflictError, match="subjects"):
        await provision(bus, deadline=soon())
    await requests.api("STREAM.DELETE.TB", deadline=soon())
    taken = {"name": "OTHER", "subjects": ["tb.ev.>"], "storage": "file"}
    await requests.api("STREAM.CREATE.OTHER", taken, deadline=soon())
    with pytest.raises(ConflictError, match="overlap"):
        await provision(bus, deadline=soon())


async def test_a_lost_log_never_reuses_a_sequence(connect: Connect) -> None:
    bus = await connect()
    last = (await fill(bus, 3))[-1] + 10**9
    await bus._requests.api("STREAM.DELETE.TB", deadline=soon())
    with pytest.raises(UnavailableError, match=f"remembers its sequence {last}"):
        await provision(bus, remembered_seq=last, deadline=soon())
    await provision(bus, remembered_seq=last, allow_recreate=True, deadline=soon())
    assert (await fill(bus, 1))[0] == last + 1


async def test_nobody_at_the_url() -> None:
    with pytest.raises(UnavailableError, match=r"127\.0\.0\.1:1"):
        await NatsBus.connect("nats://user:secret@127.0.0.1:1", deadline=Deadline(0.5))
    with pytest.raises(UnavailableError) as caught:
        await NatsBus.connect("nats://user:secret@127.0.0.1:1", deadline=Deadline(0.2))
    assert "secret" not in str(caught.value)
    with pytest.raises(InvalidArgumentError):
        await NatsBus.connect("")


async def test_too_many_bytes_at_once_are_refused(server: EmbeddedServer, connect: Connect) -> None:
    bus = await connect()
    assert server.pid is not None
    os.kill(server.pid, signal.SIGSTOP)
    outcomes = await asyncio.gather(
        *(
            bus.publish(f"tb.ev.replica.x{n}.w1", bytes(1 << 20), headers={MSG_ID: str(n)}, deadline=Deadline(0.5))
            for n in range(80)
        ),
        return_exceptions=True,
    )
    os.kill(server.pid, signal.SIGCONT)
    assert sum(isinstance(outcome, OutOfSpaceError) for outcome in outcomes) == 16
    assert all(isinstance(outcome, (OutOfSpaceError, DeadlineExceededError)) for outcome in outcomes)
    assert await bus.last_seq(deadline=soon()) > 0


async def test_a_client_that_gives_up_is_replaced(connect: Connect) -> None:
    bus = await connect()
    written = await fill(bus, 2)
    async with bus.read(bus.subjects.facts, after=0) as reader:
        assert seqs(await take(reader, 2)) == written
        await bus._link.client.close()  # as after an authorization error
        more = await fill(bus, 2)
        assert seqs(await take(reader, 2)) == more


async def test_a_half_open_connection_is_noticed(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    bus = await connect()
    written = await fill(bus, 2)
    async with bus.read(bus.subjects.facts, after=0) as reader:
        assert seqs(await take(reader, 2)) == written
        transport = bus._link.client._transport
        transport._io_writer.transport.abort()  # type: ignore[attr-defined,union-attr]
        more = await fill(bus, 2)
        assert seqs(await take(reader, 2)) == more


async def test_closing_does_not_wait_for_a_stopped_server(server: EmbeddedServer, connect: Connect) -> None:
    bus = await connect()
    assert server.pid is not None
    os.kill(server.pid, signal.SIGSTOP)
    writing = [
        asyncio.create_task(
            bus.publish("tb.ev.replica.x.w1", bytes(1 << 20), headers={MSG_ID: str(n)}, deadline=soon())
        )
        for n in range(40)
    ]
    await asyncio.sleep(0.2)
    async with asyncio.timeout(5):
        await bus.close()
        outcomes = await asyncio.gather(*writing, return_exceptions=True)
    os.kill(server.pid, signal.SIGCONT)
    assert all(isinstance(outcome, UnavailableError) for outcome in outcomes)
