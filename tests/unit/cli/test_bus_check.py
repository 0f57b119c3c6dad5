"""What ``tensorbus bus check`` makes of a report."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tensorbus.bus import BusReport, Monitored, Role, StreamCopy, StreamReport, UserReport, grants, parse_user
from tensorbus.cli._bus_check import verdicts_on, verdicts_on_disk, verdicts_on_rights
from tensorbus.cli._verdict import State, Verdict
from tensorbus.config import Settings
from tensorbus.events import Subjects

COPY = StreamCopy(server="n1", current=True, offline=False, lag=0)
STREAM = StreamReport(
    name="TB",
    problem="",
    replicas=3,
    leader="n0",
    copies=(COPY, replace(COPY, server="n2")),
    messages=7,
    nbytes=10,
    bytes_max=100,
    first_seq=1,
    last_seq=7,
)
REPORT = BusReport(
    server="n0",
    version="2.15.1",
    cluster="tb",
    encrypted=True,
    api_level=5,
    storage_bytes=10,
    storage_bytes_max=None,
    streams=(STREAM,),
    missing=("TB_LIVE",),
    user=UserReport(user="U", account="$G", publish_allow=("a",), subscribe_allow=("b", "c")),
    ahead_ns=1000,
)
THREE = Settings.model_validate({"nats_replicas": 3})
DISK = Monitored(sync_always=True, sync_s=120, storage_bytes=1, storage_bytes_max=100, free_bytes=1000)


def bad(report: BusReport, settings: Settings = THREE) -> list[Verdict]:
    return [verdict for verdict in verdicts_on(report, settings) if verdict.state is not State.OK]


def stream(**changes: object) -> BusReport:
    return replace(REPORT, streams=(replace(STREAM, **changes),))  # type: ignore[arg-type]


def test_nothing_is_wrong_with_what_is_right() -> None:
    assert bad(REPORT) == []
    assert "1 subjects to publish, 2 to hear" in next(v.found for v in verdicts_on(REPORT, THREE) if v.check == "user")


@pytest.mark.parametrize(
    ("report", "state", "words"),
    [
        (replace(REPORT, missing=("TB",)), State.WRONG, "TB is not there"),
        (replace(REPORT, api_level=1), State.WRONG, "API level"),
        (replace(REPORT, user=None), State.WARNING, "who we are"),
        (replace(REPORT, ahead_ns=-9_000_000_000), State.WARNING, "9 s behind"),
        (replace(REPORT, storage_bytes=90, storage_bytes_max=100), State.WARNING, "90 B of 100 B"),
        (stream(problem="has max_age=1"), State.WRONG, "max_age"),
        (stream(replicas=1, copies=(), leader=""), State.WRONG, "1 of the 3"),
        (stream(replicas=5), State.WARNING, "kept by 5"),
        (stream(leader=""), State.WRONG, "no leader"),
        (stream(copies=(COPY, replace(COPY, server="n2", offline=True))), State.WRONG, "n2 is away"),
        (stream(copies=(COPY, replace(COPY, server="n2", current=False, lag=4))), State.WRONG, "n2 is 4 operations"),
        (stream(nbytes=96), State.WRONG, "96 B of 100 B"),
    ],
)
def test_what_is_wrong_is_said(report: BusReport, state: State, words: str) -> None:
    [verdict] = bad(report)
    assert verdict.state is state
    assert words in verdict.found
    assert verdict.advice


def test_sessions_must_outlast_an_election() -> None:
    [verdict] = bad(REPORT, Settings.model_validate({"nats_replicas": 3, "session_ttl_s": 5}))
    assert verdict.check == "sessions"


def test_a_single_server_that_does_not_sync_is_noted() -> None:
    assert all(verdict.state is State.OK for verdict in verdicts_on_disk(DISK, replicated=False))
    lazy = replace(DISK, sync_always=False)
    assert any(verdict.state is State.WARNING for verdict in verdicts_on_disk(lazy, replicated=False))
    assert all(verdict.state is State.OK for verdict in verdicts_on_disk(lazy, replicated=True))
    short = list(verdicts_on_disk(replace(DISK, free_bytes=3), replicated=False))
    assert "less than" in short[-1].found


def rights(seen: UserReport | None, whose: str = "store:s1") -> list[Verdict]:
    return list(verdicts_on_rights(replace(REPORT, user=seen), parse_user(whose), Settings()))


def test_each_permission_that_a_role_lacks_is_said() -> None:
    given = grants([Role.STORE], "s1", subjects=Subjects())
    full = UserReport(
        user="U", account="$G", publish_allow=given.publish_allow, subscribe_allow=given.subscribe_allow, answers=True
    )
    assert [one.state for one in rights(full)] == [State.OK]
    assert [one.state for one in rights(replace(full, publish_allow=None, subscribe_allow=None))] == [State.OK]
    assert rights(None) == []
    told = rights(
        replace(
            full,
            publish_allow=tuple(one for one in given.publish_allow if "PURGE.TB" not in one),
            subscribe_deny=("tb.rpc.query",),
            answers=False,
        )
    )
    assert [one.found for one in told] == [
        "store:s1 may not publish $JS.API.STREAM.PURGE.TB",
        "store:s1 may not publish $JS.API.STREAM.PURGE.TB_PAGES",
        "store:s1 may not listen to tb.rpc.query",
        "store:s1 may not answer questions (allow_responses)",
    ]
    assert all("bus grants store:s1" in one.advice for one in told)
