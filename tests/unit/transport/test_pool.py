"""The pool: exact accounts, warm reuse, and never a byte of one use under the pin of another."""

from __future__ import annotations

import asyncio
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tensorbus.errors import ConflictError, DeniedError, InvalidArgumentError, OutOfSpaceError, UnavailableError
from tensorbus.transport import PinWatch, Pool, Segment, SegmentState, map_private, map_shared, page_round
from tensorbus.transport import _pool as module
from tensorbus.transport._reserve import PIECES_MAX, next_piece

PAGE = page_round(1)


def read(segment: Segment) -> bytes:
    fd, pin = segment.open_reader()
    return bytes(map_private(fd, segment.nbytes, pin)[: segment.nbytes])


def filled(pool: Pool, data: bytes, *, tenant: str = "t") -> Segment:
    segment = pool.allocate(len(data), tenant=tenant)
    segment.view[:] = data
    segment.seal()
    return segment


@pytest.fixture(autouse=True)
def _small_segments_stay_warm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_WARM_BYTES_MIN", 0)


@pytest.fixture
def pool() -> Pool:
    return Pool(16 * PAGE)


def test_small_memory_is_given_back_once_it_is_free(monkeypatch: pytest.MonkeyPatch, pool: Pool) -> None:
    monkeypatch.setattr(module, "_WARM_BYTES_MIN", 2 * PAGE)
    small, large = filled(pool, b"x"), filled(pool, bytes(2 * PAGE))
    small.release()
    large.release()
    assert pool.stats().free_bytes == 2 * PAGE
    pool.close()


def test_what_was_filled_and_sealed_is_read(pool: Pool) -> None:
    assert read(filled(pool, b"hello")) == b"hello"
    assert read(filled(pool, b"")) == b""
    pool.close()


def test_a_sealed_segment_cannot_be_written_by_a_reader(pool: Pool) -> None:
    segment = filled(pool, b"hello")
    fd, pin = segment.open_reader()
    with pytest.raises(OSError, match="Bad file"):
        os.write(fd, b"x")
    writable = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
    with pytest.raises(PermissionError):
        os.write(writable, b"x")
    with pytest.raises(DeniedError):
        map_shared(writable, 5, pin)
    os.close(fd)
    assert read(segment) == b"hello"
    pool.close()


def test_the_writer_cannot_change_the_size(pool: Pool) -> None:
    fd, pin = pool.allocate(PAGE, tenant="t", writer="c").open_writer()
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 0)
    os.close(fd)
    os.close(pin)
    pool.close()


def test_a_pinned_segment_counts_until_its_reader_is_gone() -> None:
    freed: list[Segment] = []
    pool = Pool(4 * PAGE, on_freed=freed.append)
    segment = filled(pool, bytes(3 * PAGE))
    segment.label = "tb1:abc"
    fd, pin = segment.open_reader()
    mapping = map_private(fd, segment.nbytes, pin)
    segment.release()
    segment.release()
    assert segment.state is SegmentState.RELEASED
    with pytest.raises(OutOfSpaceError, match="tb1:abc") as caught:
        pool.allocate(2 * PAGE, tenant="t")
    assert caught.value.details["holders"] == [
        {"segment": segment.id, "nbytes": 3 * PAGE, "owner": "tb1:abc", "pins": 1, "state": "released"}
    ]
    del mapping
    again = pool.allocate(3 * PAGE, tenant="t")
    assert freed == [segment]
    assert (again.id, again.generation) == (segment.id, segment.generation + 1)
    assert not segment.valid()
    pool.close()


def test_a_lease_holds_the_memory_and_an_old_handle_opens_nothing(pool: Pool) -> None:
    segment = filled(pool, b"bytes")
    with segment.lease() as view:
        segment.release()
        assert segment.valid()
        assert bytes(view) == b"bytes"
        with pytest.raises(ConflictError):
            segment.open_reader()
    assert not segment.valid()
    with pytest.raises(ConflictError), segment.lease():
        pass
    pool.close()


def test_memory_is_never_used_again_for_another_tenant(pool: Pool) -> None:
    first = filled(pool, b"secret", tenant="a")
    first.release()
    other = pool.allocate(6, tenant="b")
    assert other.id != first.id
    assert pool.allocate(6, tenant="a").id == first.id
    pool.close()


def test_a_segment_that_fits_badly_is_not_used_again() -> None:
    pool = Pool(1000 * PAGE)
    filled(pool, bytes(100 * PAGE)).release()
    assert pool.allocate(80 * PAGE, tenant="t").generation == 1
    assert pool.allocate(90 * PAGE, tenant="t").generation == 2
    pool.close()


