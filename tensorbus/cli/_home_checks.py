"""The checks of `tensorbus doctor` that look at the home: its directory, its cards, its disk, its own server."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tensorbus.bus import health_of
from tensorbus.cli._output import size
from tensorbus.cli._probes import is_stopped
from tensorbus.cli._verdict import State, Verdict, command
from tensorbus.config import Settings
from tensorbus.transport import is_locked

LOW_BYTES: Final = 64 << 20


def check_home(settings: Settings) -> Iterator[Verdict]:
    """Whether the home can be used, and by its owner only."""
    home = settings.home
    if not home.exists():
        yield _absent(home)
        return
    if not home.is_dir() or not os.access(home, os.W_OK | os.X_OK):
        yield Verdict("home", State.WRONG, f"{home} is no directory that you may write to", "name another with --home")
        return
    run = home / "run"
    mode = stat.S_IMODE(run.stat().st_mode) if run.exists() else 0o700
    if mode & 0o077:
        found = f"others on this machine may reach the sockets in {run} ({mode:03o})"
        yield Verdict("home", State.WRONG, found, command("chmod", "700", run))
    else:
        yield Verdict("home", State.OK, f"{home} is writable, its sockets are for you only")


def _absent(home: Path) -> Verdict:
    above = next(folder for folder in home.absolute().parents if folder.exists())
    usable = above.is_dir() and os.access(above, os.W_OK | os.X_OK)
    if not usable or os.statvfs(above).f_blocks == 0:  # /proc and the like hold no files of ours
        found = f"{home} does not exist and cannot be made in {above}"
        return Verdict("home", State.WRONG, found, "name another with --home")
    return Verdict("home", State.WARNING, f"{home} does not exist yet", "`tensorbus up` makes it")


def check_cards(settings: Settings) -> Iterator[Verdict]:
    """Cards that killed workers left."""
    run = settings.home / "run"
    stale = [path for path in sorted(run.glob("*.json")) if not is_locked(path.with_suffix(".lock"))]
    if stale:
        found = f"{len(stale)} cards of workers that were killed: {', '.join(path.name for path in stale[:5])}"
        yield Verdict("cards", State.WARNING, found, "harmless; " + command("rm", *stale[:5]))
    elif run.exists():
        yield Verdict("cards", State.OK, "every worker card has a living worker")


def check_up(settings: Settings) -> Iterator[Verdict]:
    """Whether `up` runs."""
    lock = settings.home / "run" / "up.lock"
    if is_locked(lock):
        yield Verdict("up", State.OK, f"`tensorbus up` runs as process {_pid_in(lock)}")
    elif settings.nats_url is None and settings.url is None:
        advice = command("tensorbus", "up", "--home", settings.home)
        yield Verdict("up", State.WRONG, f"`tensorbus up` does not run for {settings.home}", advice)
    else:
        yield Verdict("up", State.OK, "`tensorbus up` does not run here; another bus or gateway is named")


def check_server(settings: Settings) -> Iterator[Verdict]:
    """Whether the home's own NATS server is well, and has room on its disk."""
    server, lock = settings.home / "nats", settings.home / "nats" / "pid"
    if settings.nats_url is not None or not is_locked(lock):
        return
    pid = _pid_in(lock)
    if pid.isdecimal() and is_stopped(int(pid)):
        yield Verdict("server", State.WRONG, f"the NATS server, process {pid}, is stopped", f"kill -CONT {pid}")
        return
    health = health_of(server)
    left = size(health.free_bytes or 0)
    if not health.has_room:
        found = f"the disk of {server} is full ({left} left); {health.problem or 'what is put next may fail'}"
        yield Verdict("server", State.WRONG, found, "make room; `tensorbus up` then starts the server again by itself")
    elif health.problem:
        advice = f"`tensorbus up` soon starts a broken server again; if it stays so, see {server / 'nats.log'}"
        yield Verdict("server", State.WRONG, f"the NATS server, process {pid}, is not well: {health.problem}", advice)
    elif health.free_bytes is not None and health.free_bytes < LOW_BYTES:
        yield Verdict("server", State.WARNING, f"the disk of {server} has {left} left", "make room: the log grows")
    else:
        yield Verdict("server", State.OK, f"the NATS server, process {pid}, is well; {left} left on its disk")


def _pid_in(lock: Path) -> str:
    try:
        return lock.read_text(encoding="ascii").strip() or "?"
    except (OSError, UnicodeDecodeError):
        return "?"
