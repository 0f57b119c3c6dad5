"""A shard's fold: only the grant in force writes, numbers show what is missing, and a snapshot stands for what was."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorbus.errors import CorruptError, UnavailableError
from tensorbus.events import (
    RECORD,
    AnyPageRecorded,
    BlobRef,
    Headers,
    LeaseGranted,
    PageEvent,
    PageHolder,
    PageOp,
    PagesChanged,
    Recorded,
    ShardSnapshotConfirmed,
    ShardSnapshotTaken,
    Subjects,
    UnknownEvent,
    aggregate_of,
)
from tensorbus.ids import EventId, Incarnation, WorkerId
from tensorbus.lifecycle import ShardLease, ShardState, dump_shard, load_shard

SHARD = 5
H1, H2 = WorkerId("h1"), WorkerId("h2")
LIFE, LATER = Incarnation("0" * 16), Incarnation("1" * 16)
KEYSPACES = ("aa" * 32, "bb" * 32)
W1, W2 = (PageHolder(worker=WorkerId(name), incarnation=LIFE) for name in ("w1", "w2"))
BLOB = BlobRef(digest="ab" * 32, nbytes=1, chunks=1, author=H1)
START_NS = 1_000 * 10**9

Row = tuple[PageOp, int, int, int, int]
"""Operation, number of a key, of a keyspace, of a holder, slot."""


def rows_of(rows: Sequence[Row], *, ttl_s: int = 0) -> npt.NDArray[np.void]:
    out = np.zeros(len(rows), RECORD)
    for at, (op, number, keyspace, holder, slot) in enumerate(rows):
        out[at] = (bytes([number]) * 32, keyspace, 0, holder, op, 0, 1, 1, slot, 64, ttl_s)
    return out


def changed(number: int, *rows: Row, shard: int = SHARD, ttl_s: int = 0) -> PagesChanged:
    rows = rows or ((PageOp.ADD, number % 200, 0, 0, number),)
    data = rows_of(rows, ttl_s=ttl_s).tobytes()
    return PagesChanged(shard=shard, number=number, keyspaces=KEYSPACES, holders=(W1, W2), records=data)


class Stream:
    """A shard's messages, as homes of all manners wrote them, and their fold."""

    def __init__(self) -> None:
        self.messages: list[AnyPageRecorded] = []
        self.state = ShardState(SHARD)
        self.whys: list[str] = []
        self.time_ns = START_NS

    @property
    def token(self) -> int:
        return self.state.token

    def write(
        self,
        event: PageEvent | UnknownEvent,
        author: WorkerId = H1,
        *,
        life: Incarnation = LIFE,
        token: int | None = None,
        subject: str | None = None,
        said_by: WorkerId | None = None,
    ) -> str:
        """Store a message and say why it was dropped, or nothing."""
        seq = (self.messages[-1].seq if self.messages else 0) + 2
        kept = token if token is not None else self.token
        headers = Headers(
            event_id=EventId(f"e{seq}"), author=said_by or author, incarnation=life, token=kept, expected=kept
        )
        if subject is None:
            assert not isinstance(event, UnknownEvent)
            subject = Subjects().fact(aggregate_of(event), author)
        message: Any = Recorded(seq, self.time_ns + seq, subject, headers, event)
        self.messages.append(message)
        self.whys.append(self.state.apply(message).why)
        return self.whys[-1]

    def grant(self, author: WorkerId = H1, *, life: Incarnation = LIFE) -> int:
        assert self.write(LeaseGranted(shard=SHARD), author, life=life) == ""
        return self.token

    def say(self, author: WorkerId = H1, **how: Any) -> str:
        return self.write(changed(self.state.number + 1), author, **how)


def granted() -> Stream:
    stream = Stream()
    stream.grant()
    return stream


