"""Bytes without a worker on this host: read from the replicas' workers into own memory, and sent to one of them."""

from __future__ import annotations

import asyncio
import logging
import mmap
import platform
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final, TypeVar

from tensorbus.clock import Deadline
from tensorbus.errors import (
    CorruptError,
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
from tensorbus.transport import BulkClient, hash_bytes, parse_addresses

if TYPE_CHECKING:
    from tensorbus.sdk._core import Core
    from tensorbus.sdk._fill import Progress
    from tensorbus.sdk._put import Collected, PutOptions

log = logging.getLogger("tensorbus.sdk")

T = TypeVar("T")
_NORESERVE: Final = getattr(mmap, "MAP_NORESERVE", 0x4000 if platform.machine() in ("x86_64", "aarch64") else 0)


async def open_remote(core: Core, info: ArtifactInfo, *, view: ViewSpec | None, deadline: Deadline) -> Opened:
    """The artifact's bytes in memory of this process, from the first worker that gives them.

    Tensors that come whole are verified by their digests. Of a view only what it needs comes: its tensors, and of one
    that is sliced along its first dimension the rows from the first to the last that it takes, which have no digest.

    Raises:
        OutOfSpaceError: If this process gets no memory for it.
        NotFoundError: If the artifact has ended; UnavailableError: If no worker that holds it can be reached.
        CorruptError: If all that came was other bytes than its digests promise.
    """
    reply = await core.ask("locate", {"artifact": info.artifact}, deadline=deadline)
    request: dict[str, object] = {"tenant": core.place.tenant, "artifact": info.artifact}

    def fetch(client: BulkClient) -> Opened:
        return _fetch(client, request, view, deadline)

    failed: TensorbusError | None = None
    for worker, address in _addresses(reply.data.get("sources")):
        try:
            return await _with_client(address, fetch, deadline)
        except (UnavailableError, CorruptError, FencedError, NotFoundError) as exc:
            log.info("worker %s does not give %s: %s", worker, info.artifact, exc)
            failed = exc
    if isinstance(failed, CorruptError):
        raise failed
    raise UnavailableError(f"no worker that holds {info.artifact} can be reached", artifact=info.artifact) from failed


async def put_remote(
    core: Core, what: Collected, options: PutOptions, *, progress: Progress | None, deadline: Deadline
) -> tuple[ArtifactInfo, int]:
    """Send tensors to a worker with room for them. Gives the artifact and the position at which it is there.

    Raises:
        OutOfSpaceError: If none has room; UnavailableError: If it cannot be reached.
    """
    hello = await core.link.connect(deadline)
    reply = await core.ask("place", {"nbytes": what.layout.nbytes}, deadline=deadline)
    ((_, address),) = _addresses([reply.data])
    try:
        data = await _with_client(
            address, lambda client: _send(client, core.place.tenant, hello.session, what, options, deadline), deadline
        )
    except UnavailableError as exc:
        raise ConnectionLostError(f"put: {exc.message}; whether it was done is unknown", **exc.details) from exc
    if progress is not None:
        progress(what.nbytes, what.nbytes)
    info, position = parse(ArtifactInfo, data.get("artifact")), position_of(data)
    core.told(position)
    core.followed.changed_here(info, options.key, position)
    return info, position


def _addresses(sources: object) -> Iterator[tuple[str, tuple[str, int]]]:
    for source in sources if isinstance(sources, list) else ():
        if not isinstance(source, dict):
            raise CorruptError("the gateway names no worker")
        yield str(source.get("worker")), parse_addresses(str(source.get("data")))[0]


async def _with_client(address: tuple[str, int], work: Callable[[BulkClient], T], deadline: Deadline) -> T:
    """Run blocking work with a connection, in a thread; cancelling it closes the connection, which ends the work."""
    clients: list[BulkClient] = []
    given_up = threading.Event()

    def run() -> T:
        client = BulkClient.connect(*address, deadline=deadline)
        clients.append(client)
        try:
            if given_up.is_set():
                raise UnavailableError("the transfer was given up")
            return work(client)
        finally:
            client.close()

    running = asyncio.ensure_future(in_thread(run))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        given_up.set()
        for client in clients:
            client.close()
        await asyncio.wait([running])
        if not running.cancelled():
            running.exception()  # looked at, so that the loop does not report it
        raise


def _fetch(client: BulkClient, request: dict[str, object], view: ViewSpec | None, deadline: Deadline) -> Opened:
    source = client.open(request, deadline=deadline)
    manifest = Manifest.from_json(source.manifest)
    layout = Layout.from_json(source.layout, manifest)
    memory = _memory(max(source.nbytes, layout.nbytes, 1), sparse=view is not None)
    room = memoryview(memory)
    places = _places(manifest, layout, view)
    client.read_into(source.source, [(at, room[at : at + size]) for at, size in places], deadline=deadline)
    for (at, size), digest in places.items():
        if digest is not None and hash_bytes(room[at : at + size]).hex() != digest:
            raise CorruptError(f"the bytes at {at} are not those of their digest", offset=at, digest=digest)
    return Opened(
        manifest=manifest, layout=layout, parts=(memory,), starts=(0,), path="tcp", why="no worker on this host"
    )


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


def _send(
    client: BulkClient, tenant: str, session: str, what: Collected, options: PutOptions, deadline: Deadline
) -> dict[str, object]:
    places = sorted(((offset, source) for source, offset in what.distinct()), key=lambda place: place[0])
    parts: list[memoryview] = []
    digests: dict[tuple[int, int], bytes] = {}
    end = 0
    for offset, source in places:
        if client.closed:
            raise UnavailableError("the transfer was given up")
        view = source.view()
        if view is None:
            view = memoryview(bytearray(source.nbytes))
            source.write_into(view)
        if offset > end:
            parts.append(memoryview(bytes(offset - end)))
        parts.append(view)
        end = max(end, offset + source.nbytes)
        if options.digest == "now":
            digests[offset, source.nbytes] = hash_bytes(view)
    parts.append(memoryview(bytes(what.layout.nbytes - end)))
    manifest = what.spread([digests.get((o, s.nbytes)) for s, o in what.distinct()]) if digests else what.manifest
    commit = {
        "manifest": manifest.to_json(),
        "layout": {"nbytes": what.layout.nbytes, "offsets": list(what.layout.offsets)},
        "principal": session,
        **options.args(),
    }
    return client.put({"tenant": tenant}, parts, commit=commit, deadline=deadline)
