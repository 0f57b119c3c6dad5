"""Buses, handles and processes that end, and work that is given up: in order, in words, and without a trace."""

from __future__ import annotations

import asyncio
import copy
import gc
import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import tensorbus as tb
from tensorbus.sdk import _fill
from tensorbus.testing._processes import wait_until
from tests.integration.sdk.conftest import HOST

pytestmark = pytest.mark.integration


@pytest.fixture
def run(place: Path, tenant: str) -> object:
    """Runs a program against the home; gives its exit code and all that it wrote."""
    env = {**os.environ, "TENSORBUS_HOME": str(place), "TENSORBUS_HOST_ID": HOST, "TENSORBUS_TENANT": tenant}

    def program(code: str, *options: str) -> tuple[int, str]:
        head = "import tensorbus as tb, torch, threading, asyncio, atexit, os\nX = torch.zeros(3_000_000)\n"
        command = [sys.executable, *options, "-c", head + code]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100)
        return done.returncode, done.stdout + done.stderr

    return program


QUIET = {
    "a thread that is no daemon, when the main one has ended": """
bus = tb.connect()
def late():
    threading.main_thread().join()
    for i in range(3): bus.put({'x': X + i}).destroy()
    bus.close(); print('done')
threading.Thread(target=late).start()
""",
    "an exit handler": """
bus = tb.connect()
def late(): bus.put({'x': X}).destroy(); bus.close(); print('done')
atexit.register(late)
""",
    "an orderly end with everything held": """
with tb.connect() as bus:
    a = bus.register({'x': torch.ones(3)}, copy=True)
    p = a.pin(); e = bus.empty(5)
    b = bus.register(bus.empty(5))
print('done')
""",
    "a pin whose bus is closed in its block": """
bus = tb.connect(); a = bus.put({'x': torch.ones(3)})
with a.pin(): bus.close()
print('done')
""",
}


@pytest.mark.parametrize("case", QUIET)
def test_a_process_ends_quietly(run: object, case: str) -> None:
    assert run(QUIET[case], "-W", "error") == (0, "done\n")  # type: ignore[operator]


def test_a_pin_ends_with_a_bus_that_is_closed_in_its_block(bus: tb.Bus, place: Path, tenant: str) -> None:
    art = bus.put({"x": torch.ones(3)})
    with tb.connect(home=place, host_id=HOST, tenant=tenant) as other:
        mine = other.artifact(art.id)
        with mine.pin():
            assert len(art.info().leases) == 1
            other.close()
    wait_until(lambda: not art.info().leases, what="the end of the pin")


def test_a_file_that_is_cut_short_while_it_is_put(run: object, tmp_path: Path) -> None:
    file = tmp_path / "big.safetensors"
    save_file({f"t{number}": torch.ones(1_000_000) for number in range(2)}, file)
    code = f"""
from tensorbus.sdk import _fill
_fill.PIECE_BYTES, _fill.default_threads = 1 << 20, lambda: 1
with tb.connect() as bus:
    try: bus.put({str(file)!r}, progress=lambda done, total: os.truncate({str(file)!r}, 4096))
    except tb.CorruptError as exc: print(exc)
"""
    rc, said = run(code)  # type: ignore[operator]
    assert rc == 0, said
    assert "big.safetensors: it was cut short" in said


def test_a_file_is_put_as_it_is(bus: tb.Bus, place: Path, tenant: str, tmp_path: Path) -> None:
    content = {f"t{number}": torch.arange(number * 300_003, dtype=torch.int32) for number in range(5)}
    save_file(content, tmp_path / "a.safetensors")
    art = bus.put(tmp_path / "a.safetensors")
    assert art.id == bus.put(content).id
    assert all(torch.equal(art[name], tensor) for name, tensor in content.items())
    with tb.connect(home=place, host_id="elsewhere", tenant=tenant) as far:
        assert far.put(tmp_path / "a.safetensors").id == art.id


async def test_a_put_that_is_given_up_ends_soon_reports_nothing_and_holds_nothing(
    abus: tb.AsyncBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_fill, "PIECE_BYTES", 1 << 20)
    monkeypatch.setattr(_fill, "_COPY_BYTES", 1 << 20)
    monkeypatch.setattr(_fill, "default_threads", lambda: 1)
    reported: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: reported.append(context))
    busy = (await abus.stats())["pool"]["busy_bytes"]
    done: list[int] = []
    gate = threading.Event()

    def progress(now: int, total: int) -> None:
        done.append(now)
        gate.wait(10)

    tensor = torch.zeros(16 << 20, dtype=torch.uint8)
    putting = asyncio.ensure_future(abus.put({"x": tensor}, progress=progress))
    async with asyncio.timeout(10):
        while not done:
            await asyncio.sleep(0.001)
    putting.cancel()
    await asyncio.sleep(0)
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await putting
    with pytest.raises(tb.DeadlineExceededError):
        await abus.put({"x": tensor + 1}, timeout=1e-6)
    assert done[-1] < tensor.nbytes
    del putting
    gc.collect()
    await asyncio.sleep(0)
    assert reported == []
    async with asyncio.timeout(10):
        while (await abus.stats())["pool"]["busy_bytes"] > busy:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("op", ["empty", "pin"])
