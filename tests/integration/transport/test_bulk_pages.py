"""Batches of pages between hosts: right bytes into place, or said of each page why not."""

from __future__ import annotations

import dataclasses
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import pytest

from tensorbus.clock import Deadline
from tensorbus.errors import CorruptError, DeadlineExceededError, DeniedError, InvalidArgumentError, UnavailableError
from tensorbus.transport import (
    PAGE_PLACE,
    BulkServer,
    PagePlaces,
    PagePool,
    PagesCame,
    PageSource,
    PageState,
    Pool,
    TenantPages,
    Ways,
    fetch_pages,
)
from tensorbus.transport._bulk import Wire
from tensorbus.transport._bulk_client import BulkClient, Exchange
from tensorbus.transport._bulk_frames import BlockHead, encode_block_head, encode_message
from tensorbus.transport._bulk_page_fetch import ask_pages, receive_pages
from tensorbus.transport._bulk_pages import small_head
from tensorbus.transport._lines import Lines
from tensorbus.transport._page_copy import page_sum
from tensorbus.transport._page_lend import PageLoan
from tests.paths import Lender, lending, origin, wait_for

pytestmark = pytest.mark.integration
LIMIT_S = 60.0


class Pages:
    """Page memory that is served to whoever says ``permit``; its pages can be hurt while they are sent."""

    def __init__(self) -> None:
        self.pool = Pool(128 << 20)
        self.pages = PagePool(self.pool, arena_bytes=4 << 20)
        self.opened = 0
        self.during: list[PagePlaces] = []

    def open_pages(self, request: Mapping[str, object]) -> PageSource:
        self.opened += 1
        if request.get("permit") not in ("t", "u"):
            raise DeniedError("no permit")
        return Hurt(self, TenantPages(self.pages, str(request["permit"])))

    def close(self) -> None:
        self.pages.close()
        self.pool.close()

    def put(self, blocks: np.ndarray, nbytes: int, *, sums: bool = True) -> PagePlaces:
        places = self.pages.reserve(len(blocks), nbytes, tenant="t")
        while len(places) < len(blocks):
            self.pages.grow(nbytes, tenant="t")
            places = np.concatenate([places, self.pages.reserve(len(blocks) - len(places), nbytes, tenant="t")])
        assert self.pages.commit(places, self.pages.write(places, blocks, nbytes, sums=sums)).all()
        return places


class Hurt:
    """Frees pages between the look at them and the last one."""

    def __init__(self, owner: Pages, source: TenantPages) -> None:
        self._owner = owner
        self._source = source

    def lend(self, places: PagePlaces, nbytes: int) -> PageLoan:
        loan = self._source.lend(places, nbytes)
        for hurt in self._owner.during:
            self._owner.pages.free(hurt)
        return loan


@pytest.fixture
def owner() -> Iterator[Pages]:
    made = Pages()
    yield made
    made.close()


@pytest.fixture
def server(owner: Pages) -> Iterator[BulkServer]:
    with lending(Lender(bytearray(10)), pages=owner) as found:
        yield found


@pytest.fixture
def ways() -> Iterator[Ways]:
    lines = Lines()
    yield Ways(connections=3, lines=lines)
    lines.close()


def fetch(
    server: BulkServer, places: PagePlaces, out: object, nbytes: int, ways: Ways, *, permit: str = "t"
) -> PagesCame:
    asked = dataclasses.replace(origin("a", *server.addresses), request={"permit": permit})
    return fetch_pages(asked, places, out, nbytes, ways=ways, deadline=Deadline(LIMIT_S))


def blocks(n: int, nbytes: int) -> np.ndarray:
    return np.frombuffer(os.urandom(n * nbytes), np.uint8).reshape(n, nbytes)


@pytest.mark.parametrize(
    ("n", "nbytes"), [(1, 1), (1500, 4096), (130, 65_537), (70, 300_000), (9, 3 << 20), (3, 4 << 20)]
)
@pytest.mark.parametrize("sums", [True, False])
def test_pages_come_into_slots_of_ours(
    owner: Pages, server: BulkServer, ways: Ways, n: int, nbytes: int, sums: bool
) -> None:
    data = blocks(n, nbytes)
    theirs = owner.put(data, nbytes, sums=sums)
    order = np.random.default_rng(5).permutation(n)
    ours = owner.pages.reserve(n, nbytes, tenant="u")
    while len(ours) < n:
        owner.pages.grow(nbytes, tenant="u")
        ours = np.concatenate([ours, owner.pages.reserve(n - len(ours), nbytes, tenant="u")])
    came = fetch(server, theirs[order], owner.pages.views(ours, nbytes), nbytes, ways)
    assert came.failure is None
    assert (came.states == PageState.OK).all()
    assert owner.pages.commit(ours, came.sums).all()
    out = np.zeros((n, nbytes), np.uint8)
    assert not owner.pages.read_into(ours, out, nbytes, verify=True).any()
    assert (out == data[order]).all()


