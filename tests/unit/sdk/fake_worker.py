"""A worker that says what a test tells it to, at a real unix socket of a real home."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

from tensorbus.ids import SystemIds
from tensorbus.sdk import AsyncBus, Place
from tensorbus.transport import (
    PeerSession,
    Reply,
    Request,
    WorkerCard,
    listen_unix,
    locked,
    remove_card,
    run_dir,
    serve_listener,
    write_card,
)

Answer = Callable[[Request], "Reply | Awaitable[Reply]"]


def info(artifact: str = "tbr:1", *, born: int = 1, keys: tuple[str, ...] = ("k",)) -> dict[str, object]:
    """An ``ArtifactInfo``."""
    return {
        "artifact": artifact,
        "digest": None,
        "nbytes": 8,
        "tensors": 1,
        "born": born,
        "created_ns": 0,
        "author": "w1",
        "principal": "",
        "live": True,
        "reason": None,
        "replicas": [],
        "keys": list(keys),
        "versions": [],
        "leases": [],
    }


class FakeWorker:
    """Answers from ``answers``, by operation; ``asked`` has what came, ``sessions`` the open connections."""

    def __init__(self) -> None:
        self.answers: dict[str, Answer] = {}
        self.asked: list[tuple[str, dict[str, object]]] = []
        self.sessions: list[PeerSession] = []

    async def handle(self, request: Request, session: PeerSession) -> Reply:
        if request.op == "hello":
            return Reply(
                {
                    "worker": "w1",
                    "incarnation": "i",
                    "host": "h",
                    "roles": ["basic"],
                    "session": session.id,
                    "position": 1,
                    "prefix": "tb",
                    "descriptors": True,
                }
            )
        self.asked.append((request.op, request.args))
        answer = self.answers[request.op](request)
        return answer if isinstance(answer, Reply) else await answer

    def opened(self, session: PeerSession) -> None:
        self.sessions.append(session)
        session.on_close(lambda: self.sessions.remove(session))

    def hang_up(self) -> None:
        """End every connection."""
        for session in list(self.sessions):
            session.close()

    async def push(self, topic: str, data: dict[str, object]) -> None:
        for session in self.sessions:
            await session.push(topic, data)

    def count(self, op: str) -> int:
        """How often it was asked for."""
        return sum(asked == op for asked, _ in self.asked)


@asynccontextmanager
async def fake_worker(home: Path) -> AsyncIterator[FakeWorker]:
    """A fake at work in a home."""
    fake = FakeWorker()
    run = run_dir(home)
    card = WorkerCard(
        worker="w1",
        incarnation="i",
        host_id="h",
        roles=("basic",),
        pid=os.getpid(),
        socket="w1.sock",
        control="",
        data="",
    )
    with ExitStack() as stack:
        stack.enter_context(locked(run / "w1.lock", what="the fake"))
        listener = await listen_unix(run / card.socket)
        write_card(run, card)
        task = asyncio.ensure_future(serve_listener(listener, fake.handle, ids=SystemIds(), on_open=fake.opened))
        try:
            yield fake
        finally:
            remove_card(run, card)
            task.cancel()
            await asyncio.wait([task])


def place_of(home: Path, *, timeout_s: float = 10.0) -> Place:
    return Place(home=home, host_id="h", url=None, tenant="t", timeout_s=timeout_s)


@asynccontextmanager
async def fake_bus(home: Path) -> AsyncIterator[tuple[AsyncBus, FakeWorker]]:
    """A fake and a bus connected to it."""
    async with fake_worker(home) as fake, AsyncBus(place_of(home)) as bus:
        await bus.connect()
        yield bus, fake


async def until(condition: Callable[[], object]) -> None:
    """Wait for something to hold, at most ten seconds."""
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)
