"""Following names: each change is told once, with the position it holds at, and never before the answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from tensorbus.bus import MemoryCluster
from tensorbus.errors import NotFoundError
from tensorbus.events import DestroyReason, Event
from tensorbus.ids import ArtifactId, SystemIds
from tensorbus.lifecycle import Directory, rules
from tensorbus.transport import Connection, Push, memory_pair, serve
from tensorbus.workers._callers import Caller, Callers
from tensorbus.workers._follow import Follows
from tensorbus.workers._service import Service
from tests.unit.workers.rig import TENANT, Rig, caller, rig, soon, until


async def put(worker: Rig, data: bytes, **options: object) -> ArtifactId:
    taken = await worker.puts.take(worker.incoming(data, **options), deadline=soon())  # type: ignore[arg-type]  # passed on
    return taken.artifact


async def decide(worker: Rig, rule: Callable[[Directory], Event | None]) -> None:
    await worker.core.author.decide(rule, deadline=soon())


async def bind(worker: Rig, key: str, artifact: ArtifactId) -> None:
    await decide(worker, lambda state: rules.bind(state, tenant=TENANT, key=key, artifact=artifact, rebind=True))


async def destroy(worker: Rig, artifact: ArtifactId) -> None:
    await decide(
        worker, lambda state: rules.destroy(state, tenant=TENANT, artifact=artifact, reason=DestroyReason.ASKED)
    )


def follow(worker: Rig, follows: Follows, who: Caller, ref: str, by: str = "any") -> None:
    record = rules.resolve(worker.core.state, tenant=TENANT, ref=ref, by=by)
    follows.follow(who, by, ref, record)


def told(who: Caller) -> list[tuple[str, dict[str, object]]]:
    said = []
    while not who.pushes.empty():
        said.append(who.pushes.get_nowait())
    return said


def items(who: Caller) -> list[tuple[str, str | None]]:
    """What was told of which name: the artifact's id, or ``None`` for an error."""
    found = []
    for topic, data in told(who):
        assert topic == "changed"
        for item in data["items"]:  # type: ignore[attr-defined]  # a list
            info = item["artifact"]
            assert (info is None) != (item["error"] is None)
            found.append((item["ref"], None if info is None else info["artifact"]))
    return found


async def test_a_key_that_moves_is_told_and_then_followed_to_where_it_moved() -> None:
    async with rig(MemoryCluster()) as worker:
        follows, who = Follows(worker.core.live), caller()
        with worker.core.live.followed(follows.on_change):
            first, second = await put(worker, b"1", key="k"), await put(worker, b"2")
            follow(worker, follows, who, "k")
            await bind(worker, "k", second)
            assert items(who) == [("k", second)]
            await bind(worker, "other", first)  # the artifact that it named before is none of its business now
            assert items(who) == []
            await bind(worker, "other", second)
            assert items(who) == [("k", second)]
            await destroy(worker, second)
            assert items(who) == [("k", None)]
            await bind(worker, "k", first)  # an answer of "there is none" is not followed
            assert items(who) == []


async def test_a_given_id_that_becomes_a_key_is_told() -> None:
    async with rig(MemoryCluster()) as worker:
        follows, who = Follows(worker.core.live), caller()
        with worker.core.live.followed(follows.on_change):
            first, second = await put(worker, b"1", given="name"), await put(worker, b"2")
            follow(worker, follows, who, "name")
            follow(worker, follows, who, "name", by="id")
            await bind(worker, "name", second)
            assert items(who) == [("name", second)]  # asked for outright by id, it stays what it is
            await bind(worker, "x", first)
            assert items(who) == [("name", first)]


async def test_one_fact_about_many_followed_names_is_one_push_and_unfollowed_ones_are_not_told() -> None:
    async with rig(MemoryCluster()) as worker:
        follows, who, other = Follows(worker.core.live), caller("s1"), caller("s2")
        with worker.core.live.followed(follows.on_change):
            artifact = await put(worker, b"1", key="a")
            await bind(worker, "b", artifact)
            for ref in ("a", "b", artifact):
                follow(worker, follows, who, ref)
                follow(worker, follows, other, ref)
            follows.unfollow(who, [("any", "b"), ("any", "never")])
            await destroy(worker, artifact)
            ((topic, data),) = told(who)
            assert topic == "changed"
            assert data["position"] == worker.core.live.position
            assert sorted(item["ref"] for item in data["items"]) == ["a", artifact]  # type: ignore[attr-defined]  # a list
            assert len(told(other)) == 1


