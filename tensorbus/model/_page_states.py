"""What a home says of each page that it was told or asked of: one byte each on the wire."""

from __future__ import annotations

from enum import IntEnum


class PageOutcome(IntEnum):
    """What became of one page that a home was told of."""

    STORED = 0
    """It is indexed at that place."""
    EXISTED = 1
    """Another copy came first; the answer says where it lies."""
    NOT_HOME = 2
    """The shard's home is another, or has another token now: ask where."""
    UNAVAILABLE = 3
    """The home cannot take it now: it cannot prove that it lives, is being rebuilt, or the bus is behind."""
    FULL = 4
    """The shard has no room."""
    FENCED = 5
    """The life of the worker that holds it is over."""


class PageState(IntEnum):
    """What a home knows of one fragment of a page."""

    MISSING = 0
    HIT = 1
    EXPIRED = 2
    """It was there, and its time is over."""
    DEGRADED = 3
    """Not known: some workers have not said yet what they hold since the home was taken over."""
    NOT_HOME = 4
    UNAVAILABLE = 5
