"""Which pages leave: against the plain way to say it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorbus.errors import InvalidArgumentError
from tensorbus.transport import Watermarks
from tensorbus.transport._page_evict import NEVER_NS, batches, coldest_pages, expired_pages

PAGES = st.lists(st.tuples(st.integers(0, 50), st.integers(1, 9), st.booleans()), max_size=40)


@given(PAGES, st.integers(-1, 200))
def test_the_coldest_that_suffice_leave(pages: list[tuple[int, int, bool]], need: int) -> None:
    touched = np.array([page[0] for page in pages], np.int64)
    nbytes = np.array([page[1] for page in pages], np.int64)
    keep = np.array([page[2] for page in pages], np.bool_)
    found = coldest_pages(touched, nbytes, need, keep=keep).tolist()
    free = [n for n in range(len(pages)) if not keep[n]]
    assert len(set(found)) == len(found)
    assert set(found) <= set(free)
    assert touched[found].tolist() == sorted(touched[found].tolist())
    total = int(nbytes[found].sum())
    assert total >= need or set(found) == set(free)
    assert not found or total - nbytes[found[-1]] < need
    left = [touched[n] for n in free if n not in set(found)]
    assert not left or not found or min(left) >= touched[found[-1]]


def test_what_expires_and_when_to_make_room() -> None:
    assert expired_pages(np.array([5, 6, NEVER_NS], np.int64), 5).tolist() == [0]
    marks = Watermarks(high=0.9, low=0.5)
    assert [marks.excess_bytes(used, 100) for used in (90, 91)] == [0, 41]
    with pytest.raises(InvalidArgumentError):
        Watermarks(high=0.5, low=0.9)
    assert [batch.tolist() for batch in batches(np.arange(5), 2)] == [[0, 1], [2, 3], [4]]
