"""The state of one shard, folded from the stream of page facts.

Who may write is decided here again, since a fence header is chosen by who writes it: a batch counts if its author,
incarnation and token are those of the grant in force, and that is the last message under the shard's lease, whatever
its headers say, in the server and here alike.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from tensorbus.errors import InvalidArgumentError, OutOfSpaceError
from tensorbus.events import (
    AnyPageRecorded,
    PageOp,
    PagesChanged,
    ShardSnapshotConfirmed,
    ShardSnapshotTaken,
    Subjects,
    UnknownEvent,
    page_records,
)
from tensorbus.ids import Incarnation, WorkerId
from tensorbus.lifecycle._page_rows import Numbered
from tensorbus.lifecycle._page_table import PageTable
from tensorbus.lifecycle._records import Verdict

PAGES_FOLD_VERSION: Final = 1
NS_PER_S: Final = 1_000_000_000
_SECONDS_MAX: Final = (1 << 32) - 1

KEPT: Final = Verdict(True)


@dataclass(frozen=True, slots=True)
class ShardLease:
    """The grant in force of a shard.

    Attributes:
        holder: The worker at the end of its subject.
        incarnation: The life that the holder said it in; empty if the message cannot be read, then nobody may write.
        token: Its sequence.
    """

    holder: WorkerId
    incarnation: Incarnation
    token: int


@dataclass(frozen=True, slots=True)
class ShardSnapshot:
    """The newest snapshot of a shard.

    Attributes:
        seq: Sequence of its fact.
        upto: Sequence of the last message in it.
        confirmed: Whether somebody other than its author came to the same hash.
    """

    seq: int
    upto: int
    state_hash: str
    author: WorkerId
    confirmed: bool = False


class ShardState:
    """A shard as the stream has it. The fold is total: no message makes it raise.

    Attributes:
        seq: Sequence of the last message of the shard that was taken in, kept or dropped.
        lease: The grant in force, ``None`` before the first.
        number: Running number of the last batch that counts.
        gap: Sequence of the last batch before which some are missing; 0 if none is. A reader that sees another one than
            before makes the state anew, once: what the stream itself lacks will not come.
        gaps: How many such there were.
        dropped: How many messages did not count, by reason.
        unknown: How many of the holder's messages could not be read; the state is not the stream's then.
        pages: Keyspaces go by their digest in hex, holders by worker and incarnation. What has expired by the stream's
            time goes with the next batch that counts.
    """

    def __init__(self, shard: int, subjects: Subjects | None = None) -> None:
        self.shard = shard
        self.seq = 0
        self.lease: ShardLease | None = None
        self.number = 0
        self.gap = 0
        self.gaps = 0
        self.dropped: dict[str, int] = {}
        self.unknown = 0
        self.snapshot: ShardSnapshot | None = None
        self.pages = PageTable()
        self._subjects = subjects or Subjects()

    def apply(self, recorded: AnyPageRecorded) -> Verdict:
        """Take the next message of the shard in and say whether it counts. One seen before changes nothing."""
        if recorded.seq <= self.seq:
            return Verdict(False, "duplicate")
        kind, author = self._place(recorded.subject)
        if not kind:
            return self._drop("subject")
        self.seq = recorded.seq
        if kind == "lease":
            return self._granted(recorded, author)
        verdict = self._evolve(recorded, author)
        return verdict if verdict.kept else self._drop(verdict.why)

    @property
    def token(self) -> int:
        """The fencing token in force, 0 if the shard was never granted."""
        return 0 if self.lease is None else self.lease.token

    @property
    def degraded(self) -> bool:
        """Whether messages that count are missing or could not be read."""
        return self.gaps > 0 or self.unknown > 0

    @property
    def state_hash(self) -> str:
        """Canonical hash of all that counts, 64 hexadecimal digits; costs the same however many pages there are."""
        lease, kept = self.lease, self.snapshot
        said = (
            PAGES_FOLD_VERSION,
            self.shard,
            self.number,
            lease and (lease.holder, lease.incarnation, lease.token),
            kept and (kept.seq, kept.upto, kept.state_hash, kept.author, kept.confirmed),
            self.pages.state_hash,
        )
        return blake3(json.dumps(said, separators=(",", ":")).encode()).hexdigest()

    def holds(self, worker: WorkerId, incarnation: Incarnation, token: int) -> bool:
        """Whether a worker's life acts under the grant in force."""
        return bool(incarnation) and self.lease == ShardLease(worker, incarnation, token)

    # -- the fold -----------------------------------------------------------------------------------------------------

    def _place(self, subject: str) -> tuple[str, WorkerId]:
        """Kind and author of a message of this shard; no kind if it is none of its."""
        try:
            (kind, shard), author = self._subjects.parse(subject)
        except InvalidArgumentError:
            return "", WorkerId("")
        return (kind, author) if shard == str(self.shard) else ("", author)

    def _granted(self, recorded: AnyPageRecorded, author: WorkerId) -> Verdict:
        """A grant counts whatever it says: the servers see no more of it than its place, either."""
        headers = recorded.headers
        life = headers.incarnation if headers.author == author else Incarnation("")
        self.lease = ShardLease(author, life, recorded.seq)
        return KEPT

    def _evolve(self, recorded: AnyPageRecorded, author: WorkerId) -> Verdict:
        headers, event = recorded.headers, recorded.event
        if isinstance(event, UnknownEvent):
            return self._unreadable(author)
        if headers.author != author or event.shard != self.shard:
            return Verdict(False, "subject")
        if isinstance(event, ShardSnapshotConfirmed):
            return self._confirmed(event, author)
        if not self.holds(author, headers.incarnation, headers.token):
            return Verdict(False, "fenced")
        match event:
            case PagesChanged():
                return self._changed(event, recorded.seq, recorded.time_ns)
            case ShardSnapshotTaken():
                return self._taken(event, recorded.seq, author)
            case _:  # a grant elsewhere than under its lease
                return Verdict(False, "subject")

    def _unreadable(self, author: WorkerId) -> Verdict:
        """Only what the holder says can count, so only that is missed."""
        if self.lease is None or self.lease.holder != author:
            return Verdict(False, "fenced")
        self.unknown += 1
        return Verdict(False, "unknown")

    def _changed(self, batch: PagesChanged, seq: int, time_ns: int) -> Verdict:
        if batch.number <= self.number:
            return Verdict(False, "duplicate")
        if batch.number != self.number + 1:
            self.gap = seq
            self.gaps += 1
        self.number = batch.number
        self.pages.expire(time_ns // NS_PER_S)
        try:
            self._take_in(batch, time_ns)
        except OutOfSpaceError:
            self.unknown += 1
            return Verdict(False, "space")
        return KEPT

    def _take_in(self, batch: PagesChanged, time_ns: int) -> None:
        records = page_records(batch).copy()
        holders = [(holder.worker, holder.incarnation) for holder in batch.holders]
        records["keyspace"] = _numbers(self.pages.keyspaces, batch.keyspaces)[records["keyspace"]]
        records["holder"] = _numbers(self.pages.holders, holders)[records["holder"]]
        for part in np.split(records, np.flatnonzero(np.diff(records["op"])) + 1):
            self._take_run(part, time_ns)

    def _take_run(self, records: npt.NDArray[np.void], time_ns: int) -> None:
        """Records of one operation."""
        match int(records["op"][0]):
            case PageOp.ADD:
                self.pages.add(records, _expiry(records["ttl_s"], time_ns))
            case PageOp.REMOVE:
                self.pages.remove(records)
            case PageOp.CLEAR:
                for number in np.unique(records["keyspace"]).tolist():
                    self.pages.remove_keyspace(number)
            case PageOp.GONE:
                for number in np.unique(records["holder"]).tolist():
                    self.pages.remove_holder(number)

    def _taken(self, fact: ShardSnapshotTaken, seq: int, author: WorkerId) -> Verdict:
        if fact.upto >= seq or (self.snapshot is not None and fact.upto <= self.snapshot.upto):
            return Verdict(False, "conflict")
        self.snapshot = ShardSnapshot(seq, fact.upto, fact.state_hash, author)
        return KEPT

    def _confirmed(self, fact: ShardSnapshotConfirmed, author: WorkerId) -> Verdict:
        kept = self.snapshot
        if kept is None or (fact.snapshot, fact.state_hash) != (kept.seq, kept.state_hash) or author == kept.author:
            return Verdict(False, "conflict")
        if kept.confirmed:
            return Verdict(False, "duplicate")
        self.snapshot = ShardSnapshot(kept.seq, kept.upto, kept.state_hash, kept.author, confirmed=True)
        return KEPT

    def _drop(self, why: str) -> Verdict:
        self.dropped[why] = self.dropped.get(why, 0) + 1
        return Verdict(False, why)


def _numbers(known: Numbered, names: Sequence[Hashable]) -> npt.NDArray[np.uint16]:
    """The numbers of a batch's names in the table; an empty list of names has one entry that names nothing.

    Raises:
        OutOfSpaceError: If the table has no numbers left.
    """
    found = [known.number(name) for name in names]
    if any(known.get(name) != number for name, number in zip(names, found, strict=True)):
        raise OutOfSpaceError("a shard has no number left for a batch's keyspaces or holders")
    return np.array(found or [0], np.uint16)


def _expiry(ttl_s: npt.NDArray[np.uint32], time_ns: int) -> npt.NDArray[np.uint32]:
    """uint32[n]: the second of the stream at which each page ends, 0 is never."""
    ends = np.minimum(ttl_s.astype(np.uint64) + np.uint64(time_ns // NS_PER_S), np.uint64(_SECONDS_MAX))
    return np.where(ttl_s == 0, 0, ends).astype(np.uint32)
