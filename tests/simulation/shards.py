"""Homes that take one shard from each other on a simulated bus, and the books of what the stream of pages has."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from tensorbus.bus import Appended, Conflict, MemoryBus, MemoryCluster, Message, Stream, append, put_blob
from tensorbus.clock import Deadline
from tensorbus.errors import TensorbusError
from tensorbus.events import (
    MSG_ID,
    RECORD,
    Headers,
    LeaseGranted,
    PageHolder,
    PageOp,
    PagesChanged,
    ShardSnapshotConfirmed,
    ShardSnapshotTaken,
    aggregate_of,
    encode,
    headers_to_wire,
    page_records,
)
from tensorbus.events._envelope import INCARNATION, TOKEN
from tensorbus.feeds import PageLog, decode_pages, replay_shard
from tensorbus.ids import Incarnation, WorkerId, new_event_id, new_incarnation
from tensorbus.lifecycle import PAGES_FOLD_VERSION, ShardState, dump_shard
from tensorbus.testing import Node, SimBus, World

if TYPE_CHECKING:
    import random

SHARD: Final = 3
HOLDER: Final = PageHolder(worker=WorkerId("w0"), incarnation=Incarnation("0" * 16))
NAMES: Final = ("0" * 64,)
FIRST_SEQ: Final = 1_700_000_000_000_000
ALL: Final = f"tb.*.{SHARD}.*"


def step() -> Deadline:
    return Deadline(20.0, what="a step of a home")


def rows(slots: list[int], op: PageOp = PageOp.ADD) -> npt.NDArray[np.void]:
    out = np.zeros(len(slots), RECORD)
    out["key"] = [blake3(slot.to_bytes(8, "little")).digest() for slot in slots]
    out["op"], out["slot"] = op, slots
    return out


def slots_of(state: ShardState) -> frozenset[int]:
    return frozenset(state.pages.dump()[0]["slot"].tolist())


class ShardTruth(MemoryCluster):
    """The shared streams, with a plain second fold of one shard that is made as messages are stored.

    Attributes:
        visible: Slots that a home said it has, under its grant, and did not take back.
        ever: Slots that were visible at some time.
        visible_at: What was visible at the sequence of each grant.
    """

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world
        self.losses = 0
        self._clear()

    def _clear(self) -> None:
        self.holder = ("", "", 0)
        self.number = 0
        self.visible: set[int] = set()
        self.ever: set[int] = set()
        self.visible_at: dict[int, frozenset[int]] = {}

    def store(self, subject: str, data: bytes, headers: Mapping[str, str]) -> int:
        before = self.pages.last_seq
        seq = super().store(subject, data, headers)
        message = self.pages.get(seq)
        if self.pages.takes(subject) and seq > before and message is not None:
            self._enter(message)
        return seq

    def lose_pages(self, count: int) -> None:
        """The stream comes back without its last messages, at least one of which is a batch or a grant."""
        kept = [m.seq for m in self.pages.after(0, ALL, count_max=1 << 30)]
        if len(kept) <= count:
            return
        self._die()
        self.pages.truncate(kept[-count - 1])
        self.losses += 1
        self.world.note("lost", kept[-count - 1] - FIRST_SEQ)
        self.world.cover("fault.loss_of_pages")
        self._clear()
        for message in self.pages.after(0, ALL, count_max=1 << 30):
            self._enter(message)
        self.restart()

    def _enter(self, message: Message) -> None:
        kind, author = message.subject.split(".")[1], message.subject.rpartition(".")[2]
        said = f"{kind} by {author}"
        if kind == "lease":
            self.holder = (author, message.headers.get(INCARNATION, ""), message.seq)
            self.visible_at[message.seq] = frozenset(self.visible)
        elif kind == "shard":
            said += f": {self._batch(message, author)}"
        self.world.note(f"{message.seq - FIRST_SEQ}", said)

    def _batch(self, message: Message, author: str) -> str:
        wire = message.headers
        if self.holder != (author, wire.get(INCARNATION, ""), int(wire.get(TOKEN, "0"))):
            self.world.cover("dropped.fenced")
            return "fenced"
        fact = decode_pages(message).event
        assert isinstance(fact, PagesChanged)
        if fact.number <= self.number:
            self.world.cover("dropped.duplicate")
            return "duplicate"
        assert fact.number == self.number + 1, f"{author} left out the numbers from {self.number + 1} to {fact.number}"
        self.number = fact.number
        for row in page_records(fact):
            slot = int(row["slot"])
            if row["op"] == PageOp.ADD:
                self.visible.add(slot)
                self.ever.add(slot)
            else:
                self.visible.discard(slot)
        self.world.cover("batch")
        return f"{fact.number}, {len(self.visible)} visible"

    def check_lease(self) -> None:
        """However much is purged, the last grant stays: else the shard would look as if it had never been."""
        if self.holder[2]:
            last = self.pages.last_on(f"tb.lease.{SHARD}.*")
            assert last is not None and last.seq == self.holder[2], "the grant in force is gone"


@dataclass
class Shared:
    """What the nodes of one world have in common."""

    world: World
    truth: ShardTruth
    bus: MemoryBus
    slots: int = 0

    @classmethod
    def of(cls, world: World) -> Shared:
        truth = ShardTruth(world)
        return cls(world, truth, MemoryBus(truth))

    def slot(self) -> int:
        self.slots += 1
        return self.slots


class SimHome:
    """One life of a home that takes the shard whenever it likes, and does not always know when to stop.

    Args:
        honest: Whether it never writes past its own checks.
    """

    def __init__(self, shared: Shared, node: Node, *, honest: bool) -> None:
        self.shared, self.node, self.honest = shared, node, honest
        self.world = shared.world
        self.pages: Stream = SimBus(node, shared.bus).pages
        self.me = WorkerId(node.name)
        self.life = new_incarnation(node.ids)
        self.rng: random.Random = shared.world.rng(f"home/{node.name}/{node.life.number}")
        self.written: list[int] = []
        self.former: int | None = None

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self.rng.expovariate(1 / 4.0))
            try:
                await self._tenure()
            except TensorbusError as error:
                self.world.cover(f"home.{error.kind}")

    def headers(self, *, token: int = 0, expected: int | None = None) -> Headers:
        return Headers(
            event_id=new_event_id(self.node.ids),
            author=self.me,
            incarnation=self.life,
            token=token,
            expected=expected,
        )

    async def _tenure(self) -> None:
        token = await self._grant()
        if token is None:
            return
        losses = self.shared.truth.losses
        state = await replay_shard(self.pages, SHARD, upto=token, deadline=step())
        if not state.holds(self.me, self.life, token) or losses != self.shared.truth.losses:
            self.world.cover("overtaken")
            return
        assert slots_of(state) == self.shared.truth.visible_at[token], f"{self.me} begins with another index"
        assert (state.gaps, state.unknown) == (0, 0)
        self.world.cover("took over")
        log = PageLog(
            self.pages,
            shard=SHARD,
            token=token,
            number=state.number,
            author=self.me,
            incarnation=self.life,
            ids=self.node.ids,
            on_fenced=lambda: self.world.cover("fenced"),
        )
        saying = asyncio.create_task(log.run())
        try:
            await self._serve(log, token)
        except TensorbusError as error:
            self.world.cover(f"home.{error.kind}")
        finally:
            saying.cancel()
            await asyncio.gather(saying, return_exceptions=True)
        self.former = token
        if not self.honest:
            await self._defy(log, token)

    async def _grant(self) -> int | None:
        last = await self.pages.last_on(f"tb.lease.{SHARD}.*", deadline=step())
        careless = not self.honest and self.rng.random() < 0.1
        if careless:  # no comparison: it counts all the same
            self.world.cover("grant without comparing")
            return await self._force(LeaseGranted(shard=SHARD), self.headers())
        said = self.headers(expected=0 if last is None else last.seq)
        outcome = await append(self.pages, LeaseGranted(shard=SHARD), said, deadline=step())
        self.world.cover("grant" if isinstance(outcome, Appended) else "grant refused")
        return outcome.seq if isinstance(outcome, Appended) else None

    async def _serve(self, log: PageLog, token: int) -> None:
        ends_s = self.world.loop.time() + self.rng.uniform(1.0, 12.0)
        while log.ended is None and self.world.loop.time() < ends_s:
            await asyncio.sleep(self.rng.uniform(0.0, 0.6))
            losses = self.shared.truth.losses
            slots = [self.shared.slot() for _ in range(self.rng.randint(1, 4))]
            upto = log.put(rows(slots), NAMES, (HOLDER,))
            if self.written and self.rng.random() < 0.3:
                gone = self.written.pop(self.rng.randrange(len(self.written)))
                upto = log.put(rows([gone], PageOp.REMOVE), NAMES, (HOLDER,))
            if self.rng.random() < 0.7:
                await log.logged(upto, deadline=Deadline(15.0, what="pages on the stream"))
                self._promised(slots, losses)
            if self.rng.random() < 0.08:
                await self._snapshot(token)
            if not self.honest and self.former is not None and self.rng.random() < 0.05:
                await self._force(self._lie(log), self.headers(token=self.former))  # late words of an earlier grant
                self.world.cover("late words")

    def _promised(self, slots: list[int], losses: int) -> None:
        """What is said to be on the stream counts there, whoever has the shard by now."""
        truth = self.shared.truth
        if losses == truth.losses:
            assert set(slots) <= truth.ever, f"{self.me} promised {slots}, and the stream does not have them"
            self.world.cover("promised")
            self.written += slots

    async def _snapshot(self, token: int) -> None:
        last = await self.pages.last_on(ALL, deadline=step())
        assert last is not None
        state = await replay_shard(self.pages, SHARD, upto=last.seq, deadline=step())
        if state.degraded:
            return
        if await self._store(state, token=token, expected=token):
            self.world.cover("snapshot")

    async def _store(self, state: ShardState, *, token: int, expected: int) -> bool:
        blob = await put_blob(self.pages, b"".join(dump_shard(state)), author=self.me, deadline=step())
        fact = ShardSnapshotTaken(
            shard=SHARD, upto=state.seq, fold=PAGES_FOLD_VERSION, state_hash=state.state_hash, blob=blob
        )
        said = self.headers(token=token, expected=expected)
        return not isinstance(await append(self.pages, fact, said, deadline=step()), Conflict)

    # -- past its own checks ------------------------------------------------------------------------------------------

    async def _defy(self, log: PageLog, token: int) -> None:
        """It goes on when another has the shard: without a fence, with a copied token, or with a lie of a snapshot."""
        last = await self.pages.last_on(f"tb.lease.{SHARD}.*", deadline=step())
        if last is None or last.seq == token:
            return
        lie = self._lie(log)
        match self.rng.randrange(4):
            case 0:
                await self._force(lie, self.headers(token=token))
            case 1:
                await self._force(lie, self.headers(token=last.seq, expected=last.seq))
            case 2:
                outcome = await append(self.pages, lie, self.headers(token=token, expected=token), deadline=step())
                assert isinstance(outcome, Conflict), "the server took what the fence forbids"
            case _:
                state = await replay_shard(self.pages, SHARD, upto=last.seq, deadline=step())
                if not state.degraded and len(state.pages):
                    state.pages.add(rows([self.shared.slot()]))
                    await self._store(state, token=last.seq, expected=last.seq)
        self.world.cover("defied")

    def _lie(self, log: PageLog) -> PagesChanged:
        return PagesChanged(
            shard=SHARD,
            number=log.number + self.rng.randint(1, 3),
            keyspaces=NAMES,
            holders=(HOLDER,),
            records=rows([self.shared.slot()]).tobytes(),
        )

    async def _force(self, fact: Any, headers: Headers) -> int:
        subject = self.pages.subjects.fact(aggregate_of(fact), self.me)
        fence = None if headers.expected is None else f"tb.lease.{SHARD}.*"
        wire = headers_to_wire(headers, type_name=fact.type, fence=fence)
        assert MSG_ID in wire
        return await self.pages.publish(subject, encode(fact), headers=wire, deadline=step())


class SimKeeper:
    """Confirms snapshots, and purges what confirmed ones hold."""

    def __init__(self, shared: Shared, node: Node) -> None:
        self.world, self.node = shared.world, node
        self.pages: Stream = SimBus(node, shared.bus).pages
        self.rng: random.Random = shared.world.rng(f"keeper/{node.life.number}")

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self.rng.uniform(1.0, 5.0))
            try:
                await self._look()
            except TensorbusError as error:
                self.world.cover(f"keeper.{error.kind}")

    async def _look(self) -> None:
        last = await self.pages.last_on(ALL, deadline=step())
        if last is None:
            return
        state = await replay_shard(self.pages, SHARD, upto=last.seq, deadline=step())
        kept = state.snapshot
        if kept is None or state.degraded:
            return
        if kept.confirmed:
            for kind, upto in (("shard", kept.upto), ("lease", kept.upto), ("psnap", kept.seq - 1)):
                if await self.pages.purge(f"tb.{kind}.{SHARD}.*", upto=upto, deadline=step()):
                    self.world.cover("purge")
            return
        again = await replay_shard(self.pages, SHARD, upto=kept.upto, before=kept.seq, deadline=step())
        if again.state_hash == kept.state_hash:
            fact = ShardSnapshotConfirmed(shard=SHARD, snapshot=kept.seq, state_hash=again.state_hash)
            said = Headers(
                event_id=new_event_id(self.node.ids), author=WorkerId(self.node.name), incarnation=Incarnation("s")
            )
            await append(self.pages, fact, said, deadline=step())
            self.world.cover("confirmed")


class SimFollower:
    """A live index: it folds what comes, and makes itself anew when something is missing, once."""

    def __init__(self, shared: Shared, node: Node) -> None:
        self.world = shared.world
        self.pages: Stream = SimBus(node, shared.bus).pages
        self.state = ShardState(SHARD)

    async def run(self) -> None:
        async with self.pages.read(ALL, after=0) as reader:
            async for batch in reader:
                for message in batch:
                    self.state.apply(decode_pages(message))
                if self.state.gaps:
                    self.world.cover("gap repaired")
                    await self._repair()

    async def _repair(self) -> None:
        while True:
            try:
                self.state = await replay_shard(self.pages, SHARD, upto=self.state.seq, deadline=step())
            except TensorbusError:
                await asyncio.sleep(0.5)
            else:
                assert not self.state.gaps, "a repair that leaves the gap"
                return