def test_memory_that_a_writer_maps_serves_only_that_writer_until_it_lets_go(pool: Pool) -> None:
    first = pool.allocate(PAGE, tenant="t", writer="c1")
    fd, pin = first.open_writer()
    mapping = map_shared(fd, PAGE, pin)
    mapping[:2] = b"v1"
    first.seal()
    first.release()
    assert pool.allocate(PAGE, tenant="t").id != first.id
    assert pool.allocate(PAGE, tenant="t", writer="c2").id != first.id
    again = pool.allocate(PAGE, tenant="t", writer="c1")
    assert (again.id, again.writer_mapped) == (first.id, True)
    mapping[:2] = b"v2"  # through the mapping that it has: no new one can be made
    with pytest.raises(ConflictError):
        again.open_writer()
    again.seal()
    assert read(again)[:2] == b"v2"
    again.release()
    assert pool.allocate(PAGE, tenant="t", writer="c1", fresh=True).id != first.id
    del mapping
    assert pool.allocate(PAGE, tenant="t", writer="c3").id != first.id  # sealed: no writer can map it any more
    assert pool.allocate(PAGE, tenant="t").id == first.id
    pool.close()


def test_free_memory_gives_way_and_mapped_free_memory_is_asked_back() -> None:
    retired: list[tuple[int, str | None]] = []
    pool = Pool(4 * PAGE, on_retired=lambda segment, writer: retired.append((segment, writer)))
    filled(pool, bytes(PAGE)).release()
    assert pool.stats().free_bytes == PAGE
    mapped = pool.allocate(3 * PAGE, tenant="t", writer="c")
    fd, pin = mapped.open_writer()
    mapping = map_shared(fd, 3 * PAGE, pin)
    mapped.release()
    with pytest.raises(OutOfSpaceError) as caught:
        pool.allocate(4 * PAGE, tenant="t")
    assert retired == [(mapped.id, "c")]
    assert caught.value.details["retiring_bytes"] == 3 * PAGE
    assert pool.stats().used_bytes == 4 * PAGE
    del mapping
    assert pool.allocate(4 * PAGE, tenant="t").generation == 1
    assert pool.stats().used_bytes == 4 * PAGE
    pool.close()


def test_the_reserve_is_cut_to_size_for_a_new_writer() -> None:
    pool = Pool(64 * PAGE, reserve_bytes=32 * PAGE)
    pool.fill_reserve()
    assert pool.stats().free_bytes == 32 * PAGE
    segment = pool.allocate(5 * PAGE, tenant="t", writer="c")
    assert pool.stats().used_bytes == 5 * PAGE
    fd, pin = segment.open_writer()
    mapping = map_shared(fd, segment.nbytes, pin)
    mapping[:5] = b"hello"
    segment.seal()
    assert read(segment)[:5] == b"hello"
    pool.fill_reserve()
    assert pool.stats().used_bytes == 37 * PAGE
    pool.close()


def test_a_reserve_that_was_used_is_told_of_and_lies_in_pieces_of_many_sizes() -> None:
    mib = 1 << 20
    used: list[bool] = []
    pool = Pool(64 * mib, reserve_bytes=40 * mib, on_reserve_used=lambda: used.append(True))
    pool.fill_reserve()
    assert pool.stats().free_bytes == 40 * mib
    first = pool.allocate(mib, tenant="t")
    assert (used, pool.stats().free_bytes) == ([True], 39 * mib)
    pool.fill_reserve()
    assert pool.stats().free_bytes == 40 * mib
    first.seal()
    first.release()
    pool.allocate(mib, tenant="t")
    assert used == [True]  # what was used before is no part of the reserve
    pool.close()


@given(reserve=st.integers(1, 1 << 20).map(lambda pages: pages * PAGE), room=st.integers(1, 1 << 20))
def test_a_reserve_comes_to_its_size_in_few_pieces(reserve: int, room: int) -> None:
    ready: list[int] = []
    while sum(ready) < min(reserve, room * PAGE):
        ready.append(next_piece(ready, reserve, min(reserve, room * PAGE) - sum(ready)))
        assert ready[-1] % PAGE == 0
        assert ready[-1] >= PAGE
    assert sum(ready) == min(reserve, room * PAGE)
    assert len(ready) <= 5 * PIECES_MAX


def test_many_small_segments_do_not_all_stay_warm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SMALL_WARM_MAX", 3)
    pool = Pool(64 * PAGE)
    segments = [filled(pool, b"x") for _ in range(10)]
    for segment in segments:
        segment.release()
    assert pool.stats().segments == 3
    pool.close()


def test_a_closed_pool_says_so_and_leaves_maps_readable(pool: Pool) -> None:
    before = len(os.listdir("/proc/self/fd"))
    segment = filled(pool, b"hello")
    fd, pin = segment.open_reader()
    mapping = map_private(fd, 5, pin)
    pool.close()
    pool.close()
    assert mapping[:5] == b"hello"
    del mapping
    assert len(os.listdir("/proc/self/fd")) == before - 1  # the pool's own epoll
    with pytest.raises(UnavailableError):
        pool.allocate(1, tenant="t")


