"""Bytes without a worker on this host: read from the replicas' workers into own memory, and sent to one of them."""

from __future__ import annotations

import asyncio
import logging
import mmap
import platform
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, TypeVar

from tensorbus.clock import Deadline
from tensorbus.errors import (
    CorruptError,
    DeniedError,
    FencedError,
    NotFoundError,
    OutOfSpaceError,
    TensorbusError,
    UnavailableError,
)
from tensorbus.model import Layout, Manifest, TensorSpec, TensorView, ViewSpec
from tensorbus.sdk._link import ConnectionLostError
from tensorbus.sdk._maps import Opened
from tensorbus.sdk._records import ArtifactInfo, parse, position_of
from tensorbus.sdk._threads import in_thread
from tensorbus.transport import BulkClient, Origin, Transfer, Ways, cut, hash_bytes, merged, parse_addresses

if TYPE_CHECKING:
    from tensorbus.sdk._core import Core
    from tensorbus.sdk._fill import Progress
    from tensorbus.sdk._put import Collected, PutOptions

log = logging.getLogger("tensorbus.sdk")

T = TypeVar("T")
_COMPLAIN_S: Final = 5.0
_NORESERVE: Final = getattr(mmap, "MAP_NORESERVE", 0x4000 if platform.machine() in ("x86_64", "aarch64") else 0)


async def open_remote(core: Core, info: ArtifactInfo, *, view: ViewSpec | None, why: str, deadline: Deadline) -> Opened:
    """The artifact's bytes in memory of this process, from the workers that have them.

    Tensors that come whole are verified by their digests. Of a view only what it needs comes: its tensors, and of one
    that is sliced along its first dimension the rows from the first to the last that it takes, which have no digest.

    Args:
        why: What the report says for it.

    Raises:
        OutOfSpaceError: If this process gets no memory for it.
        NotFoundError: If the artifact has ended; UnavailableError: If no worker that holds it can be reached.
        CorruptError: If all that came was other bytes than its digests promise.
    """
    reply = await core.ask("locate", {"artifact": info.artifact}, deadline=deadline)
    origins, ways = list(_origins(reply.data.get("sources"))), core.place.ways()
    failed: TensorbusError | None = None
    while origins:
        reading = _Reading(origins, ways, view, why, deadline)
        try:
            opened = await _in_thread(reading.run, reading.cancel)
            await _complain(core, info, reading.wrong)
            return opened
        except (UnavailableError, CorruptError, FencedError, NotFoundError, DeniedError) as exc:
            log.info("worker %s does not give %s: %s", origins[0].name, info.artifact, exc)
            failed = exc
            await _complain(core, info, reading.wrong)
        origins = origins[1:]  # without the one that told of the tables: another may have others
    if isinstance(failed, CorruptError | DeniedError):
        raise failed
    raise UnavailableError(f"no worker that holds {info.artifact} can be reached", artifact=info.artifact) from failed


async def _complain(core: Core, info: ArtifactInfo, wrong: Collection[str]) -> None:
    """Have the workers told from which wrong bytes came; what cannot be said, the next reader finds."""
    if not wrong:
        return
    try:
        deadline = Deadline(_COMPLAIN_S, what="telling of wrong bytes")
        await core.ask("complain", {"artifact": info.artifact, "workers": sorted(wrong)}, deadline=deadline)
    except TensorbusError as exc:
        log.info("wrong bytes of %s are not told: %s", info.artifact, exc)


async def put_remote(
    core: Core, what: Collected, options: PutOptions, *, progress: Progress | None, deadline: Deadline
) -> tuple[ArtifactInfo, int]:
    """Send tensors to a worker with room for them. Gives the artifact and the position at which it is there.

    Raises:
        OutOfSpaceError: If none has room; UnavailableError: If it cannot be reached.
    """
    reply = await core.ask("place", {"nbytes": what.layout.nbytes}, deadline=deadline)
    (origin,) = _origins([reply.data])
    sending = _Sending(origin, core.place.ways(), what, options, deadline)
    try:
        data = await _in_thread(sending.run, sending.cancel)
    except UnavailableError as exc:
        raise ConnectionLostError(f"put: {exc.message}; whether it was done is unknown", **exc.details) from exc
    if progress is not None:
        progress(what.nbytes, what.nbytes)
    info, position = parse(ArtifactInfo, data.get("artifact")), position_of(data)
    core.told(position)
    core.followed.changed_here(info, options.key, position)
    return info, position


def _origins(sources: object) -> Iterator[Origin]:
    for source in sources if isinstance(sources, list) else ():
        if not isinstance(source, dict):
            raise CorruptError("the gateway names no worker")
        request = {"permit": str(source.get("permit"))}
        yield Origin(
            name=str(source.get("worker")), addresses=parse_addresses(str(source.get("data"))), request=request
        )


async def _in_thread(work: Callable[[], T], cancel: Callable[[], None]) -> T:
    """Run blocking work in a thread; cancelling ends it, and waits until it has ended."""
    running = asyncio.ensure_future(in_thread(work))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        cancel()
        await asyncio.wait([running])
        if not running.cancelled():
            running.exception()  # looked at, so that the loop does not report it
        raise