def test_connections_rest_and_a_permit_is_looked_at_once_on_each(owner: Pages, server: BulkServer, ways: Ways) -> None:
    data = blocks(4, 5000)
    places = owner.put(data, 5000)
    out = np.zeros((4, 5000), np.uint8)
    for _ in range(3):
        assert not fetch(server, places, out, 5000, ways).states.any()
    assert owner.opened == 1
    server.close()
    with lending(Lender(bytearray(10)), pages=owner) as other:
        moved = dataclasses.replace(origin("a", *other.addresses), request={"permit": "t"})
        assert not fetch_pages(moved, places, out, 5000, ways=ways, deadline=Deadline(LIMIT_S)).states.any()


def test_a_connection_that_was_cut_at_rest_is_replaced(owner: Pages, ways: Ways) -> None:
    places = owner.put(blocks(1, 100), 100)
    out = np.zeros((1, 100), np.uint8)
    with lending(Lender(bytearray(10)), pages=owner, idle_s=0.2) as server:
        assert not fetch(server, places, out, 100, ways).states.any()
        wait_for(lambda: not server._served)
        assert not fetch(server, places, out, 100, ways).states.any()


def test_what_is_gone_or_goes_while_it_is_sent_is_told(owner: Pages, server: BulkServer, ways: Ways) -> None:
    nbytes = 100_000
    data = blocks(6, nbytes)
    places = owner.put(data, nbytes)
    owner.pages.free(places[:1])
    again = owner.put(blocks(1, nbytes), nbytes)
    assert again["slot"] == places["slot"][0]
    owner.during = [places[1:3]]
    foreign = places[5:].copy()
    foreign["segment"] = 77
    out = np.zeros((7, nbytes), np.uint8)
    came = fetch(server, np.concatenate([places, foreign]), out, nbytes, ways)
    wanted = [PageState.GONE, PageState.TORN, PageState.TORN, *[PageState.OK] * 3, PageState.GONE]
    assert [PageState(state) for state in came.states.tolist()] == wanted
    assert (out[3:6] == data[3:]).all()


def test_pages_of_another_tenant_are_gone(owner: Pages, server: BulkServer, ways: Ways) -> None:
    places = owner.put(blocks(2, 100), 100)
    came = fetch(server, places, np.zeros((2, 100), np.uint8), 100, ways, permit="u")
    assert (came.states == PageState.GONE).all()


def test_a_page_that_was_changed_after_its_checksum_was_taken_is_corrupt(
    owner: Pages, server: BulkServer, ways: Ways
) -> None:
    places = owner.put(blocks(3, 8192), 8192)
    owner.pages.write(places[1:2], blocks(1, 8192), 8192)
    came = fetch(server, places, np.zeros((3, 8192), np.uint8), 8192, ways)
    assert [PageState(state) for state in came.states.tolist()] == [PageState.OK, PageState.CORRUPT, PageState.OK]


def test_why_pages_did_not_come_is_said(owner: Pages, server: BulkServer, ways: Ways) -> None:
    places = owner.put(blocks(2, 100), 100)
    out = np.zeros((2, 100), np.uint8)
    denied = fetch(server, places, out, 100, ways, permit="x")
    assert (denied.states == PageState.LOST).all()
    assert isinstance(denied.failure, DeniedError)
    large = fetch(server, places, np.zeros((2, 9000), np.uint8), 9000, ways)
    assert isinstance(large.failure, InvalidArgumentError)
    with lending(Lender(bytearray(10))) as pageless:
        assert isinstance(fetch(pageless, places, out, 100, ways).failure, InvalidArgumentError)
    nobody = dataclasses.replace(origin("a", ("127.0.0.1", 9)), request={})
    gone = fetch_pages(nobody, places, out, 100, ways=ways, deadline=Deadline(LIMIT_S))
    assert isinstance(gone.failure, UnavailableError)
    late = dataclasses.replace(origin("a", *server.addresses), request={"permit": "t"})
    came = fetch_pages(late, places, out, 100, ways=ways, deadline=Deadline(0.0))
    assert isinstance(came.failure, DeadlineExceededError)
    with pytest.raises(InvalidArgumentError):
        fetch(server, places, out[:1], 100, ways)


def places_block(request: int, places: PagePlaces) -> bytes:
    data = places.tobytes()
    return encode_block_head(small_head(request, 0, data)) + data


GOOD = {"t": "pages", "permit": "t", "request": 1, "nbytes": 100, "count": 2}


