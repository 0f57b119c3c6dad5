"""A home with a worker and a gateway, shared by a module's tests, each of which is a tenant of its own."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from itertools import count
from pathlib import Path

import pytest

import tensorbus as tb
from tests.servers import Server

HOST = "host-a"
_tenants = count(1)


@pytest.fixture(scope="module")
def place(nats_server: Server) -> Iterator[Path]:
    """The home of a worker ``w1`` on host ``host-a`` and of a gateway ``g1``."""
    home = Path(tempfile.mkdtemp(prefix="tb-"))
    with nats_server.processes(home / "test-logs") as owner:
        owner.worker("basic", id="w1", host_id=HOST, home=home)
        owner.worker("gateway", id="g1", host_id=HOST, home=home)
        yield home
    shutil.rmtree(home, ignore_errors=True)


@pytest.fixture
def tenant() -> str:
    return f"tenant-{next(_tenants)}"


@pytest.fixture
def bus(place: Path, tenant: str) -> Iterator[tb.Bus]:
    with tb.connect(home=place, host_id=HOST, tenant=tenant) as found:
        yield found


@pytest.fixture
async def abus(place: Path, tenant: str) -> AsyncIterator[tb.AsyncBus]:
    async with tb.aconnect(home=place, host_id=HOST, tenant=tenant) as found:
        yield found
