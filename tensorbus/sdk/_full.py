"""A whole Directory in this process, fed from the log: for routers and tools, which look at more than they follow.

It only reads. Mutations and bytes go through the worker, and what this process learned from it is waited for here
before the next look, so that nobody sees less than was told.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, Protocol, TypeVar, cast

from tensorbus.bus import Bus, NatsAuth, NatsBus
from tensorbus.clock import Deadline
from tensorbus.errors import (
    DeadlineExceededError,
    InvalidArgumentError,
    NotFoundError,
    TensorbusError,
    UnavailableError,
)
from tensorbus.events import Subjects
from tensorbus.feeds import DirectoryFeed
from tensorbus.ids import Incarnation, WorkerId
from tensorbus.lifecycle import Artifact, Directory, Touched, rules
from tensorbus.model import ViewSpec
from tensorbus.projections import LiveDirectory, Names, artifact_info, session_info, view_info
from tensorbus.sdk._followed import Entry, Followed, Name
from tensorbus.sdk._place import BusAddress
from tensorbus.sdk._records import ArtifactInfo, Hello, KeyInfo, SeriesInfo, WorkerInfo, parse

log = logging.getLogger("tensorbus.sdk")

T = TypeVar("T")

_WAIT_S: Final = 0.05
_LAG_S: Final = 2.0
_HEAD_START_S: Final = 60.0


def connector(address: BusAddress) -> Callable[[str], Awaitable[FullBus]]:
    """Connects to the bus at an address, for the streams of a prefix."""

    async def connect(prefix: str) -> FullBus:
        return await NatsBus.connect(
            address.url,
            subjects=Subjects(prefix),
            auth=NatsAuth.of(address.settings),
            name=address.settings.nats_user or f"tensorbus-directory-{os.getpid()}",
        )

    return connect


class FullBus(Bus, Protocol):
    """What is asked of the bus here: to read, and to say whether it is there."""

    @property
    def connected(self) -> bool: ...


class FullDirectory:
    """The Directory of one tenant's process, and what it answers. Lives on the bus's loop.

    Args:
        connect: Connects to the streams of a subject prefix.
        tenant: Whose names are meant.
        followed: Is kept up to date, so that looks from any thread find what was asked for before.
    """

    def __init__(self, connect: Callable[[str], Awaitable[FullBus]], *, tenant: str, followed: Followed) -> None:
        self._connect = connect
        self._tenant = tenant
        self._followed = followed
        self._bus: FullBus | None = None
        self._feed: DirectoryFeed | None = None
        self._names: Names | None = None
        self._error: TensorbusError | None = None
        self._ready = asyncio.Event()
        self.started = False
        self._told = 0
        self._checked = False
        self._said_degraded = False

    # -- life ---------------------------------------------------------------------------------------------------------

    async def run(self, prefix: str) -> None:
        """Read the log until cancelled. What ends it before is told to whoever asks then."""
        try:
            bus = self._bus = await self._connect(prefix)
            try:
                await self._read(bus)
            finally:
                await bus.close()
        except TensorbusError as exc:
            self._error = exc
        except Exception as exc:  # the task's edge: whoever looks is told
            log.exception("the reading of the log failed")
            self._error = UnavailableError(f"the reading of the log failed: {exc}")
        finally:
            self._error = self._error or UnavailableError("the reading of the log has ended")
            self._followed.clear()
            self._ready.set()

    async def _read(self, bus: FullBus) -> None:
        feed = DirectoryFeed(bus, LiveDirectory(Directory(bus.subjects)))
        async with feed.running(deadline=Deadline(_HEAD_START_S, what="reading the log")):
            names = self._names = Names(feed.live.state)
            with (
                feed.live.replacements(self._followed.clear),
                feed.live.followed(names.on_change),
                feed.live.followed(self._changed),
            ):
                self._feed = feed
                self._ready.set()
                await feed.failed()

    @property
    def is_ready(self) -> bool:
        """Whether the log was folded up to its end, or cannot be, which every answer then says."""
        return self._checked

    async def ready(self, hello: Hello, *, deadline: Deadline) -> None:
        """Wait until everything that was on the log is folded.

        Raises:
            UnavailableError: If the bus cannot be reached; DeniedError: If it refuses the credentials.
            InvalidArgumentError: If it is not the bus of the worker that said ``hello``.
        """
        try:
            async with deadline.scope():
                await self._ready.wait()
        except DeadlineExceededError as exc:
            raise UnavailableError(f"the bus did not give its log in time: {exc}") from exc
        await self._reach(hello.position, deadline=deadline)
        if not self._state.is_live(WorkerId(hello.worker), Incarnation(hello.incarnation)):
            raise InvalidArgumentError(
                f'worker {hello.worker} does not speak on the bus that directory="full" reads; '
                "set TENSORBUS_NATS_URL to that of its system",
                worker=hello.worker,
            )
        self._checked = True

    def told(self, position: int) -> None:
        """The worker has told of something at that position: from now on nothing older is answered."""
        self._told = max(self._told, position)

    def anew(self, position: int) -> None:
        """The worker's positions may have gone down to this one: what it told before is not to be waited for."""
        self._told = position

    # -- answers ------------------------------------------------------------------------------------------------------

    async def resolve(self, name: Name, *, at_least: int | None, deadline: Deadline) -> Entry:
        """What a name is; it is kept up to date for later looks.

        Raises:
            NotFoundError: If it is nothing; UnavailableError: If the bus does not bring ``at_least``.
        """
        await self._reached(at_least, deadline=deadline)
        by, ref = name
        record = rules.resolve(self._state, tenant=self._tenant, ref=ref, by=by)
        found = self._entry(name, record)
        self._followed.keep(name, found)
        return found

    async def info(self, artifact: str, *, deadline: Deadline) -> ArtifactInfo:
        """What is known of an artifact now.

        Raises:
            NotFoundError: If it has ended.
        """
        await self._reached(None, deadline=deadline)
        return self._info(rules.resolve(self._state, tenant=self._tenant, ref=artifact, by="id"))

    async def version(
        self, name: str, number: int | None, *, at_least: int | None, deadline: Deadline
    ) -> tuple[int, ArtifactInfo, int]:
        """A version of a series: its number, the artifact and the position.

        Raises:
            NotFoundError: If there is none.
        """
        await self._reached(at_least, deadline=deadline)
        found, record = rules.version(self._state, tenant=self._tenant, name=name, number=number)
        return found, self._info(record), self.position

    async def page(
        self, kind: type[T], prefix: str, after: str | None, *, limit: int, at_least: int | None, deadline: Deadline
    ) -> tuple[list[T], str | None]:
        """A page of the keys (:class:`KeyInfo`) or series with a prefix, and the name after which the next starts."""
        await self._reached(at_least, deadline=deadline)
        what, make = ("key", self._key) if kind is KeyInfo else ("series", self._one_series)
        names, following = self._sorted.page(what, self._tenant, prefix=prefix, after=after, limit=limit)
        return [cast("T", make(name)) for name in names], following

    async def workers(self, *, at_least: int | None, deadline: Deadline) -> list[WorkerInfo]:
        """The newest session of each worker."""
        await self._reached(at_least, deadline=deadline)
        state = self._state
        sessions = sorted(state.sessions.values(), key=lambda session: session.worker)
        return [parse(WorkerInfo, session_info(state, session)) for session in sessions]

    async def figures(self) -> dict[str, Any]:
        """How far the reading is. ``lag`` is in sequences of the log, ``None`` when the bus does not say."""
        bus, feed = self._bus, self._feed
        if bus is None or feed is None or self._error is not None:
            return {"connected": False, "degraded": True, "error": str(self._error or "not read yet"), "lag": None}
        state = feed.live.state
        return {
            "position": self.position,
            "hash": state.hash(),
            "lag": await self._lag(bus),
            "connected": bus.connected,
            "degraded": feed.degraded,
            "gaps": state.gaps,
            "unknown": state.unknown,
            "snapshot": feed.snapshot_used,
            "rebuilds": feed.rebuilds,
            "error": None,
        }

    @property
    def position(self) -> int:
        """Everything up to this sequence of the log is known."""
        return self._live.position

    # -- inside -------------------------------------------------------------------------------------------------------

    @property
    def _live(self) -> LiveDirectory:
        if self._error is not None or self._feed is None:
            raise self._error or UnavailableError("the log has not been read yet")
        return self._feed.live

    @property
    def _state(self) -> Directory:
        return self._live.state

    @property
    def _sorted(self) -> Names:
        assert self._names is not None, "names are there before the feed is"
        return self._names

    def _key(self, key: str) -> KeyInfo:
        record = rules.resolve(self._state, tenant=self._tenant, ref=key, by="key")
        return KeyInfo(key=key, artifact=record.artifact, nbytes=record.nbytes, tensors=record.tensors)

    def _one_series(self, name: str) -> SeriesInfo:
        series = self._state.series[self._tenant, name]
        return SeriesInfo(name=name, last=series.last, kept=len(series.versions))

    def _info(self, record: Artifact) -> ArtifactInfo:
        return parse(ArtifactInfo, artifact_info(self._state, record))

    def _entry(self, name: Name, record: Artifact) -> Entry:
        by, ref = name
        view = None if by == "key" else view_info(record, ref)
        spec = None if view is None else ViewSpec.from_json(str(view["definition"]))
        return Entry(self._info(record), self.position, spec)

    async def _reached(self, at_least: int | None, *, deadline: Deadline) -> None:
        """Be at a position that the caller asked for, and at all that this process was told of."""
        if at_least is not None and self._live.position < at_least:
            with self._in_time(at_least):
                await self._check_there(at_least, deadline=deadline)
        await self._reach(max(at_least or 0, self._told), deadline=deadline)

    async def _check_there(self, seq: int, *, deadline: Deadline) -> None:
        """Refuse a position that the log does not have at once; most come by themselves before anybody is asked."""
        left = deadline.left()
        try:
            await self._live.reached(seq, deadline=Deadline(_WAIT_S if left is None else min(_WAIT_S, left)))
        except DeadlineExceededError:
            last = await self._leader.last_seq(deadline=deadline)
            if seq > last:
                raise InvalidArgumentError(
                    f"position {seq} is beyond the log, which ends at {last}", last=last
                ) from None

    async def _reach(self, seq: int, *, deadline: Deadline) -> None:
        if self._live.position < seq:
            assert self._feed is not None, "who has a position has a feed"
            with self._in_time(seq):
                await self._feed.reached(seq, deadline=deadline)

    @contextmanager
    def _in_time(self, seq: int) -> Iterator[None]:
        try:
            yield
        except (DeadlineExceededError, UnavailableError) as exc:
            here = self._live.position
            raise UnavailableError(
                f"the directory of this process is at position {here}, and the bus did not bring {seq} in time: {exc}",
                position={"TB": here},
                asked=seq,
            ) from exc

    @property
    def _leader(self) -> FullBus:
        assert self._bus is not None, "who has a position has a bus"
        return self._bus

    async def _lag(self, bus: FullBus) -> int | None:
        try:
            last = await bus.last_on(bus.subjects.facts, deadline=Deadline(_LAG_S, what="asking for the log's end"))
        except (UnavailableError, DeadlineExceededError):
            return None
        return max(0, last.seq - self.position) if last is not None else 0

    def _changed(self, position: int, touched: tuple[Touched, ...]) -> None:
        """Follower of the Directory: look again at what is kept of the names that changed."""
        names: dict[Name, None] = {}
        for thing in touched:
            if thing.tenant == self._tenant:
                names.update(dict.fromkeys(self._followed.touched(thing.kind, thing.name)))
        for name in names:
            self._look_again(name, position)
        if self._state.degraded and not self._said_degraded:
            self._said_degraded = True
            log.warning("the directory is degraded: facts were passed over or are missing; see stats()")

    def _look_again(self, name: Name, position: int) -> None:
        try:
            record = rules.resolve(self._state, tenant=self._tenant, ref=name[1], by=name[0])
        except NotFoundError:
            self._followed.pushed(name, None, position)
        else:
            self._followed.pushed(name, self._info(record), position)
