"""Bytes on their way here from other workers: who is asked for them, and what becomes of them in memory of ours."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, TypeVar

from tensorbus.clock import Deadline
from tensorbus.config import Settings, Verify
from tensorbus.errors import (
    CorruptError,
    DeadlineExceededError,
    DeniedError,
    FencedError,
    NotFoundError,
    UnavailableError,
)
from tensorbus.ids import Incarnation, WorkerId
from tensorbus.lifecycle import Artifact, Session
from tensorbus.model import Layout, Manifest
from tensorbus.transport import (
    Arrivals,
    BlockTable,
    BulkClient,
    Lines,
    OpenedSource,
    Origin,
    Place,
    Segment,
    Transfer,
    TransferReport,
    Ways,
    parse_addresses,
    tls_files,
)
from tensorbus.workers._core import Core, off_loop
from tensorbus.workers._directory_ops import sources_of
from tensorbus.workers._permits import Keys, PermitAsk
from tensorbus.workers._store import Held, Where, spans_of

log = logging.getLogger("tensorbus.workers")

T = TypeVar("T")

CONNECT_S: Final = 5.0
FETCH_S: Final = 3600.0
WATCH_S: Final = 0.25
SHARED_BYTES_MIN: Final = 64 << 20
"""Less is not worth more than one source."""
SOURCES_MAX: Final = 8
RELAYS_TRIED: Final = 2
RELAY_LOOKS: Final = 20
"""After so many looks at a transfer that brings nothing, who only hands on is left for a worker that has it all."""
WRONG_SHOWN: Final = 3
PASSING: Final = (UnavailableError, CorruptError, NotFoundError, FencedError, DeadlineExceededError, DeniedError)
"""What one source may answer, and another not."""

Room = Callable[[int, str], Awaitable[Segment]]


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


def large(nbytes: int) -> bool:
    """Whether it is enough to be brought by several sources, or handed on while it comes."""
    return nbytes >= SHARED_BYTES_MIN


def shared(record: Artifact) -> bool:
    """Whether an artifact is :func:`large`."""
    return large(record.nbytes)


@dataclass(frozen=True, slots=True)
class Arriving:
    """Bytes on their way here: what has come can be lent already."""

    held: Held
    transfer: Transfer


@dataclass(frozen=True, slots=True)
class _Opened:
    """A source that the first connection has open, and what it told."""

    origin: Origin
    client: BulkClient
    source: OpenedSource
    manifest: Manifest
    layout: Layout


class Transfers:
    """The transfers into this worker's memory. Lives on its loop; each runs in threads of its own."""

    def __init__(self, core: Core, how: How, room: Room) -> None:
        self._core = core
        self._how = how
        self._room = room
        self._keys = Keys(core)
        self._arriving: dict[Where, Arriving] = {}
        self._doubted: set[Where] = set()
        self.on_wrong: Callable[[WorkerId, Where], None] = lambda _worker, _where: None
        """Told of a worker from which wrong bytes came."""

    def close(self) -> None:
        """Close the connections that rest."""
        if self._how.ways.lines is not None:
            self._how.ways.lines.close()

    def arriving(self, where: Where) -> Arriving | None:
        return self._arriving.get(where)

    def doubt(self, where: Where) -> None:
        """A copy of this was corrupt: the next one is compared with the digests, whatever the settings say."""
        self._doubted.add(where)

    def doubted(self, where: Where) -> bool:
        return where in self._doubted

    def trust(self, where: Where) -> None:
        """A copy of this is right."""
        self._doubted.discard(where)

    def sources(self, record: Artifact) -> list[Session]:
        """The other workers that have it all."""
        me = self._core.me.worker
        return [one for one in sources_of(self._core.state, record) if one.data and one.worker != me]

    async def bring(self, source: Session, record: Artifact, *, alone: bool, relayed: bool) -> Held:
        """Copy the bytes into a segment of our own and check them: from this source, and from others that have them
        laid out alike.

        Args:
            alone: Whether only this source is asked.
            relayed: Whether they may come from a worker that is still getting them from this source.

        Raises:
            CorruptError: If other bytes came than should; else one of :data:`PASSING`, or OutOfSpaceError.
        """
        deadline = Deadline(FETCH_S, what=f"fetching {record.artifact}")
        lead = await self._open(source, record, {"reader": self._core.me.worker}, deadline)
        relay, segment, handed_over = None, None, False
        try:
            if relayed and not alone and shared(record):
                relay = await self._relay(lead, record, deadline)
            others = [] if alone else await self._others(lead, record, deadline)
            segment = await self._room(lead.layout.nbytes, record.tenant)
            segment.label = record.artifact
            held = Held(record.tenant, record.artifact, (segment,), lead.layout, lead.manifest)
            held.blocks = BlockTable(spans_of(lead.manifest, lead.layout))
            handed_over = True
            if relay is None:
                await self._carry(lead, [lead.origin, *others], [], held, deadline)
            else:
                lead.client.close()
                await self._carry(relay, [relay.origin], [lead.origin, *others], held, deadline)
            segment.seal()
            return held
        except BaseException:
            if segment is not None:
                segment.release()
            if not handed_over:
                lead.client.close()
                if relay is not None:
                    relay.client.close()
            raise

    # -- who is asked -------------------------------------------------------------------------------------------------

    async def _open(self, source: Session, record: Artifact, asked: dict[str, object], deadline: Deadline) -> _Opened:
        """Connect to a source and hear what it has.

        Args:
            asked: What the first connection asks for, besides showing its permit.
        """
        try:
            origin, client, opened = await self._reached(source, record, asked, deadline)
        except DeniedError:  # it has given so many keys since that it forgot ours
            if not self._keys.forget(source.worker):
                raise
            origin, client, opened = await self._reached(source, record, asked, deadline)
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
        self, source: Session, record: Artifact, asked: dict[str, object], deadline: Deadline
    ) -> tuple[Origin, BulkClient, OpenedSource]:
        permit = await self._keys.sign(source.worker, source.incarnation, _question(record), deadline=deadline)
        origin = Origin(name=source.worker, addresses=parse_addresses(source.data), request={"permit": permit})
        connecting = Deadline(CONNECT_S, what=f"connecting to worker {origin.name}")
        asking = replace(origin, request={**origin.request, **asked})
        # What is large may come from elsewhere; what has no bytes has no block.
        first = record.nbytes > 0 and not shared(record)
        work = partial(self._how.ways.open, asking, 0, tables=True, first=first, deadline=connecting)
        opening = asyncio.ensure_future(asyncio.to_thread(work))
        try:
            return origin, *await asyncio.shield(opening)
        except BaseException:
            opening.add_done_callback(_hang_up)
            raise

    async def _relay(self, lead: _Opened, record: Artifact, deadline: Deadline) -> _Opened | None:
        """A worker that began before us to get the bytes from the same source, and hands on what has come.

        So the source sends them about once, whoever many want them. Only who began before is asked, and only by who
        begins: nobody waits for somebody who waits for it.
        """
        for name in reversed(lead.source.ahead[-RELAYS_TRIED:]):
            session = self._core.state.sessions.get(WorkerId(name))
            if session is None or not session.live or not session.data or name == self._core.me.worker:
                continue
            try:
                relay = await self._open(session, record, {"arriving": True}, deadline)
            except PASSING as error:
                log.info("%s hands nothing on: artifact=%s reason=%s", name, record.artifact, error)
                continue
            if relay.source.tables == lead.source.tables:
                origin = replace(relay.origin, request={**relay.origin.request, "arriving": True})
                return replace(relay, origin=origin)
            relay.client.close()
        return None

    async def _others(self, lead: _Opened, record: Artifact, deadline: Deadline) -> list[Origin]:
        """More who have it, if there is enough to share out."""
        if not shared(record):
            return []
        others = {one.worker: one for one in self.sources(record) if one.worker != lead.origin.name}
        asked = {worker: others[worker].incarnation for worker in list(others)[:SOURCES_MAX]}
        permits = await self._keys.sign_all(asked, _question(record), deadline=deadline)
        return [
            Origin(name=worker, addresses=parse_addresses(others[worker].data), request={"permit": permit})
            for worker, permit in permits.items()
        ]

    # -- what comes ---------------------------------------------------------------------------------------------------

    async def _carry(
        self, lead: _Opened, origins: Sequence[Origin], reserve: Sequence[Origin], held: Held, deadline: Deadline
    ) -> None:
        """Run the transfer.

        Args:
            lead: The first of the origins, which the transfer closes.
            reserve: Who is turned to if the origins fail.
        """
        (segment,), table = held.parts, held.blocks
        assert table is not None, "made with what is to come"
        transfer = Transfer(
            table.blocks, segment.view, tables=lead.source.tables, ways=self._how.ways, learn=table.learn
        )
        opened = (lead.client, lead.source)
        work = partial(transfer.run, origins, reserve=reserve, opened=opened, deadline=deadline)
        arriving = self._arriving[held.where] = Arriving(held, transfer)
        arrivals = self._arrivals(held)
        if arrivals is not None:
            work = partial(arrivals.run, transfer, work)
        relay = origins[0].name if reserve else None
        try:
            report = await _in_thread(transfer, work, self._watch(transfer, [*origins, *reserve], relay))
        finally:
            if self._arriving.get(held.where) is arriving:  # not that of who began anew after this was called off
                del self._arriving[held.where]
            for name, error in transfer.failures.items():
                if isinstance(error, CorruptError):
                    self.on_wrong(WorkerId(name), held.where)
        if arrivals is not None and arrivals.wrong:
            for name in report.sources:
                self.on_wrong(WorkerId(name), held.where)
            raise _wrong(held, arrivals.wrong)
        held.came = replace(report, why=self._why(report))

    def _arrivals(self, held: Held) -> Arrivals | None:
        """What compares the tensors that come with their digests, if that is to be done."""
        wanted = self._how.verify is Verify.DIGESTS or self.doubted(held.where)
        if not wanted or not held.manifest.digested:
            return None
        (segment,), table = held.parts, held.blocks
        assert table is not None, "made with what is to come"
        places = [
            Place(offset, spec.nbytes, spec.digest or "")
            for spec, offset in zip(held.manifest, held.layout.offsets, strict=True)
        ]
        return Arrivals(table.blocks, segment.view, places)

    async def _watch(self, transfer: Transfer, origins: Sequence[Origin], relay: str | None) -> None:
        """Ask no more of a source whose session has ended: it may be stopped, and silent for ever. Nor of one that only
        hands on and has had nothing for a while, when others have it all."""
        born = {one.name: self._incarnation(one.name) for one in origins}
        done, looks = 0, 0
        while True:
            await asyncio.sleep(WATCH_S)
            for name, incarnation in born.items():
                if incarnation is None or not self._core.state.is_live(WorkerId(name), incarnation):
                    transfer.drop(name, UnavailableError(f"the session of worker {name} has ended", worker=name))
            now = transfer.nbytes_done
            done, looks = now, looks + 1 if now == done else 0
            if relay is not None and looks >= RELAY_LOOKS:
                transfer.drop(relay, UnavailableError(f"worker {relay} hands nothing on any more", worker=relay))

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


def _question(record: Artifact) -> PermitAsk:
    return PermitAsk(op="read", tenant=record.tenant, artifact=record.artifact)


def _wrong(held: Held, numbers: Sequence[int]) -> CorruptError:
    wrong = [held.manifest.names[number] for number in numbers[:WRONG_SHOWN]]
    text = f"{held.artifact!r} came with bytes that are not its digests': {', '.join(wrong)}"
    return CorruptError(text, artifact=held.artifact, wrong=wrong)


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
