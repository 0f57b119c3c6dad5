"""Bringing an artifact here from a worker that has it: once, however many callers ask at the same time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from tensorbus.clock import Deadline
from tensorbus.errors import (
    ConflictError,
    CorruptError,
    DeadlineExceededError,
    FencedError,
    NotFoundError,
    OutOfSpaceError,
    TensorbusError,
    UnavailableError,
)
from tensorbus.ids import ArtifactId
from tensorbus.lifecycle import Artifact, Session, rules
from tensorbus.model import Layout, Manifest
from tensorbus.transport import BlockTable, Origin, Pool, Segment, Transfer, Ways, parse_addresses
from tensorbus.workers._core import Core
from tensorbus.workers._directory_ops import sources_of
from tensorbus.workers._puts import Puts, known_outcome
from tensorbus.workers._store import Held, Store, Where, spans_of

log = logging.getLogger("tensorbus.workers")

T = TypeVar("T")

CONNECT_S = 5.0
FETCH_S = 3600.0
CATCH_UP_S = 2.0
LET_GO_S = 2.0
LET_GO_LOOK_S = 0.005


@dataclass(frozen=True, slots=True)
class How:
    """By which path an artifact came, and why that one."""

    path: str
    why: str


HERE = How("shm", "held by the worker of this host")


class Fetches:
    """All transfers into this worker. A transfer belongs to the worker; who waits for it may give up."""

    def __init__(self, core: Core, pool: Pool, store: Store, puts: Puts, ways: Ways | None = None) -> None:
        self._ways = ways or Ways()
        self._core = core
        self._pool = pool
        self._store = store
        self._puts = puts
        self._running: dict[Where, asyncio.Future[tuple[Held, How]]] = {}

    async def ensure(self, tenant: str, artifact: ArtifactId, *, deadline: Deadline) -> tuple[Held, How]:
        """Have the artifact's bytes here.

        Raises:
            NotFoundError: If it has ended; UnavailableError: If no worker that holds it can be reached.
            OutOfSpaceError: If the pool has no room; CorruptError: If every source gave wrong bytes.
        """
        record = rules.live_artifact(self._core.state, tenant=tenant, artifact=artifact)
        held = self._store.get(tenant, record.artifact)
        if held is not None:
            return held, HERE
        where = (tenant, record.artifact)
        running = self._running.get(where)
        if running is None:
            work = self._core.finish(self._fetch(record), name=f"fetch {record.artifact}")
            running = self._running[where] = asyncio.ensure_future(work)
            running.add_done_callback(lambda _: self._running.pop(where, None))
            running.add_done_callback(_looked_at)
        async with deadline.scope():
            return await asyncio.shield(running)

    async def _fetch(self, record: Artifact) -> tuple[Held, How]:
        failures: list[TensorbusError] = []
        for source in sources_of(self._core.state, record):
            if not source.data or source.worker == self._core.me.worker:
                continue
            try:
                held = await self._from(source, record)
            except (UnavailableError, CorruptError, NotFoundError, FencedError, DeadlineExceededError) as error:
                log.warning("fetch failed: artifact=%s source=%s reason=%s", record.artifact, source.worker, error)
                failures.append(error)
                continue
            try:
                held, _ = await self._puts.add_replica(held, deadline=known_outcome())
            except ConflictError:
                # It ended while it came. What lives under its id now, if anything does, is another life of it.
                now = rules.live_artifact(self._core.state, tenant=held.tenant, artifact=held.artifact)
                return await self._fetch(now)
            return held, How("tcp", f"from worker {source.worker} on host {source.host}")
        await self._catch_up()
        raise self._no_source(record, failures)

    async def _catch_up(self) -> None:
        """A source may know of an end that has not come here: what is gone must not be called unreachable."""
        deadline = Deadline(CATCH_UP_S, what="reading the end of the log")
        try:
            await self._core.feed.reached(await self._core.bus.last_seq(deadline=deadline), deadline=deadline)
        except (UnavailableError, DeadlineExceededError):
            return  # then it is said by what is known here

    async def _from(self, source: Session, record: Artifact) -> Held:
        """Copy the bytes of one source into a segment of our own, and check them."""
        deadline = Deadline(FETCH_S, what=f"fetching {record.artifact}")
        origin = _origin(source, record)
        connecting = Deadline(CONNECT_S, what=f"connecting to worker {source.worker}")
        client = await asyncio.to_thread(self._ways.connect, origin.addresses[0], 0, deadline=connecting)
        segment: Segment | None = None
        try:
            opened = await asyncio.to_thread(client.open, origin.request, deadline=deadline)
            manifest = Manifest.from_json(opened.manifest)
            layout = Layout.from_json(opened.layout, manifest)
            if record.digest is not None and manifest.digested and manifest.content_id() != record.digest:
                raise CorruptError(f"worker {source.worker} has another manifest for {record.artifact!r}")
            segment = await self._room(layout.nbytes, record.tenant)
            segment.label = record.artifact
            table = BlockTable(spans_of(manifest, layout))
            transfer = Transfer(table.blocks, segment.view, tables=opened.tables, ways=self._ways, learn=table.learn)
            await _in_thread(transfer, lambda: transfer.run([origin], opened=(client, opened), deadline=deadline))
            segment.seal()
            return Held(record.tenant, record.artifact, (segment,), layout, manifest, blocks=table)
        except BaseException:
            if segment is not None:
                segment.release()
            raise
        finally:
            client.close()

    async def _room(self, nbytes: int, tenant: str) -> Segment:
        """Memory for a copy; waits a moment for what callers have been asked to let go of."""
        patience = Deadline(LET_GO_S)
        while True:
            try:
                return self._pool.allocate(nbytes, tenant=tenant, writer=None)
            except OutOfSpaceError as error:
                if not error.details.get("retiring_bytes") or not patience.left():
                    raise
            await asyncio.sleep(LET_GO_LOOK_S)

    def _no_source(self, record: Artifact, failures: list[TensorbusError]) -> TensorbusError:
        now = self._core.state.artifact(record.tenant, record.artifact)
        if now is None or not now.live:
            return rules.missing_artifact(now, record.artifact)
        holders = sorted({replica.worker for replica in record.replicas.values()})
        corrupt = [failure for failure in failures if isinstance(failure, CorruptError)]
        cls = CorruptError if failures and len(corrupt) == len(failures) else UnavailableError
        reason = "; ".join(str(failure) for failure in failures) or "none of them can be reached from here"
        return cls(
            f"artifact {record.artifact!r} is on {', '.join(holders) or 'no worker'}: {reason}",
            artifact=record.artifact,
            workers=holders,
        )


def _origin(source: Session, record: Artifact) -> Origin:
    request = {"tenant": record.tenant, "artifact": record.artifact}
    return Origin(name=source.worker, addresses=parse_addresses(source.data), request=request)


async def _in_thread(transfer: Transfer, work: Callable[[], T]) -> T:
    """Run a blocking transfer; cancelling ends it, so that no thread touches its memory before that goes."""
    task = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        transfer.cancel()
        await asyncio.gather(task, return_exceptions=True)
        raise


def _looked_at(future: asyncio.Future[tuple[Held, How]]) -> None:
    if not future.cancelled():
        future.exception()
