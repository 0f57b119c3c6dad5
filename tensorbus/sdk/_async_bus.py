"""The bus: what a process says to the world of artifacts. This is the real API; the sync one mirrors it."""

from __future__ import annotations

import asyncio
import sys
import warnings
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any, Self, TypeVar

from tensorbus.clock import Deadline
from tensorbus.errors import CorruptError, InvalidArgumentError, NotFoundError
from tensorbus.ids import check_name
from tensorbus.sdk._artifact import AsyncArtifact
from tensorbus.sdk._checks import check_flag, check_progress, check_seconds
from tensorbus.sdk._core import Core
from tensorbus.sdk._events import AsyncEvents
from tensorbus.sdk._explained import explained
from tensorbus.sdk._fill import Progress
from tensorbus.sdk._followed import Entry
from tensorbus.sdk._names import check_prefix, check_ref, check_version, id_of, name_of, refused_view, spec_of
from tensorbus.sdk._operation_records import OperationInfo
from tensorbus.sdk._operations import AsyncOperation, AsyncWorker
from tensorbus.sdk._pending import Listing
from tensorbus.sdk._place import BusAddress, Place
from tensorbus.sdk._put import Digest, Disk, PutOptions, put
from tensorbus.sdk._query_bus import AsyncQueries
from tensorbus.sdk._records import (
    LOG_STREAM,
    ArtifactInfo,
    KeyInfo,
    Position,
    SeriesInfo,
    WorkerInfo,
    at_least_seq,
    parse,
    position_of,
)
from tensorbus.sdk._register import register
from tensorbus.sdk._series import AsyncSubscription, Start
from tensorbus.sdk._shared import SharedPerLoop
from tensorbus.sdk._tensors import empty_over

T = TypeVar("T")
_PAGE = 1000


