"""Bringing an artifact here from a worker that has it: once, however many callers ask at the same time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from tensorbus.clock import Deadline
from tensorbus.config import Settings, Verify
from tensorbus.errors import (
    ConflictError,
    CorruptError,
    DeadlineExceededError,
    DeniedError,
    FencedError,
    NotFoundError,
    OutOfSpaceError,
    TensorbusError,
    UnavailableError,
)
from tensorbus.ids import ArtifactId, Incarnation, WorkerId
from tensorbus.lifecycle import Artifact, Session, rules
from tensorbus.model import Layout, Manifest
from tensorbus.transport import (
    Arrivals,
    BlockTable,
    BulkClient,
    Lines,
    OpenedSource,
    Origin,
    Place,
    Pool,
    Segment,
    Transfer,
    TransferReport,
    Ways,
    parse_addresses,
    tls_files,
)
from tensorbus.workers._core import Core, off_loop
from tensorbus.workers._directory_ops import sources_of
from tensorbus.workers._disk import DiskTier
from tensorbus.workers._permits import Keys, PermitAsk
from tensorbus.workers._puts import Puts, known_outcome, wrong_tensors
from tensorbus.workers._shared import Shared
from tensorbus.workers._store import Held, Store, Where, spans_of
from tensorbus.workers._tiers import Tiers

log = logging.getLogger("tensorbus.workers")

T = TypeVar("T")

CONNECT_S = 5.0
FETCH_S = 3600.0
CATCH_UP_S = 2.0
WATCH_S = 0.25
SHARED_BYTES_MIN = 64 << 20
"""Less is not worth more than one source."""
SOURCES_MAX = 8
WRONG_SHOWN = 3
PASSING = (UnavailableError, CorruptError, NotFoundError, FencedError, DeadlineExceededError, DeniedError)
"""What one source may answer, and another not."""
LET_GO_S = 2.0
LET_GO_LOOK_S = 0.005


HERE = TransferReport(path="shm", why="held by the worker of this host")
RELOADED = TransferReport(path="disk", why="it was on this worker's disk")


@dataclass(frozen=True, slots=True)
class How:
    """By which ways this worker fetches, and how it checks what came."""

    ways: Ways
    verify: Verify = Verify.DIGESTS


def ways_of(settings: Settings) -> How:
    """What the settings say about transfers."""
    files, hosts = tls_files(settings), [host.strip() for host in settings.data_host.split(",")]
    ways = Ways(
        connections=settings.data_connections,
        # One address says nothing about routes; several are there to be used side by side.
        locals=tuple(hosts) if len(hosts) > 1 else (),
        tls=None if files is None else files.context(server=False),
        sums=settings.data_verify is not Verify.OFF,
        lines=Lines(),
    )
    return How(ways, settings.data_verify)


@dataclass(frozen=True, slots=True)
class _Opened:
    """A source that the first connection has open, and what it told."""

    origin: Origin
    client: BulkClient
    source: OpenedSource
    manifest: Manifest
    layout: Layout


class Fetches:
    """All transfers into this worker. A transfer belongs to the worker; who waits for it may give up."""

    def __init__(
        self,
        core: Core,
        pool: Pool,
        store: Store,
        puts: Puts,
        how: How | None = None,
        *,
        tiers: Tiers | None = None,
        disk: DiskTier | None = None,
    ) -> None:
        self._how = how or How(Ways())
        self._tiers = tiers
        self._disk = disk
        self._core = core
        self._keys = Keys(core)
        self._pool = pool
        self._store = store
        self._puts = puts
        self._running: dict[Where, Shared[tuple[Held, TransferReport]]] = {}
        self._transfers: dict[Where, Transfer] = {}
        self._doubted: set[Where] = set()
        self.on_wrong: Callable[[WorkerId, Where], None] = lambda _worker, _where: None
        """Told of a worker from which wrong bytes came."""

    def doubt(self, where: Where) -> None:
        """A copy of this was corrupt: the next one is compared with the digests, whatever the settings say."""
        self._doubted.add(where)

    def close(self) -> None:
        """Close the connections that rest."""
        if self._how.ways.lines is not None:
            self._how.ways.lines.close()

    def done_bytes(self, where: Where) -> int:
        """Bytes that have come of a transfer that is under way; 0 if none is."""
        transfer = self._transfers.get(where)
        return 0 if transfer is None else transfer.nbytes_done

    async def ensure(
        self, tenant: str, artifact: ArtifactId, *, deadline: Deadline, keep: bool = True, said: bool = True
    ) -> tuple[Held, TransferReport]:
        """Have the artifact's bytes here.

        Args:
            said: Whether the copy must be on the log already; who only reads need not wait for that.
            keep: Whether they are to come also when this caller gives up. A transfer that nobody waits for and nobody
                wants kept is called off.

        Raises:
            NotFoundError: If it has ended; UnavailableError: If no worker that holds it can be reached.
            OutOfSpaceError: If the pool has no room; CorruptError: If every source gave wrong bytes.
        """
        record = rules.live_artifact(self._core.state, tenant=tenant, artifact=artifact)
        where = (tenant, record.artifact)
        held, running = self._store.get(*where), self._running.get(where)
        if held is not None and not (said and running):
            self._store.used(where)
            return held, HERE
        if running is None:
            running = self._begin(record)
        try:
            async with deadline.scope():
                return await running.wait(keep=keep, early=not said)
        finally:
            if running.unwanted:
                self._forget(where, running)  # who asks from now on has it begun anew
                await running.call_off(patience_s=LET_GO_S)

    def _begin(self, record: Artifact) -> Shared[tuple[Held, TransferReport]]:
        shared = Shared[tuple[Held, TransferReport]]()
        self._running[record.where] = shared
        shared.begin(self._core.finish(self._fetch(record, shared), name=f"fetch {record.artifact}"))
        shared.on_ended(lambda: self._forget(record.where, shared))
        return shared

    def _forget(self, where: Where, shared: Shared[tuple[Held, TransferReport]]) -> None:
        if self._running.get(where) is shared:
            del self._running[where]

    async def reload(self, record: Artifact, *, deadline: Deadline) -> Held | None:
        """Have the bytes here if they are on this worker's disk, for somebody who was sent here for them."""
        if self._disk is None or self._disk.get(record.where) is None:
            return None
        held, _ = await self.ensure(record.tenant, record.artifact, deadline=deadline)
        return held

    async def _fetch(
        self, record: Artifact, shared: Shared[tuple[Held, TransferReport]]
    ) -> tuple[Held, TransferReport]:
        held, report = await shared.part(self._bring_here(record))
        came = held.came or report

        def on_held(held: Held) -> None:
            now = self._core.state.artifact(*record.where)
            if now is not None and now.live and now.born == record.born:
                shared.hand_out((held, came))

        try:
            held, _ = await self._puts.add_replica(held, on_held=on_held, deadline=known_outcome())
        except ConflictError:
            # It ended while it came. What lives under its id now, if anything does, is another life of it.
            now = rules.live_artifact(self._core.state, tenant=held.tenant, artifact=held.artifact)
            return await self._fetch(now, shared)
        self._doubted.discard(record.where)
        return held, held.came or came

    async def _bring_here(self, record: Artifact) -> tuple[Held, TransferReport]:
        """Bytes from this worker's disk or from others, in memory of our own and said to nobody yet."""
        failures: list[TensorbusError] = []
        try:
            held = await self._from_disk(record)
        except (CorruptError, UnavailableError) as error:
            failures.append(error)
        else:
            if held is not None:
                return held, RELOADED
        alone, sources = False, self._sources(record)
        while sources:
            source = sources.pop(0)
            try:
                held = await self._from(source, record, alone=alone)
            except PASSING as error:
                log.warning("fetch failed: artifact=%s source=%s reason=%s", record.artifact, source.worker, error)
                failures.append(error)
                if isinstance(error, CorruptError) and not alone:
                    # Of several that brought wrong bytes together nobody knows whose they are: each is asked alone.
                    alone, sources = True, self._sources(record) if _shared(record) else sources
                continue
            return held, TransferReport(path="tcp", why=f"from worker {source.worker}")
        await self._catch_up()
        raise self._no_source(record, failures)

    async def _from_disk(self, record: Artifact) -> Held | None:
        """Bytes of this worker's disk; if they are in doubt, only if they are those of the digests."""
        if self._disk is None:
            return None
        spill = self._disk.get(record.where)
        held = await self._disk.read(record, self._room)
        if held is None or record.where not in self._doubted or not held.manifest.digested:
            return held
        wrong = await asyncio.to_thread(wrong_tensors, held)
        if not wrong:
            return held
        held.release()
        error = CorruptError(f"{record.artifact!r} was spilled with wrong bytes: {', '.join(wrong[:WRONG_SHOWN])}")
        if spill is not None:
            await self._disk.corrupt(record.where, spill, error)
        raise error

    async def _catch_up(self) -> None:
        """A source may know of an end that has not come here: what is gone must not be called unreachable."""
        deadline = Deadline(CATCH_UP_S, what="reading the end of the log")
        try:
            await self._core.feed.reached(await self._core.bus.last_seq(deadline=deadline), deadline=deadline)
        except (UnavailableError, DeadlineExceededError):
            return  # then it is said by what is known here

    def _sources(self, record: Artifact) -> list[Session]:
        me = self._core.me.worker
        return [one for one in sources_of(self._core.state, record) if one.data and one.worker != me]

    async def _from(self, source: Session, record: Artifact, *, alone: bool) -> Held:
        """Copy the bytes into a segment of our own and check them: from this source, and unless ``alone`` from
        the others that have them laid out alike."""
        deadline = Deadline(FETCH_S, what=f"fetching {record.artifact}")
        lead = await self._open(source, record, deadline)
        segment: Segment | None = None
        handed_over = False
        try:
            others = [] if alone else await self._others(lead, record, deadline)
            segment = await self._room(lead.layout.nbytes, record.tenant)
            segment.label = record.artifact
            held = Held(record.tenant, record.artifact, (segment,), lead.layout, lead.manifest)
            held.blocks = BlockTable(spans_of(lead.manifest, lead.layout))
            handed_over = True
            await self._bring(lead, others, held, deadline)
            segment.seal()
            return held
        except BaseException:
            if segment is not None:
                segment.release()
            if not handed_over:
                lead.client.close()
            raise

    async def _open(self, source: Session, record: Artifact, deadline: Deadline) -> _Opened:
        """Connect to a source and hear what it has."""
        try:
            origin, client, opened = await self._reached(source, record, deadline)
        except DeniedError:  # it has given so many keys since that it forgot ours
            if not self._keys.forget(source.worker):
                raise
            origin, client, opened = await self._reached(source, record, deadline)
        try:
            manifest = await off_loop(Manifest.from_json, opened.manifest, weight=record.tensors)
            layout = Layout.from_json(opened.layout, manifest)
            if record.digest is not None and manifest.digested and manifest.content_id() != record.digest:
                raise CorruptError(f"worker {source.worker} has another manifest for {record.artifact!r}")
            return _Opened(origin, client, opened, manifest, layout)
        except BaseException:
            client.close()
            raise

    async def _reached(
        self, source: Session, record: Artifact, deadline: Deadline
    ) -> tuple[Origin, BulkClient, OpenedSource]:
        permit = await self._keys.sign(source.worker, source.incarnation, _question(record), deadline=deadline)
        origin = Origin(name=source.worker, addresses=parse_addresses(source.data), request={"permit": permit})
        connecting = Deadline(CONNECT_S, what=f"connecting to worker {origin.name}")
        work = partial(self._how.ways.open, origin, 0, tables=True, deadline=connecting)
        opening = asyncio.ensure_future(asyncio.to_thread(work))
        try:
            return origin, *await asyncio.shield(opening)
        except BaseException:
            opening.add_done_callback(_hang_up)
            raise

    async def _others(self, lead: _Opened, record: Artifact, deadline: Deadline) -> list[Origin]:
        """More who have it, if there is enough to share out."""
        if not _shared(record):
            return []
        others = {one.worker: one for one in self._sources(record) if one.worker != lead.origin.name}
        asked = {worker: others[worker].incarnation for worker in list(others)[:SOURCES_MAX]}
        permits = await self._keys.sign_all(asked, _question(record), deadline=deadline)
        return [
            Origin(name=worker, addresses=parse_addresses(others[worker].data), request={"permit": permit})
            for worker, permit in permits.items()
        ]

    async def _bring(self, lead: _Opened, others: list[Origin], held: Held, deadline: Deadline) -> None:
        (segment,), table = held.parts, held.blocks
        assert table is not None, "made with what is to come"
        transfer = Transfer(
            table.blocks, segment.view, tables=lead.source.tables, ways=self._how.ways, learn=table.learn
        )
        opened = (lead.client, lead.source)
        work = partial(transfer.run, [lead.origin, *others], opened=opened, deadline=deadline)
        self._transfers[held.where] = transfer
        arrivals = self._arrivals(held)
        if arrivals is not None:
            work = partial(arrivals.run, transfer, work)
        try:
            report = await _in_thread(transfer, work, self._watch(transfer, [lead.origin, *others]))
        finally:
            if self._transfers.get(held.where) is transfer:  # not that of who began anew after this was called off
                del self._transfers[held.where]
            for name, error in transfer.failures.items():
                if isinstance(error, CorruptError):
                    self.on_wrong(WorkerId(name), held.where)
        if arrivals is not None and arrivals.wrong:
            for name in report.sources:
                self.on_wrong(WorkerId(name), held.where)
            wrong = [held.manifest.names[number] for number in arrivals.wrong[:WRONG_SHOWN]]
            raise CorruptError(
                f"{held.artifact!r} came with bytes that are not its digests': {', '.join(wrong)}",
                artifact=held.artifact,
                wrong=wrong,
            )
        held.came = replace(report, why=self._why(report))

    def _arrivals(self, held: Held) -> Arrivals | None:
        """What compares the tensors that come with their digests, if that is to be done."""
        wanted = self._how.verify is Verify.DIGESTS or held.where in self._doubted
        if not wanted or not held.manifest.digested:
            return None
        (segment,), table = held.parts, held.blocks
        assert table is not None, "made with what is to come"
        places = [
            Place(offset, spec.nbytes, spec.digest or "")
            for spec, offset in zip(held.manifest, held.layout.offsets, strict=True)
        ]
        return Arrivals(table.blocks, segment.view, places)

    async def _watch(self, transfer: Transfer, origins: list[Origin]) -> None:
        """Ask no more of a source whose session has ended: it may be stopped, and silent for ever."""
        born = {one.name: self._incarnation(one.name) for one in origins}
        while True:
            await asyncio.sleep(WATCH_S)
            for name, incarnation in born.items():
                if incarnation is None or not self._core.state.is_live(WorkerId(name), incarnation):
                    transfer.drop(name, UnavailableError(f"the session of worker {name} has ended", worker=name))

    def _incarnation(self, worker: str) -> Incarnation | None:
        session = self._core.state.sessions.get(WorkerId(worker))
        return None if session is None else session.incarnation

    def _why(self, report: TransferReport) -> str:
        hosts = [
            f"worker {name} on host {self._core.state.sessions[WorkerId(name)].host}"
            for name in sorted(report.sources)
            if name in self._core.state.sessions
        ]
        return f"from {', '.join(hosts) or 'nobody: it has no bytes'}"

    async def _room(self, nbytes: int, tenant: str) -> Segment:
        """Memory for a copy; waits a moment for what callers have been asked to let go of."""
        patience = Deadline(LET_GO_S)
        while True:
            try:
                if self._tiers is not None:
                    return await self._tiers.allocate(nbytes, tenant=tenant)
                return self._pool.allocate(nbytes, tenant=tenant, writer=None)
            except OutOfSpaceError as error:
                if not error.details.get("retiring_bytes") or not patience.left():
                    raise
            await asyncio.sleep(LET_GO_LOOK_S)

    def _no_source(self, record: Artifact, failures: list[TensorbusError]) -> TensorbusError:
        now = self._core.state.artifact(record.tenant, record.artifact)
        if now is None or not now.live:
            return rules.missing_artifact(now, record.artifact)
        corrupt = all(isinstance(failure, CorruptError) for failure in failures)
        if corrupt and now.quarantined and not now.replicas:
            return rules.corrupt_artifact(now)
        holders = sorted({replica.worker for replica in record.replicas.values()})
        cls = CorruptError if failures and corrupt else UnavailableError
        reason = "; ".join(str(failure) for failure in failures) or "none of them can be reached from here"
        return cls(
            f"artifact {record.artifact!r} is on {', '.join(holders) or 'no worker'}: {reason}",
            artifact=record.artifact,
            workers=holders,
        )


def _shared(record: Artifact) -> bool:
    """Whether it is enough to be brought by several sources."""
    return record.nbytes >= SHARED_BYTES_MIN


def _question(record: Artifact) -> PermitAsk:
    return PermitAsk(op="read", tenant=record.tenant, artifact=record.artifact)


async def _in_thread(transfer: Transfer, work: Callable[[], T], watch: Coroutine[Any, Any, None]) -> T:
    """Run a blocking transfer; cancelling ends it, so that no thread touches its memory before that goes."""
    task = asyncio.ensure_future(asyncio.to_thread(work))
    watching = asyncio.ensure_future(watch)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        transfer.cancel()
        await asyncio.gather(task, return_exceptions=True)
        raise
    finally:
        watching.cancel()


def _hang_up(opening: asyncio.Future[tuple[BulkClient, OpenedSource]]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result()[0].close()