def pages(state: ShardState) -> set[tuple[object, ...]]:
    """What the state knows, without numbers of its own."""
    records, expires_s = state.pages.dump()
    return {
        (
            record["key"].tobytes(),
            state.pages.keyspaces.name(int(record["keyspace"])),
            state.pages.holders.name(int(record["holder"])),
            int(record["slot"]),
            int(ends),
        )
        for record, ends in zip(records, expires_s, strict=True)
    }


def folded(messages: Sequence[AnyPageRecorded], state: ShardState | None = None) -> ShardState:
    state = state or ShardState(SHARD)
    for message in messages:
        state.apply(message)
    return state


def copied(state: ShardState) -> ShardState:
    *_, last = load_shard(b"".join(dump_shard(state)))
    assert last is not None
    return last


# -- who may write ----------------------------------------------------------------------------------------------------


def test_nobody_writes_before_the_first_grant() -> None:
    stream = Stream()
    assert stream.say(token=0) == "fenced"
    assert (stream.state.token, len(stream.state.pages)) == (0, 0)


def test_the_holder_writes_until_another_is_granted() -> None:
    stream = granted()
    first = stream.token
    assert stream.say() == ""
    second = stream.grant(H2)
    assert second > first
    assert stream.state.lease == ShardLease(H2, LIFE, second)
    assert stream.say(H1, token=first) == "fenced", "with its own token, as the server refuses it"
    assert stream.say(H1, token=second) == "fenced", "with a copied token"
    assert stream.say(H1, token=0) == "fenced", "without one"
    assert stream.say(H2) == ""
    assert stream.state.dropped == {"fenced": 3}


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ({"life": LATER}, "fenced"),
        ({"token": 1}, "fenced"),
        ({"token": 1 << 60}, "fenced"),
        ({"said_by": H2}, "subject"),
        ({"subject": "tb.shard.5.h2"}, "fenced"),
        ({"subject": "tb.shard.6.h1"}, "subject"),
        ({"subject": "tb.shard.05.h1"}, "subject"),
        ({"subject": "tb.pblob.5.0.h1"}, "subject"),
    ],
)
def test_a_batch_with_one_thing_wrong_does_not_count(how: dict[str, Any], why: str) -> None:
    stream = granted()
    if how.get("subject") == "tb.shard.5.h2":
        how = how | {"said_by": H2}
    assert stream.say(**how) == why
    assert len(stream.state.pages) == 0
    assert stream.say() == ""


def test_a_grant_counts_whatever_its_headers_say() -> None:
    stream = granted()
    stream.write(LeaseGranted(shard=63), H2, token=7, subject="tb.lease.5.h2")
    assert stream.state.lease == ShardLease(H2, LIFE, stream.messages[-1].seq)
    assert stream.say(H2) == ""


def test_what_cannot_be_read_under_the_lease_ends_the_ownership_of_the_former_home() -> None:
    """The server compares with the last message there, so the fold must, too; and nobody may write under it."""
    stream = granted()
    former = stream.token
    stream.write(UnknownEvent("unreadable"), H2, subject="tb.lease.5.h2", said_by=WorkerId(""), life=Incarnation(""))
    assert stream.token == stream.messages[-1].seq
    assert stream.say(H1, token=former) == "fenced"
    assert stream.say(H2, life=Incarnation("")) == "fenced"
    assert not stream.state.degraded
    stream.grant(H1)
    assert stream.say() == ""


def test_the_same_worker_in_a_later_life_needs_a_grant_of_its_own() -> None:
    stream = granted()
    assert stream.say(life=LATER) == "fenced"
    stream.grant(life=LATER)
    assert stream.say(life=LATER) == ""
    assert stream.say(life=LIFE) == "fenced"


def test_what_others_garble_is_not_missed_and_what_the_holder_garbles_is() -> None:
    stream = granted()
    assert stream.write(UnknownEvent("x"), H2, subject="tb.shard.5.h2") == "fenced"
    assert not stream.state.degraded
    assert stream.write(UnknownEvent("x"), H1, subject="tb.shard.5.h1") == "unknown"
    assert stream.state.degraded
    with pytest.raises(UnavailableError, match="unreadable"):
        dump_shard(stream.state)


