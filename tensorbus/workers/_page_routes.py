"""Where the homes of the shards are, for those who ask them directly."""

from __future__ import annotations

from pathlib import Path

from tensorbus.feeds import LeaseFeed
from tensorbus.ids import Incarnation, WorkerId
from tensorbus.transport import Reply, Request, living_workers
from tensorbus.workers._callers import Caller
from tensorbus.workers._core import Core
from tensorbus.workers._directory_ops import Op

NOBODY = -1


class PageRoutes:
    """Answers ``page_routes`` from the worker's own view of grants and sessions.

    Args:
        home: Its run directory is looked at for the sockets of workers in it.
    """

    def __init__(self, core: Core, leases: LeaseFeed, *, home: Path) -> None:
        self._core = core
        self._place = home
        self._leases = leases
        self._sockets: dict[tuple[str, str], str] = {}

    def table(self) -> dict[str, Op]:
        return {"page_routes": self.page_routes}

    async def page_routes(self, _caller: Caller, _request: Request) -> Reply:
        """``homes``: worker, incarnation, socket, control address and host of each; ``table``: per shard its place
        among them, or -1 if nobody living has it, and the token."""
        homes: dict[tuple[WorkerId, Incarnation], int] = {}
        table = []
        for shard in range(self._core.state.shards):
            lease = self._leases.leases.get(shard)
            if lease is None:
                table.append([NOBODY, 0])
                continue
            life = lease.holder, lease.incarnation
            if self._core.state.is_live(*life):
                table.append([homes.setdefault(life, len(homes)), lease.token])
            else:
                table.append([NOBODY, lease.token])
        return Reply(
            {
                "shards": self._core.state.shards,
                "homes": [self.home(*life) for life in homes],
                "table": table,
                "position": self._leases.position,
            }
        )

    def home(self, worker: WorkerId, incarnation: Incarnation) -> list[str]:
        """Worker, incarnation, socket, control address and host of a home that lives."""
        session = self._core.state.sessions[worker]
        return [worker, incarnation, self._socket(worker, incarnation), session.control, session.host]

    def _socket(self, worker: str, incarnation: str) -> str:
        """The socket of a worker of this home; empty for one elsewhere."""
        life = worker, incarnation
        if life not in self._sockets:
            cards = living_workers(self._place)
            self._sockets = {(card.worker, card.incarnation): str(self._place / "run" / card.socket) for card in cards}
            self._sockets.setdefault(life, "")
        return self._sockets[life]
