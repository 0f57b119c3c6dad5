"""Which worker should have which shard."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from tensorbus.lifecycle import CANDIDATES, assign

GOLDEN = [
    ("w0", "w1", "w2"),
    ("w3", "w1", "w0"),
    ("w0", "w2", "w1"),
    ("w2", "w1", "w0"),
    ("w2", "w0", "w3"),
    ("w3", "w0", "w2"),
]
homes = st.lists(st.from_regex(r"[a-z0-9]{1,6}", fullmatch=True), min_size=1, max_size=20, unique=True)


@given(homes, st.sampled_from([1, 3, 64, 100]), st.randoms())
def test_every_shard_has_candidates_and_no_home_too_many(names: list[str], shards: int, random: object) -> None:
    found = assign(shards, names)
    loads = Counter(candidates[0] for candidates in found)
    assert len(found) == shards
    assert max(loads.values()) <= -(-9 * shards // (8 * len(names)))
    assert all(len(set(one)) == len(one) == min(CANDIDATES, len(names)) for one in found)
    shuffled = list(names)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert assign(shards, [*shuffled, *names]) == found


def test_nobody_has_a_shard_when_nobody_is_there() -> None:
    assert assign(2, []) == [(), ()]
    assert assign(0, ["a"]) == []


@given(homes)
def test_a_home_that_comes_or_goes_moves_few_shards(names: list[str]) -> None:
    before = [one[0] for one in assign(256, names)]
    after = [one[0] for one in assign(256, [*names, "another"])]
    moved = [(old, new) for old, new in zip(before, after, strict=True) if old != new]
    share = 256 / (len(names) + 1)
    assert len(moved) <= 2.2 * share + 8  # what the new one gets, and what its capacity pushes on
    assert sum(new == "another" for _, new in moved) <= -(-9 * 256 // (8 * (len(names) + 1)))


def test_a_second_candidate_takes_over_what_a_home_leaves() -> None:
    names = [f"w{n}" for n in range(8)]
    before = assign(64, names)
    after = assign(64, [name for name in names if name != "w3"])
    heirs = [(old[1], new[0]) for old, new in zip(before, after, strict=True) if old[0] == "w3"]
    assert heirs
    assert sum(second == heir for second, heir in heirs) >= len(heirs) // 2


def test_who_has_what_never_changes() -> None:
    assert assign(6, ["w0", "w1", "w2", "w3"]) == GOLDEN
