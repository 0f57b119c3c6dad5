"""Copies with wrong bytes: looked for, set aside, said on the log, and healed from a right one.

A reader that got wrong bytes tells the worker that it had them from. That worker looks itself before it believes it:
what somebody says must not make it give up a right copy.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Final

from pydantic import ValidationError

from tensorbus.clock import NS_PER_S, Deadline
from tensorbus.errors import ConflictError, CorruptError, InvalidArgumentError, TensorbusError
from tensorbus.events import Event, QuarantineCause, ReplicaQuarantined, Tier
from tensorbus.ids import ArtifactId, WorkerId
from tensorbus.lifecycle import ReplicaKey
from tensorbus.workers._complaints import CheckAsk, complain
from tensorbus.workers._core import Core
from tensorbus.workers._disk import DiskTier
from tensorbus.workers._fetch import Fetches
from tensorbus.workers._puts import Puts, known_outcome, wrong_tensors
from tensorbus.workers._store import Held, Store, Where
from tensorbus.workers._tiers import Tiers

log = logging.getLogger("tensorbus.workers")

HEAL_S: Final = 3600.0
TOLD_MAX: Final = 16
"""Complaints under way; further ones are dropped, since the next reader complains again."""
LOOKING_MAX: Final = 64
LOOK_AGAIN_S: Final = 10.0
"""A copy that was found right is not looked at again within that time, whoever complains."""
LOOKED_KEPT: Final = 1024
WRONG_SAID: Final = 16


class Integrity:
    """What becomes of this worker's copies with wrong bytes. Lives on its loop."""

    def __init__(self, core: Core, *, store: Store, puts: Puts, disk: DiskTier, tiers: Tiers, fetches: Fetches) -> None:
        self._core = core
        self._store = store
        self._puts = puts
        self._disk = disk
        self._tiers = tiers
        self._fetches = fetches
        self._telling = 0
        self._looking: set[Where] = set()
        self._one_look = asyncio.Semaphore(1)
        self._looked: OrderedDict[Where, int] = OrderedDict()
        disk.on_corrupt = self._heal_soon
        fetches.transfers.on_wrong = self._tell_soon

    # -- looking ------------------------------------------------------------------------------------------------------

    async def look(self, where: Where, cause: QuarantineCause) -> dict[Tier, list[str]]:
        """Compare this worker's copies with what they should be; those with other bytes are quarantined.

        Returns:
            For each tier that has a copy, what is wrong with it: the first tensors, or in words.
        """
        found: dict[Tier, list[str]] = {}
        held = self._store.get(*where)
        if held is not None:
            found[held.tier] = await self._look_at_memory(held, cause)
        if self._disk.get(where) is not None:
            try:
                await self._disk.verify(where)
            except CorruptError as error:
                found[Tier.DISK] = [error.message]
            else:
                found[Tier.DISK] = []
        return found

    async def _look_at_memory(self, held: Held, cause: QuarantineCause) -> list[str]:
        with self._tiers.using(held.where):
            wrong = await asyncio.to_thread(wrong_tensors if held.manifest.digested else _wrong_blocks, held)
        if wrong:
            await self._core.finish(
                self._set_aside(held, wrong[:WRONG_SAID], cause), name=f"quarantine {held.artifact}"
            )
        return wrong[:WRONG_SAID]

    async def _set_aside(self, held: Held, wrong: list[str], cause: QuarantineCause) -> None:
        """Serve it no more from this moment, and say so; its memory goes once its last reader is gone."""

        def fact(number: int) -> Event:
            return ReplicaQuarantined(
                tenant=held.tenant,
                artifact=held.artifact,
                view=None,
                tier=held.tier,
                cause=cause,
                wrong=tuple(wrong),
                number=number,
            )

        # A right copy that comes meanwhile is said after it, else the log would take that for the wrong one.
        async with self._puts.one_at_a_time(held.where):
            if self._store.get(*held.where) is not held:
                return
            log.error("a replica in memory is corrupt: artifact=%s wrong=%s", held.artifact, ", ".join(wrong))
            self._store.set_aside(held)
            try:
                with suppress(ConflictError):  # the artifact ended, or the log has the copy no more
                    await self._core.author.say(fact, deadline=known_outcome())
            finally:
                self._store.give_up(held)
        self._heal_soon(held.where, False)

    # -- healing ------------------------------------------------------------------------------------------------------

    def _heal_soon(self, where: Where, must: bool) -> None:
        """Have a right copy again, from this worker's other tier or from another worker.

        Args:
            must: Whether it was promised to be on disk.
        """
        self._fetches.transfers.doubt(where)
        record = self._core.state.artifacts.get(where)
        if record is not None and record.live:
            self._core.spawn(self._heal(where, must), name=f"heal {where[1]}")

    async def _heal(self, where: Where, must: bool) -> None:
        try:
            held, _ = await self._fetches.ensure(*where, deadline=Deadline(HEAL_S, what=f"healing {where[1]}"))
            if must or self._marked_on_disk(where):
                await self._tiers.persist(held, must=must)
        except TensorbusError as error:
            log.error("a replica stays corrupt: artifact=%s reason=%s", where[1], error)

    def _marked_on_disk(self, where: Where) -> bool:
        """Whether the log has a corrupt copy of ours on disk: what was in memory before does not lift it."""
        record, me = self._core.state.artifacts.get(where), self._core.me.worker
        return record is not None and ReplicaKey(me, None, Tier.DISK) in record.quarantined

    # -- what others find ---------------------------------------------------------------------------------------------

    def _tell_soon(self, worker: WorkerId, where: Where) -> None:
        """Tell a worker that its bytes of an artifact came wrong."""
        if self._telling < TOLD_MAX:
            self._telling += 1
            self._core.spawn(self._tell(worker, where), name=f"tell {worker} of {where[1]}")

    async def _tell(self, worker: WorkerId, where: Where) -> None:
        try:
            await complain(self._core, worker, where)
        finally:
            self._telling -= 1

    @asynccontextmanager
    async def answering(self) -> AsyncIterator[None]:
        """Hear what readers found for as long as the context is open."""
        bus, me = self._core.bus, self._core.me.worker
        async with bus.answer(bus.subjects.rpc(f"check.{me}"), self._told, queue=f"check-{me}"):
            yield

    async def _told(self, data: bytes) -> bytes:
        try:
            asked = CheckAsk.model_validate_json(data)
        except ValidationError as exc:
            raise InvalidArgumentError(f"the question cannot be read: {exc.errors()[0]['msg']}") from exc
        return json.dumps({"looks": self._look_soon((asked.tenant, ArtifactId(asked.artifact)))}).encode()

    def _look_soon(self, where: Where) -> bool:
        """Look at what somebody says to be wrong; says whether that is being done."""
        now_ns, looked_ns = self._core.clock.now_ns(), self._looked.get(where)
        if where in self._looking:
            return True
        if looked_ns is not None and now_ns - looked_ns < LOOK_AGAIN_S * NS_PER_S:
            return False
        if len(self._looking) >= LOOKING_MAX or (self._store.get(*where) is None and self._disk.get(where) is None):
            return False
        self._looking.add(where)
        self._core.spawn(self._look(where), name=f"look at {where[1]}")
        return True

    async def _look(self, where: Where) -> None:
        try:
            async with self._one_look:  # whoever complains, it costs one thread
                wrong = await self.look(where, QuarantineCause.READER)
            if not any(wrong.values()):
                log.warning("a reader found wrong bytes that are right here: artifact=%s", where[1])
                self._looked[where] = self._core.clock.now_ns()
                if len(self._looked) > LOOKED_KEPT:
                    self._looked.popitem(last=False)
        except TensorbusError as error:
            log.warning("cannot look at what a reader found: artifact=%s reason=%s", where[1], error)
        finally:
            self._looking.discard(where)


def _wrong_blocks(held: Held) -> list[str]:
    """Of bytes without digests: the blocks that are not what they were when they were first read or came here."""
    with held.reading() as parts:
        return [] if held.blocks is None else [f"block {index}" for index in held.blocks.changed(parts)]
