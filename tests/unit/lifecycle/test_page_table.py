"""The table of a shard's pages against a plain dict."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorbus.errors import OutOfSpaceError
from tensorbus.events import RECORD, PageOp
from tensorbus.lifecycle import COPIES_MAX, PageTable
from tensorbus.lifecycle._page_rows import Numbered

Page = tuple[int, int, int]
"""Number of a key, keyspace, fragment."""
Place = tuple[int, int, int, int, int]
"""Segment, generation, slot, nbytes, and the second at which it expires or 0."""
Item = tuple[Page, int, Place]


def key(number: int) -> bytes:
    """32 bytes; numbers that are equal modulo 4 begin to be looked for at the same place."""
    return b"".join(word.to_bytes(8, "little") for word in (number, number % 4, 7, 9))


def keys(numbers: Sequence[int]) -> npt.NDArray[np.uint8]:
    return np.frombuffer(b"".join(key(number) for number in numbers), np.uint8).reshape(-1, 32)


def batch_of(items: Sequence[Item]) -> tuple[npt.NDArray[np.void], npt.NDArray[np.uint32]]:
    out, expires_s = np.zeros(len(items), RECORD), np.zeros(len(items), np.uint32)
    for at, ((number, keyspace, fragment), holder, (segment, generation, slot, nbytes, expires)) in enumerate(items):
        out[at] = (key(number), keyspace, fragment, holder, 1, 0, segment, generation, slot, nbytes, 77)
        expires_s[at] = expires
    return out, expires_s


@dataclass
class Model:
    """What the table should know: the holders of each page, the first writer first."""

    pages: dict[Page, dict[int, Place]] = field(default_factory=dict)

    def __len__(self) -> int:
        return sum(len(copies) for copies in self.pages.values())

    def add(self, items: Sequence[Item]) -> None:
        for page, holder, place in items:
            copies = self.pages.setdefault(page, {})
            if holder in copies or len(copies) < COPIES_MAX:
                copies[holder] = place

    def drop(self, goes: Callable[[Page, int, Place], bool]) -> int:
        before = len(self)
        kept = {
            page: {holder: place for holder, place in copies.items() if not goes(page, holder, place)}
            for page, copies in self.pages.items()
        }
        self.pages = {page: copies for page, copies in kept.items() if copies}
        return before - len(self)

    def remove(self, items: Sequence[Item]) -> int:
        named = {(page, holder, place[:3]) for page, holder, place in items}
        return self.drop(lambda page, holder, place: (page, holder, place[:3]) in named)

    def first(self, page: Page, now_s: int, live: Sequence[bool]) -> int | None:
        """The first holder whose copy can be used."""
        copies = self.pages.get(page, {}).items()
        return next((holder for holder, place in copies if live[holder] and not 0 < place[4] <= now_s), None)


def same(table: PageTable, model: Model) -> None:
    assert len(table) == len(model)
    assert table.pages == len(model.pages)
    for page, copies in model.pages.items():
        number, keyspace, fragment = page
        row = int(table.find(keys([number]), keyspace, fragment)[0])
        assert row >= 0, page
        found, expires_s = table.at(np.array(table.copies(row), np.int32))
        assert [int(holder) for holder in found["holder"]] == list(copies)
        assert (found["op"] == PageOp.ADD).all()
        assert not found["ttl_s"].any()
        for record, expires, place in zip(found, expires_s, copies.values(), strict=True):
            assert (*(int(record[name]) for name in ("segment", "generation", "slot", "nbytes")), expires) == place


def fresh() -> PageTable:
    table = PageTable()
    for number in range(12):
        assert table.keyspaces.number(bytes([number])) == number
        assert table.holders.number(("w", str(number))) == number
    return table


pages = st.tuples(st.integers(0, 11), st.integers(0, 1), st.integers(0, 1))
places = st.tuples(
    st.integers(0, 1), st.integers(0, 1), st.integers(0, 3), st.integers(1, 9), st.sampled_from([0, 0, 3, 5, 2**32 - 1])
)
batch = st.lists(st.tuples(pages, st.integers(0, 11), places), max_size=30)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("add"), batch),
        st.tuples(st.just("remove"), batch),
        st.tuples(st.just("keyspace"), st.integers(0, 1)),
        st.tuples(st.just("holder"), st.integers(0, 11)),
        st.tuples(st.just("expire"), st.sampled_from([0, 2, 3, 4, 5, 2**32 - 2])),
    ),
    max_size=12,
)


def step(table: PageTable, model: Model, what: str, value: Any) -> None:
    match what:
        case "add":
            table.add(*batch_of(value))
            model.add(value)
        case "remove":
            assert table.remove(batch_of(value)[0]) == model.remove(value)
        case "keyspace":
            assert table.remove_keyspace(value) == model.drop(lambda page, holder, place: page[1] == value)
        case "holder":
            assert table.remove_holder(value) == model.drop(lambda page, holder, place: holder == value)
        case "expire":
            assert table.expire(value) == model.drop(lambda page, holder, place: 0 < place[4] <= value)


@given(steps)
def test_any_history_gives_what_a_dict_gives(history: list[tuple[str, Any]]) -> None:
    table, model = fresh(), Model()
    for what, value in history:
        step(table, model, what, value)
        same(table, model)
    again = fresh()
    again.add(*table.dump())
    same(again, model)
    assert again.state_hash == table.state_hash


@given(batch, st.lists(st.integers(0, 11), max_size=12), st.integers(1, 3), st.integers(0, 6), st.randoms())
def test_what_can_be_used_is_the_first_copy_of_a_living_holder_in_time(
    items: list[Item], asked: list[int], fragments: int, now_s: int, random: Random
) -> None:
    table, model = fresh(), Model()
    table.add(*batch_of(items))
    model.add(items)
    live = [random.random() < 0.6 for _ in range(12)]
    mask = np.array(live)
    rows = table.usable(table.find_group(keys(asked), 0, fragments), now_s=now_s, live=mask)
    expected = [[model.first((number, 0, part), now_s, live) for part in range(fragments)] for number in asked]
    got = [[None if row < 0 else int(table.at(np.array([row]))[0]["holder"][0]) for row in line] for line in rows]
    assert got == expected
    run = next((at for at, line in enumerate(expected) if None in line), len(asked))
    assert table.match(keys(asked), 0, fragments=fragments, now_s=now_s, live=mask) == run


@given(batch, st.randoms())
def test_the_hash_tells_states_and_not_histories(items: list[Item], random: Random) -> None:
    distinct = list({(page, holder): (page, holder, place) for page, holder, place in items if holder < 8}.values())
    one, other = fresh(), fresh()
    one.add(*batch_of(distinct))
    shuffled = list(distinct)
    random.shuffle(shuffled)
    for item in shuffled:
        other.add(*batch_of([item]))
    assert one.state_hash == other.state_hash
    if distinct:
        other.remove(batch_of(distinct[:1])[0])
        assert one.state_hash != other.state_hash
        other.add(*batch_of(distinct[:1]))
        assert one.state_hash == other.state_hash
        changed, holder, place = distinct[0]
        for at in range(5):
            moved = (*place[:at], place[at] ^ 64, *place[at + 1 :])
            other.add(*batch_of([(changed, holder, moved)]))  # type: ignore[list-item]
            assert one.state_hash != other.state_hash
        other.add(*batch_of(distinct[:1]))
        assert one.state_hash == other.state_hash
    other.remove(batch_of(distinct)[0])
    one.remove(batch_of(distinct)[0])
    assert one.state_hash == fresh().state_hash == "0" * 64


def test_names_enter_the_hash_and_numbers_do_not() -> None:
    one, other = fresh(), PageTable()
    mine = other.keyspaces.number(b"\x05"), other.holders.number(("w", "7"))
    one.add(*batch_of([((1, 5, 0), 7, (0, 0, 0, 1, 0))]))
    other.add(*batch_of([((1, mine[0], 0), mine[1], (0, 0, 0, 1, 0))]))
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


def test_memory_is_flat_with_a_prefix_that_lives_and_branches_that_do_not() -> None:
    table, random, sizes = fresh(), np.random.default_rng(6), list[int]()
    prefix = np.zeros(256, RECORD)
    prefix["key"] = np.frombuffer(random.bytes(32 * 256), "V32")
    table.add(prefix)
    for second in range(1, 101):  # 500 branches of 8 pages each second, 50,000 in all
        branches = np.zeros(4000, RECORD)
        branches["key"] = np.frombuffer(random.bytes(32 * 4000), "V32")
        table.expire(second)
        table.add(branches, np.full(4000, second + 5, np.uint32))
        sizes.append(table.nbytes)
    assert max(sizes) <= sizes[9]
    assert table.match(np.ascontiguousarray(prefix["key"]).view(np.uint8).reshape(-1, 32), 0, now_s=100) == 256
    table.expire(105)
    assert len(table) == 256


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
