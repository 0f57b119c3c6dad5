"""What the handles of one bus share: the connection, the followed directory, mapped memory, leases, background work."""

from __future__ import annotations

import asyncio
import logging
import os
import weakref
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from tensorbus.clock import Deadline
from tensorbus.errors import DeadlineExceededError, InvalidArgumentError, NotFoundError, TensorbusError
from tensorbus.model import ViewSpec
from tensorbus.sdk._checks import check_seconds
from tensorbus.sdk._followed import Entry, Followed, Name
from tensorbus.sdk._leases import Leases
from tensorbus.sdk._link import Link
from tensorbus.sdk._maps import ReadMaps, WriteMaps
from tensorbus.sdk._owned import Owned
from tensorbus.sdk._place import BusAddress, Place
from tensorbus.sdk._records import ArtifactInfo, Hello, parse, position_of
from tensorbus.transport import Push, Reply

if TYPE_CHECKING:
    from tensorbus.sdk._full import FullDirectory

log = logging.getLogger("tensorbus.sdk")

T = TypeVar("T")

_CLEANUP_S = 5.0
_TIMEOUT_S_MAX = 1e9  # the most that the protocol carries; who asks for more means no limit
PROOFS_PER_TTL = 4
"""How often within its session's TTL a worker must show that it lives, for what it told to be relied on."""
_FORKED = (
    "this bus was connected before the process forked, and its connection is the parent's; "
    "connect again in the child (tensors that were read before stay readable)"
)
_CLOSED = "the bus is closed"


class SeriesListener(Protocol):
    """Who wants to hear of new versions of a series."""

    def on_series(self, data: Mapping[str, object]) -> None: ...

    def on_lost(self) -> None: ...


