"""What `doctor` says of the paths that bytes take from here."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tensorbus.cli._path_checks import check_paths
from tensorbus.cli._verdict import State, Verdict
from tensorbus.config import Settings
from tensorbus.transport import BulkServer, BulkSink, BulkSource, WorkerCard


class Nobody:
    """Lends nothing."""

    def open_source(self, request: Mapping[str, object]) -> BulkSource:
        raise NotImplementedError

    def open_sink(self, request: Mapping[str, object], nbytes: int) -> BulkSink:
        raise NotImplementedError


def far(data: str) -> dict[str, Any]:
    return {"worker": "w2", "host": "h2", "roles": ["basic"], "data": data}


async def told(check: str, settings: Settings, *alive: dict[str, Any], cards: tuple[WorkerCard, ...] = ()) -> Verdict:
    (verdict,) = [one for one in await check_paths(settings, cards, alive) if one.check == check]
    return verdict


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(home=tmp_path, host_id="h1")


async def test_memory_is_mapped_of_the_worker_with_this_host_id(settings: Settings) -> None:
    card = WorkerCard(
        worker="w1", incarnation="1", pid=1, host_id="h1", roles=("basic",), socket="w1", control="", data=""
    )
    assert await told("shm", settings, cards=(card,)) == Verdict(
        "shm", State.OK, "readers on this host map the memory of w1"
    )
    other = await told("shm", settings, far("127.0.0.1:1"))
    assert (other.state, "--host-id h1" in other.advice) == (State.WARNING, True)
    assert (await told("shm", settings)).state is State.WRONG


async def test_workers_on_other_hosts_are_tried(settings: Settings) -> None:
    assert "not used" in (await told("tcp", settings)).found
    server = BulkServer("127.0.0.1", 0, Nobody())
    try:
        found = await told("tcp", settings, far(server.address))
        assert (found.state, found.found) == (State.OK, "1 workers on other hosts answer in the clear")
    finally:
        server.close()
    silent = await told("tcp", settings, far(""))
    assert (silent.state, silent.found) == (State.WRONG, "w2 on host h2 serves no bytes to other hosts")


async def test_an_address_that_nobody_answers_at_is_explained(settings: Settings) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    found = await told("tcp", settings, far(f"127.0.0.1:{port}"))
    assert found.state is State.WRONG
    assert f"bytes of w2 on host h2 do not come from 127.0.0.1:{port}" in found.found
    assert "set data_host of w2 to an address that other hosts reach" in found.advice
    assert "firewall" in (await told("tcp", settings, far(f"localhost:{port}"))).advice


async def test_one_side_with_tls_is_told_from_nobody_there(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    class Files:
        def context(self, *, server: bool) -> ssl.SSLContext:
            made = ssl.create_default_context()
            made.check_hostname = False
            return made

    monkeypatch.setattr("tensorbus.cli._path_checks.tls_files", lambda _settings: Files())
    server = BulkServer("127.0.0.1", 0, Nobody())
    try:
        found = await told("tcp", settings, far(server.address))
    finally:
        server.close()
    assert found.state is State.WRONG
    assert "data_tls_*" in found.advice


async def test_disk_and_devices_say_why_they_are_not_used(settings: Settings) -> None:
    assert "disk_bytes is 0" in (await told("disk", settings)).found
    used = await told("disk", settings.model_copy(update={"disk_bytes": 1 << 30}))
    assert used.found == f"copies that leave memory go to {settings.home / 'disk'}, up to 1.0 GiB"
    assert "CUDA" in (await told("cuda", settings)).found
