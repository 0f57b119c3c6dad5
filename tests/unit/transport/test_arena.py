"""The allocator of small segments: nothing overlaps, nothing is lost, and holes join again."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks._pages import overhead_of, page_steps
from tensorbus.errors import InvalidArgumentError
from tensorbus.transport._arena import Extent, PageSpace

GRAIN, ARENA = 16, 1024


def space(arenas: int = 2) -> PageSpace:
    made = PageSpace(arena_bytes=ARENA, grain_bytes=GRAIN)
    for _ in range(arenas):
        made.grow()
    return made


@given(
    steps=st.lists(
        st.one_of(
            st.integers(0, ARENA).map(lambda n: ("allocate", n)),
            st.integers(0, 50).map(lambda n: ("free", n)),
            st.sampled_from([("grow", 0), ("shrink", 0)]),
        ),
        max_size=120,
    )
)
def test_extents_never_overlap_and_every_byte_is_accounted_for(steps: list[tuple[str, int]]) -> None:
    made, live, arenas, seen = space(), list[Extent](), 2, set[Extent]()
    for what, n in steps:
        match what:
            case "allocate":
                extent = made.allocate(n)
                if extent is not None:
                    offset, nbytes, _ = extent
                    assert nbytes >= max(n, 1)
                    assert nbytes % GRAIN == offset % GRAIN == 0
                    assert offset // ARENA == (offset + nbytes - 1) // ARENA
                    assert extent not in seen
                    seen.add(extent)
                    live.append(extent)
            case "free" if live:
                gone = live.pop(n % len(live))
                made.free(gone)
                assert not made.valid(gone)
            case "grow":
                made.grow()
                arenas += 1
            case "shrink":
                arenas -= made.shrink() is not None
        assert all(one[0] + one[1] <= two[0] for one, two in pairwise(sorted(live)))
        assert all(made.valid(extent) for extent in live)
    stats = made.stats()
    assert stats.capacity_bytes == arenas * ARENA
    assert stats.live_bytes == sum(nbytes for _, nbytes, _ in live)
    assert stats.live_bytes + stats.cached_bytes + stats.free_bytes == stats.capacity_bytes
    for extent in live:
        made.free(extent)
    assert [made.shrink() is not None for _ in range(arenas + 1)] == [True] * arenas + [False]


@given(sizes=st.lists(st.integers(1, ARENA), min_size=1, max_size=40), seed=st.integers(0, 99))
def test_what_is_refused_fits_nowhere(sizes: list[int], seed: int) -> None:
    made, live = space(), list[Extent]()
    chance = random.Random(seed)
    for size in sizes:
        extent = made.allocate(size)
        if extent is None:
            assert made.stats().largest_bytes < size
            continue
        live.append(extent)
        if chance.random() < 0.4:
            made.free(live.pop(chance.randrange(len(live))))


def test_the_smallest_hole_that_fits_is_taken() -> None:
    made = space(1)
    kept = [made.allocate(size) for size in (256, 16, 64, 16, 128, 16)]
    for n in (0, 2, 4):
        extent = kept[n]
        assert extent is not None
        made.free(extent)
    made.stats()  # joins what was freed
    found = made.allocate(60)
    assert found is not None
    assert kept[2] is not None
    assert found[0] == kept[2][0]
    assert found != kept[2]


def test_a_stale_extent_is_neither_valid_nor_freed() -> None:
    made = space(1)
    first = made.allocate(100)
    assert first is not None
    made.free(first)
    again = made.allocate(100)
    assert again is not None
    assert again[0] == first[0]
    assert not made.valid(first)
    assert made.valid(again)
    with pytest.raises(InvalidArgumentError, match="not allocated"):
        made.free(first)


def test_sizes_are_checked() -> None:
    with pytest.raises(InvalidArgumentError, match="do not fit an arena"):
        space().allocate(ARENA + 1)
    with pytest.raises(InvalidArgumentError, match="grains"):
        PageSpace(arena_bytes=100, grain_bytes=16)


def test_page_churn_wastes_little() -> None:
    chance = random.Random(4)
    requests = []
    for n in range(400):
        tokens = chance.randrange(100, 4000)
        first = chance.randrange(50) * 100
        requests.append((tokens, [first + m if m < 3 else 10_000 * (n + 1) + m for m in range(-(-tokens // 512))]))
    steps = page_steps(requests, capacity_bytes=512 << 20, steps_max=8000)
    overhead, _ = overhead_of(steps, PageSpace())
    assert overhead <= 0.2
