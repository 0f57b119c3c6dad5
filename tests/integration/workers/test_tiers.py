"""Memory and disk of real workers: what leaves memory comes back, survives its worker, and is never wrong."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tensorbus as tb
from tensorbus.cli._app import run
from tensorbus.cli._errors import EXIT_CODES
from tensorbus.clock import Deadline
from tensorbus.errors import ConflictError, CorruptError, ErrorKind, NotFoundError, OutOfSpaceError, UnavailableError
from tensorbus.testing._processes import WorkerProgram
from tests.integration.workers.raw import Raw, until

pytestmark = pytest.mark.integration
Start = Callable[..., WorkerProgram]
MIB = 1 << 20
SMALL: dict[str, object] = {"pool_bytes": "16MiB", "disk_bytes": "256MiB"}


def noise(seed: object, nbytes: int) -> bytes:
    return random.Random(str(seed)).randbytes(nbytes)


def tiers(info: dict[str, Any]) -> list[tuple[str, str]]:
    return sorted((replica["worker"], replica["tier"]) for replica in info["replicas"])


async def put(raw: Raw, n: object, *, nbytes: int = 4 * MIB, digest: bool = True, disk: str = "may") -> str:
    taken = await raw.put({"w": noise(n, nbytes)}, digest=digest, key=f"k{n}", disk=disk)
    return str(taken["artifact"]["artifact"])


async def eventually(raw: Raw, ref: str, expected: list[tuple[str, str]]) -> None:
    async with Deadline(20, what=f"{ref} in {expected}").scope():
        while tiers(await raw.resolve(ref)) != expected:
            await asyncio.sleep(0.02)


def spill_files(home: Path, worker: str = "w1") -> list[Path]:
    return sorted((home / "disk" / worker).glob("*.tbs"))


async def test_more_than_memory_holds_is_put_and_all_of_it_is_read(start_worker: Start, home: Path) -> None:
    worker = start_worker(id="w1", **SMALL)
    async with await Raw.unix(worker.socket) as raw:
        artifacts = [await put(raw, n) for n in range(10)]
        assert len(spill_files(home)) >= 6
        for n in [*range(10), 3, 0]:
            opened = await raw.open(artifacts[n])
            assert opened.bytes("w") == noise(n, 4 * MIB)
            del opened
        stats = await raw.stats()
        assert stats["pool"]["busy_bytes"] <= stats["pool"]["budget_bytes"]
        assert stats["disk"]["files"] == len(spill_files(home))
        assert (stats["directory"]["gaps"], stats["directory"]["orphans"]) == (0, 0)
        for n in range(10):
            await raw.call("destroy", artifact=artifacts[n])
        async with Deadline(20, what="the files' end").scope():
            while spill_files(home):
                await asyncio.sleep(0.02)
        assert (await raw.stats())["disk"]["used_bytes"] == 0


async def test_what_must_be_on_disk_survives_its_last_worker(start_worker: Start, home: Path) -> None:
    gate = start_worker("gateway", id="gate")
    worker = start_worker(id="w1", **SMALL)
    async with await Raw.unix(worker.socket) as raw:
        kept = await put(raw, "kept", disk="must")
        later = await put(raw, "later", digest=False, disk="must")
        lost = await put(raw, "lost")
        assert tiers(await raw.resolve("kkept")) == [("w1", "disk"), ("w1", "dram")]
    worker.kill9()
    async with await Raw.unix(gate.socket) as watching:
        await eventually(watching, "kkept", [("w1", "disk")])
    again = start_worker(id="w1", **SMALL)
    async with await Raw.unix(again.socket) as raw:
        opened = await raw.open((await raw.resolve("kkept"))["artifact"])
        assert (opened.path, opened.bytes("w")) == ("disk", noise("kept", 4 * MIB))
        assert opened.right()
        assert (await raw.open(later)).bytes("w") == noise("later", 4 * MIB)
        assert tiers(await raw.resolve("kkept")) == [("w1", "disk"), ("w1", "dram")]
        assert (await raw.resolve("kkept"))["artifact"] == kept
        with pytest.raises(NotFoundError, match="lost"):
            async with Deadline(20, what="the end of what was in memory only").scope():
                while await raw.resolve(lost):
                    await asyncio.sleep(0.02)
    again.kill9()
    async with await Raw.unix(gate.socket) as watching, await Raw.unix(start_worker(id="w2", **SMALL).socket) as other:
        await eventually(watching, "kkept", [("w1", "disk")])
        with pytest.raises(UnavailableError, match="w1"):
            await other.open(kept)
        third = start_worker(id="w1", **SMALL)
        async with await Raw.unix(third.socket) as raw:
            await raw.call("destroy", artifact=kept)
            await until(lambda: len(spill_files(home)) == 1, "the file's end")


async def test_a_file_whose_artifact_ended_while_its_worker_was_away_goes(start_worker: Start, home: Path) -> None:
    gate = start_worker("gateway", id="gate")
    worker = start_worker(id="w1", **SMALL)
    async with await Raw.unix(worker.socket) as raw:
        artifact = await put(raw, 1, disk="must")
        await put(raw, 2, disk="must")
    worker.kill9()
    async with await Raw.unix(gate.socket) as watching:
        await eventually(watching, "k1", [("w1", "disk")])
        await watching.call("destroy", artifact=artifact)
    again = start_worker(id="w1", **SMALL)
    async with await Raw.unix(again.socket) as raw:
        async with Deadline(20, what="the file's end").scope():
            while len(spill_files(home)) != 1:
                await asyncio.sleep(0.02)
        assert (await raw.open((await raw.resolve("k2"))["artifact"])).bytes("w") == noise(2, 4 * MIB)


async def test_a_corrupt_file_is_put_aside_and_healed_from_another_worker(start_worker: Start, home: Path) -> None:
    one = start_worker(id="w1", host_id="h1", **SMALL)
    two = start_worker(id="w2", host_id="h2", pool_bytes="64MiB")
    async with await Raw.unix(one.socket) as raw, await Raw.unix(two.socket) as other:
        artifact = await put(raw, 1, disk="must")
        alone = await put(raw, 2, disk="must")
        await other.open(artifact)
        await raw.call("resolve", ref="k1", at_least=(await other.call("ping"))["position"])
        for path in spill_files(home):
            raw_bytes = bytearray(path.read_bytes())
            raw_bytes[2 * MIB] ^= 1
            path.write_bytes(raw_bytes)
        for n in range(10, 14):  # memory is wanted, and the two leave it: their copies on disk will do
            await put(raw, n)
        assert ("w1", "dram") not in tiers(await raw.resolve("k1"))
        opened = await raw.open(artifact)
        assert (opened.path, opened.bytes("w")) == ("tcp", noise(1, 4 * MIB))
        with pytest.raises(CorruptError, match="no right copy left"):
            await raw.open(alone)
        await eventually(raw, "k1", [("w1", "disk"), ("w1", "dram"), ("w2", "dram")])
        assert len(list((home / "disk" / "w1" / "corrupt").iterdir())) == 2
        found = [e["body"]["cause"] for e in await raw.events() if e["type"] == "ReplicaQuarantined"]
        assert found == ["spill", "spill"]


async def test_pins_readers_and_callers_memory_stay_and_the_error_names_them(start_worker: Start) -> None:
    worker = start_worker(id="w1", **SMALL)
    async with await Raw.unix(worker.socket) as raw:
        pinned, read = await put(raw, "pinned"), await put(raw, "read")
        lease = (await raw.call("pin", artifact=pinned))["lease"]
        opened = await raw.open(read)
        await raw.register({"w": noise("lent", 4 * MIB)}, id="lent")
        with pytest.raises(OutOfSpaceError, match="pinned, read") as caught:
            await put(raw, "big", nbytes=8 * MIB)
        owners = {holder["owner"] for holder in caught.value.details["holders"]}  # type: ignore[attr-defined]
        assert {pinned, read, "lent"} <= owners
        for artifact in (pinned, read):
            with pytest.raises(ConflictError):
                await raw.call("evict", artifact=artifact)
        assert opened.bytes("w") == noise("read", 4 * MIB)
        del opened
        await raw.call("release", lease=lease)
        await put(raw, "big", nbytes=8 * MIB)
        assert (await raw.open(pinned)).bytes("w") == noise("pinned", 4 * MIB)


async def test_a_full_disk_loses_nothing_and_says_so(start_worker: Start) -> None:
    worker = start_worker(id="w1", pool_bytes="16MiB", disk_bytes="9MiB")
    async with await Raw.unix(worker.socket) as raw:
        kept = []
        with pytest.raises(OutOfSpaceError, match="disk_bytes") as caught:
            for n in range(20):
                kept.append(await put(raw, n))
        assert len(kept) == 6
        assert caught.value.details["budget_bytes"] == 16 * MIB
        with pytest.raises(OutOfSpaceError, match="disk_bytes"):
            await put(raw, "must", nbytes=MIB + 1, disk="must")
        with pytest.raises(NotFoundError):
            await raw.resolve("kmust")
        with pytest.raises(OutOfSpaceError):  # both are full: what is on disk needs room in memory to be read
            await raw.open(kept[0])
        await raw.call("destroy", artifact=kept.pop())
        for n, artifact in enumerate(kept):
            assert (await raw.open(artifact)).bytes("w") == noise(n, 4 * MIB)


async def test_what_memory_has_no_room_for_is_read_through(start_worker: Start, home: Path) -> None:
    """Everything in memory is read by somebody: what is on disk, or elsewhere, comes straight to its caller."""
    one = start_worker(id="w1", host_id="h1", pool_bytes="16MiB", disk_bytes="64MiB")
    two = start_worker(id="w2", host_id="h2", pool_bytes="64MiB")
    async with await Raw.unix(one.socket) as raw, await Raw.unix(two.socket) as far:
        spilled = await put(raw, "spilled", disk="must")
        await raw.open(spilled)
        for n in range(4):  # the spilled one leaves memory for these
            await put(raw, n)
        held = [await raw.open((await raw.resolve(f"k{n}"))["artifact"]) for n in range(4)]
        assert tiers(await raw.resolve("kspilled")) == [("w1", "disk")]
        with pytest.raises(OutOfSpaceError):
            await raw.open(spilled)
        elsewhere = await put(far, "far")
        async with tb.aconnect(home=home, host_id="h1") as bus:
            for name, artifact in (("spilled", spilled), ("far", elsewhere)):
                art = await bus.artifact(id=artifact)
                assert bytes(await art.tensor("w", framework="numpy")) == noise(name, 4 * MIB)
                report = art.transfer
                assert report is not None and report.path == "tcp"
                assert report.why == "worker w1 has no room in memory"
        assert (await far.open(spilled)).bytes("w") == noise("spilled", 4 * MIB), "other workers have it too"
        assert tiers(await raw.resolve("kspilled")) == [("w1", "disk"), ("w2", "dram")]
        assert all(opened.bytes("w") == noise(n, 4 * MIB) for n, opened in enumerate(held))


async def test_a_file_that_is_wrong_is_not_read_through(start_worker: Start, home: Path) -> None:
    one = start_worker(id="w1", host_id="h1", pool_bytes="16MiB", disk_bytes="64MiB")
    async with await Raw.unix(one.socket) as raw:
        spilled = await put(raw, "spilled", disk="must")
        for n in range(4):
            await put(raw, n)
        held = [await raw.open((await raw.resolve(f"k{n}"))["artifact"]) for n in range(4)]
        (path,) = [path for path in spill_files(home) if spilled.encode() in path.read_bytes()[:8192]]
        raw_bytes = bytearray(path.read_bytes())
        raw_bytes[2 * MIB] ^= 1
        path.write_bytes(raw_bytes)
        async with tb.aconnect(home=home, host_id="h1") as bus:
            art = await bus.artifact(id=spilled)
            with pytest.raises(CorruptError):
                await art.tensor("w")
        async with Deadline(20, what="its quarantine").scope():
            while not (await raw.resolve("kspilled"))["quarantined"]:
                await asyncio.sleep(0.02)
        del held


async def test_without_a_disk_only_what_another_holds_leaves_memory(start_worker: Start) -> None:
    one = start_worker(id="w1", host_id="h1", pool_bytes="16MiB")
    two = start_worker(id="w2", host_id="h2", pool_bytes="16MiB")
    async with await Raw.unix(one.socket) as here, await Raw.unix(two.socket) as there:
        artifacts = [await put(here, n) for n in range(3)]
        position = (await here.call("ping"))["position"]
        for artifact in artifacts:
            await there.open(artifact, at_least=position)
        own = await put(there, "own", nbytes=8 * MIB)
        assert (await there.open(own)).bytes("w") == noise("own", 8 * MIB)
        assert [tiers(await there.resolve(f"k{n}")) for n in range(3)].count([("w1", "dram")]) >= 1
        # Both want room at once, and each has copies that the other has too: one of each stays.
        await asyncio.gather(put(here, "a", nbytes=8 * MIB), put(there, "b", nbytes=8 * MIB), return_exceptions=True)
        for n, artifact in enumerate(artifacts):  # of who holds it: the other's memory may be full of last copies
            holders = tiers(await there.resolve(artifact))
            raw = here if ("w1", "dram") in holders else there
            assert (await raw.open(artifact)).bytes("w") == noise(n, 4 * MIB)
        with pytest.raises(UnavailableError, match="no disk tier"):
            await here.call("persist", artifact=artifacts[0])


async def test_evict_and_persist_as_asked(start_worker: Start) -> None:
    one = start_worker(id="w1", host_id="h1", **SMALL)
    two = start_worker(id="w2", host_id="h2", **SMALL)
    async with await Raw.unix(one.socket) as here, await Raw.unix(two.socket) as there:
        artifact = await put(here, 1)
        with pytest.raises(ConflictError, match="last one"):
            await here.call("evict", artifact=artifact)
        position = (await here.call("persist", artifact=artifact))["position"]
        await there.resolve("k1", at_least=position)
        await there.call("persist", artifact=artifact)
        await eventually(there, "k1", [("w1", "disk"), ("w1", "dram"), ("w2", "disk"), ("w2", "dram")])
        position = (await here.call("evict", artifact=artifact))["position"]
        assert tiers(await here.resolve("k1", at_least=position)) == [("w2", "disk"), ("w2", "dram")]
        with pytest.raises(NotFoundError, match="holds no copy"):
            await here.call("evict", artifact=artifact)
        assert (await here.open(artifact)).bytes("w") == noise(1, 4 * MIB)


async def test_a_replica_on_disk_serves_other_workers(start_worker: Start) -> None:
    one = start_worker(id="w1", host_id="h1", **SMALL)
    two = start_worker(id="w2", host_id="h2", **SMALL)
    async with await Raw.unix(one.socket) as here, await Raw.unix(two.socket) as there:
        artifact = await put(here, 1)
        for n in range(10, 14):
            await put(here, n)
        position = (await here.call("ping"))["position"]
        assert tiers(await there.resolve("k1", at_least=position)) == [("w1", "disk")]
        assert (await there.open(artifact)).bytes("w") == noise(1, 4 * MIB)


async def test_a_file_that_is_gone_is_no_replica_and_a_new_folder_says_nothing(start_worker: Start, home: Path) -> None:
    worker = start_worker(id="w1", **SMALL)
    async with await Raw.unix(worker.socket) as raw:
        await put(raw, 1, disk="must")
        (first,) = spill_files(home)
        await put(raw, 2, disk="must")
    worker.kill9()
    disk = home / "disk"
    disk.rename(home / "unmounted")
    worker = start_worker(id="w1", **SMALL)
    async with await Raw.unix(worker.socket) as raw:
        await until(lambda: "is its disk mounted" in worker.text, "a word about the disk")
        assert tiers(await raw.resolve("k1")) == [("w1", "disk")]
    worker.kill9()
    for path in sorted(disk.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    disk.rmdir()
    (home / "unmounted").rename(disk)
    first.unlink()
    worker = start_worker("basic,gateway", id="w1", **SMALL)
    async with await Raw.unix(worker.socket) as raw:
        with pytest.raises(NotFoundError):
            async with Deadline(20, what="the end of what is on no disk").scope():
                while await raw.resolve("k1"):
                    await asyncio.sleep(0.02)
        assert (await raw.open((await raw.resolve("k2"))["artifact"])).bytes("w") == noise(2, 4 * MIB)


async def test_workers_that_start_at_once_on_one_folder_have_their_own_files(start_worker: Start, home: Path) -> None:
    shared = {**SMALL, "disk_dir": home / "shared"}
    workers = [start_worker(id=f"w{n}", ready=False, **shared) for n in range(3)]
    for n, worker in enumerate(workers):
        worker.await_ready()
        async with await Raw.unix(worker.socket) as raw:
            await put(raw, n, disk="must")
    for worker in workers:
        worker.kill9()
    workers = [start_worker(id=f"w{n}", ready=False, **shared) for n in range(3)]
    for n, worker in enumerate(workers):
        worker.await_ready()
        async with await Raw.unix(worker.socket) as raw:
            assert (await raw.open((await raw.resolve(f"k{n}"))["artifact"])).bytes("w") == noise(n, 4 * MIB)
            assert (await raw.stats())["disk"]["files"] == 1


def test_by_sdk_and_command_line(start_worker: Start, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    worker = start_worker(id="w1", **SMALL)
    start_worker("basic,gateway", id="w2", host_id="elsewhere", pool_bytes="16MiB")
    data = np.frombuffer(noise("sdk", 2 * MIB), np.uint8)
    with tb.connect(home=home) as bus:
        bus.put({"w": data}, key="must", disk="must")
        bus.put({"w": data[:-1]}, key="may")
        with pytest.raises(tb.InvalidArgumentError, match="disk must be"):
            bus.put({"w": data}, disk="always")  # type: ignore[arg-type]  # the point
        assert {r.tier for r in bus.artifact("must").info().replicas} == {"disk", "dram"}
        assert run(["persist", "may", "--home", str(home), "--json"]) == 0
        assert '"worker": "w1"' in capsys.readouterr().out
        assert run(["evict", "may", "--home", str(home)]) == EXIT_CODES[ErrorKind.CONFLICT]
        assert "last one" in capsys.readouterr().err
        with tb.connect(home=home, host_id="elsewhere") as other:
            assert np.array_equal(other.artifact("may").tensor("w", framework="numpy"), data[:-1])
            other.artifact("may").prefetch("w2")  # its copy is on the log then
        assert run(["evict", "may", "--home", str(home)]) == 0
        assert [r.worker for r in bus.artifact("may").info().replicas] == ["w2"]
    worker.kill9()
    start_worker(id="w1", **SMALL)
    with tb.connect(home=home) as bus:
        assert np.array_equal(bus.artifact("must").tensor("w", framework="numpy"), data)


async def test_a_worker_that_is_killed_while_it_spills_leaves_whole_files(start_worker: Start, home: Path) -> None:
    kept: dict[str, int] = {}
    for round_ in range(3):
        worker = start_worker(id="w1", **SMALL)
        async with await Raw.unix(worker.socket) as raw:
            puts = [asyncio.create_task(put(raw, 10 * round_ + n, disk="must")) for n in range(4)]
            while sum(task.done() for task in puts) <= round_:
                await asyncio.sleep(0.001)
            worker.kill9()
            done = await asyncio.gather(*puts, return_exceptions=True)
        kept |= {one: 10 * round_ + n for n, one in enumerate(done) if isinstance(one, str)}
    worker = start_worker(id="w1", **SMALL)
    async with await Raw.unix(worker.socket) as raw:
        assert len(kept) >= 6
        for artifact, n in kept.items():
            assert (await raw.open(artifact)).bytes("w") == noise(n, 4 * MIB)
        assert not list((home / "disk").rglob("*.tmp"))
        assert not (home / "disk" / "w1" / "corrupt").exists()
