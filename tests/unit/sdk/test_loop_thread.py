"""The private loop of a blocking bus."""

from __future__ import annotations

import asyncio
import threading

import pytest

import tensorbus as tb
from tensorbus.sdk._loop_thread import LoopThread


async def nothing() -> None:
    pass


def test_work_is_done_on_another_thread_and_errors_come_back() -> None:
    thread = LoopThread()

    async def where() -> str:
        return threading.current_thread().name

    async def fails() -> None:
        raise tb.NotFoundError("absent")

    assert thread.run(where()) == "tensorbus"
    with pytest.raises(tb.NotFoundError):
        thread.run(fails())
    thread.stop(nothing, wait=True)
    with pytest.raises(tb.InvalidArgumentError, match="closed"):
        thread.run(nothing())


def test_a_call_on_the_thread_itself_is_refused_instead_of_hanging() -> None:
    thread = LoopThread()

    async def again() -> None:
        thread.run(nothing())

    with pytest.raises(tb.InvalidArgumentError, match="own thread"):
        thread.run(again())
    thread.stop(nothing, wait=True)


def test_stopping_ends_what_still_runs() -> None:
    thread = LoopThread()
    ended = threading.Event()

    async def forever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async def start() -> None:
        kept.append(asyncio.ensure_future(forever()))
        await asyncio.sleep(0)

    kept: list[asyncio.Future[None]] = []
    thread.run(start())
    thread.stop(nothing, wait=True)
    assert ended.is_set()
    thread.stop(nothing, wait=True)
