"""What the replay benchmark makes of what it saw, and that its log is one that a cluster could have written."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import replay
from benchmarks._failover import back_after, lost, silences
from benchmarks._log import FACTS_EACH, REPLICAS_EACH, ClusterLog
from benchmarks._replay_parts import Folded, Stored
from benchmarks._replay_store import Filling, rows_of
from tensorbus.events import Subjects, ViewDefined
from tensorbus.feeds import decode_all
from tensorbus.lifecycle import Directory
from tensorbus.projections import RowTracker


def test_every_fact_of_the_log_counts() -> None:
    log, state = ClusterLog(seq=1000), Directory()
    messages = list(log.messages(200))
    facts = decode_all(messages)
    assert [message.seq for message in messages] == list(range(1001, 1001 + len(messages)))
    assert all(state.apply(fact).kept for fact in facts)
    assert (state.gaps, state.unknown, state.dropped) == (0, 0, {})
    live = [record for record in state.artifacts.values() if record.live]
    assert len(live) == 200
    views = sum(isinstance(fact.event, ViewDefined) for fact in facts)
    assert sum(len(record.replicas) for record in live) == 200 * REPLICAS_EACH + views
    assert len(messages) / 200 == pytest.approx(FACTS_EACH, abs=1.1)  # the sessions of 64 workers weigh here
    state.validate()
    assert all(state.apply(fact).kept for fact in decode_all([log.put(n) for n in range(200, 210)]))


def test_the_rows_inserted_beside_the_store_are_those_that_it_writes(tmp_path: Path) -> None:
    messages = list(ClusterLog().messages(100))
    with Filling(str(tmp_path)) as filling:
        filling.take_in(messages)
        filling.flush()
        for table in ("facts", "replicas_history", "artifacts_history", "keys_history", "versions_history"):
            (count,) = filling._plain.execute(f"SELECT count(*) FROM {table}").fetchone() or (0,)
            assert count == len(filling._store.rows(table)) > 0
        assert filling.facts == len(messages)
        (took, _) = filling.travel(1)
        assert len(took) == 1


def test_a_row_belongs_to_the_fact_that_opened_it() -> None:
    state = Directory()
    tracker = RowTracker(state)
    batch = [tracker.applied(fact, state.apply(fact)) for fact in decode_all(list(ClusterLog().messages(1)))]
    tables = {name: rows for name, _, rows in rows_of(batch, Subjects())}
    assert len(tables["facts"]) == len(batch)
    copies = [row[0] for row in tables["facts"] if row[2] in ("ArtifactPut", "ReplicaAdded")]
    assert [row[-1] for row in tables["replicas_history"]] == copies
    assert len(copies) == REPLICAS_EACH


@pytest.mark.parametrize(
    ("moments", "event", "back"),
    [
        ([1.4, 2.0, 2.1], 1.5, 0.5),
        ([1.0, 1.51, 1.52, 6.0, 6.1], 1.5, 4.5),  # what was under way arrives; then nobody answers
        ([5.0, 5.1], 1.0, 4.0),
        ([0.5, 0.9], 1.0, None),
        ([], 1.0, None),
    ],
)
def test_back_is_at_the_end_of_the_longest_silence(moments: list[float], event: float, back: float | None) -> None:
    assert back_after(moments, event) == (None if back is None else pytest.approx(back))


def test_what_was_acknowledged_must_be_there() -> None:
    assert lost([("a", 1.0), ("b", 2.0)], {"b", "c"}) == ["a"]


def test_each_leader_that_was_killed_has_a_silence_of_its_own() -> None:
    moments = [(str(at), at) for at in (8.0, 9.9, 14.0, 17.0, 20.0, 23.0, 26.0, 29.0, 33.0)]
    found = silences([10.0, 30.0], moments, [])
    assert [one.publish_s for one in found] == [pytest.approx(4.0), pytest.approx(3.0)]
    assert [one.read_s for one in found] == [None, None]


def test_the_worst_round_against_nats_counts() -> None:
    back, later = replay.back_rows("publish", [5.0, 6.0], [4.9, 4.0])
    assert (back.value, back.against_value) == (5.5, 4.45)
    assert (later.value, later.met) == (2.0, False)
    _, later = replay.back_rows("readers", [5.0, 6.0], [4.9, 5.0])
    assert (later.value, later.met) == (1.0, True)


def test_who_never_came_back_met_nothing() -> None:
    back, later = replay.back_rows("readers", [5.0, None], [4.9, 4.0])
    assert back.value == 5.0
    assert (later.value, later.met, later.note) == (None, False, "1 never came back")


def folded(seconds: float, state_hash: str = "h") -> Folded:
    return Folded(
        seconds=seconds, state_hash=state_hash, rss_bytes=1 << 29, snapshot=None, artifacts=10, replicas=100
    )  # fmt: skip


def test_rates_and_targets_of_a_replay() -> None:
    log = replay.Log("nats://x", 1100, 100)
    rows = replay.stream_rows(log, [1.0, 2.0, 3.0], [folded(4.0), folded(5.0), folded(3.0)], (50, [0.5]))
    assert (rows[0].value, rows[0].against_value, rows[0].met) == (25.0, 50.0, True)
    assert (rows[1].against_value, rows[1].met) == (100.0, None)
    assert (rows[2].value, rows[2].met) == (512.0, True)
    archived = replay.archive_rows(log, replay.Archived(10.0, [1.0], [1.5], [folded(2.5)]), (50, [0.5]))
    assert (archived[0].value, archived[0].ratio, archived[0].met) == (40.0, 0.4, False)


def test_the_past_is_compared_with_a_replay() -> None:
    stored = Stored(
        seconds=2.0, insert_s=1.5, total_s=9.0, facts=100, rows=210, travel_s=[(0.1, 0.2), (0.3, 0.2)],
        travel_rows=(50, 100),
    )  # fmt: skip
    middle, end = replay.travel_rows(stored, [folded(4.0)])
    assert (middle.value, middle.ratio, middle.met) == (0.2, pytest.approx(20.0), True)
    assert (end.value, end.note) == (0.2, "100 rows")
    (written, _) = replay.store_rows(replay.Log("nats://x", 1, 100), stored)
    assert (written.ratio, written.met) == (0.75, True)


def test_two_states_of_one_log_end_the_benchmark() -> None:
    replay.same([folded(1.0), folded(2.0)])
    with pytest.raises(SystemExit, match="two states"):
        replay.same([folded(1.0), folded(2.0, "other")])