# -- numbers ----------------------------------------------------------------------------------------------------------


def test_numbers_go_on_over_a_hand_over_and_a_repetition_is_dropped() -> None:
    stream = granted()
    assert stream.write(changed(1)) == ""
    assert stream.write(changed(1)) == "duplicate"
    stream.grant(H2)
    assert stream.write(changed(1), H2) == "duplicate"
    assert stream.write(changed(2), H2) == ""
    assert (stream.state.number, stream.state.gap) == (2, 0)


def test_a_gap_is_said_once_for_each() -> None:
    stream = granted()
    stream.write(changed(1))
    assert stream.write(changed(4)) == "", "it counts: it is what the stream has"
    gap = stream.messages[-1].seq
    assert (stream.state.gap, stream.state.gaps, stream.state.number) == (gap, 1, 4)
    stream.write(changed(5))
    assert stream.state.gap == gap
    again = folded(stream.messages)
    assert (again.gap, again.state_hash) == (gap, stream.state.state_hash), "made anew it is the same: no more repairs"


def test_a_message_that_is_delivered_twice_changes_nothing() -> None:
    stream = granted()
    stream.say()
    before = (stream.state.state_hash, stream.state.dropped.copy())
    for message in stream.messages:
        assert stream.state.apply(message).why == "duplicate"
    assert (stream.state.state_hash, stream.state.dropped) == before


# -- pages ------------------------------------------------------------------------------------------------------------


def test_what_records_do() -> None:
    stream, add, remove = granted(), PageOp.ADD, PageOp.REMOVE
    stream.write(changed(1, (add, 1, 0, 0, 10), (add, 2, 0, 0, 20), (add, 1, 0, 1, 11), (add, 3, 1, 1, 30)))
    assert len(stream.state.pages) == 4
    stream.write(changed(2, (remove, 1, 0, 0, 10), (add, 1, 0, 0, 12), (remove, 1, 0, 0, 10), (remove, 2, 0, 0, 99)))
    assert {(key[0], slot) for key, _, _, slot, _ in pages(stream.state)} == {  # type: ignore[index]
        (1, 12), (1, 11), (2, 20), (3, 30)
    }  # fmt: skip
    stream.write(changed(3, (PageOp.CLEAR, 0, 0, 0, 0)))
    assert {key[0] for key, *_ in pages(stream.state)} == {3}  # type: ignore[index]
    stream.write(changed(4, (add, 4, 0, 0, 40), (PageOp.GONE, 0, 0, 1, 0)))
    assert {key[0] for key, *_ in pages(stream.state)} == {4}  # type: ignore[index]


def test_a_time_to_live_counts_from_the_streams_time() -> None:
    stream = granted()
    stream.write(changed(1, (PageOp.ADD, 1, 0, 0, 1), ttl_s=60))
    stream.write(changed(2, (PageOp.ADD, 2, 0, 0, 2), ttl_s=(1 << 32) - 1))
    assert {ends for *_, ends in pages(stream.state)} == {1060, (1 << 32) - 1}


def test_what_has_expired_goes_with_the_next_batch_that_counts() -> None:
    stream = granted()
    stream.write(changed(1, (PageOp.ADD, 1, 0, 0, 1), (PageOp.ADD, 2, 0, 0, 2), ttl_s=60))
    stream.time_ns += 59 * 10**9
    stream.write(changed(2, (PageOp.ADD, 2, 0, 0, 2), ttl_s=60))
    assert len(stream.state.pages) == 2
    stream.time_ns += 10**9
    assert stream.say(H2) == "fenced"
    assert len(stream.state.pages) == 2
    stream.write(changed(3, (PageOp.REMOVE, 1, 0, 0, 1)))
    assert {ends for *_, ends in pages(stream.state)} == {1119}


