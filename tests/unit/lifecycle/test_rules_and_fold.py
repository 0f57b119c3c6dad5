"""Rules and fold agree: what a rule returns on a state is kept by the fold when it is the next message."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tensorbus.errors import ConflictError, NotFoundError
from tensorbus.events import EVENT_TYPES, DestroyReason, Event, SessionEnd
from tensorbus.ids import WorkerId
from tensorbus.lifecycle import Directory, rules
from tests.unit.lifecycle import history as h

Command = Callable[[Directory], object]
"""A rule with all arguments but the state."""


def birth(fact: Event) -> Command:
    return lambda state: rules.birth(state, fact)  # type: ignore[arg-type]  # drawn from the two facts of a birth


def bind(key: str, artifact: h.ArtifactId, rebind: bool) -> Command:
    return lambda state: rules.bind(state, tenant=h.T, key=key, artifact=artifact, rebind=rebind)


def unbind(key: str) -> Command:
    return lambda state: rules.unbind(state, tenant=h.T, key=key)


def destroy(artifact: h.ArtifactId, reason: DestroyReason) -> Command:
    return lambda state: rules.destroy(state, tenant=h.T, artifact=artifact, reason=reason)


def digested(artifact: h.ArtifactId, digest: str) -> Command:
    return lambda state: rules.digested(state, tenant=h.T, artifact=artifact, digest=digest, manifest=h.MANIFEST)


def define_view(artifact: h.ArtifactId, view: h.ArtifactId) -> Command:
    return lambda state: rules.define_view(state, tenant=h.T, artifact=artifact, view=view, definition="{}")


def publish(artifact: h.ArtifactId) -> Command:
    return lambda state: rules.publish(state, tenant=h.T, name="policy", artifact=artifact)


def end_session(worker: WorkerId, incarnation: h.Incarnation) -> Command:
    return lambda state: rules.end_session(state, worker=worker, incarnation=incarnation, reason=SessionEnd.EXPIRED)


ids = st.sampled_from((h.X, h.Y, h.D1, h.D2))
commands = st.one_of(
    st.builds(birth, st.builds(h.put, ids, h.digests)),
    st.builds(birth, st.builds(h.registered, ids, h.digests, h.leases)),
    st.builds(bind, h.keys, ids, st.booleans()),
    st.builds(unbind, h.keys),
    st.builds(destroy, ids, st.sampled_from(DestroyReason)),
    st.builds(digested, ids, st.sampled_from((h.D1, h.D2))),
    st.builds(define_view, ids, h.views),
    st.builds(publish, ids),
    st.builds(end_session, h.workers, h.incarnations),
)
said = st.one_of(*h.facts[2:6])  # what needs no rule, as only its author can say it


@given(h.histories, st.lists(st.tuples(h.workers, commands | said), max_size=25))
@settings(max_examples=100)
def test_what_a_rule_returns_is_kept_when_it_is_next(log: h.Log, asked: list[tuple[WorkerId, Command | Event]]) -> None:
    assume(not log.state.unknown)  # else its author writes nothing
    for worker, what in asked:
        session = log.state.sessions.get(worker)
        if session is None or not session.live:
            fresh = h.Incarnation(f"{log.state.seq:016x}")
            assert log.open(worker, fresh).kept
            session = log.state.sessions[worker]
        if isinstance(what, Event):
            log.append(h.in_line(what, log.state, session.number + 1), worker, session.incarnation)
            continue
        try:
            fact = what(log.state)
        except (ConflictError, NotFoundError):
            continue  # a refusal is an answer; that it is the right one is told by the examples
        if isinstance(fact, Event):
            verdict = log.append(fact, worker, session.incarnation)
            assert verdict.kept, f"{fact} was dropped: {verdict.why}"
            assert verdict.touched
            log.state.validate()


@given(h.histories, commands)
def test_a_rule_asked_again_after_its_fact_proposes_nothing_new(log: h.Log, command: Command) -> None:
    """So a caller that lost the answer may ask again, except where each call counts: versions, and unbinding."""
    assume(not log.state.unknown)
    try:
        fact = command(log.state)
    except (ConflictError, NotFoundError):
        return
    author = next(log.state.live_sessions(), None)
    if author is None or not isinstance(fact, Event) or fact.type in ("VersionPublished", "KeyUnbound"):
        return
    assert log.append(fact, author.worker, author.incarnation).kept
    undecidable = fact.type in ("ArtifactPut", "ArtifactRegistered") and getattr(fact, "digest", None) is None
    try:
        assert not isinstance(command(log.state), Event)
    except ConflictError:
        assert undecidable  # other bytes or the same ones: without a digest nobody can tell


@given(h.histories)
def test_rules_change_nothing(log: h.Log) -> None:
    before = h.everything(log.state)
    for command in (bind("k", h.X, True), destroy(h.X, DestroyReason.ASKED), publish(h.X), define_view(h.X, h.V1)):
        try:
            command(log.state)
        except (ConflictError, NotFoundError):
            continue
    assert h.everything(log.state) == before


def test_every_fact_is_either_said_by_its_author_or_decided_by_a_rule() -> None:
    by_rule = {
        "ArtifactPut",
        "ArtifactRegistered",
        "ArtifactDigested",
        "ArtifactDestroyed",
        "ViewDefined",
        "KeyBound",
        "KeyUnbound",
        "VersionPublished",
        "SessionEnded",
        "RoleGranted",
        "RoleResigned",
        "LogTruncated",
        "ShardsFixed",
    }
    by_keeper = {"SnapshotTaken", "Archived", "LogPurged", "PurgeCompleted"}
    by_operator = {"FoldRaised"}
    by_author = {"ReplicaAdded", "ReplicaDropped", "CallerLeaseGranted", "CallerLeaseEnded", "SessionOpened"}
    by_author |= {"ReplicaQuarantined", "OperationStarted", "OperationEnded"}
    assert by_rule | by_author | by_keeper | by_operator == {cls.__name__ for cls in EVENT_TYPES}
