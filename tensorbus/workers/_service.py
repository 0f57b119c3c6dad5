"""Answers callers: one table of operations, each for a connection that has said hello."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

from tensorbus import __version__
from tensorbus.clock import NS_PER_S
from tensorbus.errors import InvalidArgumentError, NotFoundError
from tensorbus.projections import Names
from tensorbus.transport import PeerSession, Reply, Request
from tensorbus.workers import _requests as ask
from tensorbus.workers._callers import Caller, Callers
from tensorbus.workers._core import Core
from tensorbus.workers._directory_ops import DirectoryOps, Op
from tensorbus.workers._follow import Follows
from tensorbus.workers._memory import MemoryRole
from tensorbus.workers._operation_ops import OperationOps
from tensorbus.workers._operations import Operations
from tensorbus.workers._query_ops import QueryOps

BYE_S = 0.2

ASKED_AGAIN = frozenset(
    {"resolve", "manifest", "bind", "publish", "version", "open", "pin", "define_view", "locate", "destroy"}
)
"""Operations that say *not there* before they have done anything."""


class Service:
    """What a worker process answers, by the roles that it has.

    Args:
        gateway_sql: Whether callers over TCP may send SQL.
        more: What is answered besides.
    """

    def __init__(
        self,
        core: Core,
        callers: Callers,
        memory: MemoryRole | None,
        *,
        gateway_sql: bool = False,
        more: Mapping[str, Op] | None = None,
    ) -> None:
        self._core = core
        self._callers = callers
        self._memory = memory
        self._follows = Follows(core.live)
        self._names = Names(core.state)
        self._losses = core.feed.losses
        directory = DirectoryOps(
            core, callers, self._follows, self._names, pool_stats=None if memory is None else memory.pool.stats
        )
        self._queries = QueryOps(core, gateway_sql=gateway_sql)
        self._table: dict[str, Op] = directory.table() | self._queries.table()
        self._operations = Operations(core, None) if memory is None else memory.operations
        self._table |= OperationOps(core, self._operations).table()
        if memory is not None:
            self._table |= memory.ops.table()
        self._table |= more or {}
        callers.on_gone(self._gone)

    @contextmanager
    def following(self) -> Iterator[None]:
        """Follow the Directory for callers and memory, as long as the context is open."""
        with ExitStack() as stack:
            if self._memory is not None:
                # Memory first: what a caller is told must already hold here.
                stack.enter_context(self._core.live.followed(self._memory.reclaim.on_change))
                self._memory.on_retired = self._retire
            stack.enter_context(self._core.live.followed(self._names.on_change))
            stack.enter_context(self._core.live.followed(self._operations.on_change))
            stack.enter_context(self._core.live.followed(self._follows.on_change))
            stack.enter_context(self._core.live.replacements(self._replaced))
            yield

    def _replaced(self) -> None:
        """The state was made anew: what callers keep of the one before is not comparable with it."""
        lost, self._losses = self._core.feed.losses != self._losses, self._core.feed.losses
        for caller in self._callers.all():
            caller.push("anew", {"position": self._core.live.position})
            for cursor in caller.cursors.values() if lost else ():
                cursor.lose()

    async def handle(self, request: Request, session: PeerSession) -> Reply:
        """Handler of the server."""
        caller = self._callers.of(session)
        if request.op == "hello":
            return self._hello(caller, request)
        caller.require_hello()
        op = self._table.get(request.op)
        if op is None:
            raise InvalidArgumentError(
                f"worker {self._core.me.worker} ({', '.join(self._core.me.roles)}) has no operation {request.op!r}",
                op=request.op,
            )
        while True:
            try:
                return await op(caller, request)
            except NotFoundError:
                if request.op not in ASKED_AGAIN or not await self._core.may_come(request.deadline):
                    raise

    def _hello(self, caller: Caller, request: Request) -> Reply:
        asked = ask.parse(ask.Hello, request.args, op="hello")
        if asked.protocol != ask.PROTOCOL:
            raise InvalidArgumentError(
                f"the caller speaks protocol {asked.protocol}, worker {self._core.me.worker} protocol {ask.PROTOCOL}"
            )
        caller.tenant = asked.tenant
        caller.pid = caller.session.info.pid or asked.pid
        me = self._core.me
        return Reply(
            {
                "protocol": ask.PROTOCOL,
                "version": __version__,
                "worker": me.worker,
                "incarnation": me.incarnation,
                "host": me.host,
                "roles": list(me.roles),
                "session": caller.id,
                "position": self._core.live.position,
                "prefix": self._core.bus.subjects.prefix,
                "ttl_s": self._core.state.sessions[me.worker].ttl_ns / NS_PER_S,
                "descriptors": caller.session.passes_fds and self._memory is not None,
            }
        )

    def _gone(self, caller: Caller) -> None:
        self._follows.gone(caller)
        self._queries.gone(caller)
        if self._memory is not None:
            self._memory.ops.gone(caller)
        for cursor in caller.cursors.values():
            self._core.spawn(cursor.close(), name="close cursor")
        caller.cursors.clear()

    def _retire(self, segment: int, writer: str | None) -> None:
        """The pool wants memory back that a caller keeps mapped for its next put."""
        for caller in self._callers.all():
            if writer is not None and writer.split("/")[0] == caller.id:
                caller.push("retire", {"segments": [segment]})

    async def say_bye(self, reason: str) -> None:
        """Tell every caller that this worker ends, without waiting for slow ones."""
        for caller in self._callers.all():
            caller.push("bye", {"reason": reason})
        deadline = asyncio.get_running_loop().time() + BYE_S
        while any(not caller.pushes.empty() for caller in self._callers.all()):
            if asyncio.get_running_loop().time() > deadline:
                return
            await asyncio.sleep(0.005)
