"""The handle of an artifact, or of a view of one."""

# ruff: noqa: SLF001 - a bus, its handles and their mirrors are one unit; what they share is nobody else's
from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensorbus.clock import Deadline
from tensorbus.errors import InvalidArgumentError, NotFoundError
from tensorbus.events import FACT_BYTES_MAX
from tensorbus.model import Manifest, TensorSpec, ViewSpec, view_id
from tensorbus.sdk._checks import check_lease_s, check_progress
from tensorbus.sdk._events import AsyncEvents, EventRecord
from tensorbus.sdk._files import path_of, save_safetensors
from tensorbus.sdk._fill import Progress
from tensorbus.sdk._into import check_target
from tensorbus.sdk._leases import LeaseHandle
from tensorbus.sdk._maps import Opened
from tensorbus.sdk._pending import Pending
from tensorbus.sdk._pin import AsyncPin
from tensorbus.sdk._place import Place
from tensorbus.sdk._read import Contents, open_artifact, open_unwritten, read_manifest
from tensorbus.sdk._records import LOG_STREAM, ArtifactInfo, Position, Replica, parse, position_of
from tensorbus.sdk._short_forms import ShortForms
from tensorbus.sdk._threads import in_thread, in_thread_to_its_end
from tensorbus.transport import TransferReport

if TYPE_CHECKING:
    from tensorbus.model._views import Index, Transpose
    from tensorbus.sdk._async_bus import AsyncBus


