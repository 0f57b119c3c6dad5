"""The parts that processes play in ``benchmarks.replay``: who writes a log, and those that read it, each from nothing.

Each says what it measured once it has; seconds are those of the work alone, after imports and connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import resource
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import islice
from multiprocessing.connection import Connection

from nats import connect as nats_connect

from benchmarks._log import ClusterLog
from tensorbus.bus import Archive, ArchiveFile, Message, NatsBus, provision, put_blob
from tensorbus.clock import Deadline
from tensorbus.events import Event, RoleGranted, SessionOpened, SnapshotTaken
from tensorbus.feeds import Author, DirectoryFeed, decode_all
from tensorbus.feeds._restore import without_collections
from tensorbus.ids import SystemIds, WorkerId, new_incarnation
from tensorbus.lifecycle import Directory, dump
from tensorbus.projections import LiveDirectory

WAITING_MAX = 4000
WORK_S = 900.0
DECODED_MAX = 100_000
"""Messages that are held in memory to be decoded; more would measure the memory."""

FILE_FACTS = 100_000
"""Facts in one file of the archive, as the store writes them."""

STORE = WorkerId("bench-store")


@dataclass(frozen=True, slots=True)
class Folded:
    """A Directory that was made from the log.

    Attributes:
        seconds: From the first request to a state that has everything.
        rss_bytes: The most memory that the process ever had.
        snapshot: The sequence that it began at, ``None`` if at the log's beginning.
    """

    seconds: float
    state_hash: str
    rss_bytes: int
    snapshot: int | None
    artifacts: int
    replicas: int


def rss_max() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@asynccontextmanager
async def bus_at(url: str) -> AsyncIterator[NatsBus]:
    bus = await NatsBus.connect(url, name="bench")
    try:
        yield bus
    finally:
        await bus.close()


# -- writing -----------------------------------------------------------------------------------------------------------


def write_log(cue: Connection, *, url: str, artifacts: int) -> None:
    """Make the log, say its first and last sequence; then as many facts more as each message asks for."""
    with contextlib.suppress(EOFError):
        asyncio.run(_write_log(cue, url, artifacts))


async def _write_log(cue: Connection, url: str, artifacts: int) -> None:
    async with bus_at(url) as bus:
        await provision(bus, deadline=Deadline(30))
        log = ClusterLog(bus.subjects)
        cue.send(await _publish(bus, url, log, log.messages(artifacts)))
        while True:
            count = await asyncio.to_thread(cue.recv)
            following = (log.put(n) for n in range(artifacts, artifacts + count))
            artifacts += count
            cue.send(await _publish(bus, url, log, following))


async def _publish(bus: NatsBus, url: str, log: ClusterLog, messages: Iterable[Message]) -> tuple[int, int]:
    """Publish without waiting for each acknowledgement; the first and the last sequence.

    A publish in the bus's own way would take four times as long, and it is not what is measured here.
    """
    log.seq = before = await bus.last_seq(deadline=Deadline(30))
    client = await nats_connect(url)
    inbox, acked, enough, refused = client.new_inbox(), 0, asyncio.Event(), b""

    async def on_ack(message: object) -> None:
        nonlocal acked, refused
        data: bytes = message.data  # type: ignore[attr-defined]
        acked += 1
        refused = refused or (data if b'"error"' in data else b"")
        enough.set()

    await client.subscribe(inbox, cb=on_ack)
    sent = 0
    for message in messages:
        await client.publish(message.subject, message.data, reply=inbox, headers=dict(message.headers))
        sent += 1
        while sent - acked > WAITING_MAX:
            enough.clear()
            await asyncio.wait_for(enough.wait(), 30)
    while acked < sent and not refused:
        enough.clear()
        await asyncio.wait_for(enough.wait(), 30)
    await client.close()
    last = await bus.last_seq(deadline=Deadline(30))
    if refused or last != log.seq:
        raise SystemExit(f"the log is not what was meant: {last} instead of {log.seq}; {refused!r}")
    return before + 1, last


# -- reading -----------------------------------------------------------------------------------------------------------


def count_facts(cue: Connection, *, url: str, last: int) -> None:
    """Read all facts and only count them: the seconds, and how many."""

    async def main() -> tuple[float, int]:
        async with bus_at(url) as bus:
            start, count = time.perf_counter(), 0
            async with bus.read(bus.subjects.facts, after=0) as reader:
                async for batch in reader:
                    count += len(batch)
                    if batch[-1].seq >= last:
                        break
            return time.perf_counter() - start, count

    cue.send(asyncio.run(main()))


def decode_facts(cue: Connection, *, url: str, facts: int, repeats: int) -> None:
    """Decode the log's first facts, which are in memory already: how many, and the seconds of each repeat."""
    messages = asyncio.run(_first(url, min(facts, DECODED_MAX)))
    gc.freeze()
    took = []
    for _ in range(repeats):
        start = time.perf_counter()
        for at in range(0, len(messages), 512):
            decode_all(messages[at : at + 512])
        took.append(time.perf_counter() - start)
    cue.send((len(messages), took))


async def _first(url: str, count: int) -> list[Message]:
    messages: list[Message] = []
    async with bus_at(url) as bus, bus.read(bus.subjects.facts, after=0) as reader:
        async for batch in reader:
            messages += islice(batch, count - len(messages))
            if len(messages) >= count:
                break
    return messages


def fold_stream(cue: Connection, *, url: str) -> None:
    """Make a Directory from the stream as a worker does when it starts; says :class:`Folded`."""

    async def main() -> Folded:
        async with bus_at(url) as bus:
            feed = DirectoryFeed(bus, LiveDirectory(Directory(bus.subjects)))
            start = time.perf_counter()
            async with feed.running(deadline=Deadline(WORK_S)):
                return _folded(feed.live.state, time.perf_counter() - start, feed.snapshot_used)

    cue.send(asyncio.run(main()))