class Core:
    """The inside of a bus. Lives on one event loop, the first that uses it; :meth:`check` may be called anywhere."""

    def __init__(self, place: Place, *, bus: BusAddress | None = None) -> None:
        self.place = place
        self.link = Link(place, self)
        self.followed = Followed(on_dropped=self._unfollow if bus is None else None)
        self.full: FullDirectory | None = None if bus is None else _full(bus, place.tenant, self.followed)
        self.reads = ReadMaps()
        self.writes = WriteMaps()
        self.owned = Owned(self)
        self.leases = Leases(self)
        self.series: dict[str, weakref.WeakSet[SeriesListener]] = {}
        self.refusal: str | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._submitting: set[asyncio.Task[Any]] = set()
        _cores.add(self)

    # -- calls --------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """See that the bus can be used here.

        Raises:
            InvalidArgumentError: If it is closed, or of the process that this one was forked from.
        """
        if self.refusal is not None:
            raise InvalidArgumentError(self.refusal)

    def check_loop(self) -> asyncio.AbstractEventLoop:
        """The running loop, if the bus can be used on it.

        Raises:
            InvalidArgumentError: If the bus belongs to another.
        """
        loop = asyncio.get_running_loop()
        if self._loop is not None and self._loop is not loop:
            raise InvalidArgumentError(
                "this bus belongs to another event loop; use one AsyncBus per loop, or a Bus, which threads may share"
            )
        return loop

    def begin(self, timeout: float | None, what: str) -> Deadline:
        """The start of every public call: see that it can be made, and how long it may take.

        Raises:
            InvalidArgumentError: If the bus cannot be used here or ``timeout`` is no time.
        """
        self.check()
        self._loop = self.check_loop()
        seconds = self.place.timeout_s if timeout is None else check_seconds(timeout, "timeout")
        return Deadline(min(seconds, _TIMEOUT_S_MAX), what=what)

    async def ask(
        self,
        op: str,
        args: Mapping[str, object] | None = None,
        *,
        deadline: Deadline,
        repeat: bool = True,
        body: bytes = b"",
        epoch: int | None = None,
    ) -> Reply:
        """A call of the control protocol; see :meth:`Link.call`."""
        reply = await self.link.call(op, args, body=body, deadline=deadline, repeat=repeat, epoch=epoch)
        self.told(reply.data.get("position"))
        return reply

    def told(self, position: object) -> None:
        """The worker told of something at that position; an own directory must not answer with less."""
        if self.full is not None and type(position) is int:
            self.full.told(position)

    async def directory(self, deadline: Deadline) -> FullDirectory | None:
        """The whole directory of this process, read up to the log's end; ``None`` if it only follows.

        Raises:
            UnavailableError: If the bus cannot be reached.
        """
        full = self.full
        if full is not None and not full.is_ready:
            hello = await self.link.connect(deadline)
            if not full.started:
                full.started = True
                self.spawn(full.run(hello.prefix), "directory")
            await full.ready(hello, deadline=deadline)
        return full

    async def resolve(self, name: Name, *, at_least: int | None, deadline: Deadline) -> Entry:
        """What a name is, from what is known here if that is new enough, else from the worker; it is followed then.

        Raises:
            NotFoundError: If it is nothing.
        """
        entry = self.followed.look(name)
        if entry is not None and (at_least is None or entry.position >= at_least):
            entry.used = True
            return entry
        full = await self.directory(deadline)
        if full is not None:
            return await full.resolve(name, at_least=at_least, deadline=deadline)
        by, ref = name
        args = {"by": by, "ref": ref, "follow": True, "at_least": at_least}
        self.followed.ask(name)
        try:
            while True:
                reply = await self.ask("resolve", args, deadline=deadline)
                info, position = parse(ArtifactInfo, reply.data.get("artifact")), position_of(reply.data)
                view = _view(reply.data.get("view"))
                if not self.link.connected:  # nobody would tell of changes
                    return Entry(info, position, view)
                known, position = self.followed.answered(name, info, position, view)
                if known is not None:
                    return Entry(known, position, view)
        finally:
            self.followed.asked(name)

    # -- what happens by itself ---------------------------------------------------------------------------------------

    def on_push(self, push: Push) -> None:
        """The worker says something unasked."""
        self.told(push.data.get("position"))
        try:
            match push.topic:
                case "changed":
                    self._changed(push.data)
                case "anew":
                    self._anew(position_of(push.data))
                case "series":
                    for listener in list(self.series.get(str(push.data.get("name")), ())):
                        listener.on_series(push.data)
                case "retire":
                    self.writes.drop(_numbers(push.data.get("segments")))
                case "bye":
                    log.info("the worker leaves: %s", push.data.get("reason"))
        except TensorbusError as exc:
            log.warning("cannot understand what the worker says (%s): %s", push.topic, exc)
        finally:
            push.fds.close()

    def on_connected(self, hello: Hello) -> None:
        log.debug("connected to %s, incarnation %s, session %s", hello.worker, hello.incarnation, hello.session)
        if self.full is None:
            self.spawn(self._doubt(self.link.epoch, hello.ttl_s / PROOFS_PER_TTL), "proof of life")

    async def _doubt(self, epoch: int, pause_s: float) -> None:
        """Ask the worker again and again whether it lives: who is stopped keeps its connections and tells nothing.

        Without an answer nothing is known any more, long before its session can be ended; the connection stays, since
        leases hang on it and the worker may only be slow.
        """
        while self.link.connected and self.link.epoch == epoch:
            await asyncio.sleep(pause_s)
            try:
                await self.link.call("ping", deadline=Deadline(pause_s), repeat=False, epoch=epoch)
            except DeadlineExceededError:
                log.warning("the worker does not answer; what it told is not relied on until it does")
                self.followed.clear()
            except TensorbusError:
                return  # the connection ended, or is closed

    def on_lost(self, reason: TensorbusError) -> None:
        """Nobody tells of changes any more, and what was owned by the session has ended."""
        if self.full is None:
            self.followed.clear()
        self.writes.drop()
        self.owned.lost()
        self.leases.lost()
        for listeners in self.series.values():
            for listener in list(listeners):
                listener.on_lost()
        if self.refusal is None:
            log.debug("connection lost: %s", reason)

    def _anew(self, position: int) -> None:
        """The worker made its directory anew, perhaps from a log that lost its tail: positions may have gone down."""
        if self.full is None:
            self.followed.clear()
        else:
            self.full.anew(position)

    def _changed(self, data: Mapping[str, object]) -> None:
        position, items = position_of(data), data.get("items")
        for item in items if isinstance(items, list) else ():
            artifact = item.get("artifact")
            info = None if artifact is None else parse(ArtifactInfo, artifact)
            self.followed.pushed((item.get("by"), item.get("ref")), info, position)

    def _unfollow(self, names: list[Name]) -> None:
        self.tidy("unfollow", {"refs": [list(name) for name in names]})

    # -- background work ----------------------------------------------------------------------------------------------

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Have work done in a task that ends with the bus."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def submit(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Have a request made at once, whoever waits for its outcome; closing the bus leaves it a moment to arrive."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._submitting.add(task)
        task.add_done_callback(self._submitting.discard)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # told to who waits
        return task

    def tidy(self, op: str, args: Mapping[str, object]) -> None:
        """Have a call made for order's sake, on the connection that there is; nobody waits for it."""
        if self.refusal is None and self.link.connected:
            self.spawn(self._tidy(op, args, self.link.epoch), f"tidy {op}")

    async def _tidy(self, op: str, args: Mapping[str, object], epoch: int) -> None:
        try:
            deadline = Deadline(_CLEANUP_S, what=op)
            await self.ask(op, args, deadline=deadline, repeat=False, epoch=epoch)
        except NotFoundError:
            pass  # it has ended already
        except TensorbusError as exc:
            log.debug("%s for order's sake failed: %s", op, exc)

    def later(self, call: Callable[[], None]) -> None:
        """Have something done on the loop, from a finalizer in any thread; not at all if the loop is gone."""
        loop = self._loop
        if loop is None or self.refusal is not None or loop.is_closed():
            return
        with suppress(RuntimeError):  # closed in between: the session has ended with it, and all that it owned
            loop.call_soon_threadsafe(call)

    # -- the end ------------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """End the connection and all background work. Safe to repeat; what was read stays readable."""
        if self._submitting and self.refusal is None:
            await asyncio.wait(self._submitting, timeout=_CLEANUP_S)
        self.refuse()
        tasks = [task for task in (*self._tasks, *self._submitting) if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await self.leases.end_scoped()
        await self.link.close()
        self.writes.drop()

    def refuse(self) -> None:
        """From now on every call is refused."""
        if self.refusal is None:
            self.refusal = _CLOSED
        self.followed.clear()

    @property
    def is_forked(self) -> bool:
        """Whether the bus belongs to the process that this one was forked from."""
        return self.refusal is _FORKED

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """The loop that the bus lives on, once it was used."""
        return self._loop

    def forked(self) -> None:
        """This process is a child of the bus's own."""
        self.refusal = _FORKED
        self.followed.clear()
        self.link.abandon()


def _full(bus: BusAddress, tenant: str, followed: Followed) -> FullDirectory:
    from tensorbus.sdk._full import FullDirectory, connector  # late: most buses need no client of NATS

    return FullDirectory(connector(bus), tenant=tenant, followed=followed)


def _view(value: object) -> ViewSpec | None:
    """The view in an answer to ``resolve``, if the name is one's id.

    Raises:
        CorruptError: If it is not valid.
    """
    return ViewSpec.from_json(str(value.get("definition"))) if isinstance(value, dict) else None


def _numbers(value: object) -> list[int]:
    return [item for item in value if isinstance(item, int)] if isinstance(value, list) else []


_cores: weakref.WeakSet[Core] = weakref.WeakSet()


def _after_fork() -> None:
    for core in list(_cores):
        core.forked()


os.register_at_fork(after_in_child=_after_fork)
