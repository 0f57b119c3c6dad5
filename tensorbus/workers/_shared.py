"""Work that several wait for: done once, and called off when nobody wants it any more."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

from tensorbus.errors import CancelledError

P = TypeVar("P")
T = TypeVar("T")


class Shared(Generic[T]):
    """One piece of work with its waiters. Who gives up waiting takes nothing from the others.

    Only what runs under :meth:`part` is called off: the rest, such as saying a fact, comes to its end.
    """

    def __init__(self) -> None:
        self._ended: asyncio.Future[T] | None = None
        self._early: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._part: asyncio.Future[Any] | None = None
        self._waiting = 0
        self._kept = False
        self._off = False

    def begin(self, work: Coroutine[Any, Any, T]) -> None:
        """Start it."""
        self._ended = asyncio.ensure_future(work)
        self._ended.add_done_callback(_looked_at)

    def on_ended(self, call: Callable[[], None]) -> None:
        """Have something done at its end."""
        assert self._ended is not None, "it was begun"
        self._ended.add_done_callback(lambda _: call())

    def hand_out(self, outcome: T) -> None:
        """Give those who do not wait for the end what they wait for; the first one stays."""
        if not self._early.done():
            self._early.set_result(outcome)

    async def wait(self, *, keep: bool, early: bool = False) -> T:
        """Its outcome.

        Args:
            keep: Whether it is to go on also when nobody waits any more.
            early: Whether what is handed out before the end will do.
        """
        assert self._ended is not None, "it was begun"
        self._kept |= keep
        self._waiting += 1
        try:
            if early and not self._ended.done():
                await asyncio.wait([self._ended, self._early], return_when=asyncio.FIRST_COMPLETED)
                if self._early.done():
                    return self._early.result()
            return await asyncio.shield(self._ended)
        finally:
            self._waiting -= 1

    @property
    def unwanted(self) -> bool:
        """Whether it runs and nobody would miss it."""
        running = self._ended is not None and not self._ended.done()
        return running and not (self._waiting or self._kept or self._off)

    async def call_off(self, *, patience_s: float) -> None:
        """End it, and wait a little for what it holds to be given back."""
        assert self._ended is not None, "it was begun"
        self._off = True
        if self._part is not None:
            self._part.cancel()
        await asyncio.wait([self._ended], timeout=patience_s)

    async def part(self, work: Coroutine[Any, Any, P]) -> P:
        """Do a part that can be called off; it gives back what it holds when it is cancelled.

        Raises:
            CancelledError: If it was.
        """
        part: asyncio.Future[P] = asyncio.ensure_future(work)
        self._part = part
        if self._off:
            part.cancel()
        try:
            return await part
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise CancelledError("it was called off") from None
        finally:
            self._part = None


def _looked_at(future: asyncio.Future[Any]) -> None:
    if not future.cancelled():
        future.exception()
