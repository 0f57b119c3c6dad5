"""Facts to bytes and back: strict, typed errors, and nothing newer is guessed at."""

from __future__ import annotations

import json
from dataclasses import FrozenInstanceError, asdict, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorbus.errors import CorruptError, InvalidArgumentError
from tensorbus.events import (
    EVENT_TYPES,
    FACT_BYTES_MAX,
    SCHEMA_VERSION,
    Event,
    ManifestRef,
    ReplicaAdded,
    UnknownEvent,
    _codec,
    decode,
    decode_body,
    encode,
    json_schema,
)
from tests.unit.lifecycle import history as h

BODY: dict[str, Any] = json.loads(encode(h.added(3)))


def body(**changes: object) -> bytes:
    return json.dumps({**BODY, **changes}).encode()


def read(data: bytes, *, type_name: str = "ReplicaAdded", schema: int = SCHEMA_VERSION) -> Event | UnknownEvent:
    return decode_body(data, type_name=type_name, schema=schema)


@given(st.one_of(*(st.from_type(cls) for cls in EVENT_TYPES)))
def test_what_was_encoded_decodes_to_the_same_fact(event: Event) -> None:
    data = encode(event)
    again = decode_body(data, type_name=event.type, schema=SCHEMA_VERSION)
    assert again == event
    assert type(again) is type(event)
    assert encode(again) == data


@pytest.mark.parametrize(
    "changes",
    [
        {"nbytes": "3"},
        {"nbytes": 3.0},
        {"nbytes": True},
        {"nbytes": None},
        {"number": "1"},
        {"tier": "floppy"},
        {"tier": "DRAM"},
        {"artifact": 7},
        {"view": False},
        {"tenant": "\ud800"},
        {"type": "ReplicaRemoved"},
    ],
    ids=str,
)
def test_a_value_that_is_not_of_its_type_is_corrupt_and_never_converted(changes: dict[str, object]) -> None:
    with pytest.raises(CorruptError, match="ReplicaAdded"):
        read(body(**changes))


@pytest.mark.parametrize("name", sorted(set(BODY) - {"type"}))
def test_a_field_that_is_missing_has_no_default(name: str) -> None:
    with pytest.raises(CorruptError):
        read(json.dumps({key: value for key, value in BODY.items() if key != name}).encode())


@pytest.mark.parametrize("data", [b"", b"null", b"[]", b"{}", b"\xff\xfe", b"[" * 100_000, b'{"type":"ReplicaAdded"'])
def test_what_is_no_fact_is_corrupt(data: bytes) -> None:
    with pytest.raises(CorruptError):
        read(data)


def test_header_and_body_must_name_the_same_type() -> None:
    with pytest.raises(CorruptError, match="header says ReplicaDropped, the body ReplicaAdded"):
        read(body(), type_name="ReplicaDropped")


@given(st.binary(max_size=200), st.sampled_from([cls.__name__ for cls in EVENT_TYPES]))
def test_no_bytes_make_the_codec_raise_anything_else(data: bytes, type_name: str) -> None:
    with pytest.raises(CorruptError):
        read(data, type_name=type_name)


def test_a_type_or_schema_of_a_newer_version_is_unknown() -> None:
    assert read(b"anything", type_name="ArtifactSealed") == UnknownEvent("ArtifactSealed")
    assert read(body(), schema=SCHEMA_VERSION + 1) == UnknownEvent("ReplicaAdded")


def test_an_old_form_is_lifted_step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_number(old: dict[str, Any]) -> dict[str, Any]:
        return {**old, "number": 1}

    def size_was_text(old: dict[str, Any]) -> dict[str, Any]:
        return {**old, "nbytes": int(old["nbytes"])}

    lifts = {("ReplicaAdded", -1): no_number, ("ReplicaAdded", 0): size_was_text}
    monkeypatch.setattr(_codec, "UPCASTERS", lifts)
    old = {key: value for key, value in BODY.items() if key != "number"} | {"nbytes": "64"}
    assert read(json.dumps(old).encode(), schema=-1) == h.added(1)
    with pytest.raises(CorruptError):
        read(b"no json", schema=0)


def test_a_fact_has_at_most_64_kib() -> None:
    room = FACT_BYTES_MAX - len(encode(replace(h.put(), manifest=ManifestRef(inline=""))))
    assert len(encode(replace(h.put(), manifest=ManifestRef(inline="x" * room)))) == FACT_BYTES_MAX
    with pytest.raises(InvalidArgumentError, match="over the 65536") as caught:
        encode(replace(h.put(), manifest=ManifestRef(inline="x" * (room + 1))))
    assert caught.value.details == {"nbytes": FACT_BYTES_MAX + 1}


def test_text_that_is_no_utf8_cannot_be_written() -> None:
    with pytest.raises(InvalidArgumentError, match="KeyBound cannot be written"):
        encode(h.bound("\udcff"))


def test_a_fact_is_frozen_and_small() -> None:
    with pytest.raises(FrozenInstanceError):
        h.added(1).number = 2  # type: ignore[misc]
    assert not hasattr(h.added(1), "__dict__")


@pytest.mark.parametrize("cls", EVENT_TYPES, ids=lambda cls: cls.__name__)
def test_each_fact_names_its_type_and_is_in_the_schema(cls: type[Event]) -> None:
    assert cls.__dataclass_fields__["type"].default == cls.__name__
    assert cls.__name__ in json_schema()["$defs"]


def test_a_replica_fact_has_these_bytes() -> None:
    assert isinstance(h.added(1), ReplicaAdded)
    assert asdict(h.added(3)) == BODY
    assert encode(h.added(3)) == (
        b'{"type":"ReplicaAdded","tenant":"acme","artifact":"x","view":null,"tier":"dram","nbytes":64,"number":3}'
    )


def message(**headers: str | None) -> dict[str, Any]:
    wire = {
        "Nats-Msg-Id": "e1",
        "Tb-Type": "ReplicaAdded",
        "Tb-Schema": "1",
        "Tb-Author": "w1",
        "Tb-Incarnation": "1" * 16,
    }
    named = {key: value for key, value in {**wire, **headers}.items() if value is not None}
    return {"seq": 7, "time_ns": 9, "subject": "tb.ev.replica.a.w1", "headers": named, "data": body()}


def test_a_message_becomes_a_fact_with_its_place_on_the_log() -> None:
    recorded = decode(**message())
    assert (recorded.seq, recorded.time_ns, recorded.subject) == (7, 9, "tb.ev.replica.a.w1")
    assert recorded.event == h.added(3)


@pytest.mark.parametrize("name", ["Nats-Msg-Id", "Tb-Schema", "Tb-Author", "Tb-Incarnation"])
def test_a_message_without_the_headers_of_a_fact_is_corrupt(name: str) -> None:
    with pytest.raises(CorruptError, match="headers"):
        decode(**message(**{name: None}))


@pytest.mark.parametrize("name", ["Tb-Schema", "Tb-Token", "Nats-Expected-Last-Subject-Sequence"])
def test_a_header_that_is_no_number_is_corrupt(name: str) -> None:
    with pytest.raises(CorruptError, match="headers"):
        decode(**message(**{name: "many"}))


def test_headers_that_this_version_does_not_know_are_passed_over() -> None:
    assert decode(**message(**{"Tb-Mood": "good"})) == decode(**message())


def test_a_message_without_a_type_is_unknown() -> None:
    assert decode(**message(**{"Tb-Type": None})).event == UnknownEvent("")
