"""What this worker lends to readers on other hosts, and takes in from callers without a worker. Called from threads."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine, Mapping
from contextlib import ExitStack
from typing import Any, TypeVar

from tensorbus.clock import Deadline
from tensorbus.errors import CorruptError, InvalidArgumentError, NotFoundError
from tensorbus.ids import ArtifactId
from tensorbus.lifecycle import Artifact, rules
from tensorbus.model import Layout, Manifest
from tensorbus.projections import artifact_info
from tensorbus.transport import BulkServer, BulkSink, BulkSource, Pool, Segment
from tensorbus.workers import _requests as ask
from tensorbus.workers._core import Core
from tensorbus.workers._puts import Incoming, Puts, Taken, digest_held, known_outcome
from tensorbus.workers._store import Held, Store

T = TypeVar("T")

ASK_S = 30.0


class BulkSide:
    """Owner of the bytes that the bulk server moves. The worker's loop decides, the server's threads wait for it."""

    def __init__(self, core: Core, pool: Pool, store: Store, puts: Puts) -> None:
        self._core = core
        self._pool = pool
        self._store = store
        self._puts = puts
        self._loop = asyncio.get_running_loop()
        self._server: BulkServer | None = None

    def start(self, host: str, port: int) -> str:
        """Listen; gives ``host:port``, with commas for several hosts."""
        self._server = BulkServer(host, port, self)
        return self._server.address

    def close(self) -> None:
        """End every transfer. Blocks shortly; call it off the loop."""
        if self._server is not None:
            self._server.close()

    # -- called from the server's threads -----------------------------------------------------------------------------

    def open_source(self, request: Mapping[str, object]) -> BulkSource:
        return self._on_loop(self._lend(request), timeout_s=ASK_S)

    def open_sink(self, request: Mapping[str, object], nbytes: int) -> BulkSink:
        tenant = ask.parse(ask.BulkAsk, dict(request), op="put").tenant
        segment = self._pool.allocate(nbytes, tenant=tenant, writer=None)
        segment.label = "a put over TCP"
        handed_in: list[Segment] = []
        return BulkSink(
            view=segment.view,
            commit=lambda fields: self._on_loop(self._commit(tenant, segment, fields, handed_in), timeout_s=None),
            # What was handed in is the put's to give back: its fact may be under way.
            abort=lambda: None if handed_in else segment.release(),
        )

    def _on_loop(self, work: Coroutine[Any, Any, T], *, timeout_s: float | None) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout_s)

    # -- on the worker's loop -----------------------------------------------------------------------------------------

    async def _lend(self, request: Mapping[str, object]) -> BulkSource:
        asked = ask.parse(ask.BulkOpen, dict(request), op="open")
        record = await self._resolved(asked)
        held = self._store.get(asked.tenant, record.artifact)
        if held is None:
            raise NotFoundError(
                f"worker {self._core.me.worker} does not hold artifact {record.artifact!r}", artifact=record.artifact
            )
        tables = await held.tables()
        stack = ExitStack()
        return BulkSource(
            tables=tables,
            nbytes=held.nbytes,
            parts=stack.enter_context(held.reading()),
            generation=held.parts[0].generation,
            valid=lambda: held.valid and self._store.get(*held.where) is held,
            release=stack.close,
        )

    async def _resolved(self, asked: ask.BulkOpen) -> Artifact:
        deadline = Deadline(ASK_S / 2, what=f"looking for {asked.artifact}")
        while True:
            try:
                return rules.resolve(self._core.state, tenant=asked.tenant, ref=asked.artifact, by="id")
            except NotFoundError:
                if not await self._core.may_come(deadline):
                    raise

    async def _commit(
        self, tenant: str, segment: Segment, fields: Mapping[str, object], handed_in: list[Segment]
    ) -> dict[str, object]:
        asked = ask.parse(ask.BulkCommit, dict(fields), op="commit")
        manifest = Manifest.from_json(asked.manifest)
        layout = Layout.from_json(json.dumps(asked.layout), manifest)
        if layout.nbytes > segment.nbytes:
            raise InvalidArgumentError(f"the layout needs {layout.nbytes} bytes, {segment.nbytes} came")
        probe = Held(tenant, ArtifactId(""), (segment,), layout, manifest)
        found = await asyncio.to_thread(digest_held, probe)
        if manifest.digested and found != manifest:
            raise CorruptError("the bytes that came are not those of the digests that came with them")
        incoming = Incoming(
            tenant=tenant,
            principal=asked.principal,
            parts=(segment,),
            layout=layout,
            manifest=found,
            given=asked.id,
            key=asked.key,
            rebind=asked.rebind,
        )

        async def take() -> Taken:
            handed_in.append(segment)
            return await self._puts.take(incoming, deadline=known_outcome())

        taken = await self._core.finish(take(), name="put over TCP")
        record = rules.live_artifact(self._core.state, tenant=tenant, artifact=taken.artifact)
        info = artifact_info(self._core.state, record)
        return {"artifact": info, "position": taken.position, "existed": taken.existed}
