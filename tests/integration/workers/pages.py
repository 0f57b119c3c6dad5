"""Asks homes about pages call by call, without the SDK. The locations are made up: a home knows no bytes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from tensorbus.clock import Deadline
from tensorbus.errors import ConflictError, TensorbusError, UnavailableError
from tensorbus.events import RECORD, RECORD_BYTES
from tensorbus.model import PageOutcome, PageState, shard_of
from tensorbus.testing._processes import WorkerProgram
from tests.integration.workers.raw import Raw

KEYSPACE = "ab" * 32
PART = 16_384


def keys_of(count: int, *, seed: int = 1) -> npt.NDArray[np.uint8]:
    """Keys that spread over all shards."""
    return np.random.default_rng(seed).integers(0, 256, (count, 32), np.uint8)


def records_for(keys: npt.NDArray[np.uint8], *, fragment: int = 0, ttl_s: int = 0, slot: int = 0) -> Any:
    records = np.zeros(len(keys), RECORD)
    records["key"] = np.ascontiguousarray(keys).view("V32").reshape(-1)
    records["fragment"], records["op"], records["nbytes"], records["ttl_s"] = fragment, 1, 4096, ttl_s
    records["segment"], records["generation"] = 7, 2
    records["slot"] = np.arange(slot, slot + len(keys))
    return records


@dataclass
class Homes:
    """All homes of a cluster as one worker knows them; answers that name another home are asked for again."""

    worker: Raw
    stack: AsyncExitStack
    connections: dict[tuple[str, str], Raw] = field(default_factory=dict)
    shards: int = 0
    table: list[tuple[int, int]] = field(default_factory=list)
    homes: list[list[str]] = field(default_factory=list)

    async def routes(self) -> None:
        said = await self.worker.call("page_routes")
        self.shards, self.table, self.homes = said["shards"], said["table"], said["homes"]

    def names(self) -> dict[str, int]:
        """How many shards each home has."""
        owners = [self.homes[at][0] for at, _ in self.table if at >= 0]
        return {name: owners.count(name) for name in sorted(set(owners))}

    async def served(self, names: Iterable[str], *, timeout_s: float = 30.0) -> None:
        """Wait until just these homes have and serve all shards."""
        wanted = sorted(names)
        async with Deadline(timeout_s, what=f"shards at {wanted}").scope():
            while True:
                await self.routes()
                if self.table and all(at >= 0 for at, _ in self.table) and sorted(self.names()) == wanted:
                    statuses = [await self.status(name) for name in wanted]
                    serving = sum(len(status["shards"]) for status in statuses)
                    even = max(self.names().values()) <= -(-9 * self.shards // (8 * len(wanted)))
                    if even and serving == self.shards and not any(status["rebuilding"] for status in statuses):
                        return
                await asyncio.sleep(0.02)

    async def to(self, home: int) -> Raw:
        worker, incarnation, socket, control, _ = self.homes[home]
        known = self.connections.get((worker, incarnation))
        if known is None or known.connection.closed:
            raw = await Raw.unix(socket) if socket else await Raw.tcp(control)  # type: ignore[arg-type]  # a path
            known = self.connections[worker, incarnation] = await self.stack.enter_async_context(raw)
        return known

    async def status(self, name: str) -> dict[str, Any]:
        at = next(at for at, home in enumerate(self.homes) if home[0] == name)
        return await (await self.to(at)).call("page_status")

    async def _ask(
        self, op: str, keys: npt.NDArray[np.uint8], body: npt.NDArray[Any], args: dict[str, Any], retry: tuple[int, ...]
    ) -> tuple[npt.NDArray[np.uint8], list[Any]]:
        """One byte for each key, and the answers; asked again until no byte is one of ``retry``."""
        out = np.full(len(keys), 255, np.uint8)
        open_ = np.arange(len(keys))
        answers = []
        async with Deadline(60, what=op).scope():
            while len(open_):
                await self.routes()
                shards = shard_of(keys[open_], self.shards)
                at = np.array([self.table[shard][0] for shard in shards])
                for home in np.unique(at[at >= 0]).tolist():
                    mine = open_[at == home]
                    for part in (mine[a : a + PART] for a in range(0, len(mine), PART)):
                        tokens = [[n, token] for n, (owner, token) in enumerate(self.table) if owner == home]
                        try:
                            to = await self.to(home)
                            reply = await to.reply(op, {**args, "tokens": tokens}, body=body[part].tobytes())
                        except (UnavailableError, ConnectionError):
                            continue
                        raw = bytes(reply.body)
                        out[part] = np.frombuffer(raw[: len(part)], np.uint8)
                        answers.append((part, reply.data, raw[len(part) :]))
                open_ = np.flatnonzero(np.isin(out, (255, *retry)))
                await asyncio.sleep(0.02 if len(open_) else 0)
        return out, answers

    async def add(
        self, keys: npt.NDArray[np.uint8], holder: WorkerProgram, *, ack: str = "home", **given: Any
    ) -> npt.NDArray[np.uint8]:
        args = {"holder": [holder.worker, holder.incarnation], "keyspaces": [KEYSPACE], "ack": ack}
        replica = given.pop("replica", False)
        records = records_for(keys, **given)
        retry = PageOutcome.NOT_HOME, PageOutcome.UNAVAILABLE
        return (await self._ask("page_add", keys, records, {**args, "replica": replica}, retry))[0]

    async def look(
        self, keys: npt.NDArray[np.uint8], *, keyspace: str = KEYSPACE, retry: tuple[int, ...] | None = None
    ) -> tuple[npt.NDArray[np.uint8], dict[int, tuple[str, int]]]:
        """States, and for each hit its holder and slot."""
        retry = (PageState.NOT_HOME, PageState.UNAVAILABLE) if retry is None else retry
        states, answers = await self._ask("page_lookup", keys, keys, {"keyspace": keyspace}, retry)
        places = {}
        for part, data, raw in answers:
            found = np.frombuffer(raw, RECORD)
            hits = part[states[part] == PageState.HIT]
            if len(found) == len(hits):
                for at, holder, slot in zip(hits, found["holder"], found["slot"], strict=True):
                    places[int(at)] = data["holders"][holder][0], int(slot)
        return states, places

    async def say_all(self, holder: WorkerProgram, keys: npt.NDArray[np.uint8] | None = None) -> None:
        """Announce what a holder has, of every shard."""
        keys = keys_of(0) if keys is None else keys
        life = [holder.worker, holder.incarnation]
        async with Deadline(60, what="announcing").scope():
            left = set(range(self.shards))
            while left:
                await self.routes()
                for home in range(len(self.homes)):
                    tokens = [[n, token] for n, (owner, token) in enumerate(self.table) if owner == home and n in left]
                    said = [n for n, _ in tokens]
                    mine = keys[np.isin(shard_of(keys, self.shards), said)]
                    args = {"holder": life, "keyspaces": [KEYSPACE], "replica": True, "said": said, "tokens": tokens}
                    try:
                        reply = await (await self.to(home)).reply("page_add", args, body=records_for(mine).tobytes())
                    except (UnavailableError, ConflictError):
                        continue
                    moved = {shard for shard, *_ in reply.data["redirects"]}  # type: ignore[attr-defined]
                    left -= set(said) - moved
                await asyncio.sleep(0.02)


__all__ = ["KEYSPACE", "RECORD_BYTES", "Homes", "TensorbusError", "keys_of", "records_for"]
