"""Bulk connections at rest: kept for the next transfer from where they lead, which then begins without a greeting."""

from __future__ import annotations

import threading
from typing import Final, TypeAlias

from tensorbus.clock import NS_PER_S, Clock, SystemClock
from tensorbus.transport._bulk_client import BulkClient

REST_S: Final = 60.0
"""So long is a connection kept; shorter than a server's patience with one that asks for nothing."""
KEPT_MAX: Final = 64
KEPT_EACH_MAX: Final = 4

Line: TypeAlias = tuple[tuple[str, int], str | None]
"""Where a connection leads, and the local address it comes from."""


class Lines:
    """Connections that nobody uses now. Safe to use from several threads."""

    def __init__(self, *, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._kept: list[tuple[Line, BulkClient, int]] = []  # the longest at rest first
        self._closed = False

    def take(self, line: Line) -> BulkClient | None:
        """The connection that came to rest last; ``None`` if there is none that still stands."""
        self._end_old()
        while (client := self._pop(line)) is not None:
            if client.standing():
                return client
            client.close()
        return None

    def keep(self, line: Line, client: BulkClient) -> None:
        """Keep a connection that has nothing open and nothing to come; it is closed if there are enough."""
        with self._lock:
            alike = sum(kept == line for kept, _, _ in self._kept)
            if not self._closed and alike < KEPT_EACH_MAX and len(self._kept) < KEPT_MAX:
                self._kept.append((line, client, self._clock.now_ns()))
                return
        client.close()

    def close(self) -> None:
        """Close them all, and each that still comes. Safe to repeat."""
        with self._lock:
            self._closed = True
            kept, self._kept = self._kept, []
        for _, client, _ in kept:
            client.close()

    def _pop(self, line: Line) -> BulkClient | None:
        with self._lock:
            for at in reversed(range(len(self._kept))):
                if self._kept[at][0] == line:
                    return self._kept.pop(at)[1]
        return None

    def _end_old(self) -> None:
        oldest_ns = self._clock.now_ns() - int(REST_S * NS_PER_S)
        with self._lock:
            old = [client for _, client, since_ns in self._kept if since_ns < oldest_ns]
            self._kept = [kept for kept in self._kept if kept[2] >= oldest_ns]
        for client in old:
            client.close()
