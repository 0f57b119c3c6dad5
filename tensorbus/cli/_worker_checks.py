"""The checks of `tensorbus doctor` that look at workers: those of this home, and those that the log calls live."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from tensorbus.cli._output import size
from tensorbus.cli._path_checks import check_paths
from tensorbus.cli._probes import ask_worker, is_stopped
from tensorbus.cli._verdict import State, Verdict, command
from tensorbus.clock import Deadline
from tensorbus.config import Settings
from tensorbus.errors import TensorbusError
from tensorbus.transport import WorkerCard, living_workers

PROBE_S: Final = 3.0


@dataclass(slots=True)
class _Seen:
    """What the workers of the home answered."""

    hashes: dict[object, dict[str, object]] = field(default_factory=dict)
    sessions: list[dict[str, Any]] | None = None
    stores: dict[str, dict[str, Any]] = field(default_factory=dict)
    """What each store of the home says of itself."""
    full_of_pins: dict[str, str] = field(default_factory=dict)
    """How much is pinned on workers of the home where it is more than half of their memory."""


async def check_workers(settings: Settings) -> list[Verdict]:
    """Each worker of the home, the paths that bytes take, whether there is a witness, and whether directories agree."""
    cards = living_workers(settings.home)
    if not cards and settings.url is not None:
        return [Verdict("workers", State.OK, "none in this home; a gateway is named")]
    if not cards:
        home = ("--home", settings.home)
        advice = f"{command('tensorbus', 'up', *home)}, or {command('tensorbus', 'worker', *home)}"
        return [Verdict("workers", State.WRONG, f"no worker lives in {settings.home}", advice)]
    seen = _Seen()
    verdicts = [await _worker(settings, card, seen) for card in cards]
    live = [one for one in seen.sessions or () if one.get("live")]
    dead = [one for one in live if _is_dead(one, settings, cards)]
    verdicts += await check_paths(settings, cards, [one for one in live if one not in dead])
    if seen.sessions is not None:
        verdicts += _witness(settings, cards, live, dead)
        verdicts += _stores(settings, seen.stores, [one for one in live if one not in dead])
    verdicts += _directories(seen)
    for worker, text in seen.full_of_pins.items():
        advice = "`tensorbus show REF` lists an artifact's leases, `tensorbus unpin LEASE` ends one"
        verdicts.append(Verdict("pins", State.WARNING, f"{worker}: {text}", advice))
    return verdicts


async def _worker(settings: Settings, card: WorkerCard, seen: _Seen) -> Verdict:
    who = f"{card.worker} ({', '.join(card.roles)}), process {card.pid}"
    if is_stopped(card.pid):
        return Verdict("workers", State.WRONG, f"{who} is stopped", f"kill -CONT {card.pid}")
    try:
        deadline = Deadline(PROBE_S, what=f"asking worker {card.worker}")
        stats = await ask_worker(settings, card, "stats", deadline=deadline)
        if seen.sessions is None:
            listed = (await ask_worker(settings, card, "workers", deadline=deadline)).get("items")
            seen.sessions = listed if isinstance(listed, list) else None
    except (TensorbusError, OSError) as exc:
        advice = f"look at {settings.home / 'log'}; kill {card.pid} and start it again if it stays so"
        return Verdict("workers", State.WRONG, f"{who} does not answer: {exc}", advice)
    if isinstance(store := stats.get("store"), dict):
        seen.stores[card.worker] = store
    if text := _pinned(stats):
        seen.full_of_pins[card.worker] = text
    found = stats.get("directory")
    directory = found if isinstance(found, dict) else {}
    seen.hashes.setdefault(directory.get("position"), {})[card.worker] = directory.get("hash")
    if directory.get("degraded"):
        lost = f"{directory.get('gaps')} gaps, {directory.get('unknown')} unknown facts"
        advice = "upgrade or restart that worker; it reads the log again"
        return Verdict("directory", State.WRONG, f"{who}: its directory is degraded ({lost})", advice)
    return Verdict("workers", State.OK, f"{who} answers; {directory.get('artifacts')} artifacts")


def _pinned(stats: dict[str, Any]) -> str:
    """What to say of a worker whose pins leave little room, or empty."""
    pins, pool = stats.get("pins"), stats.get("pool")
    if not isinstance(pins, dict) or not isinstance(pool, dict):
        return ""
    nbytes, budget = int(pins.get("pinned_bytes", 0)), int(pool.get("budget_bytes", 0))
    if 2 * nbytes <= budget:
        return ""
    return f"{pins['leases']} pins keep {size(nbytes)} of its {size(budget)} of memory, which no put can have"


def _witness(
    settings: Settings, cards: Sequence[WorkerCard], live: Sequence[dict[str, Any]], dead: Sequence[dict[str, Any]]
) -> Iterator[Verdict]:
    """Sessions whose process is gone are ended by a gateway. Without one they stay."""
    witnesses = [
        str(one["worker"]) for one in live if {"gateway", "shard-home", "store"} & set(one["roles"]) and one not in dead
    ]
    if not witnesses:
        advice = "start " + command("tensorbus", "worker", "--roles", "gateway", "--home", settings.home)
        yield Verdict("witness", State.WRONG, "no witness: dead workers stay listed as live", advice)
    else:
        yield Verdict("witness", State.OK, f"{', '.join(witnesses[:5])} ends the sessions of dead workers")
    for one in dead:
        found = f"the log calls {one['worker']} live, but its process {one['pid']} is gone from this host"
        if witnesses:
            yield Verdict("sessions", State.WARNING, found, "a witness ends that session in a few seconds")
        else:
            yield Verdict("sessions", State.WRONG, found, "ends when there is a witness again")


def _stores(
    settings: Settings, stores: Mapping[str, dict[str, Any]], alive: Sequence[dict[str, Any]]
) -> Iterator[Verdict]:
    """The stores of this home, and whether one of all stores keeps the log: else it grows."""
    for worker, says in stores.items():
        if trouble := str(says.get("trouble", "")):
            advice = f'see docs/operations.md, "The store", and {settings.home / "log"}'
            yield Verdict("store", State.WRONG, f"store {worker}: {trouble}", advice)
        else:
            keeps = " and keeps it" if says.get("keeps_log") else ""
            yield Verdict("store", State.OK, f"store {worker} follows the log{keeps}")
    start = command("tensorbus", "worker", "--roles", "store", "--home", settings.home)
    if not stores and not any("store" in one["roles"] for one in alive):
        found = "no store: the log grows, and query, state and why have no answer"
        yield Verdict("store", State.WARNING, found, f"pip install 'tensorbus[store]', then {start}")
    elif stores and all(says.get("keeper") == "" for says in stores.values()):
        found = "no store keeps the log: nothing is archived or purged, and it grows"
        advice = f"a store that is well takes that over within seconds; mend one, or start another: {start} --id NAME"
        yield Verdict("store", State.WARNING, found, advice)


def _is_dead(session: dict[str, Any], settings: Settings, cards: Sequence[WorkerCard]) -> bool:
    """Whether a session of this host has no process. One of another home has no card here, so its pid decides."""
    if session.get("host") != settings.host_id or any(card.incarnation == session["incarnation"] for card in cards):
        return False
    return not os.path.exists(f"/proc/{session.get('pid')}")


def _directories(seen: _Seen) -> Iterator[Verdict]:
    for position, by_worker in seen.hashes.items():
        if len(set(by_worker.values())) > 1:
            found = f"at position {position} the directories of {', '.join(by_worker)} differ"
            yield Verdict("directory", State.WRONG, found, "a bug: keep the logs and restart the workers")
