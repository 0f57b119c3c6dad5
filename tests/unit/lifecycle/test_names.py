"""Keys and versions: names that come and go, and say what became of them."""

from __future__ import annotations

import pytest

from tensorbus.errors import ConflictError, NotFoundError
from tensorbus.events import DestroyReason
from tensorbus.lifecycle import rules
from tests.unit.lifecycle import history as h


@pytest.fixture
def log() -> h.Log:
    log = h.Log()
    log.open(h.W1)
    log.append(h.put(h.X, h.D1))
    log.append(h.put(h.Y, h.D2))
    return log


def bind(log: h.Log, artifact: h.ArtifactId, *, rebind: bool = False) -> object:
    return rules.bind(log.state, tenant=h.T, key="k", artifact=artifact, rebind=rebind)


def not_found(log: h.Log, ref: str, by: str = "any") -> NotFoundError:
    with pytest.raises(NotFoundError) as caught:
        rules.resolve(log.state, tenant=h.T, ref=ref, by=by)
    return caught.value


# -- keys --------------------------------------------------------------------------------------------------------------


def test_binding_a_key_to_what_it_names_is_success_and_no_fact(log: h.Log) -> None:
    assert bind(log, h.X) == h.bound("k", h.X)
    log.append(h.bound("k", h.X))
    assert bind(log, h.X) is None
    assert log.append(h.bound("k", h.X)).why == "duplicate"


def test_a_bound_key_moves_only_by_rebind(log: h.Log) -> None:
    log.append(h.bound("k", h.X))
    with pytest.raises(ConflictError, match="rebind=True") as caught:
        bind(log, h.Y)
    assert caught.value.details == {"key": "k", "artifact": h.X, "position": {"TB": log.state.seq}}
    assert log.append(h.bound("k", h.Y)).why == "conflict"
    fact = bind(log, h.Y, rebind=True)
    touched = log.append(fact).touched  # type: ignore[arg-type]  # a KeyBound, as the next lines say
    assert [t.name for t in touched] == ["k", "y", "x"]
    assert rules.resolve(log.state, tenant=h.T, ref="k").artifact == h.Y


def test_a_key_of_an_artifact_that_is_not_there_cannot_be_bound(log: h.Log) -> None:
    log.append(h.destroyed(h.X))
    for artifact in (h.X, h.ArtifactId("never")):
        with pytest.raises(NotFoundError):
            bind(log, artifact)
        assert log.append(h.bound("k", artifact)).why == "destroyed"


def test_unbinding_drops_the_name_and_keeps_the_artifact(log: h.Log) -> None:
    log.append(h.bound("k", h.X))
    fact = rules.unbind(log.state, tenant=h.T, key="k")
    assert log.append(fact).kept
    assert log.append(fact).why == "missing"
    assert rules.resolve(log.state, tenant=h.T, ref="x").live
    with pytest.raises(NotFoundError, match="it was unbound"):
        rules.unbind(log.state, tenant=h.T, key="k")


def test_an_unbinding_that_lost_the_race_with_a_rebinding_does_not_count(log: h.Log) -> None:
    log.append(h.bound("k", h.X))
    fact = rules.unbind(log.state, tenant=h.T, key="k")
    log.append(h.bound("k", h.Y, rebind=True))
    assert log.append(fact).why == "missing"


def test_a_key_is_found_before_a_given_id_and_by_says_which(log: h.Log) -> None:
    log.append(h.bound("x", h.Y))
    assert rules.resolve(log.state, tenant=h.T, ref="x").artifact == h.Y
    assert rules.resolve(log.state, tenant=h.T, ref="x", by="key").artifact == h.Y
    assert rules.resolve(log.state, tenant=h.T, ref="x", by="id").artifact == h.X
    assert rules.resolve(log.state, tenant=h.T, ref="y").artifact == h.Y
    assert not_found(log, "y", by="key").details == {"key": "y"}


@pytest.mark.parametrize(
    ("reason", "fate"),
    [
        (DestroyReason.ASKED, "its artifact was destroyed"),
        (DestroyReason.LOST, "its artifact was lost with the last worker that held it"),
        (DestroyReason.LEASE_ENDED, "its artifact ended with its caller's lease"),
    ],
)
def test_not_found_says_what_became_of_a_key(log: h.Log, reason: DestroyReason, fate: str) -> None:
    log.append(h.bound("k", h.X))
    log.say(h.dropped, artifact=h.X)
    log.append(h.destroyed(h.X, reason))
    error = not_found(log, "k")
    assert str(error) == f"key 'k' names nothing: {fate}"
    assert error.details == {"key": "k", "reason": reason}


def test_not_found_of_what_never_was_says_so(log: h.Log) -> None:
    assert str(not_found(log, "nobody")) == "nothing has the key or id 'nobody'"
    unknown = "tb1:" + "9" * 64
    assert str(not_found(log, unknown)) == f"there is no artifact {unknown!r}"


def test_a_key_that_lost_its_artifact_can_be_bound_again(log: h.Log) -> None:
    log.append(h.bound("k", h.X))
    log.append(h.destroyed(h.X))
    assert log.append(h.bound("k", h.Y)).kept


# -- versions ----------------------------------------------------------------------------------------------------------


def test_versions_count_from_one_without_a_hole(log: h.Log) -> None:
    for number in (1, 2):
        fact = rules.publish(log.state, tenant=h.T, name="policy", artifact=h.X)
        assert fact == h.published(number, h.X)
        log.append(fact)
    assert log.append(h.published(2, h.Y)).why == "conflict"
    assert log.append(h.published(4, h.Y)).why == "conflict"


def test_the_latest_version_is_the_newest_that_is_there(log: h.Log) -> None:
    log.append(h.published(1, h.X))
    log.append(h.published(2, h.Y))
    assert latest(log) == (2, h.Y)
    log.append(h.destroyed(h.Y))
    assert latest(log) == (1, h.X)
    assert rules.publish(log.state, tenant=h.T, name="policy", artifact=h.X).version == 3


def latest(log: h.Log) -> tuple[int, str]:
    number, record = rules.version(log.state, tenant=h.T, name="policy", number=None)
    return number, record.artifact


def test_a_missing_version_is_gone_or_never_was(log: h.Log) -> None:
    def says(number: int | None, name: str = "policy") -> str:
        with pytest.raises(NotFoundError) as caught:
            rules.version(log.state, tenant=h.T, name=name, number=number)
        return str(caught.value)

    log.append(h.published(1, h.X))
    assert says(2) == "there is no version 2 of 'policy'; the last is 1"
    assert says(0) == "there is no version 0 of 'policy'; the last is 1"
    log.append(h.destroyed(h.X))
    assert says(1) == "version 1 of 'policy' is gone: its artifact was destroyed"
    assert says(None) == "no version of 'policy' is left: their artifacts were destroyed"
    assert says(1, "nothing") == "there is no series 'nothing'"
