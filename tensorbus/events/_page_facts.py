"""The facts of the stream of pages: who has a shard, what changed in it, and its snapshots.

They are a union of their own: one fold reads one stream. A batch of changes is a packed block (``_page_codec``), the
others are JSON as on the log.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final, Literal

from pydantic import Field

from tensorbus.events._facts import BlobRef
from tensorbus.ids import Incarnation, WorkerId

SHARDS_MAX: Final = 1 << 16
"""The leading 16 bits of a key name its shard."""
TABLE_MAX: Final = 256
"""How many keyspaces, and how many holders, a batch may name."""

Shard = Annotated[int, Field(ge=0, lt=SHARDS_MAX)]
Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Worker = Annotated[WorkerId, Field(pattern="^[A-Za-z0-9_-]{1,64}$")]
Life = Annotated[Incarnation, Field(min_length=1, max_length=64)]


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseGranted:
    """The author's incarnation took a shard; this fact's sequence is its fencing token."""

    type: Literal["LeaseGranted"] = "LeaseGranted"
    shard: Shard


@dataclass(frozen=True, slots=True, kw_only=True)
class PageHolder:
    """A worker's life, in which it holds pages."""

    worker: Worker
    incarnation: Life


@dataclass(frozen=True, slots=True, kw_only=True)
class PagesChanged:
    """Pages of a shard were added or removed, about a thousand in a message.

    Attributes:
        number: Running number of the shard's batches, whoever has its lease.
        keyspaces: Digests of the keyspaces that the records name by their place here, 64 hexadecimal digits each.
        holders: Whom the records name by their place here.
        records: Packed records of 64 bytes, see ``docs/spec/page-facts.md``.
    """

    type: Literal["PagesChanged"] = "PagesChanged"
    shard: Shard
    number: Annotated[int, Field(ge=1)]
    keyspaces: Annotated[tuple[Digest, ...], Field(max_length=TABLE_MAX)]
    holders: Annotated[tuple[PageHolder, ...], Field(max_length=TABLE_MAX)]
    records: bytes | memoryview


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSnapshotTaken:
    """A shard's state at a sequence was stored by its home, so that the next one may start from it.

    Attributes:
        upto: The sequence of the last message in it.
        fold: Version of the fold that made it.
        state_hash: Canonical hash of the state, 64 hexadecimal digits.
        blob: Its body.
    """

    type: Literal["ShardSnapshotTaken"] = "ShardSnapshotTaken"
    shard: Shard
    upto: Annotated[int, Field(ge=0)]
    fold: int
    state_hash: Digest
    blob: BlobRef


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSnapshotConfirmed:
    """Somebody other than its author replayed a shard and came to a snapshot's hash, so what is in it may be purged.

    Attributes:
        snapshot: Sequence of the :class:`ShardSnapshotTaken`.
        state_hash: The hash that was found.
    """

    type: Literal["ShardSnapshotConfirmed"] = "ShardSnapshotConfirmed"
    shard: Shard
    snapshot: Annotated[int, Field(ge=1)]
    state_hash: Digest


PageEvent = LeaseGranted | PagesChanged | ShardSnapshotTaken | ShardSnapshotConfirmed
PAGE_EVENT_TYPES: tuple[type[PageEvent], ...] = PageEvent.__args__
