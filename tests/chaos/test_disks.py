"""Full disks, of the store, the archive and the bus: said in words, nothing purged meanwhile, and room mends it."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path

import pytest

from tensorbus.bus import EmbeddedServer
from tensorbus.errors import DeadlineExceededError, OutOfSpaceError, TensorbusError, UnavailableError
from tests.chaos.conftest import Field, bodies
from tests.chaos.load import Load, in_step
from tests.chaos.stores import BUSY, store_of, until_store, whole
from tests.integration.workers.raw import Raw
from tests.sizes import SIZES

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(SIZES.timeout_s)]
STORE = "gateway,store"
LEFT = 8192
"""Bytes that stay free on a full disk."""


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[None]:
    """A file system of its own for a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True)
    if made.returncode != 0:
        pytest.skip("mounting needs root")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@contextmanager
def full(folder: Path) -> Iterator[None]:
    """No room on a folder's disk while the context is open."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as hole:
        hole.write(bytes(max(shutil.disk_usage(folder).free - LEFT, 0)))
    try:
        yield
    finally:
        filler.unlink()


@pytest.mark.parametrize(("folder", "size"), [("store", "32M"), ("archive", "2M")])
async def test_a_full_disk_of_the_store_is_said_purges_nothing_and_room_mends_it(
    field: Field, folder: str, size: str
) -> None:
    field.configure(**BUSY)
    with small_disk(field.home / folder, size):
        worker, store = field.worker(id="w1"), field.worker(STORE, id="s1")
        async with AsyncExitStack() as stack:
            raw, keeping = [await stack.enter_async_context(await Raw.unix(each.socket)) for each in (worker, store)]
            load = Load([raw], kept=20)
            async with load.running():
                for number in range(SIZES.full_disks):
                    purged = (await store_of(keeping))["purged"]
                    await until_store(keeping, "a purge", keeps_log=True, purged=purged + 1)
                    with full(field.home / folder):
                        said = await until_store(keeping, "the trouble", trouble_kind="out_of_space")
                        assert store.text.count("error   tensorbus.workers") == number + 1
                        await load.more(100)
                        await asyncio.sleep(2 * BUSY["purge_delay_s"])
                        now = await store_of(keeping)
                        assert now["archived"] == said["archived"]
                        assert now["purged"] <= said["archived"]
                    await until_store(keeping, "the recovery", purged=said["archived"] + 1, trouble=False)
            await in_step([raw, keeping])
            await load.check(raw)
            await until_store(keeping, "the rows", position=load.position)
        store.kill9()
        await whole(field, "s1", at_least=load.position)


@pytest.mark.soak
async def test_a_full_disk_of_the_bus_is_said_and_room_mends_workers_and_store(home: Path) -> None:
    with small_disk(home / "nats", "64M"), EmbeddedServer(home / "nats") as server:
        field = Field(home, server)
        try:
            await full_bus(field)
        finally:
            field.processes.close()


async def full_bus(field: Field) -> None:
    field.configure(**BUSY)
    worker, store = field.worker(id="w1"), field.worker(STORE, id="s1")
    async with AsyncExitStack() as stack:
        raw, keeping = [await stack.enter_async_context(await Raw.unix(each.socket)) for each in (worker, store)]
        load = Load([raw], kept=20)
        async with load.running():
            await until_store(keeping, "a purge", purged=1)
        with full(field.server.home):
            refused = await until_refused(raw)
        # Who meets the full disk first is told so; afterwards the server answers nobody until it is started again.
        assert isinstance(refused, OutOfSpaceError | DeadlineExceededError | UnavailableError), refused
        field.kill_bus()
        await asyncio.to_thread(field.server.start)
        purged = (await store_of(keeping))["purged"]
        async with load.running():
            await until_store(keeping, "the recovery", purged=purged + 1, trouble=False)
        await in_step([raw, keeping])
        await load.check(raw)
        await until_store(keeping, "the rows", position=load.position)
        assert await bodies(keeping, "SessionEnded") == []
    store.kill9()
    await whole(field, "s1", at_least=load.position)


async def until_refused(raw: Raw) -> TensorbusError:
    n = 0
    while True:
        try:
            await raw.put({"w": b"too much"}, key=f"full/{n}" + "k" * 900, timeout_s=5)
        except TensorbusError as error:
            return error
        n += 1