async def test_who_is_gone_is_forgotten_entirely() -> None:
    async with rig(MemoryCluster()) as worker:
        follows, who = Follows(worker.core.live), caller()
        with worker.core.live.followed(follows.on_change):
            artifact = await put(worker, b"1", key="k")
            follow(worker, follows, who, "k")
            follows.follow_series(who, "s", 0)
            follows.gone(who)
            await destroy(worker, artifact)
            assert told(who) == []
            assert not follows._by_touched
            assert not follows._depends
            assert not follows._series


async def test_versions_are_told_in_order_each_once_and_those_that_are_gone_by_number() -> None:
    async with rig(MemoryCluster()) as worker:
        follows, who = Follows(worker.core.live), caller()
        with worker.core.live.followed(follows.on_change):
            artifacts = [await put(worker, bytes([n])) for n in range(4)]
            follows.follow_series(who, "policy", 0)
            for artifact in artifacts[:3]:
                await decide(
                    worker,
                    lambda state, artifact=artifact: rules.publish(
                        state, tenant=TENANT, name="policy", artifact=artifact
                    ),
                )
            said = [data for topic, data in told(who) if topic == "series"]
            assert [[number for number, _ in data["new"]] for data in said] == [[1], [2], [3]]  # type: ignore[attr-defined]  # a list
            await destroy(worker, artifacts[2])
            said = [data for topic, data in told(who) if topic == "series"]
            assert all(data["new"] == [] for data in said)


async def test_who_does_not_read_what_it_follows_is_cut_off() -> None:
    async with rig(MemoryCluster()) as worker:
        who = caller()
        for n in range(5000):
            who.push("changed", {"n": n})
        assert who.session.closed
        assert not (await put(worker, b"1")).startswith("tbr:")


async def test_no_push_about_a_name_comes_before_the_answer_that_made_it_followed() -> None:
    """A caller that got the push first would overwrite it with the older answer."""
    async with rig(MemoryCluster()) as worker:
        callers = Callers(worker.core.group)
        service = Service(worker.core, callers, None)
        server, client = memory_pair()
        seen: list[tuple[str, int]] = []

        def on_push(push: Push) -> None:
            seen.append(("push", int(str(push.data["position"]))))

        with service.following():
            serving = asyncio.create_task(serve(server, service.handle, ids=SystemIds(), on_open=callers.opened))
            connection = Connection(client, on_push=on_push)
            hello = {"protocol": 1, "tenant": TENANT, "pid": 1, "version": "test"}
            await connection.call("hello", hello, deadline=soon())
            artifacts = [await put(worker, b"1", key="k"), await put(worker, b"2")]
            for n in range(100):
                moving = asyncio.create_task(bind(worker, "k", artifacts[n % 2]))
                for _ in range(n % 7):
                    await asyncio.sleep(0)
                seen.clear()
                reply = await connection.call("resolve", {"ref": "k", "follow": True}, deadline=soon())
                answered = int(str(reply.data["position"]))
                early = [position for _, position in seen]
                assert all(position <= answered for position in early), (n, early, answered)
                await moving
                await until_told(seen, worker, answered)
                await connection.call("unfollow", {"refs": [["any", "k"]]}, deadline=soon())
            await connection.close()
            await serving


async def until_told(seen: list[tuple[str, int]], worker: Rig, answered: int) -> None:
    """Whatever came after the answer was told."""
    key = worker.core.state.keys[TENANT, "k"]
    if key.seq > answered:
        await until(lambda: any(position >= key.seq for _, position in seen), "the push")


async def test_resolving_what_is_not_there_follows_nothing() -> None:
    async with rig(MemoryCluster()) as worker:
        follows, who = Follows(worker.core.live), caller()
        with pytest.raises(NotFoundError):
            follow(worker, follows, who, "nothing")
        assert not who.follows
        assert not follows._by_touched
