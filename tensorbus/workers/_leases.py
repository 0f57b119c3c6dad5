"""Callers' leases on this worker's replicas: registered memory, and pins. The worker grants, counts and ends them.

Time is the worker's own CLOCK_BOOTTIME. A lease on a caller's own memory also ends with the caller's connection.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from tensorbus.clock import NS_PER_S, Deadline
from tensorbus.errors import ConflictError, NotFoundError, TensorbusError
from tensorbus.events import (
    CallerLeaseEnded,
    CallerLeaseGranted,
    DestroyReason,
    Event,
    LeaseEnd,
    LeasePurpose,
)
from tensorbus.ids import ArtifactId, LeaseId, new_lease_id
from tensorbus.lifecycle import CallerLease, Directory, rules
from tensorbus.workers._callers import Caller
from tensorbus.workers._core import Core
from tensorbus.workers._store import Store

log = logging.getLogger("tensorbus.workers")

UNTIL_SAID_S = 3600.0


@dataclass(slots=True)
class _Granted:
    lease: LeaseId
    tenant: str
    artifact: ArtifactId
    purpose: LeasePurpose
    holder: str
    ttl_ns: int | None
    ends_ns: int | None


class Leases:
    """All leases that this incarnation has granted."""

    def __init__(self, core: Core, store: Store) -> None:
        self._core = core
        self._store = store
        self._granted: dict[LeaseId, _Granted] = {}
        self._new = asyncio.Event()

    def __len__(self) -> int:
        return len(self._granted)

    def __contains__(self, lease: LeaseId) -> bool:
        return lease in self._granted

    def began(
        self, lease: LeaseId, *, tenant: str, artifact: ArtifactId, purpose: LeasePurpose, ttl_s: float | None
    ) -> None:
        """Count a lease from now on, unless it ended with its artifact as soon as it was granted."""
        record = self._core.state.artifacts.get((tenant, artifact))
        held = None if record is None else record.leases.get(lease)
        if held is None:
            return
        ttl_ns = None if ttl_s is None else int(ttl_s * NS_PER_S)
        ends_ns = None if ttl_ns is None else self._core.clock.now_ns() + ttl_ns
        self._granted[lease] = _Granted(lease, tenant, artifact, purpose, held.holder, ttl_ns, ends_ns)
        self._new.set()

    async def pin(
        self, caller: Caller, artifact: ArtifactId, *, ttl_s: float | None, deadline: Deadline
    ) -> tuple[LeaseId, int]:
        """Grant a pin: the replica here is not evicted until the pin is released or ends.

        One with a time runs out by itself, whoever is there; one without ends with its caller's connection.
        """
        holder = caller.id if ttl_s is None else ""
        lease, position = await self.grant_pin(
            caller.tenant, artifact, holder=holder, ttl_s=ttl_s, principal=caller.id, deadline=deadline
        )
        if ttl_s is None:
            caller.leases[lease] = None
            if caller.session.closed:
                self.gone(caller)
        return lease, position

    async def grant_pin(
        self,
        tenant: str,
        artifact: ArtifactId,
        *,
        holder: str = "",
        ttl_s: float | None,
        principal: str,
        deadline: Deadline,
    ) -> tuple[LeaseId, int]:
        """Say that a replica here is not evicted, and count the pin from now on."""
        lease = new_lease_id(self._core.ids)

        def fact(number: int) -> Event:
            return CallerLeaseGranted(
                tenant=tenant,
                artifact=artifact,
                lease=lease,
                purpose=LeasePurpose.PIN,
                holder=holder,
                ttl_ns=None if ttl_s is None else int(ttl_s * NS_PER_S),
                number=number,
            )

        position, _ = await self._core.author.say(fact, deadline=deadline, principal=principal)
        self.began(lease, tenant=tenant, artifact=artifact, purpose=LeasePurpose.PIN, ttl_s=ttl_s)
        return lease, position

    async def end_pin(self, tenant: str, lease: LeaseId, *, deadline: Deadline) -> int | None:
        """End a pin, whoever has it; ``None`` if it is over.

        Raises:
            ConflictError: If the lease is on a caller's own memory.
        """
        granted = self._granted.get(lease)
        if granted is None or granted.tenant != tenant:
            return None
        if granted.purpose is not LeasePurpose.PIN:
            raise ConflictError(f"lease {lease!r} is no pin but its caller's own memory", lease=lease)
        self._over(granted)
        return await self._say_end(granted, LeaseEnd.RELEASED, deadline=deadline)

    def renew(self, caller: Caller, leases: list[str]) -> list[str]:
        """Start the time of each lease anew; gives those that have ended."""
        now_ns, ended = self._core.clock.now_ns(), []
        for text in leases:
            granted = self._granted.get(LeaseId(text))
            if granted is None or granted.tenant != caller.tenant:
                ended.append(text)
            elif granted.ttl_ns is not None:
                granted.ends_ns = now_ns + granted.ttl_ns
        return ended

    async def release(self, caller: Caller, lease: LeaseId, *, deadline: Deadline) -> int:
        """End a lease on request.

        Raises:
            NotFoundError: If it is not, or no longer, one of this worker's.
        """
        granted = self._granted.get(lease)
        if granted is None or granted.tenant != caller.tenant:
            raise NotFoundError(
                f"there is no lease {lease!r} on worker {self._core.me.worker}: it was released, ran out, "
                "or its caller's connection ended",
                lease=lease,
            )
        caller.leases.pop(lease, None)
        self._over(granted)
        return await self._say_end(granted, LeaseEnd.RELEASED, deadline=deadline)

    async def end_unknown(self, caller: Caller, lease: LeaseId) -> None:
        """End a lease that its caller never learned of, whatever the bus does."""
        granted = self._granted.get(lease)
        caller.leases.pop(lease, None)
        if granted is not None:
            self._over(granted)
            await self._end_quietly(granted, LeaseEnd.RELEASED)

    def pins_of(self, tenant: str, artifact: ArtifactId) -> list[CallerLeaseGranted]:
        """The living pins of an artifact, as facts without a number."""
        return [
            CallerLeaseGranted(
                tenant=tenant, artifact=artifact, lease=granted.lease, purpose=LeasePurpose.PIN, holder=granted.holder,
                ttl_ns=granted.ttl_ns, number=0,
            )
            for granted in self._granted.values()
            if (granted.tenant, granted.artifact) == (tenant, artifact) and granted.purpose is LeasePurpose.PIN
        ]  # fmt: skip

    async def end_again(self, tenant: str, lease: CallerLease) -> None:
        """Say the end of a lease that is over here, and whose end the log lost."""
        granted = _Granted(lease.lease, tenant, lease.artifact, lease.purpose, lease.holder, lease.ttl_ns, None)
        await self._end_quietly(granted, LeaseEnd.RELEASED)

    def gone(self, caller: Caller) -> None:
        """A caller's connection ended: its own memory is no replica from this moment; the facts follow."""
        ended = [granted for lease in caller.leases if (granted := self._granted.get(lease)) is not None]
        caller.leases.clear()
        for granted in ended:
            self._end_soon(granted, LeaseEnd.CONNECTION_LOST)

    def forget_artifact(self, tenant: str, artifact: ArtifactId) -> None:
        """An artifact ended, and its leases with it."""
        for granted in [g for g in self._granted.values() if (g.tenant, g.artifact) == (tenant, artifact)]:
            del self._granted[granted.lease]

    async def expire(self) -> None:
        """End what has run out, for ever."""
        while True:
            now_ns = self._core.clock.now_ns()
            for granted in [g for g in self._granted.values() if g.ends_ns is not None and g.ends_ns <= now_ns]:
                self._end_soon(granted, LeaseEnd.EXPIRED)
            ends = [granted.ends_ns for granted in self._granted.values() if granted.ends_ns is not None]
            self._new.clear()
            wait_s = None if not ends else max(0.0, (min(ends) - self._core.clock.now_ns()) / NS_PER_S)
            try:
                async with asyncio.timeout(wait_s):
                    await self._new.wait()
            except TimeoutError:
                continue

    def _over(self, granted: _Granted) -> None:
        """From this moment the lease is no more, and nothing is read under it; the fact follows."""
        del self._granted[granted.lease]
        held = self._store.get(granted.tenant, granted.artifact)
        # What is held may be a copy of ours by now, after the caller's memory was found to be wrong.
        if granted.purpose is LeasePurpose.REGISTER and held is not None and held.lease == granted.lease:
            self._store.drop(granted.tenant, granted.artifact)

    def _end_soon(self, granted: _Granted, reason: LeaseEnd) -> None:
        """End a lease without waiting for the bus, which other leases must not wait for either."""
        self._over(granted)
        self._core.spawn(self._end_quietly(granted, reason), name=f"end lease {granted.lease}")

    async def _end_quietly(self, granted: _Granted, reason: LeaseEnd) -> None:
        try:
            await self._say_end(granted, reason, deadline=Deadline(UNTIL_SAID_S))
        except TensorbusError as error:
            log.info("end of lease not said: lease=%s reason=%s", granted.lease, error)

    async def _say_end(self, granted: _Granted, reason: LeaseEnd, *, deadline: Deadline) -> int:
        def fact(number: int) -> Event:
            return CallerLeaseEnded(
                tenant=granted.tenant, artifact=granted.artifact, lease=granted.lease, reason=reason, number=number
            )

        position, _ = await self._core.author.say(fact, deadline=deadline)
        if granted.purpose is LeasePurpose.REGISTER:
            position = max(position, await self._destroy_if_last(granted, deadline=deadline))
        return position

    async def _destroy_if_last(self, granted: _Granted, *, deadline: Deadline) -> int:
        def rule(state: Directory) -> Event | None:
            return rules.destroy(
                state, tenant=granted.tenant, artifact=granted.artifact, reason=DestroyReason.LEASE_ENDED
            )

        position, _ = await self._core.author.decide(rule, deadline=deadline)
        return position