def write_archive(cue: Connection, *, url: str, last: int, folder: str) -> None:
    """Write the log to an archive as the store does; says its files and the seconds."""

    async def main() -> list[ArchiveFile]:
        archive, files, waiting = Archive.open(folder), list[ArchiveFile](), list[Message]()
        async with bus_at(url) as bus, bus.read(bus.subjects.facts, after=0) as reader:
            async for batch in reader:
                waiting += batch
                if len(waiting) >= FILE_FACTS or batch[-1].seq >= last:
                    first = files[-1].last + 1 if files else waiting[0].seq
                    files.append(archive.write(waiting, first=first, last=waiting[-1].seq))
                    waiting = []
                if batch[-1].seq >= last:
                    return files
        raise SystemExit("the log ended early")

    start = time.perf_counter()
    files = asyncio.run(main())
    cue.send((files, time.perf_counter() - start))


def fold_archive(cue: Connection, *, folder: str, files: list[ArchiveFile]) -> None:
    """Make a Directory from the archive alone; says :class:`Folded`."""
    live = LiveDirectory(Directory())
    start = time.perf_counter()
    with without_collections():
        for batch in Archive.open(folder).read(files):
            live.apply(decode_all(batch))
    cue.send(_folded(live.state, time.perf_counter() - start, None))


def read_archive(cue: Connection, *, folder: str, files: list[ArchiveFile], decode: bool) -> None:
    """Read the archive and only count its messages, or what they are decoded to: the seconds, and how many."""
    start = time.perf_counter()
    batches = Archive.open(folder).read(files)
    count = sum(len(decode_all(batch) if decode else batch) for batch in batches)
    cue.send((time.perf_counter() - start, count))


def store_snapshot(cue: Connection, *, url: str) -> None:
    """Make a Directory from the stream and store a snapshot of it, as the store does; says the sequence it holds."""

    async def main() -> int:
        async with bus_at(url) as bus:
            feed = DirectoryFeed(bus, LiveDirectory(Directory(bus.subjects)))
            async with feed.running(deadline=Deadline(WORK_S)):
                return await _take_snapshot(feed)

    cue.send(asyncio.run(main()))


def _folded(state: Directory, seconds: float, snapshot: int | None) -> Folded:
    if state.dropped or state.degraded:
        raise SystemExit(f"the fold dropped facts: {state.dropped}, {state.gaps} gaps, {state.unknown} unknown")
    rss = rss_max()  # before the hash
    return Folded(
        seconds=seconds,
        state_hash=state.hash(),
        rss_bytes=rss,
        snapshot=snapshot,
        artifacts=sum(record.live for record in state.artifacts.values()),
        replicas=sum(len(record.replicas) for record in state.artifacts.values()),
    )


async def _take_snapshot(feed: DirectoryFeed) -> int:
    """Take the store's role and store the state, by the rules that the store role follows."""
    ids, state = SystemIds(), feed.live.state
    author = Author(feed, worker=STORE, incarnation=new_incarnation(ids), ids=ids)
    opened = SessionOpened(
        worker=STORE, incarnation=author.incarnation, host="bench", roles=("store",), data="", control="",
        pool_bytes=0, ttl_ns=600_000_000_000, pid=0, version="bench",
    )  # fmt: skip

    async def say(fact: Event) -> None:
        await author.decide(lambda _: fact, deadline=Deadline(WORK_S))

    await say(opened)
    await say(RoleGranted(role="store"))
    body = b"".join(dump(state))
    upto, state_hash, fold = state.seq, state.hash(), max(state.log.fold, 1)
    blob = await put_blob(feed.bus, body, author=STORE, deadline=Deadline(WORK_S))
    await say(SnapshotTaken(what="directory", upto=upto, fold=fold, state_hash=state_hash, blob=blob))
    return upto


# -- the global store --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Stored:
    """A global store that was filled from the log.

    Attributes:
        seconds: Finding out which rows the facts change, and writing them.
        insert_s: Inserting the same rows, at hand as values, through Arrow into tables of the same form, in as many
            transactions.
        total_s: Everything: reading the log, decoding, folding and ``seconds``.
        travel_s: Of each repeat, the state at a position in the middle of the log, and at its end, as Arrow tables.
        travel_rows: How many rows the two have.
    """

    seconds: float
    insert_s: float
    total_s: float
    facts: int
    rows: int
    travel_s: list[tuple[float, float]]
    travel_rows: tuple[int, int]


def fill_store(cue: Connection, *, url: str, last: int, folder: str, repeats: int) -> None:
    """Fill a global store from the stream, then ask it for the past; says :class:`Stored`."""
    from benchmarks._replay_store import Filling

    async def fill(filling: Filling) -> float:
        start = time.perf_counter()
        async with bus_at(url) as bus, bus.read(bus.subjects.facts, after=0) as reader:
            async for batch in reader:
                filling.take_in(batch)
                if batch[-1].seq >= last:
                    break
        filling.flush()
        return time.perf_counter() - start

    with Filling(folder) as filling:
        total_s = asyncio.run(fill(filling))
        travel_s, travel_rows = filling.travel(repeats)
        cue.send(
            Stored(
                seconds=filling.seconds,
                insert_s=filling.insert_s,
                total_s=total_s - filling.insert_s - filling.prepared_s,
                facts=filling.facts,
                rows=filling.rows,
                travel_s=travel_s,
                travel_rows=travel_rows,
            )
        )
