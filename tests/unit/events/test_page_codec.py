"""Page facts to bytes and back: a batch is read in place, and hostile bytes end in a typed error."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorbus.errors import CorruptError, InvalidArgumentError
from tensorbus.events import (
    PAGE_EVENT_TYPES,
    PAGE_FACT_BYTES_MAX,
    RECORD,
    RECORD_BYTES,
    SCHEMA_VERSION,
    TABLE_MAX,
    BlobRef,
    Event,
    Headers,
    LeaseGranted,
    PageEvent,
    PageHolder,
    PageOp,
    PagesChanged,
    ShardSnapshotConfirmed,
    ShardSnapshotTaken,
    UnknownEvent,
    aggregate_of,
    decode_page,
    decode_page_body,
    encode,
    headers_to_wire,
    page_json_schema,
    page_records,
    records_max,
)
from tensorbus.ids import EventId, Incarnation, WorkerId

GOLDEN = Path(__file__).parents[2] / "golden" / "page_facts.json"
W1 = PageHolder(worker=WorkerId("w1"), incarnation=Incarnation("0123456789abcdef"))
W2 = PageHolder(worker=WorkerId("W-2_"), incarnation=Incarnation("fedcba9876543210"))
BLOB = BlobRef(digest="ab" * 32, nbytes=100, chunks=1, author=WorkerId("h1"))


def records(count: int, *, op: PageOp = PageOp.ADD) -> np.ndarray[Any, Any]:
    found = np.zeros(count, RECORD)
    found["key"] = [bytes([n % 256]) * 32 for n in range(count)]
    found["op"] = op
    found["slot"] = np.arange(count) * 2**40
    found["nbytes"] = 65536
    return found


def batch(count: int = 3, **changes: Any) -> PagesChanged:
    data = records(count).tobytes()
    whole = PagesChanged(shard=63, number=7, keyspaces=("0f" * 32,), holders=(W1, W2), records=data)
    return replace(whole, **changes)


EXAMPLES: tuple[PageEvent, ...] = (
    batch(),
    LeaseGranted(shard=5),
    ShardSnapshotTaken(shard=5, upto=2**53, fold=1, state_hash="cd" * 32, blob=BLOB),
    ShardSnapshotConfirmed(shard=5, snapshot=9, state_hash="cd" * 32),
)


def read(data: bytes, *, type_name: str = "PagesChanged", schema: int = SCHEMA_VERSION) -> PageEvent | UnknownEvent:
    return decode_page_body(data, type_name=type_name, schema=schema)


@pytest.mark.parametrize("event", EXAMPLES)
def test_what_was_encoded_decodes_to_the_same_fact(event: PageEvent) -> None:
    again = read(encode(event), type_name=event.type)
    assert again == event
    assert type(again) is type(event)


def test_the_examples_are_of_every_type() -> None:
    assert {type(event) for event in EXAMPLES} == set(PAGE_EVENT_TYPES)
    assert {aggregate_of(event).kind for event in EXAMPLES} == {"lease", "shard", "psnap", "pconf"}


def test_what_was_shipped_is_read_for_ever() -> None:
    shipped = json.loads(GOLDEN.read_text("utf-8"))
    assert [encode(event).hex() for event in EXAMPLES] == list(shipped.values())
    for name, data in shipped.items():
        assert read(bytes.fromhex(data), type_name=name) in EXAMPLES


def test_records_are_read_in_place_and_cannot_be_written() -> None:
    data = encode(batch(1000))
    found = read(data)
    assert isinstance(found, PagesChanged)
    rows = page_records(found)
    assert np.shares_memory(rows, np.frombuffer(data, "u1"))
    assert (rows == records(1000)).all()
    with pytest.raises(ValueError, match="read-only"):
        rows["slot"][0] = 1


@pytest.mark.parametrize(("keyspaces", "holders"), [(1, 1), (3, 9), (TABLE_MAX, TABLE_MAX)])
def test_as_many_records_as_promised_fit(keyspaces: int, holders: int) -> None:
    worst = PageHolder(worker=WorkerId("w" * 64), incarnation=Incarnation("f" * 64))
    names, who = ("0" * 64,) * keyspaces, (worst,) * holders
    most = records_max(names, who)
    event = batch(most, shard=65535, number=2**63, keyspaces=names, holders=who)
    assert len(encode(event)) <= PAGE_FACT_BYTES_MAX
    with pytest.raises(InvalidArgumentError, match="over the 65536"):
        encode(replace(event, records=records(most + 64).tobytes()))


def test_a_table_may_be_empty_that_no_record_looks_at() -> None:
    for event in (
        batch(keyspaces=(), records=records(2, op=PageOp.GONE).tobytes()),
        batch(holders=(), records=records(2, op=PageOp.CLEAR).tobytes()),
    ):
        assert read(encode(event)) == event


def test_a_thousand_pages_fit() -> None:
    assert records_max(("0" * 64,), (W1,)) >= 1000


@pytest.mark.parametrize(
    "changes",
    [
        {"records": b""},
        {"records": b"x" * (RECORD_BYTES - 1)},
        {"number": 0},
        {"shard": -1},
        {"shard": 1 << 16},
        {"keyspaces": ("0F" * 32,)},
        {"keyspaces": ()},
        {"holders": ()},
        {"holders": (), "records": records(2, op=PageOp.GONE).tobytes()},
        {"keyspaces": (), "records": records(2, op=PageOp.CLEAR).tobytes()},
        {"keyspaces": ()} | {"records": np.array([(b"", 1, 0, 0, 1, 0, 0, 0, 0, 0, 0)], RECORD).tobytes()},
        {"holders": (PageHolder(worker=WorkerId("a.b"), incarnation=Incarnation("f")),)},
        {"keyspaces": ("0" * 64,) * (TABLE_MAX + 1)},
        {"records": np.array([(b"", 0, 0, 2, 1, 0, 0, 0, 0, 0, 0)], RECORD).tobytes()},
        {"records": np.array([(b"", 1, 0, 0, 1, 0, 0, 0, 0, 0, 0)], RECORD).tobytes()},
        {"records": np.array([(b"", 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)], RECORD).tobytes()},
        {"records": np.array([(b"", 0, 0, 0, 5, 0, 0, 0, 0, 0, 0)], RECORD).tobytes()},
        {"records": np.array([(b"", 0, 0, 0, 1, 1, 0, 0, 0, 0, 0)], RECORD).tobytes()},
    ],
)
def test_what_cannot_be_read_is_not_written(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError, match="batch"):
        encode(batch(**changes))


def test_a_record_must_name_what_the_tables_have() -> None:
    """A hostile writer need not use our encoder: the checksum is right here, and the table is cut."""
    data = encode(batch())
    head_bytes, at = int.from_bytes(data[4:8], "little"), 16
    head = json.loads(data[at : at + head_bytes])
    head["holders"], rows = [], bytearray(data[at + head_bytes :])
    rows[36] = 1
    said = json.dumps(head).encode().ljust(head_bytes)
    with pytest.raises(CorruptError, match="names holder 1 of 0"):
        read(_sealed(said, bytes(rows), count=3))


def _sealed(head: bytes, rows: bytes, *, count: int, magic: bytes = b"TBP1") -> bytes:
    numbers = (len(head), count, crc32(rows, crc32(head)))
    return magic + b"".join(n.to_bytes(4, "little") for n in numbers) + head + rows


def test_every_cut_is_corrupt() -> None:
    data = encode(batch())
    for at in range(len(data)):
        with pytest.raises(CorruptError):
            read(data[:at])
    with pytest.raises(CorruptError):
        read(data + b"x")


@given(st.integers(0, len(encode(batch())) - 1), st.integers(1, 255))
def test_every_changed_byte_is_corrupt(at: int, change: int) -> None:
    data = bytearray(encode(batch()))
    data[at] ^= change
    with pytest.raises(CorruptError):
        read(bytes(data))


@given(st.binary(max_size=300), st.integers(0, 4))
def test_any_bytes_are_a_fact_or_corrupt(data: bytes, count: int) -> None:
    """Also those whose frame is right."""
    rows = data[-64 * count :] if count else b""
    for hostile in (data, b"TBP1" + data, _sealed(data[: len(data) - len(rows)], rows, count=count)):
        for name in ("PagesChanged", "LeaseGranted", "ShardSnapshotTaken"):
            with pytest.raises(CorruptError):
                read(hostile, type_name=name)


@pytest.mark.parametrize("count", [0, 2, 4, 2**32 - 1])
def test_a_wrong_count_is_corrupt(count: int) -> None:
    data = bytearray(encode(batch()))
    data[8:12] = count.to_bytes(4, "little")
    with pytest.raises(CorruptError):
        read(bytes(data))


def test_an_oversized_one_is_corrupt() -> None:
    good = encode(batch())
    head = good[16 : 16 + int.from_bytes(good[4:8], "little")]
    rows = records(1100).tobytes()
    with pytest.raises(CorruptError, match="over the 65536"):
        read(_sealed(head, rows, count=1100))


def test_a_type_that_is_not_known_is_skipped_and_a_wrong_one_corrupt() -> None:
    assert read(b"{}", type_name="PagesMoved") == UnknownEvent("PagesMoved")
    assert read(encode(batch()), schema=SCHEMA_VERSION + 1) == UnknownEvent("PagesChanged")
    with pytest.raises(CorruptError, match="the header says"):
        read(encode(EXAMPLES[1]), type_name="ShardSnapshotTaken")


def test_a_stored_message_is_decoded_with_its_place() -> None:
    given_ = Headers(event_id=EventId("e"), author=W1.worker, incarnation=W1.incarnation, token=4, expected=4)
    wire = headers_to_wire(given_, type_name="PagesChanged", fence="tb.lease.63.*")
    found = decode_page(seq=9, time_ns=5, subject="tb.shard.63.w1", headers=wire, data=encode(batch()))
    assert (found.seq, found.time_ns, found.headers, found.event) == (9, 5, given_, batch())
    with pytest.raises(CorruptError, match="headers"):
        decode_page(seq=9, time_ns=5, subject="tb.shard.63.w1", headers={}, data=encode(batch()))


def test_the_logs_union_does_not_know_page_facts() -> None:
    assert not any(isinstance(event, Event) for event in EXAMPLES)
    assert "_Head" in str(page_json_schema())
