"""The same faults as users of the SDK meet them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from typing import Any

import numpy as np
import pytest

import tensorbus as tb
from tensorbus.testing._processes import Program, WorkerProgram
from tests.chaos.conftest import FENCED_EXIT, Field, bodies, eventually, gone, said
from tests.integration.workers.raw import Raw, until
from tests.sizes import SIZES

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(SIZES.timeout_s)]
HOST = "h1"

HEAD = """
import json, os, signal, sys, time
import numpy as np
import tensorbus as tb
given = json.loads(sys.argv[1])
bus = tb.connect(home=given["home"], host_id=given["host"], timeout=60)
def say(**words): print(json.dumps(words), flush=True)
"""

REGISTER = """
held = []
for n in range(given["count"]):
    memory = bus.empty((64, 64), "f32")
    memory[:] = n
    held.append(bus.register(memory, key=f"{given['seed']}/{n}", lease_s=30))
say(event="registered")
time.sleep(3600)
"""

FORK = """
array = bus.artifact("k").tensor("w", framework="numpy")
want = array.copy()
if os.fork() == 0:
    while not os.path.exists(given["go"]):
        time.sleep(0.01)
    try:
        bus.artifact("k")
        refused = "no"
    except tb.TensorbusError as error:
        refused = str(error)
    same = bool((array == want).all())
    array[:] = 0
    open(given["out"], "w").write(json.dumps({"same": same, "refused": refused}))
    os._exit(0)
say(event="forked")
os.kill(os.getpid(), signal.SIGKILL)
"""

PUT = """
for n in range(given["rounds"]):
    try:
        bus.put({"w": np.full((1000,), n, np.float32)}, key=f"{given['seed']}/{n}")
        art = bus.artifact(f"{given['seed']}/{n}")
        assert (art.tensor("w") == n).all()
    except tb.TensorbusError as error:
        say(event="error", kind=str(error.kind), text=str(error), n=n)
    say(event=f"done {n}")
say(event="end")
"""


def program(field: Field, code: str, **given: object) -> Program:
    words = json.dumps({"home": str(field.home), "host": HOST, **given})
    return field.processes.python(HEAD + code, words, name="sdk")


def worker(field: Field, **options: object) -> WorkerProgram:
    return field.worker(id="w1", host_id=HOST, **options)


def connect(field: Field) -> tb.Bus:
    return tb.connect(home=field.home, host_id=HOST, timeout=60)


async def test_processes_that_are_killed_with_fifty_registrations_leave_nothing(field: Field) -> None:
    async with await Raw.unix(worker(field).socket) as raw:
        for n in range(SIZES.restarts):
            owner = program(field, REGISTER, seed=f"r{n}", count=SIZES.crash_artifacts)
            said(owner, "registered")
            owner.kill9()
            await eventually(raw, "the artifacts' end", "directory", "artifacts", equals=0)
            await eventually(raw, "the memory", "pool", "busy_bytes", equals=0)
            await eventually(raw, "the pins", "pool", "pins", equals=0)
        ends = await bodies(raw, "ArtifactDestroyed")
        assert len(ends) == SIZES.restarts * SIZES.crash_artifacts
        assert {end["reason"] for end in ends} == {"lease_ended"}


async def test_a_forked_child_reads_and_writes_its_own_after_the_parent_is_gone(field: Field) -> None:
    async with await Raw.unix(worker(field, pool_bytes="16MiB").socket) as raw:
        data = np.random.default_rng(1).random((512, 1024), np.float32)
        with connect(field) as bus:
            artifact = await asyncio.to_thread(lambda: bus.put({"w": data}, key="k").id)
        go, out = field.home / "go", field.home / "out"
        parent = program(field, FORK, go=str(go), out=str(out))
        said(parent, "forked")
        await asyncio.to_thread(parent.wait)
        await raw.call("destroy", artifact=artifact)
        for n in range(20):
            taken = await raw.put({"w": bytes([n]) * (3 << 20)})
            await raw.call("destroy", artifact=taken["artifact"]["artifact"])
        assert (await raw.stats())["pool"]["busy_bytes"] == data.nbytes
        go.touch()
        await until(lambda: out.exists() and out.read_text(), "the child's word")
        word: dict[str, Any] = json.loads(out.read_text())
        assert word["same"]
        assert "fork" in word["refused"]
        await eventually(raw, "the memory", "pool", "busy_bytes", equals=0)


async def test_putting_goes_on_by_itself_over_a_bus_that_stands_still_and_one_that_starts_again(field: Field) -> None:
    field.worker("gateway", id="gate")
    async with await Raw.unix(worker(field).socket) as raw:
        putting = program(field, PUT, seed="s", rounds=400)
        said(putting, "done 20")
        field.pause_bus()
        await asyncio.sleep(SIZES.pause_s)
        field.resume_bus()
        said(putting, "done 60")
        field.kill_bus()
        await asyncio.sleep(0.5)
        await asyncio.to_thread(field.server.start)
        said(putting, "end")
        assert '"event": "error"' not in putting.text
        assert await bodies(raw, "SessionEnded") == []
        assert len(await raw.keys()) == 400


async def test_a_caller_finds_the_next_life_of_its_worker_and_what_was_lost_is_said(field: Field) -> None:
    gate = field.worker("gateway", id="gate", host_id="elsewhere")
    first = worker(field)
    with connect(field) as bus:
        data = np.arange(1000, dtype=np.float32)
        await asyncio.to_thread(lambda: bus.put({"w": data}, key="k"))
        array = bus.artifact("k").tensor("w")
        first.kill9()
        worker(field)
        async with await Raw.unix(gate.socket) as watching:
            await gone(watching, "k")
        with pytest.raises(tb.NotFoundError):
            await asyncio.to_thread(bus.artifact, "k")
        assert (np.asarray(array) == data).all()
        await asyncio.to_thread(lambda: bus.put({"w": data}, key="k"))
        assert (np.asarray(bus.artifact("k").tensor("w")) == data).all()


async def test_a_paused_worker_that_is_fenced_tells_its_callers(field: Field) -> None:
    gate = field.worker("gateway", id="gate", host_id="elsewhere")
    first = worker(field)
    with connect(field) as bus:
        await asyncio.to_thread(lambda: bus.put({"w": np.ones(10)}, key="k"))
        first.pause()
        async with await Raw.unix(gate.socket) as watching:
            await gone(watching, "k")
        os.kill(first.pid, signal.SIGCONT)
        assert await asyncio.to_thread(first.wait) == FENCED_EXIT
        with pytest.raises((tb.UnavailableError, tb.FencedError)):
            await asyncio.to_thread(lambda: bus.put({"w": np.ones(10)}, key="k2", timeout=3))
