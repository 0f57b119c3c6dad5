"""The role *store*: the global store, its answers, and the keeping of the log. Needs DuckDB, Arrow and fsspec."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from tensorbus.bus import Archive
from tensorbus.clock import Deadline
from tensorbus.config import Settings
from tensorbus.errors import TensorbusError
from tensorbus.events import STORE_ROLE
from tensorbus.lifecycle import log_rules
from tensorbus.projections import Json
from tensorbus.workers._answers import Answers
from tensorbus.workers._core import Core
from tensorbus.workers._keeper import Keeper, KeeperLimits
from tensorbus.workers._projector import Projector

log = logging.getLogger("tensorbus.workers")

LOOKS_PER_DELAY = 4
"""How often within a purge's delay to look whether one is announced."""


class StoreRole:
    """One worker's store. Made by :meth:`running`."""

    def __init__(self, core: Core, projector: Projector, keeper: Keeper) -> None:
        self._core = core
        self.projector = projector
        self.keeper = keeper

    @classmethod
    @asynccontextmanager
    async def running(cls, core: Core, settings: Settings) -> AsyncIterator[StoreRole]:
        """A store that answers, and whose file is closed when the context ends.

        Raises:
            DeniedError: If the bus does not let this worker answer.
        """
        archive = await asyncio.to_thread(
            Archive.open, settings.archive_url or str(settings.home / "archive"), prefix=core.bus.subjects.prefix
        )
        projector = Projector(
            core.bus,
            path=settings.home / "store" / f"{core.me.worker}.duckdb",
            archive=archive,
            look_s=settings.purge_delay_s / LOOKS_PER_DELAY,
            memory_bytes=settings.store_memory_bytes,
        )
        limits = KeeperLimits(
            archive_s=settings.archive_s,
            snapshot_facts=settings.snapshot_facts,
            keep_facts=settings.keep_facts,
            purge_delay_s=settings.purge_delay_s,
            forget_s=settings.forget_s,
            resign_s=settings.resign_s,
        )
        answers = Answers(core, projector)
        try:
            async with answers.running():
                yield cls(core, projector, Keeper(core, projector, archive, limits))
        finally:
            await projector.close()

    def work(self) -> list[tuple[str, Coroutine[Any, Any, None]]]:
        """The endless tasks of the role."""
        return [("project", self.projector.run()), ("keep", self.keeper.run()), ("mind", self.keeper.mind())]

    async def leave(self, *, deadline: Deadline) -> None:
        """The worker stops: another store may keep the log at once. The end of the session says so too, only later."""
        try:
            await self.keeper.leave(deadline=deadline)
        except TensorbusError as error:
            log.warning("the store's role was not given up: reason=%s", error)

    def on_loss(self) -> None:
        """The log lost its tail: look whether the rows and what is known of snapshots outlive it."""
        self.keeper.on_loss()
        self.projector.suspect()

    def stats(self) -> Json:
        """Figures for people."""
        trouble = self.projector.trouble or self.projector.stuck or self.keeper.trouble
        log, holder = self._core.state.log, log_rules.role_holder(self._core.state, STORE_ROLE)
        return {
            "position": self.projector.position,
            "keeps_log": self.keeper.holds,
            "keeper": "" if holder is None else holder.worker,
            "archived": log.archived,
            "purged": log.purged,
            "trouble": "" if trouble is None else str(trouble),
            "trouble_kind": "" if trouble is None else str(trouble.kind),
        }
