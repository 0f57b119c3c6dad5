"""What can be awaited, or entered with ``async with``; what can be awaited as a list, or iterated page by page."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from types import TracebackType
from typing import Any, Generic, Protocol, Self, TypeVar


class Closing(Protocol):
    """What ``async with`` needs of the thing that is made."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None: ...


C = TypeVar("C", bound=Closing)
T = TypeVar("T")


class Pending(Generic[C]):
    """``thing = await pending`` or ``async with pending as thing``; nothing happens before."""

    def __init__(self, make: Callable[[], Awaitable[C]]) -> None:
        self._make = make
        self._thing: C | None = None

    def __await__(self) -> Generator[Any, None, C]:
        return self._make().__await__()

    async def __aenter__(self) -> C:
        self._thing = await self._make()
        return await self._thing.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        thing, self._thing = self._thing, None
        if thing is not None:
            await thing.__aexit__(kind, exc, traceback)


class Listing(Generic[T]):
    """``items = await listing``, or ``async for item in listing``, which asks for a page at a time."""

    def __init__(self, items: Callable[[], AsyncIterator[T]]) -> None:
        self._items = items

    def __aiter__(self) -> AsyncIterator[T]:
        return self._items()

    def __await__(self) -> Generator[Any, None, list[T]]:
        return self._all().__await__()

    async def _all(self) -> list[T]:
        return [item async for item in self._items()]
