"""Which streams there are, and their settings. The only place that makes one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from tensorbus.bus._beats import MARKER_TTL_S
from tensorbus.bus._port import Bus, StreamLimits
from tensorbus.bus._requests import NAME_IN_USE, NoStreamError, Requests
from tensorbus.clock import Clock, Deadline
from tensorbus.errors import ConflictError, InvalidArgumentError
from tensorbus.events import Subjects

_NS_PER_S: Final = 1_000_000_000
_UNLIMITED: Final = (None, 0, -1)


async def provision(
    bus: Bus,
    *,
    remembered_seq: int = 0,
    limits: StreamLimits | None = None,
    deadline: Deadline,
) -> None:
    """Create the streams that are missing. Repeating it is safe, also at the same time from several processes.

    A new stream starts above the clock's microseconds and above every sequence that the caller remembers, so that a
    stream that was lost and made anew never gives a sequence twice.

    Raises:
        ConflictError: If a stream is there with subjects or settings that the log cannot live with.
        OutOfSpaceError: If the server has no room for the limits.
        UnavailableError: If JetStream is disabled or does not answer.
    """
    await bus.provision(remembered_seq=remembered_seq, limits=limits or StreamLimits(), deadline=deadline)


async def ensure_log(
    requests: Requests,
    subjects: Subjects,
    limits: StreamLimits,
    *,
    clock: Clock,
    remembered_seq: int,
    deadline: Deadline,
) -> None:
    config = _common(subjects.log_stream, subjects, clock, remembered_seq, limits) | {
        "storage": "file",
        "max_bytes": limits.log_bytes_max,
        "max_msgs_per_subject": -1,
        "max_msg_size": limits.message_bytes_max,
        "duplicate_window": limits.dedup_s * _NS_PER_S,
        "deny_delete": True,
        "description": "tensorbus: the log of lifecycle facts",
    }
    await _ensure(requests, config, deadline)


async def ensure_live(
    requests: Requests,
    subjects: Subjects,
    limits: StreamLimits,
    *,
    clock: Clock,
    remembered_seq: int,
    deadline: Deadline,
) -> None:
    """Create the stream of heartbeats. It is in memory: a single server that restarted no longer has it."""
    config = _common(subjects.live_stream, subjects, clock, remembered_seq, limits) | {
        "storage": "memory",
        "max_bytes": limits.live_bytes_max,
        "max_msgs_per_subject": 1,
        "duplicate_window": limits.dedup_s * _NS_PER_S,
        "allow_msg_ttl": True,
        "subject_delete_marker_ttl": MARKER_TTL_S * _NS_PER_S,
        "allow_rollup_hdrs": True,
        "deny_purge": False,
        "description": "tensorbus: heartbeats",
    }
    await _ensure(requests, config, deadline)


def _common(name: str, subjects: Subjects, clock: Clock, remembered_seq: int, limits: StreamLimits) -> dict[str, Any]:
    return {
        "name": name,
        "subjects": list(subjects.streams[name]),
        "retention": "limits",
        "discard": "new",
        "max_age": 0,
        "max_msgs": -1,
        "max_consumers": -1,
        "num_replicas": limits.replicas,
        "allow_direct": False,
        "first_seq": max(clock.wall_ns() // 1000, remembered_seq + 1),
    }


async def _ensure(requests: Requests, config: dict[str, Any], deadline: Deadline) -> None:
    name = config["name"]
    try:
        info = await requests.api(f"STREAM.INFO.{name}", deadline=deadline)
    except NoStreamError:
        info = await _create(requests, config, deadline)
    problem = _mismatch(info["config"], config)
    if problem is not None:
        raise ConflictError(
            f"stream {name} exists and {problem}; choose another subject prefix, or repair it", stream=name
        )


async def _create(requests: Requests, config: dict[str, Any], deadline: Deadline) -> dict[str, Any]:
    name = config["name"]
    try:
        return await requests.api(f"STREAM.CREATE.{name}", config, deadline=deadline)
    except InvalidArgumentError as exc:
        if exc.details.get("code") == NAME_IN_USE:  # somebody else was first, with another first_seq
            return await requests.api(f"STREAM.INFO.{name}", deadline=deadline)
        raise ConflictError(f"stream {name} cannot be created: {exc}", stream=name) from exc


def _mismatch(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> str | None:
    """Why a stream cannot be used, in words; sizes and windows are the operator's choice."""
    if sorted(found.get("subjects") or ()) != sorted(wanted["subjects"]):
        return f"has the subjects {found.get('subjects')} instead of {wanted['subjects']}"
    for key in ("storage", "retention", "discard", "allow_msg_ttl"):
        if found.get(key, False) != wanted.get(key, False):
            return f"has {key}={found.get(key)!r} instead of {wanted.get(key, False)!r}"
    for key in ("max_age", "max_msgs", "max_msgs_per_subject"):
        given, asked = found.get(key), wanted[key]
        if given != asked and not (given in _UNLIMITED and asked in _UNLIMITED):
            return f"has {key}={given!r}, which loses facts"
    if found.get("sealed") or found.get("mirror") or found.get("deny_purge"):
        return "is sealed, a mirror, or does not allow to purge"
    return None
