"""Simulated callers: they put, name, read and end artifacts through workers, and check every answer against the log."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from blake3 import blake3

from tensorbus.clock import Deadline
from tensorbus.errors import (
    ConflictError,
    DeadlineExceededError,
    FencedError,
    NotFoundError,
    TensorbusError,
    UnavailableError,
)
from tensorbus.events import VersionPublished
from tensorbus.model import Manifest, TensorSpec, plan_layout
from tensorbus.testing import InvariantError, Node, World
from tensorbus.transport import Connection
from tests.simulation.cluster import Cluster, SimMemory
from tests.simulation.truth import Timeline

CONTENTS = tuple(f"content {n}".encode() * 8 for n in range(6))
KEYS = ("ka", "kb", "kc")
GIVEN = ("given/1", "given/2")
GIVEN_CONTENTS = tuple(f"given {n}".encode() * 8 for n in range(2))
"""Bytes of their own: an id of the first kind would find them under their given id, too."""
SERIES = ("sa", "sb")
TENANT = "t"
NEED_MEMORY = frozenset({"put", "put_named", "put_given", "register", "pin", "renew", "release", "read", "read_leased"})
TIMEOUTS_S = (1.0, 4.0, 15.0)
PAUSES_S = (0.0, 0.01, 0.3, 1.5)


def manifest_of(content: bytes, *, digested: bool = True) -> Manifest:
    plain = Manifest((TensorSpec("", "u8", (len(content),)),))
    return plain.with_digests([blake3(content).hexdigest()]) if digested else plain


IDS = tuple(str(manifest_of(content).content_id()) for content in CONTENTS)


@dataclass
class Promises:
    """What workers acknowledged to callers, in the whole run."""

    versions: dict[tuple[str, int], str] = field(default_factory=dict)
    put: list[tuple[str, int]] = field(default_factory=list)
    destroys_asked: set[str] = field(default_factory=set)
    registered: list[tuple[str, bytes]] = field(default_factory=list)
    published: Counter[str] = field(default_factory=Counter)
    """How many versions each session may have published: those that were acknowledged, or whose outcome is unknown."""


class Caller:
    """One process after the other on a node, each with a connection to some worker, doing things at random.

    Args:
        workers: Whom it may connect to.
        deeds: What it does, by the names of its methods, each with a weight.
    """

    def __init__(
        self, cluster: Cluster, node: Node, promises: Promises, *, workers: tuple[str, ...], deeds: Mapping[str, int]
    ) -> None:
        self.cluster, self.node, self.promises = cluster, node, promises
        self.world: World = node.world
        self.truth = cluster.truth
        self.rng = self.world.rng(f"caller/{node.name}/{node.life.number}")
        self.workers = workers
        self.deeds = list(deeds)
        self.weights = [deeds[name] for name in self.deeds]
        self.leases: list[str] = []
        self.session = ""
        self.seen = 0
        self._from = self._to = 0

    async def run(self) -> None:
        """Live for ever; a lost connection is made anew, perhaps elsewhere."""
        while True:
            worker = self.rng.choice(self.workers)
            try:
                channel = self.cluster.connect(self.node, worker)
            except UnavailableError:
                await asyncio.sleep(self.rng.uniform(0.1, 1.0))
                continue
            async with Connection(channel) as self.connection:
                try:
                    hello = await self._call("hello", {"protocol": 1, "tenant": TENANT, "pid": 7, "version": "x"})
                    self.session = str(hello["session"])
                    await self._session(worker)
                except (UnavailableError, DeadlineExceededError, FencedError):
                    self.world.cover("connection_lost")
            await asyncio.sleep(self.rng.uniform(0.01, 0.5))

    async def _session(self, worker: str) -> None:
        self.worker, self.leases = worker, []
        self.memory: SimMemory | None = self.cluster.memories.get(worker)
        for _ in range(self.rng.randrange(1, 16)):
            name = self.rng.choices(self.deeds, self.weights)[0]
            if self.memory is None and name in NEED_MEMORY:
                continue
            deed: Callable[[], Awaitable[None]] = getattr(self, name)
            self._from = self._position()
            try:
                await deed()
            except DeadlineExceededError:
                self.world.cover("unknown_outcome")
            await asyncio.sleep(self.rng.choice(PAUSES_S))

    # -- names --------------------------------------------------------------------------------------------------------

    async def bind(self) -> None:
        key, artifact, rebind = self.rng.choice(KEYS), self._some_id(), self.rng.random() < 0.5
        with self._refusals(NotFoundError, lambda: None in self._life(artifact)):  # noqa: SIM117  two kinds of refusal
            with self._refusals(ConflictError, lambda: self._bound_elsewhere(key, artifact)):
                position = await self._change("bind", {"key": key, "artifact": artifact, "rebind": rebind})
                assert artifact in self._names(key, position), f"{key} was never bound to {artifact}"
                self.world.cover("bind")

    async def unbind(self) -> None:
        key = self.rng.choice(KEYS)
        with self._refusals(NotFoundError, lambda: None in self._names(key)):
            position = await self._change("unbind", {"key": key})
            assert None in self._names(key, position)
            assert self.truth.verdicts[position].kept, "an acknowledged fact counts"
            self.world.cover("unbind")

    async def destroy(self) -> None:
        artifact = self._some_id()
        self.promises.destroys_asked.add(artifact)
        with self._refusals(NotFoundError, lambda: None in self._life(artifact)):
            position = await self._change("destroy", {"artifact": artifact})
            assert None in self._life(artifact, position)
            self.world.cover("destroy")

    async def publish(self) -> None:
        name, artifact = self.rng.choice(SERIES), self._some_id()
        with self._refusals(NotFoundError, lambda: None in self._life(artifact)):
            self.promises.published[self.session] += 1
            try:
                reply = await self._call("publish", {"name": name, "artifact": artifact})
            except NotFoundError:
                self.promises.published[self.session] -= 1
                raise
            position, version = int(reply["position"]), int(reply["version"])
            fact = self.truth.facts[position].event
            assert isinstance(fact, VersionPublished)
            assert (fact.name, fact.version, fact.artifact) == (name, version, artifact)
            assert self.truth.verdicts[position].kept, "an acknowledged fact counts"
            assert (name, version) not in self.promises.versions, "a version is promised once"
            self.promises.versions[name, version] = artifact
            self.world.cover("publish")

    async def resolve(self) -> None:
        """Read one's own writes, and exactly what the log says at the position that the answer names."""
        key, at_least = self.rng.choice(KEYS), self.seen
        self._from = max(self._from, at_least)
        with self._refusals(NotFoundError, lambda: None in self._names(key)):
            reply = await self._call("resolve", {"ref": key, "by": "key", "at_least": at_least})
            position = int(reply["position"])
            assert position >= at_least, f"asked for {at_least}, answered at {position}"
            found = dict(reply["artifact"])["artifact"]
            said = self.truth.during(self.truth.bound[key], position, position)
            assert said == [found], f"at {position} {key} is {said}, not {found}"
            self.world.cover("resolve")

    # -- bytes --------------------------------------------------------------------------------------------------------

    async def put(self) -> None:
        await self._put(key=None, given=None, digested=True)

    async def put_named(self) -> None:
        await self._put(key=self.rng.choice(KEYS), given=None, digested=True)

    async def put_given(self) -> None:
        key = self.rng.choice((*KEYS, None, None))
        await self._put(key=key, given=self.rng.choice(GIVEN), digested=self.rng.random() < 0.5)

    async def _put(self, *, key: str | None, given: str | None, digested: bool) -> None:
        content, rebind = self.rng.choice(GIVEN_CONTENTS if given else CONTENTS), self.rng.random() < 0.5
        manifest = manifest_of(content, digested=digested)
        place = await self._fill(content)
        args = {**place, "layout": _layout(manifest), "rebind": rebind, "digest": "now" if digested else "later"}
        args |= {name: value for name, value in (("key", key), ("id", given)) if value is not None}

        def justified() -> bool:
            taken = given is not None and bool(self.truth.lived[given])  # now or ever: an id is not used again
            expected = given or str(manifest.content_id())
            elsewhere = key is not None and self._bound_elsewhere(key, expected)
            return taken or elsewhere or self._ended_meanwhile(expected)

        with self._refusals(ConflictError, justified), self._refusals(NotFoundError, lambda: key is not None):
            reply = await self._call("commit", args, body=manifest.to_json().encode())
            artifact, position = str(dict(reply["artifact"])["artifact"]), int(reply["position"])
            assert "live" in self._life(artifact, position), f"{artifact} was never there"
            if key is not None:
                assert artifact in self._names(key, position)
            self.promises.put.append((artifact, position))
            self.world.cover("joined" if reply["existed"] else "put")

    async def register(self) -> None:
        # A registration cannot join what is there already, so its bytes are its own.
        content = b"mine " + self.node.ids.hex(8).encode()
        manifest, place = manifest_of(content), await self._fill(content)
        args: dict[str, object] = {
            "parts": [[place["segment"], place["generation"]]],
            "layout": _layout(manifest),
            "lease_s": self.rng.choice((3.0, 600.0)),
        }
        # A worker that stands still for longer than the lease answers when it is over.
        with self._refusals(ConflictError, lambda: self._ended_meanwhile(str(manifest.content_id()))):
            reply = await self._call("register", args, body=manifest.to_json().encode())
            self.leases.append(str(reply["lease"]))
            self.promises.registered.append((str(manifest.content_id()), content))
            self.world.cover("register")

    async def pin(self) -> None:
        artifact, ttl_s = self._some_id(), self.rng.choice((None, 2.0, 10.0))
        with self._refusals((NotFoundError, ConflictError), lambda: None in self._life(artifact)):
            reply = await self._call("pin", {"artifact": artifact, "ttl_s": ttl_s})
            self.leases.append(str(reply["lease"]))
            self.world.cover("pin")

    async def renew(self) -> None:
        reply = await self._call("renew", {"leases": self.leases})
        ended = list(reply["ended"])  # type: ignore[call-overload]  # JSON
        self.leases = [lease for lease in self.leases if lease not in ended]

    async def release(self) -> None:
        if self.leases:
            lease = self.leases.pop(self.rng.randrange(len(self.leases)))
            with self._refusals((NotFoundError, ConflictError), lambda: True):
                await self._call("release", {"lease": lease})
                self.world.cover("release")

    async def read(self) -> None:
        number = self.rng.randrange(len(IDS))
        await self._read(IDS[number], CONTENTS[number])

    async def read_leased(self) -> None:
        """Another's registered memory: a copy here lets the artifact outlive its lease."""
        if self.promises.registered:
            await self._read(*self.rng.choice(self.promises.registered[-4:]))

    async def _read(self, artifact: str, content: bytes) -> None:
        """Open, look at the bytes, and find those that the id names."""
        with self._refusals(NotFoundError, lambda: None in self._life(artifact)):
            reply = await self._call("open", {"artifact": artifact})
            assert self.memory is not None
            ((segment, generation),) = [(p["segment"], p["generation"]) for p in reply["parts"]]  # type: ignore[attr-defined]
            mapped = self.memory.pool.busy.get((segment, generation))
            if mapped is not None:  # else it ended between the answer and this look, which a mapping's pin prevents
                assert bytes(mapped.data) == content, "another tensor's bytes"
            self.world.cover("read")

    async def _fill(self, content: bytes) -> dict[str, object]:
        reply = await self._call("alloc", {"nbytes": len(content)})
        assert self.memory is not None
        filling = self.memory.pool.busy.get((int(reply["segment"]), int(reply["generation"])))
        if filling is not None:  # else the worker went down since, and nobody will ask for these bytes
            filling.data[:] = content
        return {"segment": reply["segment"], "generation": reply["generation"]}

    # -- shared -------------------------------------------------------------------------------------------------------

    async def _call(self, op: str, args: Mapping[str, object], body: bytes = b"") -> dict[str, object]:
        deadline = Deadline(self.rng.choice(TIMEOUTS_S), what=op)
        reply = await self.connection.call(op, args, body=body, deadline=deadline)
        reply.fds.take()
        position = reply.data.get("position")
        if isinstance(position, int):
            assert position <= self.truth.fold.seq or position <= self.truth.log.last_seq, "nobody is ahead of the log"
            if op != "hello":
                self.seen = max(self.seen, position)
        return reply.data

    async def _change(self, op: str, args: Mapping[str, object]) -> int:
        return int((await self._call(op, args))["position"])  # type: ignore[call-overload]  # JSON

    @contextmanager
    def _refusals(
        self, errors: type[TensorbusError] | tuple[type[TensorbusError], ...], why: Callable[[], bool]
    ) -> Iterator[None]:
        """A refusal is fine if there was a time, since the call began, at which it was due."""
        try:
            yield
        except errors as error:
            if not why():
                raise InvariantError(f"refused without a reason: {error}") from error
            self.world.cover(f"refused.{type(error).__name__}")

    def _position(self) -> int:
        """What the worker knew when it was asked."""
        running = self.cluster.running.get(self.worker)
        return 0 if running is None else min(running.live.state.seq, self.truth.fold.seq)

    def _span(self, timeline: Timeline, last: int | None) -> list[str | None]:
        last = self.truth.fold.seq if last is None else last
        return self.truth.during(timeline, min(self._from, last), last)

    def _names(self, key: str, last: int | None = None) -> list[str | None]:
        return self._span(self.truth.bound[key], last)

    def _life(self, artifact: str, last: int | None = None) -> list[str | None]:
        return self._span(self.truth.lived[artifact], last)

    def _bound_elsewhere(self, key: str, artifact: str) -> bool:
        return any(name not in (None, artifact) for name in self._names(key))

    def _ended_meanwhile(self, artifact: str) -> bool:
        return None in self._life(artifact)[1:]

    def _some_id(self) -> str:
        return self.rng.choice((*IDS, *GIVEN))


def _layout(manifest: Manifest) -> object:
    return json.loads(plan_layout(manifest).to_json())
