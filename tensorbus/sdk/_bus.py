"""The blocking mirror of the bus: the same calls, on a private loop thread. Threads may share one."""

# ruff: noqa: SLF001 - a bus, its handles and their mirrors are one unit; what they share is nobody else's
from __future__ import annotations

import sys
import warnings
from collections.abc import Coroutine, Iterator
from types import TracebackType
from typing import Any, Self, TypeVar

from tensorbus.errors import InvalidArgumentError
from tensorbus.sdk._artifact import AsyncArtifact
from tensorbus.sdk._async_bus import AsyncBus
from tensorbus.sdk._fill import Progress
from tensorbus.sdk._handles import Artifact, Events, Subscription
from tensorbus.sdk._loop_thread import LoopThread
from tensorbus.sdk._names import name_of
from tensorbus.sdk._operation_handles import Operation, Worker, inner
from tensorbus.sdk._operation_records import OperationInfo
from tensorbus.sdk._place import BusAddress, Place
from tensorbus.sdk._put import Digest, Disk
from tensorbus.sdk._query_bus import Queries
from tensorbus.sdk._records import KeyInfo, Position, SeriesInfo, WorkerInfo
from tensorbus.sdk._series import Start
from tensorbus.sdk._shared import Shared

T = TypeVar("T")


class Bus(Queries):
    """A connection to the artifacts of one home or gateway, for one tenant. Made by :func:`connect`.

    Every method is that of :class:`AsyncBus` and waits for its result; see there for arguments and errors. Threads may
    share a bus, and it works inside a running event loop, which it blocks. After a fork the child must connect again.
    """

    _bus: AsyncBus

    def __init__(self, place: Place, *, full: BusAddress | None = None, warns: bool = True) -> None:
        self._thread = LoopThread()
        self._bus = AsyncBus(place, full=full)
        self._core = self._bus._core
        self._look = self._core.followed.look
        self._warns = warns

    # -- life ---------------------------------------------------------------------------------------------------------

    @staticmethod
    def shared() -> Shared[Bus]:
        """The buses of this process for handles that were pickled elsewhere."""
        return _shared

    @property
    def place(self) -> Place:
        """Where it was connected."""
        return self._core.place

    @property
    def closed(self) -> bool:
        """Whether it was closed, or belongs to the process that this one was forked from."""
        return self._core.refusal is not None

    def connect(self, *, timeout: float | None = None) -> Self:
        """Be connected now; else the first call does it."""
        self._run(self._bus.connect(timeout=timeout))
        return self

    def close(self) -> None:
        """End the connection, and with it the leases of what was registered. Safe to repeat; tensors stay readable."""
        if self._core.refusal is None or not self._core.is_forked:
            self._thread.stop(self._core.close, wait=True)
            self._core.refuse()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        place = self._core.place
        return f"<{type(self).__name__} {place.url or place.home} tenant={place.tenant}>"

    def __del__(self) -> None:
        core = getattr(self, "_core", None)
        if core is None or core.refusal is not None:
            return
        used = core.loop is not None
        self._thread.stop(core.close, wait=False)
        core.refuse()
        if used and self._warns and not sys.is_finalizing():
            warnings.warn(f"{self!r} was dropped without close()", ResourceWarning, source=self, stacklevel=2)

    # -- artifacts ----------------------------------------------------------------------------------------------------

    def put(
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
    ) -> Artifact:
        """Take tensors in; see :meth:`AsyncBus.put`."""
        return self._artifact(
            self._bus.put(
                content, id=id, key=key, rebind=rebind, digest=digest, disk=disk, progress=progress, timeout=timeout
            )
        )

    def register(
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
    ) -> Artifact:
        """Let others use the caller's own tensors in place; see :meth:`AsyncBus.register`."""
        return self._artifact(
            self._bus.register(
                content, id=id, key=key, rebind=rebind, lease_s=lease_s, copy=copy, sealed=sealed, timeout=timeout
            )
        )

    def empty(
        self,
        shape: tuple[int, ...] | int,
        dtype: object = "f32",
        *,
        framework: str | None = None,
        timeout: float | None = None,
    ) -> Any:
        """A tensor in memory of the worker's pool; see :meth:`AsyncBus.empty`."""
        return self._run(self._bus.empty(shape, dtype, framework=framework, timeout=timeout))

    def artifact(
        self,
        ref: str | None = None,
        *,
        id: str | None = None,
        key: str | None = None,
        at_least: Position | int | None = None,
        timeout: float | None = None,
    ) -> Artifact:
        """The handle of an artifact; see :meth:`AsyncBus.artifact`. A name asked for before costs a dict lookup."""
        if type(ref) is str and id is None and key is None and at_least is None:
            entry = self._look(("any", ref))
            if entry is not None:
                entry.used = True
                found = AsyncArtifact(self._bus, entry.info, entry.position, asked=ref, view=entry.view)
                return Artifact(self, found)
        return self._artifact(self._bus.artifact(ref, id=id, key=key, at_least=at_least, timeout=timeout))

    get = artifact

    def exists(
        self,
        ref: str | None = None,
        *,
        id: str | None = None,
        key: str | None = None,
        at_least: Position | int | None = None,
        timeout: float | None = None,
    ) -> bool:
        """Whether there is an artifact of that name; arguments as for :meth:`artifact`."""
        if at_least is None and self._look(name_of(ref, id=id, key=key)) is not None:
            return True
        return self._run(self._bus.exists(ref, id=id, key=key, at_least=at_least, timeout=timeout))

    def ls(
        self, prefix: str = "", *, at_least: Position | int | None = None, timeout: float | None = None
    ) -> list[KeyInfo]:
        """The keys that begin with ``prefix``, in the order of their bytes."""
        return self._run(self._bus.ls(prefix, at_least=at_least, timeout=timeout)._all())

    def ls_series(
        self, prefix: str = "", *, at_least: Position | int | None = None, timeout: float | None = None
    ) -> list[SeriesInfo]:
        """The series of versions whose names begin with ``prefix``."""
        return self._run(self._bus.ls_series(prefix, at_least=at_least, timeout=timeout)._all())

    def bind(
        self, key: str, artifact: Artifact | str, *, rebind: bool = False, timeout: float | None = None
    ) -> Artifact:
        """Name an artifact by a key as well; see :meth:`AsyncBus.bind`."""
        return self._artifact(self._bus.bind(key, inner(artifact), rebind=rebind, timeout=timeout))

    def unbind(self, key: str, *, timeout: float | None = None) -> Position:
        """Drop a key; its artifact lives on. See :meth:`AsyncBus.unbind`."""
        return self._run(self._bus.unbind(key, timeout=timeout))

    def unpin(self, lease: str, *, timeout: float | None = None) -> Position:
        """End a pin by its name on the log; see :meth:`AsyncBus.unpin`."""
        return self._run(self._bus.unpin(lease, timeout=timeout))

    # -- versions -----------------------------------------------------------------------------------------------------

    def publish(
        self,
        name: str,
        content: object,
        *,
        digest: Digest = "now",
        progress: Progress | None = None,
        timeout: float | None = None,
    ) -> Artifact:
        """Make something the next version of a series; see :meth:`AsyncBus.publish`."""
        return self._artifact(
            self._bus.publish(name, inner(content), digest=digest, progress=progress, timeout=timeout)
        )

    def latest(self, name: str, *, at_least: Position | int | None = None, timeout: float | None = None) -> Artifact:
        """The newest version of a series that is there; see :meth:`AsyncBus.latest`."""
        return self._artifact(self._bus.latest(name, at_least=at_least, timeout=timeout))

    def version(
        self, name: str, number: int, *, at_least: Position | int | None = None, timeout: float | None = None
    ) -> Artifact:
        """One version of a series; see :meth:`AsyncBus.version`."""
        return self._artifact(self._bus.version(name, number, at_least=at_least, timeout=timeout))

    def subscribe(
        self, name: str, *, start: Start = "latest", coalesce: bool = False, timeout: float | None = None
    ) -> Subscription:
        """The versions of a series as they are published: an iterator; see :meth:`AsyncBus.subscribe`."""
        return Subscription(self, self._bus.subscribe(name, start=start, coalesce=coalesce, timeout=timeout))

    # -- the system ---------------------------------------------------------------------------------------------------

    def list_workers(self, *, at_least: Position | int | None = None, timeout: float | None = None) -> list[WorkerInfo]:
        """The newest session of each worker that the log knows."""
        return self._run(self._bus.list_workers(at_least=at_least, timeout=timeout))

    def events(
        self,
        *,
        follow: bool = False,
        since: Position | int | None = None,
        artifact: Artifact | str | None = None,
        timeout: float | None = None,
    ) -> Events:
        """The facts on the log, oldest first: an iterator; see :meth:`AsyncBus.events`."""
        about = inner(artifact)
        return Events(self, self._bus.events(follow=follow, since=since, artifact=about, timeout=timeout))

    def worker(self, id: str) -> Worker:
        """A worker by its id, to ask for operations; see :meth:`AsyncBus.worker`."""
        return Worker(self, self._bus.worker(id))

    def operation(self, id: str) -> Operation[Any]:
        """An operation that was asked for, here or in another process; see :meth:`AsyncBus.operation`."""
        return Operation(self, self._bus.operation(id))

    def operations(
        self, *, worker: str | None = None, running: bool = False, limit: int = 100, timeout: float | None = None
    ) -> list[OperationInfo]:
        """The operations of the tenant that the log knows; see :meth:`AsyncBus.operations`."""
        return self._run(self._bus.operations(worker=worker, running=running, limit=limit, timeout=timeout))

    def stats(self, *, timeout: float | None = None) -> dict[str, Any]:
        """The worker's pool, directory, callers and bus, in figures; see :meth:`AsyncBus.stats`."""
        return self._run(self._bus.stats(timeout=timeout))

    # -- inside -------------------------------------------------------------------------------------------------------

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        refusal = self._core.refusal
        if refusal is not None:
            work.close()
            raise InvalidArgumentError(refusal)
        return self._thread.run(work)

    def _artifact(self, work: Coroutine[Any, Any, AsyncArtifact]) -> Artifact:
        return Artifact(self, self._run(work))

    def __iter__(self) -> Iterator[Any]:
        raise TypeError("a bus is not a sequence; bus.ls() lists its keys")


_shared = Shared(lambda place: Bus(place, warns=False))
