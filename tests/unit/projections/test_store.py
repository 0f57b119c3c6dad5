"""The global store: its rows are the Directory's at every position, batches can be cut and repeated."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import duckdb
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorbus.errors import ConflictError, CorruptError, InvalidArgumentError, OutOfSpaceError, UnavailableError
from tensorbus.events import EVENT_TYPES, Event, FoldRaised, Subjects, UnknownEvent, encode
from tensorbus.lifecycle import Directory, Verdict
from tensorbus.projections import GlobalStore, RowTracker, _store, describe
from tensorbus.projections._store_facts import fact_row
from tests.unit.lifecycle import history as h
from tests.unit.projections.store_rig import (
    SUBJECTS,
    Feed,
    expected,
    fill,
    found,
    histories,
    present,
    small_log,
    states,
)

REPOSITORY = Path(__file__).parents[3]


@contextmanager
def opened(path: Path | None = None) -> Iterator[GlobalStore]:
    with tempfile.TemporaryDirectory() as folder:
        store = GlobalStore.open(path or Path(folder) / "s.duckdb", subjects=SUBJECTS, memory_bytes=128_000_000)
        try:
            yield store
        finally:
            store.close()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[GlobalStore]:
    with opened(tmp_path / "s.duckdb") as store:
        yield store


# -- what holds for every history ------------------------------------------------------------------------------------


@given(histories)
def test_present_rows_are_the_directorys(log: h.Log) -> None:
    with opened() as store:
        fill(store, log)
        assert present(store) == expected(log.state)
        assert store.position == (log.messages[-1].seq, log.messages[-1].headers.event_id)


@settings(max_examples=20)
@given(histories)
def test_rows_at_every_sequence_are_those_of_a_fold_up_to_there(log: h.Log) -> None:
    with opened() as store:
        fill(store, log)
        for state in states(log.messages):
            with store.reading() as cursor:
                tables = {
                    name: cursor.sql(f"SELECT * FROM {name}_at({state.seq})").to_arrow_table().to_pylist()
                    for name in expected(state)
                }
            assert found(tables.items()) == expected(state)


@settings(max_examples=20)
@given(histories, st.lists(st.integers(0, 60), max_size=6), st.lists(st.tuples(st.integers(0, 60), st.integers(0, 9))))
def test_any_cutting_and_repeating_gives_the_same_rows(
    log: h.Log, cuts: list[int], repeats: list[tuple[int, int]]
) -> None:
    with opened() as one, opened() as other:
        fill(one, log)
        items = Feed().take(log.messages)
        batches = list(h.batches(items, cuts))  # type: ignore[type-var]  # it only slices
        for batch in batches:
            other.apply(batch)
            for start, length in repeats:
                other.apply(items[start : start + length] if start + length <= batches.index(batch) else batch)
        assert one.hash() == other.hash()


@settings(max_examples=20)
@given(histories, st.integers(0, 60))
def test_a_store_that_begins_with_a_state_goes_on_as_one_that_read_all(log: h.Log, cut: int) -> None:
    before, after = log.messages[:cut], log.messages[cut:]
    if not before:
        return
    feed = Feed(h.fold(before))
    with opened() as store:
        store.begin(feed.state, before[-1].headers.event_id)
        assert (present(store), store.first) == (expected(feed.state), feed.state.seq)
        store.apply(feed.take(after))
        assert present(store) == expected(log.state)


@settings(max_examples=20)
@given(histories, st.integers(0, 60))
def test_a_restarted_store_goes_on_from_a_directory_behind_or_at_its_position(log: h.Log, cut: int) -> None:
    with opened() as whole, opened() as store:
        fill(whole, log)
        fill(store, h.Log(messages=log.messages[: 2 * cut]))
        feed = Feed(h.fold(log.messages[:cut]))
        store.apply(feed.take(log.messages[cut:]))
        assert store.hash() == whole.hash()


# -- facts -----------------------------------------------------------------------------------------------------------


def test_every_message_is_a_row_of_facts_with_what_became_of_it(store: GlobalStore) -> None:
    log = small_log()
    log.append(h.put(h.X, h.D2))
    log.append(UnknownEvent("FromTheFuture"))
    log.append(h.put(h.Y), subject="other.prefix")
    fill(store, log)
    rows = store.rows("facts")
    assert [row["seq"] for row in rows] == [message.seq for message in log.messages]
    assert [row["why"] for row in rows[-4:]] == [None, "conflict", "unknown", "subject"]
    assert [row["kept"] for row in rows[-4:]] == [True, False, False, False]
    bound: dict[str, Any] = next(row for row in rows if row["type"] == "KeyBound")
    assert (bound["kind"], bound["tenant"], bound["artifact"], bound["name"]) == ("key", "acme", "x", "k")
    assert bound["body"] == '{"type":"KeyBound","tenant":"acme","key":"k","artifact":"x","rebind":false}'
    assert (bound["author"], bound["principal"], bound["token"], bound["expected"]) == ("w1", "me", None, 0)
    assert (rows[-2]["type"], rows[-2]["body"], rows[-1]["kind"]) == ("FromTheFuture", None, None)


@given(st.one_of(*(st.from_type(cls) for cls in EVENT_TYPES)))
def test_a_fact_is_written_as_the_codec_writes_it(event: Event) -> None:
    message: Any = small_log().messages[0]
    row = fact_row(message._replace(event=event), Verdict(True), SUBJECTS)
    assert row[-1] == encode(event)


def test_a_body_at_hand_is_taken_as_it_is(store: GlobalStore) -> None:
    feed, message = Feed(), small_log().messages[0]
    bodies = [b'{ "as": "it was" }', b"no \xff text"]
    for seq, body in enumerate(bodies, 1):
        moved: Any = message._replace(seq=seq)
        store.apply([feed.tracker.applied(moved, feed.state.apply(moved), body=body)])
    assert [row["body"] for row in store.rows("facts")] == ['{ "as": "it was" }', "no \ufffd text"]


def test_trace_cause_and_odd_values_are_kept(store: GlobalStore) -> None:
    log = h.Log()
    log.open()
    log.append(replace(h.put(), nbytes=2**70, tensors=-1))
    message: Any = log.messages[-1]
    trace = "00-" + "ab" * 16 + "-" + "cd" * 8 + "-01"
    headers = replace(message.headers, traceparent=trace, cause="c1", principal="a\0\ud800")
    store.apply(Feed().take([log.messages[0], message._replace(headers=headers)]))
    row = store.rows("facts")[-1]
    assert (row["trace_id"], row["cause"], row["principal"]) == ("ab" * 16, "c1", "a\0?")
    assert f'"nbytes":{2**70}' in str(row["body"])
    artifact = store.rows("artifacts")[0]
    assert (artifact["nbytes"], artifact["tensors"]) == (None, None), "the column cannot hold what the fact says"


def test_the_log_about_itself_has_its_views(store: GlobalStore) -> None:
    log = h.Log()
    log.open()
    for event in (h.RoleGranted(role="store"), h.archived(1, 9), h.snapshot(2), h.purge(2, 1), h.truncated(3, 9)):
        log.append(event)
    fill(store, log)
    assert [row["token"] for row in store.rows("roles")] == [2]
    counts = {name: len(store.rows(name)) for name in ("archives", "purges", "truncations")}
    assert counts == dict.fromkeys(counts, 1)
    assert (store.rows("archives")[0]["first"], store.rows("truncations")[0]["lost_seq"]) == (1, 3)


def test_describe_names_every_column_that_there_is(store: GlobalStore) -> None:
    with store.reading() as cursor:
        for table in dict.fromkeys(row[0] for row in describe()):
            columns = [(row[0], row[1]) for row in cursor.execute(f"DESCRIBE {table}").fetchall()]
            assert columns == [(column, kind) for name, column, kind, _ in describe() if name == table]


# -- what goes wrong -------------------------------------------------------------------------------------------------


def test_a_hole_before_the_batch_is_refused(store: GlobalStore) -> None:
    items = Feed().take(small_log().messages)
    store.apply(items[:3])
    with pytest.raises(ConflictError, match="store rebuild"):
        store.apply(items[4:])
    assert store.position[0] == items[2].recorded.seq


def test_a_raised_fold_stops_the_store(store: GlobalStore) -> None:
    log = small_log()
    log.append(FoldRaised(stream="TB", version=99))
    fill(store, log)
    log.append(h.bound("new"))
    with pytest.raises(UnavailableError, match="newer tensorbus"):
        store.apply(Feed().take(log.messages))


def test_a_failed_write_changes_nothing_and_can_be_repeated(
    store: GlobalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    items = Feed().take(small_log().messages)
    store.apply(items[:4])
    before = store.hash(), store.position
    write = _store.Batch.write

    def failing(batch: _store.Batch, conn: duckdb.DuckDBPyConnection) -> None:
        write(batch, conn)
        raise duckdb.IOException('IO Error: Could not write file "x": No space left on device')

    with monkeypatch.context() as patch:
        patch.setattr(_store.Batch, "write", failing)
        with pytest.raises(OutOfSpaceError):
            store.apply(items)
    assert (store.hash(), store.position) == before
    store.apply(items)
    assert present(store) == expected(small_log().state)


def test_rows_that_disagree_with_the_directory_are_an_error(store: GlobalStore) -> None:
    log = small_log()
    items = Feed().take(log.messages)
    store.apply([item._replace(changes=()) for item in items[:8]])
    with pytest.raises(CorruptError, match="store rebuild"):
        store.apply(items)


def test_a_store_of_another_log_or_version_is_refused(store: GlobalStore) -> None:
    store.close()
    with pytest.raises(ConflictError, match=r"'tb'.*store rebuild"):
        GlobalStore.open(store.path, subjects=Subjects("other"))
    conn = duckdb.connect(str(store.path))
    conn.execute("UPDATE meta SET schema_version = 999")
    conn.close()
    with pytest.raises(ConflictError, match=r"999.*store rebuild"):
        GlobalStore.open(store.path, subjects=SUBJECTS)


def test_a_store_that_passed_over_facts_that_are_known_now_is_refused(store: GlobalStore) -> None:
    log = small_log()
    log.append(UnknownEvent("KeyBound"))
    fill(store, log)
    store.close()
    with pytest.raises(ConflictError, match="passed over"):
        GlobalStore.open(store.path, subjects=SUBJECTS)


def test_a_damaged_file_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "s.duckdb"
    path.write_bytes(b"no database" * 1000)
    with pytest.raises(CorruptError, match="store rebuild"):
        GlobalStore.open(path, subjects=SUBJECTS)


def test_a_file_that_another_process_has_open_names_it(tmp_path: Path) -> None:
    path = tmp_path / "s.duckdb"
    code = f"import duckdb, sys; c = duckdb.connect({str(path)!r}); print('open', flush=True); sys.stdin.read()"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "open\n"
        with pytest.raises(ConflictError, match=f"PID {child.pid}"):
            GlobalStore.open(path, subjects=SUBJECTS)
    finally:
        child.communicate("")


def test_a_full_disk_is_out_of_space_and_the_batch_can_be_applied_later(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "tests.unit.projections.full_disk", str(tmp_path / "s.duckdb")],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (run.returncode, run.stdout.split()) == (0, ["full", "kept", "applied"]), run.stderr


def test_killed_at_any_moment_rows_and_position_agree(tmp_path: Path) -> None:
    path, random = tmp_path / "s.duckdb", Random(7)
    child_command = [sys.executable, "-m", "tests.unit.projections.applying", str(path)]
    for _ in range(20):
        child = subprocess.Popen(child_command, cwd=REPOSITORY, stdout=subprocess.PIPE)
        try:
            assert child.stdout is not None
            for _ in range(random.randrange(1, 8)):
                if not child.stdout.readline():
                    break
            if random.random() < 0.5:
                os.kill(child.pid, signal.SIGKILL)
        finally:
            child.kill()
            child.wait()
            child.stdout.close()
        _agree(path)


def _agree(path: Path) -> None:
    from tests.unit.projections.applying import messages

    store = GlobalStore.open(path, subjects=SUBJECTS)
    try:
        position, event_id = store.position
        log = messages()
        done = [message for message in log if message.seq <= position]
        assert [row["seq"] for row in store.rows("facts")] == [message.seq for message in done]
        assert event_id == (done[-1].headers.event_id if done else "")
        assert present(store) == expected(h.fold(done))
    finally:
        store.close()


# -- rebuilding ------------------------------------------------------------------------------------------------------


def test_a_fresh_store_takes_the_old_ones_place(store: GlobalStore) -> None:
    log = small_log()
    fill(store, log)
    wanted = store.hash()
    leftover = GlobalStore.create_fresh(store.path, subjects=SUBJECTS)
    leftover.close()
    fresh = fill(GlobalStore.create_fresh(store.path, subjects=SUBJECTS), log, cuts=[5])
    assert store.rows("facts") == fresh.rows("facts"), "both answer meanwhile"
    store.close()
    adopted = fresh.adopt()
    try:
        assert (adopted.path, adopted.hash()) == (store.path, wanted)
        assert sorted(file.name for file in store.path.parent.iterdir()) == [store.path.name]
        with pytest.raises(InvalidArgumentError):
            adopted.adopt()
    finally:
        adopted.close()


def test_a_closed_store_says_so(store: GlobalStore) -> None:
    store.close()
    store.close()
    with pytest.raises(UnavailableError, match="closed"):
        store.query("SELECT 1")
    with pytest.raises(UnavailableError, match="closed"):
        store.rows("facts")


def test_begin_is_for_an_empty_store(store: GlobalStore) -> None:
    log = small_log()
    fill(store, log)
    with pytest.raises(InvalidArgumentError):
        store.begin(log.state, log.messages[-1].headers.event_id)


def test_a_tracker_goes_on_after_its_directory_was_replaced(store: GlobalStore) -> None:
    log = small_log()
    state = Directory()
    tracker = RowTracker(state)
    state.become(h.fold(log.messages[:5]))
    tracker.restart()
    rest = [tracker.applied(message, state.apply(message)) for message in log.messages[5:]]
    store.apply(Feed().take(log.messages[:5]))
    store.apply(rest)
    assert present(store) == expected(log.state)


def test_the_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "import sys; sys.modules['duckdb'] = None\n"
        "import tensorbus.projections as p\n"
        "try: p.GlobalStore\n"
        "except ValueError as exc: print(exc)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=REPOSITORY)
    assert "pip install 'tensorbus[store]'" in run.stdout