def test_what_is_given_up_is_not_held(bus: tb.Bus, op: str) -> None:
    art = bus.put({"x": torch.ones(10)})
    busy = bus.stats()["pool"]["busy_bytes"]
    for number in range(40):
        try:
            if op == "empty":
                bus.empty(2000, timeout=0.0003 + number % 10 * 0.0003)
            else:
                art.pin(timeout=0.0005 + number % 10 * 0.0004).release()
        except tb.DeadlineExceededError:
            pass
    gc.collect()
    wait_until(lambda: bus.stats()["pool"]["busy_bytes"] == busy, what="the memory")
    wait_until(lambda: not art.info().leases, what="the pins")


def test_a_version_that_is_destroyed_while_it_waits_is_not_handed_out(bus: tb.Bus) -> None:
    arts = [bus.publish("s", {"x": torch.full((2,), float(number))}) for number in range(4)]
    versions = bus.subscribe("s", start="earliest", timeout=20)
    assert next(versions).version == 1
    position = arts[1].destroy()
    bus.publish("s", arts[0])
    assert bus.version("s", 5, at_least=position)
    wait_until(lambda: versions._subscription._behind or versions._subscription._known == 5, what="the news")
    assert [next(versions).version for _ in range(3)] == [3, 4, 5]
    assert versions.gone == 1


def test_the_size_of_a_view_is_its_own(bus: tb.Bus, place: Path, tenant: str) -> None:
    art = bus.put({"x": torch.zeros(100), "y": torch.zeros(900)})
    view = art.view(names=["x"])
    view.define()
    again = pickle.loads(pickle.dumps(view))
    found = bus.artifact(view.id)
    assert str(art.nbytes) not in repr(found)
    assert [one.nbytes for one in (view, again, found, pickle.loads(pickle.dumps(found)))] == [400] * 4
    assert "400 bytes" in repr(again)
    again.bus.close()


async def test_the_size_of_a_view_is_known_once_its_table_was_read(abus: tb.AsyncBus) -> None:
    view = await (await abus.put({"x": torch.zeros(100), "y": torch.zeros(900)})).view(names=["x"])
    assert view.nbytes == 400
    await view.define()
    found = await abus.artifact(view.id)
    with pytest.raises(tb.InvalidArgumentError, match="tensor_meta"):
        _ = found.nbytes
    await found.tensor_meta()
    assert found.nbytes == 400


def test_a_copied_handle_is_of_the_same_bus(bus: tb.Bus) -> None:
    art = bus.put({"x": torch.arange(3)}, key="k")
    for other in (copy.copy(art), copy.deepcopy(art), copy.copy(art.view(slices={"x": 0}))):
        assert other.bus is bus
        assert other.base_id == art.id
        assert other["x"].sum() in (0, 3)
    lent = bus.register({"x": torch.arange(3)}, copy=True)
    twin = copy.copy(lent)
    assert twin.lease is None
    lent.release()


def test_save_and_into_give_the_artifacts_bytes_not_what_was_written_here(bus: tb.Bus, tmp_path: Path) -> None:
    content = {"a": torch.arange(4.0), "b": torch.ones(2, 3)}
    art = bus.put(content)
    mapped = art.tensor_dict()
    mapped["a"][0] = 99
    art.view(slices={"b": 0})["b"][0] = 99
    into = {name: torch.zeros_like(tensor) for name, tensor in content.items()}
    art.tensor_dict(into=into)
    assert all(torch.equal(into[name], tensor) for name, tensor in content.items())
    saved = load_file(art.save(tmp_path))
    assert all(torch.equal(saved[name], tensor) for name, tensor in content.items())
    assert mapped["a"][0] == 99
    row = art.view(slices={"b": 0})
    assert row.tensor_dict(into={"a": torch.zeros(4), "b": torch.zeros(3)})["b"].tolist() == [1, 1, 1]
    art.destroy()
    with pytest.raises(tb.CorruptError, match="'a' of .* cannot be written out: this process may have changed"):
        art.save(tmp_path)
    mapped["a"][0] = 0
    with pytest.raises(tb.CorruptError, match="'b'"):
        art.save(tmp_path)
    art["b"][0, 0] = 1
    art.save(tmp_path)  # the digests say that it is as it was


def test_a_gateways_caller_saves_the_artifacts_bytes_too(bus: tb.Bus, place: Path, tenant: str, tmp_path: Path) -> None:
    art = bus.put({"a": torch.arange(4.0)})
    with tb.connect(home=place, host_id="elsewhere", tenant=tenant) as far:
        came = far.artifact(art.id)
        came["a"][0] = 99
        assert load_file(came.save(tmp_path))["a"].tolist() == [0, 1, 2, 3]


def test_an_async_bus_is_closed_on_its_own_loop(place: Path, tenant: str) -> None:
    async def connected() -> tb.AsyncBus:
        return await tb.aconnect(home=place, host_id=HOST, tenant=tenant)

    with asyncio.Runner() as runner:
        bus = runner.run(connected())
        errors: list[BaseException] = []

        def elsewhere() -> None:
            try:
                asyncio.run(bus.close())
            except BaseException as exc:
                errors.append(exc)

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert isinstance(errors[0], tb.InvalidArgumentError)
        assert "another event loop" in str(errors[0])
        assert not bus.closed
        runner.run(bus.close())
        runner.run(bus.close())


def test_destroying_twice_is_no_error(bus: tb.Bus) -> None:
    art = bus.put({"x": torch.arange(3)})
    first, again = art.destroy(), art.destroy()
    assert again["TB"] >= first["TB"]
    assert not art.exists()
