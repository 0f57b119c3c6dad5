"""Logs for tests: one that gives sequences and heads as the server does, short names for facts, random histories."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis import strategies as st

from tensorbus.events import (
    STORE_ROLE,
    AnyRecorded,
    Archived,
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
    FoldRaised,
    Headers,
    KeyBound,
    KeyUnbound,
    LeaseEnd,
    LeasePurpose,
    LogPurged,
    LogTruncated,
    ManifestRef,
    OperationEnded,
    OperationOutcome,
    OperationStarted,
    PurgeCompleted,
    QuarantineCause,
    Recorded,
    ReplicaAdded,
    ReplicaDropped,
    ReplicaQuarantined,
    RoleGranted,
    RoleResigned,
    SessionEnd,
    SessionEnded,
    SessionOpened,
    ShardsFixed,
    SnapshotTaken,
    StreamPosition,
    Tier,
    UnknownEvent,
    VersionPublished,
    ViewDefined,
    aggregate_of,
)
from tensorbus.ids import ArtifactId, EventId, Incarnation, LeaseId, WorkerId
from tensorbus.lifecycle import Directory, Verdict

T = "acme"
W1, W2, W3 = WorkerId("w1"), WorkerId("w2"), WorkerId("w3")
FIRST, SECOND = Incarnation("1" * 16), Incarnation("2" * 16)
X, Y = ArtifactId("x"), ArtifactId("y")
D1, D2 = ArtifactId("tb1:" + "1" * 64), ArtifactId("tb1:" + "2" * 64)
V1, V2 = ArtifactId("tbv:1"), ArtifactId("tbv:2")
L1, L2 = LeaseId("lease1"), LeaseId("lease2")
MANIFEST = ManifestRef(inline="{}")


@dataclass
class Log:
    """Appends as the server and a well-behaved author do; every argument can be bent."""

    state: Directory = field(default_factory=Directory)
    messages: list[AnyRecorded] = field(default_factory=list)

    def append(
        self,
        event: Event | UnknownEvent,
        author: WorkerId = W1,
        incarnation: Incarnation = FIRST,
        *,
        expected: int | None = -1,
        subject: str | None = None,
        skip: int = 0,
        token: int | None = None,
    ) -> Verdict:
        """Put a message on the log and fold it. ``expected=-1`` names the aggregate's head, as it should."""
        if isinstance(event, UnknownEvent):
            subject = subject or f"tb.ev.artifact.{'a' * 32}.{author}"
        else:
            about = aggregate_of(event)
            subject = subject or self.state.subjects.fact(about, author)
            if expected == -1:
                expected = None if about.guard is None else self.state.head(about.guard)
            token = (expected or 0) if about.fenced and token is None else token
        seq = self.state.seq + 1 + skip
        headers = Headers(
            event_id=EventId(f"{seq:032x}"),
            author=author,
            incarnation=incarnation,
            principal="me",
            token=token or 0,
            expected=expected,
        )
        message: Any = Recorded(seq, 1_000 * seq, subject, headers, event)
        self.messages.append(message)
        return self.state.apply(message)

    def open(self, worker: WorkerId = W1, incarnation: Incarnation = FIRST) -> Verdict:
        return self.append(opened(worker, incarnation), worker, incarnation)

    def say(
        self, make: Callable[..., Event], worker: WorkerId = W1, incarnation: Incarnation = FIRST, **what: Any
    ) -> Verdict:
        """Append a fact under the worker's next running number."""
        return self.append(make(number=self.state.sessions[worker].number + 1, **what), worker, incarnation)


def opened(worker: WorkerId = W1, incarnation: Incarnation = FIRST) -> SessionOpened:
    return SessionOpened(
        worker=worker,
        incarnation=incarnation,
        host=f"host-of-{worker}",
        roles=("basic",),
        data="127.0.0.1:7001",
        control="",
        pool_bytes=1 << 30,
        ttl_ns=2_000_000_000,
        pid=4711,
        version="0.1.0",
    )


def ended(worker: WorkerId = W1, incarnation: Incarnation = FIRST) -> SessionEnded:
    return SessionEnded(worker=worker, incarnation=incarnation, reason=SessionEnd.EXPIRED)


