"""Which streams there are, and their settings. The only place that makes one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from tensorbus.bus._beats import MARKER_TTL_S
from tensorbus.bus._port import Bus, StreamLimits
from tensorbus.bus._requests import NAME_IN_USE, NoStreamError, Requests
from tensorbus.clock import Clock, Deadline
from tensorbus.errors import (
    ConflictError,
    DeniedError,
    InvalidArgumentError,
    OutOfSpaceError,
    TensorbusError,
    UnavailableError,
)
from tensorbus.events import Subjects

_NS_PER_S: Final = 1_000_000_000
_UNLIMITED: Final = (None, 0, -1)
NOT_CLUSTERED: Final = 10074
NO_PEERS: Final = 10005
PEERS_PAUSE_S: Final = 0.5


async def provision(
    bus: Bus,
    *,
    remembered_seq: int = 0,
    limits: StreamLimits | None = None,
    allow_recreate: bool = False,
    deadline: Deadline,
) -> None:
    """Create the streams that are missing. Repeating it is safe, also at the same time from several processes.

    A new stream starts above the clock's microseconds and above every sequence that the caller remembers, so that a
    stream that was lost and made anew never gives a sequence twice. How many servers keep a stream that is there is
    the operator's choice: only `tensorbus bus check` compares it with the limits.

    Args:
        remembered_seq: The largest sequence of the log that the caller knows of, 0 if it knows none.
        allow_recreate: Whether to make the log anew although somebody remembers facts of it.

    Raises:
        ConflictError: If a stream is there with subjects or settings that the log cannot live with.
        DeniedError: If the log is not there and this user may not make it.
        InvalidArgumentError: If there are fewer servers than copies asked for.
        OutOfSpaceError: If the server has no room for the limits.
        UnavailableError: If JetStream is disabled or does not answer, or the log that is remembered is gone.
    """
    await bus.provision(
        remembered_seq=remembered_seq,
        limits=limits or StreamLimits(),
        allow_recreate=allow_recreate,
        deadline=deadline,
    )


async def ensure_log(
    requests: Requests,
    subjects: Subjects,
    limits: StreamLimits,
    *,
    clock: Clock,
    remembered_seq: int,
    allow_recreate: bool,
    deadline: Deadline,
) -> None:
    """Create the log if it is not there. One that is remembered and gone is made anew only on request."""
    config = log_config(subjects, limits, clock=clock, remembered_seq=remembered_seq)
    if remembered_seq > 0 and not allow_recreate:
        await _must_be_there(requests, config["name"], remembered_seq, deadline)
    await _ensure(requests, config, deadline)


def log_config(subjects: Subjects, limits: StreamLimits, *, clock: Clock, remembered_seq: int) -> dict[str, Any]:
    """The settings of the log's stream."""
    return _common(subjects.log_stream, subjects, clock, remembered_seq, limits) | {
        "storage": "file",
        "max_bytes": limits.log_bytes_max,
        "max_msgs_per_subject": -1,
        "max_msg_size": limits.message_bytes_max,
        "duplicate_window": limits.dedup_s * _NS_PER_S,
        "deny_delete": True,
        "description": "tensorbus: the log of lifecycle facts",
    }


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
    config = live_config(subjects, limits, clock=clock, remembered_seq=remembered_seq)
    await _ensure(requests, config, deadline)


def live_config(subjects: Subjects, limits: StreamLimits, *, clock: Clock, remembered_seq: int) -> dict[str, Any]:
    """The settings of the heartbeats' stream."""
    return _common(subjects.live_stream, subjects, clock, remembered_seq, limits) | {
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


async def ensure_pages(
    requests: Requests,
    subjects: Subjects,
    limits: StreamLimits,
    *,
    clock: Clock,
    remembered_seq: int,
    deadline: Deadline,
) -> None:
    """Create the stream of page facts if it is not there."""
    config = pages_config(subjects, limits, clock=clock, remembered_seq=remembered_seq)
    await _ensure(requests, config, deadline)


def pages_config(subjects: Subjects, limits: StreamLimits, *, clock: Clock, remembered_seq: int) -> dict[str, Any]:
    """The settings of the stream of page facts."""
    return _common(subjects.pages_stream, subjects, clock, remembered_seq, limits) | {
        "storage": "file",
        "max_bytes": limits.pages_bytes_max,
        "max_msgs_per_subject": -1,
        "max_msg_size": limits.message_bytes_max,
        "duplicate_window": limits.dedup_s * _NS_PER_S,
        "deny_delete": True,
        "description": "tensorbus: page facts",
    }


def wanted_config(subjects: Subjects, name: str, *, clock: Clock) -> dict[str, Any]:
    """The settings that a stream of the system has by default."""
    configs = {
        subjects.log_stream: log_config,
        subjects.live_stream: live_config,
        subjects.pages_stream: pages_config,
    }
    return configs[name](subjects, StreamLimits(), clock=clock, remembered_seq=0)


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


async def _must_be_there(requests: Requests, name: str, remembered_seq: int, deadline: Deadline) -> None:
    try:
        await requests.api(f"STREAM.INFO.{name}", deadline=deadline)
    except NoStreamError as exc:
        raise UnavailableError(
            f"stream {name} is gone, and this process remembers its sequence {remembered_seq}: bring the stream back, "
            "or, if it is lost, make a new one with `tensorbus bus init --after-loss`",
            stream=name,
            remembered_seq=remembered_seq,
        ) from exc


async def _ensure(requests: Requests, config: dict[str, Any], deadline: Deadline) -> None:
    name = config["name"]
    try:
        info = await requests.api(f"STREAM.INFO.{name}", deadline=deadline)
    except NoStreamError:
        info = await _create(requests, config, deadline)
    problem = mismatch(info["config"], config)
    if problem is not None:
        raise ConflictError(
            f"stream {name} exists and {problem}; choose another subject prefix, or repair it", stream=name
        )


async def _create(requests: Requests, config: dict[str, Any], deadline: Deadline) -> dict[str, Any]:
    name, copies = config["name"], config["num_replicas"]
    while True:
        try:
            return await requests.api(f"STREAM.CREATE.{name}", config, deadline=deadline)
        except DeniedError as exc:
            raise DeniedError(
                f"stream {name} is not there and this user may not make it: run `tensorbus bus init`", stream=name
            ) from exc
        except TensorbusError as exc:
            code = exc.details.get("code")
            if code == NAME_IN_USE:  # somebody else was first, with another first_seq
                return await requests.api(f"STREAM.INFO.{name}", deadline=deadline)
            if code == NOT_CLUSTERED:
                text = f"stream {name} is to be kept by {copies} servers, and there is only one: see nats_replicas"
                raise InvalidArgumentError(text, replicas=copies) from exc
            if code == NO_PEERS:  # also said by a cluster whose members have not yet found each other
                text = f"there are no {copies} servers with room for stream {name}: {exc}"
                await requests.pause(deadline, OutOfSpaceError(text, replicas=copies), PEERS_PAUSE_S)
                continue
            if isinstance(exc, InvalidArgumentError):
                raise ConflictError(f"stream {name} cannot be created: {exc}", stream=name) from exc
            raise


def mismatch(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> str | None:
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
