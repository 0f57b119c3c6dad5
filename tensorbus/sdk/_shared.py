"""The buses of handles that travelled here: one per place and process (or loop), made when asked for."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from tensorbus.errors import InvalidArgumentError
from tensorbus.sdk._place import Place


class Closable(Protocol):
    """What is asked of a bus here."""

    @property
    def closed(self) -> bool: ...


B = TypeVar("B", bound=Closable)


class Shared(Generic[B]):
    """Buses by place, in one process. A child that forks finds its parent's closed, and makes its own.

    Args:
        make: Makes one that connects when it is first used.
    """

    def __init__(self, make: Callable[[Place], B]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._buses: dict[Place, B] = {}
        os.register_at_fork(after_in_child=self._forked)

    def bus(self, place: Place) -> B:
        """The bus for that place; it lives as long as the process."""
        with self._lock:
            found = self._buses.get(place)
            if found is None or found.closed:
                found = self._buses[place] = self._make(place)
            return found

    def _forked(self) -> None:
        self._lock = threading.Lock()  # another thread of the parent may have held it


class SharedPerLoop(Generic[B]):
    """The same for buses that belong to an event loop.

    Args:
        make: Makes one that connects when it is first used.
    """

    def __init__(self, make: Callable[[Place], B]) -> None:
        self._make = make
        self._buses: dict[asyncio.AbstractEventLoop, dict[Place, B]] = {}

    def bus(self, place: Place) -> B:
        """The running loop's bus for that place.

        Raises:
            InvalidArgumentError: If no loop runs.
        """
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError as exc:
            raise InvalidArgumentError("an AsyncArtifact can be unpickled only inside a running event loop") from exc
        for other in [other for other in self._buses if other.is_closed()]:
            del self._buses[other]
        buses = self._buses.setdefault(loop, {})
        found = buses.get(place)
        if found is None or found.closed:
            found = buses[place] = self._make(place)
        return found
