"""Whether a store may go on keeping the log: one that cannot do its work for too long makes room for another."""

from __future__ import annotations

from typing import Final

from tensorbus.clock import NS_PER_S, Clock
from tensorbus.errors import TensorbusError

RESTS_MAX: Final = 16
"""A store that failed again and again rests at most so many times its patience before it tries once more."""


class Fitness:
    """Decides when to give the role up, and for how long not to ask for it again.

    The rest gives others their turn, also where it is the role's work and not the store that fails: nobody knows that
    it is well again before it has tried. It doubles with each resignation in a row, so that stores that share a broken
    archive do not fill the log with grants.

    Args:
        patience_s: Seconds for which something may be wrong.
    """

    def __init__(self, clock: Clock, *, patience_s: float) -> None:
        self._clock = clock
        self._patience_ns = int(patience_s * NS_PER_S)
        self._since_ns: int | None = None
        self._rest_ns = self._patience_ns
        self._rests_until_ns: int | None = None

    def note(self, trouble: TensorbusError | None) -> bool:
        """Say how the holder of the role is doing; whether it has been unable for too long."""
        if trouble is None:
            self._since_ns, self._rest_ns = None, self._patience_ns
            return False
        now_ns = self._clock.now_ns()
        self._since_ns = now_ns if self._since_ns is None else self._since_ns
        return now_ns - self._since_ns >= self._patience_ns

    def lost(self) -> None:
        """The role is another's, or nobody's: what was wrong counts no more."""
        self._since_ns = None

    def resigned(self) -> None:
        """The role was given up for trouble."""
        self.lost()
        self._rests_until_ns = self._clock.now_ns() + self._rest_ns
        self._rest_ns = min(2 * self._rest_ns, RESTS_MAX * self._patience_ns)

    @property
    def rests(self) -> bool:
        """Whether it is another's turn."""
        return self._rests_until_ns is not None and self._clock.now_ns() < self._rests_until_ns
