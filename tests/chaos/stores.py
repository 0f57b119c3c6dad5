"""Stores that are always busy, and what must be true of their rows, the archive and the log together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

from tensorbus.bus import Archive, Bus, NatsBus
from tensorbus.clock import Deadline
from tensorbus.feeds import archived_files
from tensorbus.projections import GlobalStore
from tests.chaos.conftest import WAIT_S, Place
from tests.integration.workers.raw import Raw
from tests.integration.workers.test_store_role import projected

BUSY: Final = {"archive_s": 0.3, "snapshot_facts": 20, "keep_facts": 10, "purge_delay_s": 1.0, "forget_s": 2.0}
"""Settings with which a store archives, takes snapshots, purges and forgets all the time."""


@asynccontextmanager
async def bus_of(place: Place) -> AsyncIterator[Bus]:
    bus = await NatsBus.connect(place.url)
    try:
        yield bus
    finally:
        await bus.close()


def archive_of(place: Place) -> Archive:
    return Archive.open(str(place.home / "archive"))


async def store_of(raw: Raw) -> dict[str, Any]:
    """What a store says of itself."""
    found: dict[str, Any] = (await raw.stats())["store"]
    return found


async def until_store(raw: Raw, what: str, *, timeout_s: float = WAIT_S, **least: object) -> dict[str, Any]:
    """Wait until figures of a store are at least these, and its text or truth these."""
    found: dict[str, Any] = {}
    try:
        async with Deadline(timeout_s, what=what).scope():
            while True:
                found = await store_of(raw)
                if all(_is(found[name], wanted) for name, wanted in least.items()):
                    return found
                await asyncio.sleep(0.05)
    except TimeoutError as exc:
        raise AssertionError(f"{what} did not come: {found}") from exc


def _is(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, bool):
        return bool(found) is wanted
    return wanted in found if isinstance(wanted, str) else found >= wanted


async def whole(place: Place, *stores: str, at_least: int) -> None:
    """Stores that do not run any more have the rows of all of history, and no part of that is missing anywhere."""
    archive = archive_of(place)
    async with bus_of(place) as bus:
        files = await archived_files(bus)
        assert files, "nothing was archived"
        assert archive.verify(files).problems == []
        for name in stores:
            was = GlobalStore.open(place.home / "store" / f"{name}.duckdb", subjects=bus.subjects)
            position, told, first = was.position[0], was.hash(), was.first
            was.close()
            assert position >= at_least, f"{name} lags"
            assert first == 0
            anew = place.home / f"{name}-anew.duckdb"
            replayed = await projected(anew, bus, archive, upto=position)
            assert told.split("; ") == replayed.split("; "), f"{name} has other rows than a full replay"
            anew.unlink()
