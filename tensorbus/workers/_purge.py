"""What may go from the log, and how it goes: asked of the store's rows, one purge for each aggregate."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from tensorbus.bus import Bus
from tensorbus.clock import NS_PER_S, Deadline
from tensorbus.events import Aggregate
from tensorbus.feeds import newest_snapshot
from tensorbus.lifecycle import Directory, Purge, forgettable
from tensorbus.workers._projector import Projector

log = logging.getLogger("tensorbus.workers")

PURGE_S: Final = 30.0
ORPHAN_NS: Final = 3600 * NS_PER_S
"""A body that no fact names stays so long: its fact may still come."""
SWEEP_NS: Final = 300 * NS_PER_S
WORTH: Final = 10
"""A purge is worth its while when it takes a tenth of what is kept."""
KEPT_WHOLE: Final = frozenset({"archive", "trunc", "fold"})
"""Kinds that are never purged: few, and who reads the archive needs them."""
OWN: Final = ("Archived", "LogPurged", "PurgeCompleted")
"""What the keeper itself says is no reason to archive or store anything."""
UNGUARDED: Final = ("replica", "clease", "op")
"""Kinds of one author, on which nothing is compared: all of them goes."""


class Purger:
    """Answers what could be purged, and purges."""

    def __init__(self, bus: Bus, projector: Projector) -> None:
        self._bus = bus
        self._projector = projector
        self._orphans: dict[str, int] = {}
        self._swept_ns: int | None = None

    async def count(self, after: int, upto: int) -> int:
        """How many facts of others lie in a range."""
        sql = f"SELECT count(*) FROM facts WHERE seq > ? AND seq <= ? AND type NOT IN {OWN}"
        return await self._number(sql, after, upto)

    async def upto(self, purged: int, covered: int, *, keep_facts: int) -> int:
        """How far a purge should go: the newest ``keep_facts`` facts stay, and what is not covered. 0 if not worth it.

        Args:
            purged: How far the last one went.
            covered: What snapshot and archive hold.
        """
        newest = f"SELECT seq FROM facts WHERE type NOT IN {OWN} ORDER BY seq DESC LIMIT 1 OFFSET ?"
        upto = min(await self._number(newest, keep_facts), covered)
        return upto if await self.count(purged, upto) > keep_facts // WORTH else 0

    async def before(self, time_ns: int, *, at_most: int) -> int:
        """The last sequence that the log took before a time."""
        return await self._number("SELECT max(seq) FROM facts WHERE time_ns <= ? AND seq <= ?", time_ns, at_most)

    async def _number(self, sql: str, *values: int) -> int:
        def ask() -> int:
            with self._projector.store.reading() as cursor:
                row = cursor.execute(sql, list(values)).fetchone()
            return int(row[0] or 0) if row else 0

        return await asyncio.to_thread(ask)

    async def carry_out(self, state: Directory, purge: Purge) -> int:
        """Purge what was announced; returns how many messages went. Repeating it is safe.

        What is forgotten goes last: until the fold hears of it, its aggregates look free to the server alone.
        """
        before = state.log.purged
        removed = 0
        for kind in UNGUARDED:
            removed += await self._purge(f"{self._bus.subjects.prefix}.ev.{kind}.*.*", purge.upto, keep_last=False)
        for about in await asyncio.to_thread(self._aggregates, before, purge.upto):
            removed += await self._purge(self._bus.subjects.fence(about), purge.upto, keep_last=True)
        snapshots = self._bus.subjects.fence(Aggregate("snap", "directory"))
        removed += await self._purge(snapshots, purge.snapshot - 1, keep_last=True)
        for _, about in forgettable(state, purge.forget):
            removed += await self._purge(self._bus.subjects.fence(about), purge.forget, keep_last=False)
        return removed

    def _aggregates(self, after: int, upto: int) -> list[Aggregate]:
        """Whose facts lie in a range, but for what goes by kind and what stays."""
        sql = "SELECT DISTINCT kind, about FROM facts WHERE seq > ? AND seq <= ? AND kind IS NOT NULL"
        with self._projector.store.reading() as cursor:
            found = [Aggregate(*row) for row in cursor.execute(sql, [after, upto]).fetchall()]
        return [about for about in found if about.kind not in UNGUARDED and about.kind not in KEPT_WHOLE]

    async def _purge(self, filter_subject: str, upto: int, *, keep_last: bool) -> int:
        deadline = Deadline(PURGE_S, what=f"purging {filter_subject}")
        return await self._bus.purge(filter_subject, upto=upto, keep_last=keep_last, deadline=deadline)

    # -- bodies that nothing names -------------------------------------------------------------------------------------

    async def sweep(self, *, now_ns: int) -> None:
        """Purge bodies that no fact has named for an hour. Looks every five minutes."""
        if self._swept_ns is not None and now_ns - self._swept_ns < SWEEP_NS:
            return
        self._swept_ns = now_ns
        deadline = Deadline(PURGE_S, what="looking for bodies that no fact names")
        there = await self._bus.subjects_on(f"{self._bus.subjects.prefix}.blob.>", deadline=deadline)
        digests = {subject.split(".")[-3] for subject in there}
        orphans = digests - await self._named()
        self._orphans = {digest: self._orphans.get(digest, now_ns) for digest in sorted(orphans)}
        for digest in [digest for digest, since_ns in self._orphans.items() if now_ns - since_ns >= ORPHAN_NS]:
            await self._purge(f"{self._bus.subjects.prefix}.blob.{digest}.>", 2**63 - 1, keep_last=False)
            del self._orphans[digest]
            log.info("purged a body that no fact names: digest=%s", digest)

    async def _named(self) -> set[str]:
        """The bodies that the state, the facts on the log, or a snapshot there name."""
        found = await newest_snapshot(self._bus)
        snapshots = set() if found is None else {found[1].blob.digest}
        in_state, purged = await self._projector.in_fold(_in_state)
        return snapshots | in_state | await asyncio.to_thread(self._in_facts, purged)

    def _in_facts(self, purged: int) -> set[str]:
        sql = (
            "SELECT DISTINCT json_extract_string(body, '$.manifest.blob.digest') FROM facts "
            "WHERE type IN ('ArtifactPut', 'ArtifactRegistered', 'ArtifactDigested') AND seq > ?"
        )
        with self._projector.store.reading() as cursor:
            return {row[0] for row in cursor.execute(sql, [purged]).fetchall() if row[0]}


def _in_state(state: Directory) -> tuple[set[str], int]:
    blobs = (record.manifest.blob for record in state.artifacts.values())
    return {blob.digest for blob in blobs if blob is not None}, state.log.purged
