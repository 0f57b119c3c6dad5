"""The connection to a worker or gateway: made when first needed, made again when lost."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping
from typing import Final, Protocol

import tensorbus
from tensorbus.clock import Deadline
from tensorbus.errors import DeniedError, FencedError, InvalidArgumentError, TensorbusError, UnavailableError
from tensorbus.sdk._place import Address, Place, addresses
from tensorbus.sdk._records import Hello, parse
from tensorbus.transport import Channel, Connection, Push, Reply, connect_tcp, connect_unix

log = logging.getLogger("tensorbus.sdk")

PROTOCOL: Final = 1
_DELAY_S_MIN: Final = 0.02
_DELAY_S_MAX: Final = 0.5


class ConnectionLostError(UnavailableError):
    """The connection ended before the answer came; what became of the call is unknown."""


class LinkOwner(Protocol):
    """Who is told of what happens on the connection. All on the loop; none may block."""

    def on_push(self, push: Push) -> None: ...

    def on_connected(self, hello: Hello) -> None: ...

    def on_lost(self, reason: TensorbusError) -> None: ...


class Link:
    """Calls to whoever serves the place, over one connection at a time.

    Args:
        place: Whom to look for.
        owner: Is told of pushes and of the connection's fate.
    """

    def __init__(self, place: Place, owner: LinkOwner) -> None:
        self._place = place
        self._owner = owner
        self._connection: Connection | None = None
        self._channel: Channel | None = None
        self._connecting = asyncio.Lock()
        self._once = False
        self._closed = False
        self.hello: Hello | None = None
        self.epoch = 0

    @property
    def connected(self) -> bool:
        return self._connection is not None and not self._connection.closed

    async def connect(self, deadline: Deadline) -> Hello:
        """Be connected. The first time nobody is waited for; later, whoever was there may come back in time.

        Raises:
            UnavailableError: If nobody is there; DeadlineExceededError: If the time ran out.
        """
        await self._ready(deadline)
        assert self.hello is not None
        return self.hello

    async def call(
        self,
        op: str,
        args: Mapping[str, object] | None = None,
        *,
        body: bytes = b"",
        deadline: Deadline,
        repeat: bool,
        epoch: int | None = None,
    ) -> Reply:
        """Ask for an operation.

        Args:
            repeat: Whether asking twice does no harm, so that a lost connection is made again and the question with it.
            epoch: The connection that the arguments belong to; another one is no use.

        Raises:
            ConnectionLostError: If the connection went before the answer and the call cannot be repeated.
            TensorbusError: What the worker answered.
        """
        while True:
            connection = await self._ready(deadline)
            if epoch is not None and epoch != self.epoch:
                raise ConnectionLostError(f"{op}: the connection to the worker was lost meanwhile", op=op)
            try:
                return await connection.call(op, args, body=body, deadline=deadline)
            except UnavailableError as exc:
                if not connection.closed:
                    raise
                if not repeat:
                    raise ConnectionLostError(
                        f"{op}: the connection was lost before the worker answered; whether it was done is unknown",
                        op=op,
                    ) from exc

    async def close(self) -> None:
        """End the connection for good. Safe to repeat."""
        self._closed = True
        connection, self._connection, self._channel = self._connection, None, None
        if connection is not None:
            await connection.close()

    def abandon(self) -> None:
        """In a forked child: let go of the socket, which is the parent's, without a word to anybody."""
        abandon = getattr(self._channel, "abandon", None)
        if abandon is not None:
            abandon()

    async def _ready(self, deadline: Deadline) -> Connection:
        if self._closed:
            raise InvalidArgumentError("the bus is closed")
        if self._connection is not None and not self._connection.closed:
            return self._connection
        async with deadline.scope(), self._connecting:
            delay_s = _DELAY_S_MIN
            while self._connection is None or self._connection.closed:
                if self._closed:
                    raise InvalidArgumentError("the bus is closed")
                try:
                    self._connection = await self._dial(deadline)
                except (UnavailableError, FencedError) as exc:
                    left = deadline.left()
                    if not self._once or (left is not None and left <= delay_s):
                        raise
                    log.debug("no worker yet, trying again: %s", exc)
                    await asyncio.sleep(delay_s)
                    delay_s = min(2 * delay_s, _DELAY_S_MAX)
            return self._connection

    async def _dial(self, deadline: Deadline) -> Connection:
        failed: TensorbusError | None = None
        # A run directory is a few small files; reading it does not hold the loop up.
        for address in addresses(self._place):
            try:
                return await self._greet(await _connect(address, deadline), deadline)
            except (UnavailableError, FencedError, DeniedError) as exc:
                failed = failed or exc
        assert failed is not None
        raise failed

    async def _greet(self, channel: Channel, deadline: Deadline) -> Connection:
        connection = Connection(channel, on_push=self._owner.on_push, on_close=self._lost)
        args = {
            "protocol": PROTOCOL, "tenant": self._place.tenant, "pid": os.getpid(), "version": tensorbus.__version__,
        }  # fmt: skip
        try:
            reply = await connection.call("hello", args, deadline=deadline)
            self.hello = parse(Hello, reply.data)
        except BaseException:
            await connection.close()
            raise
        if self._closed:
            await connection.close()
            raise InvalidArgumentError("the bus is closed")
        self._once = True
        self._channel = channel
        self.epoch += 1
        self._owner.on_connected(self.hello)
        return connection

    def _lost(self, reason: TensorbusError) -> None:
        self._owner.on_lost(reason)


async def _connect(address: Address, deadline: Deadline) -> Channel:
    if address.path is not None:
        return await connect_unix(address.path, deadline=deadline)
    return await connect_tcp(address.host, address.port, deadline=deadline)
