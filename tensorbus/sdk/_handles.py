"""The blocking mirrors of handles, pins, subscriptions and readings of the log."""

# ruff: noqa: SLF001 - a bus, its handles and their mirrors are one unit; what they share is nobody else's
from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from copy import copy
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from tensorbus.model import TensorSpec
from tensorbus.sdk._artifact import AsyncArtifact
from tensorbus.sdk._events import AsyncEvents
from tensorbus.sdk._fill import Progress
from tensorbus.sdk._maps import Opened
from tensorbus.sdk._operation_records import Evicted, Migrated, Persisted, Prefetched, Replicated, Verified
from tensorbus.sdk._operations import worker_id
from tensorbus.sdk._pin import AsyncPin
from tensorbus.sdk._place import Place
from tensorbus.sdk._read import Contents
from tensorbus.sdk._records import ArtifactInfo, EventRecord, Position, Replica
from tensorbus.sdk._series import AsyncSubscription
from tensorbus.transport import TransferReport

if TYPE_CHECKING:
    from tensorbus.model._views import Index, Transpose
    from tensorbus.sdk._bus import Bus
    from tensorbus.sdk._operation_handles import Worker


class Artifact:
    """An artifact, or a view of one: the blocking mirror of :class:`AsyncArtifact`; see there.

    ``art["w"]`` is a tensor, ``"w" in art`` whether there is one, ``len(art)`` how many.
    """

    __slots__ = ("__weakref__", "_artifact", "_bus")

    def __init__(self, bus: Bus, artifact: AsyncArtifact) -> None:
        self._bus = bus
        self._artifact = artifact

    # -- what it is ---------------------------------------------------------------------------------------------------

    @property
    def id(self) -> str:
        """Its id: ``tb1:`` and a digest of its content, ``tbr:``, ``tbv:`` for a view, or as its maker gave it."""
        return self._artifact.id

    @property
    def base_id(self) -> str:
        """The id of the artifact that a view is of; of an artifact its own."""
        return self._artifact.base_id

    @property
    def digest(self) -> str | None:
        """The content id ``tb1:…`` as far as it was known when the handle was made; ``None`` for a view."""
        return self._artifact.digest

    @property
    def nbytes(self) -> int:
        """Sum of the tensors' sizes, each counted once per name. A view found by its id may read its table first."""
        known = self._artifact._nbytes_known
        return known if known is not None else self._table().manifest.nbytes

    @property
    def key(self) -> str | None:
        """The key that it was found or put by, or ``None``."""
        return self._artifact.key

    @property
    def version(self) -> int | None:
        """Its number in the series that it was found or published in, or ``None``."""
        return self._artifact.version

    @property
    def transfer(self) -> TransferReport | None:
        """How its bytes came here: by which path and why, from whom, in what time. ``None`` before they were read."""
        return self._artifact.transfer

    @property
    def position(self) -> Position:
        """Where in the log it was there: give it as ``at_least`` to see at least as much elsewhere."""
        return self._artifact.position

    @property
    def lease(self) -> str | None:
        """The lease of who registered it; ``None`` for others."""
        return self._artifact.lease

    @property
    def bus(self) -> Bus:
        """The bus that it was got from."""
        return self._bus

    def __repr__(self) -> str:
        return repr(self._artifact).replace("AsyncArtifact", type(self).__name__, 1)

    def __reduce__(self) -> tuple[object, ...]:
        return Artifact._restored, (type(self._bus), *self._artifact._state())

    @classmethod
    def _restored(cls, bus: type[Bus], place: Place, *state: Any) -> Artifact:
        found = bus.shared().bus(place)
        return cls(found, AsyncArtifact._from_state(found._bus, *state))

    def __copy__(self) -> Artifact:
        return Artifact(self._bus, copy(self._artifact))

    def __deepcopy__(self, memo: dict[int, object]) -> Artifact:
        return copy(self)

    def __contains__(self, name: object) -> bool:
        return name in self._table().manifest

    def __len__(self) -> int:
        return len(self._table().manifest)

    def __getitem__(self, name: str) -> Any:
        return self.tensor(name)

    def tensor_meta(self, *, timeout: float | None = None) -> dict[str, TensorSpec]:
        """Name, dtype, shape, size and digest of each tensor. Moves no tensor bytes."""
        return self._bus._run(self._artifact.tensor_meta(timeout=timeout))

    def names(self, *, timeout: float | None = None) -> tuple[str, ...]:
        """The tensors' names in the order of their bytes."""
        return self._bus._run(self._artifact.names(timeout=timeout))

    # -- its bytes ----------------------------------------------------------------------------------------------------

    def tensor(self, name: str = "", *, framework: str | None = None, timeout: float | None = None) -> Any:
        """One tensor on the CPU, without a copy on this host; see :meth:`AsyncArtifact.tensor`."""
        opened, contents = self._open(timeout)
        return contents.tensor(opened, name, framework)

    def tensor_dict(
        self,
        *,
        framework: str | None = None,
        into: Mapping[str, object] | None = None,
        timeout: float | None = None,
    ) -> dict[str, Any]:
        """All tensors by name, or copied into the caller's own; see :meth:`AsyncArtifact.tensor_dict`."""
        if into is not None:
            return self._bus._run(self._artifact.tensor_dict(framework=framework, into=into, timeout=timeout))
        opened, contents = self._open(timeout)
        return contents.tensors(opened, framework)

    def view(
        self,
        *,
        names: Iterable[str] | None = None,
        slices: Mapping[str, Index | tuple[Index, ...]] | None = None,
        transpose: Mapping[str, Transpose] | None = None,
        timeout: float | None = None,
    ) -> Artifact:
        """A selection of this artifact or view; see :meth:`AsyncArtifact.view`."""
        work = self._artifact.view(names=names, slices=slices, transpose=transpose, timeout=timeout)
        return Artifact(self._bus, self._bus._run(work))

    def define(self, *, timeout: float | None = None) -> Position:
        """Make a view known, so that others find it by its id; see :meth:`AsyncArtifact.define`."""
        return self._bus._run(self._artifact.define(timeout=timeout))

    def save(
        self, path: str | os.PathLike[str], *, progress: Progress | None = None, timeout: float | None = None
    ) -> Path:
        """Write all tensors to one safetensors file; see :meth:`AsyncArtifact.save`."""
        return self._bus._run(self._artifact.save(path, progress=progress, timeout=timeout))

    # -- what becomes of it -------------------------------------------------------------------------------------------

    def info(self, *, timeout: float | None = None) -> ArtifactInfo:
        """What the directory says of it now; of a view: of its base."""
        return self._bus._run(self._artifact.info(timeout=timeout))

    def exists(self, *, timeout: float | None = None) -> bool:
        """Whether it is still there."""
        return self._bus._run(self._artifact.exists(timeout=timeout))

    def replicas(self, *, timeout: float | None = None) -> list[Replica]:
        """Where its bytes are now."""
        return self._bus._run(self._artifact.replicas(timeout=timeout))

    def history(self, *, timeout: float | None = None) -> list[EventRecord]:
        """The facts about it, oldest first."""
        return self._bus._run(self._artifact.history(timeout=timeout))

    def destroy(self, *, timeout: float | None = None) -> Position:
        """End it everywhere; see :meth:`AsyncArtifact.destroy`."""
        return self._bus._run(self._artifact.destroy(timeout=timeout))

    def pin(self, ttl_s: float | None = None, *, timeout: float | None = None) -> Pin:
        """Keep a replica on this bus's worker until the pin is released; see :meth:`AsyncArtifact.pin`."""
        return Pin(self._bus, self._bus._run(self._artifact._pin(ttl_s, timeout)))

    def prefetch(self, worker: Worker | str, *, device: str = "cpu", timeout: float | None = None) -> Prefetched:
        """Have a copy in a worker's memory; see :meth:`AsyncArtifact.prefetch`."""
        return self._bus._run(self._artifact.prefetch(worker_id(worker), device=device, timeout=timeout))

    def replicate(
        self, *, to: Sequence[Worker | str] | None = None, n: int | None = None, timeout: float | None = None
    ) -> Replicated:
        """Have copies on the workers ``to``, or on ``n`` in all; see :meth:`AsyncArtifact.replicate`."""
        workers = None if to is None else [worker_id(worker) for worker in to]
        return self._bus._run(self._artifact.replicate(to=workers, n=n, timeout=timeout))

    def migrate(self, *, src: Worker | str, dst: Worker | str, timeout: float | None = None) -> Migrated:
        """Copy to ``dst``, verify it there, then drop it from ``src``; see :meth:`AsyncArtifact.migrate`."""
        return self._bus._run(self._artifact.migrate(src=worker_id(src), dst=worker_id(dst), timeout=timeout))

    def evict(self, worker: Worker | str, *, timeout: float | None = None) -> Evicted:
        """Drop a worker's copies; see :meth:`AsyncArtifact.evict`."""
        return self._bus._run(self._artifact.evict(worker_id(worker), timeout=timeout))

    def persist(self, worker: Worker | str | None = None, *, timeout: float | None = None) -> Persisted:
        """Have a copy on a worker's disk; see :meth:`AsyncArtifact.persist`."""
        at = None if worker is None else worker_id(worker)
        return self._bus._run(self._artifact.persist(at, timeout=timeout))

    def verify(self, worker: Worker | str | None = None, *, timeout: float | None = None) -> Verified:
        """Compare a worker's copies with the digests; see :meth:`AsyncArtifact.verify`."""
        at = None if worker is None else worker_id(worker)
        return self._bus._run(self._artifact.verify(at, timeout=timeout))

    def release(self, *, timeout: float | None = None) -> None:
        """Close the handle, and end the lease of who registered the artifact. Tensors that it gave stay readable."""
        self._bus._run(self._artifact.release(timeout=timeout))

    def _open(self, timeout: float | None) -> tuple[Opened, Contents]:
        ready = self._artifact._ready()
        return ready if ready is not None else self._bus._run(self._open_async(timeout))

    async def _open_async(self, timeout: float | None) -> tuple[Opened, Contents]:
        return await self._artifact._open(self._artifact._begin(timeout, "reading"))

    def _table(self) -> Contents:
        known = self._artifact._contents
        return known if known is not None else self._bus._run(self._table_async())

    async def _table_async(self) -> Contents:
        return await self._artifact._table(self._artifact._begin(None, "tensor_meta"))