def test_arguments_that_cannot_be_right_are_refused(pool: Pool) -> None:
    with pytest.raises(InvalidArgumentError):
        pool.allocate(-1, tenant="t")
    with pytest.raises(InvalidArgumentError):
        Pool(0)
    with pytest.raises(OutOfSpaceError):
        pool.allocate(17 * PAGE, tenant="t")
    pool.close()


async def test_the_loop_tells_the_pool_about_ended_pins() -> None:
    freed = asyncio.Event()
    pool = Pool(16 * PAGE, on_freed=lambda segment: freed.set())
    watch = PinWatch(pool)
    watch.start()
    segment = filled(pool, b"hello")
    fd, pin = segment.open_reader()
    os.close(fd)
    segment.release()
    os.close(pin)
    async with asyncio.timeout(10):
        await freed.wait()
    watch.close()
    pool.close()


class PoolMachine(RuleBasedStateMachine):
    """Any sequence of calls keeps the accounts exact and pinned bytes as they were."""

    def __init__(self) -> None:
        super().__init__()
        self.fds_before = len(os.listdir("/proc/self/fd"))
        self.pool = Pool(12 * PAGE)
        self.filling: list[tuple[Segment, bytes]] = []
        self.sealed: list[tuple[Segment, bytes]] = []
        self.readers: list[tuple[Segment, object, bytes]] = []
        self.writers: dict[tuple[str, int], object] = {}
        self.generations: dict[int, int] = {}
        self.stamp = 0

    @rule(nbytes=st.integers(0, 4 * PAGE), tenant=st.sampled_from("ab"), writer=st.sampled_from([None, "c1", "c2"]))
    def allocate(self, nbytes: int, tenant: str, writer: str | None) -> None:
        free_before = self.pool.stats()
        try:
            segment = self.pool.allocate(nbytes, tenant=tenant, writer=writer)
        except OutOfSpaceError:
            space_is_short = free_before.busy_bytes + page_round(nbytes) > free_before.budget_bytes
            if not space_is_short and not self.writers:
                raise
            return
        assert segment.generation == self.generations.get(segment.id, 0) + 1
        self.generations[segment.id] = segment.generation
        assert all(held.id != segment.id for held, _ in self.filling + self.sealed)
        assert all(held.id != segment.id for held, _, _ in self.readers)
        self.stamp += 1
        data = self.stamp.to_bytes(4, "little") * (nbytes // 4 + 1)
        self.write(segment, data[:nbytes])
        self.filling.append((segment, data[:nbytes]))

    def write(self, segment: Segment, data: bytes) -> None:
        if segment.writer is None:
            segment.view[:] = data
            return
        where = (segment.writer, segment.id)
        if not segment.writer_mapped:
            fd, pin = segment.open_writer()
            self.writers[where] = map_shared(fd, segment.capacity_bytes, pin)
        self.writers[where][: len(data)] = data  # type: ignore[index]

    @rule(at=st.integers(0, 50))
    def seal(self, at: int) -> None:
        if self.filling:
            segment, data = self.filling.pop(at % len(self.filling))
            segment.seal()
            self.sealed.append((segment, data))

    @rule(at=st.integers(0, 50))
    def pin(self, at: int) -> None:
        if self.sealed:
            segment, data = self.sealed[at % len(self.sealed)]
            fd, pin = segment.open_reader()
            self.readers.append((segment, map_private(fd, len(data), pin), data))

    @rule(at=st.integers(0, 50))
    def unpin(self, at: int) -> None:
        if self.readers:
            self.readers.pop(at % len(self.readers))

    @rule(at=st.integers(0, 50), of_sealed=st.booleans())
    def release(self, at: int, of_sealed: bool) -> None:
        held = self.sealed if of_sealed else self.filling
        if held:
            held.pop(at % len(held))[0].release()

    @rule(at=st.integers(0, 50))
    def drop_writer(self, at: int) -> None:
        idle = [where for where in self.writers if all(where[1] != segment.id for segment, _ in self.filling)]
        if idle:
            del self.writers[idle[at % len(idle)]]

    @invariant()
    def accounts_are_exact(self) -> None:
        self.pool.reap()
        stats = self.pool.stats()
        assert stats.used_bytes == stats.busy_bytes + stats.free_bytes + stats.retiring_bytes <= stats.budget_bytes
        live = {segment.id: segment for segment, *_ in [*self.filling, *self.sealed, *self.readers]}
        assert stats.busy_bytes == sum(segment.capacity_bytes for segment in live.values())
        assert stats.pins == len(self.readers) + len(self.writers)

    @invariant()
    def bytes_stay_what_they_were(self) -> None:
        for _, mapping, data in self.readers:
            assert mapping[: len(data)] == data  # type: ignore[index]

    def teardown(self) -> None:
        self.pool.close()
        self.readers.clear()
        self.writers.clear()
        assert len(os.listdir("/proc/self/fd")) == self.fds_before


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
