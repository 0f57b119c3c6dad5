"""A log as a running cluster leaves it: what 64 workers say of many artifacts, with the headers that let it count."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from tensorbus.bus import Message
from tensorbus.events import (
    Aggregate,
    ArtifactDestroyed,
    ArtifactDigested,
    ArtifactPut,
    ArtifactRegistered,
    BlobRef,
    CallerLeaseEnded,
    CallerLeaseGranted,
    DestroyReason,
    DropReason,
    Event,
    Headers,
    KeyBound,
    LeaseEnd,
    LeasePurpose,
    ManifestRef,
    ReplicaAdded,
    ReplicaDropped,
    SessionEnd,
    SessionEnded,
    SessionOpened,
    Subjects,
    Tier,
    VersionPublished,
    ViewDefined,
    aggregate_of,
    encode,
    headers_to_wire,
)
from tensorbus.ids import ArtifactId, EventId, Incarnation, LeaseId, WorkerId

WORKERS = 64
REPLICAS_EACH = 10
FACTS_EACH = 12
"""Facts of one artifact, on average; see :meth:`ClusterLog.messages`."""

AT_ONCE = 100
"""Artifacts whose facts are told in turn."""

TENANT = "default"
MIB = 1 << 20
_MANIFEST = (
    '{"tensors":[["model.layers.0.self_attn.q_proj.weight","bf16",[1024,512],"%064x"],'
    '["model.layers.0.self_attn.k_proj.weight","bf16",[256,512],"%064x"]]}'
)


@dataclass
class ClusterLog:
    """Makes the messages in the order and with the sequences that the stream will give them.

    Attributes:
        seq: The last sequence before the first message.
    """

    subjects: Subjects = field(default_factory=Subjects)
    seq: int = 0
    _heads: dict[Aggregate, int] = field(default_factory=dict)
    _numbers: list[int] = field(default_factory=lambda: [0] * WORKERS)
    _series: dict[str, int] = field(default_factory=dict)

    def messages(self, artifacts: int) -> Iterator[Message]:
        """64 workers restart once, then each artifact in turn is put, named, copied to nine more workers, and used.

        Of a hundred artifacts twenty are lent by a caller and digested later, ten are a version of a series, ten are
        pinned and released, five have a view, five lose a copy and get it again; and ten more come and go again. A
        hundred of them are under way at any time, so that facts about one are not in a row.
        """
        for worker in range(WORKERS):
            for incarnation in (0, 1):
                yield self._message(_opened(worker, incarnation), worker, incarnation)
                if incarnation == 0:
                    yield self._message(_left(worker), worker, incarnation)
        for begin in range(0, artifacts, AT_ONCE):
            yield from _in_turn(map(self._artifact, range(begin, min(begin + AT_ONCE, artifacts))))

    def put(self, n: int) -> Message:
        """One more artifact, as the first fact of :meth:`messages` about it."""
        return self._message(_put(_id(n), n, f"models/{n}"), n % WORKERS)

    def _artifact(self, n: int) -> Iterator[Message]:
        author, key = n % WORKERS, f"models/{n % 97}/{n}"
        artifact = ArtifactId(f"tbr:{n:040x}") if n % 5 == 4 else _id(n)
        if n % 5 == 4:
            yield self._message(_registered(artifact, n, key), author)
            yield self._message(_digested(artifact, n), author)
        else:
            yield self._message(_put(artifact, n, key), author)
        yield self._message(KeyBound(tenant=TENANT, key=key, artifact=artifact, rebind=False), author)
        if n % 10 == 0:
            yield self._message(self._version(artifact, n), author)
        if n % 20 == 2:
            yield from self._view(artifact, n, author)
        for worker in ((author + more) % WORKERS for more in range(1, REPLICAS_EACH)):
            yield self._replica(artifact, n, worker)
        if n % 10 == 1:
            yield from self._pin(artifact, n, author)
        if n % 20 == 3:
            yield from self._dropped(artifact, n, (author + 1) % WORKERS)
        if n % 10 == 5:
            yield from self._passing(n, author)

    def _version(self, artifact: ArtifactId, n: int) -> VersionPublished:
        name = f"policy/{n % 7}"
        self._series[name] = self._series.get(name, 0) + 1
        return VersionPublished(tenant=TENANT, name=name, version=self._series[name], artifact=artifact)

    def _view(self, artifact: ArtifactId, n: int, author: int) -> Iterator[Message]:
        view = ArtifactId(f"tbv:{n:064x}")
        text = f'{{"base":"{artifact}","rows":[0,{n}]}}'
        yield self._message(ViewDefined(tenant=TENANT, artifact=artifact, view=view, definition=text), author)
        yield self._replica(artifact, n, author, view=view)

    def _pin(self, artifact: ArtifactId, n: int, worker: int) -> Iterator[Message]:
        lease = LeaseId(f"{n:024x}")
        granted = CallerLeaseGranted(
            tenant=TENANT, artifact=artifact, lease=lease, purpose=LeasePurpose.PIN, holder=f"c{n}", ttl_ns=None,
            number=self._number(worker),
        )  # fmt: skip
        yield self._message(granted, worker)
        ended = CallerLeaseEnded(
            tenant=TENANT, artifact=artifact, lease=lease, reason=LeaseEnd.RELEASED, number=self._number(worker)
        )
        yield self._message(ended, worker)

    def _dropped(self, artifact: ArtifactId, n: int, worker: int) -> Iterator[Message]:
        dropped = ReplicaDropped(
            tenant=TENANT, artifact=artifact, view=None, tier=Tier.DRAM, reason=DropReason.EVICTED,
            number=self._number(worker),
        )  # fmt: skip
        yield self._message(dropped, worker)
        yield self._replica(artifact, n, worker)

    def _passing(self, n: int, worker: int) -> Iterator[Message]:
        artifact, key = ArtifactId(f"tb1:f{n:063x}"), f"scratch/{n}"
        yield self._message(_put(artifact, n, key), worker)
        yield self._message(KeyBound(tenant=TENANT, key=key, artifact=artifact, rebind=False), worker)
        destroyed = ArtifactDestroyed(
            tenant=TENANT, artifact=artifact, reason=DestroyReason.ASKED, keys=(key,), versions=()
        )
        yield self._message(destroyed, worker)

    def _replica(self, artifact: ArtifactId, n: int, worker: int, *, view: ArtifactId | None = None) -> Message:
        added = ReplicaAdded(
            tenant=TENANT, artifact=artifact, view=view, tier=Tier.DRAM, nbytes=MIB + n, number=self._number(worker)
        )
        return self._message(added, worker)

    def _number(self, worker: int) -> int:
        self._numbers[worker] += 1
        return self._numbers[worker]

    def _message(self, fact: Event, worker: int, incarnation: int = 1) -> Message:
        self.seq += 1
        about, author = aggregate_of(fact), _name(worker)
        headers = Headers(
            event_id=EventId(f"{self.seq:032x}"),
            author=author,
            incarnation=_life(worker, incarnation),
            principal=f"caller-{worker}",
            expected=self._heads.get(about, 0) if about.contested else None,
        )
        if about.contested:
            self._heads[about] = self.seq
        wire = headers_to_wire(headers, type_name=fact.type, fence=self.subjects.fence(about))
        return Message(self.seq, self.seq * 1000, self.subjects.fact(about, author), wire, encode(fact))


def _in_turn(tales: Iterable[Iterator[Message]]) -> Iterator[Message]:
    """One message of each in turn, until all are told."""
    going = list(tales)
    while going:
        following = []
        for tale in going:
            message = next(tale, None)
            if message is not None:
                yield message
                following.append(tale)
        going = following


def _name(worker: int) -> WorkerId:
    return WorkerId(f"worker-{worker:03}")


def _life(worker: int, incarnation: int) -> Incarnation:
    return Incarnation(f"{incarnation:08x}{worker:08x}")


def _id(n: int) -> ArtifactId:
    return ArtifactId(f"tb1:{n:064x}")


def _manifest(n: int) -> ManifestRef:
    """Every fourth is large, as a model's is."""
    if n % 4 == 0:
        return ManifestRef(blob=BlobRef(digest=f"{n:064x}", nbytes=20_000, chunks=1, author=_name(n % WORKERS)))
    return ManifestRef(inline=_MANIFEST % (n, n))


