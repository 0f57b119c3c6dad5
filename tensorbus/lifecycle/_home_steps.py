"""What a home does about a shard next. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from tensorbus.ids import Incarnation, WorkerId


class HomeStep(StrEnum):
    """What to do about a shard."""

    NONE = "none"
    TAKE = "take"
    """Nobody living has it: propose a grant."""
    ASK = "ask"
    """Another living home has it, and this one is to: ask that one to hand it over."""
    SERVE = "serve"
    """It is this home's, and not served yet: replay it and serve."""
    DROP = "drop"
    """It is served here, and another has it now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HomeView:
    """What a home knows of a shard.

    Attributes:
        holder: Whose grant is in force, ``None`` if there never was one.
        serves: The token under which this home serves it or is about to, 0 if it does not.
        token: That of the grant in force.
        candidates: Who should have it, best first.
        waited_s: For how long the shard has been nobody's, as far as this home saw.
    """

    holder: tuple[WorkerId, Incarnation] | None
    token: int
    serves: int
    candidates: Sequence[str]
    waited_s: float


def next_step(
    view: HomeView,
    *,
    me: tuple[WorkerId, Incarnation],
    is_live: Callable[[WorkerId, Incarnation], bool],
    patience_s: float,
) -> HomeStep:
    """What this home does about a shard.

    The first candidate takes what is nobody's at once; each further one after it has been so for ``patience_s`` more,
    as the ones before it may be unable to.
    """
    if view.serves:  # a grant of our own may be known before it comes back to us
        return HomeStep.DROP if view.token > view.serves else HomeStep.NONE
    if view.holder == me:
        return HomeStep.SERVE
    rank = view.candidates.index(me[0]) if me[0] in view.candidates else None
    if rank is None:
        return HomeStep.NONE
    if view.holder is not None and is_live(*view.holder):
        return HomeStep.ASK if rank == 0 else HomeStep.NONE
    return HomeStep.TAKE if view.waited_s >= rank * patience_s else HomeStep.NONE
