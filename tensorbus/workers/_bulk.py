"""What this worker lends to readers on other hosts, and takes in from callers without a worker. Called from threads."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from typing import Any, TypeVar

from tensorbus.clock import Deadline
from tensorbus.errors import ConflictError, CorruptError, InvalidArgumentError, NotFoundError, OutOfSpaceError
from tensorbus.ids import ArtifactId, WorkerId
from tensorbus.lifecycle import Artifact, rules
from tensorbus.model import Layout, Manifest
from tensorbus.projections import artifact_info
from tensorbus.transport import (
    BulkServer,
    BulkSink,
    BulkSource,
    PagePool,
    PageSource,
    Segment,
    TenantPages,
    TlsFiles,
    page_round,
)
from tensorbus.transport._spill import mapped_spill
from tensorbus.workers import _requests as ask
from tensorbus.workers._core import Core, off_loop
from tensorbus.workers._disk import DiskTier
from tensorbus.workers._fetch import Fetches
from tensorbus.workers._permits import KeyAsk, PermitAsk, Permits, parse_ask
from tensorbus.workers._puts import Incoming, Placement, Puts, Taken, digest_held, known_outcome
from tensorbus.workers._readers import Readers
from tensorbus.workers._store import Held, Store
from tensorbus.workers._tiers import Tiers
from tensorbus.workers._transfers import large, shared

log = logging.getLogger("tensorbus.workers")

T = TypeVar("T")

ASK_S = 30.0
ROOM_S = 300.0
"""Until what leaves memory has made room for what comes."""


class BulkSide:
    """Owner of the bytes that the bulk server moves. The worker's loop decides, the server's threads wait for it."""

    def __init__(
        self,
        core: Core,
        store: Store,
        puts: Puts,
        fetches: Fetches,
        *,
        tiers: Tiers,
        disk: DiskTier,
        pages: PagePool,
    ) -> None:
        self._core = core
        self._permits = Permits(core.ids, core.clock)
        self._readers = Readers()
        self._store = store
        self._puts = puts
        self._fetches = fetches
        self._tiers = tiers
        self._disk = disk
        self._pages = pages
        self._loop = asyncio.get_running_loop()
        self._server: BulkServer | None = None

    def start(self, host: str, port: int, *, tls: TlsFiles | None) -> str:
        """Listen; gives ``host:port``, with commas for several hosts."""
        context = None if tls is None else tls.context(server=True)
        self._server = BulkServer(host, port, self, pages=self, tls=context)
        return self._server.address

    @asynccontextmanager
    async def permitting(self) -> AsyncIterator[None]:
        """Issue permits over the bus for as long as the context is open."""
        bus, me = self._core.bus, self._core.me.worker
        async with bus.answer(bus.subjects.rpc(f"permit.{me}"), self._permit, queue=f"permit-{me}"):
            yield

    def close(self) -> None:
        """End every transfer. Blocks shortly; call it off the loop."""
        if self._server is not None:
            self._server.close()

    # -- called from the server's threads -----------------------------------------------------------------------------

    def open_source(self, request: Mapping[str, object]) -> BulkSource:
        return self._at_hand(request) or self._on_loop(self._lend(request), timeout_s=ASK_S)

    def open_pages(self, request: Mapping[str, object]) -> PageSource:
        permit = self._on_loop(self._allowed(request, "pages"), timeout_s=ASK_S)
        return TenantPages(self._pages, permit.tenant)

    def open_sink(self, request: Mapping[str, object], nbytes: int) -> BulkSink:
        permit = self._on_loop(self._allowed(request, "put"), timeout_s=ASK_S)
        segment = self._on_loop(self._tiers.allocate(nbytes, tenant=permit.tenant), timeout_s=ROOM_S)
        segment.label = "a put over TCP"
        handed_in: list[Segment] = []
        return BulkSink(
            view=segment.view,
            commit=lambda fields: self._on_loop(self._commit(permit, segment, fields, handed_in), timeout_s=None),
            # What was handed in is the put's to give back: its fact may be under way.
            abort=lambda: None if handed_in else segment.release(),
        )

    def _at_hand(self, request: Mapping[str, object]) -> BulkSource | None:
        """What is in memory under that very id, without waiting for the loop; ``None`` if it must look."""
        asked = self._permits.check(request.get("permit"), "read")
        held = self._store.get(asked.tenant, ArtifactId(asked.artifact))
        if held is None or held.settling or large(held.nbytes):
            return None
        try:
            return self._source(held)
        except ConflictError:  # it ends just now
            return None

    def _source(
        self, held: Held, *, await_block: Callable[[int], None] | None = None, ahead: Sequence[WorkerId] = ()
    ) -> BulkSource:
        tables, stack = held.tables(), ExitStack()
        return BulkSource(
            tables=tables,
            nbytes=held.nbytes,
            parts=stack.enter_context(held.reading()),
            generation=held.parts[0].generation,
            # What is still arriving is in nobody's store; its blocks that have come are right all the same.
            valid=lambda: (
                held.valid and not held.wrong and (await_block is not None or self._store.get(*held.where) is held)
            ),
            release=stack.close,
            await_block=await_block,
            ahead=ahead,
        )

    def _on_loop(self, work: Coroutine[Any, Any, T], *, timeout_s: float | None) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout_s)

    # -- on the worker's loop -----------------------------------------------------------------------------------------

    async def _permit(self, data: bytes) -> bytes:
        asked = parse_ask(data)
        if isinstance(asked, KeyAsk):
            key = self._permits.issue_key()
            return json.dumps({"key": key.id, "secret": key.secret.hex()}).encode()
        if asked.op == "read":
            record = await self._resolved(asked)
            if self._store.get(*record.where) is None and self._disk.get(record.where) is None:
                raise self._not_here(record)
        return json.dumps({"token": self._permits.issue(asked)}).encode()

    async def _allowed(self, request: Mapping[str, object], op: str) -> PermitAsk:
        return self._permits.check(request.get("permit"), op)

    async def _held(self, record: Artifact) -> Held:
        held = self._store.get(*record.where)
        if held is None:
            held = await self._fetches.reload(record, deadline=Deadline(ASK_S, what="reading it from disk"))
        if held is None:
            raise self._not_here(record)
        return held

    def _not_here(self, record: Artifact) -> NotFoundError:
        me = self._core.me.worker
        return NotFoundError(f"worker {me} does not hold artifact {record.artifact!r}", artifact=record.artifact)

    async def _lend(self, request: Mapping[str, object]) -> BulkSource:
        asked = self._permits.check(request.get("permit"), "read")
        record = await self._resolved(asked)
        if request.get("arriving") is True and self._store.get(*record.where) is None:
            arriving = await self._fetches.arriving(record.where)
            if arriving is not None:
                return await self._lent(arriving.held, await_block=arriving.transfer.await_block)
        try:
            held = await self._held(record)
        except OutOfSpaceError as error:
            log.info("lent from disk: artifact=%s reason=%s", record.artifact, error)
            return await self._lent_from_disk(record)
        reader = request.get("reader")
        ahead: list[WorkerId] = []
        if isinstance(reader, str) and reader in self._core.state.sessions and shared(record):
            ahead = self._readers.ahead(self._core.state, record, WorkerId(reader))
        return await self._lent(held, ahead=ahead)

    async def _lent(
        self, held: Held, *, await_block: Callable[[int], None] | None = None, ahead: Sequence[WorkerId] = ()
    ) -> BulkSource:
        await off_loop(Held.tables, held, weight=len(held.manifest))
        return self._source(held, await_block=await_block, ahead=ahead)

    async def _lent_from_disk(self, record: Artifact) -> BulkSource:
        """What is on disk, though memory has no room for it."""
        spill, held = await self._disk.lend(record)
        tables = await off_loop(Held.tables, held, weight=len(held.manifest))
        stack = ExitStack()
        parts = stack.enter_context(mapped_spill(spill))
        return BulkSource(
            tables=tables,
            nbytes=sum(page_round(len(part)) for part in parts[:-1]) + len(parts[-1]),
            parts=parts,
            generation=0,
            valid=lambda: self._disk.get(record.where) is spill,
            release=stack.close,
        )

    async def _resolved(self, asked: PermitAsk) -> Artifact:
        deadline = Deadline(ASK_S / 2, what=f"looking for {asked.artifact}")
        while True:
            try:
                return rules.resolve(self._core.state, tenant=asked.tenant, ref=asked.artifact, by="id")
            except NotFoundError:
                if not await self._core.may_come(deadline):
                    raise

    async def _commit(
        self, permit: PermitAsk, segment: Segment, fields: Mapping[str, object], handed_in: list[Segment]
    ) -> dict[str, object]:
        asked = ask.parse(ask.BulkCommit, dict(fields), op="commit")
        manifest = Manifest.from_json(asked.manifest)
        layout = Layout.from_value(asked.layout, manifest)
        if layout.nbytes > segment.nbytes:
            raise InvalidArgumentError(f"the layout needs {layout.nbytes} bytes, {segment.nbytes} came")
        probe = Held(permit.tenant, ArtifactId(""), (segment,), layout, manifest)
        found = await asyncio.to_thread(digest_held, probe)
        if manifest.digested and found != manifest:
            raise CorruptError("the bytes that came are not those of the digests that came with them")
        incoming = Incoming(
            tenant=permit.tenant,
            principal=permit.principal,
            parts=(segment,),
            layout=layout,
            manifest=found,
            given=asked.id,
            key=asked.key,
            rebind=asked.rebind,
            disk=Placement(asked.disk),
        )

        async def take() -> Taken:
            handed_in.append(segment)
            return await self._puts.take(incoming, deadline=known_outcome())

        taken = await self._core.finish(take(), name="put over TCP")
        record = rules.live_artifact(self._core.state, tenant=permit.tenant, artifact=taken.artifact)
        info = artifact_info(self._core.state, record)
        return {"artifact": info, "position": taken.position, "existed": taken.existed}
