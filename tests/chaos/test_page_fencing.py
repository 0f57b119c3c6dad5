"""A shard is handed over by force, again and again, while its former home goes on writing in every way it can."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from blake3 import blake3

from tensorbus.bus import (
    Appended,
    Bus,
    Conflict,
    EmbeddedServer,
    NatsBus,
    Stream,
    StreamLimits,
    append,
    provision,
    put_blob,
)
from tensorbus.clock import Deadline
from tensorbus.events import (
    RECORD,
    Headers,
    LeaseGranted,
    PageHolder,
    PageOp,
    PagesChanged,
    ShardSnapshotTaken,
    aggregate_of,
    encode,
    headers_to_wire,
)
from tensorbus.feeds import PageLog, decode_pages, replay_shard
from tensorbus.ids import Incarnation, SystemIds, WorkerId, new_event_id, new_incarnation
from tensorbus.lifecycle import PAGES_FOLD_VERSION, ShardState, dump_shard
from tensorbus.testing._nats_cluster import NatsCluster
from tests.sizes import SIZES

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(SIZES.timeout_s)]

SHARD: Final = 9
STEP_S: Final = 30.0
LIES_UNTIL: Final = 120
IDS = SystemIds()
HOLDER = PageHolder(worker=WorkerId("w1"), incarnation=Incarnation("0" * 16))
NAMES = ("0" * 64,)


def soon() -> Deadline:
    return Deadline(STEP_S, what="a step of a test")


def one_page(slot: int) -> np.ndarray[Any, Any]:
    """A page that only this slot has."""
    out = np.zeros(1, RECORD)
    out["key"], out["op"], out["slot"] = blake3(slot.to_bytes(8, "little")).digest(), PageOp.ADD, slot
    return out


@dataclass
class Home:
    """One worker's life, with a connection of its own, that keeps what it learnt of the shard."""

    name: WorkerId
    pages: Stream
    life: Incarnation = field(default_factory=lambda: new_incarnation(IDS))
    token: int = 0
    number: int = 0

    def headers(self, *, token: int, expected: int | None, life: Incarnation | None = None) -> Headers:
        return Headers(
            event_id=new_event_id(IDS),
            author=self.name,
            incarnation=life or self.life,
            token=token,
            expected=expected,
        )

    async def grant(self, after: int) -> int | None:
        said = self.headers(token=0, expected=after)
        outcome = await append(self.pages, LeaseGranted(shard=SHARD), said, deadline=soon())
        return outcome.seq if isinstance(outcome, Appended) else None

    def batch(self, slot: int, *, number: int | None = None) -> PagesChanged:
        return PagesChanged(
            shard=SHARD,
            number=self.number + 1 if number is None else number,
            keyspaces=NAMES,
            holders=(HOLDER,),
            records=one_page(slot).tobytes(),
        )

    async def force(self, fact: PagesChanged | ShardSnapshotTaken, headers: Headers) -> int:
        """Publish past our own checks; what the server stores then is for the fold."""
        subject = self.pages.subjects.fact(aggregate_of(fact), self.name)
        fence = None if headers.expected is None else self.pages.subjects.fence(aggregate_of(LeaseGranted(shard=SHARD)))
        wire = headers_to_wire(headers, type_name=fact.type, fence=fence)
        return await self.pages.publish(subject, encode(fact), headers=wire, deadline=soon())


