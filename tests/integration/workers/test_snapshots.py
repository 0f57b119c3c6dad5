"""Snapshots on a real server: who starts from one, or must begin anew from one, has the state of the whole log."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from urllib.parse import urlsplit

import pytest

from tensorbus.bus import NatsBus, provision
from tensorbus.errors import CorruptError, NotFoundError, TensorbusError, UnavailableError
from tensorbus.events import Subjects
from tensorbus.ids import ArtifactId
from tensorbus.lifecycle import dump, rules
from tensorbus.testing._processes import WorkerProgram
from tests.integration.conftest import Nats
from tests.integration.workers.raw import Raw
from tests.unit.feeds.test_rebuild import sealed
from tests.unit.feeds.voices import Keeper, Stored, reading, settled, soon, speaking
from tests.unit.lifecycle import history as h

pytestmark = pytest.mark.integration
Start = Callable[..., WorkerProgram]
Connect = Callable[[str], Awaitable[NatsBus]]


@pytest.fixture
async def connect(nats: Nats) -> AsyncIterator[Connect]:
    async with contextlib.AsyncExitStack() as stack:

        async def made(url: str = nats.url) -> NatsBus:
            bus = await NatsBus.connect(url, subjects=Subjects(nats.prefix))
            stack.push_async_callback(bus.close)
            await provision(bus, deadline=soon())
            return bus

        yield made


@pytest.fixture
async def store(nats: Nats, connect: Connect) -> AsyncIterator[Keeper]:
    async with speaking(await connect(nats.url), h.W2) as author:
        keeper = Keeper(author)
        await keeper.take_role()
        yield keeper


class Cable:
    """A way to a server that can be pulled out."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._to = (parts.hostname, parts.port)
        self._pulled = False
        self._writers: dict[asyncio.StreamWriter, None] = {}
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Cable:
        self._server = await asyncio.start_server(self._carry, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._server is not None
        self._server.close()
        self.pull()

    @property
    def url(self) -> str:
        assert self._server is not None
        return f"nats://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def pull(self) -> None:
        self._pulled = True
        for writer in list(self._writers):
            writer.transport.abort()

    def plug(self) -> None:
        self._pulled = False

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._pulled:
            writer.transport.abort()
            return
        there, back = await asyncio.open_connection(*self._to)
        self._writers.update({writer: None, back: None})
        with contextlib.suppress(OSError):
            await asyncio.gather(_pump(reader, back), _pump(there, writer))
        for end in (writer, back):
            self._writers.pop(end, None)
            end.transport.abort()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()
    writer.transport.abort()


async def fill(store: Keeper, count: int, *, stem: str = "a") -> int:
    """Artifacts with keys that come and go; the last sequence."""
    seq = 0
    for n in range(count):
        artifact = ArtifactId(f"{stem}{n}")
        for fact in (
            h.put(artifact, None),
            h.bound(f"{stem}/{n}", artifact),
            h.bound("passing", artifact, rebind=True),
        ):
            seq, _ = await store.author.decide(lambda _, fact=fact: fact, deadline=soon())
    return seq


async def purged(store: Keeper, stored: Stored) -> None:
    await store.announce(stored)
    assert await store.purge(stored.fact.upto) > 0


async def test_a_worker_that_starts_from_a_snapshot_has_the_state_of_the_whole_log(
    nats: Nats, store: Keeper, start_worker: Start
) -> None:
    await fill(store, 60)
    first = start_worker(id="w1", host_id="h1")
    stored = await store.snapshot()
    await fill(store, 5, stem="b")
    second = start_worker(id="w3", host_id="h1")
    await purged(store, stored)
    third = start_worker(id="w4", host_id="h1")
    async with contextlib.AsyncExitStack() as stack:
        raws = [
            await stack.enter_async_context(await Raw.unix(each.socket, tenant=h.T)) for each in (first, second, third)
        ]
        seq = await fill(store, 1, stem="c")
        for raw in raws:
            await raw.resolve("c/0", at_least=seq)
        found = [(await raw.stats())["directory"] for raw in raws]
    await store.author.feed.reached(seq, deadline=soon())
    assert {each["hash"] for each in found} == {store.state.hash()}
    assert [each["snapshot"] for each in found] == [None, stored.fact.upto, stored.fact.upto]
    assert [(each["degraded"], each["rebuilds"]) for each in found] == [(False, 0)] * 3


async def test_a_reader_cut_off_during_a_purge_begins_anew(nats: Nats, connect: Connect, store: Keeper) -> None:
    await fill(store, 20)
    async with (
        Cable(nats.url) as cable,
        reading(await connect(cable.url)) as cut,
        reading(await connect(nats.url)) as up,
    ):
        cable.pull()
        await fill(store, 20, stem="b")
        await store.author.decide(
            lambda state: rules.destroy(state, tenant=h.T, artifact=ArtifactId("a3"), reason=h.DestroyReason.ASKED),
            deadline=soon(),
        )
        stored = await store.snapshot()
        await purged(store, stored)
        seq = await fill(store, 5, stem="c")
        assert cut.live.state.seq < stored.fact.upto
        cable.plug()
        await cut.reached(seq, deadline=soon())
        await settled(lambda: cut.rebuilds == 1 and not cut.degraded)
        await up.reached(seq, deadline=soon())
        assert cut.live.state.hash() == cut.live.state.full_hash() == up.live.state.hash()
        cut.live.state.validate()
        assert (cut.snapshot_used, up.snapshot_used, up.rebuilds) == (stored.fact.upto, None, 0)


async def test_a_short_cut_needs_no_new_beginning(nats: Nats, connect: Connect, store: Keeper) -> None:
    async with Cable(nats.url) as cable, reading(await connect(cable.url)) as cut:
        for n in range(3):
            cable.pull()
            seq = await fill(store, 3, stem=f"r{n}-")
            cable.plug()
            await cut.reached(seq, deadline=soon())
        assert cut.rebuilds == 0
        assert cut.live.state.hash() == store.state.hash()


def newer(written: bytes) -> bytes:
    return sealed(written.replace(b'"fold":1', b'"fold":2'))


async def drop_blob(store: Keeper, stored: Stored) -> None:
    blob = f"{store.bus.subjects.prefix}.blob.{stored.fact.blob.digest}.>"
    assert await store.bus.purge(blob, upto=1 << 62, keep_last=False, deadline=soon()) > 0


@pytest.mark.parametrize(
    ("how", "error"), [("missing", NotFoundError), ("corrupt", CorruptError), ("newer", UnavailableError)]
)
async def test_an_unusable_snapshot_is_made_good_by_a_whole_log_and_named_without_one(
    nats: Nats, connect: Connect, store: Keeper, how: str, error: type[TensorbusError]
) -> None:
    await fill(store, 10)
    written = b"".join(dump(store.state))
    body = {"missing": None, "corrupt": written[: len(written) // 2], "newer": newer(written)}[how]
    stored = await store.snapshot(body)
    if how == "missing":
        await drop_blob(store, stored)
    async with reading(await connect(nats.url)) as whole:
        assert whole.snapshot_used is None
        assert whole.live.state.hash() == store.state.hash()
    await purged(store, stored)
    with pytest.raises(error, match="no snapshot can be used"):
        async with reading(await connect(nats.url)):
            pass
