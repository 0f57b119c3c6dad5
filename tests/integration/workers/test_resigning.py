"""A keeper of the log whose own store breaks for good makes room: another store archives and purges on."""

from __future__ import annotations

import resource
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import tensorbus as tb
from tensorbus.bus import NatsBus
from tensorbus.events import Subjects
from tensorbus.feeds import archived_files
from tensorbus.testing._processes import WorkerProgram
from tests.integration.conftest import Nats
from tests.integration.workers.raw import Raw
from tests.integration.workers.test_store_role import BUSY, archive, churn, folded, rows, until

pytestmark = pytest.mark.integration
Start = Callable[..., WorkerProgram]
__all__ = ["archive"]

FILE_BYTES = 64 << 10
"""Less than a store's file needs, and more than anything else that it writes."""


@dataclass
class Stores:
    """Two stores, the first of which keeps the log, and a caller who gives them work."""

    caller: Any
    programs: dict[str, WorkerProgram]
    raws: dict[str, Raw]

    async def says(self, name: str) -> dict[str, Any]:
        return dict((await self.raws[name].stats())["store"])

    async def until(self, name: str, what: str, holds: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
        """Give work until a store's figures are as they should be."""
        found: dict[str, Any] = {}

        async def look() -> bool:
            nonlocal found
            await churn(self.caller, 5)
            found = await self.says(name)
            return bool(holds(found))

        await until(look, what)
        return found


@pytest.fixture
async def stores(start_worker: Start, home: Path) -> AsyncIterator[Stores]:
    start_worker("basic,gateway", id="w")
    async with AsyncExitStack() as stack:
        caller = await stack.enter_async_context(tb.aconnect(home=home))
        made = Stores(caller, {}, {})
        for name in ("s1", "s2"):
            made.programs[name] = start_worker("store", id=name, **BUSY, resign_s=1.0)
            made.raws[name] = await stack.enter_async_context(await Raw.unix(made.programs[name].socket))
            if name == "s1":
                await made.until("s1", "the role", lambda says: says["keeps_log"] and says["purged"])
        yield made


@contextmanager
def full_for(program: WorkerProgram) -> Any:
    """As on a full disk, for one process alone: no file of it grows beyond a size."""
    resource.prlimit(program.pid, resource.RLIMIT_FSIZE, (FILE_BYTES, resource.RLIM_INFINITY))
    yield
    resource.prlimit(program.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


async def test_a_keeper_whose_disk_stays_full_makes_room_and_comes_back_once_it_is_well(
    stores: Stores, nats: Nats, archive: Any
) -> None:
    with full_for(stores.programs["s1"]):
        taken = await stores.until("s2", "the other's role", lambda says: says["keeps_log"])
        assert taken["keeper"] == "s2"
        told = await stores.says("s1")
        assert (told["trouble_kind"], told["keeps_log"], told["keeper"]) == ("out_of_space", False, "s2")
        await stores.until(
            "s2", "a purge", lambda says: says["purged"] > taken["archived"] and says["archived"] > taken["purged"]
        )
        assert stores.programs["s1"].alive
        assert (await stores.says("s1"))["position"] < taken["position"]
    await stores.until("s1", "the rows of what it missed", lambda says: says["position"] >= taken["position"])
    assert not (await stores.says("s1"))["keeps_log"], "the other one keeps on"
    assert stores.programs["s2"].stop() == 0
    await stores.until("s1", "the role again", lambda says: says["keeps_log"] and not says["trouble"])
    said = await rows(stores.caller, "SELECT author, kept FROM facts WHERE type = 'RoleResigned' ORDER BY seq")
    assert said == [{"author": "s1", "kept": True}, {"author": "s2", "kept": True}]
    await told_whole(stores, nats, archive)


async def test_a_keeper_whose_file_is_no_file_any_more_makes_room(stores: Stores, home: Path) -> None:
    file = home / "store" / "s1.duckdb"
    file.rename(file.with_suffix(".away"))
    (file / "in").mkdir(parents=True)
    file.with_suffix(".rebuild").touch()
    taken = await stores.until("s2", "the other's role", lambda says: says["keeps_log"])
    await stores.until("s2", "an archived file", lambda says: says["archived"] > taken["archived"])
    told = await stores.says("s1")
    assert "s1.duckdb" in told["trouble"]
    assert stores.programs["s1"].alive
    (file / "in").rmdir()
    file.rmdir()
    await stores.until("s1", "the rows of all history", lambda says: says["position"] >= taken["position"])


async def told_whole(stores: Stores, nats: Nats, archive: Any) -> None:
    """Archive and log together are all that ever was, whoever archived it."""
    bus = await NatsBus.connect(nats.url, subjects=Subjects(nats.prefix))
    try:
        now = (await stores.raws["s1"].stats())["directory"]
        whole = await folded(bus, archive, upto=now["position"])
        assert (whole.seq, whole.hash()) == (now["position"], now["hash"])
        assert archive.verify(await archived_files(bus)).problems == []
    finally:
        await bus.close()
