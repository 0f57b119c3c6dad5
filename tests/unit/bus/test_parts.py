"""The small pure parts: filters, positions in reply subjects, times, headers, and what JetStream's errors mean."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tensorbus.bus
from tensorbus.bus import StreamLimits, WrongSequenceError
from tensorbus.bus._link import _REFUSED, _without_password
from tensorbus.bus._memory_stream import MemoryStream, matches
from tensorbus.bus._nats_stream import parse_headers, parse_stored, parse_time
from tensorbus.bus._reader import parse
from tensorbus.bus._requests import NoStreamError, translate
from tensorbus.bus._streams import mismatch
from tensorbus.clock import Deadline
from tensorbus.errors import (
    CorruptError,
    DeniedError,
    InvalidArgumentError,
    NotFoundError,
    OutOfSpaceError,
    UnavailableError,
)


def test_the_public_names() -> None:
    assert sorted(tensorbus.bus.__all__) == [
        "Appended",
        "Archive",
        "ArchiveFile",
        "ArchiveReport",
        "Bus",
        "BusAdmin",
        "BusReport",
        "Conflict",
        "EmbeddedServer",
        "Fault",
        "Handler",
        "Health",
        "Heartbeat",
        "LogInfo",
        "MemoryBus",
        "MemoryCluster",
        "Message",
        "Migrated",
        "Monitored",
        "NatsAuth",
        "NatsBus",
        "Permissions",
        "Reader",
        "Role",
        "StoredSnapshot",
        "Stream",
        "StreamCopy",
        "StreamLimits",
        "StreamReport",
        "User",
        "UserReport",
        "WrongSequenceError",
        "append",
        "get_blob",
        "grants",
        "health_of",
        "lacking",
        "migrate",
        "monitor_of",
        "monitored",
        "new_seed",
        "parse_user",
        "provision",
        "public_key",
        "put_blob",
        "read_blob",
        "users_config",
        "users_json",
    ]


@pytest.mark.parametrize(
    ("pattern", "subject", "expected"),
    [
        ("a.b", "a.b", True),
        ("a.b", "a.b.c", False),
        ("a.*", "a.b", True),
        ("a.*", "a.b.c", False),
        ("a.*", "a", False),
        ("a.>", "a.b.c", True),
        ("a.>", "a", False),
        ("*.b.>", "a.b.c", True),
        (">", "a", True),
    ],
)
def test_filters(pattern: str, subject: str, expected: bool) -> None:
    assert matches(pattern, subject) is expected


def delivered(reply: str) -> Any:
    return cast("Any", SimpleNamespace(reply=reply, subject="s", headers=None, data=b"x"))


def test_the_position_in_a_reply_subject() -> None:
    seq, message = parse(delivered("$JS.ACK.TB.c.1.42.7.1700000000000000001.0"))
    assert (seq, message.seq, message.time_ns) == (7, 42, 1700000000000000001)
    seq, message = parse(delivered("$JS.ACK.hub.ACC.TB.c.1.42.7.1700000000000000001.0.r4nd0m"))
    assert (seq, message.seq, message.time_ns) == (7, 42, 1700000000000000001)


@given(st.integers(min_value=0, max_value=4_000_000_000), st.integers(min_value=0, max_value=999_999_999))
def test_times_keep_their_nanoseconds(seconds: int, nanos: int) -> None:
    from datetime import UTC, datetime

    text = datetime.fromtimestamp(seconds, tz=UTC).strftime("%Y-%m-%dT%H:%M:%S")
    fraction = f"{nanos:09}".rstrip("0")
    assert parse_time(f"{text}.{fraction}Z" if fraction else f"{text}Z") == seconds * 1_000_000_000 + nanos


def test_stored_messages() -> None:
    assert parse_headers(b"NATS/1.0\r\nA: b: c\r\nD:e\r\n\r\n") == {"A": "b: c", "D": "e"}
    assert parse_headers(b"") == {}
    with pytest.raises(CorruptError):
        parse_stored({"seq": 1, "time": "yesterday", "subject": "s"})


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        ({"code": 400, "err_code": 10071, "description": "wrong last sequence: 17"}, WrongSequenceError),
        ({"code": 404, "err_code": 10059, "description": "stream not found"}, NoStreamError),
        ({"code": 404, "err_code": 10037, "description": "no message found"}, NotFoundError),
        ({"code": 503, "err_code": 10077, "description": "maximum bytes exceeded"}, OutOfSpaceError),
        ({"code": 500, "err_code": 10047, "description": "insufficient storage resources available"}, OutOfSpaceError),
        ({"code": 400, "err_code": 10054, "description": "message size exceeds maximum allowed"}, InvalidArgumentError),
        ({"code": 400, "err_code": 10003, "description": "bad request"}, InvalidArgumentError),
        ({"code": 500, "err_code": 10110, "description": "stream purge not permitted"}, DeniedError),
        ({"code": 503, "err_code": 10008, "description": "temporarily unavailable"}, UnavailableError),
    ],
)
def test_what_errors_mean(error: dict[str, Any], expected: type[Exception]) -> None:
    assert type(translate(error, subject="s")) is expected


def test_a_wrong_sequence_names_both() -> None:
    error = translate(
        {"code": 400, "err_code": 10071, "description": "wrong last sequence: 17"},
        subject="s",
        headers={"Nats-Expected-Last-Subject-Sequence": "16"},
    )
    assert isinstance(error, WrongSequenceError)
    assert (error.seq, error.details["expected"]) == (17, 16)


def test_refusals_name_their_subject() -> None:
    found = _REFUSED.search('nats: Permissions Violation for Publish to "tb.ev.key.x.w2"')
    assert found is not None
    assert found[2] == "tb.ev.key.x.w2"
    assert _without_password("nats://me:secret@host:4222") == "nats://host:4222"


def test_a_stream_that_loses_facts_is_not_used() -> None:
    wanted = {
        "subjects": ["a", "b"], "storage": "file", "retention": "limits", "discard": "new", "max_age": 0,
        "max_msgs": -1, "max_msgs_per_subject": -1,
    }  # fmt: skip
    assert mismatch({**wanted, "max_msgs_per_subject": 0, "subjects": ["b", "a"], "max_bytes": 5}, wanted) is None
    for change in ({"discard": "old"}, {"max_age": 5}, {"max_msgs": 10}, {"subjects": ["a"]}, {"sealed": True}):
        assert mismatch({**wanted, **change}, wanted) is not None


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("xyz")), max_size=30), st.integers(0, 40))
def test_the_twins_indexes_agree_with_a_scan(writes: list[tuple[str, str]], after: int) -> None:
    stream = MemoryStream(["t.*.*"], first_seq=1, wall_ns=lambda: 0, limits=StreamLimits(), replicated=False)
    for kind, author in writes:
        stream.store(f"t.{kind}.{author}", b"", {})
    for pattern in ("t.>", "t.a.*", "t.*.x", "t.b.y", "t.*.*"):
        expected = [n for n, (kind, author) in enumerate(writes, 1) if matches(pattern, f"t.{kind}.{author}")]
        found = [message.seq for message in stream.after(after, pattern, count_max=100)]
        assert found == [seq for seq in expected if seq > after]
        last = stream.last_on(pattern)
        assert (last.seq if last else None) == (expected[-1] if expected else None)


def test_a_deadline_counts_in_the_loops_time() -> None:
    from tensorbus.testing import SimLoop

    async def scenario() -> None:
        deadline = Deadline(10)
        await asyncio.sleep(4)
        assert deadline.left() == pytest.approx(6)

    with asyncio.Runner(loop_factory=lambda: SimLoop(1)) as runner:
        runner.run(scenario())
    assert 9 < (Deadline(10).left() or 0) <= 10
