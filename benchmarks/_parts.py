"""The parts that processes play in ``benchmarks.control``; see there for what each is for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import nats
import numpy as np

import tensorbus as tb
from benchmarks._home import until
from tensorbus.bus import Appended, NatsBus, append
from tensorbus.clock import Deadline
from tensorbus.events import Aggregate, Event, Headers, KeyBound, SessionOpened, aggregate_of
from tensorbus.ids import ArtifactId, SystemIds, WorkerId, new_event_id, new_incarnation

FRESH_S = 0.1
"""How long ago at most a key was bound that a reader asks for by position."""

News = tuple[str, int, float]
"""A key that was bound, the position, and the moment at which the binder heard of it."""

Bind = tuple[str, int, str]
"""A key, the position at which it was bound, and the artifact."""

Answer = tuple[str, int, int, str]
"""A key, the position that was asked for at least, that of the answer, and the artifact."""

FACTS_WAITING_MAX = 200

PRELOADED = (tb.connect, tb.aconnect)  # imported before the processes are forked, not in each of them


def beside(number: int, host_ids: int) -> str:
    return f"h{number % host_ids}"


async def cue_of(cue: Connection) -> tuple[float, float]:
    """Say that all is ready and wait for the start and the seconds to play."""
    cue.send("ready")
    start, seconds = await asyncio.to_thread(cue.recv)
    return float(start), float(seconds)


async def sleep_until(moment: float) -> None:
    await asyncio.sleep(max(0.0, moment - time.perf_counter()))


# -- facts at a rate ---------------------------------------------------------------------------------------------------


class FactAuthor:
    """A worker on the log that holds no bytes: it only binds keys, many at once, and knows every head itself."""

    def __init__(self, bus: NatsBus, name: str) -> None:
        self._bus = bus
        self._ids = SystemIds()
        self._worker = WorkerId(name)
        self._incarnation = new_incarnation(self._ids)
        self._heads: dict[Aggregate, int] = {}

    async def open(self) -> None:
        opening = SessionOpened(
            worker=self._worker, incarnation=self._incarnation, host="bench", roles=("basic",), data="", control="",
            pool_bytes=0, ttl_ns=600_000_000_000, pid=0, version="bench",
        )  # fmt: skip
        subject = self._bus.subjects.live(self._incarnation, self._worker)
        await self._bus.beat(subject, ttl_s=600, deadline=Deadline(10))
        await self.say(opening)

    async def say(self, fact: Event) -> None:
        about = aggregate_of(fact)
        if about not in self._heads:
            last = await self._bus.last_on(self._bus.subjects.fence(about), deadline=Deadline(10))
            self._heads[about] = 0 if last is None else last.seq
        headers = Headers(
            event_id=new_event_id(self._ids), author=self._worker, incarnation=self._incarnation,
            expected=self._heads[about],
        )  # fmt: skip
        outcome = await append(self._bus, fact, headers, deadline=Deadline(10))
        self._heads[about] = outcome.seq
        if not isinstance(outcome, Appended):
            await self.say(fact)


def offer_facts(cue: Connection, *, url: str, keys: Sequence[str], artifacts: Sequence[str], rate: int) -> None:
    """Bind keys in turn, ``rate`` a second; says how many were acknowledged and in how many seconds."""
    asyncio.run(_offer_facts(cue, url, keys, artifacts, rate))


async def _offer_facts(cue: Connection, url: str, keys: Sequence[str], artifacts: Sequence[str], rate: int) -> None:
    bus = await NatsBus.connect(url, name="bench-facts")
    author = FactAuthor(bus, "bench-facts")
    await author.open()
    binds = [
        KeyBound(tenant="default", key=keys[n % len(keys)], artifact=ArtifactId(artifact), rebind=True)
        for n, artifact in enumerate(artifacts[n % len(artifacts)] for n in range(len(keys) * len(artifacts)))
    ]
    for bind in binds[: len(keys)]:
        await author.say(bind)
    cue.send("bound")
    start, seconds = await cue_of(cue)
    begun, step, said = time.perf_counter(), max(1, rate // 100), 0
    waiting = asyncio.Semaphore(FACTS_WAITING_MAX)

    async def say(fact: Event) -> None:
        async with waiting:
            await author.say(fact)

    async with asyncio.TaskGroup() as group:
        for batch in range(int(seconds * rate / step)):
            await sleep_until(start + batch * step / rate)
            async with waiting:  # who is too slow falls behind, and the rate says so
                for n in range(said, said + step):
                    group.create_task(say(binds[n % len(binds)]))
            said += step
    cue.send((said, time.perf_counter() - max(begun, start)))
    await bus.close()


# -- one followed key --------------------------------------------------------------------------------------------------


def resolve_followed(cue: Connection, *, home: str, keys: Sequence[str], others: Sequence[str]) -> None:
    """Resolve followed keys, a few every millisecond; says the seconds of each, and those of first resolves."""
    with tb.connect(home=home, host_id="h0") as bus:
        for key in keys:
            bus.artifact(key)
        cue.send("ready")
        start, seconds = cue.recv()
        until(start)
        took: list[float] = []
        clock, resolve, burst = time.perf_counter, bus.artifact, range(10)
        for step in range(int(seconds * 1000)):
            until(start + step / 1000)
            for n in burst:
                key = keys[(10 * step + n) % len(keys)]
                before = clock()
                resolve(key)
                took.append(clock() - before)
        cue.send(took)
        first: list[float] = []
        cue.recv()
        for key in others:
            before = clock()
            resolve(key)
            first.append(clock() - before)
            time.sleep(0.002)
        cue.send(first)


def answer_requests(cue: Connection, *, url: str) -> None:
    """Answer NATS requests until the cue ends."""

    async def main() -> None:
        client = await nats.connect(url)

        async def echo(message: Any) -> None:
            await message.respond(b"x")

        await client.subscribe("bench.echo", cb=echo)
        await client.flush()
        cue.send("ready")
        cue.send(None)
        await asyncio.to_thread(_wait_for_end, cue)
        await client.close()

    asyncio.run(main())


def _wait_for_end(cue: Connection) -> None:
    try:
        while True:
            cue.recv()
    except (EOFError, OSError):
        return


def request(cue: Connection, *, url: str, rate: int = 100) -> None:
    """Make NATS requests, ``rate`` a second; says the seconds of each."""

    async def main() -> None:
        client = await nats.connect(url)
        for _ in range(20):
            await client.request("bench.echo", b"x", timeout=5)
        start, seconds = await cue_of(cue)
        took = []
        for n in range(int(seconds * rate)):
            await sleep_until(start + n / rate)
            before = time.perf_counter()
            await client.request("bench.echo", b"x", timeout=5)
            took.append(time.perf_counter() - before)
        cue.send(took)
        await client.close()

    asyncio.run(main())


# -- the published load ------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Reading:
    """What one reader saw.

    Attributes:
        took: Seconds of each resolve, from the call to its answer.
        late: The same from the moment at which it was due.
        fresh_took: Those of ``took`` that were for a key bound a moment before.
        answers: Those for keys bound a moment before, to be checked against the binds.
        old: Keys that this process heard of more than 100 ms after they were bound.
    """

    took: list[float] = field(default_factory=list)
    late: list[float] = field(default_factory=list)
    fresh_took: list[float] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    old: int = 0
    failed: int = 0


class Reader:
    """A process that resolves names at a steady rate, and keys that it is told of at once."""

    def __init__(self, bus: tb.AsyncBus, keys: Sequence[str], news: Connection, *, rate: float, phase: float) -> None:
        self.seen = Reading()
        self._bus = bus
        self._keys = keys
        self._news = news
        self._rate = rate
        self._phase = phase
        self._told: asyncio.Queue[News] = asyncio.Queue(1000)

    async def play(self, start: float, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        loop.add_reader(self._news.fileno(), self._hear)
        fresh = asyncio.create_task(self._fresh())
        await self._steady(start, seconds)
        await asyncio.sleep(0.5)
        loop.remove_reader(self._news.fileno())
        fresh.cancel()
        await asyncio.wait({fresh})

    def _hear(self) -> None:
        while self._news.poll():
            self._told.put_nowait(self._news.recv())

    async def _steady(self, start: float, seconds: float) -> None:
        for n in range(int(seconds * self._rate)):
            due = start + (n + self._phase) / self._rate
            await sleep_until(due)
            await self._resolve(self._keys[n % len(self._keys)], due, None)

    async def _fresh(self) -> None:
        while True:
            key, position, bound_at = await self._told.get()
            self.seen.old += time.perf_counter() - bound_at > FRESH_S
            answer = await self._resolve(key, bound_at, position)
            self.seen.fresh_took.append(self.seen.took[-1])
            if answer is not None:
                self.seen.answers.append((key, position, answer.position["TB"], answer.id))

    async def _resolve(self, key: str, due: float, position: int | None) -> tb.AsyncArtifact | None:
        before = time.perf_counter()
        try:
            return await self._bus.artifact(key, at_least=position)
        except tb.TensorbusError:
            self.seen.failed += 1
            return None
        finally:
            now = time.perf_counter()
            self.seen.took.append(now - before)
            self.seen.late.append(now - due)


def read_keys(
    cue: Connection, *, home: str, host_id: str, keys: Sequence[str], news: Connection, rate: float, phase: float
) -> None:
    """One of the readers, a part ``phase`` of a period after the others; says a :class:`Reading`."""

    async def main() -> None:
        async with tb.aconnect(home=home, host_id=host_id) as bus:
            for key in keys:
                await bus.artifact(key)
            reader = Reader(bus, keys, news, rate=rate, phase=phase)
            await reader.play(*await cue_of(cue))
            cue.send(asdict(reader.seen))

    asyncio.run(main())


def bind_keys(
    cue: Connection,
    *,
    home: str,
    host_id: str,
    keys: Sequence[Sequence[str]],
    news: Sequence[Connection],
    rate: float,
    phase: float,
) -> None:
    """Bind keys for each reader in turn and tell it; says the seconds of each bind, and the binds."""

    async def main() -> None:
        async with tb.aconnect(home=home, host_id=host_id) as bus:
            pairs = {key: await _two_artifacts(bus, key) for one in keys for key in one}
            start, seconds = await cue_of(cue)
            took: list[float] = []
            binds: list[Bind] = []

            async def bind(reader: int, key: str, artifact: str) -> None:
                before = time.perf_counter()
                bound = await bus.bind(key, artifact, rebind=True)
                now = time.perf_counter()
                news[reader].send((key, bound.position["TB"], now))
                took.append(now - before)
                binds.append((key, bound.position["TB"], artifact))

            async with asyncio.TaskGroup() as group:  # a slow bind keeps none waiting that is due
                for n in range(int(seconds * rate)):
                    turn, reader = divmod(n, len(keys))
                    key = keys[reader][turn % len(keys[reader])]
                    artifact = pairs[key][(turn // len(keys[reader])) % 2]
                    await sleep_until(start + (n + phase) / rate)
                    group.create_task(bind(reader, key, artifact))
            cue.send((took, binds))

    asyncio.run(main())


async def _two_artifacts(bus: tb.AsyncBus, key: str) -> tuple[str, str]:
    first, second = [await bus.put(np.frombuffer(f"{n} {key}".encode(), np.uint8)) for n in range(2)]
    return first.id, second.id


def run_workers(cue: Connection, *, home: str, host_ids: Sequence[str], period_s: float) -> None:
    """What each worker is made to do beside its heartbeat: confirm its inventory, and write a fact of its own.

    Says the seconds of each confirmation and of each fact, and the heartbeats' figures of each worker before and after.
    """

    async def main() -> None:
        confirmed: list[float] = []
        reported: list[float] = []
        buses = [await tb.aconnect(home=home, host_id=host_id) for host_id in host_ids]
        mine = [await bus.put(np.frombuffer(f"mine {n}".encode(), np.uint8)) for n, bus in enumerate(buses)]
        start, seconds = await cue_of(cue)
        await sleep_until(start)
        before = [(await bus.stats())["heartbeat"] for bus in buses]
        async with asyncio.TaskGroup() as group:
            for n, (bus, artifact) in enumerate(zip(buses, mine, strict=True)):
                begin = start + period_s * n / len(buses)
                rounds = int(seconds / period_s)
                group.create_task(_confirm(bus, artifact, begin, rounds, period_s, confirmed))
                group.create_task(_report(artifact, begin + period_s / 2, rounds, period_s, reported))
        after = [(await bus.stats())["heartbeat"] for bus in buses]
        cue.send((confirmed, reported, before, after, time.perf_counter() - start))
        for bus in buses:
            await bus.close()

    asyncio.run(main())


async def _confirm(
    bus: tb.AsyncBus, artifact: tb.AsyncArtifact, begin: float, rounds: int, period_s: float, took: list[float]
) -> None:
    """Ask the worker what the directory says that it holds, at a position that includes its last fact."""
    replica = (await artifact.replicas())[0]
    for n in range(rounds):
        await sleep_until(begin + n * period_s)
        before = time.perf_counter()
        workers = {one.worker: one for one in await bus.list_workers(at_least=artifact.position)}
        took.append(time.perf_counter() - before)
        if not workers[replica.worker].live or workers[replica.worker].replicas < 1:
            raise SystemExit(f"the directory lost the replicas of {replica.worker}")


async def _report(artifact: tb.AsyncArtifact, begin: float, rounds: int, period_s: float, took: list[float]) -> None:
    """Have the worker write that a lease on its replica began, or ended, in turn."""
    pin: tb.AsyncPin | None = None
    for n in range(rounds):
        await sleep_until(begin + n * period_s)
        before = time.perf_counter()
        if pin is None:
            pin = await artifact.pin()
        else:
            await pin.release()
            pin = None
        took.append(time.perf_counter() - before)
    if pin is not None:
        await pin.release()


# -- versions ----------------------------------------------------------------------------------------------------------


def subscribe(cue: Connection, *, home: str, series: str, versions: int) -> None:
    """Follow a series; says for each version when the handle was there and when its bytes were read."""
    with tb.connect(home=home, host_id="h0") as bus:
        subscription = bus.subscribe(series, start=1, timeout=60)
        cue.send("ready")
        cue.recv()
        moments = []
        for artifact in subscription:
            seen = time.perf_counter()
            int(artifact.tensor("w", framework="numpy").sum())
            moments.append((artifact.version, seen, time.perf_counter()))
            if artifact.version == versions:
                break
        subscription.close()
        cue.send(moments)


def publish(cue: Connection, *, home: str, series: str, versions: int, period_s: float) -> None:
    """Publish versions; says when each call began."""
    with tb.connect(home=home, host_id="h0") as bus:
        cue.send("ready")
        start, _ = cue.recv()
        moments = []
        for n in range(versions):
            until(start + n * period_s)
            moments.append(time.perf_counter())
            bus.publish(series, {"w": np.full(1024, n, np.int32)})
        cue.send(moments)


# -- what the log costs ------------------------------------------------------------------------------------------------


def put_and_publish(cue: Connection, *, home: str, url: str, count_: int) -> None:
    """Small puts and bare publishes in turn; says the seconds of each."""

    async def main() -> None:
        client = await nats.connect(url)
        stream = client.jetstream()
        await stream.add_stream(name="BENCH", subjects=["bench.log.>"])
        async with tb.aconnect(home=home, host_id="h0") as bus:
            await cue_of(cue)
            puts, bare = [], []
            data = np.zeros(4096, np.uint8)
            for n in range(count_ + 20):
                data[:8].view(np.int64)[0] = n
                moments = [time.perf_counter()]
                await bus.put(data)
                moments.append(time.perf_counter())
                await stream.publish("bench.log.x", bytes(600), headers={"Nats-Msg-Id": str(n)})
                moments.append(time.perf_counter())
                if n >= 20:
                    puts.append(moments[1] - moments[0])
                    bare.append(moments[2] - moments[1])
            cue.send((puts, bare))
        await client.close()

    asyncio.run(main())
