"""``archive``: whether the archive is whole, and a store's file made from it alone."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from tensorbus.cli._client import with_bus
from tensorbus.cli._options import CLIENT, GivenPath, json_option, takes_settings
from tensorbus.cli._output import emit_json, facts, size
from tensorbus.cli._progress import Progress
from tensorbus.config import Resolved, Settings
from tensorbus.errors import ConflictError, CorruptError, NotFoundError, TensorbusError, UnavailableError
from tensorbus.events import AnyRecorded, Archived, Subjects

if TYPE_CHECKING:
    from tensorbus.bus import Archive, ArchiveFile, StoredSnapshot
    from tensorbus.projections import GlobalStore
    from tensorbus.sdk import AsyncBus

RECORDS: Final = "SELECT file, first, last, count, digest, nbytes FROM archives ORDER BY first, seq"
FACTS_MAX: Final = 4096
"""Facts that one transaction takes."""


@click.group(short_help="Check the archive of the log, or make a store from it.")
def archive() -> None:
    """Check the archive of the log, or make a store's file from it.

    The archive holds the facts that were purged from the log, and those that will be.
    """


@archive.command(short_help="Read every file and compare it with its digest.")
@click.option("--url", "where", metavar="URL", help="A folder or an fsspec URL (default: the setting archive_url).")
@click.option(
    "--alone", is_flag=True, help="Go by the names of the files, without a store that knows which there must be."
)
@takes_settings("subject_prefix", *(name for name in CLIENT if name != "url"))
@json_option
def verify(resolved: Resolved, *, where: str | None, alone: bool, as_json: bool) -> None:
    """Read every file of the archive, compare it with its digest, and see that the files follow each other.

    Snapshots are read to their end and compared with what they say of themselves.

    Which files there must be says the log, by way of a store. Something wrong is exit code 9.
    """
    found = _archive(resolved.settings, where)
    if (alone or where is not None) and not found.exists():
        raise _absent(found, resolved.settings)
    records = None if alone else _records(resolved)
    report = found.verify(records)
    snapshots = found.list_snapshots()
    report.problems += _wrong_snapshots(found, snapshots, resolved.settings.subject_prefix)
    told = {
        "url": found.url,
        "files": report.files,
        "facts": report.facts,
        "problems": report.problems,
        "extra": report.extra,
        "snapshots": len(snapshots),
    }
    if as_json:
        emit_json(told)
    else:
        _print_report(told, extra=report.extra, problems=report.problems)
    if report.problems:
        count = "1 problem" if len(report.problems) == 1 else f"{len(report.problems)} problems"
        raise CorruptError(f"{count} in the archive {found.url}", problems=report.problems)


def _wrong_snapshots(found: Archive, snapshots: Sequence[StoredSnapshot], prefix: str) -> list[str]:
    """What is wrong with the snapshots, each of which is read to its end."""
    from tensorbus.lifecycle import Loader

    problems = []
    for one in snapshots:
        loader = Loader(Subjects(prefix))
        try:
            for piece in found.read_snapshot(one):
                loader.feed(piece)
            loader.finish()
        except TensorbusError as error:
            problems.append(str(error) if one.file in str(error) else f"{one.file}: {error}")
            continue
        if loader.seq != one.seq or not loader.hash.startswith(one.hash):
            problems.append(
                f"{one.file} is not what its name says: it is the state at {loader.seq}, {loader.hash[:16]}"
            )
    return problems


def _print_report(told: dict[str, object], *, extra: Sequence[str], problems: Sequence[str]) -> None:
    facts([(key, str(told[key])) for key in ("url", "files", "facts", "snapshots")])
    for name in extra:
        print(f"not named by the log: {name}")
    for problem in problems:
        print(f"wrong: {problem}")


def _records(resolved: Resolved) -> list[ArchiveFile]:
    """The files that the log names.

    Raises:
        UnavailableError: If no store tells; says what to do without.
    """
    from tensorbus.bus import ArchiveFile

    async def work(bus: AsyncBus) -> list[ArchiveFile]:
        async with await bus.query(RECORDS, rows=None) as result:
            return [ArchiveFile(**row) for row in await result.dicts()]

    try:
        return with_bus(resolved, work)
    except UnavailableError as exc:
        what = f"which files there must be, a store knows, and none answers: {exc.message}; --alone goes by their names"
        raise UnavailableError(what) from exc


@archive.command(short_help="Make a store's file from the archive alone.")
@click.option(
    "--into", "path", type=GivenPath(), required=True, metavar="FILE", help="The file to make, e.g. log.duckdb."
)
@click.option("--url", "where", metavar="URL", help="A folder or an fsspec URL (default: the setting archive_url).")
@takes_settings("home", "subject_prefix")
@json_option
def restore(resolved: Resolved, *, path: Path, where: str | None, as_json: bool) -> None:
    """Make a store's file from the archive alone, each file of which is verified first.

    `tensorbus query --db FILE SQL` asks it. Neither a bus nor a worker is needed. Facts that were not archived yet are
    not in it, and whether more were archived than are there, only a log or its store can tell.
    """
    if path.exists():
        raise ConflictError(f"{path} is there already; name another, or remove it", path=str(path))
    found = _archive(resolved.settings, where)
    files = found.files(passed_over=lambda text: print(f"tensorbus: passed over: {text}", file=sys.stderr))
    if not files:
        raise _absent(found, resolved.settings)
    count, position = _restore(found, files, path, prefix=resolved.settings.subject_prefix)
    nbytes = path.stat().st_size
    if as_json:
        emit_json({"file": str(path), "facts": count, "first": files[0].first, "position": position, "nbytes": nbytes})
    else:
        print(f"{path} holds {count} facts up to {position}, {size(nbytes)}; ask it with `tensorbus query --db`")
        print(f"whether facts after {position} were archived, the archive alone cannot tell")


def _restore(found: Archive, files: Sequence[ArchiveFile], path: Path, *, prefix: str) -> tuple[int, int]:
    """Fill the file; how many facts it has, and the last one's sequence."""
    from tensorbus.projections import GlobalStore

    fresh = GlobalStore.create_fresh(path, subjects=Subjects(prefix))
    try:
        total, nbytes = sum(file.count for file in files), sum(file.nbytes for file in files)
        done = 0
        with Progress("restore") as progress:
            for done in _fill(fresh, found, files, prefix):
                progress(nbytes * done // max(1, total), nbytes)
        position, _ = fresh.position
        fresh.adopt().close()
    except BaseException:
        fresh.close()
        for left in path.parent.glob(f"{fresh.path.name}*"):
            left.unlink()
        raise
    return done, position


def _fill(store: GlobalStore, found: Archive, files: Sequence[ArchiveFile], prefix: str) -> Iterator[int]:
    """Fold all facts into the store; gives how many it has after each batch."""
    from tensorbus.feeds import decode_all
    from tensorbus.lifecycle import Directory
    from tensorbus.projections import RowTracker

    state = Directory(Subjects(prefix))
    tracker, done = RowTracker(state), 0
    messages = (message for batch in found.read(files) for message in batch)
    while chunk := list(islice(messages, FACTS_MAX)):
        recorded = decode_all(chunk)
        _check_beginning(recorded, files[0].first)
        store.apply([tracker.applied(one, state.apply(one)) for one in recorded])
        done += len(chunk)
        yield done


def _check_beginning(recorded: Sequence[AnyRecorded], first: int) -> None:
    """See that no file from before the first one is told of.

    Raises:
        NotFoundError: If one is: the archive does not begin where the log did.
    """
    for one in recorded:
        if isinstance(one.event, Archived) and one.event.first < first:
            what = f"the archive begins at {first} and lacks {one.event.file}"
            raise NotFoundError(what, file=one.event.file, first=one.event.first, last=one.event.last)


def _archive(settings: Settings, where: str | None) -> Archive:
    from tensorbus.bus import Archive

    return Archive.open(where or settings.archive_url or str(settings.home / "archive"), prefix=settings.subject_prefix)


def _absent(found: Archive, settings: Settings) -> NotFoundError:
    return NotFoundError(f"there is no archive of the log {settings.subject_prefix!r} in {found.url}", url=found.url)