class AsyncArtifact(ShortForms):
    """An artifact, or a view of one. Made by a bus; a handle never changes its artifact.

    Tensors that it gives share the memory of the local replica, copy on write: writing to one changes this process's
    view of it and nothing else. That memory stays as long as the handle or any tensor over it lives, also when the
    artifact is destroyed or the worker ends. Handles pickle by id and by where their bus was connected.
    """

    __slots__ = (
        "__weakref__",
        "_asked",
        "_bus",
        "_contents",
        "_info",
        "_lease",
        "_nbytes",
        "_opened",
        "_position",
        "_released",
        "_version",
        "_view",
    )

    def __init__(
        self,
        bus: AsyncBus,
        info: ArtifactInfo,
        position: int,
        *,
        asked: str | None = None,
        version: int | None = None,
        view: ViewSpec | None = None,
        contents: Contents | None = None,
        opened: Opened | None = None,
        lease: LeaseHandle | None = None,
        nbytes: int | None = None,
    ) -> None:
        self._bus = bus
        self._info = info
        self._position = position
        self._asked = asked
        self._version = version
        self._view = view
        self._contents = contents
        self._opened = opened
        self._lease = lease
        self._nbytes = nbytes
        self._released = False

    # -- what it is ---------------------------------------------------------------------------------------------------

    @property
    def id(self) -> str:
        """Its id: ``tb1:`` and a digest of its content, ``tbr:``, ``tbv:`` for a view, or as its maker gave it."""
        return self._info.artifact if self._view is None else view_id(self._info.artifact, self._view)

    @property
    def base_id(self) -> str:
        """The id of the artifact that a view is of; of an artifact its own."""
        return self._info.artifact

    @property
    def digest(self) -> str | None:
        """The content id ``tb1:…`` as far as it was known when the handle was made; ``None`` for a view."""
        return self._info.digest if self._view is None else None

    @property
    def nbytes(self) -> int:
        """Sum of the tensors' sizes, each counted once per name.

        Raises:
            InvalidArgumentError: Of a view that was found by its id, until its table was read: after ``tensor_meta()``.
        """
        known = self._nbytes_known
        if known is None:
            raise InvalidArgumentError("this handle has not read its view's table yet; await tensor_meta() first")
        return known

    @property
    def _nbytes_known(self) -> int | None:
        if self._view is None:
            return self._info.nbytes
        return self._nbytes if self._contents is None else self._contents.manifest.nbytes

    @property
    def key(self) -> str | None:
        """The key that it was found or put by, or ``None``."""
        return self._asked if self._asked in self._info.keys else None

    @property
    def version(self) -> int | None:
        """Its number in the series that it was found or published in, or ``None``."""
        return self._version

    @property
    def position(self) -> Position:
        """Where in the log it was there: give it as ``at_least`` to see at least as much elsewhere."""
        return {LOG_STREAM: self._position}

    @property
    def lease(self) -> str | None:
        """The lease of who registered it; ``None`` for others."""
        return None if self._lease is None else self._lease.lease

    @property
    def transfer(self) -> TransferReport | None:
        """How its bytes came here: by which path and why, from whom, in what time. ``None`` before they were read."""
        return None if self._opened is None else self._opened.report

    @property
    def bus(self) -> AsyncBus:
        """The bus that it was got from."""
        return self._bus

    def __repr__(self) -> str:
        name = f" {self.key!r}" if self.key else ""
        number = f" v{self._version}" if self._version is not None else ""
        known = self._nbytes_known
        size = f"{known} bytes" if known is not None else f"of {self.base_id[:24]}"
        return f"<{type(self).__name__}{name}{number} {self.id[:24]} {size}>"

    def __copy__(self) -> AsyncArtifact:
        """Another handle of the same bus. A lease stays with the first."""
        other = self._with(view=self._view, contents=self._contents, opened=self._opened)
        other._nbytes, other._released = self._nbytes, self._released
        return other

    def __deepcopy__(self, memo: dict[int, object]) -> AsyncArtifact:
        return self.__copy__()

    def __reduce__(self) -> tuple[object, ...]:
        return AsyncArtifact._restored, (type(self._bus), *self._state())

    @classmethod
    def _restored(cls, bus: type[AsyncBus], place: Place, *state: Any) -> AsyncArtifact:
        return cls._from_state(bus.shared().bus(place), *state)

    @classmethod
    def _from_state(
        cls,
        bus: AsyncBus,
        info: ArtifactInfo,
        position: int,
        asked: str | None,
        version: int | None,
        view: str | None,
        nbytes: int | None,
    ) -> AsyncArtifact:
        spec = None if view is None else ViewSpec.from_json(view)
        return cls(bus, info, position, asked=asked, version=version, view=spec, nbytes=nbytes)

    def __contains__(self, name: object) -> bool:
        """Whether there is a tensor of that name, once the handle knows: after ``tensor_meta()``, say.

        Raises:
            InvalidArgumentError: If it does not know yet.
        """
        if self._contents is None:
            raise InvalidArgumentError("this handle has not read its table of tensors yet; await tensor_meta() first")
        return name in self._contents.manifest

    async def tensor_meta(self, *, timeout: float | None = None) -> dict[str, TensorSpec]:
        """Name, dtype, shape, size and digest of each tensor, in the order of the names' bytes. Moves no tensor bytes.

        Raises:
            NotFoundError: If the artifact has ended.
        """
        contents = await self._table(self._begin(timeout, "tensor_meta"))
        return {spec.name: spec for spec in contents.manifest}

    async def names(self, *, timeout: float | None = None) -> tuple[str, ...]:
        """The tensors' names in the order of their bytes."""
        return (await self._table(self._begin(timeout, "names"))).manifest.names

    # -- its bytes ----------------------------------------------------------------------------------------------------

    async def tensor(self, name: str = "", *, framework: str | None = None, timeout: float | None = None) -> Any:
        """One tensor on the CPU, without a copy where the bytes are on this host; fetched to it first if they are not.

        Args:
            name: Its name; a bare tensor has the empty one.
            framework: ``"torch"`` or ``"numpy"``; torch where it is installed when ``None``.
            timeout: Seconds; the bus's default when ``None``.

        Raises:
            NotFoundError: If the artifact has ended, or has no such tensor; it tells near names.
            UnavailableError: If no replica can be reached; OutOfSpaceError: If the worker has no room to fetch it to.
            InvalidArgumentError: If the framework lacks the dtype.
        """
        opened, contents = await self._open(self._begin(timeout, "tensor"))
        return contents.tensor(opened, name, framework)

    async def tensor_dict(
        self,
        *,
        framework: str | None = None,
        into: Mapping[str, object] | None = None,
        timeout: float | None = None,
    ) -> dict[str, Any]:
        """All tensors by name, without a copy where the bytes are on this host.

        Args:
            framework: As for :meth:`tensor`.
            into: The caller's own tensors of the same names, shapes and dtypes, which are filled and given back, with
                the artifact's bytes whatever this process wrote to tensors that it was given. Nothing is written if
                one does not fit, or if several share memory and are not to be equal.
            timeout: Seconds; the bus's default when ``None``.

        Raises:
            As :meth:`tensor`; InvalidArgumentError: If a tensor of ``into`` differs or cannot be written.
            CorruptError: If tensors were given out, and the artifact's bytes cannot be had again to be sure of them.
        """
        deadline = self._begin(timeout, "tensor_dict")
        if into is None:
            opened, contents = await self._open(deadline)
            return contents.tensors(opened, framework)
        check_target(into)
        if framework is not None:
            raise InvalidArgumentError("framework= says what is made, and into= has what is there; give one of them")
        opened, contents = await self._open(deadline)
        async with deadline.scope():
            opened = await open_unwritten(self._bus._core, self._info, opened, contents, deadline=deadline)
            await in_thread_to_its_end(lambda stop: contents.fill(opened, into, stop))
        return dict(into)

    async def view(
        self,
        *,
        names: Iterable[str] | None = None,
        slices: Mapping[str, Index | tuple[Index, ...]] | None = None,
        transpose: Mapping[str, Transpose] | None = None,
        timeout: float | None = None,
    ) -> AsyncArtifact:
        """A selection of this artifact or view; the same selection always has the same id. Moves no tensor bytes.

        Nothing is said to anybody: others find it by its id once :meth:`define` was called; handles pickle without.

        Args:
            names: The tensors to take; all when ``None``.
            slices: Per tensor an index as torch takes it: whole numbers, slices with steps of 1 or more, ``...``.
            transpose: Per tensor a permutation of the dimensions that ``slices`` leaves, or pairs to swap.
            timeout: Seconds; the bus's default when ``None``.

        Raises:
            NotFoundError: If there is no tensor of a name; InvalidArgumentError: If an index does not fit.
        """
        contents = await self._table(self._begin(timeout, "view"))
        outer = ViewSpec.build(contents.manifest, names=names, slices=slices, transpose=transpose)
        spec = outer if self._view is None else self._view.compose(outer)
        view = None if spec.whole else spec
        return self._with(view=view, contents=Contents(contents.base, view), opened=self._opened)

    async def define(self, *, timeout: float | None = None) -> Position:
        """Make a view known, so that others find it by its id for as long as its base lives. Safe to repeat.

        Returns:
            The position from which on it is: give it as ``at_least`` elsewhere. Of a whole artifact that of the handle.

        Raises:
            NotFoundError: If the base has ended.
            InvalidArgumentError: If it is more than a fact has room for: a selection of very many names.
        """
        if self._view is None:
            return self.position
        definition, nbytes_max = self._view.to_json(), FACT_BYTES_MAX
        if (nbytes := len(definition.encode())) > nbytes_max:
            raise InvalidArgumentError(
                f"the definition of view {self.id} takes {nbytes} bytes, and a fact has room for {nbytes_max}; "
                "select fewer tensors, or pickle the handle, which needs no fact",
                nbytes=nbytes,
            )
        args = {"artifact": self.base_id, "view": self.id, "definition": definition}
        deadline = self._begin(timeout, "define")
        return {LOG_STREAM: position_of((await self._bus._core.ask("define_view", args, deadline=deadline)).data)}

    async def save(
        self, path: str | os.PathLike[str], *, progress: Progress | None = None, timeout: float | None = None
    ) -> Path:
        """Write all tensors to one safetensors file, whole or not at all. Needs no torch, whatever the dtypes.

        What is written are the artifact's bytes, whatever this process wrote to tensors that it was given.

        Args:
            path: A file that ends in ``.safetensors``, or a directory (made if missing) for a ``model.safetensors``.
            progress: Called as ``progress(bytes_done, bytes_total)`` from the thread that writes.
            timeout: Seconds until the bytes are on this host; the bus's default when ``None``. Writing has no limit.

        Returns:
            The file.

        Raises:
            As :meth:`tensor`; InvalidArgumentError: If the format has no such dtype or name; it names the tensor.
            CorruptError: If tensors were given out, and the artifact's bytes cannot be had again to be sure of them.
            OutOfSpaceError: If the disk is full; DeniedError: If it may not be written.
        """
        deadline = self._begin(timeout, "save")
        where = path_of(path)
        check_progress(progress)
        opened, contents = await self._open(deadline)
        opened = await open_unwritten(self._bus._core, self._info, opened, contents, deadline=deadline)
        return await in_thread(lambda: save_safetensors(where, contents.all_octets(opened), progress=progress))

    # -- what becomes of it -------------------------------------------------------------------------------------------

    async def info(self, *, timeout: float | None = None) -> ArtifactInfo:
        """What the directory says of it now: replicas, keys, versions, leases. Of a view: its base.

        Raises:
            NotFoundError: If it has ended.
        """
        return await self._now(self._begin(timeout, "info"))

    async def exists(self, *, timeout: float | None = None) -> bool:
        """Whether it is still there."""
        try:
            await self._now(self._begin(timeout, "exists"))
        except NotFoundError:
            return False
        return True

    async def replicas(self, *, timeout: float | None = None) -> list[Replica]:
        """Where its bytes are now; of a view, whatever can serve it.

        Raises:
            NotFoundError: If it has ended.
        """
        found = (await self._now(self._begin(timeout, "replicas"))).replicas
        return [replica for replica in found if replica.view is None or replica.view == self.id]

    async def history(self, *, timeout: float | None = None) -> list[EventRecord]:
        """The facts about it, oldest first."""
        self._begin(timeout, "history")
        events = AsyncEvents(self._bus._core, artifact=self.base_id, timeout=timeout)
        return [event async for event in events]

    async def destroy(self, *, timeout: float | None = None) -> Position:
        """End it everywhere, with the keys and versions that name it. What is mapped stays readable.

        Safe to repeat: what has ended stays so, and a new artifact that was put under the same id since ends too.

        Returns:
            The position at which it has ended.

        Raises:
            InvalidArgumentError: For a view, which has no life of its own.
        """
        deadline = self._begin(timeout, "destroy")
        if self._view is not None:
            raise InvalidArgumentError(f"{self.id} is a view; destroy its base {self.base_id}, or just drop the handle")
        core = self._bus._core
        reply = await core.ask("destroy", {"artifact": self.base_id}, deadline=deadline)
        position = position_of(reply.data)
        core.followed.ended_here(self.base_id, None, position)
        return {LOG_STREAM: position}

    def pin(self, ttl_s: float | None = None, *, timeout: float | None = None) -> Pending[AsyncPin]:
        """Keep a replica on this bus's worker, by a fact: it is not evicted while the pin holds.

        Args:
            ttl_s: The pin ends that many seconds after this process last renewed it, which it does in the background;
                ``None`` holds it until released.
            timeout: Seconds; the bus's default when ``None``.

        Returns:
            To be awaited, or entered with ``async with``, which releases it at the end.
        """
        return Pending(lambda: self._pin(ttl_s, timeout))

    async def release(self, *, timeout: float | None = None) -> None:
        """Close the handle, and end the lease of who registered the artifact. Safe to repeat.

        Tensors that it gave stay readable; the handle itself is of no more use.
        """
        deadline = self._bus._core.begin(timeout, "release")
        self._released = True
        self._opened = None
        lease, self._lease = self._lease, None
        if lease is not None:
            await lease.release_quietly(deadline=deadline)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _begin(self, timeout: float | None, what: str) -> Deadline:
        if self._released:
            raise InvalidArgumentError(f"this handle of {self.id} was released; get a new one from the bus")
        return self._bus._core.begin(timeout, f"{what} of {self.key or self.id}")

    async def _open(self, deadline: Deadline) -> tuple[Opened, Contents]:
        opened = self._opened
        if opened is None:
            opened = await open_artifact(self._bus._core, self._info, view=self._view, deadline=deadline)
            self._opened = opened
        return opened, self._contents or self._described(opened.manifest)

    async def _table(self, deadline: Deadline) -> Contents:
        if self._contents is not None:
            return self._contents
        return self._described(await read_manifest(self._bus._core, self._info, deadline=deadline))

    def _described(self, base: Manifest) -> Contents:
        contents = self._contents = Contents(base, self._view)
        return contents

    def _ready(self) -> tuple[Opened, Contents] | None:
        """What is open already: it can be used from any thread."""
        opened, contents = self._opened, self._contents
        return None if opened is None or contents is None or self._released else (opened, contents)

    async def _now(self, deadline: Deadline) -> ArtifactInfo:
        full = await self._bus._core.directory(deadline)
        if full is not None:
            return await full.info(self.base_id, deadline=deadline)
        args = {"by": "id", "ref": self.base_id, "follow": False}
        reply = await self._bus._core.ask("resolve", args, deadline=deadline)
        return parse(ArtifactInfo, reply.data.get("artifact"))

    async def _pin(self, ttl_s: float | None, timeout: float | None) -> AsyncPin:
        deadline = self._begin(timeout, "pin")
        if ttl_s is not None:
            check_lease_s(ttl_s, "ttl_s")
        core = self._bus._core
        reply = await core.ask("pin", {"artifact": self.base_id, "ttl_s": ttl_s}, deadline=deadline, repeat=False)
        lease = core.leases.hold(reply.data.get("lease"), artifact=self.base_id, ttl_s=ttl_s, own=False)
        return AsyncPin(core, lease, position_of(reply.data))

    def _with(self, *, view: ViewSpec | None, contents: Contents | None, opened: Opened | None) -> AsyncArtifact:
        return AsyncArtifact(
            self._bus,
            self._info,
            self._position,
            asked=self._asked,
            version=self._version,
            view=view,
            contents=contents,
            opened=opened,
        )

    def _state(self) -> tuple[object, ...]:
        """What a pickle says: where, which artifact, and what of it."""
        view = None if self._view is None else self._view.to_json()
        return self._bus._core.place, self._info, self._position, self._asked, self._version, view, self._nbytes_known
