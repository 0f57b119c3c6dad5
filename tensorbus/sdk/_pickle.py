"""Handles that travel between processes, by id and place. A process has one bus per place for them."""

# ruff: noqa: SLF001 - a bus, its handles and their mirrors are one unit; what they share is nobody else's
from __future__ import annotations

import asyncio
import os
import threading
import weakref

from tensorbus.errors import InvalidArgumentError
from tensorbus.model import ViewSpec
from tensorbus.sdk._artifact import AsyncArtifact
from tensorbus.sdk._async_bus import AsyncBus
from tensorbus.sdk._bus import Bus
from tensorbus.sdk._handles import Artifact
from tensorbus.sdk._place import Place
from tensorbus.sdk._records import ArtifactInfo

_lock = threading.Lock()
_buses: dict[Place, Bus] = {}
_async_buses: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Place, AsyncBus]] = weakref.WeakKeyDictionary()


def artifact(
    place: Place, info: ArtifactInfo, position: int, asked: str | None, version: int | None, view: str | None
) -> Artifact:
    """The handle that was pickled. Connects when it is first used."""
    bus = shared_bus(place)
    return Artifact(bus, _handle(bus._bus, info, position, asked, version, view))


def async_artifact(
    place: Place, info: ArtifactInfo, position: int, asked: str | None, version: int | None, view: str | None
) -> AsyncArtifact:
    """The handle that was pickled, on the running loop. Connects when it is first used.

    Raises:
        InvalidArgumentError: If no loop runs.
    """
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError as exc:
        raise InvalidArgumentError("an AsyncArtifact can be unpickled only inside a running event loop") from exc
    with _lock:
        buses = _async_buses.setdefault(loop, {})
        if place not in buses or buses[place].closed:
            buses[place] = AsyncBus(place)
        return _handle(buses[place], info, position, asked, version, view)


def shared_bus(place: Place) -> Bus:
    """This process's own bus for handles of that place; it lives as long as the process."""
    with _lock:
        bus = _buses.get(place)
        if bus is None or bus.closed:  # a forked child finds its parent's closed
            bus = _buses[place] = Bus(place)
            bus._warns = False
        return bus


def _handle(
    bus: AsyncBus, info: ArtifactInfo, position: int, asked: str | None, version: int | None, view: str | None
) -> AsyncArtifact:
    spec = None if view is None else ViewSpec.from_json(view)
    return AsyncArtifact(bus, info, position, asked=asked, version=version, view=spec)


def _renew_lock() -> None:
    global _lock  # another thread of the parent may have held it
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)
