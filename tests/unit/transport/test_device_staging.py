"""Which piece of a copy goes through which slot, and when."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorbus.errors import InvalidArgumentError
from tensorbus.transport import StagingPlan
from tensorbus.transport._device_staging import Side, download_steps, pieces

PLANS = st.builds(StagingPlan, slot_bytes=st.integers(1, 5 << 20), slots=st.integers(1, 5))


@given(st.integers(0, 200 << 20), PLANS.filter(lambda plan: plan.slot_bytes > 10_000), st.integers(0, 4))
def test_pieces_cover_the_copy_once_in_order_and_take_the_slots_in_turn(
    nbytes: int, plan: StagingPlan, first: int
) -> None:
    cut = pieces(nbytes, plan, first_slot=first)
    at = 0
    for number, piece in enumerate(cut):
        assert piece.offset == at
        assert 0 < piece.nbytes <= plan.slot_bytes
        assert piece.slot == (first + number) % plan.slots
        at += piece.nbytes
    assert at == nbytes


@given(st.integers(0, 100), st.integers(1, 5))
def test_a_slot_is_emptied_before_the_next_piece_comes_and_all_slots_are_used(count: int, slots: int) -> None:
    plan = StagingPlan(slot_bytes=1, slots=slots)
    cut = pieces(count, plan)
    full: dict[int, int] = {}
    emptied, brought = [], 0
    for side, piece in download_steps(cut, slots):
        if side is Side.DEVICE:
            assert piece.slot not in full
            full[piece.slot] = piece.offset
            brought += 1
        else:
            assert full.pop(piece.slot) == piece.offset
            # Nothing more could have been under way while the host worked.
            assert len(full) == min(slots, count - len(emptied)) - 1
            emptied.append(piece.offset)
    assert (emptied, brought, full) == (list(range(count)), count, {})


@pytest.mark.parametrize("nbytes", [4 << 20, 16 << 20, 48 << 20, 1 << 30])
def test_a_copy_that_would_fit_into_the_slots_overlaps_too(nbytes: int) -> None:
    plan = StagingPlan()
    cut = pieces(nbytes, plan)
    assert len(cut) >= min(4, 2 * plan.slots)
    assert all(piece.nbytes >= 1 << 20 for piece in cut[:-1])


def test_a_small_copy_is_one_piece() -> None:
    assert [piece.nbytes for piece in pieces(1 << 20, StagingPlan())] == [1 << 20]
    assert pieces(0, StagingPlan()) == []


@pytest.mark.parametrize(("slot_bytes", "slots"), [(0, 1), (1, 0), (-1, 1)])
def test_a_plan_needs_room(slot_bytes: int, slots: int) -> None:
    with pytest.raises(InvalidArgumentError):
        StagingPlan(slot_bytes=slot_bytes, slots=slots)
