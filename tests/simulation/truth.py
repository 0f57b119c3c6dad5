"""What really happened on a simulated bus: every fact as it was stored, folded at once, and every heartbeat."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

from tensorbus.bus import MemoryCluster
from tensorbus.events import (
    MSG_ID,
    AnyRecorded,
    Archived,
    ArtifactDestroyed,
    ArtifactPut,
    ArtifactRegistered,
    CallerLeaseEnded,
    DestroyReason,
    Event,
    LogPurged,
    LogTruncated,
    PurgeCompleted,
    Recorded,
    ReplicaAdded,
    ReplicaDropped,
    ReplicaQuarantined,
    RoleGranted,
    RoleResigned,
    SessionEnd,
    SessionEnded,
    SessionOpened,
    VersionPublished,
)
from tensorbus.feeds import decode_one
from tensorbus.lifecycle import Directory, Verdict
from tensorbus.projections import LiveDirectory
from tensorbus.testing import World

Timeline = list[tuple[int, str | None]]


class Truth(MemoryCluster):
    """The shared log and live stream, with the books that the checks are made against."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world
        self.fold = Directory(self.subjects)
        self.hash_at = {0: self.fold.hash()}
        self.facts: dict[int, Recorded[Event]] = {}
        self.verdicts: dict[int, Verdict] = {}
        self.beats: dict[tuple[str, str], list[float]] = defaultdict(list)
        self.beat_s: dict[int, float] = {}
        self.bound: dict[str, Timeline] = defaultdict(list)
        self.lived: dict[str, Timeline] = defaultdict(list)

    def store(self, subject: str, data: bytes, headers: Mapping[str, str]) -> int:
        before = self.log.last_seq
        seq = super().store(subject, data, headers)
        if self.log.takes(subject):
            message = self.log.get(seq)
            if seq > before and message is not None and subject.startswith("tb.ev."):
                self._fold(decode_one(message))
        elif not self.pages.takes(subject) and seq not in self.beat_s:
            incarnation, worker = self.subjects.parse_live(subject)
            self.beat_s[seq] = self.world.loop.time()
            self.beats[worker, incarnation].append(self.beat_s[seq])
        return seq

    def truncate(self, last_seq: int) -> None:
        super().truncate(last_seq)
        self._fold_again()

    def lose(self, *, first_seq: int | None = None) -> None:
        super().lose(first_seq=first_seq)
        self._fold_again()

    def _fold_again(self) -> None:
        """The books are of the log as it is: what it lost never was."""
        self.world.note("lost", self.log.last_seq - 1_700_000_000_000_000)
        self.world.cover("fault.loss_of_log")
        self.fold = Directory(self.subjects)
        self.hash_at = {0: self.fold.hash()}
        for book in (self.facts, self.verdicts, self.bound, self.lived):
            book.clear()
        for message in self.log.after(0, "tb.ev.>", count_max=1 << 30):
            self._enter(decode_one(message))

    def _fold(self, recorded: AnyRecorded) -> None:
        verdict = self._enter(recorded)
        assert isinstance(recorded.event, Event)
        why = f" dropped: {verdict.why}" if verdict.why else ""
        if verdict.why:
            self.world.cover(f"dropped.{verdict.why}")
        else:
            self.world.cover(type(recorded.event).__name__)
        self.world.note(f"{recorded.seq - 1_700_000_000_000_000}", recorded.headers.author, _line(recorded.event), why)

    def _enter(self, recorded: AnyRecorded) -> Verdict:
        assert isinstance(recorded.event, Event), f"nobody writes what cannot be read: {recorded}"
        seq = recorded.seq
        self.facts[seq] = recorded
        verdict = self.verdicts[seq] = self.fold.apply(recorded)
        self.hash_at[seq] = self.fold.hash()
        for touched in verdict.touched:
            if touched.kind == "key":
                artifact = self.fold.keys[touched.tenant, touched.name].artifact
                self.bound[touched.name].append((seq, artifact))
            elif touched.kind == "artifact":
                record = next(r for r in self.fold.artifacts.values() if r.artifact == touched.name)
                self.lived[touched.name].append((seq, "live" if record.live else None))
        return verdict

    # -- looking back -------------------------------------------------------------------------------------------------

    def during(self, timeline: Timeline, first: int, last: int) -> list[str | None]:
        """All that a name stood for at some position of a span."""
        start = bisect_right(timeline, first, key=lambda entry: entry[0])
        end = bisect_right(timeline, last, key=lambda entry: entry[0])
        before = timeline[start - 1][1] if start else None
        return [before, *(value for _, value in timeline[start:end])]

    def beats_between(self, worker: str, incarnation: str, first_s: float, last_s: float) -> list[float]:
        """When signs of life were stored, from ``first_s`` on and up to ``last_s``."""
        found = self.beats.get((worker, incarnation), [])
        return found[bisect_left(found, first_s) : bisect_right(found, last_s)]

    def kept(self) -> Iterable[Recorded[Event]]:
        return (fact for seq, fact in self.facts.items() if self.verdicts[seq].kept)

    # -- what must hold at the end ----------------------------------------------------------------------------------

    def check(self) -> None:
        """Check the log against what it means, by other means than the fold's."""
        self.fold.validate()
        assert self.fold.gaps == 0, "an author's running numbers have no holes"
        counts = Counter(fact.headers.event_id for fact in self.kept())
        assert counts.total() == len(counts), "each fact counts once"
        self._check_lives()
        self._check_versions()
        self._check_ends()

    def _check_lives(self) -> None:
        """Only the incarnation that the log last opened, and did not end, was heard."""
        present: dict[str, str | None] = {}
        for fact in self.kept():
            event, author = fact.event, fact.headers.author
            if isinstance(event, RoleGranted | RoleResigned | Archived | LogPurged | PurgeCompleted | LogTruncated):
                continue  # the newest grant says who keeps the log, and whoever missed something may say so
            if isinstance(event, SessionOpened):
                present[event.worker] = event.incarnation
            else:
                assert present.get(author) == fact.headers.incarnation, f"{author} was fenced before {fact}"
            if isinstance(event, SessionEnded):
                assert present[event.worker] == event.incarnation
                present[event.worker] = None

    def _check_versions(self) -> None:
        versions: dict[str, list[int]] = defaultdict(list)
        for fact in self.kept():
            if isinstance(fact.event, VersionPublished):
                versions[fact.event.name].append(fact.event.version)
        for name, numbers in versions.items():
            assert numbers == list(range(1, len(numbers) + 1)), f"versions of {name} are dense and in order"

    def _check_ends(self) -> None:
        """Nothing is lost, or ended with a lease, while a living worker still says that it holds it."""
        facts = list(self.kept())
        registrations = {fact.event.lease for fact in facts if isinstance(fact.event, ArtifactRegistered)}
        holders: dict[str, set[tuple[str, str]]] = defaultdict(set)
        for fact in facts:
            event, who = fact.event, (str(fact.headers.author), str(fact.headers.incarnation))
            match event:
                case ArtifactPut() | ArtifactRegistered():
                    holders[event.artifact] = {who}
                case ReplicaAdded():
                    holders[event.artifact].add(who)
                case ReplicaDropped() | ReplicaQuarantined():
                    holders[event.artifact].discard(who)
                case CallerLeaseEnded() if event.lease in registrations:
                    holders[event.artifact].discard(who)
                case SessionOpened() | SessionEnded():
                    for held in holders.values():
                        held.difference_update([one for one in held if one[0] == event.worker])
                case ArtifactDestroyed(reason=DestroyReason.LOST | DestroyReason.LEASE_ENDED):
                    assert not holders[event.artifact], f"{event} although it was held by {holders[event.artifact]}"

    def ended_by(self, reason: SessionEnd) -> list[SessionEnded]:
        """The kept ends of sessions for one reason."""
        ends = [fact.event for fact in self.kept() if isinstance(fact.event, SessionEnded)]
        return [end for end in ends if end.reason == reason]

    def stored_once(self) -> bool:
        """Whether no message of the log has the id of another, within the time that the server remembers ids."""
        ids = [m.headers[MSG_ID] for m in self.log.after(0, "tb.ev.>", count_max=1 << 30)]
        return len(ids) == len(set(ids))


class CheckedLive(LiveDirectory):
    """A worker's Directory that is compared with the log's own fold after each batch."""

    def __init__(self, truth: Truth) -> None:
        super().__init__(Directory(truth.subjects))
        self._truth = truth
        self._applied = 0

    def apply(self, batch: Iterable[AnyRecorded]) -> None:
        facts = list(batch)
        for recorded in facts:
            assert recorded.seq > self._applied, f"{recorded.seq} came again after {self._applied}"
            self._applied = recorded.seq
        super().apply(facts)
        now = self._truth.facts.get(self.state.seq)
        if now is None or now.headers.event_id != facts[-1].headers.event_id:
            return  # the log lost it, and this worker is about to hear of that
        assert self.state.hash() == self._truth.hash_at[self.state.seq], f"another state than the log's at {facts[-1]}"

    def replace(self, other: LiveDirectory) -> None:
        super().replace(other)
        self._applied = self.state.seq


def _line(event: Event) -> str:
    said = [type(event).__name__]
    for name in ("worker", "incarnation", "artifact", "key", "name", "version", "reason", "lease", "number"):
        value = getattr(event, name, None)
        if value is not None:
            said.append(f"{name}={str(value)[:16]}")
    return " ".join(said)
