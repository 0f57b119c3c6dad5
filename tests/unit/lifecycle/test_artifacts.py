"""The life of an artifact: born by a put or a register, held by replicas, ended by a fact that says why."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tensorbus.errors import ConflictError, NotFoundError
from tensorbus.events import ArtifactDestroyed, DestroyReason, Tier, encode
from tensorbus.ids import ArtifactId
from tensorbus.lifecycle import ReplicaKey, Touched, rules
from tests.unit.lifecycle import history as h


@pytest.fixture
def log() -> h.Log:
    log = h.Log()
    log.open(h.W1)
    log.open(h.W2)
    return log


def record(log: h.Log, artifact: h.ArtifactId = h.X) -> h.Any:
    found = log.state.artifact(h.T, artifact)
    assert found is not None
    return found


def why(log: h.Log, event: h.Event, author: h.WorkerId = h.W1) -> str:
    verdict = log.append(event, author)
    assert not verdict.kept
    return verdict.why


# -- birth -------------------------------------------------------------------------------------------------------------


def test_a_put_makes_the_artifact_and_its_first_replica_and_the_key_follows(log: h.Log) -> None:
    assert log.append(h.put(key="k")).touched == (Touched("artifact", h.T, h.X),)
    assert list(record(log).replicas) == [ReplicaKey(h.W1, None, Tier.DRAM)]
    assert log.state.key(h.T, "k") is None
    assert log.append(h.bound("k")).kept
    assert rules.resolve(log.state, tenant=h.T, ref="k") is record(log)


def test_a_taken_id_with_the_same_bytes_is_the_artifact_that_is_there(log: h.Log) -> None:
    log.append(h.put())
    assert rules.birth(log.state, h.put()) == rules.Existing(h.X)
    assert why(log, h.put(), h.W2) == "conflict"


@pytest.mark.parametrize("digest", [h.D2, None])
def test_a_taken_id_with_other_bytes_or_unknown_ones_conflicts(log: h.Log, digest: str | None) -> None:
    log.append(h.put())
    with pytest.raises(ConflictError, match="taken by other bytes") as caught:
        rules.birth(log.state, h.put(digest=digest))
    assert caught.value.details == {"artifact": h.X, "digest": h.D1, "asked": digest}
    assert why(log, h.put(digest=digest)) == "conflict"


def test_two_artifacts_without_digest_cannot_be_told_to_be_equal(log: h.Log) -> None:
    log.append(h.put(digest=None))
    with pytest.raises(ConflictError, match="not known"):
        rules.birth(log.state, h.put(digest=None))


def test_a_destroyed_id_lives_again_only_with_the_bytes_it_had(log: h.Log) -> None:
    log.append(h.put())
    log.append(h.destroyed())
    with pytest.raises(ConflictError, match="never reused"):
        rules.birth(log.state, h.put(digest=h.D2))
    assert why(log, h.put(digest=h.D2)) == "conflict"
    again = h.put()
    assert rules.birth(log.state, again) == again
    assert log.append(again, h.W2).kept
    assert list(record(log).replicas) == [ReplicaKey(h.W2, None, Tier.DRAM)]


def test_an_id_that_ended_before_its_digest_was_known_never_comes_back(log: h.Log) -> None:
    log.append(h.put(digest=None))
    log.append(h.destroyed())
    assert why(log, h.put(digest=h.D1)) == "conflict"


def test_a_content_id_finds_what_was_linked_to_it_later(log: h.Log) -> None:
    log.append(h.put(h.Y, None))
    assert log.state.artifact(h.T, h.D1) is None
    assert log.append(h.digest_known(h.Y, h.D1)).kept
    assert log.state.artifact(h.T, h.D1) is record(log, h.Y)


def test_a_put_by_content_joins_a_random_id_and_never_one_that_a_caller_gave(log: h.Log) -> None:
    log.append(h.put(h.Y, h.D1))
    assert rules.birth(log.state, h.put(h.D1, h.D1)) == h.put(h.D1, h.D1)
    random = ArtifactId("tbr:" + "5" * 40)
    log.append(h.put(random, None))
    log.append(h.digest_known(random, h.D2))
    assert rules.birth(log.state, h.put(h.D2, h.D2)) == rules.Existing(random)


def test_a_put_of_the_same_bytes_under_the_same_key_is_a_repetition(log: h.Log) -> None:
    log.append(h.put(h.Y, h.D1))
    log.append(h.bound("k", h.Y))
    assert rules.named_with_bytes(log.state, tenant=h.T, key="k", digest=h.D1) == h.Y
    assert rules.named_with_bytes(log.state, tenant=h.T, key="k", digest=h.D2) is None
    assert rules.named_with_bytes(log.state, tenant=h.T, key="other", digest=h.D1) is None


def test_a_digest_is_said_once(log: h.Log) -> None:
    log.append(h.put(h.Y, None))
    log.append(h.digest_known(h.Y, h.D1))
    assert rules.digested(log.state, tenant=h.T, artifact=h.Y, digest=h.D1, manifest=h.MANIFEST) is None
    assert why(log, h.digest_known(h.Y, h.D1)) == "duplicate"
    assert why(log, h.digest_known(h.Y, h.D2)) == "conflict"


def test_tenants_never_meet(log: h.Log) -> None:
    log.append(h.put())
    assert log.append(replace(h.put(digest=h.D2), tenant="other")).kept
    assert log.state.artifact("third", h.X) is None


# -- replicas and leases -----------------------------------------------------------------------------------------------


def test_each_worker_and_tier_has_one_replica_of_the_whole_and_of_each_view(log: h.Log) -> None:
    log.append(h.put())
    assert why_said(log, h.added, view=h.V1) == "missing"
    log.append(h.view_defined())
    for what in ({}, {"view": h.V1}, {"tier": Tier.DISK}, {}):
        assert log.say(h.added, h.W2, **what).kept
    assert len(record(log).replicas) == 4
    assert rules.resolve(log.state, tenant=h.T, ref=h.V1) is record(log)


def why_said(log: h.Log, make: h.Any, author: h.WorkerId = h.W1, **what: object) -> str:
    verdict = log.say(make, author, **what)
    assert not verdict.kept
    return verdict.why


def test_the_last_replica_that_goes_leaves_an_orphan_for_the_witness(log: h.Log) -> None:
    log.append(h.put())
    log.say(h.added, h.W2)
    log.say(h.dropped, h.W1)
    assert not log.state.orphans
    log.say(h.dropped, h.W2)
    assert log.state.owed_by_witness() == [record(log)]
    log.say(h.added, h.W2)
    assert not log.state.orphans


def test_lost_is_not_lost_while_a_replica_is_held(log: h.Log) -> None:
    log.append(h.put())
    assert rules.destroy(log.state, tenant=h.T, artifact=h.X, reason=DestroyReason.LOST) is None
    assert why(log, h.destroyed(reason=DestroyReason.LOST)) == "held"
    assert why(log, h.destroyed(reason=DestroyReason.LEASE_ENDED)) == "held"
    assert log.append(h.destroyed(reason=DestroyReason.ASKED)).kept


def test_a_put_that_is_given_up_leaves_what_others_built_on_it(log: h.Log) -> None:
    given_up = h.destroyed(reason=DestroyReason.ABANDONED)
    log.append(h.put())
    log.append(h.bound("k", h.X))
    assert why(log, given_up) == "held"
    log.append(h.unbound("k", h.X))
    log.append(h.published(1, h.X))
    assert rules.destroy(log.state, tenant=h.T, artifact=h.X, reason=DestroyReason.ABANDONED) is None
    log.append(h.put(h.Y, h.D2))
    assert log.append(h.destroyed(h.Y, DestroyReason.ABANDONED)).kept


def test_the_end_of_a_callers_lease_drops_the_callers_replica_only(log: h.Log) -> None:
    log.append(h.registered())
    log.say(h.added, h.W2)
    assert log.say(h.released).kept
    assert list(record(log).replicas) == [ReplicaKey(h.W2, None, Tier.DRAM)]
    assert record(log).leases == {}


def test_the_end_of_the_last_lease_is_owed_by_the_worker_that_granted_it(log: h.Log) -> None:
    log.append(h.registered())
    log.say(h.released)
    assert log.state.orphans == {(h.T, h.X): (h.W1, h.FIRST)}
    assert log.state.owed_by_witness() == []
    log.append(h.ended(h.W1), h.W2)
    assert log.state.owed_by_witness() == [record(log)]


def test_a_pin_keeps_no_replica_and_ends_alone(log: h.Log) -> None:
    log.append(h.put())
    log.say(h.granted)
    log.say(h.released)
    assert len(record(log).replicas) == 1
    assert why_said(log, h.released) == "missing"


def test_a_lease_is_ended_by_who_granted_it_and_taken_over_by_nobody(log: h.Log) -> None:
    log.append(h.registered())
    assert why_said(log, h.granted, h.W2) == "conflict"
    assert why_said(log, h.granted, h.W1) == "duplicate"
    assert why_said(log, h.released, h.W2) == "missing"
    assert record(log).leases[h.L1].purpose == "register"


# -- the end -----------------------------------------------------------------------------------------------------------


def test_destroying_ends_names_replicas_leases_and_views_with_the_artifact(log: h.Log) -> None:
    log.append(h.put())
    log.append(h.bound("k"))
    log.append(h.published(1))
    log.append(h.view_defined())
    log.say(h.granted)
    fact = rules.destroy(log.state, tenant=h.T, artifact=h.X, reason=DestroyReason.ASKED)
    assert fact == replace(h.destroyed(), keys=("k",), versions=("policy@1",))
    touched = log.append(fact).touched
    assert {(t.kind, t.name) for t in touched} == {("artifact", "x"), ("key", "k"), ("series", "policy")}
    ended = record(log)
    assert (ended.replicas, ended.leases, ended.views, ended.keys, ended.versions) == ({}, {}, {}, {}, {})
    assert (log.state.by_worker, log.state.by_lessor, log.state.by_view, log.state.by_digest) == ({}, {}, {}, {})
    assert rules.destroy(log.state, tenant=h.T, artifact=h.X, reason=DestroyReason.ASKED) is None


def test_destroying_twice_ends_one_artifact(log: h.Log) -> None:
    """Found by random commands: a repeated destroy of a content id went on to the next artifact with the same bytes."""
    log.append(h.put(h.D1, h.D1))
    log.append(h.put(h.X, h.D1), h.W2)
    fact = rules.destroy(log.state, tenant=h.T, artifact=h.D1, reason=DestroyReason.ASKED)
    assert fact == h.destroyed(h.D1)
    log.append(fact)
    assert rules.destroy(log.state, tenant=h.T, artifact=h.D1, reason=DestroyReason.ASKED) is None
    assert log.state.artifact(h.T, h.D1) is record(log, h.X)
    with pytest.raises(NotFoundError, match="there is no artifact 'y'"):
        rules.destroy(log.state, tenant=h.T, artifact=h.Y, reason=DestroyReason.ASKED)


def test_what_comes_after_the_end_does_not_count(log: h.Log) -> None:
    log.append(h.put())
    log.append(h.destroyed())
    assert why_said(log, h.added) == "destroyed"
    assert why(log, h.view_defined()) == "destroyed"
    assert why(log, h.destroyed()) == "destroyed"
    assert why(log, h.destroyed(h.Y)) == "missing"


def test_an_artifact_with_a_thousand_long_names_can_still_be_destroyed(log: h.Log) -> None:
    """A list of all its names would not fit into a fact, and the artifact would stay for ever."""
    log.append(h.put())
    for number in range(1000):
        log.append(h.bound(f"{number:04}" + "\n" * 1020))
    fact = rules.destroy(log.state, tenant=h.T, artifact=h.X, reason=DestroyReason.ASKED)
    assert isinstance(fact, ArtifactDestroyed)
    assert 0 < len(fact.keys) < 1000
    encode(fact)
    log.append(fact)
    assert not any(key.artifact for key in log.state.keys.values())


@pytest.mark.parametrize(
    ("reason", "fate"),
    [
        (DestroyReason.ASKED, "it was destroyed"),
        (DestroyReason.LOST, "lost with the last worker that held it"),
        (DestroyReason.LEASE_ENDED, "ended with its caller's lease"),
        (DestroyReason.ABANDONED, "its put was abandoned"),
    ],
)
def test_not_found_says_what_became_of_an_id(log: h.Log, reason: DestroyReason, fate: str) -> None:
    log.append(h.registered())
    log.say(h.released)
    end = log.append(h.destroyed(reason=reason))
    assert end.kept
    with pytest.raises(NotFoundError, match=fate) as caught:
        rules.live_artifact(log.state, tenant=h.T, artifact=h.X)
    assert caught.value.details == {"artifact": h.X, "reason": reason, "position": {"TB": log.state.seq}}


def test_a_view_has_one_base(log: h.Log) -> None:
    log.append(h.put())
    log.append(h.put(h.Y, h.D2))
    log.append(h.view_defined(h.V1, h.X))
    with pytest.raises(ConflictError, match="taken by a view of 'x'"):
        rules.define_view(log.state, tenant=h.T, artifact=h.Y, view=h.V1, definition="{}")
    assert why(log, h.view_defined(h.V1, h.Y)) == "conflict"
    log.append(h.destroyed(h.X))
    assert log.append(h.view_defined(h.V1, h.Y)).kept
