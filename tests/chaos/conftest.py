"""The fixtures of the integration tests, for tests that kill, stop and cut off."""

from __future__ import annotations

from tests.integration.conftest import Nats, nats, nats_server, processes, start_worker

__all__ = ["Nats", "nats", "nats_server", "processes", "start_worker"]
