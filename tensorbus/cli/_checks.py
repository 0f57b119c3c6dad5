"""The single checks of `tensorbus doctor`. Each looks at one thing, changes nothing, and never fails itself."""

from __future__ import annotations

import resource
from collections.abc import Awaitable, Callable, Iterator
from typing import Final

from tensorbus.bus import NatsAuth, NatsBus
from tensorbus.cli._home_checks import check_cards, check_home, check_server, check_up
from tensorbus.cli._output import size
from tensorbus.cli._page_homes import check_pages
from tensorbus.cli._probes import bus_limits, server_info
from tensorbus.cli._urls import without_password
from tensorbus.cli._verdict import State, Verdict, command
from tensorbus.cli._worker_checks import PROBE_S, check_workers
from tensorbus.clock import NS_PER_S, Deadline, SystemClock
from tensorbus.config import Resolved, Settings, memory_bytes
from tensorbus.errors import TensorbusError
from tensorbus.events import Subjects
from tensorbus.workers import bus_url

CLOCK_SKEW_S: Final = 5
FILES_MIN: Final = 4096


async def check_all(resolved: Resolved) -> list[Verdict]:
    """All checks, in the order in which they depend on each other."""
    settings = resolved.settings
    verdicts: list[Verdict] = []
    for name, look in (("home", check_home), ("cards", check_cards), ("up", check_up), ("server", check_server)):
        verdicts += _kept(name, look, settings)
    url, found = _bus_url(settings)
    verdicts += found
    stopped = any(verdict.check == "server" and "kill -CONT" in verdict.advice for verdict in verdicts)
    if url is not None and not stopped:
        verdicts += await _guarded("nats", lambda: _nats(settings, url))
    verdicts += await _guarded("workers", lambda: check_workers(settings))
    verdicts += await _guarded("pages", lambda: check_pages(settings))
    verdicts += [*_limits(), *_memory(settings)]
    return verdicts


def _kept(check: str, look: Callable[[Settings], Iterator[Verdict]], settings: Settings) -> list[Verdict]:
    try:
        return list(look(settings))
    except OSError as exc:
        found = f"{settings.home} cannot be looked at: {exc.strerror or exc}"
        return [Verdict(check, State.WRONG, found, "name another with --home")]


async def _guarded(check: str, run: Callable[[], Awaitable[list[Verdict]]]) -> list[Verdict]:
    try:
        return await run()
    except (TensorbusError, OSError) as exc:
        return [Verdict(check, State.WRONG, str(exc), "see the message")]


# -- the bus --------------------------------------------------------------------------------------------------------


def _bus_url(settings: Settings) -> tuple[str | None, list[Verdict]]:
    try:
        return bus_url(settings), []
    except TensorbusError as exc:
        if settings.url is not None:
            return None, [Verdict("nats", State.OK, f"not needed here: callers use the gateway {settings.url}")]
        return None, [Verdict("nats", State.WRONG, str(exc), command("tensorbus", "up", "--home", settings.home))]


async def _nats(settings: Settings, url: str) -> list[Verdict]:
    shown = without_password(url)
    try:
        bus = await NatsBus.connect(
            url,
            subjects=Subjects(settings.subject_prefix),
            auth=NatsAuth.of(settings),
            name=settings.nats_user or settings.worker_id or "tensorbus",
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
        verdicts += [Verdict("nats", State.WARNING, problem) for problem in await bus_limits(url, timeout_s=PROBE_S)]
        return verdicts + await _log(bus, without_jetstream=bool(info) and not info.get("jetstream"))
    finally:
        await bus.close()


async def _log(bus: NatsBus, *, without_jetstream: bool) -> list[Verdict]:
    deadline = Deadline(PROBE_S, what="reading the log")
    stream = bus.subjects.log_stream
    try:
        last = await bus.last_on(bus.subjects.facts, deadline=deadline)
    except TensorbusError as exc:
        if without_jetstream:
            advice = "add `jetstream {}` to the server's configuration, or start it with -js"
            return [Verdict("log", State.WRONG, "JetStream is off in the NATS server", advice)]
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
