"""Homes of page shards as real processes on a real bus: they are killed, stopped, leave and come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import numpy as np
import pytest

from tensorbus.bus import NatsBus
from tensorbus.clock import Deadline
from tensorbus.errors import ConflictError, InvalidArgumentError
from tensorbus.events import Subjects
from tensorbus.model import PageOutcome, PageState
from tensorbus.testing._processes import WorkerProgram
from tests.integration.conftest import Nats
from tests.integration.workers.pages import KEYSPACE, Homes, keys_of, records_for
from tests.integration.workers.raw import Raw, until

pytestmark = pytest.mark.integration
Start = Callable[..., WorkerProgram]
PAGES = 100_000


@asynccontextmanager
async def asking(worker: WorkerProgram) -> AsyncIterator[Homes]:
    async with AsyncExitStack() as stack:
        raw = await stack.enter_async_context(await Raw.unix(worker.socket))
        yield Homes(raw, stack)


async def test_pages_are_added_found_and_removed_at_two_homes(start_worker: Start) -> None:
    holder = start_worker("basic", id="w1")
    start_worker("shard-home", id="h1")
    start_worker("shard-home", id="h2")
    keys = keys_of(PAGES)
    async with asking(holder) as homes:
        await homes.served(["h1", "h2"])
        outcomes = await homes.add(keys, holder)
        assert (outcomes == PageOutcome.STORED).all()
        states, places = await homes.look(keys)
        assert (states == PageState.HIT).all()
        assert places == {at: ("w1", at) for at in range(PAGES)}
        figures = [(await (await homes.to(at)).call("stats"))["home"] for at in range(2)]
        assert sum(home["pages"] for home in figures) == PAGES
        assert sum(home["exact"] for home in figures) == homes.shards
        states, _ = await homes.look(keys_of(1000, seed=2))
        assert (states == PageState.MISSING).all()
        states, _ = await homes.look(keys[:1000], keyspace="cd" * 32)
        assert (states == PageState.MISSING).all()


async def test_a_killed_home_is_taken_over_with_all_that_the_stream_has(start_worker: Start) -> None:
    holder, watcher = start_worker("basic", id="w1"), start_worker("gateway", id="g1")
    dying = start_worker("shard-home", id="h1")
    start_worker("shard-home", id="h2")
    logged, told = keys_of(20_000), keys_of(2_000, seed=3)
    async with asking(watcher) as homes:
        await homes.served(["h1", "h2"])
        assert (await homes.add(logged, holder, ack="log") == PageOutcome.STORED).all()
        dying_shards = [n for n, (at, _) in enumerate(homes.table) if homes.homes[at][0] == "h1"]
        assert (await homes.add(told, holder) == PageOutcome.STORED).all()
        dying.kill9()
        killed_s = asyncio.get_running_loop().time()
        await homes.served(["h2"])
        assert asyncio.get_running_loop().time() - killed_s < 2 + 4  # the TTL, and looking every quarter of a second
        states, _ = await homes.look(logged)
        assert (states == PageState.HIT).all()
        states, _ = await homes.look(told)
        assert set(np.unique(states)) <= {PageState.HIT, PageState.DEGRADED}
        degraded = [shard["shard"] for shard in (await homes.status("h2"))["shards"] if shard["state"] == "degraded"]
        assert degraded == dying_shards
        await homes.say_all(holder, told)
        states, _ = await homes.look(np.concatenate([told, logged]))
        assert (states == PageState.HIT).all()
        states, _ = await homes.look(keys_of(1000, seed=2))
        assert (states == PageState.MISSING).all()
        assert {shard["state"] for shard in (await homes.status("h2"))["shards"]} == {"exact"}


async def test_a_home_that_stood_still_past_its_ttl_refuses_everything_and_says_so(start_worker: Start) -> None:
    holder = start_worker("basic", id="w1")
    stopped = start_worker("shard-home", id="h1")
    start_worker("shard-home", id="h2")
    keys = keys_of(1_000)
    async with asking(holder) as homes:
        await homes.served(["h1", "h2"])
        await homes.add(keys, holder, ack="log")
        at = next(at for at, home in enumerate(homes.homes) if home[0] == "h1")
        tokens = [[n, token] for n, (owner, token) in enumerate(homes.table) if owner == at]
        raw = await homes.to(at)
        stopped.pause()
        life = {"holder": [holder.worker, holder.incarnation], "keyspaces": [KEYSPACE], "tokens": tokens}
        body = records_for(keys_of(500, seed=9)).tobytes()
        asked = [
            asyncio.create_task(raw.reply("page_add", life, body=body)),
            asyncio.create_task(
                raw.reply("page_lookup", {"keyspace": KEYSPACE, "tokens": tokens}, body=keys.tobytes())
            ),
        ]
        await homes.served(["h2"])
        stopped.resume()
        added, looked = await asyncio.gather(*asked, return_exceptions=True)
        if not isinstance(added, BaseException):
            outcomes = np.frombuffer(bytes(added.body)[:500], np.uint8)
            assert set(np.unique(outcomes)) <= {PageOutcome.NOT_HOME, PageOutcome.UNAVAILABLE, PageOutcome.FENCED}
        if not isinstance(looked, BaseException):
            states = np.frombuffer(bytes(looked.body)[: len(keys)], np.uint8)
            assert set(np.unique(states)) <= {PageState.NOT_HOME, PageState.UNAVAILABLE}
        assert stopped.wait() != 0
        assert "fenced" in stopped.text
        assert (await homes.look(keys))[0].tolist() == [PageState.HIT] * len(keys)
        states, _ = await homes.look(keys_of(500, seed=9))
        assert not (states == PageState.HIT).any()


async def test_a_home_that_leaves_hands_over_before_its_ttl(start_worker: Start) -> None:
    holder = start_worker("basic", id="w1", session_ttl_s=20)
    leaving = start_worker("shard-home", id="h1", session_ttl_s=20)
    start_worker("shard-home", id="h2", session_ttl_s=20)
    keys = keys_of(5_000)
    async with asking(holder) as homes:
        await homes.served(["h1", "h2"])
        assert (await homes.add(keys, holder) == PageOutcome.STORED).all()
        assert leaving.stop() == 0
        await homes.served(["h2"], timeout_s=10)
        states, _ = await homes.look(keys)
        assert (states == PageState.HIT).all()


async def test_shards_move_to_a_home_that_comes_and_none_of_their_pages_is_lost(start_worker: Start) -> None:
    holder = start_worker("basic", id="w1")
    for name in ("h1", "h2"):
        start_worker("shard-home", id=name)
    keys = keys_of(20_000)
    async with asking(holder) as homes:
        await homes.served(["h1", "h2"])
        assert (await homes.add(keys[:10_000], holder) == PageOutcome.STORED).all()
        before = {n: homes.homes[at][0] for n, (at, _) in enumerate(homes.table)}
        adding = asyncio.create_task(homes.add(keys[10_000:], holder))
        start_worker("shard-home", id="h3", ready=False)
        assert (await adding == PageOutcome.STORED).all()
        await homes.served(["h1", "h2", "h3"])
        after = {n: homes.homes[at][0] for n, (at, _) in enumerate(homes.table)}
        moved = [n for n in before if before[n] != after[n]]
        assert len(moved) <= 30
        states, places = await homes.look(keys)
        assert (states == PageState.HIT).all()
        assert {slot for _, slot in places.values()} == set(range(10_000))
        for name in ("h1", "h2", "h3"):
            assert {shard["state"] for shard in (await homes.status(name))["shards"]} == {"exact"}


async def test_shards_are_stored_confirmed_and_purged_and_a_new_home_begins_there(
    start_worker: Start, nats: Nats
) -> None:
    holder = start_worker("basic", id="w1")
    store = start_worker("gateway,store", id="s1", page_purge_delay_s=0.5)
    dying = start_worker("shard-home", id="h1", page_snapshot_batches=2)
    start_worker("shard-home", id="h2", page_snapshot_batches=2)
    rounds = [keys_of(1_000, seed=seed) for seed in range(4)]
    async with asking(holder) as homes:
        await homes.served(["h1", "h2"])
        for keys in rounds:
            assert (await homes.add(keys, holder, ack="log") == PageOutcome.STORED).all()
        await until(lambda: store.text.count("purged: shard=") >= homes.shards, "a purge of every shard")
        assert "not confirmed" not in dying.text
        dying.kill9()
        await homes.served(["h2"])
        await homes.say_all(holder)
        states, _ = await homes.look(np.concatenate(rounds))
        assert (states == PageState.HIT).all()
        await homes.add(keys_of(1_000, seed=9), holder, ack="log")
    bus = await NatsBus.connect(nats.url, subjects=Subjects(nats.prefix))
    try:
        left = await bus.pages.log_state(deadline=Deadline(10))
        assert left.messages < 64 * (2 + 5 + 4)  # grants; batches since; snapshots with their bodies
    finally:
        await bus.close()


async def test_calls_that_no_home_can_answer_are_refused_and_hurt_nobody(start_worker: Start) -> None:
    holder, _ = start_worker("basic", id="w1"), start_worker("shard-home", id="h1")
    keys = keys_of(100)
    async with asking(holder) as homes:
        await homes.served(["h1"])
        raw, tokens = await homes.to(0), [[shard, token] for shard, (_, token) in enumerate(homes.table)]
        life = {"holder": [holder.worker, holder.incarnation], "keyspaces": [KEYSPACE], "tokens": tokens, "ack": "log"}
        odd = records_for(keys)
        odd["flags"], odd["holder"], odd["op"] = 255, 999, 77
        reply = await raw.reply("page_add", life, body=odd.tobytes())
        assert bytes(reply.body) == bytes([PageOutcome.STORED]) * len(keys)
        odd["keyspace"] = 1
        for op, args, body in (
            ("page_add", life, odd.tobytes()),
            ("page_add", life, odd.tobytes()[:-1]),
            ("page_add", life | {"keyspaces": ["short"]}, b""),
            ("page_add", life | {"ack": "never"}, b""),
            ("page_lookup", {"keyspace": KEYSPACE, "tokens": tokens}, b"x" * 33),
            ("page_lookup", {"keyspace": KEYSPACE, "tokens": tokens, "fragments": 60_000}, keys.tobytes()),
            ("page_lookup", {"keyspace": KEYSPACE, "tokens": [[70_000, 1]]}, keys.tobytes()),
        ):
            with pytest.raises(InvalidArgumentError):
                await raw.reply(op, args, body=body)
        unknown = life | {"holder": [holder.worker, "another life"]}
        reply = await raw.reply("page_add", unknown, body=records_for(keys).tobytes())
        assert bytes(reply.body) == bytes([PageOutcome.FENCED]) * len(keys)
        older = life | {"tokens": [[shard, token - 1] for shard, token in tokens]}
        reply = await raw.reply("page_add", older, body=records_for(keys).tobytes())
        assert bytes(reply.body) == bytes([PageOutcome.NOT_HOME]) * len(keys)
        named = {shard: token for shard, token, *_ in reply.data["redirects"]}  # type: ignore[attr-defined]  # a list
        assert named.items() <= dict(tokens).items()
        assert (await homes.look(keys))[0].tolist() == [PageState.HIT] * len(keys)
        with pytest.raises(ConflictError):
            await raw.call("page_handover", shard=0, token=tokens[0][1], to=["h9", "x"])
        assert (await raw.call("page_clear", keyspace=KEYSPACE, tokens=tokens))["removed"] == len(keys)
        assert (await homes.look(keys))[0].tolist() == [PageState.MISSING] * len(keys)
