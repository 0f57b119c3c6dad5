"""Buses and handles across threads, forks, pickles and processes."""

from __future__ import annotations

import asyncio
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import tensorbus as tb
from tensorbus.testing._processes import wait_until

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")]

W = torch.arange(32, dtype=torch.float32).reshape(8, 4)


def in_child(work: Callable[[], object]) -> str:
    """What the work gave, or the name of what it raised, in a forked child."""
    readable, writable = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            said = str(work())
        except BaseException as exc:
            said = f"{type(exc).__name__}: {exc}"
        os.write(writable, said.encode())
        os._exit(0)
    os.close(writable)
    with os.fdopen(readable) as said_by_child:
        text = said_by_child.read()
    os.waitpid(pid, 0)
    return text


def test_a_bus_used_after_a_fork_says_so_and_tensors_stay_readable(bus: tb.Bus) -> None:
    art = bus.put({"w": W}, key="k")
    tensor = bus.artifact("k")["w"]
    assert in_child(lambda: bus.artifact("k")).startswith("InvalidArgumentError: this bus was connected before")
    assert in_child(lambda: art.tensor_meta()).startswith("InvalidArgumentError")
    assert in_child(lambda: tensor.sum().item()) == str(W.sum().item())
    assert in_child(lambda: bus.close()) == "None"
    assert torch.equal(bus.artifact("k")["w"], W)


def test_a_forked_child_can_connect_again(bus: tb.Bus, place: Path, tenant: str) -> None:
    bus.put({"w": W}, key="k")

    def work() -> float:
        with tb.connect(home=place, host_id="host-a", tenant=tenant) as mine:
            return float(mine.artifact("k")["w"].sum())

    assert in_child(work) == str(float(W.sum()))


def test_a_child_does_not_keep_its_parents_session_open(bus: tb.Bus, place: Path, tenant: str) -> None:
    """The kernel copies the socket into the child; the parent's end must be seen all the same."""
    mine = tb.connect(home=place, host_id="host-a", tenant=tenant)
    before = bus.stats()["callers"]
    readable, writable = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(writable)
        os.read(readable, 1)
        os._exit(0)
    os.close(readable)
    mine.close()
    wait_until(lambda: bus.stats()["callers"] == before - 1, what="the end of the parent's session")
    os.close(writable)
    os.waitpid(pid, 0)


def test_handles_pickle_by_id(bus: tb.Bus, place: Path, tenant: str) -> None:
    art = bus.put({"w": W}, key="k")
    half = art.view(slices={"w": (slice(0, 4),)})
    copy = pickle.loads(pickle.dumps(half))
    assert copy.id == half.id
    assert torch.equal(copy["w"], W[:4])
    assert copy.bus is pickle.loads(pickle.dumps(art)).bus
    code = "import pickle, sys; print(float(pickle.load(sys.stdin.buffer)['w'].sum()))"
    run = subprocess.run([sys.executable, "-c", code], input=pickle.dumps(half), capture_output=True, timeout=60)
    assert run.stdout.decode().strip() == str(float(W[:4].sum())), run.stderr
    copy.bus.close()


async def test_async_handles_pickle_too(abus: tb.AsyncBus) -> None:
    art = await abus.put({"w": W})
    copy = pickle.loads(pickle.dumps(art))
    assert torch.equal(await copy.tensor("w"), W)
    await copy.bus.close()


def test_threads_share_a_bus(bus: tb.Bus) -> None:
    def work(number: int) -> float:
        bus.put(torch.full((1000,), float(number)), key=f"t{number}")
        return float(bus.artifact(f"t{number}").tensor()[0])

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(work, range(40))) == [float(number) for number in range(40)]


async def test_an_async_bus_belongs_to_one_loop(abus: tb.AsyncBus) -> None:
    def elsewhere() -> None:
        with pytest.raises(tb.InvalidArgumentError, match="another event loop"):
            asyncio.run(abus.stats())

    await asyncio.to_thread(elsewhere)


def test_a_closed_bus_says_so(place: Path) -> None:
    bus = tb.connect(home=place, host_id="host-a")
    bus.close()
    bus.close()
    with pytest.raises(tb.InvalidArgumentError, match="closed"):
        bus.put(W)
    with pytest.raises(tb.InvalidArgumentError, match="closed"):
        bus.artifact("k")


def test_a_dropped_bus_warns_and_ends_its_session(bus: tb.Bus, place: Path) -> None:
    before = bus.stats()["callers"]
    dropped = tb.connect(home=place, host_id="host-a")
    with pytest.warns(ResourceWarning, match="without close"):
        del dropped
    wait_until(lambda: bus.stats()["callers"] == before, what="the end of the dropped session")


async def test_a_dropped_async_bus_warns_and_ends_its_session(abus: tb.AsyncBus, place: Path) -> None:
    before = (await abus.stats())["callers"]
    dropped = await tb.aconnect(home=place, host_id="host-a")
    with pytest.warns(ResourceWarning, match="without close"):
        del dropped
    async with asyncio.timeout(10):
        while (await abus.stats())["callers"] != before:
            await asyncio.sleep(0.01)


def test_without_a_worker_it_says_what_to_start(home: Path, place: Path) -> None:
    with pytest.raises(tb.UnavailableError, match="tensorbus up"):
        tb.connect(home=home)
    with pytest.raises(tb.InvalidArgumentError, match="followed"):
        tb.connect(home=place, directory="part")
    with pytest.raises(tb.InvalidArgumentError, match="TLS"):
        tb.connect("tb+tls://localhost:1")


def test_errors_cross_as_they_are(bus: tb.Bus) -> None:
    with pytest.raises(KeyError):
        bus.artifact("absent")
    with pytest.raises(TimeoutError):
        bus.subscribe("absent", timeout=0.05).next()
    with pytest.raises(ValueError, match="timeout"):
        bus.put(W, timeout=-1)
