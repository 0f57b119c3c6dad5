"""A bit flips in a real worker: it is found, said, never handed out, and healed from whoever has the right bytes."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tensorbus as tb
from tensorbus.bus import NatsBus
from tensorbus.clock import Deadline
from tensorbus.errors import CorruptError
from tensorbus.events import Subjects
from tensorbus.testing._processes import WorkerProgram
from tests.integration.conftest import Nats
from tests.integration.workers.raw import DEFAULT, Raw, flip

pytestmark = pytest.mark.integration
Start = Callable[..., WorkerProgram]
MIB = 1 << 20
DATA = random.Random("integrity").randbytes(9 * MIB)
NEAR = DATA[5 * MIB : 5 * MIB + 64]


async def eventually(raw: Raw, artifact: str, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    async with Deadline(20, what=f"a change of {artifact}").scope():
        while not holds(info := await raw.resolve(artifact)):
            await asyncio.sleep(0.02)
    return info


def holders(info: dict[str, Any]) -> list[str]:
    return sorted(replica["worker"] for replica in info["replicas"])


async def quarantines(raw: Raw, count: int = 0) -> list[tuple[str, str, list[str]]]:
    """Those on the log, of which at least so many come."""
    async with Deadline(20, what=f"{count} quarantines").scope():
        while len(found := await _quarantines(raw)) < count:
            await asyncio.sleep(0.02)
    return found


async def _quarantines(raw: Raw) -> list[tuple[str, str, list[str]]]:
    facts = [event for event in await raw.events() if event["type"] == "ReplicaQuarantined"]
    return [(fact["author"], fact["body"]["cause"], fact["body"]["wrong"]) for fact in facts]


async def test_a_reader_tells_the_source_which_looks_itself_and_heals(start_worker: Start) -> None:
    one, two = start_worker(id="w1", host_id="h1"), start_worker(id="w2", host_id="h2")
    three = start_worker(id="w3", host_id="h3")
    async with (
        await Raw.unix(one.socket) as first,
        await Raw.unix(two.socket) as second,
        await Raw.unix(three.socket) as third,
    ):
        taken = await first.put({"w": DATA})
        artifact, position = taken["artifact"]["artifact"], taken["position"]
        assert (await second.open(artifact, at_least=position)).bytes("w") == DATA
        before = await first.open(artifact)
        flip(one, NEAR)
        assert (await third.open(artifact, at_least=position)).bytes("w") == DATA
        assert await quarantines(third, 1) == [("w1", "reader", ["w"])]
        await eventually(third, artifact, lambda info: holders(info) == ["w1", "w2", "w3"] and not info["quarantined"])
        assert before.bytes("w") != DATA, "a map that was open stays what it was"
        assert (await first.open(artifact)).bytes("w") == DATA


async def test_a_caller_without_a_worker_tells_too(start_worker: Start, home: Path) -> None:
    one, two = start_worker(id="w1", host_id="h1"), start_worker(id="w2", host_id="h2")
    gate = start_worker("gateway", id="gate", host_id="h1")
    async with await Raw.unix(one.socket) as first, await Raw.unix(two.socket) as second:
        taken = await first.put({"w": DATA})
        artifact = taken["artifact"]["artifact"]
        assert (await second.open(artifact, at_least=taken["position"])).bytes("w") == DATA
        flip(one, NEAR)
        async with tb.aconnect(f"tb+tcp://{gate.control}") as bus:
            art = await bus.artifact(id=artifact)
            assert bytes(await art.tensor("w", framework="numpy")) == DATA
        assert await quarantines(first, 1) == [("w1", "reader", ["w"])]
        await eventually(first, artifact, lambda info: holders(info) == ["w1", "w2"] and not info["quarantined"])


async def test_without_another_copy_reading_says_corrupt_until_somebody_puts_it_again(start_worker: Start) -> None:
    one, two = start_worker(id="w1", host_id="h1"), start_worker(id="w2", host_id="h2")
    async with await Raw.unix(one.socket) as first, await Raw.unix(two.socket) as second:
        taken = await first.put({"w": DATA}, key="k")
        artifact = taken["artifact"]["artifact"]
        flip(one, NEAR)
        asked = {"id": "v1", "operation": "verify", "artifact": artifact, "worker": "w1"}
        await first.call("op_submit", **asked)
        info = await eventually(second, artifact, lambda info: bool(info["quarantined"]))
        assert (holders(info), info["live"]) == ([], True)
        assert [(mark["worker"], mark["cause"]) for mark in info["quarantined"]] == [("w1", "verify")]
        for raw in (first, second):
            with pytest.raises(CorruptError, match=r"no right copy left.*worker w1 \(dram"):
                await raw.open(artifact)
            with pytest.raises(CorruptError, match="no right copy left"):
                await raw.call("locate", artifact=artifact)
        again = await second.put({"w": DATA})
        assert again["artifact"]["artifact"] == artifact
        assert (await first.open(artifact, at_least=again["position"])).bytes("w") == DATA
        info = await eventually(first, artifact, lambda info: holders(info) == ["w1", "w2"])
        assert info["quarantined"] == []


async def test_what_somebody_says_gives_up_no_right_copy(start_worker: Start, nats: Nats) -> None:
    one = start_worker(id="w1", host_id="h1")
    async with await Raw.unix(one.socket) as first:
        taken = await first.put({"w": DATA})
        artifact = taken["artifact"]["artifact"]
        bus = await NatsBus.connect(nats.url, subjects=Subjects(nats.prefix), name="liar")
        try:
            question = json.dumps({"tenant": DEFAULT, "artifact": artifact}).encode()
            answers = [await bus.ask(bus.subjects.rpc("check.w1"), question, deadline=Deadline(10)) for _ in range(3)]
        finally:
            await bus.close()
        assert json.loads(answers[0]) == {"looks": True}
        async with Deadline(20, what="its look").scope():
            while "right here" not in one.text:
                await asyncio.sleep(0.02)
        assert holders(await first.resolve(artifact)) == ["w1"]
        assert await quarantines(first) == []
        assert (await first.open(artifact)).bytes("w") == DATA


async def test_bytes_that_were_spilled_wrong_are_not_what_heals(start_worker: Start) -> None:
    """The file's checksums fit what was written; only the digests tell."""
    one = start_worker(id="w1", host_id="h1", pool_bytes="64MiB", disk_bytes="256MiB")
    two = start_worker(id="w2", host_id="h2")
    async with await Raw.unix(one.socket) as first, await Raw.unix(two.socket) as second:
        taken = await first.put({"w": DATA}, key="k")
        artifact = taken["artifact"]["artifact"]
        assert (await second.open(artifact, at_least=taken["position"])).bytes("w") == DATA
        flip(one, NEAR)
        await first.call("persist", artifact=artifact)
        await first.call("op_submit", id="v1", operation="verify", artifact=artifact, worker="w1")
        assert [cause for _, cause, _ in await quarantines(first, 2)] == ["verify", "spill"]
        right = ["w1", "w1", "w2"]
        await eventually(first, artifact, lambda info: holders(info) == right and not info["quarantined"])
        assert (await first.open(artifact)).bytes("w") == DATA
