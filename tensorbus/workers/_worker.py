"""One worker process: its parts, in the order in which they start and stop."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from blake3 import blake3

from tensorbus import __version__
from tensorbus.bus import Bus, NatsAuth, NatsBus, StreamLimits, provision
from tensorbus.clock import NS_PER_S, Clock, Deadline, SystemClock
from tensorbus.config import Settings
from tensorbus.errors import DeniedError, InvalidArgumentError, TensorbusError, UnavailableError
from tensorbus.events import SessionOpened, Subjects
from tensorbus.feeds import Author, DirectoryFeed, LeaseFeed, Loss, Remembered, check
from tensorbus.ids import IdSource, SystemIds, WorkerId, b32, check_worker_id, new_incarnation, prefixed
from tensorbus.lifecycle import Directory
from tensorbus.projections import LiveDirectory
from tensorbus.transport import (
    Listener,
    WorkerCard,
    listen_tcp,
    listen_unix,
    locked,
    remove_card,
    run_dir,
    serve_listener,
    write_card,
)
from tensorbus.workers._callers import Callers
from tensorbus.workers._core import Core, Identity
from tensorbus.workers._home import HomeRole
from tensorbus.workers._home_ops import HomeOps
from tensorbus.workers._home_peers import HomePeers
from tensorbus.workers._losses import Losses
from tensorbus.workers._memory import MakeOrder, MemoryRole
from tensorbus.workers._page_routes import PageRoutes
from tensorbus.workers._position import PositionFile
from tensorbus.workers._service import Service
from tensorbus.workers._session import OwnSession
from tensorbus.workers._shard_snapshots import PagePurger, SnapshotConfirmer, SnapshotTaker
from tensorbus.workers._witness import Witness

if TYPE_CHECKING:
    from tensorbus.workers._store_role import StoreRole

log = logging.getLogger("tensorbus.workers")

ROLES = ("basic", "gateway", "shard-home", "store")
START_S = 60.0
MIND_LOG_S = 2.0
LEAVE_S = 5.0
BUS_URL_FILE = "bus.url"
"""In a home: the URL of its embedded server, as long as that runs."""


def default_worker_id(settings: Settings, roles: tuple[str, ...]) -> WorkerId:
    """The id of a home's worker when none is given: the same after each restart."""
    place = blake3(prefixed("worker", str(settings.home), settings.host_id, *roles)).digest(length=5)
    return check_worker_id(f"{roles[0]}-{b32(place)}")


def missing_for_store() -> str | None:
    """The package that the role ``store`` needs and that is not installed, ``None`` if all are."""
    return next((name for name in ("duckdb", "pyarrow", "fsspec") if find_spec(name) is None), None)


def bus_url(settings: Settings) -> str:
    """The operator's bus, else the home's embedded one.

    Raises:
        UnavailableError: If there is neither; says what to do.
    """
    if settings.nats_url is not None:
        return settings.nats_url
    try:
        return (settings.home / BUS_URL_FILE).read_text(encoding="ascii").strip()
    except OSError as exc:
        raise UnavailableError(
            f"home {settings.home} has no bus: start one with `tensorbus up`, or set TENSORBUS_NATS_URL",
            home=str(settings.home),
        ) from exc