class Feud:
    """Two homes that take one shard from each other, and what each wrote when it was not its any more.

    Attributes:
        own: Slots that a home wrote under its grant.
        stale: Slots that a former home wrote, or tried to, after it had learnt of the next grant.
        racing: Slots that were on their way when the shard was granted to the other: the order decides.
    """

    def __init__(self, homes: list[Home]) -> None:
        self.homes = homes
        self.own: set[int] = set()
        self.stale: set[int] = set()
        self.racing: dict[int, int] = {}
        self.grants: list[int] = []
        self.counts: Counter[str] = Counter()
        self._slots = 0

    def slot(self) -> int:
        self._slots += 1
        return self._slots

    async def hand_over(self, former: Home, heir: Home, trick: str) -> None:
        token = await heir.grant(former.token) if trick != "pipelined" else await self._pipelined(former, heir)
        assert token is not None
        self.grants.append(token)
        if trick != "pipelined":
            await self.TRICKS[trick](self, former, token)
            self.counts[trick] += 1
        state = await replay_shard(heir.pages, SHARD, upto=token, deadline=soon())
        assert state.holds(heir.name, heir.life, token)
        heir.token, heir.number = token, state.number
        await self._says_itself(heir)

    async def _says_itself(self, heir: Home) -> None:
        log = PageLog(
            heir.pages, shard=SHARD, token=heir.token, number=heir.number, author=heir.name, incarnation=heir.life,
            ids=IDS, on_fenced=lambda: None,
        )  # fmt: skip
        saying = asyncio.create_task(log.run())
        slot = self.slot()
        log.put(one_page(slot), NAMES, (HOLDER,))
        await log.flush(deadline=soon())
        self.own.add(slot)
        heir.number = log.number
        saying.cancel()
        await asyncio.gather(saying, return_exceptions=True)

    # -- what a former home may try ------------------------------------------------------------------------------------

    async def _right_fence(self, former: Home, _newer: int) -> None:
        """It does not know better; the server does."""
        slot = self.slot()
        self.stale.add(slot)
        said = former.headers(token=former.token, expected=former.token)
        outcome = await append(former.pages, former.batch(slot), said, deadline=soon())
        assert isinstance(outcome, Conflict)

    async def _no_fence(self, former: Home, newer: int) -> None:
        for token in (former.token, newer):
            slot = self.slot()
            self.stale.add(slot)
            await former.force(former.batch(slot), former.headers(token=token, expected=None))

    async def _copied_token(self, former: Home, newer: int) -> None:
        slot = self.slot()
        self.stale.add(slot)
        await former.force(former.batch(slot), former.headers(token=newer, expected=newer))

    async def _copied_life(self, former: Home, newer: int) -> None:
        """Everything but the subject can be copied, and the server keeps to the subject."""
        slot, other = self.slot(), next(home for home in self.homes if home is not former)
        self.stale.add(slot)
        said = former.headers(token=newer, expected=newer, life=other.life)
        await former.force(former.batch(slot), said)

    async def _snapshot(self, former: Home, newer: int) -> None:
        """A state in which there is what never was."""
        slot = self.slot()
        self.stale.add(slot)
        lie = await replay_shard(former.pages, SHARD, upto=newer, deadline=soon())
        lie.pages.add(one_page(slot))
        blob = await put_blob(former.pages, b"".join(dump_shard(lie)), author=former.name, deadline=soon())
        fact = ShardSnapshotTaken(
            shard=SHARD, upto=lie.seq, fold=PAGES_FOLD_VERSION, state_hash=lie.state_hash, blob=blob
        )
        await former.force(fact, former.headers(token=newer, expected=newer))

    async def _pipelined(self, former: Home, heir: Home) -> int | None:
        """Batches under the old grant are under way, some before and some behind the new one."""

        async def say(number: int) -> None:
            slot = self.slot()
            said = former.headers(token=former.token, expected=former.token)
            outcome = await append(former.pages, former.batch(slot, number=number), said, deadline=soon())
            if isinstance(outcome, Appended):
                self.racing[slot] = outcome.seq
                self.counts["raced: before"] += 1
            else:
                self.stale.add(slot)
                self.counts["raced: refused"] += 1

        async def take() -> int | None:
            return await heir.grant(former.token)

        under_way: list[Coroutine[Any, Any, Any]] = [say(former.number + 1 + n) for n in range(4)]
        at = self.counts["pipelined"] % (len(under_way) + 1)
        under_way.insert(at, take())
        token: int | None = (await asyncio.gather(*under_way))[at]
        self.counts["pipelined"] += 1
        return token

    TRICKS: Final[dict[str, Callable[[Feud, Home, int], Coroutine[Any, Any, None]]]] = {
        "the right fence": _right_fence,
        "no fence": _no_fence,
        "a copied token": _copied_token,
        "a copied life": _copied_life,
        "a snapshot": _snapshot,
    }

    # -- what must hold ------------------------------------------------------------------------------------------------

    def check(self, state: ShardState, what: str) -> None:
        records, _ = state.pages.dump()
        seen = set(records["slot"].tolist())
        assert not seen & self.stale, f"{what} shows what a former home wrote: {sorted(seen & self.stale)}"
        assert self.own <= seen, f"{what} lacks what a home wrote under its grant: {sorted(self.own - seen)}"
        assert seen <= self.own | self.racing.keys()
        for slot in seen & self.racing.keys():
            assert self.racing[slot] < self.grants[-1]


