"""Questions in memory: who listens where, and whose turn it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tensorbus.bus._ask import Desk


@dataclass(frozen=True, slots=True, eq=False)
class Listening:
    """One who answers at a subject.

    Attributes:
        reachable: Whether its connection is up.
    """

    subject: str
    queue: str
    desk: Desk
    reachable: Callable[[], bool]


class Switchboard:
    """All who answer in a cluster."""

    def __init__(self) -> None:
        self._listening: dict[Listening, None] = {}
        self._turn = 0

    def add(self, one: Listening) -> None:
        self._listening[one] = None

    def remove(self, one: Listening) -> None:
        self._listening.pop(one, None)

    def next_for(self, subject: str) -> list[Listening]:
        """Those that a question goes to: one of each queue, in turn."""
        queues: dict[str, list[Listening]] = {}
        for one in self._listening:
            if one.subject == subject and one.reachable():
                queues.setdefault(one.queue, []).append(one)
        self._turn += 1
        return [members[self._turn % len(members)] for members in queues.values()]
