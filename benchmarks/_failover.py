"""Who publishes and reads through the loss of a leader: tensorbus, and beside it NATS's own client on the same stream.

Both keep at it until told to end, then say what was acknowledged and what arrived, each with its moment of
``time.perf_counter``, which all processes of a machine share.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

from nats import connect as nats_connect
from nats.aio.client import Client
from nats.errors import Error as NatsError
from nats.js.errors import Error as JetStreamError

from tensorbus.bus import Appended, NatsBus, append
from tensorbus.clock import Deadline
from tensorbus.errors import DeadlineExceededError, UnavailableError
from tensorbus.events import MSG_ID, Headers, KeyBound
from tensorbus.ids import ArtifactId, EventId, Incarnation, WorkerId

PACE_S = 0.005
RETRY_S = 0.02
TRY_S = 1.0
"""How long one publish waits before it is tried again."""

STEADY_S = 1.5
"""How long both sides run before a leader is killed."""

Moment = tuple[str, float]
"""A message's id, and when it was acknowledged or arrived."""


@dataclass(slots=True)
class Seen:
    """What one side saw."""

    acked: list[Moment] = field(default_factory=list)
    arrived: list[Moment] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Silence:
    """How long after a leader was killed a side published again and heard again; ``None`` if it never did."""

    publish_s: float | None
    read_s: float | None


def back_after(moments: Sequence[float], event: float) -> float | None:
    """Seconds from an event to the end of the longest silence that it fell in or that followed; ``None`` if unended."""
    after = [moment for moment in moments if moment > event]
    if not after:
        return None
    before = max((moment for moment in moments if moment <= event), default=event)
    silences = [(later - sooner, later) for sooner, later in zip([before, *after[:-1]], after, strict=True)]
    return max(silences)[1] - event


def lost(acked: Sequence[Moment], found: set[str]) -> list[str]:
    """What was acknowledged and is not there."""
    return [name for name, _ in acked if name not in found]


def silences(kills: Sequence[float], acked: Sequence[Moment], arrived: Sequence[Moment]) -> list[Silence]:
    """What each kill meant for one side; the next kill ends the look for it."""
    found = []
    for kill, end in zip(kills, [*kills[1:], float("inf")], strict=True):
        publish_s, read_s = (
            back_after([moment for _, moment in moments if kill - STEADY_S < moment < end], kill)
            for moments in (acked, arrived)
        )
        found.append(Silence(publish_s, read_s))
    return found


# -- tensorbus ---------------------------------------------------------------------------------------------------------


def use_tensorbus(cue: Connection, *, url: str) -> None:
    """Append facts one after the other, each with an id of its own, and read them."""
    asyncio.run(_play(cue, _tensorbus(url)))


def _tensorbus(url: str) -> Callable[[Seen], Awaitable[None]]:
    async def play(seen: Seen) -> None:
        bus = await NatsBus.connect(url, name="bench-ours")
        async with asyncio.TaskGroup() as group:
            group.create_task(_read_facts(bus, seen))
            group.create_task(_append_facts(bus, seen))

    return play


async def _append_facts(bus: NatsBus, seen: Seen) -> None:
    author, life, artifact = WorkerId("bench-ours"), Incarnation("0" * 16), ArtifactId(f"tb1:{0:064x}")
    for n in range(1 << 30):
        fact = KeyBound(tenant="default", key=f"k{n}", artifact=artifact, rebind=False)
        headers = Headers(event_id=EventId(f"{n:032x}"), author=author, incarnation=life, expected=0)
        while True:
            try:
                outcome = await append(bus, fact, headers, deadline=Deadline(TRY_S))
            except (UnavailableError, DeadlineExceededError):
                await asyncio.sleep(RETRY_S)
                continue
            if not isinstance(outcome, Appended):
                raise SystemExit(f"a key that nobody else has was refused: {outcome}")
            break
        seen.acked.append((headers.event_id, time.perf_counter()))
        await asyncio.sleep(PACE_S)


async def _read_facts(bus: NatsBus, seen: Seen) -> None:
    async with bus.read(f"{bus.subjects.prefix}.ev.key.*.*", after=0) as reader:
        async for batch in reader:
            now = time.perf_counter()
            seen.arrived += ((message.headers[MSG_ID], now) for message in batch)


# -- NATS itself -------------------------------------------------------------------------------------------------------


def use_nats(cue: Connection, *, url: str, subject: str) -> None:
    """The same with NATS's own client: a publish that is tried again, and its ordered consumer."""
    asyncio.run(_play(cue, _nats(url, subject)))


def _nats(url: str, subject: str) -> Callable[[Seen], Awaitable[None]]:
    async def play(seen: Seen) -> None:
        client = await nats_connect(
            url.split(","), max_reconnect_attempts=-1, reconnect_time_wait=0.05, ping_interval=1,
            max_outstanding_pings=2, error_cb=_ignore,
        )  # fmt: skip
        async with asyncio.TaskGroup() as group:
            group.create_task(_subscribe(client, subject, seen))
            group.create_task(_publish(client, subject, seen))

    return play


async def _ignore(error: Exception) -> None:
    """That a server is gone is what this is about."""


async def _publish(client: Client, subject: str, seen: Seen) -> None:
    stream = client.jetstream()
    for n in range(1 << 30):
        name = f"bare-{n}"
        while True:
            try:
                await stream.publish(subject, b"x" * 200, timeout=TRY_S, headers={MSG_ID: name})
                break
            except (NatsError, JetStreamError, TimeoutError):
                await asyncio.sleep(RETRY_S)
        seen.acked.append((name, time.perf_counter()))
        await asyncio.sleep(PACE_S)


async def _subscribe(client: Client, subject: str, seen: Seen) -> None:
    async def on_message(message: object) -> None:
        seen.arrived.append((message.headers[MSG_ID], time.perf_counter()))  # type: ignore[attr-defined]

    await client.jetstream().subscribe(
        subject, cb=on_message, ordered_consumer=True, idle_heartbeat=0.5, pending_msgs_limit=-1
    )  # fmt: skip
    await asyncio.Event().wait()


async def _play(cue: Connection, play: Callable[[Seen], Awaitable[None]]) -> None:
    seen = Seen()
    task = asyncio.ensure_future(play(seen))
    ending = asyncio.ensure_future(asyncio.to_thread(cue.recv))
    cue.send("ready")
    await asyncio.wait({task, ending}, return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        task.result()
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, BaseExceptionGroup):
        await task
    cue.send((seen.acked, seen.arrived))
