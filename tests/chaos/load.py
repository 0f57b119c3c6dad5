"""Callers that put all the time, and what must be true of what was acknowledged to them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from tensorbus.clock import Deadline
from tests.integration.workers.actor import data_of
from tests.integration.workers.raw import Raw

NBYTES = 2000
SAME_S = 60.0


@dataclass
class Load:
    """One caller for each connection. A call that fails, fails the test: the bus may be away, not the answer.

    Attributes:
        acked: The artifact that each acknowledged key names, and the seed of its bytes.
        position: The last acknowledged position.
        kept: Artifacts that each caller keeps; beyond, it ends one for each that it puts.
        pause_s: Seconds between two puts of a caller.
        puts: How many were begun.
    """

    raws: Sequence[Raw]
    kept: int = 1 << 30
    pause_s: float = 0.02
    acked: dict[str, tuple[str, object]] = field(default_factory=dict)
    position: int = 0
    puts: int = 0

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Put for as long as the context is open, then finish what is under way."""
        stop = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            for number, raw in enumerate(self.raws):
                group.create_task(self._one(raw, number, stop))
            try:
                yield
            finally:
                stop.set()

    async def put(self, raw: Raw, key: str) -> None:
        """Put new bytes under a new key."""
        self.puts += 1
        taken = await raw.put({"w": data_of(key, NBYTES)}, key=key)
        self.acked[key] = (taken["artifact"]["artifact"], key)
        self.position = max(self.position, taken["position"])

    async def more(self, count: int, *, timeout_s: float = SAME_S) -> None:
        """Wait until so many more were acknowledged."""
        wanted = self.puts + count + len(self.raws)
        async with Deadline(timeout_s, what=f"{count} more puts").scope():
            while self.puts < wanted:
                await asyncio.sleep(0.01)

    async def end(self, raw: Raw, key: str) -> None:
        """End an artifact, and all its names with it."""
        artifact, _ = self.acked.pop(key)
        ended = await raw.call("destroy", artifact=artifact)
        self.position = max(self.position, ended["position"])

    async def _one(self, raw: Raw, number: int, stop: asyncio.Event) -> None:
        rng, mine = random.Random(number), list[str]()
        while not stop.is_set():
            mine.append(f"load/{number}/{self.puts}")
            await self.put(raw, mine[-1])
            if len(mine) > self.kept:
                await self.end(raw, mine.pop(rng.randrange(len(mine))))
            await asyncio.sleep(self.pause_s)

    async def check(self, raw: Raw) -> None:
        """Whatever was acknowledged is there under its key, byte for byte."""
        for key, (artifact, seed) in self.acked.items():
            record = await raw.resolve(key, at_least=self.position)
            assert record["artifact"] == artifact, f"{key} names another artifact"
            opened = await raw.open(artifact)
            assert opened.bytes("w") == data_of(seed, NBYTES), f"{key} has other bytes"


async def in_step(raws: Sequence[Raw], *, timeout_s: float = SAME_S) -> str:
    """Wait until all workers have the same state, which lacks nothing; its hash."""
    found: list[dict[str, Any]] = []
    try:
        async with Deadline(timeout_s, what="equal states").scope():
            while True:
                found = [(await raw.stats())["directory"] for raw in raws]
                sane = all((each["gaps"], each["unknown"], each["degraded"]) == (0, 0, False) for each in found)
                if sane and len({each["hash"] for each in found}) == 1:
                    return str(found[0]["hash"])
                await asyncio.sleep(0.05)
    except TimeoutError as exc:
        raise AssertionError(f"the workers differ: {found}") from exc
