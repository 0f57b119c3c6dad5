"""What a worker with a pool answers over its unix socket: memory to fill, artifacts to map, leases to hold."""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import partial

from tensorbus.clock import Deadline
from tensorbus.errors import ConflictError, InvalidArgumentError, NotFoundError, UnavailableError
from tensorbus.events import LeasePurpose
from tensorbus.ids import LeaseId, new_lease_id
from tensorbus.lifecycle import Artifact, rules
from tensorbus.model import Layout, Manifest
from tensorbus.projections import artifact_info
from tensorbus.transport import Fds, Reply, Request, Segment, TransferReport, page_round
from tensorbus.workers import _requests as ask
from tensorbus.workers._callers import Caller
from tensorbus.workers._core import Core, off_loop
from tensorbus.workers._directory_ops import Op, elsewhere
from tensorbus.workers._fetch import Fetches
from tensorbus.workers._leases import Leases
from tensorbus.workers._puts import Incoming, Lease, Placement, Puts, Taken, known_outcome
from tensorbus.workers._store import Held, Store
from tensorbus.workers._tiers import Tiers

TENSOR_JSON_BYTES = 100
"""About what a tensor takes in a manifest's JSON."""


class BytesOps:
    """Operations on memory. What a connection was given and did not hand in goes back when it ends."""

    def __init__(self, core: Core, *, tiers: Tiers, store: Store, puts: Puts, fetches: Fetches, leases: Leases) -> None:
        self._core = core
        self._tiers = tiers
        self._store = store
        self._puts = puts
        self._fetches = fetches
        self._leases = leases
        self._filling: dict[tuple[int, int], tuple[Caller, Segment]] = {}

    def table(self) -> dict[str, Op]:
        return {
            "alloc": self.alloc,
            "commit": self.commit,
            "abort": self.abort,
            "register": self.register,
            "renew": self.renew,
            "release": self.release,
            "pin": self.pin,
            "open": self.open,
            "persist": self.persist,
            "evict": self.evict,
        }

    def gone(self, caller: Caller) -> None:
        """A connection ended: its unfinished segments go back, its own memory is served no longer."""
        for place in [place for place, (owner, _) in self._filling.items() if owner is caller]:
            self._filling.pop(place)[1].release()
        self._leases.gone(caller)

    # -- filling ------------------------------------------------------------------------------------------------------

    async def alloc(self, caller: Caller, request: Request) -> Reply:
        asked = ask.parse(ask.Alloc, request.args, op="alloc")
        self._need_descriptors(caller)
        writer = caller.id
        if asked.purpose == "empty":
            # A name of its own: memory that the user has in hand is never offered again as a buffer for a put.
            writer = f"{caller.id}/{self._core.ids.hex(4)}"
        async with request.deadline.scope():
            segment = await self._tiers.allocate(asked.nbytes, tenant=caller.tenant, writer=writer, fresh=asked.fresh)
        if caller.session.closed:  # it went while room was made: nobody would give the segment back
            segment.release()
            raise UnavailableError("the caller's connection ended")
        segment.label = f"memory of process {caller.pid}"
        data: dict[str, object] = {
            "segment": segment.id,
            "generation": segment.generation,
            "nbytes": segment.nbytes,
            "capacity": segment.capacity_bytes,
            "mapped": segment.writer_mapped,
        }
        try:
            fds = () if segment.writer_mapped else segment.open_writer()
        except BaseException:
            segment.release()
            raise
        self._filling[segment.id, segment.generation] = caller, segment
        return Reply(data, fds=Fds(fds), undo=lambda: self._give_up(caller, segment))

    def _give_up(self, caller: Caller, segment: Segment) -> None:
        """The caller never learned of the segment it was granted."""
        if self._filling.get((segment.id, segment.generation)) == (caller, segment):
            del self._filling[segment.id, segment.generation]
            segment.release()

    async def abort(self, caller: Caller, request: Request) -> Reply:
        asked = ask.parse(ask.SegmentAsk, request.args, op="abort")
        self._take_filling(caller, asked.segment, asked.generation).release()
        return Reply({})

    async def commit(self, caller: Caller, request: Request) -> Reply:
        asked = ask.parse(ask.Commit, request.args, op="commit")
        manifest = await self._manifest(request)
        parts = self._take_parts(caller, [(asked.segment, asked.generation)])
        incoming = replace(self._incoming(caller, asked, manifest, parts, lease=None), disk=Placement(asked.disk))
        taken = await self._carry(caller, incoming, digest=False, name="put")
        return self._taken(caller, taken)

    async def _manifest(self, request: Request) -> Manifest:
        body = bytes(request.body)
        return await off_loop(Manifest.from_json, body, weight=len(body) // TENSOR_JSON_BYTES)

    async def register(self, caller: Caller, request: Request) -> Reply:
        asked = ask.parse(ask.Register, request.args, op="register")
        manifest = await self._manifest(request)
        parts = self._take_parts(caller, asked.parts)
        lease = Lease(id=new_lease_id(self._core.ids), holder=caller.id, ttl_s=asked.lease_s)
        incoming = self._incoming(caller, asked, manifest, parts, lease=lease)
        taken = await self._carry(caller, incoming, digest=asked.sealed or asked.id is not None, name="register")
        reply = self._taken(caller, taken)
        return Reply({**reply.data, "lease": lease.id}, undo=partial(self._end_unknown, caller, lease.id))

    async def _carry(self, caller: Caller, incoming: Incoming, *, digest: bool, name: str) -> Taken:
        """Bring the put to its end in the worker's own time; the caller waits as long as it likes."""

        def unwanted(_taken: Taken) -> None:
            if incoming.lease is not None:
                self._end_unknown(caller, incoming.lease.id)

        return await self._core.finish(self._take(caller, incoming, digest=digest), name=name, unwanted=unwanted)

    async def _take(self, caller: Caller, incoming: Incoming, *, digest: bool) -> Taken:
        if digest:
            incoming = await self._puts.digested(incoming)
        taken = await self._puts.take(incoming, deadline=known_outcome())
        if incoming.lease is not None:
            self._begin(caller, incoming, taken)
        elif caller.session.closed and not taken.existed and incoming.key is None and incoming.given is None:
            # Nobody was told its name, so nobody could ever use or destroy it.
            await self._puts.abandon(incoming.tenant, taken.artifact, born=taken.position, principal=incoming.principal)
        return taken

    def _begin(self, caller: Caller, incoming: Incoming, taken: Taken) -> None:
        lease = incoming.lease
        assert lease is not None, "only registrations begin a lease"
        self._leases.began(
            lease.id,
            tenant=incoming.tenant,
            artifact=taken.artifact,
            purpose=LeasePurpose.REGISTER,
            ttl_s=lease.ttl_s,
        )
        caller.leases[lease.id] = None
        if caller.session.closed:
            self._leases.gone(caller)

    def _incoming(
        self,
        caller: Caller,
        asked: ask.Birth,
        manifest: Manifest,
        parts: tuple[Segment, ...],
        *,
        lease: Lease | None,
    ) -> Incoming:
        try:
            layout = Layout.from_value(asked.layout, manifest)
            space = sum(page_round(part.nbytes) for part in parts[:-1]) + parts[-1].nbytes
            if layout.nbytes > space:
                raise InvalidArgumentError(f"the layout needs {layout.nbytes} bytes, the memory has {space}")
        except BaseException:
            for part in parts:
                part.release()
            raise
        return Incoming(
            tenant=caller.tenant,
            principal=caller.id,
            parts=parts,
            layout=layout,
            manifest=manifest,
            given=asked.id,
            key=asked.key,
            rebind=asked.rebind,
            lease=lease,
        )

    def _take_parts(self, caller: Caller, places: list[tuple[int, int]]) -> tuple[Segment, ...]:
        if len(set(places)) != len(places):
            raise InvalidArgumentError("a segment is named twice")
        for segment, generation in places:
            self._find_filling(caller, segment, generation)
        return tuple(self._take_filling(caller, segment, generation) for segment, generation in places)

    def _take_filling(self, caller: Caller, segment: int, generation: int) -> Segment:
        found = self._find_filling(caller, segment, generation)
        del self._filling[segment, generation]
        return found

    def _find_filling(self, caller: Caller, segment: int, generation: int) -> Segment:
        owner, found = self._filling.get((segment, generation), (None, None))
        if found is None or owner is not caller:
            raise NotFoundError(
                f"this connection has no segment {segment} (generation {generation}) to fill",
                segment=segment,
                generation=generation,
            )
        return found

    def _taken(self, caller: Caller, taken: Taken) -> Reply:
        record = self._core.state.artifact(caller.tenant, taken.artifact)
        if record is None or not record.live:
            raise ConflictError(
                f"artifact {taken.artifact!r} was destroyed by another caller as soon as it was put",
                artifact=taken.artifact,
            )
        info = artifact_info(self._core.state, record)
        return Reply({"artifact": info, "position": taken.position, "existed": taken.existed})

    # -- leases -------------------------------------------------------------------------------------------------------

    async def renew(self, caller: Caller, request: Request) -> Reply:
        asked = ask.parse(ask.Renew, request.args, op="renew")
        return Reply({"ended": self._leases.renew(caller, asked.leases)})

    async def release(self, caller: Caller, request: Request) -> Reply:
        asked = ask.parse(ask.Release, request.args, op="release")
        lease = LeaseId(asked.lease)
        if lease not in self._leases:
            raise elsewhere(self._core, caller.tenant, lease)
        work = self._leases.release(caller, lease, deadline=known_outcome())
        return Reply({"position": await self._core.finish(work, name="release")})

    async def pin(self, caller: Caller, request: Request) -> Reply:
        asked = ask.parse(ask.Pin, request.args, op="pin")
        record = self._resolve(caller, asked.artifact)
        work = self._pin(caller, record, asked.ttl_s, request.deadline)
        lease, position = await self._core.finish(
            work, name="pin", unwanted=lambda granted: self._end_unknown(caller, granted[0])
        )
        undo = partial(self._end_unknown, caller, lease)
        return Reply({"lease": lease, "position": position}, undo=undo)

    async def _pin(
        self, caller: Caller, record: Artifact, ttl_s: float | None, deadline: Deadline
    ) -> tuple[LeaseId, int]:
        with self._tiers.using(record.where):  # what is about to be pinned must not leave before it is
            await self._fetches.ensure(caller.tenant, record.artifact, deadline=deadline)
            return await self._leases.pin(caller, record.artifact, ttl_s=ttl_s, deadline=known_outcome())

    # -- tiers --------------------------------------------------------------------------------------------------------

    async def persist(self, caller: Caller, request: Request) -> Reply:
        """Have the artifact on this worker's disk for as long as it lives; fetches it first if it is not here."""
        asked = ask.parse(ask.OneArtifact, request.args, op="persist")
        record = self._resolve(caller, asked.artifact)
        async with request.deadline.scope():
            with self._tiers.using(record.where):
                held, _ = await self._fetches.ensure(caller.tenant, record.artifact, deadline=request.deadline)
                position = await self._tiers.persist(held, must=True)
        return Reply({"position": position, "worker": self._core.me.worker})

    async def evict(self, caller: Caller, request: Request) -> Reply:
        """Drop this worker's copies of an artifact, which lives on elsewhere."""
        asked = ask.parse(ask.OneArtifact, request.args, op="evict")
        record = self._resolve(caller, asked.artifact)
        async with request.deadline.scope():
            position = await self._tiers.evict(record.where)
        return Reply({"position": position, "worker": self._core.me.worker})

    def _end_unknown(self, caller: Caller, lease: LeaseId) -> None:
        """End a lease that the caller was granted and never learned of."""
        self._core.spawn(self._leases.end_unknown(caller, lease), name=f"end unknown lease {lease}")

    # -- mapping ------------------------------------------------------------------------------------------------------

    async def open(self, caller: Caller, request: Request) -> Reply:
        asked = ask.parse(ask.Open, request.args, op="open")
        self._need_descriptors(caller)
        await self._core.reached(asked.at_least, request.deadline)
        record = self._resolve(caller, asked.artifact)
        held, how, body = await self._at_hand(record, request)
        parts = [{"segment": part.id, "generation": part.generation, "nbytes": part.nbytes} for part in held.parts]
        data: dict[str, object] = {
            "artifact": artifact_info(self._core.state, self._resolve(caller, record.artifact)),
            "parts": parts,
            "layout": held.layout.to_value(),
            "path": how.path,
            "why": how.why,
            "transfer": asdict(how),
            "position": self._core.live.position,
        }
        fds: list[int] = []
        try:
            for part in held.parts:
                fds += part.open_reader()
            return Reply(data, body=body, fds=Fds(fds))
        except BaseException:
            Fds(fds).close()
            raise

    async def _at_hand(self, record: Artifact, request: Request) -> tuple[Held, TransferReport, bytes]:
        """The artifact's bytes here and its manifest, such that they are still here when this returns."""
        while True:
            held, how = await self._fetches.ensure(
                record.tenant, record.artifact, deadline=request.deadline, said=False
            )
            body = await held.manifest_json()
            if self._store.get(*held.where) is held:
                return held, how, body
            # It ended while it came. If its id lives again, that is another life, with bytes of its own.

    def _resolve(self, caller: Caller, ref: str) -> Artifact:
        return rules.resolve(self._core.state, tenant=caller.tenant, ref=ref, by="id")

    def _need_descriptors(self, caller: Caller) -> None:
        if not caller.session.passes_fds:
            raise InvalidArgumentError("memory is shared over the unix socket only; this connection is TCP")
