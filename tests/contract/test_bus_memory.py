"""The twin in memory is a bus."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tensorbus.bus import Bus, MemoryBus, MemoryCluster, StreamLimits, provision
from tensorbus.clock import Deadline
from tensorbus.events import Subjects
from tensorbus.testing._bus_contract import BusContract
from tensorbus.testing._pages_contract import PagesContract


class MemoryBackend:
    def __init__(self, *, replicated: bool) -> None:
        self._replicated = replicated
        self._clusters: dict[str, MemoryCluster] = {}
        self.buses: list[MemoryBus] = []

    async def connect(self, *, prefix: str = "tb", limits: StreamLimits | None = None, pending_max: int = 1024) -> Bus:
        made = prefix in self._clusters
        cluster = self._clusters.setdefault(prefix, MemoryCluster(Subjects(prefix), replicated=self._replicated))
        bus = MemoryBus(cluster, pending_max=pending_max)
        self.buses.append(bus)
        if not made:
            await provision(bus, limits=limits, deadline=Deadline(5))
        return bus


class MemoryBacked:
    @pytest.fixture(params=["one server", "three servers"])
    async def backend(self, request: pytest.FixtureRequest) -> AsyncIterator[MemoryBackend]:
        backend = MemoryBackend(replicated=request.param == "three servers")
        yield backend
        for bus in backend.buses:
            await bus.close()


class TestMemoryBus(MemoryBacked, BusContract):
    pass


class TestMemoryPages(MemoryBacked, PagesContract):
    pass
