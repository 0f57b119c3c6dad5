"""``store``: how the stores are, and making one anew."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from tensorbus.cli._client import with_bus
from tensorbus.cli._options import CLIENT, json_option, takes_settings
from tensorbus.cli._output import age, emit_json, facts, size, table
from tensorbus.clock import SystemClock
from tensorbus.config import Resolved
from tensorbus.errors import InvalidArgumentError, NotFoundError, TensorbusError
from tensorbus.ids import check_worker_id
from tensorbus.transport import living_workers

if TYPE_CHECKING:
    from tensorbus.sdk import AsyncBus

ROLE: Final = "store"

_LOG: Final = (
    "holder", "token", "files", "archive_first", "archive_last", "archive_nbytes", "announced", "completed",
    "truncations", "newest_ns",
)  # fmt: skip
"""What a store says of the log, as every store does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStatus:
    """One store.

    Attributes:
        lag: Sequences that it is behind the worker that was asked; ``None`` if it does not answer.
        first: Sequence at which its history begins; 0: with the log.
        newest_ns: Stream time of the last fact in it.
        error: Why it does not answer.
        kind: The error's kind.
    """

    worker: str
    position: int | None = None
    lag: int | None = None
    first: int | None = None
    newest_ns: int | None = None
    error: str | None = None
    kind: str | None = None


@click.group(short_help="Look at the stores, or make one anew.")
def store() -> None:
    """Look at the stores, which answer `query`, `state`, `diff`, `history` and `why`, or make one anew."""


@store.command(short_help="Show how the stores, the archive and the purges are.")
@takes_settings(*CLIENT)
@json_option
def status(resolved: Resolved, *, as_json: bool) -> None:
    """Show how far each store has read, who keeps the log, and what is archived and purged."""

    async def work(bus: AsyncBus) -> None:
        stores = [worker.worker for worker in await bus.list_workers() if worker.live and ROLE in worker.roles]
        head = int((await bus.stats())["directory"]["position"])
        found, log = [], None
        for worker in stores:
            one, said = await _status(bus, worker, head)
            found.append(one)
            log = log or said
        if as_json:
            emit_json({"stores": found, "log": log, "head": head})
        else:
            _print(found, log)

    with_bus(resolved, work)


async def _status(bus: AsyncBus, worker: str, head: int) -> tuple[StoreStatus, dict[str, Any] | None]:
    """How one store is, and what it says of the log."""
    try:
        said = await bus.store_status(worker)
    except TensorbusError as exc:
        return StoreStatus(worker=worker, error=exc.message, kind=str(exc.kind)), None
    position = int(said["position"])
    found = StoreStatus(
        worker=worker,
        position=position,
        lag=max(0, head - position),
        first=int(said["first"]),
        newest_ns=said["newest_ns"],
    )
    return found, {name: said[name] for name in _LOG}


def _print(stores: list[StoreStatus], log: dict[str, Any] | None) -> None:
    if not stores:
        print(
            "no store runs: `tensorbus up` starts one where `pip install 'tensorbus[store]'` was done, "
            "as does `tensorbus worker --roles store`"
        )
        return
    now_ns = SystemClock().wall_ns()
    holder = None if log is None else log["holder"]
    rows = [
        (
            one.worker,
            one.kind or ("answers" if one.error is None else "silent"),
            "yes" if one.worker == holder else "-",
            _number(one.position),
            _number(one.lag),
            "the log's" if one.first == 0 else _number(one.first),
            "-" if one.newest_ns is None else f"{age(one.newest_ns, now_ns=now_ns)} ago",
        )
        for one in stores
    ]
    table(
        ("STORE", "STATE", "KEEPS LOG", "POSITION", "LAG", "BEGINS AT", "NEWEST FACT"), rows, right=("POSITION", "LAG")
    )
    for one in stores:
        if one.error is not None:
            print(f"\n{one.worker}: {one.error}")
    if log is not None:
        print()
        facts(_log_facts(log))


def _log_facts(log: dict[str, Any]) -> list[tuple[str, str]]:
    archive, files = "nothing yet", log["files"]
    if files:
        archive = f"{log['archive_first']} to {log['archive_last']} in {files} files, {size(log['archive_nbytes'])}"
    purge = "nothing yet" if not log["completed"] else f"up to {log['completed']}"
    if (log["announced"] or 0) > (log["completed"] or 0):
        purge += f", announced up to {log['announced']}"
    return [
        ("log kept by", f"{log['holder']}, token {log['token']}" if log["holder"] else "nobody"),
        ("archived", archive),
        ("purged", purge),
        ("lost tails", str(log["truncations"])),
    ]


def _number(value: int | None) -> str:
    return "-" if value is None else str(value)


@store.command(short_help="Have a store of this home made anew.")
@click.option("--worker", "worker", metavar="ID", help="The store's worker id, where the home has several.")
@takes_settings("home")
@json_option
def rebuild(resolved: Resolved, *, worker: str | None, as_json: bool) -> None:
    """Have a store of this home made anew, from the archive and the log.

    A store that runs drops its file at once and reads all of history again, answering nothing meanwhile; one that does
    not run does so at its next start.
    """
    home = resolved.settings.home
    live = [card.worker for card in living_workers(home) if ROLE in card.roles]
    chosen = _chosen(home / ROLE, live, worker)
    mark = home / ROLE / f"{chosen}.rebuild"
    mark.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    mark.touch()
    running = chosen in live
    if as_json:
        emit_json({"worker": chosen, "mark": str(mark), "running": running})
    else:
        when = "it begins now; `tensorbus store status` shows how far it is" if running else "at its next start"
        print(f"store {chosen} is made anew: {when}")


def _chosen(folder: Path, live: list[str], worker: str | None) -> str:
    """The store that is meant.

    Raises:
        NotFoundError: If the home has none, or not that one; InvalidArgumentError: If it has several.
    """
    there = sorted({*live, *(path.stem for path in folder.glob("*.duckdb"))})
    if worker is not None and check_worker_id(worker) in there:
        return worker
    if worker is not None or not there:
        known = f" (there are: {', '.join(there)})" if there else ""
        raise NotFoundError(f"there is no store {worker or ''} in {folder.parent}".replace("  ", " ") + known)
    if len(there) > 1:
        raise InvalidArgumentError(f"this home has several stores: say --worker {' or --worker '.join(there)}")
    return there[0]
