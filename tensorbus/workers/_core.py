"""What every part of a worker shares: who it is, its voice, its view of the log, and the tasks it must finish."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from tensorbus.bus import Bus, get_blob, put_blob
from tensorbus.clock import Clock, Deadline
from tensorbus.errors import InvalidArgumentError, UnavailableError
from tensorbus.events import ManifestRef
from tensorbus.feeds import Author, DirectoryFeed
from tensorbus.ids import IdSource, Incarnation, WorkerId
from tensorbus.lifecycle import Artifact, Directory
from tensorbus.model import Manifest
from tensorbus.projections import Json, LiveDirectory
from tensorbus.workers._latency import LatencyWindow

A = TypeVar("A")
T = TypeVar("T")

INLINE_MANIFEST_BYTES_MAX = 2048
"""A larger manifest goes as a blob, so that Directories stay small."""

MANIFESTS_KEPT = 256

MAY_COME_S = 0.05

HEAVY_TENSORS = 500
"""A manifest of more is read and written in a thread."""


@dataclass(slots=True)
class Identity:
    """Who this process is on the log."""

    worker: WorkerId
    incarnation: Incarnation
    host: str
    roles: tuple[str, ...]
    data: str = ""
    control: str = ""


class Core:
    """Shared by the services of one worker process.

    Args:
        group: Owns the work that must be finished even when the caller who asked for it is gone.
    """

    def __init__(
        self, *, me: Identity, bus: Bus, feed: DirectoryFeed, author: Author, ids: IdSource, clock: Clock,
        group: asyncio.TaskGroup,
    ) -> None:  # fmt: skip
        self.me = me
        self.bus = bus
        self.feed = feed
        self.author = author
        self.ids = ids
        self.clock = clock
        self.group = group
        self.beats = LatencyWindow()
        self.unsettled = False
        """The log lost its tail, and the workers are still saying what they hold."""
        self.store_stats: Callable[[], Json] | None = None
        self.home_stats: Callable[[], Json] | None = None
        self.disk_stats: Callable[[], Json] | None = None
        self._spawned: set[asyncio.Task[None]] = set()
        self._closed = False
        self._manifests: dict[tuple[str, str], Manifest] = {}

    @property
    def live(self) -> LiveDirectory:
        return self.feed.live

    @property
    def state(self) -> Directory:
        return self.feed.live.state

    async def finish(
        self, work: Coroutine[Any, Any, T], *, name: str, unwanted: Callable[[T], None] | None = None
    ) -> T:
        """Run something to its end, whatever becomes of the caller who waits for it.

        An error belongs to who waits; without one it is dropped, and the log and the fold say what is true.

        Args:
            unwanted: Called with the result if it comes when nobody waits any more.
        """
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        async def run() -> None:
            try:
                result = await work
            except Exception as error:  # noqa: BLE001 - the task's edge: handed to the one who waits
                if not done.done():
                    done.set_exception(error)
                    done.exception()
            else:
                if not done.done():
                    done.set_result(result)

        task = None if self._closed else self._start(run(), name=name)
        if task is None:
            work.close()
            raise UnavailableError(f"worker {self.me.worker} is leaving", worker=self.me.worker)

        def ended(_task: asyncio.Task[None]) -> None:
            work.close()  # a task that is cancelled before its first step never came to it
            done.cancel()

        task.add_done_callback(ended)
        try:
            return await asyncio.shield(done)
        except asyncio.CancelledError:
            if unwanted is not None:
                done.add_done_callback(lambda _: _give_to(unwanted, done))
            raise

    def spawn(self, work: Coroutine[Any, Any, None], *, name: str) -> None:
        """Run something in the worker's group: cancelled when the worker ends, and its failure ends the worker."""
        if self._closed:
            work.close()  # the worker ends: nobody would wait for it, and the log tells its successors what is left
            return
        _ = self._start(work, name=name)

    def _start(self, work: Coroutine[Any, Any, None], *, name: str) -> asyncio.Task[None] | None:
        task = start_in(self.group, work, name=name)
        if task is not None:
            self._spawned.add(task)
            task.add_done_callback(self._spawned.discard)
        return task

    def close(self) -> None:
        """Cancel what was spawned, and start nothing more."""
        self._closed = True
        for task in list(self._spawned):
            task.cancel()

    async def reached(self, at_least: int | None, deadline: Deadline) -> None:
        """Wait for a position that a caller asked for; one beyond the log's end is refused at once.

        Raises:
            InvalidArgumentError: If the log has no such position yet.
        """
        if at_least is None or self.live.position >= at_least:
            return
        last = await self.bus.last_seq(deadline=deadline)
        if at_least > last:
            raise InvalidArgumentError(f"position {at_least} is beyond the log, which ends at {last}", last=last)
        await self.feed.reached(at_least, deadline=deadline)

    async def may_come(self, deadline: Deadline) -> bool:
        """Whether something that is not there may still be said by who holds it; waits a little if so."""
        left = deadline.left()
        if not self.unsettled or (left is not None and left <= MAY_COME_S):
            return False
        await asyncio.sleep(MAY_COME_S)
        return True

    async def store_manifest(self, manifest: Manifest, *, deadline: Deadline) -> ManifestRef:
        """Put a manifest where a fact can name it: in the fact, or as a blob on the log."""
        raw = await off_loop(manifest_body, manifest, weight=len(manifest))
        if len(raw) <= INLINE_MANIFEST_BYTES_MAX:
            return ManifestRef(inline=raw.decode())
        return ManifestRef(blob=await put_blob(self.bus, raw, author=self.me.worker, deadline=deadline))

    async def keep_manifest(self, manifest: Manifest, *, doubts: int, deadline: Deadline) -> None:
        """Store a manifest again that was stored before a fact named it, if the log may have lost it in between.

        Args:
            doubts: Those of the feed before it was stored.
        """
        if self.feed.doubts != doubts:
            await self.store_manifest(manifest, deadline=deadline)

    async def load_manifest(self, record: Artifact, *, deadline: Deadline) -> Manifest:
        """The manifest of an artifact, from its fact or its blob.

        Raises:
            CorruptError: If it is not what was stored.
        """
        if record.manifest.inline is not None:
            return Manifest.from_json(record.manifest.inline)
        blob = record.manifest.blob
        assert blob is not None, "a manifest is inline or a blob"
        known = self._manifests.get((blob.digest, blob.author))
        if known is None:
            body = await get_blob(self.bus, blob, deadline=deadline)
            known = await off_loop(Manifest.from_json, body, weight=record.tensors)
            self._manifests[blob.digest, blob.author] = known
            if len(self._manifests) > MANIFESTS_KEPT:
                del self._manifests[next(iter(self._manifests))]
        return known


def start_in(group: asyncio.TaskGroup, work: Coroutine[Any, Any, None], *, name: str) -> asyncio.Task[None] | None:
    """Start work in the worker's group, or nothing if the worker is going down already.

    Else the first error, which says why it goes, would be joined by those of all that come too late.
    """
    try:
        return group.create_task(work, name=name)
    except RuntimeError:
        work.close()
        return None


def _give_to(unwanted: Callable[[T], None], done: asyncio.Future[T]) -> None:
    if not done.cancelled() and done.exception() is None:
        unwanted(done.result())


def manifest_body(manifest: Manifest) -> bytes:
    """The manifest as it travels."""
    return manifest.to_json().encode()


async def off_loop(work: Callable[[A], T], argument: A, *, weight: int) -> T:
    """Call a pure function, in a thread if it has much to do: the loop owes the bus a heartbeat."""
    if weight <= HEAVY_TENSORS:
        return work(argument)
    return await asyncio.to_thread(work, argument)