async def follow(bus: Bus, state: ShardState) -> None:
    """A live projection: it folds what comes as it comes."""
    async with bus.pages.read(bus.subjects.shard(SHARD), after=0) as reader:
        async for batch in reader:
            for message in batch:
                state.apply(decode_pages(message))


async def snapshot(home: Home, state: ShardState) -> None:
    blob = await put_blob(home.pages, b"".join(dump_shard(state)), author=home.name, deadline=soon())
    fact = ShardSnapshotTaken(
        shard=SHARD, upto=state.seq, fold=PAGES_FOLD_VERSION, state_hash=state.state_hash, blob=blob
    )
    outcome = await append(home.pages, fact, home.headers(token=home.token, expected=home.token), deadline=soon())
    assert isinstance(outcome, Appended)


async def feud(bus: Bus, homes: list[Home], hand_overs: int) -> Counter[str]:
    fight, live = Feud(homes), ShardState(SHARD)
    following = asyncio.create_task(follow(bus, live))
    ways = [*Feud.TRICKS, "pipelined"]
    former, heir = homes
    former.token = await former.grant(0) or 0
    try:
        for turn in range(hand_overs):
            way = ways[turn % len(ways)]
            if way == "a snapshot" and turn > LIES_UNTIL:  # who begins looks at all of them, each time
                way = "no fence"
            await fight.hand_over(former, heir, way)
            former, heir = heir, former
            if turn % 50 == 20:
                whole = await replay_shard(bus.pages, SHARD, upto=former.token, deadline=soon())
                await snapshot(former, whole)
        last = await bus.pages.last_on(bus.subjects.shard(SHARD), deadline=soon())
        assert last is not None
        async with soon().scope():
            while live.seq < last.seq:
                await asyncio.sleep(0.005)
                assert not following.done(), following
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
    whole = ShardState(SHARD)
    for message in [message async for message in _all(bus, last.seq)]:
        whole.apply(decode_pages(message))
    begun = await replay_shard(bus.pages, SHARD, upto=last.seq, deadline=soon())
    for state, what in ((live, "the live index"), (whole, "a full replay"), (begun, "a snapshot and what follows")):
        fight.check(state, what)
        assert state.state_hash == whole.state_hash
        assert (state.gaps, state.unknown) == (0, 0)
    assert whole.dropped.get("fenced", 0) >= hand_overs // 2
    return fight.counts


async def _all(bus: Bus, upto: int) -> AsyncIterator[Any]:
    async with bus.pages.read(bus.subjects.shard(SHARD), after=0) as reader:
        async for batch in reader:
            for message in batch:
                yield message
            if batch[-1].seq >= upto:
                return


@asynccontextmanager
async def buses(url: str, *, replicas: int) -> AsyncIterator[tuple[NatsBus, list[Home]]]:
    found = [await NatsBus.connect(url, name=name) for name in ("watcher", "h1", "h2")]
    await provision(found[0], limits=StreamLimits(replicas=replicas), deadline=Deadline(60))
    try:
        yield found[0], [Home(WorkerId(name), bus.pages) for name, bus in zip(("h1", "h2"), found[1:], strict=True)]
    finally:
        for bus in found:
            await bus.close()


def check_counts(counts: Counter[str]) -> None:
    assert all(counts[way] for way in [*Feud.TRICKS, "pipelined"]), counts
    assert counts["raced: refused"] and counts["raced: before"], counts


async def test_nothing_that_a_former_home_writes_is_ever_seen(home: Path) -> None:
    with EmbeddedServer(home / "nats") as server:
        async with buses(server.url, replicas=1) as (bus, homes):
            check_counts(await feud(bus, homes, SIZES.shard_hand_overs))


async def test_nor_on_three_servers(home: Path) -> None:
    with NatsCluster(home / "nats") as cluster:
        async with buses(cluster.url, replicas=3) as (bus, homes):
            await asyncio.to_thread(cluster.wait_healthy)
            check_counts(await feud(bus, homes, SIZES.shard_hand_overs))
