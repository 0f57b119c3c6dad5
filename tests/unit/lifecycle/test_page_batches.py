"""What was put comes out in its order, under its names, in as few batches as may be."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st

from tensorbus.events import PAGE_FACT_BYTES_MAX, RECORD, PageHolder, PageOp, encode, page_records, records_max
from tensorbus.ids import Incarnation, WorkerId
from tensorbus.lifecycle import PageBatches

NAMES = tuple(f"{n:064x}" for n in range(600))
HOLDERS = tuple(PageHolder(worker=WorkerId(f"w{n}"), incarnation=Incarnation("0" * 16)) for n in range(600))


def records(count: int, *, first: int = 0) -> npt.NDArray[np.void]:
    out = np.zeros(count, RECORD)
    out["op"], out["slot"] = PageOp.ADD, np.arange(first, first + count)
    return out


pieces = st.lists(
    st.tuples(st.integers(1, 1500), st.integers(1, 256), st.integers(1, 256), st.integers(0, 300)), max_size=5
)


@given(pieces)
def test_nothing_is_lost_or_renamed(plan: list[tuple[int, int, int, int]]) -> None:
    batches, wanted = PageBatches(3), []
    for count, names, holders, shift in plan:
        part = records(count, first=batches.put_count)
        part["keyspace"], part["holder"] = np.arange(count) % names, np.arange(count) % holders
        tables = NAMES[shift : shift + names], HOLDERS[shift : shift + holders]
        wanted += [(tables[0][row["keyspace"]], tables[1][row["holder"]], row["slot"]) for row in part]
        batches.put(part, *tables)
    found, number = [], 0
    while (batch := batches.pack(number + 1)) is not None:
        number += 1
        assert (batch.shard, batch.number) == (3, number)
        assert len(encode(batch)) <= PAGE_FACT_BYTES_MAX
        found += [
            (batch.keyspaces[row["keyspace"]], batch.holders[row["holder"]], row["slot"]) for row in page_records(batch)
        ]
    assert found == wanted
    assert batches.waiting == 0


def test_small_pieces_share_a_batch() -> None:
    batches = PageBatches(0)
    for n in range(50):
        batches.put(records(20, first=20 * n), NAMES[:1], HOLDERS[:1])
    first = batches.pack(1)
    assert first is not None
    assert len(page_records(first)) == records_max(NAMES[:1], HOLDERS[:1]) or batches.waiting == 0
    assert not batches.fill_a_batch


def test_what_was_put_stays_as_it_was() -> None:
    batches, part = PageBatches(0), records(3)
    batches.put(part, NAMES[:1], HOLDERS[:1])
    batches.put(records(3), NAMES[1:2], HOLDERS[1:2])
    batches.pack(1)
    assert (part == records(3)).all()
