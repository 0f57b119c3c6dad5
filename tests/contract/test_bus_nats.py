"""A real NATS server is a bus."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tensorbus.bus import Bus, EmbeddedServer, NatsBus, StreamLimits, provision
from tensorbus.clock import Deadline
from tensorbus.events import Subjects
from tensorbus.testing._bus_contract import BusContract
from tensorbus.testing._pages_contract import PagesContract

pytestmark = pytest.mark.integration


class NatsBackend:
    def __init__(self, server: EmbeddedServer) -> None:
        self._server = server
        self._made: set[str] = set()
        self.buses: list[NatsBus] = []

    async def connect(self, *, prefix: str = "tb", limits: StreamLimits | None = None, pending_max: int = 1024) -> Bus:
        bus = await NatsBus.connect(self._server.url, subjects=Subjects(prefix), pending_max=pending_max)
        self.buses.append(bus)
        if prefix not in self._made:
            self._made.add(prefix)
            await provision(bus, limits=limits, deadline=Deadline(5))
        return bus


class NatsBacked:
    @pytest.fixture
    async def backend(self, home: Path) -> AsyncIterator[NatsBackend]:
        with EmbeddedServer(home / "nats") as server:
            backend = NatsBackend(server)
            yield backend
            for bus in backend.buses:
                await bus.close()


class TestNatsBus(NatsBacked, BusContract):
    pass


class TestNatsPages(NatsBacked, PagesContract):
    pass
