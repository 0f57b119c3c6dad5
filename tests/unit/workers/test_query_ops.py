"""Questions that a worker relays: to whom, with what, in how many pieces, and who may ask."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest

from tensorbus.bus import MemoryBus, MemoryCluster
from tensorbus.errors import (
    CorruptError,
    DeadlineExceededError,
    DeniedError,
    ExpiredError,
    InvalidArgumentError,
    NotFoundError,
    OutOfSpaceError,
    UnavailableError,
)
from tensorbus.feeds import Author
from tensorbus.ids import SystemIds, WorkerId, new_incarnation
from tensorbus.transport import Reply, Request
from tensorbus.transport._channel import PeerInfo
from tensorbus.workers._callers import Caller
from tensorbus.workers._query_ops import CURSORS_MAX, QueryOps, _parts
from tests.unit.workers.fake_store import FakeStore, rows
from tests.unit.workers.rig import FakeSession, Rig, opening, rig, soon, until

LOCAL, REMOTE = PeerInfo("unix", pid=1, uid=1), PeerInfo("127.0.0.1:1")
MANY = rows(n=list(range(300)))


@dataclass(eq=False)
class Session(FakeSession):
    info: PeerInfo = LOCAL


def a_caller(info: PeerInfo = LOCAL) -> Caller:
    return Caller(Session(info=info), tenant="acme", pid=1)  # type: ignore[arg-type]  # as far as these tests look


@dataclass
class Setup:
    worker: Rig
    store: FakeStore
    ops: QueryOps
    caller: Caller

    async def ask(self, op: str, timeout: float | None = 10.0, **args: object) -> Reply:
        request = Request(op=op, args=args, deadline=soon() if timeout is None else soon(timeout))
        reply = await self.ops.table()[op](self.caller, request)
        assert isinstance(reply, Reply)
        return reply

    async def open(self, **args: object) -> Reply:
        return await self.ask("query_open", **{"what": "query", "sql": "select 1", **args})


@asynccontextmanager
async def setup(*, gateway_sql: bool = False) -> AsyncIterator[Setup]:
    """A worker, and a store beside it whose session is open."""
    cluster = MemoryCluster()
    async with rig(cluster) as worker:
        ids, store, bus = SystemIds(), FakeStore(), MemoryBus(cluster)
        store.tables = {"query": MANY, "state": MANY, "history": MANY, "tables": MANY, "diff": MANY}
        author = Author(worker.core.feed, worker=WorkerId("s1"), incarnation=new_incarnation(ids), ids=ids)
        session = replace(opening("s1", author.incarnation), roles=("store",))
        async with author.running():
            await author.decide(lambda _state: session, deadline=soon())
            rpc = bus.subjects.rpc
            async with (
                bus.answer(rpc("query"), store.handle, queue="stores"),
                bus.answer(rpc("store.s1"), store.handle, queue="s1"),
            ):
                ops = QueryOps(worker.core, gateway_sql=gateway_sql)
                yield Setup(worker, store, ops, a_caller())


async def test_an_answer_is_passed_on_piece_by_piece() -> None:
    async with setup() as at:
        reply = await at.open(params=[1], rows=5, at_least=3)
        assert (reply.data["store"], reply.data["position"], reply.data["done"]) == ("s1", 42, False)
        question = at.store.asked[0]
        assert question["limits"]["rows"] == 5
        assert 0 < question["limits"]["seconds"] <= 10
        assert (question["tenant"], question["params"], question["at_least"]) == ("acme", [1], 3)
        body, piece = bytes(reply.body), 0
        while not reply.data["done"]:
            piece += 1
            reply = await at.ask("query_next", cursor=reply.data["cursor"], piece=piece)
            body += bytes(reply.body)
        assert body == b"".join(next(iter(at.store.cursors.values())))


async def test_a_piece_can_be_asked_for_again_also_the_last() -> None:
    async with setup() as at:
        cursor, last = (await at.open()).data["cursor"], 0
        while not (await at.ask("query_next", cursor=cursor, piece=last + 1)).data["done"]:
            last += 1
        for piece in (last + 1, last + 1):
            assert (await at.ask("query_next", cursor=cursor, piece=piece)).data["done"]


async def test_what_is_closed_is_closed_at_the_store_and_nobody_has_it() -> None:
    async with setup() as at:
        cursor = (await at.open()).data["cursor"]
        await at.ask("query_close", cursor=cursor)
        await until(lambda: not at.store.cursors)
        with pytest.raises(ExpiredError):
            await at.ask("query_next", cursor=cursor, piece=1)
        await at.ask("query_close", cursor=cursor)


async def test_a_caller_who_goes_takes_its_cursors_along() -> None:
    async with setup() as at:
        for _ in range(3):
            await at.open()
        assert len(at.store.cursors) == 3
        at.ops.gone(at.caller)
        await until(lambda: not at.store.cursors)
        assert not at.caller.queries


async def test_an_answer_that_nobody_took_is_closed() -> None:
    async with setup() as at:
        reply = await at.open()
        assert reply.undo is not None
        reply.undo()
        await until(lambda: not at.store.cursors)


async def test_a_connection_has_a_bounded_number_of_answers() -> None:
    async with setup() as at:
        await asyncio.gather(*(at.open() for _ in range(CURSORS_MAX)))
        with pytest.raises(OutOfSpaceError, match="close one"):
            await at.open()
        late = asyncio.create_task(at.open())
        await asyncio.sleep(0.05)
        assert not late.done()
        await at.ask("query_close", cursor=1)
        assert (await late).data["done"] is False


async def test_answers_in_one_piece_and_failed_ones_take_no_place() -> None:
    async with setup() as at:
        at.store.piece_bytes = 1 << 20
        for _ in range(CURSORS_MAX + 1):
            reply = await at.open()
            assert (reply.data["cursor"], reply.data["done"]) == (None, True)

        def fail(_asked: dict[str, Any]) -> Any:
            raise NotFoundError("the history begins at 7", first=7)

        at.store.tables["state"] = fail
        for _ in range(CURSORS_MAX + 1):
            with pytest.raises(NotFoundError) as failed:
                await at.open(what="state", at={"seq": 3})
        assert failed.value.details["first"] == 7
        assert not at.caller.queries


@pytest.mark.parametrize("gateway_sql", [False, True])
async def test_sql_over_tcp_needs_the_setting_and_the_rest_does_not(gateway_sql: bool) -> None:
    async with setup(gateway_sql=gateway_sql) as at:
        at.caller = a_caller(REMOTE)
        if gateway_sql:
            await at.open()
        else:
            with pytest.raises(DeniedError, match="gateway_sql"):
                await at.open()
        for what, args in (("state", {}), ("history", {"kind": "key", "name": "k"}), ("diff", {}), ("tables", {})):
            await at.open(what=what, **args)
            assert at.store.asked[-1]["tenant"] == "acme"
            assert "sql" not in at.store.asked[-1]


async def test_moments_go_as_they_are() -> None:
    async with setup() as at:
        await at.open(what="diff", **{"from": {"seq": 1}, "to": {"time_ns": 5}})
        assert (at.store.asked[-1]["from"], at.store.asked[-1]["to"]) == ({"seq": 1}, {"time_ns": 5})
        await at.open(what="state")
        assert at.store.asked[-1]["at"] is None


@pytest.mark.parametrize(
    "args",
    [
        {"what": "drop"},
        {"sql": None},
        {"what": "history", "kind": "key"},
        {"what": "history", "name": "k"},
        {"what": "history", "kind": "tensor", "name": "k"},
        {"what": "state", "at": {}},
        {"what": "state", "at": {"seq": 1, "time_ns": 1}},
        {"rows": -1},
        {"store": "a.b"},
        {"at_least": "soon"},
    ],
)
async def test_what_cannot_be_asked_is_refused_here(args: dict[str, object]) -> None:
    async with setup() as at:
        with pytest.raises(InvalidArgumentError):
            await at.open(**args)
        assert not at.store.asked


async def test_a_store_can_be_named() -> None:
    async with setup() as at:
        assert (await at.open(store="s1")).data["store"] == "s1"
        with pytest.raises(UnavailableError, match="store s9 does not run"):
            await at.open(store="s9")


async def test_without_a_store_it_is_said_how_to_start_one() -> None:
    async with rig(MemoryCluster()) as worker:
        at = Setup(worker, FakeStore(), QueryOps(worker.core, gateway_sql=False), a_caller())
        with pytest.raises(UnavailableError, match="--roles store"):
            await at.open()


async def test_the_time_is_the_callers() -> None:
    async with setup() as at:

        async def silent(_data: bytes) -> bytes:
            return await asyncio.Event().wait()  # type: ignore[return-value]  # never

        async with MemoryBus(at.worker.bus.cluster).answer(at.worker.bus.subjects.rpc("store.s2"), silent, queue="s2"):
            with pytest.raises((DeadlineExceededError, TimeoutError)):
                await at.ask("query_open", timeout=0.2, what="query", sql="select 1", store="s2")


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"no line",
        b"[]\n",
        b"{}\n",
        b'{"store": "s", "done": false}\n',
        b'{"store": "s", "done": false, "cursor": null}\n',
    ],
)
def test_what_is_no_answer_is_corrupt(answer: bytes) -> None:
    with pytest.raises(CorruptError):
        _parts(answer)
