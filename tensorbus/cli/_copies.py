"""``prefetch``, ``replicate``, ``migrate``, ``evict``, ``persist``, ``verify``: who has a copy, and a right one."""

from __future__ import annotations

import dataclasses

import click

from tensorbus.cli._operate import Asked, operate, takes_operation
from tensorbus.config import Resolved


@click.command(short_help="Have a copy in a worker's memory.")
@click.argument("ref")
@takes_operation()
def prefetch(resolved: Resolved, *, ref: str, asked: Asked) -> None:
    """Have a copy of the artifact REF, a key or an id, in a worker's memory, before somebody needs it there."""
    operate(resolved, ref, "prefetch", lambda at, art: at.prefetch(art, **asked.how), asked)


@click.command(short_help="Have copies on several workers.")
@click.argument("ref")
@click.option("--to", "targets", metavar="ID", multiple=True, help="A worker that is to have one; may be given again.")
@click.option("-n", "n", type=click.IntRange(min=1), metavar="COUNT", help="How many workers are to have one in all.")
@takes_operation()
def replicate(resolved: Resolved, *, ref: str, targets: tuple[str, ...], n: int | None, asked: Asked) -> None:
    """Have copies of the artifact REF, a key or an id, on the workers --to, or on COUNT workers in all.

    With a COUNT workers on other hosts come first. The worker that is asked sees to it, also when this command ends.
    """
    if bool(targets) == (n is not None):
        raise click.UsageError("either --to, or -n")
    to = list(targets) or None
    operate(resolved, ref, "replicate", lambda at, art: at.replicate(art, to=to, n=n, **asked.how), asked)


@click.command(short_help="Move a copy from one worker to another.")
@click.argument("ref")
@click.option("--src", metavar="ID", required=True, help="The worker that gives its copy up.")
@click.option("--dst", metavar="ID", required=True, help="The worker that is to have one.")
@takes_operation(worker=False)
def migrate(resolved: Resolved, *, ref: str, src: str, dst: str, asked: Asked) -> None:
    """Copy the artifact REF, a key or an id, to --dst, verify it there, and then drop it from --src."""
    at_target = dataclasses.replace(asked, worker=dst)
    operate(resolved, ref, "migrate", lambda at, art: at.migrate(art, src=src, dst=dst, **asked.how), at_target)


@click.command(short_help="Drop a worker's copies of an artifact.")
@click.argument("ref")
@takes_operation()
def evict(resolved: Resolved, *, ref: str, asked: Asked) -> None:
    """Drop a worker's copies of the artifact REF, a key or an id, which lives on.

    Refused if a copy is pinned or read, or is the last one that a living worker has.
    """
    operate(resolved, ref, "evict", lambda at, art: at.evict(art, **asked.how), asked)


@click.command(short_help="Have a copy on a worker's disk.")
@click.argument("ref")
@takes_operation()
def persist(resolved: Resolved, *, ref: str, asked: Asked) -> None:
    """Have the artifact REF, a key or an id, on a worker's disk for as long as it lives; it is fetched there first.

    The worker needs a disk tier (disk_bytes). Its next life finds the copy again.
    """
    operate(resolved, ref, "persist", lambda at, art: at.persist(art, **asked.how), asked)


@click.command(short_help="Compare a worker's copies with the digests.")
@click.argument("ref")
@takes_operation()
def verify(resolved: Resolved, *, ref: str, asked: Asked) -> None:
    """Read a worker's copies of the artifact REF, a key or an id, and compare them with its digests.

    Those in memory and on disk. A copy with other bytes is given up; the exit code is then 9.
    """
    operate(resolved, ref, "verify", lambda at, art: at.verify(art, **asked.how), asked)