def put(
    artifact: ArtifactId = X, digest: str | None = D1, *, key: str | None = None, tier: Tier = Tier.DRAM
) -> ArtifactPut:
    return ArtifactPut(
        tenant=T, artifact=artifact, digest=digest, nbytes=64, tensors=2, manifest=MANIFEST, tier=tier, key=key
    )


def registered(
    artifact: ArtifactId = X, digest: str | None = None, lease: LeaseId = L1, *, key: str | None = None
) -> ArtifactRegistered:
    return ArtifactRegistered(
        tenant=T,
        artifact=artifact,
        digest=digest,
        nbytes=64,
        tensors=2,
        manifest=ManifestRef(blob=BlobRef(digest="ab" * 32, nbytes=9_000, chunks=1, author=W1)),
        tier=Tier.DRAM,
        key=key,
        lease=lease,
        holder="caller-1",
        ttl_ns=30_000_000_000,
    )


def bound(key: str = "k", artifact: ArtifactId = X, *, rebind: bool = False) -> KeyBound:
    return KeyBound(tenant=T, key=key, artifact=artifact, rebind=rebind)


def unbound(key: str = "k", artifact: ArtifactId = X) -> KeyUnbound:
    return KeyUnbound(tenant=T, key=key, artifact=artifact)


def destroyed(artifact: ArtifactId = X, reason: DestroyReason = DestroyReason.ASKED) -> ArtifactDestroyed:
    return ArtifactDestroyed(tenant=T, artifact=artifact, reason=reason, keys=(), versions=())


def published(version: int, artifact: ArtifactId = X, name: str = "policy") -> VersionPublished:
    return VersionPublished(tenant=T, name=name, version=version, artifact=artifact)


def added(
    number: int, artifact: ArtifactId = X, *, view: ArtifactId | None = None, tier: Tier = Tier.DRAM
) -> ReplicaAdded:
    return ReplicaAdded(tenant=T, artifact=artifact, view=view, tier=tier, nbytes=64, number=number)


def dropped(
    number: int,
    artifact: ArtifactId = X,
    *,
    view: ArtifactId | None = None,
    tier: Tier = Tier.DRAM,
    reason: DropReason = DropReason.EVICTED,
) -> ReplicaDropped:
    return ReplicaDropped(tenant=T, artifact=artifact, view=view, tier=tier, reason=reason, number=number)


def quarantined(
    number: int,
    artifact: ArtifactId = X,
    *,
    view: ArtifactId | None = None,
    tier: Tier = Tier.DRAM,
    cause: QuarantineCause = QuarantineCause.VERIFY,
) -> ReplicaQuarantined:
    return ReplicaQuarantined(
        tenant=T, artifact=artifact, view=view, tier=tier, cause=cause, wrong=("w",), number=number
    )


def began(number: int, id: str = "op1", operation: str = "prefetch", artifact: ArtifactId = X) -> OperationStarted:
    return OperationStarted(tenant=T, id=id, operation=operation, artifact=artifact, args="{}", number=number)


def done(
    number: int, id: str = "op1", outcome: OperationOutcome = OperationOutcome.SUCCEEDED, *, error: str | None = None
) -> OperationEnded:
    return OperationEnded(
        tenant=T,
        id=id,
        outcome=outcome,
        error=error,
        result=None if error else '{"nbytes":64}',
        positions=(StreamPosition(stream="TB", seq=7),),
        number=number,
    )


def granted(number: int, artifact: ArtifactId = X, lease: LeaseId = L1) -> CallerLeaseGranted:
    return CallerLeaseGranted(
        tenant=T, artifact=artifact, lease=lease, purpose=LeasePurpose.PIN, holder="", ttl_ns=None, number=number
    )


def released(number: int, artifact: ArtifactId = X, lease: LeaseId = L1) -> CallerLeaseEnded:
    return CallerLeaseEnded(tenant=T, artifact=artifact, lease=lease, reason=LeaseEnd.RELEASED, number=number)


def view_defined(view: ArtifactId = V1, artifact: ArtifactId = X) -> ViewDefined:
    return ViewDefined(tenant=T, artifact=artifact, view=view, definition='{"names":["w"]}')


