"""Answers as callers read them: whole or batch by batch, in every form, and what happens in between."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import tensorbus as tb
from tensorbus.errors import InvalidArgumentError, NotFoundError, UnavailableError
from tensorbus.sdk import AsyncBus
from tensorbus.sdk import _query as query_module
from tensorbus.transport import Reply, Request
from tensorbus.workers._query_ops import _parts
from tests.unit.sdk.fake_worker import FakeWorker, fake_bus, place_of, until
from tests.unit.workers.fake_store import FakeStore, rows

MANY = rows(n=list(range(300)), text=[f"row {n}" for n in range(300)])


def serve(fake: FakeWorker, store: FakeStore) -> None:
    """Have the fake worker relay to the fake store, cursors as they are."""
    numbers: dict[int, str] = {}

    async def relay(question: dict[str, Any]) -> Reply:
        line, body = _parts(await store.handle(json.dumps(question).encode()))
        if line["cursor"] is not None:
            number = int(str(line["cursor"])[1:])
            numbers[number] = str(line["cursor"])
            line["cursor"] = number
        return Reply(line, body=body)

    async def further(request: Request) -> Reply:
        return await relay({**request.args, "op": "next", "cursor": numbers[request.args["cursor"]]})  # type: ignore[index]

    async def close(request: Request) -> Reply:
        await relay({"op": "close", "cursor": numbers[request.args["cursor"]]})  # type: ignore[index]
        return Reply({})

    fake.answers |= {
        "query_open": lambda request: relay({**request.args, "op": request.args["what"]}),
        "query_next": further,
        "query_close": close,
    }


@asynccontextmanager
async def asking(home: Path) -> AsyncIterator[tuple[AsyncBus, FakeWorker, FakeStore]]:
    async with fake_bus(home) as (bus, fake):
        store = FakeStore()
        store.tables["query"] = MANY
        serve(fake, store)
        yield bus, fake, store


async def test_the_rows_in_every_form(home: Path) -> None:
    async with asking(home) as (bus, fake, store):
        result = await bus.query("select * from t where a = ?", 7, rows=1000, at_least={"TB": 3})
        assert (store.asked[0]["sql"], store.asked[0]["params"]) == ("select * from t where a = ?", [7])
        assert (store.asked[0]["rows"], store.asked[0]["at_least"]) == (1000, 3)
        assert (result.store, result.position, result.first, result.truncated) == ("s1", {"TB": 42}, 0, None)
        assert fake.count("query_next") == 0
        assert (await result.arrow()).equals(MANY)
        assert result.truncated is False
        assert (await result.dicts())[299] == {"n": 299, "text": "row 299"}
        assert list((await result.pandas()).columns) == ["n", "text"]
        assert result.schema == MANY.schema
        await until(lambda: not store.cursors)


async def test_batches_are_fetched_as_they_are_read(home: Path) -> None:
    async with asking(home) as (bus, fake, store):
        result = await bus.query("select 1")
        batches = result.batches()
        first = await anext(batches)
        few = fake.count("query_next")
        rest = [batch async for batch in batches]
        assert fake.count("query_next") > few
        assert pa.Table.from_batches([first, *rest]).equals(MANY)
        with pytest.raises(InvalidArgumentError, match="batch by batch"):
            await result.arrow()
        await until(lambda: not store.cursors)


async def test_what_is_not_read_is_closed(home: Path) -> None:
    async with asking(home) as (bus, fake, store):
        async with await bus.query("select 1"):
            pass
        dropped = await bus.query("select 1")
        del dropped
        async for _ in (await bus.query("select 1")).batches():
            break
        gc.collect()
        await until(lambda: fake.count("query_close") == 3 and not store.cursors)
        store.piece_bytes = 1 << 20
        async with await bus.query("select 1") as whole:
            assert whole.truncated is False
        assert fake.count("query_close") == 3


async def test_a_fetch_that_ran_out_of_time_goes_on_where_it_stopped(home: Path) -> None:
    async with asking(home) as (bus, fake, _store):
        result = await bus.query("select 1", timeout=0.3)
        serve_next, stuck = fake.answers["query_next"], True

        async def slow(request: Request) -> Reply:
            if stuck and request.args["piece"] == 3:
                await asyncio.Event().wait()
            return await serve_next(request)  # type: ignore[misc]  # one that is awaited

        fake.answers["query_next"] = slow
        with pytest.raises(tb.DeadlineExceededError):
            await result.arrow()
        stuck = False
        assert (await result.arrow()).equals(MANY)


async def test_an_answer_goes_with_its_connection(home: Path) -> None:
    async with asking(home) as (bus, fake, _store):
        result = await bus.query("select 1")
        fake.hang_up()
        with pytest.raises(UnavailableError):
            await result.arrow()


async def test_rows_that_were_cut_are_told(home: Path) -> None:
    async with asking(home) as (bus, _fake, store):
        store.truncated = True
        result = await bus.query("select 1", rows=300)
        await result.arrow()
        assert result.truncated is True


async def test_no_rows_have_columns(home: Path) -> None:
    async with asking(home) as (bus, _fake, store):
        store.tables["query"] = MANY.slice(0, 0)
        result = await bus.query("select 1")
        assert (await result.dicts(), (await result.arrow()).schema) == ([], MANY.schema)


@pytest.mark.parametrize("bad", [{"rows": -1}, {"rows": True}, {"at_least": "x"}, {"timeout": -1}])
async def test_what_cannot_be_asked_is_refused_here(home: Path, bad: dict[str, Any]) -> None:
    async with asking(home) as (bus, fake, _store):
        with pytest.raises(InvalidArgumentError):
            await bus.query("select 1", **bad)
        for sql in ("", "  ", 5, None):
            with pytest.raises(InvalidArgumentError):
                await bus.query(sql)  # type: ignore[arg-type]  # that is the test
        with pytest.raises(InvalidArgumentError):
            await bus.query("select ?", object())
        assert not fake.asked


async def test_without_pyarrow_nobody_is_asked(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with asking(home) as (bus, fake, _store):
        monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
        with pytest.raises(InvalidArgumentError, match=r"tensorbus\[store\]"):
            await bus.query("select 1")
        assert not fake.asked


async def test_pandas_is_named_when_it_is_missing(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Table:
        def to_pandas(self) -> None:
            raise ImportError

    with pytest.raises(InvalidArgumentError, match="pip install pandas"):
        query_module.to_pandas(Table())


async def test_state_and_diff(home: Path) -> None:
    async with asking(home) as (bus, _fake, store):
        store.tables["state"] = rows(kind=["key", "session"], row=['{"key": "k"}', '{"worker": "w1"}'])
        state = await bus.state(at="2026-01-01T00:00:00Z")
        assert store.last["at"] == {"time_ns": 1_767_225_600_000_000_000}
        assert (state.position, state.keys, state.sessions) == ({"TB": 42}, ({"key": "k"},), ({"worker": "w1"},))
        store.tables["diff"] = rows(change=["added"], kind=["key"], before=[None], after=['{"key": "k"}'])
        changes = await bus.diff(5, {"TB": 9})
        assert (store.last["from"], store.last["to"]) == ({"seq": 5}, {"seq": 9})
        assert changes == [tb.StateChange(change="added", kind="key", before=None, after={"key": "k"})]
        store.truncated = True
        for asking_for in (bus.state(), bus.diff(5)):
            with pytest.raises(tb.OutOfSpaceError, match="in SQL"):
                await asking_for
        store.truncated = False
        await bus.diff(5)
        assert store.last["to"] is None
        with pytest.raises(InvalidArgumentError):
            await bus.diff(None)  # type: ignore[arg-type]  # that is the test


def facts_of(name: str) -> Any:
    """Facts about one thing only."""

    def found(asked: dict[str, Any]) -> pa.Table:
        if (asked["kind"], asked["name"]) != tuple(name.split(":", 1)):
            raise NotFoundError("no fact is about it")
        return rows(seq=[1], time_ns=[2], type=["KeyBound"], kept=[True], body=["{}"], reason=["about it"])

    return found


async def test_history_finds_what_the_name_means(home: Path) -> None:
    async with asking(home) as (bus, _fake, store):
        store.tables["history"] = facts_of("series:policy")
        assert [fact.type for fact in await bus.history("policy")] == ["KeyBound"]
        assert [asked["kind"] for asked in store.asked if asked["op"] == "history"] == ["key", "artifact", "series"]
        store.tables["why"] = facts_of("artifact:tb1:x")
        assert (await bus.why("tb1:x", limit=5))[0].reason == "about it"
        assert (store.last["kind"], store.last["limit"]) == ("artifact", 5)
        with pytest.raises(NotFoundError, match="a key, an artifact, a series or a worker 'other'"):
            await bus.history("other")
        with pytest.raises(NotFoundError, match="a worker 'policy'"):
            await bus.history("policy", kind="worker")
        for bad in ({"ref": "tbv:x"}, {"ref": ""}, {"ref": "k", "kind": "tensor"}, {"ref": "k", "limit": 0}):
            with pytest.raises(InvalidArgumentError):
                await bus.history(**bad)  # type: ignore[arg-type]  # that is the test


async def test_why_of_what_is_gone_says_since_when(home: Path) -> None:
    async with asking(home) as (bus, _fake, store):

        def gone(asked: dict[str, Any]) -> pa.Table:
            if asked["kind"] == "key":
                raise NotFoundError("there is no key 'k' since 7; its `history` has the facts about it", since=7)
            raise NotFoundError("no fact is about it")

        store.tables["why"] = gone
        with pytest.raises(NotFoundError, match="since 7; its `history`"):
            await bus.why("k")


async def test_the_blocking_mirror(home: Path) -> None:
    async with asking(home) as (_bus, _fake, store):
        store.tables["state"] = rows(kind=["key"], row=['{"key": "k"}'])
        store.tables["diff"] = rows(change=["added"], kind=["key"], before=[None], after=['{"key": "k"}'])
        store.tables["history"] = store.tables["why"] = facts_of("key:k")
        store.tables["tables"] = rows(table=["facts"], column=["seq"], type=["UBIGINT"], text=["Sequence."])

        def work() -> None:
            with tb.Bus(place_of(home)) as bus:
                with bus.query("select 1", rows=None) as result:
                    assert (result.truncated, result.store, result.position) == (None, "s1", {"TB": 42})
                    assert result.arrow().equals(MANY)
                    assert len(result.dicts()) == len(result.pandas()) == 300
                assert pa.Table.from_batches(list(bus.query("select 1").batches())).equals(MANY)
                assert bus.state().keys == ({"key": "k"},)
                assert len(bus.diff(1)) == len(bus.history("k")) == len(bus.why("k")) == 1
                assert bus.store_tables()[0]["table"] == "facts"

        await asyncio.to_thread(work)
