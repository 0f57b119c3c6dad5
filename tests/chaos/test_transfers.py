"""Bytes between workers' processes that are killed, stopped, corrupted or strangers: right bytes, or a typed error."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

import tensorbus as tb
from tensorbus.clock import Deadline
from tensorbus.errors import CorruptError, DeniedError, UnavailableError
from tensorbus.testing._certificates import make_certificates
from tensorbus.testing._processes import Program, WorkerProgram
from tensorbus.transport import BulkClient
from tests.chaos.conftest import Field, fds
from tests.integration.workers.raw import Raw, flip, held_by, until
from tests.sizes import SIZES

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(SIZES.timeout_s)]
Start = Callable[..., WorkerProgram]
MIB = 1 << 20
BIG = {"pool_bytes": "512MiB"}
DATA = random.Random(1).randbytes(16 * MIB) * 10


@pytest.fixture
def start_worker(field: Field) -> Start:
    return field.worker


def other_fds(program: Program) -> int:
    """Descriptors but those of memory, of which the pool keeps free segments for their next use."""
    links = []
    for path in Path(f"/proc/{program.pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            links.append(os.readlink(path))
    return sum("memfd:" not in link for link in links)


def resident_bytes(program: Program) -> int:
    """Private memory; that of the pool's segments is shared and counted by the pool."""
    fields = Path(f"/proc/{program.pid}/statm").read_text().split()
    return (int(fields[1]) - int(fields[2])) * os.sysconf("SC_PAGE_SIZE")


async def begun(raw: Raw, fetching: asyncio.Task[object]) -> None:
    """Wait until a worker takes bytes in."""
    while (await raw.stats())["pool"]["busy_bytes"] == 0 and not fetching.done():
        await asyncio.sleep(0.001)


async def test_a_source_that_stops_within_a_fetch_is_replaced_by_another(start_worker: Start) -> None:
    one, two = start_worker(id="w1", host_id="h1", **BIG), start_worker(id="w2", host_id="h2", **BIG)
    three = start_worker(id="w3", host_id="h3", **BIG)
    async with (
        await Raw.unix(one.socket) as first,
        await Raw.unix(two.socket) as second,
        await Raw.unix(three.socket) as third,
    ):
        taken = await first.put({"w": DATA}, key="k")
        artifact = taken["artifact"]["artifact"]
        await second.open(artifact, at_least=taken["position"])
        await held_by(third, artifact, "w1", "w2")
        fetching = asyncio.ensure_future(third.open(artifact, timeout_s=60))
        await begun(third, fetching)
        one.pause()
        opened = await fetching
        one.resume()
        assert opened.bytes("w") == DATA


async def test_a_reader_that_is_killed_within_a_fetch_leaves_nothing_at_its_source(start_worker: Start) -> None:
    source = start_worker(id="w1", host_id="h1", **BIG)
    async with await Raw.unix(source.socket) as here:
        taken = await here.put({"w": DATA}, key="k")
        before = fds(source)
        for number in range(SIZES.full_disks + 1):
            reader = start_worker(id=f"r{number}", host_id=f"far{number}", **BIG)
            async with await Raw.unix(reader.socket) as there:
                fetching = asyncio.ensure_future(there.open(taken["artifact"]["artifact"], timeout_s=60))
                await begun(there, fetching)
                reader.kill9()
                with pytest.raises((UnavailableError, ConnectionError)):
                    (await fetching, await there.stats())
        await until(lambda: fds(source) <= before, "the source's descriptors")
        assert (await here.open(taken["artifact"]["artifact"])).bytes("w") == DATA


async def test_many_transfers_leave_descriptors_and_memory_as_they_were(start_worker: Start) -> None:
    one, two = start_worker(id="w1", host_id="h1"), start_worker(id="w2", host_id="h2")
    async with await Raw.unix(one.socket) as here, await Raw.unix(two.socket) as there:

        async def turn(number: int) -> None:
            data = random.Random(number).randbytes(MIB)
            taken = await here.put({"w": data})
            artifact = taken["artifact"]["artifact"]
            opened = await there.open(artifact, at_least=taken["position"])
            assert opened.bytes("w") == data
            del opened
            await here.call("destroy", artifact=artifact)

        for number in range(20):
            await turn(number)
        before = [(other_fds(worker), resident_bytes(worker)) for worker in (one, two)]
        for number in range(SIZES.transfers):
            await turn(100 + number)
        for worker, (descriptors, nbytes) in zip((one, two), before, strict=True):
            await until(lambda worker=worker, most=descriptors: other_fds(worker) <= most + 4, "the descriptors")
            assert resident_bytes(worker) < nbytes + 32 * MIB


