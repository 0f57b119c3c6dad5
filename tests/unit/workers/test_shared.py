"""Work that several wait for: who is missed, and who is not."""

from __future__ import annotations

import asyncio

import pytest

from tensorbus.errors import CancelledError
from tensorbus.workers._shared import Shared


class Work:
    """A part that is called off or let go, and a rest that comes to its end in any case."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.undone = False
        self.shared = Shared[int]()
        self.shared.begin(self._run())

    async def _run(self) -> int:
        return await self.shared.part(self._part())

    async def _part(self) -> int:
        try:
            await self.gate.wait()
        finally:
            self.undone = not self.gate.is_set()
        return 7

    async def given_up(self, *, keep: bool) -> None:
        waiting = asyncio.ensure_future(self.shared.wait(keep=keep))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)


async def test_all_who_wait_get_what_came() -> None:
    work = Work()
    waiting = [asyncio.ensure_future(work.shared.wait(keep=keep)) for keep in (False, True)]
    await asyncio.sleep(0)
    work.gate.set()
    assert await asyncio.gather(*waiting) == [7, 7]
    assert not work.shared.unwanted


async def test_work_that_nobody_waits_for_is_called_off_and_gives_back_what_it_holds() -> None:
    work = Work()
    await work.given_up(keep=False)
    assert work.shared.unwanted
    await work.shared.call_off(patience_s=5)
    assert work.undone
    with pytest.raises(CancelledError):
        await work.shared.wait(keep=False)


async def test_work_goes_on_for_who_waits_still_and_for_who_wanted_it_kept() -> None:
    work = Work()
    other = asyncio.ensure_future(work.shared.wait(keep=False))
    await work.given_up(keep=False)
    assert not work.shared.unwanted
    await work.given_up(keep=True)
    other.cancel()
    await asyncio.gather(other, return_exceptions=True)
    assert not work.shared.unwanted
    work.gate.set()
    assert await work.shared.wait(keep=True) == 7


async def test_a_part_that_begins_after_it_was_called_off_ends_at_once() -> None:
    shared, go = Shared[int](), asyncio.Event()

    async def part() -> int:
        await asyncio.Event().wait()
        return 0

    async def run() -> int:
        await go.wait()
        return await shared.part(part())

    shared.begin(run())
    calling = asyncio.ensure_future(shared.call_off(patience_s=5))
    await asyncio.sleep(0)
    go.set()
    await calling
    with pytest.raises(CancelledError):
        await shared.wait(keep=True)


async def test_who_does_not_wait_for_the_end_gets_what_is_handed_out_before() -> None:
    work = Work()
    hurried = asyncio.ensure_future(work.shared.wait(keep=False, early=True))
    patient = asyncio.ensure_future(work.shared.wait(keep=False))
    await asyncio.sleep(0)
    work.shared.hand_out(5)
    work.shared.hand_out(6)
    assert await hurried == 5
    assert not patient.done()
    work.gate.set()
    assert await patient == 7
    assert await work.shared.wait(keep=False, early=True) == 7


async def test_who_does_not_wait_for_the_end_hears_of_it_all_the_same() -> None:
    work = Work()
    hurried = asyncio.ensure_future(work.shared.wait(keep=True, early=True))
    await asyncio.sleep(0)
    work.gate.set()
    assert await hurried == 7
