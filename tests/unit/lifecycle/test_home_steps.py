"""What a home does next about a shard, by whose it is, who lives, and who should have it."""

from __future__ import annotations

import pytest

from tensorbus.ids import Incarnation, WorkerId
from tensorbus.lifecycle import HomeStep, HomeView, next_step

ME = WorkerId("h1"), Incarnation("now")
OLD = WorkerId("h1"), Incarnation("before")
OTHER = WorkerId("h2"), Incarnation("now")
GONE = WorkerId("h3"), Incarnation("before")
LIVE = {ME, OTHER}


def step(
    holder: tuple[WorkerId, Incarnation] | None,
    *,
    token: int = 7,
    serves: int = 0,
    candidates: tuple[str, ...] = ("h1", "h2", "h4"),
    waited_s: float = 0.0,
) -> HomeStep:
    view = HomeView(
        holder=holder, token=0 if holder is None else token, serves=serves, candidates=candidates, waited_s=waited_s
    )
    return next_step(view, me=ME, is_live=lambda *life: life in LIVE, patience_s=1.0)


@pytest.mark.parametrize("holder", [None, GONE, OLD])
def test_the_first_candidate_takes_what_is_nobodys_at_once_and_the_others_in_turn(
    holder: tuple[WorkerId, Incarnation] | None,
) -> None:
    assert step(holder) is HomeStep.TAKE
    for waited_s, expected in ((0.9, HomeStep.NONE), (1.0, HomeStep.TAKE)):
        assert step(holder, candidates=("h2", "h1"), waited_s=waited_s) is expected
    assert step(holder, candidates=("h2", "h4", "h1"), waited_s=1.9) is HomeStep.NONE
    assert step(holder, candidates=("h2", "h4", "h5"), waited_s=99) is HomeStep.NONE


def test_only_the_first_candidate_asks_a_living_home() -> None:
    assert step(OTHER) is HomeStep.ASK
    assert step(OTHER, candidates=("h2", "h1"), waited_s=99) is HomeStep.NONE


def test_what_is_its_own_is_served_until_a_newer_grant_is_known() -> None:
    assert step(ME) is HomeStep.SERVE
    assert step(ME, serves=7) is HomeStep.NONE
    assert step(OTHER, serves=7, token=8) is HomeStep.DROP
    assert step(ME, serves=7, token=8) is HomeStep.DROP


def test_a_grant_that_has_not_come_back_yet_is_no_reason_to_let_go() -> None:
    assert step(GONE, serves=8, token=7) is HomeStep.NONE
    assert step(None, serves=8) is HomeStep.NONE
