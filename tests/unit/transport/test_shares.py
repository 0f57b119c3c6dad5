"""Which path brings which blocks: all of them once, in shares that follow the rates, whatever becomes of a path."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorbus.clock import NS_PER_S
from tensorbus.transport._blocks import BLOCK_BYTES
from tensorbus.transport._shares import RUN_BLOCKS_MAX, SPOILT_MAX, Path, Run, Shares

MIB = 1 << 20


class World:
    """Paths of given rates on a clock of their own."""

    def __init__(self, blocks: int, rates: dict[str, float]) -> None:
        self.shares = Shares([BLOCK_BYTES] * blocks)
        self.rates = rates
        self.paths = {name: Path(name) for name in rates}
        self.free_ns = dict.fromkeys(rates, 0)
        self.now_ns = 0
        for path in self.paths.values():
            self.shares.join(path)

    def run(self) -> float:
        """Let all paths work to the end; gives the seconds."""
        while not self.shares.finished:
            for name, path in self.paths.items():
                if path in self.shares.paths:
                    self.take(name, path)
            name = min((n for n in self.paths if self.paths[n].under_way), key=lambda n: self.free_ns[n])
            self.now_ns = max(self.now_ns, self.free_ns[name])
            path = self.paths[name]
            self.shares.came(path, path.runs[0][0], self.now_ns)
            if not path.runs[0]:
                self.shares.ended(path)
            self.free_ns[name] = self.now_ns + self.block_ns(name)
        return self.now_ns / NS_PER_S

    def take(self, name: str, path: Path) -> None:
        idle = not path.runs
        while self.shares.take(path, self.now_ns) is not None:
            pass
        if idle and path.runs:
            self.free_ns[name] = self.now_ns + self.block_ns(name)
        if not path.runs and (slow := self.shares.holding_up(path, self.now_ns)) is not None:
            self.shares.lost(slow)
            self.take(name, path)

    def block_ns(self, name: str) -> int:
        return int(BLOCK_BYTES / self.rates[name] * NS_PER_S)


def test_equal_paths_bring_equal_shares_and_end_together() -> None:
    world = World(256, {"a": 1e9, "b": 1e9})
    alone = World(256, {"a": 1e9}).run()
    assert world.run() < alone / 1.9
    shares = world.shares.done_bytes
    assert 0.9 < shares["a"] / shares["b"] < 1.1


def test_a_share_follows_the_rate() -> None:
    world = World(512, {"fast": 3e9, "slow": 1e9})
    world.run()
    assert 2.6 < world.shares.done_bytes["fast"] / world.shares.done_bytes["slow"] < 3.4


def test_a_path_that_is_a_hundred_times_slower_does_not_hold_up_the_other() -> None:
    alone = World(256, {"fast": 4e8}).run()
    world = World(256, {"fast": 4e8, "slow": 4e6})
    assert world.run() < 1.25 * alone + 0.6
    assert world.paths["slow"].benched


def test_a_benched_path_works_again_once_the_others_are_gone() -> None:
    world = World(64, {"fast": 1e9, "slow": 1e7})
    world.paths["slow"].benched = True
    assert world.shares.take(world.paths["slow"], 0) is None
    world.shares.leave(world.paths["fast"])
    assert world.shares.take(world.paths["slow"], 0) is not None


def test_runs_are_short_at_first_and_at_the_end() -> None:
    shares, path = Shares([BLOCK_BYTES] * 100), Path("a")
    shares.join(path)
    assert shares.take(path, 0) == Run(0, 1)
    assert shares.take(path, 0) == Run(1, 1)
    assert shares.take(path, 0) is None  # no more before its rate is known
    for index in range(2):
        shares.came(path, index, 1_000_000 * (index + 1))
        shares.ended(path)
    longest = 0
    while (run := shares.take(path, 2_000_000)) is not None:
        longest = max(longest, run.count)
        for index in range(run.first, run.first + run.count):
            shares.came(path, index, path.since_ns + 1_000_000)
        shares.ended(path)
        last = run
    assert longest == RUN_BLOCKS_MAX
    assert last.count == 1
    assert shares.finished


def spoil(found: list[int]) -> list[bool]:
    shares, path, said = Shares([10, 10]), Path("a"), []
    shares.join(path)
    for attempt, checksum in enumerate(found):
        assert shares.take(path, attempt) == Run(0, 1)
        said.append(shares.spoilt(path, 0, checksum, attempt))
        shares.ended(path)
    assert shares.repeated == len(found)
    assert list(shares.missing()) == [0, 1]
    return said


def test_the_same_wrong_bytes_twice_are_what_the_source_has() -> None:
    assert spoil([5, 6, 5]) == [False, False, True]


def test_bytes_that_are_wrong_in_another_way_each_time_are_changed_on_the_way_up_to_a_limit() -> None:
    assert spoil(list(range(SPOILT_MAX))) == [False] * (SPOILT_MAX - 1) + [True]


@given(blocks=st.integers(1, 60), seed=st.integers(0, 2**32), paths=st.integers(1, 4))
def test_every_block_comes_once_whatever_is_lost(blocks: int, seed: int, paths: int) -> None:
    rng = random.Random(seed)
    sizes = [rng.randint(1, BLOCK_BYTES) for _ in range(blocks)]
    shares, now_ns, came = Shares(sizes), 0, []
    for number in range(paths):
        shares.join(Path(f"p{number % 2}"))
    while not shares.finished:
        now_ns += rng.randint(1, 10**8)
        path = rng.choice(shares.paths)
        shares.take(path, now_ns)
        if shares.holding_up(path, now_ns) is not None and all(other.benched for other in shares.paths):
            pytest.fail("nobody is left to work")
        choice = rng.random()
        if choice < 0.1:
            shares.lost(path)
        elif choice < 0.15 and len(shares.paths) > 1:
            shares.leave(path)
            shares.join(Path("late"))
        elif path.runs and path.runs[0]:
            index = path.runs[0][0]
            if choice < 0.25:
                shares.spoilt(path, index, now_ns, now_ns)
            else:
                shares.came(path, index, now_ns)
                came.append(index)
        elif path.runs:
            shares.ended(path)
        for other in shares.paths:
            other.benched = other.benched and rng.random() < 0.9
    assert sorted(came) == list(range(blocks))
    assert sum(shares.done_bytes.values()) == sum(sizes)
