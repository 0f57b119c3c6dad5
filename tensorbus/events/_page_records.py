"""The record of one page in a batch: 64 bytes that numpy reads in place. See ``docs/spec/page-facts.md``."""

from __future__ import annotations

from enum import IntEnum
from typing import Final

import numpy as np

from tensorbus.model import KEY_BYTES

RECORD_BYTES: Final = 64


class PageOp(IntEnum):
    """What happened to the pages of a record."""

    ADD = 1
    """The holder has the page at that location."""
    REMOVE = 2
    """The holder has it no more."""
    CLEAR = 3
    """Nobody has any page of the keyspace any more; the key says nothing."""
    GONE = 4
    """The holder has no page at all any more; the key and the keyspace say nothing."""


RECORD: Final = np.dtype(
    [
        ("key", f"V{KEY_BYTES}"),
        ("keyspace", "<u2"),
        ("fragment", "<u2"),
        ("holder", "<u2"),
        ("op", "u1"),
        ("flags", "u1"),
        ("segment", "<u4"),
        ("generation", "<u4"),
        ("slot", "<u8"),
        ("nbytes", "<u4"),
        ("ttl_s", "<u4"),
    ]
)
"""``keyspace`` and ``holder`` are places in the tables of the batch, ``fragment`` the rank's number in its group.

``segment``, ``generation``, ``slot`` and ``nbytes`` say where the page lies with its holder. ``ttl_s`` counts from the
time that the stream gave the batch, 0 is for ever. ``flags`` is 0.
"""

assert RECORD.itemsize == RECORD_BYTES