def digest_known(artifact: ArtifactId = X, digest: str = D1) -> ArtifactDigested:
    return ArtifactDigested(tenant=T, artifact=artifact, digest=digest, manifest=MANIFEST)


def snapshot(upto: int = 5) -> SnapshotTaken:
    blob = BlobRef(digest="cd" * 32, nbytes=900, chunks=1, author=W1)
    return SnapshotTaken(what="directory", upto=upto, fold=1, state_hash="ef" * 32, blob=blob)


def archived(first: int = 1, last: int = 4) -> Archived:
    return Archived(stream="TB", first=first, last=last, count=3, file="TB/1-4.parquet", digest="01" * 32, nbytes=512)


def purge(upto: int = 4, forget: int = 0) -> LogPurged:
    return LogPurged(stream="TB", upto=upto, snapshot=5, forget=forget, delay_ns=600_000_000_000)


def purged(upto: int = 4, forget: int = 0) -> PurgeCompleted:
    return PurgeCompleted(stream="TB", upto=upto, forget=forget)


def truncated(seq: int = 3, last: int = 2) -> LogTruncated:
    return LogTruncated(stream="TB", seq=seq, event_id="f" * 32, last=last)


# -- random histories: few names, so that they meet; mostly good manners, so that they get somewhere ----------------

workers = st.sampled_from((W1, W2))
incarnations = st.sampled_from((FIRST, SECOND))
artifacts = st.sampled_from((X, X, Y, D1))
digests = st.sampled_from((None, D1, D1, D2))
views = st.sampled_from((V1, V2))
leases = st.sampled_from((L1, L2))
tiers = st.sampled_from((Tier.DRAM, Tier.DISK, Tier.VRAM))
keys = st.sampled_from(("k", "a.b *>\n"))
number = st.integers(-1, 9)
operation_ids = st.sampled_from(("op1", "op2", "op3"))

facts: tuple[st.SearchStrategy[Event], ...] = (
    st.builds(put, artifacts, digests, tier=tiers),
    st.builds(registered, artifacts, digests, leases),
    st.builds(added, number, artifacts, view=st.none() | views, tier=tiers),
    st.builds(dropped, number, artifacts, view=st.none() | views, tier=tiers),
    st.builds(granted, number, artifacts, leases),
    st.builds(released, number, artifacts, leases),
    st.builds(digest_known, artifacts, st.sampled_from((D1, D2))),
    st.builds(view_defined, views, artifacts),
    st.builds(bound, keys, artifacts, rebind=st.booleans()),
    st.builds(unbound, keys, artifacts),
    st.builds(published, st.integers(0, 4), artifacts),
    st.builds(destroyed, artifacts, st.sampled_from(DestroyReason)),
    st.builds(opened, workers, incarnations),
    st.builds(ended, workers, incarnations),
    st.builds(began, number, operation_ids, st.sampled_from(("prefetch", "evict")), artifacts),
    st.builds(done, number, operation_ids, st.sampled_from(OperationOutcome), error=st.sampled_from((None, "{}"))),
    st.builds(dropped, number, artifacts, tier=tiers, reason=st.just(DropReason.ASKED)),
    st.builds(quarantined, number, artifacts, view=st.none() | views, tier=tiers),
)
store_facts: tuple[st.SearchStrategy[Event], ...] = (
    st.just(RoleGranted(role=STORE_ROLE)),
    st.just(RoleResigned(role=STORE_ROLE)),
    st.builds(snapshot, st.integers(0, 40)),
    st.builds(archived, st.integers(0, 9), st.integers(9, 40)),
    st.builds(purge, st.integers(0, 40), st.integers(0, 40)),
    st.builds(purged, st.integers(0, 40), st.integers(0, 40)),
    st.builds(truncated, st.integers(0, 9), st.integers(0, 40)),
)
fixed: st.SearchStrategy[Event] = st.builds(ShardsFixed, shards=st.sampled_from((1, 64)))
raised: st.SearchStrategy[Event] = st.builds(FoldRaised, stream=st.just("TB"), version=st.sampled_from((1, 2)))
WRONGS = (
    "number",
    "expected 0",
    "expected none",
    "another author",
    "another aggregate",
    "none of ours",
    "life",
    "token",
)


