"""Workers as real processes on a real bus: putting, fetching, leases, following, tenants."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import random
import sys
from collections.abc import Callable
from typing import Any

import pytest

from tensorbus.clock import Deadline
from tensorbus.errors import (
    ConflictError,
    CorruptError,
    DeniedError,
    InvalidArgumentError,
    NotFoundError,
    OutOfSpaceError,
    UnavailableError,
)
from tensorbus.model import Manifest, TensorSpec, plan_layout
from tensorbus.testing._processes import Processes, Program, WorkerProgram
from tensorbus.transport import BulkClient, hash_bytes
from tests.integration.workers.raw import Raw, held_by, manifest_of, until
from tests.sizes import SIZES

pytestmark = pytest.mark.integration
Start = Callable[..., WorkerProgram]
MIB = 1 << 20


def noise(seed: object, nbytes: int) -> bytes:
    return random.Random(str(seed)).randbytes(nbytes)


def actor(processes: Processes, verb: str, worker: WorkerProgram, **given: object) -> Program:
    words = json.dumps({"socket": str(worker.socket), **given})
    return processes.run([sys.executable, "-m", "tests.integration.workers.actor", verb, words], name=f"actor-{verb}")


def fds(worker: Program) -> int:
    return len(os.listdir(f"/proc/{worker.pid}/fd"))


async def gone(raw: Raw, ref: str) -> None:
    """Wait until nothing has that name."""
    with pytest.raises(NotFoundError):
        async with Deadline(20, what=f"the end of {ref}").scope():
            while True:
                await raw.resolve(ref)
                await asyncio.sleep(0.02)


# -- putting and reading ----------------------------------------------------------------------------------------------


async def test_what_one_host_puts_is_read_there_without_a_copy_and_on_another_over_tcp(start_worker: Start) -> None:
    one, two = start_worker(id="w1", host_id="h1"), start_worker(id="w2", host_id="h2")
    tensors = {"w": noise(1, 3 * MIB), "b": noise(2, 100), "none": b""}
    async with await Raw.unix(one.socket) as here, await Raw.unix(two.socket) as there:
        taken = await here.put(tensors, key="demo/linear")
        near = await here.open(taken["artifact"]["artifact"])
        assert near.path == "shm"
        record = await there.resolve("demo/linear", at_least=taken["position"])
        far = await there.open(record["artifact"], at_least=taken["position"])
        assert (far.path, "w1" in far.why) == ("tcp", True)
        for opened in (near, far):
            assert {name: opened.bytes(name) for name in tensors} == tensors
        assert (await there.open(record["artifact"])).path == "shm"  # it is held here now, as a fact
        await held_by(there, "demo/linear", "w1", "w2")


async def test_many_callers_fetch_an_artifact_once(start_worker: Start) -> None:
    one, two = start_worker(id="w1", host_id="h1"), start_worker(id="w2", host_id="h2")
    async with contextlib.AsyncExitStack() as stack:
        here = await stack.enter_async_context(await Raw.unix(one.socket))
        taken = await here.put({"w": noise(1, 8 * MIB)}, key="k")
        readers = [await stack.enter_async_context(await Raw.unix(two.socket)) for _ in range(10)]
        asked = (reader.open(taken["artifact"]["artifact"], at_least=taken["position"]) for reader in readers)
        opened = await asyncio.gather(*asked)
        assert all(each.right() for each in opened)
        types = [event["type"] for event in await here.events() if event["author"] == "w2"]
        assert types == ["SessionOpened", "ReplicaAdded"]
        assert (await readers[0].stats())["pool"]["busy_bytes"] == 8 * MIB


async def test_a_position_beyond_the_log_is_refused_and_one_in_it_is_waited_for(start_worker: Start) -> None:
    one, two = start_worker(id="w1", host_id="h1"), start_worker(id="w2", host_id="h2")
    async with await Raw.unix(one.socket) as here, await Raw.unix(two.socket) as there:
        for n in range(50):
            taken = await here.put({"w": noise(n, 10)}, key=f"k{n}")
            record = await there.resolve(f"k{n}", at_least=taken["position"])
            assert record["artifact"] == taken["artifact"]["artifact"]
        with pytest.raises(InvalidArgumentError, match="beyond the log"):
            await there.resolve("k0", at_least=taken["position"] + 1000)


async def test_a_manifest_of_a_hundred_thousand_tensors_travels(start_worker: Start) -> None:
    one, two = start_worker(id="w1", host_id="h1"), start_worker(id="w2", host_id="h2")
    count = SIZES.tensors_max
    data = noise("all", count)
    digests = {value: hash_bytes(memoryview(bytes([value]))).hex() for value in range(256)}
    specs = (TensorSpec(f"layers.{n:06d}.weight", "u8", (1,), digests[data[n]]) for n in range(count))
    manifest = Manifest(tuple(specs))
    layout = plan_layout(manifest)
    async with await Raw.unix(one.socket) as here, await Raw.unix(two.socket) as there:
        segment, memory = await here.alloc(layout.nbytes)
        for n, offset in enumerate(layout.offsets):
            memory[offset] = data[n]
        memory.close()
        asked = {
            "segment": segment["segment"],
            "generation": segment["generation"],
            "layout": json.loads(layout.to_json()),
            "key": "wide",
        }
        reply = await here.reply("commit", asked, body=manifest.to_json().encode(), timeout_s=60)
        taken: dict[str, Any] = reply.data
        assert taken["artifact"]["artifact"] == manifest.content_id()
        opened = await there.open(taken["artifact"]["artifact"], at_least=taken["position"], timeout_s=60)
        assert opened.manifest == manifest
        assert bytes(opened.parts[0][offset] for offset in opened.layout.offsets) == data
        body = (await there.reply("manifest", {"artifact": taken["artifact"]["artifact"]})).body
        assert Manifest.from_json(bytes(body)) == manifest
        assert len(await there.live_workers()) == 2  # nobody was kept from its heartbeat


async def test_a_follower_on_another_host_is_told_of_each_change(start_worker: Start) -> None:
    one, two = start_worker(id="w1", host_id="h1"), start_worker(id="w2", host_id="h2")
    async with await Raw.unix(one.socket) as here, await Raw.unix(two.socket) as there:
        made = [await here.put({"w": noise(n, 10)}) for n in range(3)]
        ids = [each["artifact"]["artifact"] for each in made]
        await here.call("bind", key="k", artifact=ids[0])
        await there.call("series", name="policy", after=0, follow=True)
        first = await there.call("resolve", ref="k", follow=True, at_least=made[-1]["position"] + 1)
        assert first["artifact"]["artifact"] == ids[0]
        for artifact in ids[1:]:
            await here.call("bind", key="k", artifact=artifact, rebind=True)
        for artifact in ids:
            await here.call("publish", name="policy", artifact=artifact)
        await here.call("unbind", key="k")

        def told() -> list[str | None]:
            items = [item for push in there.pushes if push.topic == "changed" for item in push.data["items"]]  # type: ignore[attr-defined]  # a list
            return [item["artifact"] and item["artifact"]["artifact"] for item in items]

        await until(lambda: told()[-1:] == [None], "the last push")
        order = [*ids, None]
        places = [order.index(name) for name in told()]  # facts that came together are told by what holds after them
        assert places == sorted(places)
        pushed = [push.data for push in there.pushes if push.topic == "series"]
        assert [number for data in pushed for number, _ in data["new"]] == [1, 2, 3]  # type: ignore[attr-defined]  # a list
        positions = [int(str(push.data["position"])) for push in there.pushes]
        assert positions == sorted(positions)


# -- what ends with whom ----------------------------------------------------------------------------------------------


async def test_memory_of_a_killed_caller_is_gone_with_its_keys_and_an_event_says_why(
    start_worker: Start, processes: Processes
) -> None:
    worker = start_worker(id="w1")
    async with await Raw.unix(worker.socket) as raw:
        before = (await raw.stats())["pool"]["busy_bytes"]
        program = actor(processes, "register", worker, seed="s", count=3, nbytes=10_000)
        program.until('"registered"')
        record = await raw.resolve("s/1")
        assert record["leases"][0]["purpose"] == "register"
        opened = await raw.open("s-1")
        program.kill9()
        await gone(raw, "s/1")
        with pytest.raises(NotFoundError, match="lease"):
            await raw.resolve("s/1")
        assert opened.bytes("w") == noise(("s", 1), 10_000)  # what was mapped stays as it was
        busy = (await raw.stats())["pool"]["busy_bytes"]
        assert busy > before
        del opened
        await until_busy(raw, before)
        ends = [event for event in await raw.events() if event["type"] == "ArtifactDestroyed"]
        assert {event["body"]["reason"] for event in ends} == {"lease_ended"}


async def until_busy(raw: Raw, nbytes: int) -> None:
    async with Deadline(20, what=f"{nbytes} busy bytes").scope():
        while (await raw.stats())["pool"]["busy_bytes"] != nbytes:
            await asyncio.sleep(0.02)


async def test_an_unfinished_put_ends_with_its_connection(start_worker: Start) -> None:
    worker = start_worker(id="w1")
    async with await Raw.unix(worker.socket) as watching:
        raw = await Raw.unix(worker.socket)
        _, memory = await raw.alloc(5 * MIB)
        assert (await watching.stats())["pool"]["busy_bytes"] == 5 * MIB
        await raw.connection.close()
        await until_busy(watching, 0)
        memory.close()


async def test_a_segment_of_another_connection_cannot_be_committed(start_worker: Start) -> None:
    worker = start_worker(id="w1")
    async with await Raw.unix(worker.socket) as one, await Raw.unix(worker.socket) as two:
        segment, memory = await one.alloc(100)
        asked = {"segment": segment["segment"], "generation": segment["generation"]}
        with pytest.raises(NotFoundError):
            await two.call("abort", **asked)
        await one.call("abort", **asked)
        with pytest.raises(NotFoundError):
            await one.call("abort", **asked)
        memory.close()


async def test_a_full_pool_refuses_an_open_and_names_who_holds_it(start_worker: Start) -> None:
    one = start_worker(id="w1", host_id="h1")
    two = start_worker(id="w2", host_id="h2", pool_bytes="8MiB")
    async with await Raw.unix(one.socket) as here, await Raw.unix(two.socket) as there:
        large = await here.put({"w": noise(1, 5 * MIB)}, key="large")
        mine = await there.put({"w": noise(2, 5 * MIB)}, key="mine")
        opened = await there.open(mine["artifact"]["artifact"])
        with pytest.raises(OutOfSpaceError) as refused:
            await there.open(large["artifact"]["artifact"], at_least=large["position"])
        (holder,) = refused.value.details["holders"]  # type: ignore[misc]  # a list of one
        assert holder["owner"] == mine["artifact"]["artifact"]
        assert holder["pins"] == 1
        await there.call("destroy", artifact=mine["artifact"]["artifact"])
        with pytest.raises(OutOfSpaceError):
            await there.open(large["artifact"]["artifact"])  # the reader still maps it
        assert opened.right()
        del opened
        await until_busy(there, 0)
        assert (await there.open(large["artifact"]["artifact"])).right()


async def test_memory_that_a_caller_keeps_for_its_next_put_is_let_go_when_a_fetch_wants_it(start_worker: Start) -> None:
    one = start_worker(id="w1", host_id="h1")
    two = start_worker(id="w2", host_id="h2", pool_bytes="8MiB")
    async with await Raw.unix(one.socket) as here, await Raw.unix(two.socket) as there:
        large = await here.put({"w": noise(1, 5 * MIB)})
        segment, memory = await there.alloc(5 * MIB)
        await there.call("abort", segment=segment["segment"], generation=segment["generation"])
        opening = asyncio.create_task(there.open(large["artifact"]["artifact"], at_least=large["position"]))
        await until(lambda: there.pushes, "the word that it is wanted")
        assert there.pushes[0].topic == "retire"
        assert there.pushes[0].data == {"segments": [segment["segment"]]}
        assert not opening.done()
        memory.close()
        assert (await opening).right()


async def test_bytes_that_come_over_tcp_are_held_under_the_id_that_they_have(start_worker: Start) -> None:
    worker = start_worker(id="w1")
    data = noise(1, MIB)
    manifest = manifest_of({"w": data})
    commit = {"manifest": manifest.to_json(), "layout": json.loads(plan_layout(manifest).to_json()), "key": "k"}
    host, _, port = worker.data.rpartition(":")
    async with await Raw.unix(worker.socket) as raw:
        client = await asyncio.to_thread(BulkClient.connect, host, int(port), deadline=Deadline(10))
        place = await raw.call("place", nbytes=MIB)
        put = functools.partial(client.put, {"permit": place["permit"]}, deadline=Deadline(10))
        taken = await asyncio.to_thread(put, [memoryview(data)], commit=commit)
        artifact = manifest.content_id()
        assert taken["artifact"]["artifact"] == artifact  # type: ignore[index]  # a dict
        assert (await raw.open(artifact)).bytes("w") == data
        again = await asyncio.to_thread(put, [memoryview(data)], commit={**commit, "key": "other"})
        assert again["existed"]
        with pytest.raises(CorruptError):
            await asyncio.to_thread(put, [memoryview(bytes(MIB))], commit=commit)
        with pytest.raises(ConflictError):
            other = noise(2, MIB)
            theirs = manifest_of({"w": other}).to_json()
            await asyncio.to_thread(put, [memoryview(other)], commit={**commit, "manifest": theirs})
        client.close()
        await until_busy(raw, MIB)
        assert await raw.keys() == ["k", "other"]


# -- transfers that break ---------------------------------------------------------------------------------------------


async def test_a_reader_that_dies_within_a_transfer_leaves_nothing_open(start_worker: Start) -> None:
    worker = start_worker(id="w1", pool_bytes="128MiB")
    async with await Raw.unix(worker.socket) as raw:
        taken = await raw.put({"w": noise(1, 32 * MIB)}, key="k")
        artifact = taken["artifact"]["artifact"]
        before = fds(worker)
        host, _, port = worker.data.rpartition(":")
        for _ in range(5):
            client = await asyncio.to_thread(BulkClient.connect, host, int(port), deadline=Deadline(10))
            permit = await raw.read_permit(artifact, "w1")
            opened = await asyncio.to_thread(client.open, {"permit": permit}, deadline=Deadline(10))
            reading = asyncio.create_task(
                asyncio.to_thread(
                    client.read_into, opened.source, [(0, memoryview(bytearray(32 * MIB)))], deadline=Deadline(10)
                )
            )
            await asyncio.sleep(0.003)
            client.close()
            await asyncio.gather(reading, return_exceptions=True)
        await raw.call("destroy", artifact=artifact)
        await until_busy(raw, 0)
        await until(lambda: fds(worker) <= before, "the descriptors")


async def test_a_source_that_is_killed_within_a_fetch_is_replaced_by_another(start_worker: Start) -> None:
    big = {"pool_bytes": "512MiB"}
    one, two = start_worker(id="w1", host_id="h1", **big), start_worker(id="w2", host_id="h2", **big)
    three = start_worker(id="w3", host_id="h3", **big)
    data = noise(1, 16 * MIB) * 12
    async with (
        await Raw.unix(one.socket) as first,
        await Raw.unix(two.socket) as second,
        await Raw.unix(three.socket) as third,
    ):
        taken = await first.put({"w": data}, key="k")
        artifact = taken["artifact"]["artifact"]
        replica = await second.open(artifact, at_least=taken["position"])
        del replica
        await held_by(third, artifact, "w1", "w2")
        fetching = asyncio.create_task(third.open(artifact, timeout_s=60))
        while (await third.stats())["pool"]["busy_bytes"] == 0 and not fetching.done():
            await asyncio.sleep(0.001)
        one.kill9()
        opened = await fetching
        assert opened.right()
        assert opened.path == "tcp"


async def test_a_source_that_is_killed_and_was_the_only_one_is_unavailable_and_then_lost(start_worker: Start) -> None:
    start_worker("gateway", id="gate")
    one = start_worker(id="w1", host_id="h1", pool_bytes="512MiB")
    two = start_worker(id="w2", host_id="h2", pool_bytes="512MiB")
    data = noise(1, 16 * MIB) * 12
    async with await Raw.unix(one.socket) as here, await Raw.unix(two.socket) as there:
        taken = await here.put({"w": data}, key="k")
        artifact = taken["artifact"]["artifact"]
        fetching = asyncio.create_task(there.open(artifact, at_least=taken["position"], timeout_s=60))
        while (await there.stats())["pool"]["busy_bytes"] == 0 and not fetching.done():
            await asyncio.sleep(0.001)
        one.kill9()
        try:
            opened = await fetching
        except UnavailableError:
            with pytest.raises(UnavailableError):
                await there.open(artifact)  # it is on the log until the session has ended
            await gone(there, "k")
            with pytest.raises(NotFoundError, match="lost"):
                await there.resolve("k")
            await until_busy(there, 0)
        else:
            assert opened.right()  # the transfer was quicker than the kill


async def test_a_source_that_stops_is_given_up_when_its_session_ends(start_worker: Start) -> None:
    start_worker("gateway", id="gate")
    one = start_worker(id="w1", host_id="h1", pool_bytes="512MiB")
    two = start_worker(id="w2", host_id="h2", pool_bytes="512MiB")
    async with await Raw.unix(one.socket) as here, await Raw.unix(two.socket) as there:
        taken = await here.put({"w": noise(1, MIB)}, key="k")
        one.pause()
        with pytest.raises((UnavailableError, NotFoundError)):
            await there.open(taken["artifact"]["artifact"], at_least=taken["position"], timeout_s=60)
        await gone(there, "k")
        one.resume()


# -- tenants ----------------------------------------------------------------------------------------------------------


async def test_tenants_never_meet(start_worker: Start) -> None:
    one, two = start_worker(id="w1", host_id="h1"), start_worker(id="w2", host_id="h2")
    gate = start_worker("gateway", id="gate")
    async with (
        await Raw.unix(one.socket, tenant="acme") as acme,
        await Raw.unix(one.socket, tenant="rival") as rival,
        await Raw.unix(two.socket, tenant="rival") as rival_far,
        await Raw.tcp(gate.control, tenant="rival") as rival_gate,
    ):
        mine = await acme.put({"w": b"mine" * 1000}, key="same", id="given")
        theirs = await rival.put({"w": b"theirs" * 1000}, key="same", id="given")
        assert (await acme.open("given")).bytes("w") == b"mine" * 1000
        assert (await rival.open("given")).bytes("w") == b"theirs" * 1000
        secret = await acme.put({"w": b"secret" * 1000}, key="secret-key")
        artifact, position = secret["artifact"]["artifact"], secret["position"]
        await acme.call("publish", name="secret-series", artifact=artifact)
        for other in (rival, rival_far, rival_gate):
            assert await other.keys() == ["same"]
            assert (await other.call("series_ls"))["items"] == []
            for ref in (artifact, "secret-key"):
                with pytest.raises(NotFoundError):
                    await other.resolve(ref, at_least=position)
            for op in ("locate", "manifest", "destroy"):
                with pytest.raises(NotFoundError):
                    await other.call(op, artifact=artifact)
            with pytest.raises(NotFoundError):
                await other.call("bind", key="stolen", artifact=artifact)
            with pytest.raises(NotFoundError):
                await other.call("version", name="secret-series", number=1)
            said = str(await other.events(after=mine["artifact"]["born"] - 1))
            assert "secret" not in said
            assert artifact not in said
            with pytest.raises(NotFoundError):
                await other.call("events_open", artifact=artifact)
        for other in (rival, rival_far):
            with pytest.raises(NotFoundError):
                await other.open(artifact)
            with pytest.raises(NotFoundError):
                await other.call("pin", artifact=artifact)
        await rival_bulk(one, artifact, await rival.read_permit("given", "w1"))
        # Equal bytes of two tenants are two artifacts in two memories, and one's end is not the other's.
        copy = await rival.put({"w": b"secret" * 1000})
        assert copy["artifact"]["artifact"] == artifact
        assert not copy["existed"]
        await rival.call("destroy", artifact=artifact)
        assert (await acme.open(artifact)).right()
        assert theirs["artifact"]["live"]


async def rival_bulk(worker: WorkerProgram, artifact: str, permit: str) -> None:
    """Whatever the peer says, what it reads is what its permit is for."""
    host, _, port = worker.data.rpartition(":")
    client = await asyncio.to_thread(BulkClient.connect, host, int(port), deadline=Deadline(10))
    try:
        for request in ({"tenant": "acme", "artifact": artifact}, {"permit": "0" * 32}, {"permit": 7}):
            with pytest.raises(DeniedError):
                await asyncio.to_thread(client.open, request, deadline=Deadline(10))
        with pytest.raises(DeniedError):
            await asyncio.to_thread(client.put, {"permit": permit}, [memoryview(b"x")], deadline=Deadline(10))
        asked = {"tenant": "acme", "artifact": artifact, "permit": permit}
        opened = await asyncio.to_thread(client.open, asked, deadline=Deadline(10))
        room = bytearray(opened.nbytes)
        await asyncio.to_thread(client.read_into, opened.source, [(0, memoryview(room))], deadline=Deadline(10))
        assert room == b"theirs" * 1000
    finally:
        client.close()


async def test_a_full_pool_does_not_tell_one_tenant_the_ids_of_another(start_worker: Start) -> None:
    worker = start_worker(id="w1", pool_bytes="4MiB")
    async with (
        await Raw.unix(worker.socket, tenant="acme") as acme,
        await Raw.unix(worker.socket, tenant="rival") as rival,
    ):
        await acme.put({"w": noise(1, 3 * MIB)}, id="secret-project")
        with pytest.raises(OutOfSpaceError) as refused:
            await rival.alloc(3 * MIB)
        assert "secret" not in str(refused.value) + str(refused.value.details)


# -- the connection ---------------------------------------------------------------------------------------------------


async def test_the_first_call_is_hello_and_unknown_operations_are_refused(start_worker: Start) -> None:
    worker = start_worker("basic,gateway", id="w1")
    async with await Raw.unix(worker.socket) as raw:
        assert raw.said["descriptors"] is True
        with pytest.raises(InvalidArgumentError, match="has no operation 'fly'"):
            await raw.call("fly")
        with pytest.raises(InvalidArgumentError, match="protocol"):
            await raw.call("hello", protocol=2, tenant="default")
        with pytest.raises(InvalidArgumentError, match="limit"):
            await raw.call("ls", limit=0)
        assert (await raw.call("ls", unknown="argument"))["items"] == []
    async with await Raw.tcp(worker.control) as far:
        assert far.said["descriptors"] is False
        with pytest.raises(InvalidArgumentError, match="unix socket"):
            await far.call("alloc", nbytes=10)


async def test_a_worker_that_is_asked_to_end_says_bye_and_leaves_in_order(start_worker: Start) -> None:
    gate, worker = start_worker("gateway", id="gate"), start_worker(id="w1")
    async with await Raw.unix(gate.socket) as watching, await Raw.unix(worker.socket) as raw:
        await raw.put({"w": b"1"}, key="k")
        assert await asyncio.to_thread(worker.stop) == 0
        await until(lambda: raw.connection.closed, "the end of the connection")
        assert [push.topic for push in raw.pushes] == ["bye"]
        await gone(watching, "k")
        ends = [event["body"] for event in await watching.events() if event["type"] == "SessionEnded"]
        assert [end["reason"] for end in ends] == ["left"]
    assert not worker.socket.exists()


async def test_an_id_is_refused_to_other_bytes_by_a_worker_that_never_held_it(start_worker: Start) -> None:
    one, two = start_worker(id="w1", host_id="h1"), start_worker(id="w2", host_id="h2")
    async with await Raw.unix(one.socket) as here, await Raw.unix(two.socket) as there:
        await here.put({"w": noise(1, 1000)}, id="mine", digest=False)
        with pytest.raises(ConflictError):
            await there.put({"w": noise(2, 1000)}, id="mine", digest=False)
        again = await there.put({"w": noise(1, 1000)}, id="mine", digest=False)
        assert again["existed"]
        assert again["artifact"]["digest"] is not None
        await until_busy(there, 4096)
