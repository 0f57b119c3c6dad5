"""What may be asked about pages, as strict models: one per operation of ``docs/spec/page-protocol.md``.

Pages travel in the body: ``RECORD`` arrays as in a batch of the stream, keys as 32 bytes each.
"""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field

from tensorbus.errors import InvalidArgumentError
from tensorbus.events import RECORD, RECORD_BYTES, SHARDS_MAX, TABLE_MAX
from tensorbus.model import KEY_BYTES
from tensorbus.workers._requests import Ask

PAGES_MAX = 65_536
"""Pages in one call."""
FRAGMENTS_MAX = 65_536

Shard = Annotated[int, Field(ge=0, lt=SHARDS_MAX)]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Life = Annotated[tuple[str, str], Field(strict=False)]
"""Worker and incarnation."""
Known = Annotated[tuple[Shard, int], Field(strict=False)]
"""A shard and the token under which the caller knows its home."""


class PageCall(Ask):
    """What all calls to a home share.

    Attributes:
        tokens: For each shard that the call is about, the token of its home as the caller knows it.
    """

    tokens: list[Known] = Field(max_length=SHARDS_MAX)


class PageAdd(PageCall):
    """Pages that a worker holds now; the records' ``holder`` is 0.

    Attributes:
        holder: Whose they are.
        keyspaces: What the records name by their place here.
        replica: Copies of pages that others hold too: they are taken in beside these.
        said: Shards of which the holder has said everything with this call, after a change of home.
    """

    holder: Life
    keyspaces: list[Digest] = Field(max_length=TABLE_MAX)
    ack: Literal["home", "log"] = "home"
    replica: bool = False
    said: list[Shard] = Field(default=[], max_length=SHARDS_MAX)


class PageLookup(PageCall):
    """Where pages lie.

    Attributes:
        fragments: How many ranks hold a part of each page; all are looked up, unless ``fragment`` names one.
        host: Where the caller is: of several copies, one there is named.
    """

    keyspace: Digest
    fragments: int = Field(1, ge=1, le=FRAGMENTS_MAX)
    fragment: int | None = Field(None, ge=0, lt=FRAGMENTS_MAX)
    host: str = ""


class PageRemove(PageCall):
    """Pages that a worker holds no more."""

    holder: Life
    keyspaces: list[Digest] = Field(max_length=TABLE_MAX)
    ack: Literal["home", "log"] = "home"


class PageClear(PageCall):
    """All pages of a keyspace are given up, whoever holds them."""

    keyspace: Digest


class PageFlush(PageCall):
    """Wait until all that the home took in is on the stream."""


class PageHandover(Ask):
    """Another home asks for a shard that is to be its own."""

    shard: Shard
    token: int
    to: Life


def records_of(body: bytes | bytearray | memoryview, *, keyspaces: int, op: str) -> npt.NDArray[np.void]:
    """The records of a call; a copy, so that they may be changed.

    Raises:
        InvalidArgumentError: If they are no whole records, too many, or name a keyspace that is not in the call.
    """
    if len(body) % RECORD_BYTES or len(body) // RECORD_BYTES > PAGES_MAX:
        raise InvalidArgumentError(f"{op}: {len(body)} bytes are not up to {PAGES_MAX} records of {RECORD_BYTES}")
    records = np.frombuffer(body, RECORD).copy()
    records["flags"] = 0
    if len(records) and int(records["keyspace"].max()) >= keyspaces:
        raise InvalidArgumentError(f"{op}: a record names keyspace {records['keyspace'].max()} of {keyspaces}")
    return records


def keys_of(body: bytes | bytearray | memoryview, *, op: str) -> npt.NDArray[np.uint8]:
    """The keys of a call, uint8[n, 32].

    Raises:
        InvalidArgumentError: If they are no whole keys, or too many.
    """
    if len(body) % KEY_BYTES or len(body) // KEY_BYTES > PAGES_MAX:
        raise InvalidArgumentError(f"{op}: {len(body)} bytes are not up to {PAGES_MAX} keys of {KEY_BYTES}")
    return np.frombuffer(body, np.uint8).reshape(-1, KEY_BYTES)
