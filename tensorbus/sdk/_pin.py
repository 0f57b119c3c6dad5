"""A pin: a caller's lease on a replica, as a fact."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Self

from tensorbus.sdk._leases import LeaseHandle
from tensorbus.sdk._records import LOG_STREAM, Position

if TYPE_CHECKING:
    from tensorbus.sdk._core import Core


class AsyncPin:
    """A pin on an artifact: a fact on the log. Dropping it unreleased warns, and ends it.

    Attributes:
        artifact: Id of the artifact that it keeps.
        lease: Its name on the log.
    """

    def __init__(self, core: Core, lease: LeaseHandle, position: int) -> None:
        self._core = core
        self._lease = lease
        self._position = position
        self.artifact = lease.artifact
        self.lease = lease.lease

    @property
    def position(self) -> Position:
        """Where in the log it is held from."""
        return {LOG_STREAM: self._position}

    @property
    def held(self) -> bool:
        """Whether it was not released, and the worker did not say that it has ended."""
        return self._lease.held

    async def release(self, *, timeout: float | None = None) -> None:
        """End it. The second time nothing happens.

        Raises:
            NotFoundError: If it had ended before: its time ran out, or its worker is gone.
        """
        await self._lease.release(deadline=self._core.begin(timeout, f"release of the pin on {self.artifact}"))

    async def __aenter__(self) -> Self:
        self._core.leases.scope(self.lease)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._core.refusal is not None:
            return  # the bus was closed within the block, and the pin with it
        await self._lease.release_quietly(deadline=self._core.begin(None, f"release of the pin on {self.artifact}"))
