"""The hash table of row numbers that the table of pages searches."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st

from tensorbus.lifecycle._page_buckets import Buckets, tags_of

Asked = npt.NDArray[np.uint64]


class Named:
    """Rows that stand for numbers, whose tags are theirs to choose."""

    def __init__(self, tags: Asked) -> None:
        self.tags = tags
        self.buckets = Buckets()

    def find(self, rows: npt.NDArray[np.int32]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
        return self.buckets.find(self.tags[rows], lambda found, at: found == rows[at])

    def there(self) -> set[int]:
        found, _ = self.find(np.arange(len(self.tags), dtype=np.int32))
        assert (found[found >= 0] == np.flatnonzero(found >= 0)).all()
        return set(found[found >= 0].tolist())


def crowded(count: int, spread: int) -> Asked:
    """Tags of which only so many differ: whole rows of buckets are full."""
    return tags_of(np.arange(count, dtype=np.uint64) % np.uint64(spread) << np.uint64(32))


@given(
    st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 199), max_size=60, unique=True)), max_size=12),
    st.sampled_from([1, 5, 200]),
)
def test_rows_are_found_however_crowded_their_buckets_are(history: list[tuple[bool, list[int]]], spread: int) -> None:
    named, model = Named(crowded(200, spread)), set[int]()
    for comes, numbers in history:
        changed = [number for number in numbers if (number in model) is not comes]
        rows = np.array(changed, np.int32)
        if comes:
            named.buckets.insert(rows, named.tags[rows])
            model |= set(changed)
        else:
            named.buckets.remove(named.find(rows)[1])
            model -= set(changed)
        assert named.there() == model
        assert len(named.buckets) == len(model)
        assert sorted(named.buckets.rows().tolist()) == sorted(model)


def test_a_place_can_be_given_to_another_row() -> None:
    buckets, tags = Buckets(), crowded(4, 2)
    buckets.insert(np.array([0, 1], np.int32), tags[:2])
    _, places = buckets.find(tags[:1], lambda rows, at: rows == 0)
    buckets.point(places, np.array([2], np.int32))
    found, again = buckets.find(tags[[2]], lambda rows, at: rows == 2)
    assert (found.tolist(), again.tolist()) == ([2], places.tolist())


def test_nothing_is_lost_while_the_table_doubles_and_rows_go() -> None:
    random, rows = np.random.default_rng(4), np.arange(0, dtype=np.int32)
    named = Named(tags_of(random.integers(0, 2**64, 40_000, np.uint64)))
    for begin in range(0, 40_000, 160):
        more = np.arange(begin, begin + 160, dtype=np.int32)
        named.buckets.insert(more, named.tags[more])
        rows = random.permutation(np.concatenate([rows, more]))
        named.buckets.remove(named.find(rows[:40])[1])
        rows = rows[40:]
        if begin % 1600 == 0:
            assert named.there() == set(rows.tolist())
    assert named.there() == set(rows.tolist())
    assert named.buckets.nbytes < 30 * len(rows)


def test_marks_of_full_buckets_go_while_rows_come_and_go() -> None:
    random = np.random.default_rng(5)
    named = Named(tags_of(random.integers(0, 2**64, 1 << 16, np.uint64)))
    rows = np.arange(1400, dtype=np.int32)
    named.buckets.insert(rows, named.tags[rows])
    nbytes = named.buckets.nbytes
    for begin in range(1400, 1 << 16, 700):
        more = np.arange(begin, min(begin + 700, 1 << 16), dtype=np.int32)
        named.buckets.remove(named.find(rows[: len(more)])[1])
        named.buckets.insert(more, named.tags[more])
        rows = np.concatenate([rows[len(more) :], more])
    assert named.there() == set(rows.tolist())
    assert named.buckets.nbytes == nbytes
    assert named.buckets._overflowed.mean() <= 0.5
    assert named.buckets._marks == named.buckets._overflowed.sum()
