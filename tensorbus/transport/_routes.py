"""Which way bytes come: what both ends can do decides, the first way that works is taken, and the report says why.

A route is one way: ``cuda_ipc`` is one (:class:`DeviceRoute`), ``rdma`` and a fan-out over a group are others to come.
What runs over several sources at once (:class:`Transfer`) is inside a route, not beside it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol, TypeAlias

from tensorbus.clock import NS_PER_S, Clock, Deadline, SystemClock
from tensorbus.errors import (
    CorruptError,
    DeadlineExceededError,
    DeniedError,
    ExpiredError,
    NotFoundError,
    OutOfSpaceError,
    TensorbusError,
    UnavailableError,
)
from tensorbus.transport._blocks import Span
from tensorbus.transport._bulk_fetch import TransferReport
from tensorbus.transport._device import DeviceBuffer
from tensorbus.transport._fds import Fds

log = logging.getLogger("tensorbus.transport")

Room: TypeAlias = memoryview | DeviceBuffer
"""Where bytes go: writable host memory, or a device's."""

PASSING: Final = (UnavailableError, ExpiredError, CorruptError, NotFoundError, DeniedError, OutOfSpaceError)
"""What one route may meet and another not."""


@dataclass(frozen=True, slots=True)
class Grant:
    """What the owner of bytes gives to who may read them by one route: JSON values, and descriptors beside them."""

    header: Mapping[str, object]
    fds: Fds = field(default_factory=Fds, compare=False)


@dataclass(frozen=True, slots=True)
class RouteSource:
    """Somebody who has the bytes.

    Attributes:
        name: For the report: a worker's id.
        offers: What it can do, by the name of the route.
        ask: Asks it for a grant, by the name of the route. Blocks; what the owner may refuse it refuses here.
    """

    name: str
    offers: Mapping[str, Mapping[str, object]]
    ask: Callable[[str, Deadline], Grant]


class RouteReader(Protocol):
    """Bytes that can be read now. One thread at a time uses it; its calls block."""

    def read(self, spans: Sequence[Span], room: Room, *, deadline: Deadline) -> None:
        """Bring each span to the same offset of ``room``. Nothing touches the room after it returned or raised.

        Raises:
            InvalidArgumentError: If a span is not within the source or the room.
        """
        ...

    def close(self) -> None:
        """Let go of the source, which learns of it. Safe to repeat."""
        ...


class Route(Protocol):
    """One way for bytes between processes.

    Attributes:
        name: As settings, offers and reports call it.
    """

    name: str

    def offer(self) -> Mapping[str, object] | None:
        """What this process tells others about serving this way, as JSON values; ``None`` if it does not."""
        ...

    def refuses(self, offer: Mapping[str, object], room: Room) -> str | None:
        """Why bytes offered so cannot come here this way, for people; ``None`` if they can."""
        ...

    def open(self, grant: Grant, *, deadline: Deadline) -> RouteReader:
        """Begin to read. Takes the grant's descriptors, also when it raises.

        Raises:
            TensorbusError: One of :data:`PASSING` leads to the next route.
        """
        ...


@dataclass(frozen=True, slots=True)
class Choice:
    """What negotiation came to.

    Attributes:
        usable: In the order in which they are tried.
        refused: Why the others are not, by their name.
    """

    usable: tuple[Route, ...]
    refused: Mapping[str, str]


def offers_of(routes: Sequence[Route]) -> dict[str, dict[str, object]]:
    """What this process tells others, by the name of the route."""
    found = ((route.name, route.offer()) for route in routes)
    return {name: dict(offer) for name, offer in found if offer is not None}


def choose(routes: Sequence[Route], offers: Mapping[str, Mapping[str, object]], room: Room) -> Choice:
    """Match what this process can do, the best first, with what the source offers."""
    usable: list[Route] = []
    refused: dict[str, str] = dict.fromkeys(sorted(offers), "this process does not know it")
    for route in routes:
        offer = offers.get(route.name)
        why = "the source does not offer it" if offer is None else route.refuses(offer, room)
        refused.pop(route.name, None)
        if why is None:
            usable.append(route)
        else:
            refused[route.name] = why
    return Choice(tuple(usable), refused)


def bring(
    routes: Sequence[Route],
    source: RouteSource,
    spans: Sequence[Span],
    room: Room,
    *,
    deadline: Deadline,
    clock: Clock | None = None,
) -> TransferReport:
    """Bring spans by the first route that works. Blocks; a route that fails leaves time for the next.

    Raises:
        DeadlineExceededError: If the time ran out; UnavailableError: If there is no route, or they failed differently.
        TensorbusError: What all routes failed with, if it was the same.
    """
    clock = clock or SystemClock()
    began_ns = clock.now_ns()
    choice = choose(routes, source.offers, room)
    failed: dict[str, TensorbusError] = {}
    for number, route in enumerate(choice.usable):
        try:
            _attempt(route, source, spans, room, deadline=_share(deadline, last=number == len(choice.usable) - 1))
        except (*PASSING, DeadlineExceededError) as error:
            if deadline.left() == 0:
                raise deadline.error() from error
            log.warning("%s from %s failed: %s", route.name, source.name, error)
            failed[route.name] = error
            continue
        nbytes = sum(size for _, size in spans)
        return TransferReport(
            path=route.name,
            why=_why(choice, failed),
            sources={source.name: nbytes},
            nbytes=nbytes,
            seconds=(clock.now_ns() - began_ns) / NS_PER_S,
            retries=len(failed),
        )
    raise _failure(source, choice, failed)


def _attempt(route: Route, source: RouteSource, spans: Sequence[Span], room: Room, *, deadline: Deadline) -> None:
    reader = route.open(source.ask(route.name, deadline), deadline=deadline)
    try:
        reader.read(spans, room, deadline=deadline)
    finally:
        reader.close()


def _share(deadline: Deadline, *, last: bool) -> Deadline:
    """Half of what is left, so that a route that hangs does not take the next one's time; all of it for the last."""
    left = deadline.left()
    return deadline if last or left is None else Deadline(left / 2, what=deadline.what)


def _why(choice: Choice, failed: Mapping[str, TensorbusError]) -> str:
    reasons = {**choice.refused, **{name: str(error) for name, error in failed.items()}}
    return "; ".join(f"not {name}: {why}" for name, why in reasons.items()) or "the first choice"


def _failure(source: RouteSource, choice: Choice, failed: Mapping[str, TensorbusError]) -> TensorbusError:
    kinds = {type(error) for error in failed.values()}
    cls = kinds.pop() if len(kinds) == 1 else UnavailableError
    said = _why(choice, failed) if failed or choice.refused else "there is no route"
    return cls(f"nothing came from {source.name}: {said}", source=source.name)
