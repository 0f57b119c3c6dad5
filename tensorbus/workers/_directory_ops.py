"""What every worker with callers answers: names, artifacts, versions, workers, and readings of the log."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass

from tensorbus.errors import (
    ConflictError,
    CorruptError,
    InvalidArgumentError,
    NotFoundError,
    OutOfSpaceError,
    TensorbusError,
    UnavailableError,
)
from tensorbus.events import DestroyReason, Event
from tensorbus.ids import ArtifactId, LeaseId
from tensorbus.lifecycle import Artifact, Directory, Session, rules
from tensorbus.model import Manifest, ViewSpec, view_id
from tensorbus.projections import Json, Names, artifact_info, series_news, session_info, view_info
from tensorbus.transport import PoolStats, Reply, Request
from tensorbus.workers import _requests as ask
from tensorbus.workers._callers import Caller, Callers
from tensorbus.workers._complaints import complain
from tensorbus.workers._core import Core, off_loop
from tensorbus.workers._events import Cursor, find_cursor, open_cursor, subjects_about
from tensorbus.workers._follow import Follows
from tensorbus.workers._permits import PermitAsk, ask_permit, ask_permits
from tensorbus.workers._pins import pin_figures

Op = Callable[[Caller, Request], Awaitable[Reply]]


class DirectoryOps:
    """Operations on names. Mutations return once the own fold kept their fact."""

    def __init__(
        self,
        core: Core,
        callers: Callers,
        follows: Follows,
        names: Names,
        *,
        pool_stats: Callable[[], PoolStats] | None,
    ) -> None:
        self._core = core
        self._callers = callers
        self._follows = follows
        self._names = names
        self._pool_stats = pool_stats

    def table(self) -> dict[str, Op]:
        return {
            "ping": self.ping,
            "resolve": self.resolve,
            "unfollow": self.unfollow,
            "manifest": self.manifest,
            "ls": self.ls,
            "series_ls": self.series_ls,
            "bind": self.bind,
            "unbind": self.unbind,
            "destroy": self.destroy,
            "define_view": self.define_view,
            "release": self.release,
            "publish": self.publish,
            "version": self.version,
            "series": self.series,
            "workers": self.workers,
            "stats": self.stats,
            "events_open": self.events_open,
            "events_next": self.events_next,
            "events_close": self.events_close,
            "locate": self.locate,
            "place": self.place,
            "complain": self.complain,
        }

    # -- names --------------------------------------------------------------------------------------------------------

    async def ping(self, _caller: Caller, _request: Request) -> Reply:
        return Reply({"position": self._core.live.position})

    async def resolve(self, caller: Caller, request: Request) -> Reply:
        asked = ask.parse(ask.Resolve, request.args, op="resolve")
        await self._core.reached(asked.at_least, request.deadline)
        record = rules.resolve(self._core.state, tenant=caller.tenant, ref=asked.ref, by=asked.by)
        if asked.follow:
            # No await from here to the reply's queueing, so that no push about it can be queued before.
            self._follows.follow(caller, asked.by, asked.ref, record)
        view = None if asked.by == "key" else view_info(record, asked.ref)
        return self._at_position({"artifact": artifact_info(self._core.state, record), "view": view})

    async def unfollow(self, caller: Caller, request: Request) -> Reply:
        asked = ask.parse(ask.Unfollow, request.args, op="unfollow")
        self._follows.unfollow(caller, asked.refs)
        return Reply({})

    async def manifest(self, caller: Caller, request: Request) -> Reply:
        record = self._live(caller, request, op="manifest")
        manifest = await self._core.load_manifest(record, deadline=request.deadline)
        return Reply({}, body=manifest.to_json().encode())

    async def ls(self, caller: Caller, request: Request) -> Reply:
        asked = ask.parse(ask.List, request.args, op="ls")
        await self._core.reached(asked.at_least, request.deadline)
        state = self._core.state
        items: list[Json] = []
        page, following = self._names.page(
            "key", caller.tenant, prefix=asked.prefix, after=asked.after, limit=asked.limit
        )
        for key in page:
            record = rules.resolve(state, tenant=caller.tenant, ref=key, by="key")
            items.append({"key": key, "artifact": record.artifact, "nbytes": record.nbytes, "tensors": record.tensors})
        return self._at_position({"items": items, "next": following})

    async def series_ls(self, caller: Caller, request: Request) -> Reply:
        asked = ask.parse(ask.List, request.args, op="series_ls")
        await self._core.reached(asked.at_least, request.deadline)
        state = self._core.state
        page, following = self._names.page(
            "series", caller.tenant, prefix=asked.prefix, after=asked.after, limit=asked.limit
        )
        series = [state.series[caller.tenant, name] for name in page]
        items = [{"name": one.name, "last": one.last, "kept": len(one.versions)} for one in series]
        return self._at_position({"items": items, "next": following})

    async def bind(self, caller: Caller, request: Request) -> Reply:
        asked = ask.parse(ask.Bind, request.args, op="bind")
        artifact = ArtifactId(asked.artifact)

        def rule(state: Directory) -> Event | None:
            return rules.bind(state, tenant=caller.tenant, key=asked.key, artifact=artifact, rebind=asked.rebind)

        await self._decide(rule, caller, request)
        return self._answer(self._known(caller, artifact))

    async def unbind(self, caller: Caller, request: Request) -> Reply:
        asked = ask.parse(ask.Unbind, request.args, op="unbind")
        position, _ = await self._decide(
            lambda state: rules.unbind(state, tenant=caller.tenant, key=asked.key), caller, request
        )
        return Reply({"position": position})

    async def destroy(self, caller: Caller, request: Request) -> Reply:
        asked = ask.parse(ask.OneArtifact, request.args, op="destroy")
        artifact = ArtifactId(asked.artifact)

        def rule(state: Directory) -> Event | None:
            return rules.destroy(state, tenant=caller.tenant, artifact=artifact, reason=DestroyReason.ASKED)

        position, _ = await self._decide(rule, caller, request)
        return Reply({"position": position})

    async def define_view(self, caller: Caller, request: Request) -> Reply:
        asked = ask.parse(ask.DefineView, request.args, op="define_view")
        record = rules.live_artifact(self._core.state, tenant=caller.tenant, artifact=ArtifactId(asked.artifact))
        manifest = await self._core.load_manifest(record, deadline=request.deadline)
        view = _View(record.artifact, asked.view, asked.definition, manifest)
        await off_loop(_View.check, view, weight=record.tensors)

        def rule(state: Directory) -> Event | None:
            return rules.define_view(
                state,
                tenant=caller.tenant,
                artifact=record.artifact,
                view=ArtifactId(asked.view),
                definition=asked.definition,
            )

        position, _ = await self._decide(rule, caller, request)
        return Reply({"position": position})

    async def release(self, caller: Caller, request: Request) -> Reply:
        """A worker without memory has granted no lease; it can say who did."""
        asked = ask.parse(ask.Release, request.args, op="release")
        raise elsewhere(self._core, caller.tenant, LeaseId(asked.lease))

    # -- versions -----------------------------------------------------------------------------------------------------

    async def publish(self, caller: Caller, request: Request) -> Reply:
        asked = ask.parse(ask.Publish, request.args, op="publish")
        artifact = ArtifactId(asked.artifact)
        position, fact = await self._decide(
            lambda state: rules.publish(state, tenant=caller.tenant, name=asked.name, artifact=artifact),
            caller,
            request,
        )
        info = artifact_info(self._core.state, self._known(caller, artifact))
        return Reply({"version": getattr(fact, "version", None), "artifact": info, "position": position})

    async def version(self, caller: Caller, request: Request) -> Reply:
        asked = ask.parse(ask.Version, request.args, op="version")
        await self._core.reached(asked.at_least, request.deadline)
        number, record = rules.version(self._core.state, tenant=caller.tenant, name=asked.name, number=asked.number)
        return self._at_position({"version": number, "artifact": artifact_info(self._core.state, record)})

    async def series(self, caller: Caller, request: Request) -> Reply:
        asked = ask.parse(ask.SeriesAfter, request.args, op="series")
        await self._core.reached(asked.at_least, request.deadline)
        state = self._core.state
        series = state.one_series(caller.tenant, asked.name)
        if series is None:
            news: Json = {"name": asked.name, "last": 0, "new": [], "gone": []}
        else:
            news = series_news(state, caller.tenant, series, asked.after)
        if asked.follow:
            self._follows.follow_series(caller, asked.name, max(asked.after, series.last if series else 0))
        return self._at_position(news)

    # -- the system ---------------------------------------------------------------------------------------------------

    async def workers(self, caller: Caller, request: Request) -> Reply:
        asked = ask.parse(ask.AtLeast, request.args, op="workers")
        await self._core.reached(asked.at_least, request.deadline)
        state = self._core.state
        sessions = sorted(state.sessions.values(), key=lambda session: session.worker)
        return self._at_position({"items": [session_info(state, session) for session in sessions]})

    async def stats(self, caller: Caller, request: Request) -> Reply:
        state = self._core.state
        directory = {
            "position": self._core.live.position,
            "hash": state.hash(),
            "artifacts": sum(record.live for record in state.artifacts.values()),
            "keys": sum(key.artifact is not None for key in state.keys.values()),
            "series": len(state.series),
            "sessions": sum(1 for _ in state.live_sessions()),
            "replicas": sum(len(record.replicas) for record in state.artifacts.values()),
            "orphans": len(state.orphans),
            "degraded": self._core.feed.degraded,
            "gaps": state.gaps,
            "unknown": state.unknown,
            "dropped": dict(state.dropped),
            "snapshot": self._core.feed.snapshot_used,
            "rebuilds": self._core.feed.rebuilds,
            "rebuilding": self._core.feed.rebuilding,
            "losses": self._core.feed.losses,
            "settled": not self._core.unsettled,
        }
        pool = None if self._pool_stats is None else asdict(self._pool_stats())
        heartbeat = self._core.beats.figures()
        store = None if self._core.store_stats is None else self._core.store_stats()
        figures = {"pool": pool, "directory": directory, "callers": len(self._callers), "heartbeat": heartbeat}
        disk = None if self._core.disk_stats is None else self._core.disk_stats()
        pins = None if pool is None else pin_figures(state, self._core.me.worker)
        home = None if self._core.home_stats is None else self._core.home_stats()
        return Reply({**figures, "store": store, "disk": disk, "pins": pins, "home": home})

    async def events_open(self, caller: Caller, request: Request) -> Reply:
        asked = ask.parse(ask.EventsOpen, request.args, op="events_open")
        bus, subjects = self._core.bus, None
        if asked.artifact is not None:
            record = self._core.state.artifact(caller.tenant, ArtifactId(asked.artifact))
            if record is None:
                raise NotFoundError(f"there is no artifact {asked.artifact!r}", artifact=asked.artifact)
            subjects = subjects_about(bus, self._core.state, record)
        last = None if asked.follow else await bus.last_on(bus.subjects.facts, deadline=request.deadline)
        until = None if asked.follow else (last.seq if last else 0)
        cursor = Cursor(bus, tenant=caller.tenant, after=asked.after, until=until, subjects=subjects)
        return Reply({"cursor": open_cursor(caller, cursor)})

    async def events_next(self, caller: Caller, request: Request) -> Reply:
        asked = ask.parse(ask.EventsNext, request.args, op="events_next")
        items, done = await find_cursor(caller, asked.cursor).next(limit=asked.limit, wait_s=asked.wait_s)
        return Reply({"items": items, "done": done})

    async def events_close(self, caller: Caller, request: Request) -> Reply:
        asked = ask.parse(ask.EventsClose, request.args, op="events_close")
        cursor = caller.cursors.pop(asked.cursor, None)
        if cursor is not None:
            await cursor.close()
        return Reply({})

    async def locate(self, caller: Caller, request: Request) -> Reply:
        record = self._live(caller, request, op="locate")
        info = artifact_info(self._core.state, record)
        if record.quarantined and not record.replicas:
            raise rules.corrupt_artifact(record)
        sources = {one.worker: one for one in sources_of(self._core.state, record) if one.data}
        asked = PermitAsk(op="read", tenant=record.tenant, artifact=record.artifact)
        permits = await ask_permits(self._core, list(sources), asked, deadline=request.deadline)
        errors = [permit for permit in permits.values() if isinstance(permit, TensorbusError)]
        if errors and len(errors) == len(permits):
            raise errors[0]
        given = [
            {**_source(sources[worker]), "permit": permit}
            for worker, permit in permits.items()
            if isinstance(permit, str)
        ]
        return self._at_position({"artifact": info, "sources": given})

    async def complain(self, caller: Caller, request: Request) -> Reply:
        """A reader without a worker got wrong bytes: those who sent them are told, as workers tell each other."""
        asked = ask.parse(ask.Complain, request.args, op="complain")
        record = rules.live_artifact(self._core.state, tenant=caller.tenant, artifact=ArtifactId(asked.artifact))
        holding = [one.worker for one in sources_of(self._core.state, record) if one.worker in asked.workers]
        await asyncio.gather(*(complain(self._core, worker, record.where) for worker in holding))
        return Reply({"told": holding})

    async def place(self, caller: Caller, request: Request) -> Reply:
        asked = ask.parse(ask.Place, request.args, op="place")
        holding = [session for session in self._core.state.live_sessions() if session.data]
        if not holding:
            raise UnavailableError("no worker that holds memory lives now; start one with `tensorbus worker`")
        fitting = [session for session in holding if session.pool_bytes >= asked.nbytes]
        if not fitting:
            raise OutOfSpaceError(f"no worker has a pool for {asked.nbytes} bytes", asked_bytes=asked.nbytes)
        chosen = max(fitting, key=lambda session: (session.pool_bytes, session.worker))
        permit = PermitAsk(op="put", tenant=caller.tenant, principal=caller.id)
        token = await ask_permit(self._core, chosen.worker, permit, deadline=request.deadline)
        return Reply({**_source(chosen), "permit": token})

    # -- shared -------------------------------------------------------------------------------------------------------

    async def _decide(
        self, rule: Callable[[Directory], Event | None], caller: Caller, request: Request
    ) -> tuple[int, Event | None]:
        return await self._core.author.decide(rule, deadline=request.deadline, principal=caller.id)

    def _known(self, caller: Caller, artifact: ArtifactId) -> Artifact:
        """What was just named, also if it has ended since: its naming is a fact, and an error would deny it."""
        record = self._core.state.artifact(caller.tenant, artifact)
        assert record is not None, "only what exists is named"
        return record

    def _live(self, caller: Caller, request: Request, *, op: str) -> Artifact:
        asked = ask.parse(ask.OneArtifact, request.args, op=op)
        return rules.resolve(self._core.state, tenant=caller.tenant, ref=asked.artifact, by="id")

    def _answer(self, record: Artifact) -> Reply:
        return self._at_position({"artifact": artifact_info(self._core.state, record)})

    def _at_position(self, data: Json) -> Reply:
        return Reply({**data, "position": self._core.live.position})


@dataclass(frozen=True, slots=True)
class _View:
    """A view as a caller defines it, and the manifest that it is over."""

    base: ArtifactId
    id: str
    definition: str
    manifest: Manifest

    def check(self) -> None:
        """See that it is that base's view of that id. Costs as much as the manifest.

        Raises:
            InvalidArgumentError: If it is not; NotFoundError: If the base has no tensor of a name.
        """
        try:
            spec = ViewSpec.from_json(self.definition)
        except CorruptError as exc:
            raise InvalidArgumentError(f"define_view: {exc.message}", view=self.id) from exc
        if spec.whole or view_id(self.base, spec) != self.id:
            raise InvalidArgumentError(
                f"{self.id!r:.80} is not the id of that view of {self.base!r:.80}", view=self.id, artifact=self.base
            )
        spec.manifest_of(self.manifest)


def elsewhere(core: Core, tenant: str, lease: LeaseId) -> TensorbusError:
    """What to tell who asks a worker to end a lease that it has not granted: who has, if anybody."""
    state = core.state
    for worker, artifacts in state.by_lessor.items():
        for where in artifacts:
            if worker != core.me.worker and where[0] == tenant and lease in state.artifacts[where].leases:
                return ConflictError(
                    f"lease {lease!r} is one of worker {worker}, which alone can end it; this is {core.me.worker}: "
                    f"connect on the host of {worker}",
                    lease=lease,
                    worker=worker,
                )
    return NotFoundError(
        f"no worker has a lease {lease!r}: it was released, ran out, or its caller's connection ended", lease=lease
    )


def sources_of(state: Directory, record: Artifact) -> list[Session]:
    """The living workers that hold the whole artifact, in order of their ids."""
    found = {
        replica.worker: state.sessions[replica.worker]
        for replica in record.replicas.values()
        if replica.view is None and state.is_live(replica.worker, replica.incarnation)
    }
    return [found[worker] for worker in sorted(found)]


def _source(session: Session) -> Json:
    return {
        "worker": session.worker,
        "incarnation": session.incarnation,
        "host": session.host,
        "data": session.data,
    }