class _Reading:
    """One reading of an artifact. Blocks; :meth:`cancel` may come from any thread."""

    def __init__(
        self, origins: Sequence[Origin], ways: Ways, view: ViewSpec | None, why: str, deadline: Deadline
    ) -> None:
        self._origins = origins
        self._ways = ways
        self._view = view
        self._why = why
        self._deadline = deadline
        self._ends: list[Callable[[], None]] = []
        self.wrong: set[str] = set()
        """Workers from which wrong bytes came."""
        self._cancelled = threading.Event()

    def cancel(self) -> None:
        self._cancelled.set()
        for end in list(self._ends):
            end()

    def run(self) -> Opened:
        lead, deadline = self._origins[0], self._deadline
        client = self._ways.connect(lead.addresses[0], 0, deadline=deadline)
        try:
            self._ended_by(client.interrupt)
            source = client.open(lead.request, deadline=deadline)
            manifest = Manifest.from_json(source.manifest)
            layout = Layout.from_json(source.layout, manifest)
            memory = _memory(max(source.nbytes, layout.nbytes, 1), sparse=self._view is not None)
            room = memoryview(memory)
            places = _places(manifest, layout, self._view)
            transfer = Transfer(cut(merged(places)), room, tables=source.tables, ways=self._ways, by_index=False)
            self._ended_by(transfer.cancel)
            try:
                report = transfer.run(self._origins, opened=(client, source), deadline=deadline)
            finally:
                found = (name for name, error in transfer.failures.items() if isinstance(error, CorruptError))
                self.wrong.update(found)
        finally:
            client.close()
        try:
            self._verify(room, places)
        except CorruptError:
            self.wrong.update(report.sources)
            raise
        return Opened(
            manifest=manifest,
            layout=layout,
            parts=(memory,),
            starts=(0,),
            path=report.path,
            why=self._why,
            report=replace(report, why=self._why),
        )

    def _ended_by(self, end: Callable[[], None]) -> None:
        self._ends.append(end)
        if self._cancelled.is_set():
            end()
            raise UnavailableError("the transfer was given up")

    def _verify(self, room: memoryview, places: Mapping[tuple[int, int], str | None]) -> None:
        for (at, size), digest in places.items():
            if self._cancelled.is_set():
                raise UnavailableError("the transfer was given up")
            if digest is not None and hash_bytes(room[at : at + size]).hex() != digest:
                raise CorruptError(f"the bytes at {at} are not those of their digest", offset=at, digest=digest)


def _memory(nbytes: int, *, sparse: bool) -> mmap.mmap:
    """Memory laid out as the artifact is; where little of it will be touched, address space that promises none.

    Raises:
        OutOfSpaceError: If the kernel gives none.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | (_NORESERVE if sparse else 0)
    try:
        return mmap.mmap(-1, nbytes, flags=flags)
    except OSError as exc:
        raise OutOfSpaceError(f"this process gets no memory for {nbytes} bytes: {exc}", asked_bytes=nbytes) from exc


def _places(manifest: Manifest, layout: Layout, view: ViewSpec | None) -> dict[tuple[int, int], str | None]:
    """What has to come: offset and size of each piece, and its digest if it is a whole tensor."""
    parts = {} if view is None else dict(view.tensors)
    names = None if view is None or view.names is None else frozenset(view.names)
    places: dict[tuple[int, int], str | None] = {}
    for spec, offset in zip(manifest, layout.offsets, strict=True):
        if names is not None and spec.name not in names:
            continue
        start, nbytes = _extent(spec, parts.get(spec.name))
        places[offset + start, nbytes] = spec.digest if nbytes == spec.nbytes else None
    return places


def _extent(spec: TensorSpec, part: TensorView | None) -> tuple[int, int]:
    """Where within a tensor the rows are that a view takes: the first byte, and how many, with what lies between."""
    if part is None or not part.dims or not spec.nbytes:
        return 0, spec.nbytes
    row_bytes = spec.nbytes // spec.shape[0]
    match part.dims[0]:
        case None:
            return 0, spec.nbytes
        case int(row):
            return row * row_bytes, row_bytes
        case (start, step, count):
            rows = (count - 1) * step + 1 if count else 0
            return start * row_bytes, rows * row_bytes


@dataclass(slots=True)
class _Sending:
    """One put to a worker. Blocks; :meth:`cancel` may come from any thread."""

    origin: Origin
    ways: Ways
    what: Collected
    options: PutOptions
    deadline: Deadline
    client: BulkClient | None = None
    cancelled: bool = False

    def cancel(self) -> None:
        self.cancelled = True
        if self.client is not None:
            self.client.interrupt()

    def run(self) -> dict[str, object]:
        self.client = client = self.ways.connect(self.origin.addresses[0], 0, deadline=self.deadline)
        try:
            parts, manifest = self._collect()
            commit = {
                "manifest": manifest.to_json(),
                "layout": {"nbytes": self.what.layout.nbytes, "offsets": list(self.what.layout.offsets)},
                **self.options.args(),
            }
            return client.put(self.origin.request, parts, commit=commit, deadline=self.deadline)
        finally:
            client.close()

    def _collect(self) -> tuple[list[memoryview], Manifest]:
        """The bytes as they are to lie, and the table with their digests if they are wanted."""
        what = self.what
        parts: list[memoryview] = []
        digests: dict[tuple[int, int], bytes] = {}
        end = 0
        for source, offset in sorted(what.distinct(), key=lambda place: place[1]):
            if self.cancelled:
                raise UnavailableError("the transfer was given up")
            view = source.view()
            if view is None:
                view = memoryview(bytearray(source.nbytes))
                source.write_into(view)
            if offset > end:
                parts.append(memoryview(bytes(offset - end)))
            parts.append(view)
            end = max(end, offset + source.nbytes)
            if self.options.digest == "now":
                digests[offset, source.nbytes] = hash_bytes(view)
        parts.append(memoryview(bytes(what.layout.nbytes - end)))
        if not digests:
            return parts, what.manifest
        return parts, what.spread([digests.get((o, s.nbytes)) for s, o in what.distinct()])