def test_snapshots_go_on_and_another_confirms_them() -> None:
    stream, name = granted(), "cd" * 32
    stream.say()
    taken = ShardSnapshotTaken(shard=SHARD, upto=stream.state.seq, fold=1, state_hash=name, blob=BLOB)
    assert stream.write(taken, H2) == "fenced"
    assert stream.write(taken) == ""
    at = stream.messages[-1].seq
    confirmed = ShardSnapshotConfirmed(shard=SHARD, snapshot=at, state_hash=name)
    assert stream.write(confirmed, H1) == "conflict", "its own author proves nothing"
    assert stream.write(replace(confirmed, state_hash="0" * 64), H2) == "conflict"
    assert stream.write(replace(confirmed, snapshot=at + 1), H2) == "conflict"
    assert stream.write(confirmed, H2) == ""
    assert stream.state.snapshot is not None and stream.state.snapshot.confirmed
    assert stream.write(confirmed, H2) == "duplicate"
    assert stream.write(taken) == "conflict", "an older one than is there"
    assert stream.write(replace(taken, upto=1 << 60)) == "conflict", "of what is not there yet"


# -- always -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    author: WorkerId
    life: Incarnation
    what: str
    token: str
    number: int
    rows: tuple[Row, ...]
    wait_s: int
    ttl_s: int


homes, lives = st.sampled_from((H1, H2)), st.sampled_from((LIFE, LIFE, LIFE, LATER))
row = st.tuples(
    st.sampled_from((PageOp.ADD,) * 6 + (PageOp.REMOVE,) * 3 + (PageOp.CLEAR, PageOp.GONE)),
    st.integers(0, 5), st.integers(0, 1), st.integers(0, 1), st.integers(0, 3),
)  # fmt: skip
steps = st.builds(
    Step,
    author=homes,
    life=lives,
    what=st.sampled_from(("batch",) * 6 + ("grant", "grant", "snapshot", "confirm", "garbled", "garbled grant")),
    token=st.sampled_from(("in force", "in force", "in force", "own", "none")),
    number=st.sampled_from((1, 1, 1, 1, 1, 0, 2)),
    rows=st.lists(row, min_size=1, max_size=6).map(tuple),
    wait_s=st.sampled_from((0, 0, 1, 2)),
    ttl_s=st.sampled_from((0, 0, 1, 2, 3)),
)


def history(plan: Sequence[Step]) -> Stream:
    stream, own = Stream(), {H1: 0, H2: 0}
    stream.grant()
    for step in plan:
        stream.time_ns += step.wait_s * 10**9
        token = {"in force": stream.token, "own": own[step.author], "none": 0}[step.token]
        how: dict[str, Any] = {"life": step.life, "token": token}
        match step.what:
            case "grant":
                own[step.author] = stream.grant(step.author, life=step.life)
            case "batch":
                batch = changed(max(stream.state.number + step.number, 1), *step.rows, ttl_s=step.ttl_s)
                stream.write(batch, step.author, **how)
            case "snapshot":
                fact = ShardSnapshotTaken(
                    shard=SHARD, upto=stream.state.seq, fold=1, state_hash=stream.state.state_hash, blob=BLOB
                )
                stream.write(fact, step.author, **how)
            case "confirm":
                kept = stream.state.snapshot
                found = ("0" * 64, 1) if kept is None else (kept.state_hash, kept.seq)
                stream.write(
                    ShardSnapshotConfirmed(shard=SHARD, snapshot=found[1], state_hash=found[0]), step.author, **how
                )
            case "garbled":
                stream.write(UnknownEvent("?"), step.author, subject=f"tb.shard.5.{step.author}", **how)
            case _:
                stream.write(UnknownEvent("?"), step.author, subject=f"tb.lease.5.{step.author}", **how)
    return stream


