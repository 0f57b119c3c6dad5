"""A store's answers: in pieces that can be asked for again, within limits, for one tenant."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from tensorbus.bus import MemoryBus, MemoryCluster
from tensorbus.clock import NS_PER_S, Deadline
from tensorbus.errors import ExpiredError, InvalidArgumentError, NotFoundError, OutOfSpaceError
from tensorbus.ids import SystemIds, WorkerId
from tensorbus.projections import GlobalStore
from tensorbus.workers import _answers
from tensorbus.workers._answers import CURSORS_MAX, Answers
from tests.unit.lifecycle import history as h
from tests.unit.projections.store_rig import SUBJECTS, fill, small_log


class Hand:
    """A clock that stands still."""

    ns = 0

    def now_ns(self) -> int:
        return self.ns

    def wall_ns(self) -> int:
        return self.ns


@pytest.fixture
def store(tmp_path: Path) -> Iterator[GlobalStore]:
    made = GlobalStore.open(tmp_path / "s.duckdb", subjects=SUBJECTS)
    yield fill(made, small_log())
    made.close()


class Projector:
    """What the answers need of the one that fills the store."""

    def __init__(self, store: GlobalStore) -> None:
        self.store = store
        self.asked: list[int] = []

    ready = True

    def require_ready(self) -> GlobalStore:
        return self.store

    @property
    def position(self) -> int:
        return self.store.position[0]

    async def reached(self, seq: int, *, deadline: Deadline) -> None:
        del deadline
        self.asked.append(seq)


@pytest.fixture
async def answers(store: GlobalStore) -> AsyncIterator[Answers]:
    core: Any = SimpleNamespace(
        bus=MemoryBus(MemoryCluster()), me=SimpleNamespace(worker=WorkerId("s1")), ids=SystemIds(), clock=Hand()
    )
    projector: Any = Projector(store)
    made = Answers(core, projector)
    async with made.running():
        yield made


async def ask(answers: Answers, **question: object) -> tuple[dict[str, Any], bytes]:
    line, _, body = (await answers.handle(json.dumps(question).encode())).partition(b"\n")
    return json.loads(line), body


async def whole(answers: Answers, **question: object) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    line, body = await ask(answers, **question)
    while not line["done"]:
        line, more = await ask(answers, op="next", cursor=line["cursor"], piece=line["piece"] + 1)
        body += more
    return line, pa.ipc.open_stream(body).read_all().to_pylist()


async def test_sql_comes_as_one_piece_with_where_it_holds(answers: Answers, store: GlobalStore) -> None:
    line, rows = await whole(answers, op="query", sql="SELECT count(*) AS n FROM facts WHERE seq > ?", params=[0])
    assert rows[0]["n"] > 5
    position = store.position[0]
    expected = {"store": "s1", "cursor": None, "piece": 0, "position": position, "first": 0, "rows": 1}
    assert line == {**expected, "truncated": False, "done": True}


async def test_a_long_answer_comes_in_pieces_and_each_can_be_asked_for_again(
    answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_answers, "PIECE_BYTES", 4096)
    sql = "SELECT seq, body FROM facts, (SELECT unnest([1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20]))"
    line, body = await ask(answers, op="query", sql=sql)
    pieces = 1
    while not line["done"]:
        following, more = await ask(answers, op="next", cursor=line["cursor"], piece=line["piece"] + 1)
        again = await ask(answers, op="next", cursor=line["cursor"], piece=line["piece"] + 1)
        assert again == (following, more)
        with pytest.raises(InvalidArgumentError, match="the next piece is"):
            await ask(answers, op="next", cursor=line["cursor"], piece=line["piece"] + 3)
        assert len(more) <= 4096
        line, body, pieces = {**following, "cursor": line["cursor"]}, body + more, pieces + 1
    assert pieces > 2
    assert pa.ipc.open_stream(body).read_all().num_rows == line["rows"] > 100


async def test_rows_beyond_the_limit_are_cut_and_that_is_said(answers: Answers) -> None:
    line, rows = await whole(answers, op="query", sql="SELECT seq FROM facts", limits={"rows": 3})
    assert (len(rows), line["truncated"]) == (3, True)
    line, rows = await whole(answers, op="state", tenant=h.T, limits={"rows": 2})
    assert (len(rows), line["truncated"]) == (2, True)


async def test_an_answer_of_no_rows_has_its_columns(answers: Answers) -> None:
    line, body = await ask(answers, op="query", sql="SELECT seq FROM facts WHERE seq < 0")
    assert line["done"]
    assert pa.ipc.open_stream(body).read_all().schema.names == ["seq"]


async def test_states_are_confined_to_a_tenant_and_to_what_is_nobodys(answers: Answers) -> None:
    _, mine = await whole(answers, op="state", tenant=h.T)
    _, others = await whole(answers, op="state", tenant="stranger")
    assert {row["kind"] for row in mine} >= {"artifact", "key", "replica", "session", "version"}
    assert {row["kind"] for row in others} == {"session"}
    assert json.loads(next(row["row"] for row in mine if row["kind"] == "key"))["key"] == "k"


async def test_a_difference_and_a_history(answers: Answers, store: GlobalStore) -> None:
    first = small_log().messages[1].seq
    _, rows = await whole(answers, op="diff", tenant=h.T, **{"from": {"seq": first}, "to": None})
    assert {row["change"] for row in rows} <= {"added", "removed", "changed"}
    assert any(row["kind"] == "artifact" for row in rows)
    _, facts = await whole(answers, op="history", tenant=h.T, kind="key", name="k")
    assert facts[0]["type"] == "KeyBound"
    _, why = await whole(answers, op="why", tenant=h.T, kind="key", name="k")
    assert all(row["reason"] for row in why)
    with pytest.raises(NotFoundError):
        await ask(answers, op="history", tenant="stranger", kind="key", name="k")


async def test_a_time_before_the_log_is_an_error_that_names_the_first_position(answers: Answers) -> None:
    with pytest.raises(NotFoundError) as caught:
        await ask(answers, op="state", at={"time_ns": 1})
    assert "first" in caught.value.details


async def test_tables_are_told(answers: Answers) -> None:
    _, rows = await whole(answers, op="tables")
    assert {"facts", "artifacts", "replicas"} <= {row["table"] for row in rows}


async def test_a_store_tells_how_it_is_without_sql(answers: Answers, store: GlobalStore) -> None:
    _, (row,) = await whole(answers, op="status", tenant="stranger")
    assert (row["position"], row["first"], row["files"]) == (store.position[0], 0, 0)
    assert row["newest_ns"] > 0


@pytest.mark.parametrize(
    "question",
    [b"", b"[]", b'{"op": "dance"}', b'{"op": "query"}', b'{"op": "query", "sql": "DROP TABLE facts"}', b'{"op": 7}'],
)
async def test_what_is_no_question_is_refused(answers: Answers, question: bytes) -> None:
    with pytest.raises(InvalidArgumentError):
        await answers.handle(question)


async def test_what_nobody_reads_on_is_closed(answers: Answers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_answers, "PIECE_BYTES", 64)
    line, _ = await ask(answers, op="query", sql="SELECT * FROM facts")
    answers._core.clock.ns = 31 * NS_PER_S  # type: ignore[attr-defined]
    answers.close_idle()
    with pytest.raises(ExpiredError):
        await ask(answers, op="next", cursor=line["cursor"], piece=1)
    assert await answers.handle(json.dumps({"op": "close", "cursor": line["cursor"]}).encode()) == b"{}\n"


async def test_there_are_only_so_many_answers_at_once(answers: Answers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_answers, "PIECE_BYTES", 64)
    lines = [(await ask(answers, op="tables"))[0] for _ in range(CURSORS_MAX)]
    with pytest.raises(OutOfSpaceError, match="being read"):
        await ask(answers, op="tables")
    await ask(answers, op="close", cursor=lines[0]["cursor"])
    await ask(answers, op="tables")


async def test_a_failed_question_holds_nothing(answers: Answers) -> None:
    for _ in range(CURSORS_MAX + 5):
        with pytest.raises(InvalidArgumentError):
            await ask(answers, op="query", sql="SELECT nothing FROM nowhere")
    await ask(answers, op="query", sql="SELECT 1")


async def test_an_answer_that_nobody_reads_does_not_keep_the_file_from_being_opened_anew(
    store: GlobalStore, answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_answers, "PIECE_BYTES", 64)
    for _ in range(3):
        await ask(answers, op="query", sql="SELECT * FROM facts, (SELECT unnest([1, 2, 3]))")
    store.close()
    again = GlobalStore.open(store.path, subjects=SUBJECTS)
    again.close()