class Pin(AbstractContextManager["Pin"]):
    """A pin on an artifact: a fact on the log. Dropping it unreleased warns, and ends it."""

    def __init__(self, bus: Bus, pin: AsyncPin) -> None:
        self._bus = bus
        self._pin = pin

    @property
    def artifact(self) -> str:
        """Id of the artifact that it keeps."""
        return self._pin.artifact

    @property
    def lease(self) -> str:
        """Its name on the log."""
        return self._pin.lease

    @property
    def position(self) -> Position:
        """Where in the log it is held from."""
        return self._pin.position

    @property
    def held(self) -> bool:
        """Whether it was not released, and the worker did not say that it has ended."""
        return self._pin.held

    def release(self, *, timeout: float | None = None) -> None:
        """End it; see :meth:`AsyncPin.release`."""
        self._bus._run(self._pin.release(timeout=timeout))

    def __enter__(self) -> Self:
        if not self._bus.closed:
            self._bus._run(self._pin.__aenter__())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._bus.closed:
            self._bus._run(self._pin.__aexit__(kind, exc, traceback))


class Subscription:
    """The versions of a series, each once and in order: an iterator; see :class:`AsyncSubscription`."""

    def __init__(self, bus: Bus, subscription: AsyncSubscription) -> None:
        self._bus = bus
        self._subscription = subscription

    @property
    def name(self) -> str:
        """The series."""
        return self._subscription.name

    @property
    def position(self) -> int:
        """Number of the last version handed out or passed over; ``start=position + 1`` goes on there."""
        return self._subscription.position

    @property
    def gone(self) -> int:
        """How many versions were gone before they could be handed out."""
        return self._subscription.gone

    @property
    def skipped(self) -> int:
        """How many were passed over for a newer one, with ``coalesce``."""
        return self._subscription.skipped

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Artifact:
        if self._subscription._closed:
            raise StopIteration
        return self.next()

    def next(self, *, timeout: float | None = None) -> Artifact:
        """The next version, waited for; see :meth:`AsyncSubscription.next`."""
        return Artifact(self._bus, self._bus._run(self._subscription.next(timeout=timeout)))

    def close(self) -> None:
        """End the subscription. Safe to repeat."""
        if not self._bus.closed:
            self._bus._run(self._subscription.aclose())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class Events:
    """The facts on the log, oldest first: an iterator; see :class:`AsyncEvents`."""

    def __init__(self, bus: Bus, events: AsyncEvents) -> None:
        self._bus = bus
        self._events = events

    @property
    def position(self) -> Position:
        """Position of the last fact handed out; give it as ``since`` to go on from there."""
        return self._events.position

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> EventRecord:
        event = self._bus._run(self._next())
        if event is None:
            raise StopIteration
        return event

    def close(self) -> None:
        """End the reading. Safe to repeat."""
        if not self._bus.closed:
            self._bus._run(self._events.aclose())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    async def _next(self) -> EventRecord | None:
        return await anext(self._events, None)