def told(messages: Sequence[AnyPageRecorded]) -> set[tuple[object, ...]]:
    """The pages by a second, plain fold."""
    found: dict[tuple[bytes, str], dict[int, tuple[int, int]]] = {}
    holder: tuple[str, str, int] | None = None
    number = 0
    for message in messages:
        author = message.subject.rpartition(".")[2]
        if ".lease." in message.subject:
            holder = (author, message.headers.incarnation, message.seq)
        batch = message.event
        if not isinstance(batch, PagesChanged) or batch.number <= number:
            continue
        if holder != (author, message.headers.incarnation, message.headers.token):
            continue
        number, now_s = batch.number, message.time_ns // 10**9
        for copies in found.values():
            for expired in [who for who, (_, ends) in copies.items() if 0 < ends <= now_s]:
                del copies[expired]
        for record in np.frombuffer(batch.records, RECORD):
            key, keyspace = record["key"].tobytes(), KEYSPACES[record["keyspace"]]
            who, slot, ttl_s = int(record["holder"]), int(record["slot"]), int(record["ttl_s"])
            copies = found.setdefault((key, keyspace), {})
            match int(record["op"]):
                case PageOp.ADD:
                    copies[who] = slot, now_s + ttl_s if ttl_s else 0
                case PageOp.REMOVE if copies.get(who, (-1, 0))[0] == slot:
                    del copies[who]
                case PageOp.CLEAR:
                    found = {name: there for name, there in found.items() if name[1] != keyspace}
                case PageOp.GONE:
                    for there in found.values():
                        there.pop(who, None)
    workers = ((W1.worker, W1.incarnation), (W2.worker, W2.incarnation))
    return {(*name, workers[who], *copy) for name, copies in found.items() for who, copy in copies.items()}


@given(st.lists(steps, max_size=40))
def test_only_what_the_grant_in_force_says_is_seen(plan: list[Step]) -> None:
    stream = history(plan)
    assert pages(stream.state) == told(stream.messages)


@given(st.lists(steps, max_size=30), st.integers(0, 30))
def test_a_snapshot_and_what_follows_is_the_same_as_all(plan: list[Step], cut: int) -> None:
    stream = history(plan)
    before = folded(stream.messages[:cut])
    if before.degraded:
        with pytest.raises(UnavailableError):
            dump_shard(before)
        return
    began = copied(before)
    assert (began.state_hash, began.seq, began.lease) == (before.state_hash, before.seq, before.lease)
    state = folded(stream.messages, began)
    assert state.state_hash == stream.state.state_hash
    assert pages(state) == pages(stream.state)
    assert (state.number, state.gap, state.gaps, state.dropped, state.unknown) == (
        stream.state.number, stream.state.gap, stream.state.gaps, stream.state.dropped, stream.state.unknown
    )  # fmt: skip


def test_the_hash_of_a_state_is_the_same_in_every_version() -> None:
    stream = granted()
    stream.write(changed(1, (PageOp.ADD, 1, 0, 0, 1), (PageOp.ADD, 2, 1, 1, 2), ttl_s=60))
    stream.grant(H2)
    assert stream.state.state_hash == "111bd46481c686beadb489f6445cfc97ce0eeb3dcf6ddbcb8225cb2fdf6006e8"


@given(st.lists(steps, max_size=20), st.data())
def test_a_damaged_snapshot_is_corrupt(plan: list[Step], data: st.DataObject) -> None:
    stream = history([step for step in plan if step.what != "garbled" and step.number != 2])
    good = b"".join(dump_shard(stream.state))
    at = data.draw(st.integers(0, len(good) - 1))
    hurt = bytearray(good)
    hurt[at] ^= data.draw(st.integers(1, 255))
    for bad in (good[:at], good + b"x", bytes(hurt)):
        try:
            *_, last = load_shard(bad)
        except (CorruptError, UnavailableError):
            continue
        assert last is not None
        assert last.state_hash == stream.state.state_hash, "only what the hash does not cover may differ"
        assert bad == bytes(hurt)