async def test_a_replica_that_changed_in_memory_is_never_handed_on(start_worker: Start) -> None:
    data = random.Random(2).randbytes(12 * MIB)
    one, two = start_worker(id="w1", host_id="h1"), start_worker(id="w2", host_id="h2")
    three, four = start_worker(id="w3", host_id="h3"), start_worker(id="w4", host_id="h4")
    async with (
        await Raw.unix(one.socket) as first,
        await Raw.unix(two.socket) as second,
        await Raw.unix(three.socket) as third,
        await Raw.unix(four.socket) as fourth,
    ):
        taken = await first.put({"w": data}, key="k")
        artifact = taken["artifact"]["artifact"]
        position = taken["position"]
        assert (await second.open(artifact, at_least=position)).bytes("w") == data
        flip(one, data[5 * MIB : 5 * MIB + 64])
        opened = await third.open(artifact, at_least=position)
        assert opened.bytes("w") == data  # w1 is asked first, and was found out
        async with Deadline(20, what="w1's healing").scope():
            while len((await third.resolve(artifact))["replicas"]) < 3:
                await asyncio.sleep(0.02)
        for worker in (one, two, three):
            flip(worker, data[5 * MIB : 5 * MIB + 64])
        with pytest.raises(CorruptError):
            await fourth.open(artifact, at_least=position)


async def test_a_worker_with_two_addresses_is_read_from_both(start_worker: Start) -> None:
    one = start_worker(id="w1", host_id="h1", data_host="127.0.0.1,127.0.0.2", **BIG)
    two = start_worker(id="w2", host_id="h2", data_host="127.0.0.1,127.0.0.2", data_connections=2, **BIG)
    assert [text.rpartition(":")[0] for text in one.data.split(",")] == ["127.0.0.1", "127.0.0.2"]
    async with await Raw.unix(one.socket) as here, await Raw.unix(two.socket) as there:
        taken = await here.put({"w": DATA}, key="k")
        opened = await there.open(taken["artifact"]["artifact"], at_least=taken["position"])
        assert opened.bytes("w") == DATA


@pytest.mark.parametrize("verify", ["off", "blocks", "digests"])
async def test_how_bytes_are_checked_is_a_setting(start_worker: Start, verify: str) -> None:
    one = start_worker(id="w1", host_id="h1")
    two = start_worker(id="w2", host_id="h2", data_verify=verify)
    data = random.Random(3).randbytes(9 * MIB)
    async with await Raw.unix(one.socket) as here, await Raw.unix(two.socket) as there:
        taken = await here.put({"w": data}, key="k")
        flip(one, data[MIB : MIB + 64])  # before anybody took a checksum of it
        opening = there.open(taken["artifact"]["artifact"], at_least=taken["position"])
        if verify == "digests":
            with pytest.raises(CorruptError):
                await opening
        else:
            assert not (await opening).right()


async def test_bytes_go_over_tls_where_the_cluster_asks_for_it(
    start_worker: Start, field: Field, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = make_certificates(tmp_path)
    files = {"data_tls_cert": found.server_cert, "data_tls_key": found.server_key, "data_tls_ca": found.ca}
    one = start_worker(id="w1", host_id="h1", **files)
    two = start_worker(id="w2", host_id="h2", **files)
    start_worker("gateway", id="g1", host_id="h1", **files)
    plain = start_worker(id="w3", host_id="h3")
    data = random.Random(4).randbytes(9 * MIB)
    async with (
        await Raw.unix(one.socket) as here,
        await Raw.unix(two.socket) as there,
        await Raw.unix(plain.socket) as stranger,
    ):
        taken = await here.put({"w": data}, key="k")
        artifact, position = taken["artifact"]["artifact"], taken["position"]
        assert (await there.open(artifact, at_least=position)).bytes("w") == data
        with pytest.raises(UnavailableError, match="TLS"):
            await stranger.open(artifact, at_least=position)
    host, _, port = one.data.rpartition(":")
    with pytest.raises(DeniedError):
        await asyncio.to_thread(BulkClient.connect, host, int(port), deadline=Deadline(10))
    async with tb.aconnect(home=field.home, host_id="elsewhere") as bus:
        with pytest.raises(DeniedError, match="TLS"):
            await (await bus.artifact("k")).tensor("w")
    for name, path in zip(files, (found.client_cert, found.client_key, found.ca), strict=True):
        monkeypatch.setenv(f"TENSORBUS_{name.upper()}", str(path))
    async with tb.aconnect(home=field.home, host_id="elsewhere") as bus:
        art = await bus.artifact("k")
        assert bytes(await art.tensor("w", framework="numpy")) == data
        assert art.transfer is not None
        assert (art.transfer.path, sum(art.transfer.sources.values())) == ("tcp", len(data))
