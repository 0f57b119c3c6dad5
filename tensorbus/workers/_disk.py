"""The disk tier of a worker: replicas in spill files, told to the log, and known again by the worker's next life."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

from tensorbus.clock import Deadline
from tensorbus.errors import ConflictError, CorruptError, NotFoundError, OutOfSpaceError, UnavailableError
from tensorbus.events import DropReason, Event, QuarantineCause, ReplicaAdded, ReplicaDropped, ReplicaQuarantined, Tier
from tensorbus.ids import ArtifactId
from tensorbus.lifecycle import Artifact, Replica
from tensorbus.model import Layout, Manifest
from tensorbus.transport import Segment
from tensorbus.transport._spill import Spill, SpillHeader, check_spill, read_spill, write_spill
from tensorbus.transport._spill_folder import SpillFolder
from tensorbus.workers._core import Core, off_loop
from tensorbus.workers._disk_fate import Fate, content_id, fate, is_here
from tensorbus.workers._puts import known_outcome
from tensorbus.workers._store import Held, Where

log = logging.getLogger("tensorbus.workers")

T = TypeVar("T")

Allocate = Callable[[int, str], Awaitable[Segment]]

LOCK_DELAY_S: Final = 0.2
FOLDER_DELAY_S: Final = 5.0
TOLD_AT_ONCE: Final = 8
HOLDERS_SHOWN: Final = 10


class CalledOff(threading.Event):
    """Ends one piece of work on the disk; so does what ends them all.

    Args:
        all: What ends them all.
    """

    def __init__(self, all: threading.Event) -> None:
        super().__init__()
        self._all = all

    def is_set(self) -> bool:
        return super().is_set() or self._all.is_set()


class DiskTier:
    """All spill files of this worker. Lives on the worker's loop; what blocks goes to threads.

    Args:
        folder: ``None`` for a worker without a disk tier.
        nbytes_max: What the files may take.

    Attributes:
        trouble: Why the folder cannot be used, or empty.
    """

    def __init__(self, core: Core, folder: SpillFolder | None, *, nbytes_max: int) -> None:
        self._core = core
        self._folder = folder
        self._nbytes_max = nbytes_max
        self._spills: dict[Where, Spill] = {}
        self._going: set[Where] = set()
        self._used = 0
        self._writing: dict[Where, asyncio.Future[None]] = {}
        self._stop = threading.Event()
        self._attached = asyncio.Event()
        self._doubt = asyncio.Event()
        self.trouble = "" if folder is not None else "this worker has no disk tier (disk_bytes is 0)"
        # Whether a copy on disk may go because another, here or elsewhere, is as good, and how to say so.
        self.spare: Callable[[Where], DropReason | None] = lambda _where: None
        # Told of an artifact whose copy on disk was corrupt, and whether it had been promised to be there.
        self.on_corrupt: Callable[[Where, bool], None] = lambda _where, _must: None

    @property
    def usable(self) -> bool:
        """Whether it has a folder, as far as is known."""
        return not self.trouble

    @property
    def used_bytes(self) -> int:
        return self._used

    def get(self, where: Where) -> Spill | None:
        return self._spills.get(where)

    def artifacts(self) -> list[Where]:
        """Of which artifacts there are files."""
        return list(self._spills)

    def holds(self, where: Where) -> bool:
        """Whether a replica that the log tells of is on this disk, or its end is being said, as far as is known."""
        return where in self._spills or where in self._going or not self._attached.is_set()

    def stats(self) -> dict[str, object]:
        """For people: budget, use and number of files."""
        return {
            "budget_bytes": self._nbytes_max,
            "used_bytes": self._used,
            "files": len(self._spills),
            "trouble": self.trouble,
        }

    # -- its life -----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Have the folder, say what is in it, and look through it once; then again after each loss of the log."""
        if self._folder is None:
            return
        try:
            if not await self._open(self._folder):
                return
            await self.reconcile()
            await self._scrub()
            while True:
                await self._doubt.wait()
                self._doubt.clear()
                await self._core.feed.sure(deadline=Deadline(None))
                await self.reconcile()
        finally:
            self._attached.set()
            self._stop.set()  # it can only be cancelled, with all that writes and reads

    def close(self) -> None:
        """End what is being written or read, and let go of the folder."""
        self._stop.set()
        if self._folder is not None:
            self._folder.close()

    def on_loss(self) -> None:
        """The log lost its tail: what is on disk is to be said again."""
        self._doubt.set()

    async def _open(self, folder: SpillFolder) -> bool:
        """Have the folder; a former life of this worker that still ends is waited for."""
        said = ""
        while True:
            try:
                await asyncio.to_thread(folder.open)
                break
            except (ConflictError, UnavailableError) as error:
                if str(error) != said:
                    said = str(error)
                    log.warning("no disk tier yet: reason=%s", error)
                if isinstance(error, ConflictError) and "pid" not in error.details:
                    self.trouble = str(error)
                    return False
                await asyncio.sleep(LOCK_DELAY_S if isinstance(error, ConflictError) else FOLDER_DELAY_S)
        for spill in await asyncio.to_thread(lambda: list(folder.spills())):
            self._note((spill.header.tenant, ArtifactId(spill.header.artifact)), spill)
        self._attached.set()
        return True

    async def ready(self, deadline: Deadline) -> None:
        """Wait until the folder is there.

        Raises:
            UnavailableError: If it cannot be.
        """
        if not self.trouble:
            async with deadline.scope():
                await self._attached.wait()
        if self.trouble:
            raise UnavailableError(f"worker {self._core.me.worker}: {self.trouble}", worker=self._core.me.worker)

    async def reconcile(self) -> None:
        """Compare files and log: what lives is said, what is over is removed, and what is said and gone is disowned."""
        rest = iter(list(self._spills.items()))

        async def some() -> None:
            for where, spill in rest:
                with suppress(ConflictError, UnavailableError):
                    await self._one(where, spill)

        async with asyncio.TaskGroup() as group:
            for _ in range(TOLD_AT_ONCE):
                group.create_task(some(), name="tell of spill files")
        await self._disown_missing()

    async def tell(self, where: Where) -> None:
        """Say a file, if there is one of the artifact and the log does not have it."""
        spill = self._spills.get(where)
        if spill is not None:
            with suppress(ConflictError):
                await self._one(where, spill)

    async def _one(self, where: Where, spill: Spill) -> None:
        state = self._core.state
        record = state.artifacts.get(where)
        found = fate(spill.header, await asyncio.to_thread(content_id, spill), record, forgotten=state.log.forgotten)
        if self._spills.get(where) is not spill:
            return
        match found:
            case Fate.OVER:
                self.forget(where)
            case Fate.UNKNOWN:
                log.warning(
                    "a spill file is of no artifact that the log knows: artifact=%s file=%s", *where[1:], spill.path
                )
            case Fate.LIVES if record is not None and self._said(record) is None:
                await self._say_added(where, record.nbytes)

    def _said(self, record: Artifact) -> Replica | None:
        """This life's replica on disk, as the log has it."""
        me = self._core.me
        return next(
            (r for r in record.replicas.values() if is_here(r, me.worker) and r.incarnation == me.incarnation), None
        )

    async def _disown_missing(self) -> None:
        """What a former life said and no file holds is no replica.

        A new folder proves nothing: its disk may be missing.
        """
        folder, me, state = self._folder, self._core.me, self._core.state
        gone = [
            where
            for where in list(state.by_worker.get(me.worker, {}))
            if where not in self._spills
            and any(is_here(r, me.worker) for r in state.artifacts[where].replicas.values())
        ]
        if gone and folder is not None and folder.fresh:
            log.error("%d replicas should be in %s, which is new: is its disk mounted?", len(gone), folder.path)
            return
        for where in gone:
            await self._say_dropped(where, DropReason.EVICTED)

    async def _scrub(self) -> None:
        """Compare every file of former lives with its checksums."""
        for where, spill in list(self._spills.items()):
            if self._spills.get(where) is not spill:
                continue
            try:
                await asyncio.to_thread(check_spill, spill, stop=self._stop)
            except CorruptError as error:
                await self.corrupt(where, spill, error)
            except UnavailableError as error:
                log.warning("cannot look through a spill file: reason=%s", error)

    async def verify(self, where: Where) -> None:
        """Compare a copy with its checksums, if there is one.

        Raises:
            CorruptError: If it has other bytes; it is put aside, and quarantined.
            UnavailableError: If it cannot be read.
        """
        spill = self._spills.get(where)
        if spill is None:
            return
        try:
            await asyncio.to_thread(check_spill, spill, stop=self._stop)
        except CorruptError as error:
            await self.corrupt(where, spill, error)
            raise

    # -- writing ------------------------------------------------------------------------------------------------------

    def call_off(self) -> CalledOff:
        """What ends a writing that it is given to."""
        return CalledOff(self._stop)

    async def write(self, held: Held, *, must: bool, off: CalledOff | None = None) -> None:
        """Have a copy of what is held on disk, and say so. One that is there already will do.

        Args:
            must: Whether it is promised to stay there as long as the artifact lives.
            off: Ends the writing, which then leaves nothing.

        Raises:
            OutOfSpaceError: If the disk or its budget is full; it says what holds it.
            UnavailableError: If there is no disk tier, or it was ended; ConflictError: If the artifact ended meanwhile.
        """
        await self.ready(Deadline(None))
        while (running := self._writing.get(held.where)) is not None:
            await asyncio.wait([running])
        there = self._spills.get(held.where)
        if there is not None and (there.header.must or not must):
            return
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._writing[held.where] = done
        try:
            await self._write(held, must=must, stop=off or self._stop)
        finally:
            del self._writing[held.where]
            done.set_result(None)

    async def _write(self, held: Held, *, must: bool, stop: threading.Event) -> None:
        folder, record = self._folder, self._core.state.artifacts.get(held.where)
        assert folder is not None, "it is ready"
        if record is None or not record.live or not held.valid:
            raise ConflictError(f"artifact {held.artifact!r} has ended", artifact=held.artifact)
        header = await off_loop(partial(self._header, record=record, must=must), held, weight=len(held.manifest))
        need = header.data_bytes
        await self._make_room(need, held.where)
        self._used += need
        try:
            with held.reading() as parts:
                path = folder.place(*held.where)
                spill = await _to_its_end(partial(write_spill, path, header, parts, stop=stop))
        finally:
            self._used -= need
        now = self._core.state.artifacts.get(held.where)
        if now is None or not now.live or now.born != record.born:
            await asyncio.to_thread(folder.remove, path)
            raise ConflictError(f"artifact {held.artifact!r} was destroyed meanwhile", artifact=held.artifact)
        self._note(held.where, spill)
        if self._said(now) is None:
            await self._say_added(held.where, now.nbytes)

    def _header(self, held: Held, *, record: Artifact, must: bool) -> SpillHeader:
        me = self._core.me
        return SpillHeader(
            worker=me.worker,
            incarnation=me.incarnation,
            tenant=held.tenant,
            artifact=held.artifact,
            born=record.born,
            born_ns=record.born_ns,
            must=must,
            layout=held.layout.to_json(),
            manifest=held.manifest.to_json(),
            parts=tuple(part.nbytes for part in held.parts),
        )

    async def _make_room(self, need: int, wanted_by: Where) -> None:
        """Give up copies that are no loss, the oldest first."""
        for where, spill in list(self._spills.items()):
            if self._used + need <= self._nbytes_max:
                return
            reason = None if where == wanted_by or spill.header.must else self.spare(where)
            if reason is not None:
                with suppress(ConflictError):  # it is the last copy by now
                    await self.drop(where, reason)
        if self._used + need > self._nbytes_max:
            raise self._out_of_space(need, tenant=wanted_by[0])

    def _out_of_space(self, need: int, *, tenant: str) -> OutOfSpaceError:
        largest = sorted(self._spills.values(), key=lambda spill: -spill.nbytes)[:HOLDERS_SHOWN]
        holders = [
            {
                "owner": spill.header.artifact if spill.header.tenant == tenant else "another tenant",
                "nbytes": spill.nbytes,
                "state": "disk",
            }
            for spill in largest
        ]
        return OutOfSpaceError(
            f"{need} bytes do not fit on disk: {self._used} of disk_bytes = {self._nbytes_max} are held by "
            f"{len(self._spills)} files" + (f"; the largest is {holders[0]['owner']}" if holders else ""),
            asked_bytes=need,
            budget_bytes=self._nbytes_max,
            used_bytes=self._used,
            holders=holders,
        )

    # -- reading ------------------------------------------------------------------------------------------------------

    async def read(self, record: Artifact, allocate: Allocate) -> Held | None:
        """Bring an artifact back into memory; ``None`` if it is not on this disk.

        Raises:
            CorruptError: If its file is not what was written; it is put aside, and quarantined.
            OutOfSpaceError: If memory has no room; UnavailableError: If the disk cannot be read.
        """
        if not self.usable or (self._spills.get(record.where) is None and self._attached.is_set()):
            return None
        await self.ready(Deadline(None))
        spill = self._spills.get(record.where)
        if spill is None:
            return None
        try:
            return await self._read(spill, record, allocate)
        except CorruptError as error:
            await self.corrupt(record.where, spill, error)
            raise

    async def _read(self, spill: Spill, record: Artifact, allocate: Allocate) -> Held:
        header = spill.header
        manifest, layout = await self._tables(spill, record)
        parts: list[Segment] = []
        try:
            for nbytes in header.parts:
                parts.append(await allocate(nbytes, record.tenant))
                parts[-1].label = record.artifact
            views = [part.view for part in parts]
            await _to_its_end(partial(read_spill, spill, views, stop=self._stop))
            for part in parts:
                part.seal()
        except BaseException:
            for part in parts:
                part.release()
            raise
        return Held(record.tenant, record.artifact, tuple(parts), layout, manifest)

    async def lend(self, record: Artifact) -> tuple[Spill, Held]:
        """What is on this disk as it lies there, for who reads it without its coming into memory. All of it is checked.

        Returns:
            The file, and what it holds; its parts are those of :func:`mapped_spill`.

        Raises:
            NotFoundError: If it is not there; CorruptError, UnavailableError: As :meth:`verify`.
        """
        spill = self._spills.get(record.where)
        await self.verify(record.where)
        held = await self.described(record)
        if spill is None or held is None:
            raise NotFoundError(f"{record.artifact!r} is not on the disk of worker {self._core.me.worker}")
        return spill, held

    async def described(self, record: Artifact) -> Held | None:
        """What a file holds, without its bytes; ``None`` if there is none of it."""
        spill = self._spills.get(record.where)
        if spill is None:
            return None
        manifest, layout = await self._tables(spill, record)
        return Held(record.tenant, record.artifact, (), layout, manifest, tier=Tier.DISK)

    async def _tables(self, spill: Spill, record: Artifact) -> tuple[Manifest, Layout]:
        header = spill.header
        manifest = await off_loop(Manifest.from_json, header.manifest, weight=record.tensors)
        if record.digest is not None and not manifest.digested:
            manifest = await self._core.load_manifest(record, deadline=known_outcome())
        layout = await off_loop(partial(Layout.from_json, manifest=manifest), header.layout, weight=record.tensors)
        return manifest, layout

    async def corrupt(self, where: Where, spill: Spill, error: CorruptError) -> None:
        """A file is not what was written: put it aside, and say that it is corrupt."""
        while (running := self._writing.get(where)) is not None:
            await asyncio.wait([running])
        if self._spills.get(where) is not spill or self._folder is None:
            return
        # A right copy is written only when this is said, else the log would take that for the wrong one.
        said: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._writing[where] = said
        self._lose(where)
        self._going.add(where)
        try:
            aside = await asyncio.to_thread(self._folder.put_aside, spill.path)
            log.error("a replica on disk is corrupt: artifact=%s kept=%s reason=%s", where[1], aside, error)
            with suppress(ConflictError, UnavailableError):
                await self._say_corrupt(where)
        finally:
            self._going.discard(where)
            del self._writing[where]
            said.set_result(None)
        self.on_corrupt(where, spill.header.must)

    # -- giving up ----------------------------------------------------------------------------------------------------

    async def drop(self, where: Where, reason: DropReason) -> None:
        """Give up a copy; the artifact lives on elsewhere. What is not here is gone already.

        Raises:
            ConflictError: If the log does not keep that: it is the last one, and it stays.
        """
        spill = self._spills.get(where)
        if spill is None or self._folder is None:
            return
        await self._say_dropped(where, reason)
        if self._spills.get(where) is spill:
            self._lose(where)
            await asyncio.to_thread(self._folder.remove, spill.path)

    def ended(self, record: Artifact) -> None:
        """An artifact ended: its file goes, unless the log has lost a later life of it."""
        spill = self._spills.get(record.where)
        if spill is not None and fate(spill.header, None, record, forgotten=0) is Fate.OVER:
            self.forget(record.where)

    def forget(self, where: Where) -> None:
        """Give up a file whose artifact is over."""
        spill, folder = self._lose(where), self._folder
        if spill is not None and folder is not None:
            self._core.spawn(_remove(folder, spill.path), name=f"remove {spill.path.name}")

    def _note(self, where: Where, spill: Spill) -> None:
        self._lose(where)
        self._spills[where] = spill
        self._used += spill.header.data_bytes

    def _lose(self, where: Where) -> Spill | None:
        spill = self._spills.pop(where, None)
        if spill is not None:
            self._used -= spill.header.data_bytes
        return spill

    async def _say_added(self, where: Where, nbytes: int) -> None:
        def fact(number: int) -> Event:
            return ReplicaAdded(
                tenant=where[0], artifact=where[1], view=None, tier=Tier.DISK, nbytes=nbytes, number=number
            )

        await self._core.author.say(fact, deadline=known_outcome())

    async def _say_corrupt(self, where: Where) -> None:
        def fact(number: int) -> Event:
            return ReplicaQuarantined(
                tenant=where[0],
                artifact=where[1],
                view=None,
                tier=Tier.DISK,
                cause=QuarantineCause.SPILL,
                wrong=(),
                number=number,
            )

        await self._core.author.say(fact, deadline=known_outcome())

    async def _say_dropped(self, where: Where, reason: DropReason) -> None:
        self._going.add(where)

        def fact(number: int) -> Event:
            return ReplicaDropped(
                tenant=where[0], artifact=where[1], view=None, tier=Tier.DISK, reason=reason, number=number
            )

        try:
            await self._core.author.say(fact, deadline=known_outcome())
        finally:
            self._going.discard(where)


async def _to_its_end(work: Callable[[], T]) -> T:
    """Run in a thread; who is cancelled waits for its end, since the thread has the memory."""
    task = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.gather(task, return_exceptions=True)
        raise


async def _remove(folder: SpillFolder, path: Path) -> None:
    await asyncio.to_thread(folder.remove, path)
