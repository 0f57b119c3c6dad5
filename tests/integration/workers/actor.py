"""A caller in a process of its own: ``python -m tests.integration.workers.actor VERB JSON``. It prints JSON lines."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

from tensorbus.errors import ConflictError, NotFoundError, OutOfSpaceError, TensorbusError
from tests.integration.workers.raw import Raw


def data_of(seed: object, nbytes: int) -> bytes:
    return random.Random(str(seed)).randbytes(nbytes)


def say(**words: object) -> None:
    print(json.dumps(words), flush=True)


async def register(raw: Raw, *, seed: str, count: int, nbytes: int) -> None:
    """Register many artifacts, say so, and stay."""
    for n in range(count):
        await raw.register({"w": data_of((seed, n), nbytes)}, key=f"{seed}/{n}", id=f"{seed}-{n}")
    say(event="registered", count=count)
    await asyncio.Event().wait()


async def put(raw: Raw, *, seed: str, nbytes: int, id: str, digest: bool, go: str, rounds: int) -> None:
    """For each round wait for a file, then put under an id."""
    for n in range(rounds):
        data = {"w": data_of(seed.format(n), nbytes)}
        say(event=f"ready {n}")
        while not Path(go.format(n)).exists():
            await asyncio.sleep(0.001)
        try:
            taken = await raw.put(data, id=id.format(n), digest=digest)
        except ConflictError as error:
            say(event=f"end {n}", outcome="conflict", why=str(error))
        else:
            say(event=f"end {n}", outcome="existed" if taken["existed"] else "won")


async def hold(raw: Raw, *, ref: str, lease_s: float | None = None) -> None:
    """Map an artifact, pin it if a time is given, and stay."""
    record = await raw.resolve(ref)
    opened = await raw.open(record["artifact"])
    lease = None
    if lease_s is not None:
        lease = (await raw.call("pin", artifact=record["artifact"], ttl_s=lease_s))["lease"]
    say(event="holding", right=opened.right(), lease=lease)
    await asyncio.Event().wait()


async def fork(raw: Raw, *, ref: str, go: str, out: str) -> None:
    """Map an artifact, fork, and be killed; the child waits for a file and then says what it reads."""
    opened = await raw.open((await raw.resolve(ref))["artifact"])
    if os.fork() == 0:
        while not Path(go).exists():
            time.sleep(0.01)
        Path(out).write_text("right" if opened.right() else "wrong", encoding="ascii")
        os._exit(0)
    say(event="forked")
    os.kill(os.getpid(), signal.SIGKILL)


async def pressure(raw: Raw, *, seed: str, rounds: int, nbytes_max: int) -> None:
    """Put, read and drop artifacts of random sizes in a pool that is too small for all, checking every byte read."""
    rng = random.Random(seed)
    counts = {"put": 0, "read": 0, "full": 0, "gone": 0, "wrong": 0, "other": 0}
    mine: list[str] = []
    held: list[tuple[str, Any]] = []
    for n in range(rounds):
        try:
            data = data_of((seed, n), rng.randrange(1, nbytes_max))
            taken = await raw.put({"w": data, "x": data[: len(data) // 2]}, key=f"{seed}/{n}")
            mine.append(taken["artifact"]["artifact"])
            counts["put"] += 1
        except OutOfSpaceError:
            counts["full"] += 1
        try:
            keys = await raw.keys()
            if keys:
                record = await raw.resolve(rng.choice(keys))
                opened = await raw.open(record["artifact"])
                counts["read" if opened.right() and opened.info["artifact"] == record["artifact"] else "wrong"] += 1
                held.append((record["artifact"], opened))
        except OutOfSpaceError:
            counts["full"] += 1
        except NotFoundError:
            counts["gone"] += 1
        except TensorbusError as error:
            counts["other"] += 1
            say(event="error", kind=str(error.kind), text=str(error))
        while len(mine) > 3 or (mine and rng.random() < 0.3):
            await raw.call("destroy", artifact=mine.pop(rng.randrange(len(mine))))
        if len(held) > 3 or (held and rng.random() < 0.3):
            # Long after its artifact may have ended and its memory been wanted by others: still the same bytes.
            _, opened = held.pop(rng.randrange(len(held)))
            counts["wrong"] += not opened.right()
    counts["wrong"] += sum(not opened.right() for _, opened in held)
    for artifact in mine:
        await raw.call("destroy", artifact=artifact)
    say(event="end", **counts)


VERBS = {"register": register, "put": put, "hold": hold, "fork": fork, "pressure": pressure}


async def main() -> None:
    verb, given = sys.argv[1], json.loads(sys.argv[2])
    async with await Raw.unix(Path(given.pop("socket"))) as raw:
        await VERBS[verb](raw, **given)


if __name__ == "__main__":
    asyncio.run(main())