def _put(artifact: ArtifactId, n: int, key: str) -> ArtifactPut:
    return ArtifactPut(
        tenant=TENANT, artifact=artifact, digest=artifact, nbytes=MIB + n, tensors=2, manifest=_manifest(n),
        tier=Tier.DRAM, key=key,
    )  # fmt: skip


def _registered(artifact: ArtifactId, n: int, key: str) -> ArtifactRegistered:
    return ArtifactRegistered(
        tenant=TENANT, artifact=artifact, digest=None, nbytes=MIB + n, tensors=2, manifest=_manifest(n),
        tier=Tier.DRAM, key=key, lease=LeaseId(f"{n:023x}e"), holder=f"c{n}", ttl_ns=15_000_000_000,
    )  # fmt: skip


def _digested(artifact: ArtifactId, n: int) -> ArtifactDigested:
    return ArtifactDigested(tenant=TENANT, artifact=artifact, digest=_id(n), manifest=_manifest(n))


def _opened(worker: int, incarnation: int) -> SessionOpened:
    return SessionOpened(
        worker=_name(worker), incarnation=_life(worker, incarnation), host=f"host-{worker}", roles=("basic",),
        data="127.0.0.1:7001", control="", pool_bytes=1 << 36, ttl_ns=15_000_000_000, pid=1, version="0.1.0",
    )  # fmt: skip


def _left(worker: int) -> SessionEnded:
    return SessionEnded(worker=_name(worker), incarnation=_life(worker, 0), reason=SessionEnd.LEFT)
