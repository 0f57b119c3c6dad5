"""When a store that cannot keep the log gives that up, and when it asks for it again."""

from __future__ import annotations

from tensorbus.clock import NS_PER_S
from tensorbus.errors import OutOfSpaceError
from tensorbus.workers._fitness import RESTS_MAX, Fitness

FULL = OutOfSpaceError("the disk is full")
PATIENCE_S = 10


class Hand:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.seconds = 1000

    def now_ns(self) -> int:
        return self.seconds * NS_PER_S

    def wall_ns(self) -> int:
        return self.now_ns()


def made() -> tuple[Hand, Fitness]:
    clock = Hand()
    return clock, Fitness(clock, patience_s=PATIENCE_S)


def test_only_what_lasts_is_a_reason() -> None:
    clock, fitness = made()
    assert not fitness.note(FULL)
    clock.seconds += PATIENCE_S - 1
    assert not fitness.note(FULL)
    assert not fitness.note(None)
    clock.seconds += PATIENCE_S
    assert not fitness.note(FULL), "it begins anew"
    clock.seconds += PATIENCE_S
    assert fitness.note(FULL)
    assert fitness.note(FULL), "until it is done"


def test_trouble_before_the_role_was_taken_does_not_count() -> None:
    clock, fitness = made()
    fitness.note(FULL)
    fitness.lost()
    clock.seconds += 2 * PATIENCE_S
    assert not fitness.note(FULL)


def test_each_resignation_in_a_row_rests_longer_until_it_went_well() -> None:
    clock, fitness = made()
    rests = [rest_after_resigning(clock, fitness) for _ in range(7)]
    assert rests == [PATIENCE_S * times for times in (1, 2, 4, 8, RESTS_MAX, RESTS_MAX, RESTS_MAX)]
    fitness.note(None)
    assert rest_after_resigning(clock, fitness) == PATIENCE_S


def rest_after_resigning(clock: Hand, fitness: Fitness) -> int:
    fitness.resigned()
    began = clock.seconds
    while fitness.rests:
        clock.seconds += 1
    return clock.seconds - began