@dataclass(frozen=True)
class Step:
    """One message of a history, who says it, and in which way it is wrong, if it is."""

    event: Event | UnknownEvent
    author: WorkerId
    wrong: str
    skip: int


steps = st.builds(
    Step,
    event=st.one_of(
        *facts,
        *facts[:10],
        *facts,
        facts[5],
        facts[6],
        facts[9],
        facts[14],
        facts[15],
        facts[17],
        *store_facts,
        store_facts[5],
        st.one_of(raised, fixed, st.builds(UnknownEvent, st.just("FromTheFuture"))),
    ),
    author=workers,
    wrong=st.sampled_from(("",) * 30 + WRONGS),
    skip=st.sampled_from((0, 0, 0, 2)),
)


def write(history: list[Step]) -> Log:
    """The messages of a history on a log that has two sessions, three artifacts, a name and an operation to meet."""
    log = Log()
    log.open(W1)
    log.open(W2)
    log.append(put())
    log.append(bound())
    log.append(put(Y, None), W2)
    log.append(registered(D1, D1))
    log.append(RoleGranted(role=STORE_ROLE))
    log.say(began, W1)
    for step in history:
        _write(log, step)
    return log


def _write(log: Log, step: Step) -> None:
    event, state = step.event, log.state
    author = event.worker if isinstance(event, SessionOpened) else step.author
    session = state.sessions.get(author)  # none, if its end was forgotten
    incarnation = FIRST if session is None else session.incarnation
    if isinstance(event, SessionOpened):
        incarnation = event.incarnation
    if step.wrong != "number":
        event = in_line(event, state, session.number + 1 if session else 1)
    if step.wrong == "life":
        incarnation = Incarnation("3" * 16)
    expected = {"expected 0": 0, "expected none": None}.get(step.wrong, -1)
    token = 7 if step.wrong == "token" else None
    bent = _bent(event, state, step)
    log.append(event, author, incarnation, expected=expected, subject=bent, skip=step.skip, token=token)


def in_line(event: Event | UnknownEvent, state: Directory, number: int) -> Event | UnknownEvent:
    if isinstance(
        event,
        ReplicaAdded
        | ReplicaDropped
        | ReplicaQuarantined
        | CallerLeaseGranted
        | CallerLeaseEnded
        | OperationStarted
        | OperationEnded,
    ):
        return replace(event, number=number)
    if isinstance(event, VersionPublished):
        series = state.one_series(T, event.name)
        return replace(event, version=series.last + 1 if series else 1)
    if isinstance(event, Archived) and state.log.archived:
        return replace(event, first=state.log.archived + 1, last=state.log.archived + event.last)
    if isinstance(event, PurgeCompleted) and state.log.announced:
        return replace(event, upto=state.log.announced.upto, forget=state.log.announced.forget)
    return event


def _bent(event: Event | UnknownEvent, state: Directory, step: Step) -> str | None:
    if step.wrong == "another author" and not isinstance(event, UnknownEvent):
        return state.subjects.fact(aggregate_of(event), WorkerId("somebody"))
    if step.wrong == "another aggregate":
        return state.subjects.fact(aggregate_of(put(Y)), step.author)
    return "other.prefix" if step.wrong == "none of ours" else None


histories: st.SearchStrategy[Log] = (
    st.integers(0, 40).flatmap(lambda length: st.lists(steps, min_size=length, max_size=length)).map(write)
)


def fold(messages: list[AnyRecorded]) -> Directory:
    state = Directory()
    for message in messages:
        state.apply(message)
    return state


def everything(state: Directory) -> dict[str, Any]:
    """All that a state holds, for comparison, but how its hash is kept."""
    return {name: repr(value) for name, value in vars(state).items() if name not in ("_hash", "subjects")}


def batches(messages: list[AnyRecorded], cuts: list[int]) -> Iterator[list[AnyRecorded]]:
    at = 0
    for cut in sorted(cut % (len(messages) + 1) for cut in cuts):
        yield messages[at:cut]
        at = max(at, cut)
    yield messages[at:]
