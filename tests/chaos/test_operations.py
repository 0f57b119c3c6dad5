"""Operations whose source is stopped in the middle, whose caller dies, that are cancelled or run out of time."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import tensorbus as tb
from tensorbus.clock import Deadline
from tensorbus.testing._processes import WorkerProgram
from tests.chaos.conftest import Field
from tests.chaos.test_transfers import flip
from tests.sizes import SIZES

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(SIZES.timeout_s)]
MIB = 1 << 20
S = 60.0
TRIES = 5
UNDER_WAY_BYTES_MAX = 32 * MIB
"""What may come yet of a source that is stopped: from the buffers of its sockets."""
DATA = np.frombuffer(random.Random(1).randbytes(16 * MIB) * 10, dtype=np.uint8)


@dataclass
class Stuck:
    """An artifact on ``w1``, of which ``w2`` has brought a part when ``w1`` was stopped."""

    source: WorkerProgram
    target: WorkerProgram
    bus: tb.AsyncBus
    art: tb.AsyncArtifact
    op: tb.AsyncOperation[Any]

    async def busy_bytes(self) -> int:
        return int((await self.bus.stats())["pool"]["busy_bytes"])

    async def freed(self) -> None:
        async with Deadline(S, what="the memory of the copy").scope():
            while await self.busy_bytes():
                await asyncio.sleep(0.01)
        assert [one.worker for one in await self.art.replicas()] == ["w1"]


@asynccontextmanager
async def stuck(field: Field, ask: str, **how: Any) -> AsyncIterator[Stuck]:
    """Have a copy to ``w2`` begun, by itself or by ``w3``, and stop its source within it."""
    big = {"pool_bytes": "512MiB", "session_ttl_s": 60}
    one = field.worker(id="w1", host_id="h1", **big)
    two = field.worker(id="w2", host_id="h2", **big)
    field.worker(id="w3", host_id="h3", **big)
    async with (
        tb.aconnect(home=field.home, host_id="h1") as first,
        tb.aconnect(home=field.home, host_id="h2") as bus,
    ):
        put = await first.put({"w": DATA}, key="k")
        art = await bus.artifact("k", at_least=put.position)
        try:
            for number in range(TRIES):
                op = begun(bus, art, ask, f"op{number}", how)
                if await stopped_within(op, one):
                    yield Stuck(one, two, bus, art, op)
                    return
                await bus.worker("w1").prefetch(art)
                await bus.worker("w2").evict(art)
            pytest.fail("the source was always stopped too late")
        finally:
            one.resume()


def begun(
    bus: tb.AsyncBus, art: tb.AsyncArtifact, ask: str, id: str, how: dict[str, Any]
) -> tb.AsyncOperation[tb.Prefetched] | tb.AsyncOperation[tb.Replicated] | tb.AsyncOperation[tb.Migrated]:
    match ask:
        case "prefetch":
            return bus.worker("w2").prefetch(art, id=id, **how)
        case "replicate":
            return bus.worker("w3").replicate(art, to=["w2"], id=id, **how)
        case _:
            return bus.worker("w3").migrate(art, src="w1", dst="w2", id=id, **how)


async def stopped_within(op: tb.AsyncOperation[Any], source: WorkerProgram) -> bool:
    """Stop a source once the first bytes have come; whether enough are missing then, whatever is on its way still."""
    async with Deadline(S, what="the first bytes").scope():
        while (await op.progress()).nbytes_done == 0:
            await asyncio.sleep(0)
    source.pause()
    progress = await op.progress()
    if progress.nbytes_done + UNDER_WAY_BYTES_MAX < progress.nbytes_total:
        return True
    source.resume()
    await op.settled(timeout=S)
    return False


@pytest.mark.parametrize("ask", ["prefetch", "replicate", "migrate"])
async def test_a_cancel_in_the_middle_frees_what_the_copy_holds_and_is_on_the_log(field: Field, ask: str) -> None:
    async with stuck(field, ask) as found:
        progress = await found.op.progress()
        assert 0 < progress.nbytes_done < progress.nbytes_total == DATA.nbytes
        await found.op.cancel()
        with pytest.raises(tb.CancelledError):
            await found.op.result(S)
        assert (await found.bus.operation(found.op.id).status()).state == "cancelled"
        await found.freed()
        found.source.resume()
        assert (await found.bus.worker("w2").prefetch(found.art).result(S)).path == "tcp"
        assert np.array_equal(await found.art.tensor("w", framework="numpy"), DATA)


@pytest.mark.parametrize("ask", ["prefetch", "replicate"])
async def test_an_operation_that_runs_out_of_its_time_fails_and_frees_what_it_holds(field: Field, ask: str) -> None:
    async with stuck(field, ask, deadline_s=1.0) as found:
        with pytest.raises(tb.DeadlineExceededError, match="within 1.0 s"):
            await found.op.result(S)
        assert (await found.op.status()).state == "failed"
        await found.freed()


async def test_a_reader_who_waits_for_the_same_copy_gets_it_although_the_operation_is_cancelled(field: Field) -> None:
    async with stuck(field, "prefetch") as found:
        reading = asyncio.ensure_future(found.art.tensor("w", framework="numpy", timeout=S))
        await found.bus.stats()  # the worker has the reader's question by now
        await found.op.cancel()
        with pytest.raises(tb.CancelledError):
            await found.op.result(S)
        found.source.resume()
        assert np.array_equal(await reading, DATA)


async def test_an_operation_goes_on_when_its_caller_is_killed(field: Field) -> None:
    for number in ("1", "2"):
        field.worker(id=f"w{number}", host_id=f"h{number}", pool_bytes="512MiB")
    async with tb.aconnect(home=field.home, host_id="h1") as bus:
        art = await bus.put({"w": DATA}, key="k")
        code = (
            "import os, signal, sys, tensorbus as tb\n"
            "bus = tb.connect(home=sys.argv[1], host_id='h1')\n"
            "bus.worker('w2').prefetch('k', id='op')\n"
            "os.kill(os.getpid(), signal.SIGKILL)\n"
        )
        ran = await asyncio.to_thread(subprocess.run, [sys.executable, "-c", code, str(field.home)], timeout=S)
        assert ran.returncode == -9
        assert (await bus.operation("op").result(S)).worker == "w2"
        assert {one.worker for one in await art.replicas()} == {"w1", "w2"}


async def test_the_log_says_when_the_worker_of_an_operation_was_lost(field: Field) -> None:
    async with stuck(field, "prefetch") as found:
        field.worker(id="w4", host_id="h4")
        async with tb.aconnect(home=field.home, host_id="h4") as other:
            found.target.kill9()
            field.worker(id="w2", host_id="h2", session_ttl_s=60)
            with pytest.raises(tb.UnavailableError, match="the session of worker w2 ended") as lost:
                await other.operation(found.op.id).result(S)
            status = await other.operation(found.op.id).status()
            assert (status.state, lost.value.details["ended"]) == ("lost", status.ended)
            cause = await anext(other.events(since=(status.ended or 0) - 1))
            assert (cause.seq, cause.type) == (status.ended, "SessionOpened")


async def test_verify_tells_which_tensors_of_which_copies_are_wrong(field: Field) -> None:
    one = field.worker(id="w1", host_id="h1", disk_bytes="64MiB")
    field.worker(id="w2", host_id="h2")
    data = np.frombuffer(random.Random(2).randbytes(2 * MIB), dtype=np.uint8)
    async with tb.aconnect(home=field.home, host_id="h1") as bus:
        art = await bus.put({"a": data[:MIB], "b": data[MIB:]}, disk="must")
        assert (await art.verify()).tiers == ("dram", "disk")
        await bus.worker("w2").prefetch(art)
        flip(one, data[MIB : MIB + 64].tobytes())
        with pytest.raises(tb.CorruptError, match="worker w1 .dram.") as wrong:
            await art.verify("w1")
        assert wrong.value.details["wrong"] == {"dram": ["b"]}
        (file,) = (field.home / "disk" / "w1").glob("*.tbs")
        with file.open("r+b") as spilled:
            spilled.seek(file.stat().st_size // 2)
            byte = spilled.read(1)
            spilled.seek(-1, 1)
            spilled.write(bytes([byte[0] ^ 1]))
        with pytest.raises(tb.CorruptError, match="worker w1 .disk."):
            await art.verify("w1")
        assert (await art.verify("w2")).tensors == 2
        assert np.array_equal(await art.tensor("b", framework="numpy"), data[MIB:])
