"""What one home asks of another, over its socket on this host or its control address."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from tensorbus import __version__
from tensorbus.clock import Deadline
from tensorbus.errors import UnavailableError
from tensorbus.ids import Incarnation, WorkerId
from tensorbus.transport import Connection, connect_tcp, connect_unix
from tensorbus.workers._page_routes import PageRoutes
from tensorbus.workers._requests import PROTOCOL

NO_TENANT: Final = "homes"
"""Homes speak for nobody."""


class HomePeers:
    """Connections to other homes, each as long as one question takes."""

    def __init__(self, routes: PageRoutes) -> None:
        self._routes = routes

    async def hand_over(
        self, holder: tuple[WorkerId, Incarnation], *, shard: int, token: int, to: tuple[str, str], deadline: Deadline
    ) -> bool:
        """Ask a shard's home to let it go; whether all that it knew is on the stream.

        Raises:
            TensorbusError: If it does not, or cannot be asked.
        """
        async with deadline.scope(), await self._connected(holder, deadline) as connection:
            hello = {"protocol": PROTOCOL, "tenant": NO_TENANT, "pid": os.getpid(), "version": __version__}
            await connection.call("hello", hello, deadline=deadline)
            asked = {"shard": shard, "token": token, "to": list(to)}
            return bool((await connection.call("page_handover", asked, deadline=deadline)).data.get("exact"))

    async def _connected(self, holder: tuple[WorkerId, Incarnation], deadline: Deadline) -> Connection:
        _, _, socket, control, _ = self._routes.home(*holder)
        if socket:
            return Connection(await connect_unix(Path(socket), deadline=deadline))
        host, _, port = control.rpartition(":")
        if not port.isdecimal():
            raise UnavailableError(f"home {holder[0]} has no address", worker=holder[0])
        return Connection(await connect_tcp(host, int(port), deadline=deadline))
