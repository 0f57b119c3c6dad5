"""What a home answers: pages that come and go, where they lie, and how it stands."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

from tensorbus.errors import FencedError, InvalidArgumentError
from tensorbus.events import RECORD, PageHolder
from tensorbus.ids import Incarnation, WorkerId
from tensorbus.model import PageOutcome, PageState, shard_of
from tensorbus.transport import Reply, Request
from tensorbus.workers import _requests as ask
from tensorbus.workers import _requests_pages as page_ask
from tensorbus.workers._callers import Caller
from tensorbus.workers._core import Core
from tensorbus.workers._directory_ops import Op
from tensorbus.workers._home import HomeRole
from tensorbus.workers._home_proof import caught_up
from tensorbus.workers._home_shard import HomeShard, Records

SLICE: Final = 1024
"""Pages that are dealt with before others get their turn on the loop: a few milliseconds' worth."""


class HomeOps:
    """Operations on the pages whose home this worker is."""

    def __init__(self, core: Core, role: HomeRole) -> None:
        self._core = core
        self._role = role

    def table(self) -> dict[str, Op]:
        return {
            "page_add": self.page_add,
            "page_lookup": self.page_lookup,
            "page_remove": self.page_remove,
            "page_clear": self.page_clear,
            "page_flush": self.page_flush,
            "page_handover": self.page_handover,
            "page_status": self.page_status,
        }

    # -- what changes -------------------------------------------------------------------------------------------------

    async def page_add(self, _caller: Caller, request: Request) -> Reply:
        asked = ask.parse(page_ask.PageAdd, request.args, op="page_add")
        tokens = dict(asked.tokens)
        records = page_ask.records_of(request.body, keyspaces=len(asked.keyspaces), op="page_add")
        holder, tables = _holder(asked.holder), _Holders()
        outcomes = np.full(len(records), PageOutcome.FENCED, np.uint8)
        redirects: dict[int, None] = {}
        firsts: dict[int, np.void] = {}
        if await self._lives(holder, request):
            for shard, places in self._by_shard(_keys(records)):
                home = self._home(shard, tokens, redirects)
                if not isinstance(home, HomeShard):
                    outcomes[places] = _OUTCOME[home]
                    continue
                for part in _slices(places):
                    if self._role.serving.get(shard) is not home:  # handed over between two slices
                        outcomes[part], redirects[shard] = PageOutcome.NOT_HOME, None
                        continue
                    added = home.add(records[part], tuple(asked.keyspaces), holder, replica=asked.replica)
                    outcomes[part] = added.outcomes
                    existed = part[added.outcomes == PageOutcome.EXISTED]
                    firsts.update(zip(existed.tolist(), tables.named(home, added.first), strict=True))
                    await asyncio.sleep(0)
            self._note_said(asked, holder, redirects)
        if asked.ack == "log":
            lost = await self._flush(np.unique(self._shards(_keys(records))).tolist(), request)
            outcomes[np.isin(self._shards(_keys(records)), lost) & (outcomes == PageOutcome.STORED)] = (
                PageOutcome.NOT_HOME
            )
        first = np.array([firsts[at] for at in sorted(firsts)], RECORD)
        first["keyspace"] = records["keyspace"][sorted(firsts)]
        return Reply(
            {"holders": tables.names, "redirects": self._redirects(redirects)},
            body=outcomes.tobytes() + first.tobytes(),
        )

    async def page_remove(self, _caller: Caller, request: Request) -> Reply:
        asked = ask.parse(page_ask.PageRemove, request.args, op="page_remove")
        tokens = dict(asked.tokens)
        records = page_ask.records_of(request.body, keyspaces=len(asked.keyspaces), op="page_remove")
        outcomes = np.full(len(records), PageOutcome.STORED, np.uint8)
        redirects: dict[int, None] = {}
        removed = 0
        for shard, places in self._by_shard(_keys(records)):
            home = self._home(shard, tokens, redirects)
            if not isinstance(home, HomeShard):
                outcomes[places] = _OUTCOME[home]
                continue
            for part in _slices(places):
                if self._role.serving.get(shard) is not home:
                    outcomes[part], redirects[shard] = PageOutcome.NOT_HOME, None
                    continue
                removed += home.remove(records[part], tuple(asked.keyspaces), _holder(asked.holder))
                await asyncio.sleep(0)
        if asked.ack == "log":
            await self._flush(np.unique(self._shards(_keys(records))).tolist(), request)
        return Reply({"removed": removed, "redirects": self._redirects(redirects)}, body=outcomes.tobytes())

    async def page_clear(self, _caller: Caller, request: Request) -> Reply:
        """Clears a keyspace in every shard that the call names."""
        asked = ask.parse(page_ask.PageClear, request.args, op="page_clear")
        tokens = dict(asked.tokens)
        redirects: dict[int, None] = {}
        removed, done = 0, []
        for shard in tokens:
            home = self._home(shard, tokens, redirects)
            if isinstance(home, HomeShard):
                removed += home.clear(asked.keyspace)
                done.append(shard)
                await asyncio.sleep(0)
        lost = await self._flush(done, request)
        redirects.update(dict.fromkeys(lost))
        done = [shard for shard in done if shard not in lost]
        return Reply({"removed": removed, "cleared": done, "redirects": self._redirects(redirects)})

    async def page_flush(self, _caller: Caller, request: Request) -> Reply:
        asked = ask.parse(page_ask.PageFlush, request.args, op="page_flush")
        tokens = dict(asked.tokens)
        redirects: dict[int, None] = {}
        mine = [shard for shard in tokens if isinstance(self._home(shard, tokens, redirects), HomeShard)]
        lost = await self._flush(mine, request)
        redirects.update(dict.fromkeys(lost))
        flushed = [shard for shard in mine if shard not in lost]
        return Reply({"flushed": flushed, "redirects": self._redirects(redirects)})

    async def page_handover(self, _caller: Caller, request: Request) -> Reply:
        asked = ask.parse(page_ask.PageHandover, request.args, op="page_handover")
        to = WorkerId(asked.to[0]), Incarnation(asked.to[1])
        handed = self._role.hand_over(asked.shard, token=asked.token, to=to, deadline=request.deadline)
        return Reply({"exact": await self._core.finish(handed, name=f"hand over shard {asked.shard}")})

    # -- what is asked ------------------------------------------------------------------------------------------------

    async def page_lookup(self, _caller: Caller, request: Request) -> Reply:
        asked = ask.parse(page_ask.PageLookup, request.args, op="page_lookup")
        tokens = dict(asked.tokens)
        keys = page_ask.keys_of(request.body, op="page_lookup")
        fragments = range(asked.fragments) if asked.fragment is None else [asked.fragment]
        if len(keys) * len(fragments) > page_ask.PAGES_MAX:
            asks = f"{len(keys)} keys of {len(fragments)} fragments"
            raise InvalidArgumentError(f"page_lookup: {asks} are more than {page_ask.PAGES_MAX} pages; ask in parts")
        states = np.full((len(keys), len(fragments)), PageState.MISSING, np.uint8)
        found = np.zeros((len(keys), len(fragments)), RECORD)
        redirects: dict[int, None] = {}
        tables = _Holders()
        for shard, places in self._by_shard(keys):
            home = self._home(shard, tokens, redirects)
            if not isinstance(home, HomeShard):
                states[places] = home
                continue
            for part in _slices(places):
                for column, fragment in enumerate(fragments):
                    state, records = home.look(keys[part], asked.keyspace, fragment, host=asked.host)
                    states[part, column] = state
                    hits = state == PageState.HIT
                    found[part[hits], column] = tables.named(home, records[hits])
                if len(places) > SLICE:
                    await asyncio.sleep(0)
        found["keyspace"] = 0
        return Reply(
            {"holders": tables.names, "redirects": self._redirects(redirects)},
            body=states.tobytes() + found[states == PageState.HIT].tobytes(),
        )

    async def page_status(self, _caller: Caller, _request: Request) -> Reply:
        return Reply(self.status())

    def figures(self) -> dict[str, object]:
        """The same in sums."""
        homes = list(self._role.serving.values())
        degraded = sum(bool(home.waiting) for home in homes)
        return {
            "alive": self._role.alive,
            "exact": len(homes) - degraded,
            "degraded": degraded,
            "rebuilding": len(self._role.rebuilding),
            "pages": sum(len(home.table) for home in homes),
            "index_bytes": sum(home.table.nbytes for home in homes),
            "lag": sum(home.log.waiting for home in homes),
        }

    def status(self) -> dict[str, object]:
        """How the shards here stand."""
        return {
            "worker": self._core.me.worker,
            "alive": self._role.alive,
            "shards": [
                {
                    "shard": home.shard,
                    "token": home.token,
                    "state": str(home.health),
                    "pages": len(home.table),
                    "index_bytes": home.table.nbytes,
                    "number": home.log.number,
                    "lag": home.log.waiting,
                    "waiting": sorted(holder.worker for holder in home.waiting),
                }
                for home in sorted(self._role.serving.values(), key=lambda home: home.shard)
            ],
            "rebuilding": self._role.rebuilding,
        }

    # -- helpers ------------------------------------------------------------------------------------------------------

    def _shards(self, keys: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
        return shard_of(keys, max(self._core.state.shards, 1))

    def _by_shard(self, keys: npt.NDArray[np.uint8]) -> Iterator[tuple[int, npt.NDArray[np.int64]]]:
        """Each shard that keys lie in, and their places."""
        shards = self._shards(keys)
        for shard in np.unique(shards).tolist():
            yield shard, np.flatnonzero(shards == shard)

    def _home(self, shard: int, tokens: Mapping[int, int], redirects: dict[int, None]) -> HomeShard | PageState:
        """The shard, if it is served here under the token that the caller knows; else why not."""
        if not self._role.alive:
            return PageState.UNAVAILABLE
        home, known = self._role.serving.get(shard), tokens.get(shard, 0)
        if home is not None and home.token == known:
            return home
        if home is None and shard in self._role.rebuilding:
            return PageState.UNAVAILABLE
        redirects[shard] = None
        return PageState.NOT_HOME

    def _redirects(self, shards: Iterable[int]) -> list[list[object]]:
        """Shard, token, worker and incarnation of whose each is, as far as is known here."""
        leases = ((shard, self._role.lease(shard)) for shard in shards)
        return [
            [shard, 0, "", ""] if lease is None else [shard, lease.token, lease.holder, lease.incarnation]
            for shard, lease in leases
        ]

    async def _lives(self, holder: PageHolder, request: Request) -> bool:
        if not self._role.is_live(holder):
            await caught_up(self._core, deadline=request.deadline)
        return self._role.is_live(holder)

    def _note_said(self, asked: page_ask.PageAdd, holder: PageHolder, redirects: dict[int, None]) -> None:
        tokens = dict(asked.tokens)
        for shard in asked.said:
            home = self._home(shard, tokens, redirects)
            if isinstance(home, HomeShard):
                home.said(holder)

    async def _flush(self, shards: list[int], request: Request) -> list[int]:
        """Wait for the stream; gives the shards that another home has now."""
        lost = []
        for shard in shards:
            home = self._role.serving.get(shard)
            try:
                if home is not None:
                    await home.log.flush(deadline=request.deadline)
            except FencedError:
                home = None
            if home is None:
                lost.append(shard)
        return lost


_OUTCOME: Final = {
    PageState.NOT_HOME: PageOutcome.NOT_HOME,
    PageState.UNAVAILABLE: PageOutcome.UNAVAILABLE,
}


class _Holders:
    """The table of holders in an answer."""

    def __init__(self) -> None:
        self.names: list[list[str]] = []
        self._places: dict[PageHolder, int] = {}

    def named(self, home: HomeShard, records: Records) -> Records:
        """Records with places in this table instead of the shard's numbers."""
        records = records.copy()
        numbers, back = np.unique(records["holder"], return_inverse=True)
        places = np.array([self._place(home.holder(number)) for number in numbers.tolist()], np.uint16)
        records["holder"] = places[back]
        return records

    def _place(self, holder: PageHolder) -> int:
        if holder not in self._places:
            self._places[holder] = len(self.names)
            self.names.append([holder.worker, holder.incarnation])
        return self._places[holder]


def _holder(life: tuple[str, str]) -> PageHolder:
    return PageHolder(worker=WorkerId(life[0]), incarnation=Incarnation(life[1]))


def _keys(records: Records) -> npt.NDArray[np.uint8]:
    return np.ascontiguousarray(records["key"]).view(np.uint8).reshape(-1, 32)


def _slices(places: npt.NDArray[np.int64]) -> Iterator[npt.NDArray[np.int64]]:
    return (places[at : at + SLICE] for at in range(0, len(places), SLICE))
