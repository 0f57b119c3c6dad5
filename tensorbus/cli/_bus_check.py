"""``bus check``: are the servers and streams as they should be."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Final

import click

from tensorbus.bus import (
    BusAdmin,
    BusReport,
    Monitored,
    StreamReport,
    User,
    grants,
    lacking,
    monitor_of,
    monitored,
    parse_user,
)
from tensorbus.cli._bus_admin import SERVERS, with_admin
from tensorbus.cli._errors import EXIT_OTHER
from tensorbus.cli._options import json_option, takes_settings
from tensorbus.cli._output import size
from tensorbus.cli._verdict import State, Verdict, show
from tensorbus.clock import NS_PER_S, Deadline
from tensorbus.config import Resolved, Settings
from tensorbus.errors import TensorbusError
from tensorbus.events import Subjects

API_LEVEL_MIN: Final = 4
REPLICATED_TTL_S_MIN: Final = 10.0
CLOCK_SKEW_S: Final = 5
FULL_WRONG: Final = 0.95
FULL_NOTE: Final = 0.8


@click.command(short_help="Check the servers and the streams.")
@click.option("--monitor", metavar="URL", help="Monitoring address of a server, which tells more: http://host:8222.")
@click.option(
    "--as", "whose", metavar="ROLE[+ROLE]:NAME", help="Also compare what this user may do with what `bus grants` gives."
)
@takes_settings(*SERVERS, "nats_replicas", "session_ttl_s")
@json_option
@click.pass_context
def check(ctx: click.Context, resolved: Resolved, *, monitor: str | None, whose: str | None, as_json: bool) -> None:
    """Check servers, streams, copies, room, clock and permissions; for each say what is wrong and what to do.

    With --as, and the credentials of a worker or caller, it says which permissions that one lacks, to publish and to
    listen: the servers are asked for them, and nothing is tried. Ends with 1 if something is wrong, with 0 if there are
    only notes.
    """
    settings = resolved.settings
    user = None if whose is None else parse_user(whose)

    async def work(admin: BusAdmin) -> tuple[BusReport, list[Verdict]]:
        report = await admin.check(deadline=Deadline(settings.timeout_s, what="checking the servers"))
        return report, await asyncio.to_thread(_disk, settings, monitor, report)

    report, disk = with_admin(settings, work)
    rights = [] if user is None else list(verdicts_on_rights(report, user, settings))
    found = [*verdicts_on(report, settings), *rights, *disk]
    for verdict in found:
        show(verdict, as_json=as_json)
    if any(verdict.state is State.WRONG for verdict in found):
        ctx.exit(EXIT_OTHER)


def verdicts_on(report: BusReport, settings: Settings) -> Iterator[Verdict]:
    """What is to be said of a report. Pure."""
    where = f"{report.server} of cluster {report.cluster}" if report.cluster else report.server
    tls = "over TLS" if report.encrypted else "without TLS"
    yield Verdict("server", State.OK, f"nats-server {report.version}, {where}, {tls}")
    if report.api_level < API_LEVEL_MIN:
        yield Verdict("jetstream", State.WRONG, f"its API level is {report.api_level}", "run nats-server 2.14 or newer")
    yield _room("storage", "the account", report.storage_bytes, report.storage_bytes_max)
    for name in report.missing:
        yield _missing(name)
    for stream in report.streams:
        yield from _stream(stream, settings)
    yield _user(report)
    yield _clock(report)


def _missing(name: str) -> Verdict:
    if "_LIVE" in name:
        return Verdict("stream", State.OK, f"{name} is in memory and not there now; the next worker makes it")
    return Verdict(
        "stream", State.WRONG, f"{name} is not there", "tensorbus bus init; see --after-loss if it was there"
    )


def _stream(stream: StreamReport, settings: Settings) -> Iterator[Verdict]:
    name, wanted = stream.name, settings.nats_replicas
    if stream.problem:
        yield Verdict("stream", State.WRONG, f"{name} {stream.problem}", "repair it, or choose another subject_prefix")
    else:
        found = f"{name} has {stream.messages} messages, {stream.first_seq} to {stream.last_seq}"
        yield Verdict("stream", State.OK, found)
    if stream.replicas < wanted:
        found = f"{name} is kept by {stream.replicas} of the {wanted} servers that nats_replicas asks for"
        yield Verdict("copies", State.WRONG, found, "one server becomes three by `tensorbus bus migrate`")
    elif stream.replicas > wanted:
        found = f"{name} is kept by {stream.replicas} servers, nats_replicas says {wanted}"
        yield Verdict("copies", State.WARNING, found, f"set nats_replicas to {stream.replicas} everywhere")
    yield from _copies(stream)
    if stream.replicas > 1 and settings.session_ttl_s < REPLICATED_TTL_S_MIN:
        found = f"session_ttl_s is {settings.session_ttl_s:g}, and servers that elect a leader take up to 8 s"
        yield Verdict("sessions", State.WRONG, found, "set session_ttl_s to 10 or more")
    if stream.bytes_max > 0:
        yield _room("room", name, stream.nbytes, stream.bytes_max)


def _copies(stream: StreamReport) -> Iterator[Verdict]:
    if stream.replicas < 2:
        return
    if not stream.leader:
        yield Verdict("copies", State.WRONG, f"{stream.name} has no leader", "are most of the servers running?")
    bad = [copy for copy in stream.copies if copy.offline or not copy.current]
    for copy in bad:
        found = f"{copy.server} is away" if copy.offline else f"{copy.server} is {copy.lag} operations behind"
        yield Verdict("copies", State.WRONG, f"{stream.name}: {found}", "see that server's log")
    if stream.leader and not bad:
        others = ", ".join(copy.server for copy in stream.copies)
        yield Verdict("copies", State.OK, f"{stream.name} is led by {stream.leader} and current on {others}")


def _room(check_name: str, what: str, used: int, most: int | None) -> Verdict:
    if most is None or most <= 0:
        return Verdict(check_name, State.OK, f"{what} uses {size(used)}, without a limit")
    found, part = f"{what} uses {size(used)} of {size(most)}", used / most
    if part >= FULL_WRONG:
        return Verdict(check_name, State.WRONG, found, "purge (a store does), or raise the limit: full means refused")
    if part >= FULL_NOTE:
        return Verdict(check_name, State.WARNING, found, "is a store running that purges?")
    return Verdict(check_name, State.OK, found)


def _user(report: BusReport) -> Verdict:
    user = report.user
    if user is None:
        return Verdict("user", State.WARNING, "the server does not say who we are", "allow $SYS.REQ.USER.INFO")
    who = f"{user.user or 'nobody in particular'} of account {user.account or '?'}"
    if user.publish_allow is None:
        return Verdict("user", State.OK, f"{who}, who may do everything")
    listens = len(user.subscribe_allow or ())
    return Verdict("user", State.OK, f"{who}: {len(user.publish_allow)} subjects to publish, {listens} to hear")


def verdicts_on_rights(report: BusReport, user: User, settings: Settings) -> Iterator[Verdict]:
    """What a user lacks of the permissions of its roles. Pure."""
    seen = report.user
    if seen is None:
        return  # which was said
    needed = grants(user.roles, user.name, subjects=Subjects(settings.subject_prefix))
    who = f"{'+'.join(user.roles)}:{user.name}"
    advice = f"give it what `tensorbus bus grants {who}` lists"
    missing = False
    for verb, subjects in (
        ("publish", lacking(needed.publish_allow, allowed=seen.publish_allow, denied=seen.publish_deny)),
        ("listen to", lacking(needed.subscribe_allow, allowed=seen.subscribe_allow, denied=seen.subscribe_deny)),
    ):
        missing = missing or bool(subjects)
        for subject in subjects:
            yield Verdict("permissions", State.WRONG, f"{who} may not {verb} {subject}", advice)
    if needed.answers and seen.publish_allow is not None and not seen.answers:
        missing = True
        yield Verdict("permissions", State.WRONG, f"{who} may not answer questions (allow_responses)", advice)
    if not missing:
        yield Verdict("permissions", State.OK, f"{who} may do all that its roles need")


def _clock(report: BusReport) -> Verdict:
    if report.ahead_ns is None:
        return Verdict("clock", State.OK, "not compared: no stream tells the time")
    ahead_s = report.ahead_ns / NS_PER_S
    if abs(ahead_s) > CLOCK_SKEW_S:
        found = f"the servers' clock is {abs(ahead_s):.0f} s {'ahead of' if ahead_s > 0 else 'behind'} this machine's"
        return Verdict("clock", State.WARNING, found, "set the clocks (NTP)")
    return Verdict("clock", State.OK, f"the servers' differs by {abs(ahead_s):.1f} s")


def _disk(settings: Settings, monitor: str | None, report: BusReport) -> list[Verdict]:
    """What only a monitoring address tells: that which was named, or that of the home's own server."""
    home = settings.home / "nats" if settings.nats_url is None else None
    address = monitor or (monitor_of(home) if home is not None else None)
    if address is None:
        found = "how the servers sync is not visible here"
        return [Verdict("sync", State.OK, f"{found}; --monitor URL asks one of them")]
    try:
        seen = monitored(address, home=home)
    except TensorbusError as exc:
        return [Verdict("sync", State.WARNING, str(exc), "is `http:` set in its configuration?")]
    return list(verdicts_on_disk(seen, replicated=any(stream.replicas > 1 for stream in report.streams)))


def verdicts_on_disk(seen: Monitored, *, replicated: bool) -> Iterator[Verdict]:
    """What is to be said of a server's own account of its storage. Pure."""
    if seen.sync_always:
        yield Verdict("sync", State.OK, "each write is on the disk before it is acknowledged")
    elif replicated:
        yield Verdict(
            "sync", State.OK, f"every {seen.sync_s:g} s; a write is in the memory of most servers before that"
        )
    else:
        found = f"every {seen.sync_s:g} s: a power cut takes what was acknowledged since"
        yield Verdict("sync", State.WARNING, found, "set sync_interval: always on a single server")
    yield _room("disk", "the server", seen.storage_bytes, seen.storage_bytes_max)
    if seen.free_bytes is not None:
        left = seen.storage_bytes_max - seen.storage_bytes
        note = "" if seen.free_bytes >= left else f", less than the {size(left)} that it may still take"
        yield Verdict("disk", State.OK, f"{size(seen.free_bytes)} free{note}")
