"""What the benchmarks of the control plane and of put and get make of what they saw."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection

import pytest

from benchmarks import put_get
from benchmarks._crew import Player, _play, perform
from benchmarks._table import MIB
from benchmarks.control import count_stale

BINDS = [("k", 10, "a"), ("k", 20, "b"), ("other", 15, "c")]


@pytest.mark.parametrize(
    ("answer", "stale"),
    [
        (("k", 10, 10, "a"), 0),
        (("k", 20, 25, "b"), 0),
        (("k", 10, 22, "b"), 0),  # newer than asked for
        (("k", 20, 20, "a"), 1),  # what it was before
        (("k", 10, 12, "b"), 1),  # not yet at that position
        (("k", 20, 10, "b"), 1),  # an answer from before the position
        (("none", 1, 30, "a"), 1),
    ],
)
def test_an_answer_is_fresh_if_the_key_had_it_at_or_after_the_position(
    answer: tuple[str, int, int, str], stale: int
) -> None:
    assert count_stale([answer], BINDS) == stale


def test_a_target_against_an_absent_peer_is_not_met() -> None:
    runs = {
        (case, MIB): [0.002, 0.001, 0.003]
        for case in ("put", "put later", "get", "first get", "mmap", "first mmap", "memcpy 1", "memcpy 2", "blake3")
    }
    rows = {(row.case, row.against): row for row in put_get.rows_of(runs, [MIB])}
    assert rows["get, 1 MiB", "ray get"].met is False
    assert rows["put, 1 MiB", "ray put"].met is None
    assert rows["get, 1 MiB", "mmap"].met is True
    assert rows["get, 1 MiB", "mmap"].value == 2.0


def test_a_put_is_compared_with_the_faster_copy_and_the_slower_of_copy_and_hash() -> None:
    runs = {("put", MIB): [1.0], ("put later", MIB): [1.0]}
    runs |= {("memcpy 1", MIB): [0.4], ("memcpy 2", MIB): [0.3], ("blake3", MIB): [0.9]}
    rows = put_get.rows_of(runs, [MIB])
    assert (rows[0].against, rows[0].ratio, rows[0].met) == ("memcpy 2", pytest.approx(0.3), False)
    assert (rows[1].against, rows[1].ratio, rows[1].met) == (
        "the slower of copy and hash, BLAKE3",
        pytest.approx(0.9),
        True,
    )


class Stage:
    """A part in a thread's place: what :class:`Player` needs of a process."""

    exitcode = 3


def test_players_begin_together_and_say_what_they_made() -> None:
    lines = [multiprocessing.Pipe() for _ in range(2)]
    players = [Player(Stage(), ours, "one") for ours, _ in lines]
    for number, (_, theirs) in enumerate(lines):
        theirs.send("ready")
        theirs.send(number)
    assert perform(players, seconds=0.0, lead_s=0.0) == [0, 1]
    cues = [theirs.recv() for _, theirs in lines]
    assert cues[0] == cues[1]
    for line in lines:
        for end in line:
            end.close()


def test_a_player_that_ended_or_fell_silent_ends_the_benchmark() -> None:
    ours, theirs = multiprocessing.Pipe()
    with pytest.raises(SystemExit, match="one said nothing"):
        Player(Stage(), ours, "one").hear(0.01)
    theirs.close()
    with pytest.raises(SystemExit, match="one ended with 3"):
        Player(Stage(), ours, "one").hear(1)
    ours.close()


def test_a_part_stays_until_its_line_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks._crew.signal.signal", lambda *_: None)
    ours, theirs = multiprocessing.Pipe()

    def part(cue: Connection, *, word: str) -> None:
        cue.send(word)
        ours.send("more")
        ours.recv()
        ours.close()

    _play(part, theirs, {"word": "done"})
    theirs.close()