class Worker:
    """A worker of some roles in one process.

    Args:
        settings: What it needs to know; ``worker_id`` is made for the home when it is ``None``.
        roles: ``basic`` holds memory, ``gateway`` serves callers without a worker and witnesses sessions,
            ``shard-home`` knows where the pages of its shards lie,
            ``store`` keeps the log and answers about present and past (it needs the extra ``store``).
        on_rebuilt: Called after the Directory was made anew while the worker serves.
        eviction: Makes the policy that the settings name; without it the eldest leaves memory first.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        roles: tuple[str, ...],
        clock: Clock | None = None,
        ids: IdSource | None = None,
        on_rebuilt: Callable[[], None] | None = None,
        eviction: MakeOrder | None = None,
    ) -> None:
        unknown = [role for role in roles if role not in ROLES]
        if not roles or unknown:
            raise InvalidArgumentError(f"roles are {', '.join(ROLES)}, not {', '.join(unknown) or 'none'}")
        if "store" in roles and (missing := missing_for_store()) is not None:
            raise InvalidArgumentError(f"the role store needs {missing}: pip install 'tensorbus[store]'")
        self.settings = settings
        self.roles = tuple(dict.fromkeys(roles))
        self.worker = WorkerId(settings.worker_id or default_worker_id(settings, self.roles))
        self._clock = clock or SystemClock()
        self._ids = ids or SystemIds()
        self._incarnation = new_incarnation(self._ids)
        self._on_rebuilt = on_rebuilt
        self._eviction = eviction
        self._remembered: Remembered | None = None
        self._lost: Loss | None = None

    async def run(self, *, stop: asyncio.Event, ready: Callable[[WorkerCard], None]) -> None:
        """Serve until ``stop`` is set, then leave the log in good order.

        Raises:
            FencedError: If another process took this id over, or the session was ended while this one was silent.
            ConflictError: If the worker runs already in this home.
            UnavailableError: If the bus cannot be reached at start.
            DeniedError: If the bus does not let this worker do what its roles need.
        """
        directory = run_dir(self.settings.home)
        async with AsyncExitStack() as stack:
            stack.enter_context(self._naming_grants())
            lock = locked(directory / f"{self.worker}.lock", what=f"worker {self.worker} of this home")
            stack.enter_context(lock)
            stream = Subjects(self.settings.subject_prefix).log_stream
            position = PositionFile(directory, self.worker, stream=stream)
            self._remembered = position.read()
            bus = await self._connect(stack)
            live = LiveDirectory(Directory(bus.subjects))
            delay_s = self.settings.purge_delay_s
            feed = DirectoryFeed(bus, live, purge_delay_s=delay_s, on_rebuilt=self._on_rebuilt)
            author = Author(feed, worker=self.worker, incarnation=self._incarnation, ids=self._ids)
            await stack.enter_async_context(feed.running(deadline=Deadline(START_S, what="reading the log")))
            await stack.enter_async_context(author.running())
            leases = LeaseFeed(bus.pages)
            await stack.enter_async_context(leases.running(deadline=Deadline(START_S, what="reading the grants")))
            if self._remembered is not None:
                self._lost = await check(bus, self._remembered, deadline=Deadline(START_S, what="reading the log"))
            try:
                async with asyncio.TaskGroup() as group:
                    aside = [position.keep(feed), self._mind_log(bus, feed, leases)]
                    tasks = [group.create_task(work, name="position") for work in aside]
                    try:
                        await self._serve(group, feed, author, leases, stop=stop, ready=ready)
                    finally:
                        for task in tasks:
                            task.cancel()
            except* TensorbusError as failed:
                raise failed.exceptions[0] from None
            await position.write(feed.remembered)

    @contextmanager
    def _naming_grants(self) -> Iterator[None]:
        """Have an error about what the bus does not permit say which command lists what is needed."""
        try:
            yield
        except DeniedError as exc:
            if "subject" not in exc.details:
                raise
            needed = f"`tensorbus bus grants {'+'.join(self.roles)}:{self.worker}` lists what this worker needs"
            raise DeniedError(f"{exc.message}; {needed}", **exc.details) from exc

    async def _connect(self, stack: AsyncExitStack) -> Bus:
        settings = self.settings
        bus = await NatsBus.connect(
            bus_url(settings),
            subjects=Subjects(settings.subject_prefix),
            auth=NatsAuth.of(settings),
            name=self.worker,
            clock=self._clock,
            ids=self._ids,
        )
        stack.push_async_callback(bus.close)
        await self._provision(bus, self._remembered, deadline=Deadline(START_S, what="provisioning the streams"))
        return bus

    async def _provision(self, bus: Bus, remembered: Remembered | None, *, deadline: Deadline) -> None:
        """Make the streams that are missing; a log that is remembered only where the server is the home's own.

        Raises:
            UnavailableError: If the log is gone; says what to do.
        """
        await provision(
            bus,
            remembered_seq=0 if remembered is None else remembered.seq,
            limits=StreamLimits(replicas=self.settings.nats_replicas),
            allow_recreate=self.settings.nats_url is None,
            deadline=deadline,
        )

    async def _mind_log(self, bus: Bus, feed: DirectoryFeed, leases: LeaseFeed) -> None:
        """While it is not known whether log and pages are there, look for their streams, make them anew or say so.

        Nothing ends for it: when the stream is there again, all goes on.
        """
        said = ""
        while True:
            await asyncio.sleep(MIND_LOG_S)
            if not feed.unsure and not leases.unsure:
                said = ""
                continue
            try:
                await self._provision(bus, feed.remembered, deadline=Deadline(MIND_LOG_S))
            except TensorbusError as error:
                if "remembered_seq" in error.details and str(error) != said:
                    said = str(error)
                    log.error("%s", error)

    async def _serve(
        self,
        group: asyncio.TaskGroup,
        feed: DirectoryFeed,
        author: Author,
        leases: LeaseFeed,
        *,
        stop: asyncio.Event,
        ready: Callable[[WorkerCard], None],
    ) -> None:
        me = Identity(self.worker, self._incarnation, self.settings.host_id, self.roles)
        core = Core(me=me, bus=feed.bus, feed=feed, author=author, ids=self._ids, clock=self._clock, group=group)
        callers = Callers(group)
        async with AsyncExitStack() as stack:
            memory = None
            if "basic" in self.roles:
                memory = await stack.enter_async_context(MemoryRole.running(core, self.settings, self._eviction))
                me.data = memory.address
            store = await self._store(stack, core) if "store" in self.roles else None
            listeners = await self._listen(stack, me)
            routes = PageRoutes(core, leases, home=self.settings.home)
            more = routes.table()
            home = None
            if "shard-home" in self.roles:
                home = HomeRole(core, leases, HomePeers(routes), shards=self.settings.page_shards)
                home_ops = HomeOps(core, home)
                core.home_stats = home_ops.figures
                more |= home_ops.table()
            service = Service(core, callers, memory, gateway_sql=self.settings.gateway_sql, more=more)
            stack.enter_context(service.following())
            session = OwnSession(
                author,
                self._opening(me),
                clock=self._clock,
                heartbeat_s=self.settings.heartbeat_s,
                beats=core.beats,
            )
            stack.enter_context(core.live.followed(session.on_change))
            losses = Losses(core, None if memory is None else memory.announcer)
            core.feed.on_loss = losses.on_loss
            if memory is not None:
                losses.tell(memory.on_loss)
            if self._lost is not None:
                losses.note(self._lost)
            # From the first moment: the session counts as soon as its fact is on the log, long before a slow reading
            # of our own tells us so.
            heartbeat = group.create_task(session.renew(), name="heartbeat")
            await session.open(deadline=Deadline(START_S, what="opening the session"))
            tasks = [heartbeat, group.create_task(leases.failed(), name="leases")]
            tasks += [
                group.create_task(work, name=name) for name, work in self._work(core, session, stack, memory, losses)
            ]
            if store is not None:
                core.store_stats = store.stats
                losses.tell(store.on_loss)
                tasks += [group.create_task(work, name=name) for name, work in store.work()]
                purger = PagePurger(core, delay_s=self.settings.page_purge_delay_s, may=lambda: store.keeper.holds)
                tasks.append(group.create_task(purger.run(), name="purge shards"))
            if not {"basic", "shard-home", "store"}.isdisjoint(self.roles):
                tasks.append(group.create_task(SnapshotConfirmer(core).run(), name="confirm shards"))
            if home is not None:
                home.begin(session)
                taker = SnapshotTaker(core, home, every=self.settings.page_snapshot_batches)
                work_of_home = [*home.work(), ("store shards", taker.run())]
                tasks += [group.create_task(work, name=name) for name, work in work_of_home]
            for listener in listeners:
                work = serve_listener(listener, service.handle, ids=self._ids, on_open=callers.opened)
                tasks.append(group.create_task(work, name=f"listen {listener.address}"))
            tasks.append(group.create_task(session.until_fenced(service.say_bye), name="fence"))
            try:
                async with self._card_up(me) as card:
                    ready(card)
                    await stop.wait()
                await self._leave(service, session, store, home)
            finally:
                core.close()
                for task in [*tasks, *callers.tasks()]:
                    task.cancel()

    def _work(
        self, core: Core, session: OwnSession, stack: AsyncExitStack, memory: MemoryRole | None, losses: Losses
    ) -> list[tuple[str, Coroutine[Any, Any, None]]]:
        """The endless tasks of this process."""
        work: list[tuple[str, Coroutine[Any, Any, None]]] = []
        work += [("feed", core.feed.failed()), ("losses", losses.run()), ("reopen", session.reopen())]
        if memory is not None:
            work += memory.work()
        if not {"gateway", "shard-home", "store"}.isdisjoint(self.roles):
            ttl_ns = int(self.settings.session_ttl_s * NS_PER_S)
            witness = Witness(core.author, own_ttl_ns=ttl_ns, clock=self._clock, sent_ns=session.sent_ns)
            stack.enter_context(core.live.followed(witness.on_change))
            losses.tell(witness.on_loss)
            work += [("listen", witness.listen()), ("judge", witness.judge()), ("bury", witness.bury())]
        return work

    async def _store(self, stack: AsyncExitStack, core: Core) -> StoreRole:
        """The store's parts; a base install does without what they import."""
        from tensorbus.workers._store_role import StoreRole

        return await stack.enter_async_context(StoreRole.running(core, self.settings))

    async def _listen(self, stack: AsyncExitStack, me: Identity) -> list[Listener]:
        listeners = [await listen_unix(run_dir(self.settings.home) / self._socket)]
        stack.callback(listeners[0].close)
        if not {"gateway", "shard-home"}.isdisjoint(self.roles):
            listener = await listen_tcp(self.settings.gateway_host, self.settings.gateway_port)
            stack.callback(listener.close)
            listeners.append(listener)
            me.control = listener.address
        return listeners

    @property
    def _socket(self) -> str:
        return f"{self.worker}.sock"[-60:]

    def _opening(self, me: Identity) -> SessionOpened:
        return SessionOpened(
            worker=self.worker,
            incarnation=self._incarnation,
            host=me.host,
            roles=self.roles,
            data=me.data,
            control=me.control,
            pool_bytes=self.settings.pool_bytes if "basic" in self.roles else 0,
            ttl_ns=int(self.settings.session_ttl_s * NS_PER_S),
            pid=os.getpid(),
            version=__version__,
        )

    @asynccontextmanager
    async def _card_up(self, me: Identity) -> AsyncIterator[WorkerCard]:
        directory = run_dir(self.settings.home)
        card = WorkerCard(
            worker=self.worker,
            incarnation=self._incarnation,
            host_id=me.host,
            roles=self.roles,
            pid=os.getpid(),
            socket=self._socket,
            control=me.control,
            data=me.data,
        )
        write_card(directory, card)
        try:
            yield card
        finally:
            remove_card(directory, card)

    async def _leave(
        self, service: Service, session: OwnSession, store: StoreRole | None, home: HomeRole | None
    ) -> None:
        await service.say_bye(f"worker {self.worker} leaves")
        deadline = Deadline(LEAVE_S, what="closing the session")
        try:
            if home is not None:
                await home.leave(deadline=deadline)
            if store is not None:
                await store.leave(deadline=deadline)
            await session.close(deadline=deadline)
        except TensorbusError as error:
            log.warning("left without a word on the log: worker=%s reason=%s", self.worker, error)
