"""The single checks of `tensorbus doctor`. Each looks at one thing, changes nothing, and never fails itself."""

from __future__ import annotations

import os
import resource
import stat
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from tensorbus.bus import NatsBus
from tensorbus.cli._output import size
from tensorbus.cli._probes import ask_worker, is_stopped, server_info
from tensorbus.cli._urls import without_password
from tensorbus.clock import NS_PER_S, Deadline, SystemClock
from tensorbus.config import Resolved, Settings, memory_bytes
from tensorbus.errors import TensorbusError
from tensorbus.events import Subjects
from tensorbus.transport import WorkerCard, is_locked, living_workers
from tensorbus.workers import bus_url

PROBE_S: Final = 3.0
CLOCK_SKEW_S: Final = 5
FILES_MIN: Final = 4096


class State(StrEnum):
    """How a check ended."""

    OK = "ok"
    WARNING = "warning"
    WRONG = "wrong"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a check found.

    Attributes:
        advice: What to do, empty if nothing.
    """

    check: str
    state: State
    found: str
    advice: str = ""


async def check_all(resolved: Resolved) -> list[Verdict]:
    """All checks, in the order in which they depend on each other."""
    settings = resolved.settings
    verdicts = [*_home(settings), *_stale(settings), *_up(settings)]
    url, found = _bus_url(settings)
    verdicts += found
    if url is not None:
        verdicts += await _guarded("nats", lambda: _nats(settings, url))
    verdicts += await _guarded("workers", lambda: _workers(settings))
    verdicts += [*_limits(), *_memory(settings)]
    return verdicts


async def _guarded(check: str, run: Callable[[], Awaitable[list[Verdict]]]) -> list[Verdict]:
    try:
        return await run()
    except (TensorbusError, OSError) as exc:
        return [Verdict(check, State.WRONG, str(exc), "see the message")]


# -- the home -------------------------------------------------------------------------------------------------------


def _home(settings: Settings) -> Iterator[Verdict]:
    home = settings.home
    if not home.exists():
        yield Verdict("home", State.WARNING, f"{home} does not exist yet", "`tensorbus up` makes it")
        return
    if not home.is_dir() or not os.access(home, os.W_OK | os.X_OK):
        yield Verdict("home", State.WRONG, f"{home} is no directory that you may write to", "name another with --home")
        return
    run = home / "run"
    mode = stat.S_IMODE(run.stat().st_mode) if run.exists() else 0o700
    if mode & 0o077:
        advice = f"chmod 700 {run}"
        yield Verdict(
            "home", State.WRONG, f"others on this machine may reach the sockets in {run} ({mode:03o})", advice
        )
    else:
        yield Verdict("home", State.OK, f"{home} is writable, its sockets are for you only")


def _stale(settings: Settings) -> Iterator[Verdict]:
    run = settings.home / "run"
    stale = [path for path in sorted(run.glob("*.json")) if not is_locked(path.with_suffix(".lock"))]
    if stale:
        found = f"{len(stale)} cards of workers that were killed: {', '.join(path.name for path in stale[:5])}"
        yield Verdict("cards", State.WARNING, found, "harmless; " + "rm " + " ".join(str(path) for path in stale[:5]))
    elif run.exists():
        yield Verdict("cards", State.OK, "every worker card has a living worker")


def _up(settings: Settings) -> Iterator[Verdict]:
    lock = settings.home / "run" / "up.lock"
    if is_locked(lock):
        yield Verdict("up", State.OK, f"`tensorbus up` runs as process {_pid_in(lock)}")
    elif settings.nats_url is None and settings.url is None:
        advice = f"tensorbus up --home {settings.home}"
        yield Verdict("up", State.WRONG, f"`tensorbus up` does not run for {settings.home}", advice)
    else:
        yield Verdict("up", State.OK, "`tensorbus up` does not run here; another bus or gateway is named")


def _pid_in(lock: Path) -> str:
    try:
        return lock.read_text(encoding="ascii").strip() or "?"
    except (OSError, UnicodeDecodeError):
        return "?"


# -- the bus --------------------------------------------------------------------------------------------------------


def _bus_url(settings: Settings) -> tuple[str | None, list[Verdict]]:
    try:
        return bus_url(settings), []
    except TensorbusError as exc:
        if settings.url is not None:
            return None, [Verdict("nats", State.OK, f"not needed here: callers use the gateway {settings.url}")]
        return None, [Verdict("nats", State.WRONG, str(exc), f"tensorbus up --home {settings.home}")]


async def _nats(settings: Settings, url: str) -> list[Verdict]:
    shown = without_password(url)
    try:
        bus = await NatsBus.connect(
            url,
            subjects=Subjects(settings.subject_prefix),
            creds=None if settings.nats_creds is None else str(settings.nats_creds),
            deadline=Deadline(PROBE_S, what=f"connecting to {shown}"),
        )
    except TensorbusError as exc:
        advice = (
            f"is `tensorbus up` of {settings.home} still alive? start it again"
            if settings.nats_url is None
            else "is the server up, and do URL and credentials fit? see nats_url in `tensorbus config`"
        )
        return [Verdict("nats", State.WRONG, str(exc), advice)]
    try:
        info = await server_info(url, timeout_s=PROBE_S)
        version = f"nats-server {info.get('version', '?')}" if info else "a NATS server"
        verdicts = [Verdict("nats", State.OK, f"{version} answers at {shown}")]
        return verdicts + await _log(bus)
    finally:
        await bus.close()


async def _log(bus: NatsBus) -> list[Verdict]:
    deadline = Deadline(PROBE_S, what="reading the log")
    stream = bus.subjects.log_stream
    try:
        last = await bus.last_on(bus.subjects.facts, deadline=deadline)
    except TensorbusError as exc:
        advice = "the first worker makes the streams; start one, or check the account's JetStream permissions"
        return [Verdict("log", State.WRONG, f"stream {stream} cannot be read: {exc}", advice)]
    if last is None:
        return [Verdict("log", State.OK, f"stream {stream} is there and has no facts yet")]
    ahead_s = (last.time_ns - SystemClock().wall_ns()) / NS_PER_S
    verdicts = [Verdict("log", State.OK, f"stream {stream} is there, the last fact is {last.seq}")]
    if ahead_s > CLOCK_SKEW_S:
        found = f"this machine's clock is {ahead_s:.0f} s behind the time of the last fact"
        verdicts.append(Verdict("clock", State.WARNING, found, "set the clock (NTP); only ages shown are wrong by it"))
    else:
        verdicts.append(Verdict("clock", State.OK, "not behind the log"))
    return verdicts


# -- the workers ----------------------------------------------------------------------------------------------------


async def _workers(settings: Settings) -> list[Verdict]:
    cards = living_workers(settings.home)
    if not cards and settings.url is not None:
        return [Verdict("workers", State.OK, "none in this home; a gateway is named")]
    if not cards:
        advice = f"tensorbus up --home {settings.home}, or tensorbus worker --home {settings.home}"
        return [Verdict("workers", State.WRONG, f"no worker lives in {settings.home}", advice)]
    verdicts: list[Verdict] = []
    hashes: dict[object, dict[str, object]] = {}
    for card in cards:
        verdict, seen = await _worker(settings, card)
        verdicts.append(verdict)
        if seen is not None:
            hashes.setdefault(seen[0], {})[card.worker] = seen[1]
    if not any("basic" in card.roles and card.host_id == settings.host_id for card in cards):
        found = f"no worker holds memory for host id {settings.host_id}: callers read copies through a gateway"
        advice = f"tensorbus worker --home {settings.home} --host-id {settings.host_id}"
        verdicts.append(Verdict("workers", State.WARNING, found, advice))
    for position, by_worker in hashes.items():
        if len(set(by_worker.values())) > 1:
            found = f"at position {position} the directories of {', '.join(by_worker)} differ"
            verdicts.append(Verdict("directory", State.WRONG, found, "a bug: keep the logs and restart the workers"))
    return verdicts


async def _worker(settings: Settings, card: WorkerCard) -> tuple[Verdict, tuple[object, object] | None]:
    """What one worker says, and the position and hash of its directory."""
    who = f"{card.worker} ({', '.join(card.roles)}), process {card.pid}"
    try:
        deadline = Deadline(PROBE_S, what=f"asking worker {card.worker}")
        stats = await ask_worker(settings, card, "stats", deadline=deadline)
    except (TensorbusError, OSError) as exc:
        if is_stopped(card.pid):
            return Verdict("workers", State.WRONG, f"{who} is stopped", f"kill -CONT {card.pid}"), None
        advice = f"look at {settings.home / 'log'}; kill {card.pid} and start it again if it stays so"
        return Verdict("workers", State.WRONG, f"{who} does not answer: {exc}", advice), None
    found = stats.get("directory")
    directory = found if isinstance(found, dict) else {}
    seen = (directory.get("position"), directory.get("hash"))
    if directory.get("degraded"):
        text = (
            f"{who}: its directory is degraded ({directory.get('gaps')} gaps, {directory.get('unknown')} unknown facts)"
        )
        return Verdict("directory", State.WRONG, text, "upgrade or restart that worker; it reads the log again"), seen
    return Verdict("workers", State.OK, f"{who} answers; {directory.get('artifacts')} artifacts"), seen


# -- the machine ----------------------------------------------------------------------------------------------------


def _limits() -> Iterator[Verdict]:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < FILES_MIN:
        found = f"a process may have only {hard} open files; each artifact needs 1, each reader of it 1 more"
        yield Verdict("files", State.WARNING, found, "raise the hard limit (LimitNOFILE=, ulimit -Hn)")
    else:
        shown = "any number of" if hard == resource.RLIM_INFINITY else str(hard)
        yield Verdict("files", State.OK, f"a process may have {shown} open files")
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    shown = "without limit" if soft == resource.RLIM_INFINITY else f"up to {size(soft)}"
    yield Verdict("memlock", State.OK, f"memory may be locked {shown}; shared memory needs none, RDMA will")


def _memory(settings: Settings) -> Iterator[Verdict]:
    total = memory_bytes()
    if settings.pool_bytes > total:
        found = f"the pool may grow to {size(settings.pool_bytes)}, the machine or its control group has {size(total)}"
        yield Verdict("memory", State.WRONG, found, "set a smaller pool_bytes: the kernel would kill the worker")
    else:
        yield Verdict("memory", State.OK, f"a pool of {size(settings.pool_bytes)}, {size(total)} of memory")