@pytest.mark.parametrize(
    ("header", "after"),
    [
        ({"count": 0}, b""),
        ({"count": 1025}, b""),
        ({"count": True}, b""),
        ({"count": 2.0}, b""),
        ({"nbytes": 0}, b""),
        ({"nbytes": (4 << 20) + 1}, b""),
        ({"request": -1}, b""),
        ({"request": None}, b""),
        ({}, encode_message({"t": "pages"})),
        ({}, places_block(1, np.zeros(3, PAGE_PLACE))),
        ({}, places_block(2, np.zeros(2, PAGE_PLACE))),
        ({}, encode_block_head(BlockHead(request=1, index=1, nbytes=32, checksum=None)) + bytes(32)),
    ],
)
def test_a_peer_that_asks_for_what_cannot_be_is_closed(
    owner: Pages, server: BulkServer, header: Mapping[str, object], after: bytes
) -> None:
    with connected(server) as client:
        sock = client._wire._sock
        sock.sendall(encode_message({**GOOD, **header}) + after)
        assert sock.recv(1) == b""
    assert (fetch(server, owner.put(blocks(1, 9), 9), np.zeros((1, 9), np.uint8), 9, Ways()).states == 0).all()


def test_places_that_changed_on_the_way_are_refused_and_the_connection_goes_on(
    owner: Pages, server: BulkServer
) -> None:
    places = owner.put(blocks(2, 100), 100)
    with connected(server) as client:
        data = bytearray(places_block(1, places))
        data[-1] ^= 1
        client._wire._sock.sendall(encode_message(GOOD) + data)
        with pytest.raises(CorruptError), Exchange(client, Deadline(LIMIT_S)):
            client._expect("end")
        asked = dataclasses.replace(origin("a"), request={"permit": "t"})
        client._requests = 1
        request = ask_pages(client, asked, places, 100, Deadline(LIMIT_S))
        out = np.zeros((2, 100), np.uint8)
        states, _ = receive_pages(client, request, [row.data for row in out], 100, Deadline(LIMIT_S))
        assert not states.any()


def answer(states: bytes, *pages: bytes, verdict: bytes | None = None, end: int = 1) -> bytes:
    """What a source says to a request for 100 bytes each."""
    parts = [(small_head(1, 0, states), states)]
    if pages:
        data = b"".join(pages)
        parts.append((BlockHead(request=1, index=1, nbytes=len(data), checksum=None), data))
        said = verdict_of(pages) if verdict is None else verdict
        parts.append((small_head(1, 2, said), said))
    blocks = b"".join(encode_block_head(head) + data for head, data in parts)
    return blocks + encode_message({"t": "end", "request": end})


def verdict_of(pages: Sequence[bytes], states: bytes = b"") -> bytes:
    return b"".join(page_sum(memoryview(page)).to_bytes(8, "little") for page in pages) + (states or bytes(len(pages)))


ONE, TWO = b"1" * 100, b"2" * 100


def receive(said: bytes) -> list[int]:
    """What a client makes of two pages from a source that says this and hangs up."""
    near, far = socket.socketpair()
    client = BulkClient(Wire(near, peer="p", header_bytes_max=4096))
    with far:
        far.sendall(said)
    views = [memoryview(bytearray(100)) for _ in range(2)]
    try:
        return receive_pages(client, 1, views, 100, Deadline(5.0))[0].tolist()
    finally:
        client.close()


def test_what_a_source_says_of_each_page_is_believed() -> None:
    assert receive(answer(b"\0\0", ONE, TWO)) == [0, 0]
    assert receive(answer(b"\1\0", TWO)) == [1, 0]
    assert receive(answer(b"\1\1")) == [1, 1]
    assert receive(answer(b"\0\0", ONE, TWO, verdict=verdict_of([ONE, TWO], b"\0\2"))) == [0, 2]
    assert receive(answer(b"\0\0", ONE, TWO, verdict=verdict_of([ONE, ONE]))) == [0, 3]


@pytest.mark.parametrize(
    "said",
    [
        answer(b"\0"),
        answer(b"\0\0\0"),
        answer(b"\0\5", ONE),
        answer(b"\0\2", ONE),
        answer(b"\0\0", ONE),
        answer(b"\0\0", ONE, TWO[1:]),
        answer(b"\0\0", ONE, TWO, verdict=verdict_of([ONE])),
        answer(b"\0\0", ONE, TWO, verdict=verdict_of([ONE, TWO], b"\0\1")),
        answer(b"\0\0", ONE, TWO)[:-1],
        answer(b"\0\0")[:-40],
        encode_message({"t": "end", "request": 1}),
        encode_block_head(BlockHead(request=1, index=0, nbytes=2, checksum=1)) + b"\0\0",
        encode_block_head(BlockHead(request=2, index=0, nbytes=2, checksum=None)) + b"\0\0",
        b"tbbk" + bytes(28),
        bytes(32),
    ],
)
def test_a_source_that_says_what_cannot_be_is_given_up(said: bytes) -> None:
    with pytest.raises((CorruptError, UnavailableError)):
        receive(said)


@contextmanager
def connected(server: BulkServer) -> Iterator[BulkClient]:
    """A greeted connection to a server."""
    client = BulkClient.connect(server.host, server.port, deadline=Deadline(LIMIT_S))
    client._wire.set_timeout(10.0)
    try:
        yield client
    finally:
        client.close()
