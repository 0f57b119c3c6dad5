"""SQL, states, differences and histories from a real store, by way of a worker and of a gateway."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

import tensorbus as tb
from tests.integration.sdk.conftest import HOST
from tests.servers import Server

pytestmark = pytest.mark.integration

BYTES = np.arange(8, dtype=np.uint8)


@pytest.fixture(scope="module")
def place(nats_server: Server) -> Iterator[Path]:
    """A home with a worker ``w1``, a gateway ``g1`` and a store ``s1``; a worker of each kind in its own process."""
    home = Path(tempfile.mkdtemp(prefix="tb-"))
    with nats_server.processes(home / "test-logs") as owner:
        owner.worker("basic", id="w1", host_id=HOST, home=home)
        owner.worker("gateway", id="g1", host_id=HOST, home=home)
        owner.worker("store", id="s1", host_id=HOST, home=home)
        yield home
    shutil.rmtree(home, ignore_errors=True)


@pytest.fixture
def gateway(place: Path, tenant: str) -> Iterator[tb.Bus]:
    """A bus that speaks to the gateway by TCP."""
    with tb.connect(home=place, host_id=HOST) as near:
        control = next(worker.control for worker in near.list_workers() if worker.worker == "g1")
    with tb.connect(f"tb+tcp://{control}", host_id="elsewhere", tenant=tenant) as found:
        yield found


def test_rows_in_every_form(bus: tb.Bus, tenant: str) -> None:
    art = bus.put({"w": BYTES}, key="a/b")
    sql = "SELECT key, artifact FROM keys WHERE tenant = ? AND live"
    with bus.query(sql, tenant, at_least=art.position) as result:
        assert result.dicts() == [{"key": "a/b", "artifact": art.id}]
        assert list(result.pandas()["key"]) == ["a/b"]
        assert (result.store, result.truncated, result.first) == ("s1", False, 0)
        assert result.position["TB"] >= art.position["TB"]


def test_what_is_large_comes_in_pieces(bus: tb.Bus) -> None:
    sql = "SELECT i, repeat_text FROM (SELECT i, md5(i::VARCHAR) AS repeat_text FROM range(60000) t(i)) ORDER BY i"
    with bus.query(sql, rows=50_000) as result:
        assert result.truncated is None
        numbers = [number for batch in result.batches() for number in batch.column("i").to_pylist()]
    assert numbers == list(range(50_000))
    assert result.truncated is True
    with bus.query(sql, rows=None) as result:
        assert result.arrow().num_rows == 60_000
        assert result.truncated is False


def test_what_cannot_be_asked_is_told(bus: tb.Bus) -> None:
    for sql in ("DROP TABLE facts", "SELECT * FROM nothing", "SELECT 1; SELECT 2", "COPY facts TO 'x'"):
        with pytest.raises(tb.InvalidArgumentError):
            bus.query(sql)
    with pytest.raises(tb.InvalidArgumentError, match="beyond the log"):
        bus.query("SELECT 1", at_least=2**60)
    with pytest.raises(tb.UnavailableError, match="store s9"):
        bus.query("SELECT 1", store="s9")
    with pytest.raises(tb.DeadlineExceededError):
        bus.query("SELECT count(*) FROM range(10000000000) a, range(1000) b", timeout=0.5).arrow()


def test_answers_are_let_go(bus: tb.Bus) -> None:
    for _ in range(100):  # more than the connection and the store keep at a time
        with bus.query("SELECT i, md5(i::VARCHAR) AS t FROM range(40000) x(i)"):
            pass


def test_the_past_as_it_was(bus: tb.Bus) -> None:
    first = bus.put({"w": BYTES}, key="k")
    second = bus.put({"w": BYTES + 1}, key="k", rebind=True)
    gone = bus.unbind("k")
    state = bus.state(first.position, at_least=gone)
    assert [(row["key"], row["artifact"]) for row in state.keys] == [("k", first.id)]
    assert {row["artifact"] for row in state.artifacts} == {first.id}
    assert [row["worker"] for row in state.replicas] == ["w1"]
    assert {row["worker"] for row in state.sessions} == {"w1", "g1", "s1"}
    assert state.position == first.position
    assert [row["live"] for row in bus.state().keys] == [False]
    assert bus.state(datetime(2200, 1, 1, tzinfo=UTC)).keys == bus.state().keys
    assert bus.state(0).artifacts == ()
    changes = [(change.change, change.kind) for change in bus.diff(first.position, second.position)]
    assert sorted(changes) == [("added", "artifact"), ("added", "replica"), ("changed", "key")]
    assert [change.kind for change in bus.diff(second.position, gone)] == ["key"]
    assert bus.diff(gone, gone) == []


def test_histories_and_reasons(bus: tb.Bus) -> None:
    art = bus.put({"w": BYTES}, key="k")
    published = bus.publish("policy", art)
    led_there = {fact.type for fact in bus.why("k", at_least=published.position)}
    assert {"ArtifactPut", "KeyBound"} <= led_there
    end = art.destroy()
    about = bus.history(art, at_least=end)
    assert about == bus.history(art.id)
    assert about[0].type == "ArtifactPut"
    assert about[-1].type in ("ArtifactDestroyed", "ReplicaDropped")
    assert [fact.seq for fact in about] == sorted(fact.seq for fact in about)
    assert bus.history("k")[0].type == "KeyBound"
    assert [fact.type for fact in bus.history("policy")] == ["VersionPublished"]
    assert bus.history("w1", kind="worker", limit=500)[0].type == "SessionOpened"
    reasons = bus.why("k")
    assert all(fact.reason for fact in reasons)
    assert {"KeyBound", "ArtifactDestroyed"} <= {fact.type for fact in reasons}, "it is bound to nothing now"
    with pytest.raises(tb.NotFoundError, match="no fact is about"):
        bus.history("nobody knows it")


def test_tenants_do_not_see_each_other(bus: tb.Bus, place: Path) -> None:
    art = bus.put({"w": BYTES}, key="secret")
    with tb.connect(home=place, host_id=HOST, tenant="stranger") as other:
        assert other.state(at_least=art.position).keys == ()
        assert not any(change.kind == "key" for change in other.diff(0))
        with pytest.raises(tb.NotFoundError):
            other.history("secret")
        with pytest.raises(tb.NotFoundError):
            other.why(art.id)


def test_a_gateway_takes_the_questions_of_a_tenant_and_no_sql(gateway: tb.Bus, bus: tb.Bus) -> None:
    art = bus.put({"w": BYTES}, key="k")
    assert [row["key"] for row in gateway.state(at_least=art.position).keys] == ["k"]
    assert gateway.history("k")[0].type == "KeyBound"
    assert gateway.store_tables()[0]["table"] == "facts"
    with pytest.raises(tb.DeniedError, match="gateway_sql"):
        gateway.query("SELECT 1")


async def test_many_ask_at_once(place: Path, tenant: str) -> None:
    async with tb.aconnect(home=place, host_id=HOST, tenant=tenant) as bus:

        async def one(number: int) -> int:
            async with await bus.query("SELECT ?::BIGINT AS n, count(*) AS c FROM range(100000)", number) as result:
                return int((await result.dicts())[0]["n"])

        assert await asyncio.gather(*(one(number) for number in range(40))) == list(range(40))


def test_without_a_store_it_is_said_what_to_start(nats_server: Server, home: Path) -> None:
    with nats_server.processes(home / "test-logs") as owner:
        owner.worker("basic", id="w1", host_id=HOST, home=home)
        with tb.connect(home=home, host_id=HOST) as bus, pytest.raises(tb.UnavailableError, match="--roles store"):
            bus.query("SELECT 1")
