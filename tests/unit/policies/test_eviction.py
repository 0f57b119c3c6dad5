"""Eviction policies: what they agree on, what each is for, and how they do on generated traces."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks._traces import belady, hit_ratio
from tensorbus.errors import InvalidArgumentError
from tensorbus.policies import EVICTIONS, Eviction, Lfu, Lru, S3Fifo, eviction

NAMES = sorted(EVICTIONS)
Step = tuple[str, int]


def anything(_: int) -> bool:
    return True


def drained(policy: Eviction[int]) -> list[int]:
    gone: list[int] = []
    while (key := policy.evict(anything)) is not None:
        gone.append(key)
    return gone


@pytest.mark.parametrize("name", NAMES)
@given(steps=st.lists(st.tuples(st.sampled_from(["add", "use", "remove", "evict"]), st.integers(0, 8)), max_size=80))
def test_a_policy_knows_what_is_there_and_gives_each_up_once(name: str, steps: list[Step]) -> None:
    policy, there = eviction(name, nbytes=50), set[int]()
    for what, key in steps:
        match what:
            case "add":
                policy.add(key, 10)
                there.add(key)
            case "use":
                policy.use(key)
            case "remove":
                policy.remove(key)
                there.discard(key)
            case _:
                gone = policy.evict(anything)
                assert (gone is None) == (not there)
                if gone is not None:
                    there.remove(gone)
    assert sorted(drained(policy)) == sorted(there)


@pytest.mark.parametrize("name", NAMES)
@given(pinned=st.sets(st.integers(0, 9)), used=st.lists(st.integers(0, 9), max_size=30))
def test_what_may_not_go_stays_and_all_else_can_go(name: str, pinned: set[int], used: list[int]) -> None:
    policy: Eviction[int] = eviction(name, nbytes=100)
    for key in range(10):
        policy.add(key, 10)
    for key in used:
        policy.use(key)
    gone = []
    while (key_or_none := policy.evict(lambda key: key not in pinned)) is not None:
        gone.append(key_or_none)
    assert sorted(gone) == sorted(set(range(10)) - pinned)
    assert sorted(drained(policy)) == sorted(pinned)


def test_lru_gives_up_what_was_read_longest_ago() -> None:
    policy = Lru[int]()
    for key in (1, 2, 3):
        policy.add(key, 1)
    policy.use(1)
    assert drained(policy) == [2, 3, 1]


def test_lfu_gives_up_what_was_read_least_and_forgets_old_fame() -> None:
    policy = Lfu[int]()
    policy.add(1, 1)
    for _ in range(3):
        policy.use(1)
    policy.add(2, 1)
    assert policy.evict(anything) == 2
    for key in range(10, 20):  # a stream of newcomers, each read twice: their scores pass that of the old one
        policy.add(key, 1)
        policy.use(key)
        policy.use(key)
        if policy.evict(anything) == 1:
            return
    raise AssertionError("what was popular once stays for ever")


def test_s3fifo_gives_the_main_part_to_what_comes_back_soon() -> None:
    policy = S3Fifo[int](100)
    for key in range(10):
        policy.add(key, 10)
    back = policy.evict(anything)
    assert back == 0
    policy.add(back, 10)
    gone = []
    for key in range(100, 105):
        policy.add(key, 10)
        gone.append(policy.evict(anything))
    assert back not in gone


def test_names_are_checked() -> None:
    with pytest.raises(InvalidArgumentError, match="lru"):
        eviction("fifo?", nbytes=1)


def zipf(count: int, keys: int, *, seed: int) -> list[int]:
    chance = random.Random(seed)
    return chance.choices(range(keys), weights=[1 / (n + 1) for n in range(keys)], k=count)


def with_scans(hot: Iterable[int]) -> list[int]:
    """Each reading of something hot is followed by two of things that never come again."""
    trace: list[int] = []
    for n, key in enumerate(hot):
        trace += [key, 10_000_000 + 2 * n, 10_000_001 + 2 * n]
    return trace


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("share", [0.1, 0.3])
def test_no_policy_beats_the_one_that_knows_the_future(name: str, share: float) -> None:
    for trace in (zipf(4000, 400, seed=1), with_scans(zipf(2000, 200, seed=2))):
        capacity = int(share * len(set(trace)))
        assert 0 < hit_ratio(name, trace, capacity) <= belady(trace, capacity)


def test_s3fifo_is_the_one_for_scans() -> None:
    trace = with_scans(zipf(4000, 400, seed=3))
    capacity = 200
    lru, s3fifo, limit = (
        hit_ratio("lru", trace, capacity),
        hit_ratio("s3fifo", trace, capacity),
        belady(trace, capacity),
    )
    assert s3fifo >= lru + 0.2 * (limit - lru)
