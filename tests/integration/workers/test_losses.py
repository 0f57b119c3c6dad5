"""A real server comes back with an older log, or with none: workers say again what they hold, once, and go on."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tensorbus.bus import EmbeddedServer, NatsBus, provision
from tensorbus.clock import Deadline
from tensorbus.errors import NotFoundError, TensorbusError
from tensorbus.events import LogTruncated
from tensorbus.feeds import decode_all
from tensorbus.testing._processes import Processes, WorkerProgram
from tests.integration.workers.raw import Raw, held_by
from tests.integration.workers.test_workers import noise

pytestmark = pytest.mark.integration
REMEMBERED = 1 << 62


@dataclass
class Field:
    """A server that can be set back, and workers on it."""

    server: EmbeddedServer
    processes: Processes
    home: Path

    @property
    def _store(self) -> Path:
        return self.server.home / "jetstream"

    def keep(self) -> Path:
        """A copy of what the server has now."""
        self.server.stop()
        copy = self.home / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(self._store, copy)
        self.server.start()
        return copy

    def set_back(self, copy: Path) -> None:
        """Let the server come back with a copy that was made before."""
        self.server.stop()
        shutil.rmtree(self._store)
        shutil.copytree(copy, self._store)
        self.server.start()

    def wipe(self) -> None:
        """Let the server come back with nothing."""
        self.server.stop()
        shutil.rmtree(self._store)
        self.server.start()

    def worker(self, roles: str, name: str, **options: object) -> WorkerProgram:
        return self.processes.worker(roles, id=name, host_id=f"h-{name}", home=self.home, **options)

    async def truncations(self) -> list[LogTruncated]:
        """What the log says of its own losses."""
        async with self.bus() as bus:
            last = await bus.last_seq(deadline=Deadline(10))
            found: list[LogTruncated] = []
            async with bus.read(bus.subjects.facts, after=0) as reader:
                while reader.position < last:
                    batch = decode_all(await asyncio.wait_for(anext(aiter(reader)), 10))
                    found += [recorded.event for recorded in batch if isinstance(recorded.event, LogTruncated)]
                    if await bus.first_from(bus.subjects.facts, reader.position + 1, deadline=Deadline(10)) is None:
                        break
            return found

    @asynccontextmanager
    async def bus(self) -> AsyncIterator[NatsBus]:
        bus = await NatsBus.connect(self.server.url)
        try:
            yield bus
        finally:
            await bus.close()

    async def make_anew(self) -> None:
        """What an operator does after a loss of everything."""
        async with self.bus() as bus:
            await provision(bus, remembered_seq=1, allow_recreate=True, deadline=Deadline(10))


@pytest.fixture
def field(tmp_path: Path, home: Path) -> Iterator[Field]:
    with EmbeddedServer(tmp_path / "nats") as server:
        processes = Processes(home / "test-logs", nats_url=server.url)
        try:
            yield Field(server, processes, home)
        finally:
            processes.close()


@asynccontextmanager
async def callers(*workers: WorkerProgram) -> AsyncIterator[list[Raw]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(await Raw.unix(worker.socket)) for worker in workers]


async def settled(*raws: Raw, losses: int = 1) -> list[dict[str, Any]]:
    """Wait until all have heard of that many losses, are done with them, and are at one."""
    async with Deadline(60, what="the workers at one again").scope():
        while True:
            found = [(await raw.stats())["directory"] for raw in raws]
            done = all(one["losses"] >= losses and one["settled"] and not one["rebuilding"] for one in found)
            if done and len({(one["position"], one["hash"]) for one in found}) == 1:
                assert not any(one["gaps"] or one["degraded"] for one in found), found
                return found
            await asyncio.sleep(0.1)


async def has(raw: Raw, tensors: dict[str, dict[str, bytes]]) -> None:
    """Everything is there by its key, byte for byte."""
    for key, content in tensors.items():
        record = await raw.resolve(key)
        opened = await raw.open(record["artifact"])
        assert {name: opened.bytes(name) for name in content} == content, key


def some(name: str, count: int) -> dict[str, dict[str, bytes]]:
    return {f"{name}/{n}": {"w": noise((name, n), 10_000), "b": noise((name, n, "b"), 10)} for n in range(count)}


async def put_all(raw: Raw, tensors: dict[str, dict[str, bytes]], **options: Any) -> None:
    for key, content in tensors.items():
        await raw.put(content, key=key, **options)


async def test_a_tail_that_was_lost_is_said_again(field: Field) -> None:
    one, two = field.worker("basic", "w1"), field.worker("basic,gateway", "w2")
    async with callers(one, two) as (here, there):
        before, after, undigested = some("before", 5), some("after", 5), some("later", 2)
        await put_all(here, before)
        copy = field.keep()
        await put_all(here, after)
        await put_all(there, undigested, digest=False)
        record = await here.resolve("after/0")
        await there.open(record["artifact"], at_least=(await here.call("ping"))["position"])
        await here.call("publish", name="s", artifact=record["artifact"])
        second = await here.resolve("after/1")
        await here.call("publish", name="s", artifact=second["artifact"])
        await here.call("bind", key="before/0", artifact=second["artifact"], rebind=True)
        pinned = await here.call("pin", artifact=second["artifact"])
        field.set_back(copy)
        await settled(here, there)
        del before["before/0"]
        await has(here, {**before, **after, **undigested})
        await has(there, after)
        assert (await here.resolve("before/0"))["artifact"] == second["artifact"]
        for number, was in ((1, record), (2, second)):
            found = await there.call("version", name="s", number=number)
            assert found["artifact"]["artifact"] == was["artifact"]
        await held_by(here, "after/0", "w1", "w2")
        assert (await here.call("renew", leases=[pinned["lease"]]))["ended"] == []
        await here.call("release", lease=pinned["lease"])
        await put_all(here, some("new", 3))
        await has(there, some("new", 3))
        assert len(await field.truncations()) == 1


async def test_what_is_on_disk_only_is_said_again_too(field: Field) -> None:
    big = {f"big/{n}": {"w": noise(("big", n), 3 << 20)} for n in range(6)}
    one, two = field.worker("basic", "w1", pool_bytes="8MiB", disk_bytes="64MiB"), field.worker("basic,gateway", "w2")
    async with callers(one, two) as (here, there):
        copy = field.keep()
        await put_all(here, dict(list(big.items())[:3]))
        await put_all(here, dict(list(big.items())[3:]), digest=False, disk="must")
        tiers = [[replica["tier"] for replica in (await here.resolve(key))["replicas"]] for key in big]
        assert tiers.count(["disk"]) >= 3
        field.set_back(copy)
        await settled(here, there)
        await has(here, big)
        await has(there, big)
        assert (await here.stats())["directory"]["orphans"] == 0


async def test_a_log_that_was_made_anew_gets_all_that_is_held(field: Field) -> None:
    one, two = field.worker("basic", "w1"), field.worker("basic,gateway", "w2")
    async with callers(one, two) as (here, there):
        tensors = some("a", 5)
        await put_all(here, tensors)
        await has(there, some("a", 2))
        registered = await here.register({"w": noise(1, 5000)}, key="lent")
        field.wipe()
        one.until("tensorbus bus init --after-loss")
        assert one.alive
        await has(here, some("a", 5))  # from memory
        await field.make_anew()
        await settled(here, there)
        await has(there, tensors)
        assert (await there.resolve("lent"))["artifact"] == registered["artifact"]["artifact"]
        await here.call("release", lease=registered["lease"])
        await put_all(there, some("new", 3))
        await has(here, some("new", 3))
        assert len(await field.truncations()) == 1


async def test_a_worker_that_was_down_records_the_loss(field: Field) -> None:
    one = field.worker("basic,gateway", "w1")
    async with callers(one) as (here,):
        await put_all(here, some("a", 2))
        copy = field.keep()
        await put_all(here, some("b", 2))
        await asyncio.sleep(1.5)  # it keeps its position once a second
    one.kill9()
    field.set_back(copy)
    again = field.worker("basic,gateway", "w1")
    async with callers(again) as (here,):
        async with Deadline(30).scope():
            while not await field.truncations():
                await asyncio.sleep(0.1)
        with pytest.raises(NotFoundError):
            await here.resolve("b/0")
        await put_all(here, some("c", 1))
        assert (await here.stats())["directory"]["gaps"] == 0
        assert len(await field.truncations()) == 1


async def test_two_losses_in_a_row(field: Field) -> None:
    one, two = field.worker("basic", "w1"), field.worker("basic,gateway", "w2")
    async with callers(one, two) as (here, there):
        await put_all(here, some("a", 3))
        copy = field.keep()
        await put_all(here, some("b", 20))
        await put_all(there, some("c", 20))
        field.set_back(copy)
        async with Deadline(30).scope():
            while (await here.stats())["directory"]["losses"] < 1:
                await asyncio.sleep(0.02)
        field.set_back(copy)
        found = await settled(here, there)
        await has(here, {**some("a", 3), **some("b", 20), **some("c", 20)})
        await has(there, {**some("a", 3), **some("b", 20), **some("c", 20)})
        assert len(await field.truncations()) <= max(one["losses"] for one in found)


async def test_a_loss_while_puts_go_on(field: Field) -> None:
    one, two = field.worker("basic", "w1"), field.worker("basic,gateway", "w2")
    async with callers(one, two) as (here, there):
        await put_all(here, some("a", 3))
        copy = field.keep()
        said: dict[str, dict[str, bytes]] = {}
        stop = asyncio.Event()

        async def go_on(raw: Raw, name: str) -> None:
            n = 0
            while not stop.is_set():
                content = {"w": noise((name, n), 2000)}
                try:
                    await raw.put(content, key=f"{name}/{n}", timeout_s=60)
                except TensorbusError:
                    pass
                else:
                    said[f"{name}/{n}"] = content
                n += 1

        async with asyncio.TaskGroup() as group:
            for raw, name in ((here, "x"), (there, "y"), (here, "z")):
                group.create_task(go_on(raw, name))
            await asyncio.sleep(1.0)
            await asyncio.to_thread(field.set_back, copy)
            await asyncio.sleep(3.0)
            stop.set()
        await settled(here, there)
        assert len(said) > 20
        await has(here, said)
        await has(there, said)
        assert len(await field.truncations()) == 1


async def test_the_store_is_made_anew_from_what_the_log_has(field: Field) -> None:
    one = field.worker("basic", "w1")
    busy = {"archive_s": 0.3, "snapshot_facts": 20, "keep_facts": 10, "purge_delay_s": 1.0}
    two = field.worker("gateway,store", "w2", **busy)

    async def figures() -> dict[str, Any]:
        return (await there.stats())["store"]

    async def in_step() -> None:
        async with Deadline(60, what="a store in step with the log").scope():
            while True:
                found, now = await figures(), (await there.stats())["directory"]
                if found["position"] == now["position"] and not found["trouble"] and now["settled"]:
                    return
                await asyncio.sleep(0.1)

    async with callers(one, two) as (here, there):
        await put_all(here, some("a", 30))
        async with Deadline(60, what="a purge").scope():
            while not (await figures())["purged"]:
                await asyncio.sleep(0.1)
        copy = field.keep()
        await put_all(here, some("b", 60))
        async with Deadline(60, what="an archive").scope():
            while (await figures())["archived"] < (await here.call("ping"))["position"] - 40:
                await asyncio.sleep(0.1)
        field.set_back(copy)
        await settled(here, there)
        await in_step()
        await put_all(here, some("c", 30))
        await in_step()
        await has(here, {**some("a", 30), **some("b", 60), **some("c", 30)})
        archived = (await figures())["archived"]
        await put_all(here, some("d", 60))
        async with Deadline(60, what="more in the archive").scope():
            while (await figures())["archived"] <= archived:
                await asyncio.sleep(0.1)
        found = await there.stats()
        assert found["store"]["trouble"] == ""
        assert (found["directory"]["gaps"], found["directory"]["degraded"]) == (0, False)
        assert len(await field.truncations()) == 1
    three = field.worker("gateway", "w3")
    async with callers(one, three) as raws:
        await settled(*raws, losses=0)


async def test_the_homes_own_server_gets_a_new_log_by_itself(tmp_path: Path, home: Path) -> None:
    with EmbeddedServer(tmp_path / "nats") as server:
        home.mkdir(parents=True, exist_ok=True)
        (home / "bus.url").write_text(server.url)
        processes = Processes(home / "test-logs", nats_url=None)
        try:
            field = Field(server, processes, home)
            async with callers(field.worker("basic,gateway", "w1")) as (here,):
                await put_all(here, some("a", 3))
                field.wipe()
                await settled(here)
                await has(here, some("a", 3))
                assert len(await field.truncations()) == 1
        finally:
            processes.close()
