"""The front doors."""

from __future__ import annotations

import os
from typing import Literal, TypeAlias

from tensorbus.errors import InvalidArgumentError
from tensorbus.sdk._async_bus import AsyncBus
from tensorbus.sdk._bus import Bus
from tensorbus.sdk._pending import Pending
from tensorbus.sdk._place import BusAddress, Place, bus_address, resolve_place

DirectoryMode: TypeAlias = Literal["followed", "full"]


def connect(
    url: str | None = None,
    *,
    home: str | os.PathLike[str] | None = None,
    host_id: str | None = None,
    tenant: str | None = None,
    timeout: float | None = None,
    directory: DirectoryMode = "followed",
) -> Bus:
    """Connect to the worker of this host, or to a gateway. Use it as ``with connect() as bus:``, or close it.

    Args:
        url: A gateway, ``tb+tcp://host:port``; ``TENSORBUS_URL`` when ``None``, else the home's worker.
        home: The directory of the home; ``TENSORBUS_HOME`` when ``None``, else ``~/.local/share/tensorbus``.
        host_id: Which host this process counts to; ``TENSORBUS_HOST_ID`` when ``None``, else the machine's.
        tenant: Whose keys and ids are meant; ``TENSORBUS_TENANT`` when ``None``.
        timeout: Seconds that a call may take when it names none; ``TENSORBUS_TIMEOUT_S`` when ``None``, else 30.
        directory: ``"followed"``: this process keeps up to date what it asked for. ``"full"``: it reads the whole
            directory from the bus (``TENSORBUS_NATS_URL``, else the home's), and finds every name in itself.

    Raises:
        UnavailableError: If nobody is there; it says what to start.
        InvalidArgumentError: If a setting cannot be.
    """
    place, address = _place(url, home, host_id, tenant, timeout, directory)
    bus = Bus(place, full=address)
    try:
        return bus.connect()
    except BaseException:
        bus.close()
        raise


def aconnect(
    url: str | None = None,
    *,
    home: str | os.PathLike[str] | None = None,
    host_id: str | None = None,
    tenant: str | None = None,
    timeout: float | None = None,
    directory: DirectoryMode = "followed",
) -> Pending[AsyncBus]:
    """:func:`connect` for the running event loop: ``async with aconnect() as bus:``, or ``bus = await aconnect()``."""

    async def make() -> AsyncBus:
        place, address = _place(url, home, host_id, tenant, timeout, directory)
        bus = AsyncBus(place, full=address)
        try:
            return await bus.connect()
        except BaseException:
            await bus.close()
            raise

    return Pending(make)


def _place(
    url: str | None,
    home: str | os.PathLike[str] | None,
    host_id: str | None,
    tenant: str | None,
    timeout: float | None,
    directory: str,
) -> tuple[Place, BusAddress | None]:
    if directory not in ("followed", "full"):
        raise InvalidArgumentError(f'directory must be "followed" or "full", not {directory!r:.80}')
    flags = {"url": url, "home": home, "host_id": host_id, "tenant": tenant, "timeout_s": timeout}
    return resolve_place(flags), bus_address(flags) if directory == "full" else None
