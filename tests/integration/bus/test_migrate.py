"""From one server to three: the same facts at the same sequences, or nothing at all."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tensorbus.bus import Appended, EmbeddedServer, Message, NatsBus, StreamLimits, append, put_blob
from tensorbus.bus import _migrate as migrate_module
from tensorbus.bus._admin import BusAdmin
from tensorbus.bus._migrate import migrate, open_sessions
from tensorbus.clock import Deadline
from tensorbus.errors import ConflictError, InvalidArgumentError, NotFoundError, TensorbusError, UnavailableError
from tensorbus.events import SessionEnd, SessionEnded, SessionOpened
from tensorbus.ids import Incarnation
from tensorbus.testing._bus_contract import LIFE, W1, headers, replica_added, soon
from tensorbus.testing._nats_cluster import NatsCluster

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsCluster]:
    with NatsCluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest.fixture
def one(home: Path) -> Iterator[EmbeddedServer]:
    with EmbeddedServer(home / "nats") as server:
        yield server


@pytest.fixture
async def source(one: EmbeddedServer) -> AsyncIterator[BusAdmin]:
    admin = await BusAdmin.connect(one.url)
    await admin.init(StreamLimits(), deadline=soon())
    yield admin
    await admin.close()


@pytest.fixture
async def target(cluster: NatsCluster) -> AsyncIterator[BusAdmin]:
    admin = await BusAdmin.connect(cluster.url)
    yield admin
    for stream in admin.subjects.streams:
        with contextlib.suppress(TensorbusError):
            await admin.requests.api(f"STREAM.DELETE.{stream}", deadline=soon(20))
    await admin.close()


async def fill(bus: NatsBus, n: int) -> None:
    for _ in range(n):
        await append(bus, replica_added(), headers(), deadline=soon())
    await put_blob(bus, bytes(range(256)) * 4096, author=W1, deadline=soon())


async def everything(bus: NatsBus) -> list[Message]:
    found: list[Message] = []
    async with bus.read(f"{bus.subjects.prefix}.>", after=0) as reader, soon(20).scope():
        async for batch in reader:
            found += batch
            if reader.caught_up.is_set():
                return found
    raise AssertionError


def opened() -> SessionOpened:
    return SessionOpened(
        worker=W1,
        incarnation=Incarnation(LIFE),
        host="h",
        roles=("basic",),
        data="",
        control="",
        pool_bytes=0,
        ttl_ns=1,
        pid=1,
        version="0",
    )


async def test_every_message_is_there_at_its_sequence_and_the_log_goes_on(source: BusAdmin, target: BusAdmin) -> None:
    await fill(source.bus, 300)
    said: list[tuple[int, int]] = []
    moved = await migrate(
        source, target, replicas=3, progress=lambda done, most: said.append((done, most)), deadline=Deadline(60)
    )
    before, after = await everything(source.bus), await everything(target.bus)
    assert after == before
    assert (moved.messages, moved.last_seq, moved.replicas) == (len(before), before[-1].seq, 3)
    assert said and all(0 < done <= most for done, most in said)
    found = await target.stream("TB", deadline=soon())
    assert found is not None
    assert (found.replicas, len(found.copies), found.problem) == (3, 2, "")
    pages, before_pages = (
        await target.stream("TB_PAGES", deadline=soon()),
        await source.bus.pages.last_seq(deadline=soon()),
    )
    assert pages is not None
    assert (pages.replicas, pages.first_seq > before_pages) == (3, True), "tokens only grow"
    await target.init(StreamLimits(replicas=3), deadline=soon(20))
    outcome = await append(target.bus, replica_added(), headers(), deadline=soon(20))
    assert outcome == Appended(moved.last_seq + 1)
    assert (await source.check(deadline=soon())).streams[0].last_seq == moved.last_seq


async def test_a_target_that_has_the_log_is_left_alone(source: BusAdmin, target: BusAdmin) -> None:
    await target.init(StreamLimits(replicas=3), deadline=soon(20))
    await append(target.bus, replica_added(), headers(), deadline=soon(20))
    await fill(source.bus, 1)
    with pytest.raises(ConflictError, match="already"):
        await migrate(source, target, replicas=3, deadline=Deadline(30))
    assert len(await everything(target.bus)) == 1


async def test_workers_must_have_left(source: BusAdmin, target: BusAdmin) -> None:
    await append(source.bus, opened(), headers(expected=0), deadline=soon())
    await source.bus.beat(source.subjects.live(LIFE, W1), ttl_s=2, deadline=soon())
    with pytest.raises(ConflictError, match="still run: w1"):
        await migrate(source, target, replicas=1, force=True, deadline=Deadline(30))
    async with soon(20).scope():
        while (await source.stream("TB_LIVE", deadline=soon())).messages:  # type: ignore[union-attr]
            await asyncio.sleep(0.1)
    with pytest.raises(ConflictError, match="have not left: w1"):
        await migrate(source, target, replicas=1, deadline=Deadline(30))
    assert await open_sessions(source, deadline=soon()) == ["w1"]
    assert (await migrate(source, target, replicas=1, force=True, deadline=Deadline(30))).messages == 1
    await target.requests.api("STREAM.DELETE.TB", deadline=soon())
    last = await source.bus.last_seq(deadline=soon())
    ended = SessionEnded(worker=W1, incarnation=Incarnation(LIFE), reason=SessionEnd.LEFT)
    await append(source.bus, ended, headers(expected=last), deadline=soon())
    assert (await migrate(source, target, replicas=1, deadline=Deadline(30))).messages == 2


async def test_who_writes_meanwhile_is_noticed(
    source: BusAdmin, target: BusAdmin, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fill(source.bus, 3)
    plain = migrate_module._copy

    async def and_write(*args: object, **more: object) -> None:
        await plain(*args, **more)  # type: ignore[arg-type]
        await append(source.bus, replica_added(), headers(), deadline=soon())

    monkeypatch.setattr(migrate_module, "_copy", and_write)
    with pytest.raises(ConflictError, match="somebody wrote"):
        await migrate(source, target, replicas=1, deadline=Deadline(30))
    assert await target.stream("TB", deadline=soon()) is None


async def test_too_few_servers_leave_nothing_behind(source: BusAdmin, target: BusAdmin) -> None:
    await fill(source.bus, 3)
    with pytest.raises(InvalidArgumentError, match="5 servers"):
        await migrate(source, target, replicas=5, deadline=Deadline(30))
    assert await target.stream("TB", deadline=soon()) is None
    assert (await migrate(source, target, replicas=3, deadline=Deadline(60))).messages == 4


async def test_no_log_and_an_empty_one(source: BusAdmin, target: BusAdmin) -> None:
    assert (await migrate(source, target, replicas=1, deadline=Deadline(30))).messages == 0
    await target.requests.api("STREAM.DELETE.TB", deadline=soon())
    await source.requests.api("STREAM.DELETE.TB", deadline=soon())
    with pytest.raises(NotFoundError):
        await migrate(source, target, replicas=1, deadline=Deadline(30))


SIX_MIB = random.Random(7).randbytes(6 << 20)


@pytest.mark.parametrize("when", ["cancelled", "source lost", "target lost"])
async def test_an_interruption_leaves_no_half_log(
    source: BusAdmin, target: BusAdmin, one: EmbeddedServer, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    await source.bus.publish("tb.blob.x.0.w1", SIX_MIB[:900_000], headers={"Nats-Msg-Id": "x"}, deadline=soon())
    for n in range(6):
        await source.bus.publish(
            f"tb.blob.x.{n + 1}.w1", SIX_MIB[n * 900_000 :][:900_000], headers={"Nats-Msg-Id": f"x{n}"}, deadline=soon()
        )
    before = await everything(source.bus)

    def interrupt(done: int, _most: int) -> None:
        if done < 1_000_000:
            return
        if when == "cancelled":
            moving.cancel()
        elif when == "source lost":
            one.kill()
        else:
            target.link.client._transport._io_writer.transport.abort()

    moving = asyncio.create_task(migrate(source, target, replicas=1, progress=interrupt, deadline=Deadline(30)))
    with pytest.raises((asyncio.CancelledError, UnavailableError)):
        await moving
    assert await target.stream("TB", deadline=soon()) is None
    await asyncio.to_thread(one.start)
    assert await everything(source.bus) == before
    assert (await migrate(source, target, replicas=1, deadline=Deadline(60))).messages == len(before)


async def test_the_reports(source: BusAdmin, cluster: NatsCluster) -> None:
    again = await source.init(StreamLimits(), deadline=soon())
    assert [report.made for report in again] == [False, False, False]
    report = await source.check(deadline=soon())
    assert report.version.startswith("2.")
    assert report.api_level >= 4
    assert report.user is not None and report.user.publish_allow is None
    assert report.ahead_ns is not None and abs(report.ahead_ns) < 1_000_000_000
    assert report.missing == ()
    await source.requests.api("STREAM.DELETE.TB_LIVE", deadline=soon())
    assert (await source.check(deadline=soon())).missing == ("TB_LIVE",)
    with pytest.raises(InvalidArgumentError, match="only one"):
        await source.init(StreamLimits(replicas=3), deadline=soon())
    with pytest.raises(UnavailableError, match="remembers"):
        await source.requests.api("STREAM.DELETE.TB", deadline=soon())
        await source.init(StreamLimits(), remembered_seq=7, deadline=soon())
    made = await source.init(StreamLimits(), remembered_seq=9 * 10**15, after_loss=True, deadline=soon())
    assert made[0].made and made[0].last_seq == 9 * 10**15
