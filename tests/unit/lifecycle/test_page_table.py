"""The table of a shard's pages against a plain dict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorbus.errors import OutOfSpaceError
from tensorbus.events import RECORD
from tensorbus.lifecycle import COPIES_MAX, PageTable
from tensorbus.lifecycle._page_rows import Numbered

Page = tuple[int, int, int]
"""Number of a key, keyspace, fragment."""
Place = tuple[int, int, int, int]
"""Segment, generation, slot, nbytes."""


def key(number: int) -> bytes:
    """32 bytes; numbers that are equal modulo 4 begin to be looked for at the same place."""
    return b"".join(word.to_bytes(8, "little") for word in (number, number % 4, 7, 9))


def records(items: Sequence[tuple[Page, int, Place]]) -> npt.NDArray[np.void]:
    out = np.zeros(len(items), RECORD)
    for at, ((number, keyspace, fragment), holder, (segment, generation, slot, nbytes)) in enumerate(items):
        out[at] = (key(number), keyspace, fragment, holder, 1, 0, segment, generation, slot, nbytes, 0)
    return out


@dataclass
class Model:
    """What the table should know: the holders of each page, the first writer first."""

    pages: dict[Page, dict[int, Place]] = field(default_factory=dict)

    def add(self, items: Sequence[tuple[Page, int, Place]]) -> None:
        for page, holder, place in items:
            copies = self.pages.setdefault(page, {})
            if holder in copies or len(copies) < COPIES_MAX:
                copies[holder] = place

    def remove(self, items: Sequence[tuple[Page, int, Place]]) -> None:
        for page, holder, place in items:
            copies = self.pages.get(page, {})
            if holder in copies and copies[holder][:3] == place[:3]:
                del copies[holder]
        self.tidy()

    def tidy(self) -> None:
        self.pages = {page: copies for page, copies in self.pages.items() if copies}


def same(table: PageTable, model: Model) -> None:
    assert len(table) == sum(len(copies) for copies in model.pages.values())
    for page, copies in model.pages.items():
        number, keyspace, fragment = page
        row = int(table.find(np.frombuffer(key(number), np.uint8).reshape(1, 32), keyspace, fragment)[0])
        assert row >= 0, page
        found, _ = table.at(np.array(table.copies(row), np.int32))
        assert [int(holder) for holder in found["holder"]] == list(copies)
        for record, place in zip(found, copies.values(), strict=True):
            assert tuple(int(record[name]) for name in ("segment", "generation", "slot", "nbytes")) == place


def fresh() -> PageTable:
    table = PageTable()
    for number in range(12):
        assert table.keyspaces.number(bytes([number])) == number
        assert table.holders.number(("w", str(number))) == number
    return table


pages = st.tuples(st.integers(0, 11), st.integers(0, 1), st.integers(0, 1))
places = st.tuples(st.integers(0, 1), st.integers(0, 1), st.integers(0, 3), st.integers(1, 9))
batch = st.lists(st.tuples(pages, st.integers(0, 11), places), max_size=30)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("add"), batch),
        st.tuples(st.just("remove"), batch),
        st.tuples(st.just("keyspace"), st.integers(0, 1)),
        st.tuples(st.just("holder"), st.integers(0, 11)),
    ),
    max_size=12,
)


@given(steps)
def test_any_history_gives_what_a_dict_gives(history: list[tuple[str, object]]) -> None:
    table, model = fresh(), Model()
    for what, value in history:
        match what:
            case "add":
                table.add(records(value))  # type: ignore[arg-type]
                model.add(value)  # type: ignore[arg-type]
            case "remove":
                before = sum(len(copies) for copies in model.pages.values())
                model.remove(value)  # type: ignore[arg-type]
                after = sum(len(copies) for copies in model.pages.values())
                assert table.remove(records(value)) == before - after  # type: ignore[arg-type]
            case "keyspace":
                table.remove_keyspace(value)  # type: ignore[arg-type]
                model.pages = {page: copies for page, copies in model.pages.items() if page[1] != value}
            case "holder":
                table.remove_holder(value)  # type: ignore[arg-type]
                for copies in model.pages.values():
                    copies.pop(value, None)  # type: ignore[call-overload]
                model.tidy()
        same(table, model)
    again = fresh()
    again.add(*table.dump())
    same(again, model)
    assert again.state_hash == table.state_hash


@given(batch, st.randoms())
def test_the_hash_tells_states_and_not_histories(items: list[tuple[Page, int, Place]], random: object) -> None:
    distinct = list({(page, holder): (page, holder, place) for page, holder, place in items if holder < 8}.values())
    one, other = fresh(), fresh()
    one.add(records(distinct))
    shuffled = list(distinct)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    for item in shuffled:
        other.add(records([item]))
    assert one.state_hash == other.state_hash
    if distinct:
        other.remove(records(distinct[:1]))
        assert one.state_hash != other.state_hash
        other.add(records(distinct[:1]))
        assert one.state_hash == other.state_hash
        changed, holder, (segment, generation, slot, nbytes) = distinct[0]
        other.add(records([(changed, holder, (segment, generation, slot, nbytes + 1))]))
        assert one.state_hash != other.state_hash
    other.remove(records(distinct))
    one.remove(records(distinct))
    assert one.state_hash == fresh().state_hash == "0" * 64


def test_names_enter_the_hash_and_numbers_do_not() -> None:
    one, other = fresh(), PageTable()
    mine = other.keyspaces.number(b"\x05"), other.holders.number(("w", "7"))
    one.add(records([((1, 5, 0), 7, (0, 0, 0, 1))]))
    other.add(records([((1, mine[0], 0), mine[1], (0, 0, 0, 1))]))
    assert mine == (0, 0)
    assert one.state_hash == other.state_hash


def test_many_pages_come_and_go_and_memory_is_that_of_those_that_are_there() -> None:
    table, random = fresh(), np.random.default_rng(3)
    for _ in range(60):
        batch = np.zeros(2000, RECORD)
        batch["key"] = random.integers(0, 256, (2000, 32), np.uint8).view("V32").reshape(-1)
        table.add(batch)
        assert (table.find(np.ascontiguousarray(batch["key"]).view(np.uint8).reshape(-1, 32), 0) >= 0).all()
        assert table.remove(batch) == 2000
    assert len(table) == 0
    assert table.nbytes < 2000 * 200


def test_numbers_of_names_are_used_again_only_when_no_row_refers_to_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tensorbus.lifecycle._page_rows.NUMBERS_MAX", 3)
    names = Numbered()
    assert [names.number(name) for name in "abca"] == [0, 1, 2, 0]
    names.count(np.array([0, 2], np.uint16), +1)
    assert names.number("d") == 1
    assert names.get("b") is None
    assert list(names) == ["a", "c"]
    names.count(np.array([1], np.uint16), +1)
    with pytest.raises(OutOfSpaceError):
        names.number("e")
