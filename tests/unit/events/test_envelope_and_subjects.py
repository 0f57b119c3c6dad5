"""Headers and subjects: who says it, about what, and nothing of a user's text in a subject."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorbus.errors import InvalidArgumentError
from tensorbus.events import (
    CONTESTED,
    EVENT_TYPES,
    Aggregate,
    Event,
    Headers,
    Subjects,
    aggregate,
    aggregate_of,
    headers_from_wire,
    headers_to_wire,
)
from tensorbus.ids import EventId, Incarnation, WorkerId
from tests.unit.lifecycle import history as h

SUBJECTS = Subjects()
line = st.text(st.characters(codec="utf-8", exclude_categories=("Cc",)), max_size=20)
headers = st.builds(
    Headers,
    event_id=line.map(EventId).filter(bool),
    author=line.map(WorkerId).filter(bool),
    incarnation=line.map(Incarnation).filter(bool),
    principal=line,
    token=st.integers(0),
    cause=line,
    traceparent=line,
    expected=st.none() | st.integers(0),
    schema=st.integers(0),
)


@given(headers)
def test_headers_survive_the_wire(said: Headers) -> None:
    assert headers_from_wire(headers_to_wire(said, type_name="KeyBound", fence="tb.ev.key.a.*")) == said


def test_the_expected_sequence_goes_with_the_filter_that_it_is_about() -> None:
    said = Headers(event_id=EventId("e"), author=h.W1, incarnation=h.FIRST, expected=0)
    wire = headers_to_wire(said, type_name="KeyBound", fence="tb.ev.key.a.*")
    assert wire["Nats-Expected-Last-Subject-Sequence"] == "0"
    assert wire["Nats-Expected-Last-Subject-Sequence-Subject"] == "tb.ev.key.a.*"
    assert not any("Expected" in name for name in headers_to_wire(said, type_name="ReplicaAdded", fence=None))


@given(st.one_of(*(st.from_type(cls) for cls in EVENT_TYPES)))
def test_every_fact_has_a_subject_of_plain_tokens_that_parses_back(event: Event) -> None:
    about = aggregate_of(event)
    subject = SUBJECTS.fact(about, h.W1)
    assert SUBJECTS.parse(subject) == (about, h.W1)
    assert len(subject.split(".")) == (4 if about.kind == "snap" else 5)
    assert set(about.token) <= set("abcdefghijklmnopqrstuvwxyz234567TB_PAGELNS")
    assert SUBJECTS.fence(about) == subject.removesuffix("w1") + "*"


@pytest.mark.parametrize(
    ("event", "kind"),
    [
        (h.opened(), "session"),
        (h.ended(), "session"),
        (h.put(), "artifact"),
        (h.registered(), "artifact"),
        (h.digest_known(), "artifact"),
        (h.view_defined(), "artifact"),
        (h.destroyed(), "artifact"),
        (h.bound(), "key"),
        (h.unbound(), "key"),
        (h.published(1), "series"),
        (h.added(1), "replica"),
        (h.dropped(1), "replica"),
        (h.granted(1), "clease"),
        (h.released(1), "clease"),
        (h.snapshot(), "snap"),
        (h.archived(), "archive"),
        (h.purge(), "purge"),
        (h.purged(), "purge"),
        (h.truncated(), "trunc"),
    ],
    ids=lambda value: getattr(value, "type", value),
)
def test_facts_of_one_thing_share_its_aggregate(event: Event, kind: str) -> None:
    about = aggregate_of(event)
    assert about.kind == kind
    assert (about.guard is None) == hasattr(event, "number")  # else its author's running number orders it


def test_names_that_differ_in_one_byte_or_only_in_kind_or_tenant_never_share_a_subject() -> None:
    parts = [("key", "", "ab"), ("key", "a", "b"), ("key", "ab", ""), ("key", "", "Ab"), ("series", "", "ab")]
    assert len({aggregate(*part).token for part in parts}) == len(parts)


@pytest.mark.parametrize(
    "subject",
    [
        "",
        "tb",
        "tb.ev",
        "tb.ev.artifact",
        "tb.ev.artifact.a",
        "tb.ev.artifact.a.w1.more",
        "xx.ev.artifact.a.w1",
        "tb.snap.a",
        "tb.snap.a.b.c",
        "tb.blob.a.b.c",
    ],
)
def test_what_is_no_subject_of_a_fact_is_refused(subject: str) -> None:
    with pytest.raises(InvalidArgumentError, match="not the subject of a fact"):
        SUBJECTS.parse(subject)


@pytest.mark.parametrize("prefix", ["", ".", "a.", ".a", "a..b", "a b", "a.*", ">", "a\n"])
def test_a_prefix_is_plain_tokens(prefix: str) -> None:
    with pytest.raises(InvalidArgumentError, match="prefix"):
        Subjects(prefix)


def test_two_prefixes_have_streams_of_their_own() -> None:
    assert SUBJECTS.log_stream == "TB"
    assert Subjects("team.a").log_stream == "TB_team_a"
    assert Subjects("team.a").live_stream == "TB_LIVE_team_a"
    assert Subjects("team.a").pages_stream == "TB_PAGES_team_a"


@pytest.mark.parametrize(
    ("kind", "guard"), [("lease", "lease"), ("shard", "lease"), ("psnap", "lease"), ("pconf", None)]
)
def test_subjects_of_page_facts(kind: str, guard: str | None) -> None:
    about = Aggregate(kind, "7")
    assert SUBJECTS.fact(about, WorkerId("h1")) == f"tb.{kind}.7.h1"
    assert SUBJECTS.parse(f"tb.{kind}.7.h1") == (about, "h1")
    assert about.guard == (None if guard is None else Aggregate(guard, "7"))
    assert SUBJECTS.shard(7) == "tb.*.7.*"


def test_large_bodies_lie_in_the_stream_that_names_them() -> None:
    assert SUBJECTS.blob("d", 0, WorkerId("h1"), stream="TB") == "tb.blob.d.0.h1"
    assert SUBJECTS.blob("d", 0, WorkerId("h1"), stream="TB_PAGES") == "tb.pblob.d.0.h1"
    assert Subjects("team.a").parse("team.a.ev.key.x.w1") == (Aggregate("key", "x"), h.W1)


def test_a_heartbeats_subject_parses_back() -> None:
    assert SUBJECTS.parse_live(SUBJECTS.live(h.FIRST, h.W1)) == (h.FIRST, h.W1)


def test_which_kinds_are_compared_and_appended_is_fixed() -> None:
    on_the_log = ["artifact", "cluster", "fold", "instance", "key", "role", "series", "session", "trunc"]
    assert sorted(CONTESTED) == sorted([*on_the_log, "lease"])
