"""The index of one shard at its home: who comes first, what is found, and what goes to the stream."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pytest

from tensorbus.clock import NS_PER_S
from tensorbus.errors import UnavailableError
from tensorbus.events import RECORD, PageHolder, PageOp
from tensorbus.ids import Incarnation, WorkerId
from tensorbus.lifecycle import PageTable
from tensorbus.model import PageOutcome, PageState
from tensorbus.workers._home_shard import HomeShard, ShardHealth

KS, OTHER_KS = "ab" * 32, "cd" * 32
W1, W2, W3 = (PageHolder(worker=WorkerId(name), incarnation=Incarnation("i")) for name in ("w1", "w2", "w3"))
Records = npt.NDArray[np.void]


@dataclass
class FakeClock:
    now_s: int = 1000

    def now_ns(self) -> int:
        return self.now_s * NS_PER_S

    def wall_ns(self) -> int:
        return self.now_s * NS_PER_S


@dataclass
class FakeLog:
    """Notes what would be said."""

    full: bool = False
    ended: None = None
    said: list[tuple[PageOp, int, tuple[str, ...], tuple[PageHolder, ...]]] = field(default_factory=list)

    def put(self, records: Records, keyspaces: tuple[str, ...], holders: tuple[PageHolder, ...]) -> int:
        if len(records):
            self.said.append((PageOp(int(records["op"][0])), len(records), keyspaces, holders))
        return 0


@dataclass
class Shard:
    """A shard with all that it looks at."""

    clock: FakeClock = field(default_factory=FakeClock)
    log: FakeLog = field(default_factory=FakeLog)
    dead: set[PageHolder] = field(default_factory=set)
    waiting: set[PageHolder] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.home = HomeShard(
            shard=0,
            token=1,
            table=PageTable(),
            log=self.log,  # type: ignore[arg-type]  # as far as a shard looks at it
            stored=0,
            waiting=self.waiting,
            clock=self.clock,
            is_live=lambda holder: holder not in self.dead,
            host_of=lambda holder: f"host-{holder.worker}",
        )

    def add(self, keys: npt.NDArray[np.uint8], holder: PageHolder, *, replica: bool = False, **given: int) -> list[int]:
        return self.home.add(records(keys, **given), (KS,), holder, replica=replica).outcomes.tolist()

    def states(self, keys: npt.NDArray[np.uint8], *, keyspace: str = KS, fragment: int = 0) -> list[int]:
        return self.home.look(keys, keyspace, fragment, host="")[0].tolist()

    def holders(self, keys: npt.NDArray[np.uint8], *, host: str = "") -> list[PageHolder]:
        found = self.home.look(keys, KS, 0, host=host)[1]
        return [self.home.holder(number) for number in found["holder"].tolist()]


def some_keys(count: int = 3, *, seed: int = 1) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (count, 32), np.uint8)


def records(keys: npt.NDArray[np.uint8], *, ttl_s: int = 0, slot: int = 0, fragment: int = 0) -> Records:
    out = np.zeros(len(keys), RECORD)
    out["key"] = np.ascontiguousarray(keys).view("V32").reshape(-1)
    out["ttl_s"], out["slot"], out["fragment"] = ttl_s, np.arange(slot, slot + len(keys)), fragment
    return out


def test_the_first_writer_wins_and_the_next_learns_where() -> None:
    shard, keys = Shard(), some_keys(3)
    assert shard.add(keys[:2], W1) == [PageOutcome.STORED] * 2
    added = shard.home.add(records(keys, slot=50), (KS,), W2, replica=False)
    assert added.outcomes.tolist() == [PageOutcome.EXISTED, PageOutcome.EXISTED, PageOutcome.STORED]
    assert [shard.home.holder(number) for number in added.first["holder"].tolist()] == [W1, W1]
    assert added.first["slot"].tolist() == [0, 1]
    assert shard.log.said == [(PageOp.ADD, 2, (KS,), (W1,)), (PageOp.ADD, 1, (KS,), (W2,))]


def test_the_same_page_twice_in_a_batch_is_stored_once() -> None:
    shard, keys = Shard(), some_keys(2)
    added = shard.home.add(records(keys[[0, 1, 0]]), (KS,), W1, replica=False)
    assert added.outcomes.tolist() == [PageOutcome.STORED, PageOutcome.STORED, PageOutcome.EXISTED]
    assert added.first["slot"].tolist() == [0]


def test_what_a_holder_says_again_is_stored_at_its_new_place() -> None:
    shard, keys = Shard(), some_keys(1)
    shard.add(keys, W1)
    assert shard.add(keys, W1, slot=9) == [PageOutcome.STORED]
    assert shard.home.look(keys, KS, 0, host="")[1]["slot"].tolist() == [9]


def test_a_dead_or_expired_first_copy_is_in_nobodys_way() -> None:
    shard, keys = Shard(), some_keys(2)
    shard.add(keys[:1], W1)
    shard.add(keys[1:], W1, ttl_s=10)
    shard.dead.add(W1)
    assert shard.states(keys) == [PageState.EXPIRED] * 2
    assert shard.add(keys[:1], W2) == [PageOutcome.STORED]
    shard.dead.clear()
    shard.clock.now_s += 11
    assert shard.states(keys) == [PageState.HIT, PageState.EXPIRED]
    assert shard.add(keys[1:], W2) == [PageOutcome.STORED]
    assert shard.holders(keys[1:]) == [W2]


def test_of_several_copies_the_one_on_the_callers_host_is_named() -> None:
    shard, keys = Shard(), some_keys(4)
    shard.add(keys, W1)
    assert shard.add(keys[:2], W2, replica=True) == [PageOutcome.STORED] * 2
    assert shard.holders(keys) == [W1] * 4
    assert shard.holders(keys, host="host-w2") == [W2, W2, W1, W1]
    shard.dead.add(W1)
    assert shard.states(keys) == [PageState.HIT, PageState.HIT, PageState.EXPIRED, PageState.EXPIRED]


def test_keyspaces_and_fragments_are_apart() -> None:
    shard, keys = Shard(), some_keys(1)
    shard.add(keys, W1, fragment=1)
    assert shard.states(keys) == [PageState.MISSING]
    assert shard.states(keys, fragment=1) == [PageState.HIT]
    assert shard.states(keys, keyspace=OTHER_KS, fragment=1) == [PageState.MISSING]


def test_what_is_left_of_a_time_to_live_is_told() -> None:
    shard, keys = Shard(), some_keys(1)
    shard.add(keys, W1, ttl_s=10)
    shard.clock.now_s += 4
    assert shard.home.look(keys, KS, 0, host="")[1]["ttl_s"].tolist() == [6]


def test_only_the_copy_that_is_named_is_removed() -> None:
    shard, keys = Shard(), some_keys(1)
    shard.add(keys, W1)
    shard.add(keys, W2, replica=True, slot=3)
    assert shard.home.remove(records(keys, slot=4), (KS,), W2) == 0
    assert shard.home.remove(records(keys), (KS,), W1) == 1
    assert shard.holders(keys) == [W2]
    assert shard.log.said[-1] == (PageOp.REMOVE, 1, (KS,), (W1,))


def test_clearing_a_keyspace_and_the_end_of_a_holder_leave_nothing() -> None:
    shard, keys = Shard(), some_keys(5)
    shard.add(keys, W1)
    shard.add(keys, W2, replica=True)
    assert shard.home.forget_holder(W1) == 5
    assert shard.home.forget_holder(W1) == 0
    assert shard.holders(keys) == [W2] * 5
    assert shard.home.clear(KS) == 5
    assert shard.states(keys) == [PageState.MISSING] * 5
    assert [op for op, *_ in shard.log.said] == [PageOp.ADD, PageOp.ADD, PageOp.GONE, PageOp.CLEAR]
    assert (len(shard.home.table), list(shard.home.table.holders)) == (0, [])


def test_a_miss_is_one_only_when_all_who_may_hold_pages_have_said_so() -> None:
    shard, keys = Shard(waiting={W1, W2}), some_keys(2)
    shard.add(keys[:1], W3)
    assert shard.states(keys) == [PageState.HIT, PageState.DEGRADED]
    shard.home.said(W1)
    assert shard.home.health is ShardHealth.DEGRADED
    shard.home.forget_holder(W2)  # its life is over: it holds nothing
    assert (shard.home.health, shard.states(keys)) == (ShardHealth.EXACT, [PageState.HIT, PageState.MISSING])


def test_a_home_whose_bus_is_far_behind_takes_nothing_in() -> None:
    shard, keys = Shard(), some_keys(2)
    shard.log.full = True
    assert shard.add(keys, W1) == [PageOutcome.UNAVAILABLE] * 2
    assert shard.states(keys) == [PageState.MISSING] * 2
    for change in (lambda: shard.home.clear(KS), lambda: shard.home.remove(records(keys), (KS,), W1)):
        with pytest.raises(UnavailableError):
            change()
