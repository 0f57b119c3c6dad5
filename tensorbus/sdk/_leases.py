"""Leases that this process holds: renewed together in the background, ended when released or dropped."""

from __future__ import annotations

import asyncio
import logging
import sys
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tensorbus.clock import Deadline
from tensorbus.errors import CorruptError, NotFoundError, TensorbusError
from tensorbus.sdk._records import position_of

if TYPE_CHECKING:
    from tensorbus.sdk._core import Core

log = logging.getLogger("tensorbus.sdk")

_RENEWALS = 3  # a lease outlives two renewals that fail
_RETRY_S_MIN = 0.05
_CLOSE_S = 2.0


@dataclass(eq=False, slots=True)
class _Held:
    lease: str
    artifact: str
    ttl_s: float | None
    own: bool
    memory: tuple[object, ...]
    scoped: bool = False


class Leases:
    """The leases of one bus, and the one task that renews them."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._held: dict[str, _Held] = {}
        self._changed = asyncio.Event()
        self._renewing = False

    def __contains__(self, lease: str) -> bool:
        return lease in self._held

    def hold(
        self, lease: object, *, artifact: str, ttl_s: float | None, own: bool, memory: tuple[object, ...] = ()
    ) -> LeaseHandle:
        """Keep a lease that the worker granted.

        Args:
            ttl_s: Seconds between renewals within which it lives; ``None`` for one that holds until released.
            own: Whether it is on the caller's own memory, so that it ends with the connection.
            memory: Kept alive as long as the lease is.
        """
        if not isinstance(lease, str):
            raise CorruptError("the worker's answer has no lease")
        self._held[lease] = _Held(lease, artifact, ttl_s, own, memory)
        self._changed.set()
        if ttl_s is not None and not self._renewing:
            self._renewing = True
            self._core.spawn(self._renew(), "renew leases")
        return LeaseHandle(self._core, lease, artifact, "registered artifact" if own else "pin")

    async def release(self, lease: str, *, deadline: Deadline) -> int:
        """End a lease. Gives the position of its end.

        Raises:
            NotFoundError: If it has ended before.
        """
        self._held.pop(lease, None)
        return position_of((await self._core.ask("release", {"lease": lease}, deadline=deadline)).data)

    def drop(self, lease: str) -> None:
        """End a lease that nobody holds any more, without waiting."""
        if self._held.pop(lease, None) is not None:
            self._core.tidy("release", {"lease": lease})

    def lost(self) -> None:
        """The connection went: leases on the caller's own memory ended with it, the others are still to be renewed."""
        for held in [held for held in self._held.values() if held.own]:
            if self._core.refusal is None:
                self._ended(held.lease)
            else:  # the bus was closed, which is how a caller ends them
                del self._held[held.lease]

    def scope(self, lease: str) -> None:
        """The lease is for a ``with`` block: it ends with the block, or before with the bus."""
        held = self._held.get(lease)
        if held is not None:
            held.scoped = True

    async def end_scoped(self) -> None:
        """The bus is being closed: end what its blocks cannot end any more."""
        leases = [held.lease for held in self._held.values() if held.scoped]
        deadline = Deadline(_CLOSE_S, what="releasing pins")
        for lease in leases if self._core.link.connected else ():
            try:
                await self._core.ask(
                    "release", {"lease": lease}, deadline=deadline, repeat=False, epoch=self._core.link.epoch
                )
            except TensorbusError as exc:
                log.debug("lease %s was not released at the end: %s", lease, exc)

    async def _renew(self) -> None:
        while periods := [held.ttl_s / _RENEWALS for held in self._held.values() if held.ttl_s is not None]:
            period_s = min(periods)
            self._changed.clear()
            try:
                async with asyncio.timeout(period_s):
                    await self._changed.wait()
                continue  # the shortest may be shorter now
            except TimeoutError:
                pass
            await self._renew_all(period_s)
        self._renewing = False

    async def _renew_all(self, period_s: float) -> None:
        leases = [held.lease for held in self._held.values() if held.ttl_s is not None]
        try:
            deadline = Deadline(max(period_s, _RETRY_S_MIN), what="renewing leases")
            reply = await self._core.ask("renew", {"leases": leases}, deadline=deadline)
        except TensorbusError as exc:
            log.warning("cannot renew %d leases now: %s", len(leases), exc)
            return
        ended = reply.data.get("ended")
        for lease in ended if isinstance(ended, list) else ():
            self._ended(str(lease))

    def _ended(self, lease: str) -> None:
        held = self._held.pop(lease, None)
        if held is not None:
            log.warning("the lease %s on %s has ended at the worker", lease, held.artifact)


class LeaseHandle:
    """What the owner of a lease keeps. Dropping it unreleased warns, and ends the lease."""

    __slots__ = ("__weakref__", "_core", "_done", "_what", "artifact", "lease")

    def __init__(self, core: Core, lease: str, artifact: str, what: str) -> None:
        self._core = core
        self._what = what
        self._done = False
        self.lease = lease
        self.artifact = artifact

    @property
    def held(self) -> bool:
        """Whether it was not released, and not told to have ended."""
        return not self._done and self.lease in self._core.leases

    async def release(self, *, deadline: Deadline) -> int | None:
        """End the lease; nothing happens the second time.

        Raises:
            NotFoundError: If the worker ended it before.
        """
        if self._done:
            return None
        self._done = True
        return await self._core.leases.release(self.lease, deadline=deadline)

    async def release_quietly(self, *, deadline: Deadline) -> None:
        """End the lease if it lives."""
        try:
            await self.release(deadline=deadline)
        except NotFoundError:
            log.debug("lease %s had ended before", self.lease)

    def __del__(self) -> None:
        if getattr(self, "_done", True) or self._core.refusal is not None:
            return  # released, or ended with the bus
        self._done = True
        core, lease = self._core, self.lease
        core.later(lambda: core.leases.drop(lease))
        if not sys.is_finalizing():
            warnings.warn(
                f"a {self._what} of {self.artifact} was dropped without release(); its lease ends now",
                ResourceWarning,
                source=self,
                stacklevel=2,
            )
