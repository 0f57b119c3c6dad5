"""Who began before whom to read: those that live and have nothing yet, in that order."""

from __future__ import annotations

from tensorbus.events import Tier
from tensorbus.ids import ArtifactId, WorkerId
from tensorbus.lifecycle import Artifact
from tensorbus.workers._readers import ARTIFACTS_MAX, READERS_MAX, Readers
from tests.unit.lifecycle.history import D1, W1, W2, Log, T, added, ended, put

W3 = WorkerId("w3")


def log() -> tuple[Log, Artifact]:
    found = Log()
    for worker in (W1, W2, W3):
        found.open(worker)
    found.append(put(D1, D1))
    return found, found.state.artifacts[T, D1]


def test_who_comes_later_hears_of_those_before_and_never_the_other_way() -> None:
    found, record = log()
    readers = Readers()
    assert readers.ahead(found.state, record, W2) == []
    assert readers.ahead(found.state, record, W3) == [W2]
    assert readers.ahead(found.state, record, W2) == [], "asking again is not beginning again"
    assert readers.ahead(found.state, record, W3) == [W2]


def test_who_has_it_or_is_gone_is_no_reader_any_more() -> None:
    found, record = log()
    readers = Readers()
    readers.ahead(found.state, record, W2)
    readers.ahead(found.state, record, W3)
    found.say(added, W2, artifact=D1, tier=Tier.DRAM)
    assert readers.ahead(found.state, record, WorkerId("w9")) == [W3]
    found.append(ended(W3), W1)
    assert readers.ahead(found.state, record, W1) == []


def test_what_is_kept_is_bounded() -> None:
    found, record = log()
    readers = Readers()
    for n in range(3 * READERS_MAX):
        worker = WorkerId(f"r{n}")
        found.open(worker)
        assert len(readers.ahead(found.state, record, worker)) <= READERS_MAX
    for n in range(2 * ARTIFACTS_MAX):
        found.append(put(ArtifactId(f"a{n}"), None))
        readers.ahead(found.state, found.state.artifacts[T, ArtifactId(f"a{n}")], W2)
    assert len(readers._reading) <= ARTIFACTS_MAX
