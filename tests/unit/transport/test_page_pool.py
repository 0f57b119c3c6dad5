"""Page slots: what is reserved is nobody else's, what is freed is gone, what is pinned stays."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tensorbus.errors import ConflictError, CorruptError, InvalidArgumentError, NotFoundError, OutOfSpaceError
from tensorbus.transport import ArenaWriter, MappedArena, PagePlaces, PagePool, PageState, Pool, map_pages
from tensorbus.transport._page_layout import PAGE_PLACE, STAMP_MAX, ArenaShape, PageTable, slot_bytes

NBYTES, SLOTS = 5000, 8
ARENA = SLOTS * slot_bytes(NBYTES)


@pytest.fixture
def pool() -> Iterator[Pool]:
    made = Pool(1 << 20)
    yield made
    made.close()


@pytest.fixture
def pages(pool: Pool) -> Iterator[PagePool]:
    made = PagePool(pool, arena_bytes=ARENA)
    yield made
    made.close()


def put(pages: PagePool, blocks: np.ndarray, **whose: str) -> PagePlaces:
    places = pages.reserve(len(blocks), NBYTES, tenant="t", **whose)
    while len(places) < len(blocks):
        pages.grow(NBYTES, tenant="t", **whose)
        places = np.concatenate([places, pages.reserve(len(blocks) - len(places), NBYTES, tenant="t", **whose)])
    assert pages.commit(places, pages.write(places, blocks, NBYTES)).all()
    return places


def blocks(n: int) -> np.ndarray:
    return np.frombuffer(os.urandom(n * NBYTES), np.uint8).reshape(n, NBYTES)


def mapped(pages: PagePool, segment: int) -> MappedArena:
    return MappedArena(*pages.open_reader(segment), pages.shape(segment))


def states(found: np.ndarray) -> list[PageState]:
    return [PageState(one) for one in found.tolist()]


def test_a_batch_over_several_arenas_is_read_here_and_through_a_map(pages: PagePool) -> None:
    data = blocks(20)
    places = put(pages, data)
    order = np.random.default_rng(1).permutation(20)
    out = np.zeros((20, NBYTES), np.uint8)
    assert not pages.read_into(places[order], out, NBYTES, verify=True).any()
    assert (out == data[order]).all()
    for segment in np.unique(places["segment"]).tolist():
        mine = np.flatnonzero(places["segment"] == segment)
        there = [bytearray(NBYTES) for _ in mine]
        assert not mapped(pages, segment).read_into(places[mine], there, NBYTES, verify=True).any()
        assert [bytes(one) for one in there] == [data[n].tobytes() for n in mine]


def test_a_freed_page_is_gone_also_when_its_slot_has_another(pages: PagePool) -> None:
    first = put(pages, blocks(SLOTS))
    reader = mapped(pages, int(first["segment"][0]))
    assert pages.free(first[:2]).tolist() == [True, True]
    assert pages.free(first[:2]).tolist() == [False, False]
    again = put(pages, blocks(2))
    assert set(again["slot"].tolist()) == set(first["slot"][:2].tolist())
    out = np.zeros((SLOTS, NBYTES), np.uint8)
    assert states(reader.read_into(first, out, NBYTES)) == [PageState.GONE] * 2 + [PageState.OK] * 6
    assert pages.readable(first).tolist() == [False] * 2 + [True] * 6


def test_reserved_slots_cannot_be_read_and_an_abandoned_reservation_cannot_be_committed(pages: PagePool) -> None:
    pages.grow(NBYTES, tenant="t")
    places = pages.reserve(3, NBYTES, tenant="t")
    out = np.zeros((3, NBYTES), np.uint8)
    assert states(pages.read_into(places, out, NBYTES)) == [PageState.GONE] * 3
    assert pages.abandon(places[:1]).all()
    assert pages.commit(places).tolist() == [False, True, True]
    twice = pages.reserve(1, NBYTES, tenant="t").repeat(2)
    assert pages.commit(twice).tolist() == [True, False]


def test_whose_arenas_serve_whom(pages: PagePool) -> None:
    segment = pages.grow(NBYTES, tenant="t", writer="w")
    assert not len(pages.reserve(1, NBYTES, tenant="t"))
    assert not len(pages.reserve(1, NBYTES, tenant="u", writer="w"))
    assert not len(pages.reserve(1, 9 * NBYTES, tenant="t", writer="w"))
    with pytest.raises(ConflictError):
        pages.open_reader(segment)
    writer = ArenaWriter(*pages.open_writer(segment), pages.shape(segment))
    data = blocks(2)
    places = pages.reserve(2, NBYTES, tenant="t", writer="w")
    sums = writer.write(places["slot"], list(data), NBYTES)
    assert pages.commit(places, sums).all()
    out = np.zeros_like(data)
    assert not pages.read_into(places, out, NBYTES, verify=True).any()
    assert (out == data).all()
    with pytest.raises(ConflictError):
        pages.open_writer(segment)
    assert len(pages.reserve(3, NBYTES, tenant="t", writer="w")) == 3
    assert pages.writer_gone("w") == 3
    assert not len(pages.reserve(1, NBYTES, tenant="t")), "it is mapped for writing still"
    writer.close()
    pages._pool.reap()
    assert len(pages.reserve(9, NBYTES, tenant="t")) == SLOTS - 2


def test_a_page_that_its_writer_changed_afterwards_is_found_by_its_checksum(pages: PagePool) -> None:
    segment = pages.grow(NBYTES, tenant="t", writer="w")
    writer = ArenaWriter(*pages.open_writer(segment), pages.shape(segment))
    places = pages.reserve(2, NBYTES, tenant="t", writer="w")
    pages.commit(places, writer.write(places["slot"], blocks(2), NBYTES))
    writer.write(places["slot"][1:], blocks(1), NBYTES)
    out = np.zeros((2, NBYTES), np.uint8)
    reader = mapped(pages, segment)
    assert states(reader.read_into(places, out, NBYTES, verify=True)) == [PageState.OK, PageState.CORRUPT]
    assert states(reader.read_into(places, out, NBYTES)) == [PageState.OK, PageState.OK]


def test_a_pinned_page_stays_until_the_last_array_over_it_is_gone(pages: PagePool) -> None:
    data = blocks(SLOTS)
    places = put(pages, data)
    segment = int(places["segment"][0])
    fd, table, unused = pages.open_reader(segment)
    os.close(table)
    os.close(unused)
    ok, pin = pages.pin(places[:2])
    views = map_pages(fd, pin, pages.shape(segment), places["slot"][:2].astype(np.int64), NBYTES)
    assert ok.all()
    assert pages.free(places).all()
    assert states(pages.read_into(places[:1], np.zeros((1, NBYTES), np.uint8), NBYTES)) == [PageState.GONE]
    assert len(pages.reserve(SLOTS, NBYTES, tenant="t")) == SLOTS - 2
    assert [view.tobytes() for view in views] == [one.tobytes() for one in data[:2]]
    with pytest.raises(ValueError, match="read-only"):
        views[0][0] = 1
    assert pages.reap() == 0
    last = views.pop()
    del views
    assert pages.reap() == 0
    del last
    assert pages.reap() == 1
    assert len(pages.reserve(SLOTS, NBYTES, tenant="t")) == 2


def test_a_worn_slot_is_never_used_again(pages: PagePool) -> None:
    places = put(pages, blocks(1))
    segment = int(places["segment"][0])
    arena = pages._arena(segment)
    arena.table.stamps[places["slot"].astype(int)] = STAMP_MAX - 2
    places["generation"] = STAMP_MAX - 2
    assert pages.free(places).all()
    again = put(pages, blocks(1))
    assert again["slot"] == places["slot"]
    assert again["generation"] == STAMP_MAX
    assert pages.free(again).all()
    assert places["slot"][0] not in pages.reserve(SLOTS, NBYTES, tenant="t")["slot"]
    assert arena.slots("worn") == 1


def test_empty_arenas_go_back_and_tell_those_who_map_them(pool: Pool) -> None:
    told: list[tuple[int, str | None]] = []
    pages = PagePool(pool, arena_bytes=ARENA, on_retired=lambda number, writer: told.append((number, writer)))
    places = put(pages, blocks(SLOTS + 1))
    first, second = np.unique(places["segment"]).tolist()
    reader = mapped(pages, second)
    assert not reader.retired
    assert pages.shrink() == 0
    pages.free(places[SLOTS:])
    assert pages.shrink() == ARENA
    assert told == [(second, None)]
    assert reader.retired
    assert states(reader.read_into(places[SLOTS:], np.zeros((1, NBYTES), np.uint8), NBYTES)) == [PageState.GONE]
    busy = pool.stats().busy_bytes
    reader.close()
    pool.reap()
    assert pool.stats().busy_bytes == busy - ARENA
    with pytest.raises(NotFoundError):
        pages.shape(second)
    assert pages.shape(first).slots == SLOTS
    pages.close()


def test_descriptors_stay_flat(pages: PagePool) -> None:
    def round_trip() -> int:
        places = put(pages, blocks(SLOTS))
        segment = int(places["segment"][0])
        mapped(pages, segment).close()
        fd, table, unused = pages.open_reader(segment)
        os.close(table)
        os.close(unused)
        del fd
        _, pin = pages.pin(places)
        os.close(pin)
        pages.reap()
        pages.free(places)
        pages.shrink()
        pages._pool.reap()
        return len(os.listdir("/proc/self/fd"))

    round_trip()
    before = round_trip()
    assert [round_trip() - before for _ in range(5)] == [1, 2, 3, 4, 5], "the one that the test leaves open each time"


def test_wrong_arguments_say_so(pool: Pool, pages: PagePool) -> None:
    places = put(pages, blocks(2))
    reader = mapped(pages, 1)
    for size in (0, (4 << 20) + 1):
        with pytest.raises(InvalidArgumentError):
            pages.reserve(1, size, tenant="t")
    good = np.zeros((2, NBYTES), np.uint8)
    readonly = good.copy()
    readonly.flags.writeable = False
    for out in (good[:1], good[:, :-1], readonly, [bytes(NBYTES)] * 2, [bytearray(7)] * 2, np.zeros((NBYTES, 2)).T):
        with pytest.raises(InvalidArgumentError):
            reader.read_into(places, out, NBYTES)
    with pytest.raises(InvalidArgumentError):
        reader.read_into(places, np.zeros((2, 9000), np.uint8), 9000)
    with pytest.raises(InvalidArgumentError):
        pages.commit(np.zeros(3, np.uint64))
    far = places.copy()
    far["slot"] = 2**63
    assert states(reader.read_into(far, good, NBYTES)) == [PageState.GONE] * 2
    assert not pages.commit(far).any()
    assert not pages.free(far).any()
    with pytest.raises(OutOfSpaceError):
        for _ in range(100):
            pages.grow(1 << 18, tenant="t")
    with pytest.raises(CorruptError):
        PageTable.open(pages._arena(1).memory.map, ArenaShape(SLOTS + 1, slot_bytes(NBYTES)))


def test_blocks_of_any_element_and_first_stride_are_taken(pages: PagePool) -> None:
    wide = np.random.default_rng(2).random((6, 3, 625), np.float32)
    view = wide[::2, 1:3]
    places = put(pages, np.ascontiguousarray(view).view(np.uint8).reshape(3, NBYTES))
    out = np.zeros_like(wide)
    assert not pages.read_into(places, out[1::2, :2], NBYTES).any()
    assert (out[1::2, :2] == view).all()
    again = put(pages, np.zeros((3, NBYTES), np.uint8))
    pages.free(again)
    again = pages.reserve(3, NBYTES, tenant="t")
    pages.commit(again, pages.write(again, view, NBYTES))
    assert not pages.read_into(again, out[1::2, :2], NBYTES, verify=True).any()
    assert (out[1::2, :2] == view).all()


class Slots(RuleBasedStateMachine):
    """All calls against a dict of what each place holds."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = Pool(64 * ARENA)
        self.pages = PagePool(self.pool, arena_bytes=ARENA)
        self.reserved: list[PagePlaces] = []
        self.live: dict[bytes, bytes] = {}
        self.leaving: dict[bytes, bytes] = {}
        self.pinned: dict[bytes, int] = {}
        self.dead: list[PagePlaces] = []
        self.pins: list[tuple[int, list[bytes]]] = []
        self.number = 0

    @rule(n=st.integers(1, 2 * SLOTS))
    def reserve(self, n: int) -> None:
        places = self.pages.reserve(n, NBYTES, tenant="t")
        if len(places) < n:
            self.pages.grow(NBYTES, tenant="t")
        self.reserved += [places[k : k + 1] for k in range(len(places))]
        held = {(one["segment"], one["slot"]) for one in self._places([*self.live, *self.leaving])}
        asked = [(one["segment"][0], one["slot"][0]) for one in self.reserved]
        assert len(set(asked)) == len(asked)
        assert not held & set(asked)

    @precondition(lambda self: self.reserved)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        place = self.reserved.pop(data.draw(st.integers(0, len(self.reserved) - 1)))
        self.number += 1
        block = np.full((1, NBYTES), self.number % 251, np.uint8)
        block[0, :8] = np.frombuffer(self.number.to_bytes(8, "little"), np.uint8)
        assert self.pages.commit(place, self.pages.write(place, block, NBYTES)).all()
        self.live[place.tobytes()] = block.tobytes()

    @precondition(lambda self: self.reserved)
    @rule(data=st.data())
    def abandon(self, data: st.DataObject) -> None:
        place = self.reserved.pop(data.draw(st.integers(0, len(self.reserved) - 1)))
        assert self.pages.abandon(place).all()
        assert not self.pages.commit(place).any()
        self.dead.append(place)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), n=st.integers(1, 6))
    def free(self, data: st.DataObject, n: int) -> None:
        names = data.draw(st.lists(st.sampled_from(sorted(self.live)), min_size=1, max_size=n, unique=True))
        assert self.pages.free(self._places(names)).all()
        for name in names:
            block = self.live.pop(name)
            if name in self.pinned:
                self.leaving[name] = block
            self.dead.append(self._places([name]))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        names = data.draw(st.lists(st.sampled_from(sorted(self.live)), min_size=1, max_size=3, unique=True))
        ok, fd = self.pages.pin(self._places(names))
        assert ok.all()
        self.pins.append((fd, names))
        for name in names:
            self.pinned[name] = self.pinned.get(name, 0) + 1

    @precondition(lambda self: self.pins)
    @rule()
    def unpin(self) -> None:
        fd, names = self.pins.pop()
        os.close(fd)
        assert self.pages.reap() == 1
        for name in names:
            self.pinned[name] -= 1
            if not self.pinned[name]:
                del self.pinned[name]
                self.leaving.pop(name, None)

    @rule()
    def shrink(self) -> None:
        self.pages.shrink()

    @invariant()
    def what_lives_is_whole_and_what_died_is_gone(self) -> None:
        places = self._places(list(self.live))
        out = np.zeros((len(places), NBYTES), np.uint8)
        assert not self.pages.read_into(places, out, NBYTES, verify=True).any()
        assert [block.tobytes() for block in out] == list(self.live.values())
        for place, block in zip(self._places(list(self.leaving)), self.leaving.values(), strict=True):
            assert self.pages._arena(int(place["segment"])).rows[int(place["slot"]), :NBYTES].tobytes() == block
        if self.dead:
            assert not self.pages.readable(np.concatenate(self.dead)).any()

    def teardown(self) -> None:
        for fd, _ in self.pins:
            os.close(fd)
        self.pages.close()
        self.pool.close()

    def _places(self, names: list[bytes]) -> PagePlaces:
        return np.frombuffer(b"".join(names), PAGE_PLACE)


TestSlots = Slots.TestCase
TestSlots.settings = settings(stateful_step_count=25)