class AsyncBus(AsyncQueries):
    """A connection to the artifacts of one home or gateway, for one tenant. Made by :func:`aconnect`.

    It belongs to the event loop that uses it first. The connection is made again when it is lost: questions wait for
    that within their time, and calls whose outcome is then unknown raise ``UnavailableError``. A process that forks
    must connect again in the child; tensors that were read before stay readable there.
    """

    def __init__(self, place: Place, *, full: BusAddress | None = None) -> None:
        self._core = Core(place, bus=full)

    # -- life ---------------------------------------------------------------------------------------------------------

    @staticmethod
    def shared() -> SharedPerLoop[AsyncBus]:
        """The buses of each event loop for handles that were pickled elsewhere."""
        return _shared

    @property
    def place(self) -> Place:
        """Where it was connected."""
        return self._core.place

    @property
    def closed(self) -> bool:
        """Whether it was closed, or belongs to the process that this one was forked from."""
        return self._core.refusal is not None

    async def connect(self, *, timeout: float | None = None) -> Self:
        """Be connected now; else the first call does it.

        Raises:
            UnavailableError: If no worker and no gateway is there; it says what to start. With ``directory="full"``
                also if the bus cannot be reached.
        """
        deadline = self._core.begin(timeout, "connecting")
        await self._core.link.connect(deadline)
        await self._core.directory(deadline)
        return self

    async def close(self) -> None:
        """End the connection, and with it the leases of what was registered. Safe to repeat; tensors stay readable.

        Raises:
            InvalidArgumentError: If the bus belongs to another event loop.
        """
        if self._core.is_forked:
            return
        self._core.check_loop()
        await self._core.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    def __repr__(self) -> str:
        place = self._core.place
        return f"<{type(self).__name__} {place.url or place.home} tenant={place.tenant}>"

    def __del__(self) -> None:
        core = getattr(self, "_core", None)
        if core is None or core.refusal is not None or not core.link.connected:
            return
        core.later(lambda: core.spawn(core.close(), "close dropped bus"))
        if not sys.is_finalizing():
            warnings.warn(f"{self!r} was dropped without close()", ResourceWarning, source=self, stacklevel=2)

    # -- artifacts ----------------------------------------------------------------------------------------------------

    async def put(
        self,
        content: object,
        *,
        id: str | None = None,
        key: str | None = None,
        rebind: bool = False,
        digest: Digest = "now",
        disk: Disk = "may",
        progress: Progress | None = None,
        timeout: float | None = None,
    ) -> AsyncArtifact:
        """Take tensors in: the bytes are copied, and kept until the artifact is destroyed.

        Args:
            content: A dict of tensors by name, a bare tensor, or the path of a safetensors file or directory.
            id: A name for good; without it the id follows from the content, so equal content is one artifact.
            key: A name that can move; bound to the artifact.
            rebind: Whether ``key`` may be taken from another artifact.
            digest: ``"later"`` leaves the hashing to the worker, and gives a random id unless there is an ``id``.
            disk: ``"must"`` waits until the worker has the bytes on its disk too, where they stay as long as the
                artifact lives and are found again by the worker's next life; ``"should"`` lets it do so afterwards, if
                it can; ``"may"`` only when its memory is short.
            progress: Called as ``progress(bytes_done, bytes_total)`` from the threads that copy, by one at a time.
            timeout: Seconds; the bus's default when ``None``.

        Raises:
            InvalidArgumentError: If something cannot be taken; it says which tensor and why.
            ConflictError: If ``id`` has other bytes, or ``key`` is bound to another artifact.
            OutOfSpaceError: If the worker's pool is full, or the disk where the bytes must be; it says who holds it.
            UnavailableError: If they must be on disk and the worker uses none (``disk_bytes``).
            NotFoundError, CorruptError: If the path is not there, or is no safetensors.
        """
        deadline = self._core.begin(timeout, "put")
        options = PutOptions(id=id, key=key, rebind=rebind, digest=digest, disk=disk)
        check_progress(progress)
        info, position = await put(self._core, content, options, progress=progress, deadline=deadline)
        return AsyncArtifact(self, info, position, asked=key)

    async def register(
        self,
        content: object,
        *,
        id: str | None = None,
        key: str | None = None,
        rebind: bool = False,
        lease_s: float = 30.0,
        copy: bool = False,
        sealed: bool = False,
        timeout: float | None = None,
    ) -> AsyncArtifact:
        """Let others use the caller's own tensors in place, as long as the caller's lease lives.

        The lease is renewed in the background and ends with ``release()`` of the handle, with the bus, or with this
        process; the artifact then ends, unless another replica is there. The caller promises not to write meanwhile.

        Args:
            content: A dict of tensors, or a bare one, over memory from :meth:`empty`.
            id, key, rebind: As for :meth:`put`.
            lease_s: Seconds that the lease outlives the last renewal, 0.1 to a year.
            copy: Whether to copy what cannot be shared in place, and register the copy.
            sealed: Whether to take digests at once, so that the id follows from the content and reads are verified.
            timeout: Seconds; the bus's default when ``None``.

        Raises:
            InvalidArgumentError: If a tensor cannot be shared in place; it says which and what to do.
            ConflictError: As for :meth:`put`.
        """
        options = PutOptions(id=id, key=key, rebind=rebind)
        deadline = self._core.begin(timeout, "register")
        info, position, lease = await register(
            self._core, content, options, lease_s=lease_s, copy=copy, sealed=sealed, deadline=deadline
        )
        return AsyncArtifact(self, info, position, asked=key, lease=lease)

    async def empty(
        self,
        shape: tuple[int, ...] | int,
        dtype: object = "f32",
        *,
        framework: str | None = None,
        timeout: float | None = None,
    ) -> Any:
        """A tensor with undefined content in memory of the worker's pool, to be filled and registered.

        Args:
            shape: Its sizes, outermost first.
            dtype: Any name of its element type: ``"bf16"``, ``torch.bfloat16``, ``"float32"``.
            framework: ``"torch"`` or ``"numpy"``; torch where it is installed when ``None``.
            timeout: Seconds; the bus's default when ``None``.

        Raises:
            OutOfSpaceError: If the pool is full; InvalidArgumentError: If there is no worker on this host.
        """
        deadline = self._core.begin(timeout, "empty")
        spec = spec_of(shape, dtype)
        hello = await self._core.link.connect(deadline)
        if not hello.descriptors:
            raise InvalidArgumentError("empty() needs a worker on this host, and the bus speaks to a gateway")
        grant = await self._core.owned.take(spec.nbytes, deadline=deadline, purpose="empty")
        try:
            tensor = empty_over(grant.memory, spec.shape, spec.dtype, framework)
        except BaseException:
            self._core.owned.give_up(grant)
            raise
        self._core.owned.lend(grant)
        return tensor

    async def artifact(
        self,
        ref: str | None = None,
        *,
        id: str | None = None,
        key: str | None = None,
        at_least: Position | int | None = None,
        timeout: float | None = None,
    ) -> AsyncArtifact:
        """The handle of an artifact. Asked for once, a name is followed: later answers come from this process.

        Args:
            ref: An id by its form (``tb1:…``, ``tbv:…`` of a view that was defined), else a key, else a given id.
            id, key: Say outright which of the two it is; instead of ``ref``.
            at_least: A position that the answer must know of, as mutations give it, here or in another process.
            timeout: Seconds; the bus's default when ``None``.

        Raises:
            NotFoundError: If there is none; it says so if there was one that was lost or destroyed.
        """
        name = name_of(ref, id=id, key=key)
        deadline = self._core.begin(timeout, f"resolving {name[1]!r:.80}")
        found = await self._resolve(name, at_least_seq(at_least), deadline)
        return AsyncArtifact(self, found.info, found.position, asked=name[1], view=found.view)

    get = artifact

    async def exists(
        self,
        ref: str | None = None,
        *,
        id: str | None = None,
        key: str | None = None,
        at_least: Position | int | None = None,
        timeout: float | None = None,
    ) -> bool:
        """Whether there is an artifact of that name; arguments as for :meth:`artifact`."""
        name = name_of(ref, id=id, key=key)
        deadline = self._core.begin(timeout, f"resolving {name[1]!r:.80}")
        try:
            await self._resolve(name, at_least_seq(at_least), deadline)
        except NotFoundError:
            return False
        return True

    def ls(
        self, prefix: str = "", *, at_least: Position | int | None = None, timeout: float | None = None
    ) -> Listing[KeyInfo]:
        """The keys that begin with ``prefix``, in the order of their bytes; to be awaited, or iterated page by page."""
        seq, begins = at_least_seq(at_least), check_prefix(prefix)
        return Listing(lambda: self._pages("ls", KeyInfo, begins, seq, timeout))

    def ls_series(
        self, prefix: str = "", *, at_least: Position | int | None = None, timeout: float | None = None
    ) -> Listing[SeriesInfo]:
        """The series of versions whose names begin with ``prefix``; to be awaited, or iterated page by page."""
        seq, begins = at_least_seq(at_least), check_prefix(prefix)
        return Listing(lambda: self._pages("series_ls", SeriesInfo, begins, seq, timeout))

    async def bind(
        self, key: str, artifact: AsyncArtifact | str, *, rebind: bool = False, timeout: float | None = None
    ) -> AsyncArtifact:
        """Name an artifact (by a handle, a key or an id) by a key as well. Binding a key to what it has is success.

        Raises:
            NotFoundError: If there is no such artifact.
            ConflictError: If the key has another artifact and ``rebind`` is not set.
        """
        deadline = self._core.begin(timeout, f"bind of {key!r:.80}")
        check_name(key, what="key")
        check_flag(rebind, "rebind")
        args = {"key": key, "artifact": await self._id_of(artifact, deadline), "rebind": rebind}
        reply = await self._core.ask("bind", args, deadline=deadline, repeat=not rebind)
        info, position = self._changed(reply.data, key)
        return AsyncArtifact(self, info, position, asked=key)

    async def unbind(self, key: str, *, timeout: float | None = None) -> Position:
        """Drop a key; its artifact lives on. Gives the position at which the key is gone.

        Raises:
            NotFoundError: If there is no such key.
        """
        deadline = self._core.begin(timeout, f"unbind of {key!r:.80}")
        reply = await self._core.ask("unbind", {"key": check_name(key, what="key")}, deadline=deadline, repeat=False)
        position = position_of(reply.data)
        self._core.followed.ended_here(None, key, position)
        return {LOG_STREAM: position}

    async def unpin(self, lease: str, *, timeout: float | None = None) -> Position:
        """End a pin by its name on the log, whoever took it; the one worker that can do it is that which holds it.

        Args:
            lease: ``pin.lease``, or one of ``art.info().leases``.
            timeout: Seconds; the bus's default when ``None``.

        Returns:
            The position at which it has ended.

        Raises:
            ConflictError: If it is another worker's than this bus speaks to, as through a gateway; it names that one.
            NotFoundError: If it has ended, or never was.
        """
        deadline = self._core.begin(timeout, f"unpin of {lease!r:.80}")
        return {LOG_STREAM: await self._core.leases.release(lease, deadline=deadline)}

    # -- versions -----------------------------------------------------------------------------------------------------

    async def publish(
        self,
        name: str,
        content: object,
        *,
        digest: Digest = "now",
        progress: Progress | None = None,
        timeout: float | None = None,
    ) -> AsyncArtifact:
        """Make something the next version of a series: an artifact's handle, or whatever :meth:`put` takes.

        Args:
            name: The series; it begins with its first version.
            content: What it is to be.
            digest, progress: As for :meth:`put`; of an artifact that is there, neither has a meaning.
            timeout: Seconds; the bus's default when ``None``.

        Returns:
            The artifact, with ``.version``.

        Raises:
            As :meth:`put`; UnavailableError: If the connection was lost and it is unknown whether it was published.
        """
        deadline = self._core.begin(timeout, f"publish of {name!r:.80}")
        check_name(name, what="series name")
        options = PutOptions(digest=digest)
        check_progress(progress)
        if isinstance(content, AsyncArtifact) and (digest != "now" or progress is not None):
            raise InvalidArgumentError("digest= and progress= are for what is put; this artifact is there already")
        async with deadline.scope():
            if isinstance(content, AsyncArtifact):
                artifact = id_of(content)
            else:
                info, _ = await put(self._core, content, options, progress=progress, deadline=deadline)
                artifact = info.artifact
            reply = await self._core.ask(
                "publish", {"name": name, "artifact": artifact}, deadline=deadline, repeat=False
            )
        return self._versioned(reply.data)

    async def latest(
        self, name: str, *, at_least: Position | int | None = None, timeout: float | None = None
    ) -> AsyncArtifact:
        """The newest version of a series that is there.

        Raises:
            NotFoundError: If there is none.
        """
        return await self._version(name, None, at_least, timeout)

    async def version(
        self, name: str, number: int, *, at_least: Position | int | None = None, timeout: float | None = None
    ) -> AsyncArtifact:
        """One version of a series.

        Raises:
            NotFoundError: If it was never published, or is gone; it says which.
        """
        return await self._version(name, check_version(number), at_least, timeout)

    def subscribe(
        self, name: str, *, start: Start = "latest", coalesce: bool = False, timeout: float | None = None
    ) -> AsyncSubscription:
        """The versions of a series as they are published: an async iterator of artifacts with ``.version``.

        Args:
            name: The series; it need not exist yet.
            start: ``"latest"`` begins with the newest there is now, ``"earliest"`` with the oldest, a number with that
                version. To go on where a subscription stopped, give its ``position + 1``.
            coalesce: Whether to skip to the newest when several are waiting.
            timeout: Seconds to wait for a version before ``DeadlineExceededError``; ``None`` waits for ever.
        """
        self._core.check()
        check_flag(coalesce, "coalesce")
        if timeout is not None:
            check_seconds(timeout, "timeout")
        return AsyncSubscription(self, check_name(name, what="series name"), start, coalesce=coalesce, timeout=timeout)

    # -- the system ---------------------------------------------------------------------------------------------------

    async def list_workers(
        self, *, at_least: Position | int | None = None, timeout: float | None = None
    ) -> list[WorkerInfo]:
        """The newest session of each worker that the log knows."""
        deadline, seq = self._core.begin(timeout, "list_workers"), at_least_seq(at_least)
        full = await self._core.directory(deadline)
        if full is not None:
            return await full.workers(at_least=seq, deadline=deadline)
        reply = await self._core.ask("workers", {"at_least": seq}, deadline=deadline)
        return [parse(WorkerInfo, item) for item in _items(reply.data)]

    def events(
        self,
        *,
        follow: bool = False,
        since: Position | int | None = None,
        artifact: AsyncArtifact | str | None = None,
        timeout: float | None = None,
    ) -> AsyncEvents:
        """The facts on the log, oldest first: an async iterator.

        Args:
            follow: Whether to wait for more at the end.
            since: Only facts after this position.
            artifact: Only facts about this artifact (a handle, a key or an id).
            timeout: Seconds that each step may take; with ``follow`` ``None`` waits for ever.
        """
        self._core.check()
        seq = at_least_seq(since, what="since") or 0
        check_flag(follow, "follow")
        if timeout is not None:
            check_seconds(timeout, "timeout")
        about = artifact.base_id if isinstance(artifact, AsyncArtifact) else None
        named = None if artifact is None or about is not None else check_ref(artifact)
        return AsyncEvents(self._core, since=seq, follow=follow, artifact=about, named=named, timeout=timeout)

    def worker(self, id: str) -> AsyncWorker:
        """A worker by its id, to ask for operations (``docs/operations-api.md``); nothing is asked yet."""
        return AsyncWorker(self, id)

    def operation(self, id: str) -> AsyncOperation[Any]:
        """An operation that was asked for, here or in another process, by its id; nothing is asked yet."""
        return AsyncOperation(self, id)

    async def operations(
        self, *, worker: str | None = None, running: bool = False, limit: int = 100, timeout: float | None = None
    ) -> list[OperationInfo]:
        """The operations of the tenant that the log knows, the newest first.

        Args:
            worker: Only those of this one.
            running: Whether to leave out those that have ended.
            limit: How many at most, up to 1,000.
            timeout: Seconds; the bus's default when ``None``.
        """
        deadline = self._core.begin(timeout, "operations")
        args = {"worker": worker, "running": check_flag(running, "running"), "limit": limit}
        reply = await self._core.ask("op_ls", args, deadline=deadline)
        return [parse(OperationInfo, item) for item in _items(reply.data)]

    async def stats(self, *, timeout: float | None = None) -> dict[str, Any]:
        """The worker's pool, directory, callers and bus, in figures (``docs/spec/control.md``).

        With ``directory="full"`` also ``directory_feed``: ``position`` and ``hash`` of this process's own directory,
        ``lag`` behind the log in sequences (``None`` if the bus does not say), whether it is ``connected`` to the bus,
        whether it is ``degraded`` (``gaps``, ``unknown``), and the ``error`` that ended the reading, or ``None``.
        """
        found = dict((await self._core.ask("stats", deadline=self._core.begin(timeout, "stats"))).data)
        if self._core.full is not None:
            found["directory_feed"] = await self._core.full.figures()
        return found

    # -- inside -------------------------------------------------------------------------------------------------------

    async def _resolve(self, name: tuple[str, str], at_least: int | None, deadline: Deadline) -> Entry:
        try:
            return await self._core.resolve(name, at_least=at_least, deadline=deadline)
        except NotFoundError as exc:
            raise explained(exc, name[1]) from exc

    async def _id_of(self, artifact: object, deadline: Deadline) -> str:
        """The id of an artifact that a caller gave as a handle, a key or an id."""
        if not isinstance(artifact, str):
            return id_of(artifact)
        found = await self._resolve(("any", check_ref(artifact)), None, deadline)
        if found.view is not None:
            raise refused_view(artifact)
        return found.info.artifact

    def _changed(self, data: dict[str, object], key: str | None) -> tuple[ArtifactInfo, int]:
        info, position = parse(ArtifactInfo, data.get("artifact")), position_of(data)
        self._core.followed.changed_here(info, key, position)
        return info, position

    def _versioned(self, data: dict[str, object]) -> AsyncArtifact:
        info, number = parse(ArtifactInfo, data.get("artifact")), data.get("version")
        if not isinstance(number, int):
            raise CorruptError("the worker's answer has no version")
        return AsyncArtifact(self, info, position_of(data), version=number)

    async def _version(
        self, name: str, number: int | None, at_least: Position | int | None, timeout: float | None
    ) -> AsyncArtifact:
        deadline = self._core.begin(timeout, f"version of {name!r:.80}")
        seq = at_least_seq(at_least)
        full = await self._core.directory(deadline)
        if full is not None:
            check_name(name, what="series name")
            found, info, position = await full.version(name, number, at_least=seq, deadline=deadline)
            return AsyncArtifact(self, info, position, version=found)
        args = {"name": check_name(name, what="series name"), "number": number, "at_least": seq}
        return self._versioned((await self._core.ask("version", args, deadline=deadline)).data)

    async def _pages(
        self, op: str, kind: type[T], prefix: str, at_least: int | None, timeout: float | None
    ) -> AsyncIterator[T]:
        after: str | None = None
        while True:
            deadline = self._core.begin(timeout, op)
            full = await self._core.directory(deadline)
            if full is None:
                items, after = await self._page(op, kind, prefix, after, at_least, deadline)
            else:
                page = full.page(kind, prefix, after, limit=_PAGE, at_least=at_least, deadline=deadline)
                items, after = await page
                await asyncio.sleep(0)  # a long listing leaves the loop to others
            for item in items:
                yield item
            if after is None:
                return

    async def _page(
        self, op: str, kind: type[T], prefix: str, after: str | None, at_least: int | None, deadline: Deadline
    ) -> tuple[list[T], str | None]:
        args = {"prefix": prefix, "after": after, "limit": _PAGE, "at_least": at_least}
        reply = await self._core.ask(op, args, deadline=deadline)
        following = reply.data.get("next")
        return [parse(kind, item) for item in _items(reply.data)], None if following is None else str(following)


_shared = SharedPerLoop(AsyncBus)


def _items(data: dict[str, object]) -> list[object]:
    items = data.get("items")
    return items if isinstance(items, list) else []
