"""Whole artifacts over several connections and from several sources: right bytes whatever becomes of the ways."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tensorbus.clock import Deadline
from tensorbus.errors import (
    ConflictError,
    CorruptError,
    DeadlineExceededError,
    DeniedError,
    FencedError,
    TensorbusError,
    UnavailableError,
)
from tensorbus.testing._certificates import make_certificates
from tensorbus.transport import (
    Arrivals,
    BulkClient,
    BulkServer,
    Place,
    TlsFiles,
    Transfer,
    TransferReport,
    Ways,
    cut,
    fetch_pages,
    hash_bytes,
)
from tensorbus.transport._blocks import BLOCK_BYTES
from tensorbus.transport._bulk_fetch import TRIES_MAX
from tests.integration.transport.test_bulk_pages import Pages
from tests.paths import Lender, ProxyPath, lending, origin, wait_for

MIB = 1 << 20
DATA = random.Random(1).randbytes(40 * MIB + 12_345)
MBPS = 1e6


def soon(seconds: float = 60.0) -> Deadline:
    return Deadline(seconds, what="the transfer")


def transfer_of(lender: Lender, room: bytearray, *, connections: int = 4, **options: object) -> Transfer:
    ways = Ways(connections=connections, **options)  # type: ignore[arg-type]  # as the test named them
    return Transfer(lender.tables.blocks.blocks, memoryview(room), tables=lender.name, ways=ways)


@contextmanager
def proxies(server: BulkServer, *rates: float | None) -> Iterator[list[ProxyPath]]:
    with ExitStack() as stack:
        found = [ProxyPath((server.host, server.port), rate=rate, seed=number) for number, rate in enumerate(rates)]
        for proxy in found:
            stack.callback(proxy.close)
        yield found


@pytest.mark.parametrize("connections", [1, 2, 4, 9])
@pytest.mark.parametrize("sums", [True, False])
def test_everything_arrives(connections: int, sums: bool) -> None:
    lender, room = Lender(bytearray(DATA)), bytearray(len(DATA))
    with lending(lender) as server:
        transfer = transfer_of(lender, room, connections=connections, sums=sums)
        report = transfer.run([origin("w1", (server.host, server.port))], deadline=soon())
    assert room == DATA
    assert (report.path, report.nbytes, report.sources, report.retries) == ("tcp", len(DATA), {"w1": len(DATA)}, 0)
    assert lender.opened <= connections


def test_what_lies_between_the_tensors_does_not_travel() -> None:
    lender = Lender(bytearray(DATA[:100_000]), spans=[(0, 10), (4096, 50_000), (4096, 50_000), (99_000, 1000)])
    room = bytearray(b"\xff" * 100_000)
    with lending(lender) as server:
        report = transfer_of(lender, room).run([origin("w1", (server.host, server.port))], deadline=soon())
    assert report.nbytes == 51_010
    expected = bytearray(b"\xff" * 100_000)
    for at, size in lender.spans or ():
        expected[at : at + size] = DATA[at : at + size]
    assert room == expected


def test_spans_that_are_not_the_sources_blocks_arrive_too() -> None:
    lender, room = Lender(bytearray(DATA)), bytearray(len(DATA))
    blocks = cut([(3, 5), (9 * MIB + 1, 20 * MIB), *((40 * MIB + 10 * n, 7) for n in range(1000))])
    with lending(lender) as server:
        transfer = Transfer(blocks, memoryview(room), tables="n", ways=Ways(), by_index=False)
        transfer.run([origin("w1", (server.host, server.port))], deadline=soon())
    for block in blocks:
        for at, size in block:
            assert room[at : at + size] == DATA[at : at + size]


def test_nothing_to_bring_needs_nobody() -> None:
    transfer = Transfer([], memoryview(bytearray()), tables="n", ways=Ways())
    assert transfer.run([], deadline=soon()).nbytes == 0


def test_several_sources_share_the_work() -> None:
    first, second, room = Lender(bytearray(DATA)), Lender(bytearray(DATA)), bytearray(len(DATA))
    with (
        lending(first) as one,
        lending(second) as two,
        proxies(one, 50 * MBPS) as (a,),
        proxies(two, 50 * MBPS) as (b,),
    ):
        report = transfer_of(first, room).run([origin("w1", a.address), origin("w2", b.address)], deadline=soon())
    assert room == DATA
    assert min(report.sources.values()) > len(DATA) / 4


def test_a_source_with_another_layout_is_left_out() -> None:
    first, second, room = Lender(bytearray(DATA)), Lender(bytearray(DATA), name="other"), bytearray(len(DATA))
    with lending(first) as one, lending(second) as two:
        transfer = transfer_of(first, room)
        report = transfer.run([origin("w1", (one.host, one.port)), origin("w2", (two.host, two.port))], deadline=soon())
    assert room == DATA
    assert report.sources == {"w1": len(DATA)}
    assert isinstance(transfer.failures["w2"], ConflictError)


# -- ways that fail ----------------------------------------------------------------------------------------------------


def test_one_of_two_paths_is_cut() -> None:
    lender, room = Lender(bytearray(DATA)), bytearray(len(DATA))
    with lending(lender) as server, proxies(server, 40 * MBPS, 40 * MBPS) as (stays, goes):
        transfer = transfer_of(lender, room, connections=2)
        cutter = threading.Thread(target=lambda: (wait_for(lambda: goes.carried > 4 * MIB), goes.cut()))
        cutter.start()
        report = transfer.run([origin("w1", stays.address, goes.address)], deadline=soon())
        cutter.join()
    assert room == DATA
    assert report.retries > 0


def test_a_path_that_is_a_hundred_times_slower_brings_little_and_holds_up_nobody() -> None:
    lender = Lender(bytearray(DATA))
    with lending(lender) as server, proxies(server, 100 * MBPS, 1 * MBPS) as (fast, slow):
        alone = transfer_of(lender, bytearray(len(DATA)), connections=1).run(
            [origin("w1", fast.address)], deadline=soon()
        )
        room = bytearray(len(DATA))
        both = transfer_of(lender, room, connections=2).run([origin("w1", fast.address, slow.address)], deadline=soon())
    assert room == DATA
    assert slow.carried < len(DATA) / 4
    assert both.seconds < 2 * alone.seconds + 1.0


def test_a_path_that_falls_silent_holds_up_nobody() -> None:
    lender, room = Lender(bytearray(DATA)), bytearray(len(DATA))
    with lending(lender) as server, proxies(server, 40 * MBPS, 40 * MBPS) as (stays, falls):
        transfer = transfer_of(lender, room, connections=2)

        def silence() -> None:
            wait_for(lambda: falls.carried > 3 * MIB)
            falls.silent = True

        hushing = threading.Thread(target=silence)
        hushing.start()
        transfer.run(
            [origin("w1", stays.address, falls.address)], deadline=soon(9.0)
        )  # before anybody is called stalled
        hushing.join()
    assert room == DATA


def test_a_connection_that_breaks_goes_on_where_it_was() -> None:
    lender, room = Lender(bytearray(DATA)), bytearray(len(DATA))
    with lending(lender) as server, proxies(server, 60 * MBPS) as (proxy,):
        transfer = transfer_of(lender, room, connections=1)

        def breaking() -> None:
            for goal in (8 * MIB, 24 * MIB):
                wait_for(lambda goal=goal: proxy.carried > goal)  # type: ignore[misc]  # a condition
                proxy.cut()
                proxy.open = True

        thread = threading.Thread(target=breaking)
        thread.start()
        report = transfer.run([origin("w1", proxy.address)], deadline=soon())
        thread.join()
    assert room == DATA
    assert report.retries >= 2
    assert proxy.carried < len(DATA) + 2 * 4 * 8 * BLOCK_BYTES  # only what was under way came twice


@pytest.mark.parametrize("seed", range(3))
def test_flipped_bits_are_found_and_fetched_again(seed: int) -> None:
    lender, room = Lender(bytearray(DATA)), bytearray(len(DATA))
    with lending(lender) as server, proxies(server, None, None) as both:
        for number, proxy in enumerate(both):
            proxy.flips, proxy._rng = 0.001, random.Random(10 * seed + number)
        report = transfer_of(lender, room).run([origin("w1", *(proxy.address for proxy in both))], deadline=soon())
        assert sum(proxy.flipped for proxy in both) > 0
    assert room == DATA
    assert report.retries > 0


@pytest.mark.parametrize("flipped", [None, 0, 5, 20 * MIB, len(DATA) - 1])
def test_tensors_are_compared_with_their_digests_while_they_come(flipped: int | None) -> None:
    lender, room = Lender(bytearray(DATA)), bytearray(len(DATA))
    if flipped is not None:
        lender.data[flipped] ^= 1  # before its checksums are taken
    spans = [(7 * MIB, len(DATA) - 7 * MIB), (0, 3), (3, 7 * MIB - 3), (10, 0), (0, 3)]
    places = [Place(at, size, hash_bytes(memoryview(DATA)[at : at + size]).hex()) for at, size in spans]
    with lending(lender) as server:
        transfer = transfer_of(lender, room)
        arrivals = Arrivals(lender.tables.blocks.blocks, memoryview(room), places)
        sources = [origin("w1", (server.host, server.port))]
        report = arrivals.run(transfer, lambda: transfer.run(sources, deadline=soon()))
    assert report.nbytes == len(DATA)
    expected = [n for n, (at, size) in enumerate(spans) if flipped is not None and at <= flipped < at + size]
    assert sorted(arrivals.wrong) == expected


def test_a_transfer_that_ends_early_ends_the_comparing_too() -> None:
    lender, room = Lender(bytearray(DATA)), bytearray(len(DATA))
    with lending(lender) as server, proxies(server, 20 * MBPS) as (proxy,):
        transfer = transfer_of(lender, room)
        arrivals = Arrivals(lender.tables.blocks.blocks, memoryview(room), [Place(0, len(DATA), "")])
        ending = threading.Thread(target=lambda: (wait_for(lambda: proxy.carried > 8 * MIB), transfer.cancel()))
        ending.start()
        with pytest.raises(UnavailableError, match="cancelled"):
            arrivals.run(transfer, lambda: transfer.run([origin("w1", proxy.address)], deadline=soon()))
        ending.join()
    assert arrivals.wrong == []


def test_what_has_come_is_handed_on_while_the_rest_comes() -> None:
    """A slow source sends everything once, and who gets it second has it almost as soon as who gets it first."""
    lender, relay = Lender(bytearray(DATA)), Lender(bytearray(len(DATA)))
    room, left = bytearray(len(DATA)), list[int]()
    with lending(lender) as server, lending(relay) as second, proxies(server, 40 * MBPS) as (proxy,):
        first = transfer_of(lender, relay.data)
        relay.await_block = first.await_block
        then = transfer_of(lender, room)

        def getting() -> None:
            first.run([origin("w1", proxy.address)], deadline=soon())
            left.append(len(DATA) - then.nbytes_done)

        thread = threading.Thread(target=getting)
        thread.start()
        report = then.run([origin("w2", (second.host, second.port))], deadline=soon())
        thread.join()
    assert room == DATA
    assert (report.sources, report.retries) == ({"w2": len(DATA)}, 0)
    assert proxy.carried < len(DATA) * 1.02
    assert left[0] <= 12 * BLOCK_BYTES / 2, "what it lacks when the first one is done is what was under way"


def test_who_hands_on_and_fails_is_left_for_who_has_it_all() -> None:
    lender, relay, room = Lender(bytearray(DATA)), Lender(bytearray(len(DATA))), bytearray(len(DATA))
    with lending(lender) as server, lending(relay) as second, proxies(server, 40 * MBPS) as (proxy,):
        first = transfer_of(lender, relay.data)
        relay.await_block = first.await_block
        then = transfer_of(lender, room)

        def getting() -> None:
            with pytest.raises(UnavailableError, match="cancelled"):
                first.run([origin("w1", proxy.address)], deadline=soon())

        def failing() -> None:
            wait_for(lambda: then.nbytes_done >= 8 * MIB)
            first.cancel()

        threads = [threading.Thread(target=work) for work in (getting, failing)]
        for thread in threads:
            thread.start()
        sources, whole = [origin("w2", (second.host, second.port))], [origin("w1", (server.host, server.port))]
        report = then.run(sources, reserve=whole, deadline=soon())
        for thread in threads:
            thread.join()
    assert room == DATA
    assert set(report.sources) == {"w1", "w2"}
    assert sum(report.sources.values()) == len(DATA)


def test_a_source_that_breaks_off_every_read_is_given_up() -> None:
    lender = Lender(bytearray(DATA))
    opened: list[int] = []

    def broken(_index: int) -> None:
        opened.append(lender.opened)
        raise UnavailableError("not now")

    lender.await_block = broken
    with lending(lender) as server, pytest.raises(UnavailableError, match="not now"):
        sources = [origin("w1", (server.host, server.port))]
        transfer_of(lender, bytearray(len(DATA)), connections=2).run(sources, deadline=soon())
    assert max(opened) <= 2 * TRIES_MAX


# -- sources that fail -------------------------------------------------------------------------------------------------


def test_a_corrupt_source_is_an_error_and_another_heals_it() -> None:
    first, second = Lender(bytearray(DATA)), Lender(bytearray(DATA))
    with lending(first) as one, lending(second) as two:
        sources = [origin("w1", (one.host, one.port)), origin("w2", (two.host, two.port))]
        transfer_of(first, bytearray(len(DATA))).run(
            sources[:1], deadline=soon()
        )  # its checksums are known from here on
        first.data[9 * MIB] ^= 1
        with pytest.raises(CorruptError, match="w1"):
            transfer_of(first, bytearray(len(DATA))).run(sources[:1], deadline=soon())
        room = bytearray(len(DATA))
        transfer = transfer_of(first, room)
        transfer.run(sources, deadline=soon())
    assert room == DATA


def test_a_source_whose_bytes_ended_is_fenced_and_another_goes_on() -> None:
    first, second = Lender(bytearray(DATA)), Lender(bytearray(DATA))
    with (
        lending(first) as one,
        lending(second) as two,
        proxies(one, 30 * MBPS) as (slow,),
        proxies(two, 30 * MBPS) as (other,),
    ):
        room = bytearray(len(DATA))
        transfer = transfer_of(first, room)

        def end() -> None:
            wait_for(lambda: slow.carried > 3 * MIB)
            first.valid = False

        ending = threading.Thread(target=end)
        ending.start()
        report = transfer.run([origin("w1", slow.address), origin("w2", other.address)], deadline=soon())
        ending.join()
        assert room == DATA
        with pytest.raises(FencedError):
            transfer_of(first, bytearray(len(DATA))).run([origin("w1", slow.address)], deadline=soon())
    assert report.sources["w2"] > 0


def test_when_all_are_gone_it_says_so_and_touches_the_memory_no_more() -> None:
    lender, room = Lender(bytearray(DATA)), bytearray(len(DATA))
    with lending(lender) as server, proxies(server, 40 * MBPS) as (proxy,):
        transfer = transfer_of(lender, room, connections=2)
        cutter = threading.Thread(target=lambda: (wait_for(lambda: proxy.carried > 9 * MIB), proxy.cut()))
        cutter.start()
        with pytest.raises(UnavailableError):
            transfer.run([origin("w1", proxy.address)], deadline=soon())
        cutter.join()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("fetch")]
    assert 0 < sum(room[at] == DATA[at] for at in range(0, len(DATA), 4096)) < len(DATA) / 4096


def test_a_silent_source_runs_into_the_deadline() -> None:
    lender = Lender(bytearray(DATA))
    with lending(lender) as server, proxies(server, None) as (proxy,):
        proxy.silent = True
        with pytest.raises(DeadlineExceededError):
            transfer_of(lender, bytearray(len(DATA))).run([origin("w1", proxy.address)], deadline=soon(0.5))


@pytest.mark.parametrize("how", ["cancel", "drop"])
def test_a_transfer_can_be_ended_from_outside(how: str) -> None:
    lender = Lender(bytearray(DATA))
    with lending(lender) as server, proxies(server, 10 * MBPS) as (proxy,):
        transfer = transfer_of(lender, bytearray(len(DATA)))
        raised: list[BaseException] = []

        def run() -> None:
            try:
                transfer.run([origin("w1", proxy.address)], deadline=soon())
            except TensorbusError as error:
                raised.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        wait_for(lambda: proxy.carried > MIB)
        if how == "cancel":
            transfer.cancel()
        else:
            transfer.drop("w1", FencedError("its session ended"))
        thread.join(10)
    assert [type(error) for error in raised] == [UnavailableError if how == "cancel" else FencedError]


# -- who may -----------------------------------------------------------------------------------------------------------


def test_more_than_the_server_takes_wait_for_their_turn() -> None:
    lender = Lender(bytearray(DATA[: 4 * MIB]))
    with lending(lender, connections_max=3, spare_s=0.0) as server:
        rooms = [bytearray(4 * MIB) for _ in range(12)]
        threads = [
            threading.Thread(
                target=lambda room=room: transfer_of(lender, room, connections=1).run(  # type: ignore[misc]  # of its own
                    [origin("w1", (server.host, server.port))], deadline=soon()
                )
            )
            for room in rooms
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert all(room == DATA[: 4 * MIB] for room in rooms)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[TlsFiles, TlsFiles, TlsFiles]:
    """Of a server, of a client of the same authority, and of one of another."""

    def made(folder: Path) -> tuple[TlsFiles, TlsFiles]:
        found = make_certificates(folder)
        return (
            TlsFiles(cert=found.server_cert, key=found.server_key, ca=found.ca),
            TlsFiles(cert=found.client_cert, key=found.client_key, ca=found.ca),
        )

    server, client = made(tmp_path_factory.mktemp("ours"))
    _, stranger = made(tmp_path_factory.mktemp("theirs"))
    return server, client, stranger


def read(lender: Lender, server: BulkServer, tls: TlsFiles | None) -> TransferReport:
    room = bytearray(len(lender.data))
    context = None if tls is None else tls.context(server=False)
    report = transfer_of(lender, room, tls=context).run([origin("w1", (server.host, server.port))], deadline=soon(20))
    assert room == lender.data
    return report


def test_bytes_go_over_tls_between_members_only(files: tuple[TlsFiles, TlsFiles, TlsFiles]) -> None:
    ours, client, stranger = files
    lender = Lender(bytearray(DATA[: 9 * MIB]))
    with lending(lender, tls=ours.context(server=True)) as server:
        assert read(lender, server, client).retries == 0
        with pytest.raises(DeniedError, match="TLS"):
            read(lender, server, None)
        with pytest.raises(DeniedError):
            read(lender, server, stranger)
        mixed = TlsFiles(cert=stranger.cert, key=stranger.key, ca=client.ca)  # it trusts the server, not the other way
        with pytest.raises(DeniedError):
            read(lender, server, mixed)
    plain = Lender(bytearray(DATA[:MIB]))
    with lending(plain) as server, pytest.raises(DeniedError):
        read(plain, server, client)


def test_pages_go_over_tls(files: tuple[TlsFiles, TlsFiles, TlsFiles]) -> None:
    ours, client, _ = files
    owner = Pages()
    data = np.frombuffer(DATA[: 9 * 300_000], np.uint8).reshape(9, 300_000)
    places = owner.put(data, 300_000)
    out = np.zeros_like(data)
    with lending(Lender(bytearray(1)), pages=owner, tls=ours.context(server=True)) as server:
        asked = replace(origin("w1", (server.host, server.port)), request={"permit": "t"})
        ways = Ways(connections=2, tls=client.context(server=False))
        came = fetch_pages(asked, places, out, 300_000, ways=ways, deadline=soon(20))
    assert came.failure is None
    assert not came.states.any()
    assert (out == data).all()
    owner.close()


def test_a_tls_connection_that_is_cut_or_silent_is_noticed(files: tuple[TlsFiles, TlsFiles, TlsFiles]) -> None:
    ours, client, _ = files
    lender, room = Lender(bytearray(DATA)), bytearray(len(DATA))
    with (
        lending(lender, tls=ours.context(server=True)) as server,
        proxies(server, 40 * MBPS, 40 * MBPS) as (stays, goes),
    ):
        cutter = threading.Thread(target=lambda: (wait_for(lambda: goes.carried > 2 * MIB), goes.cut()))
        cutter.start()
        transfer = transfer_of(lender, room, connections=2, tls=client.context(server=False))
        transfer.run([origin("w1", stays.address, goes.address)], deadline=soon())
        cutter.join()
        stays.silent = True
        with pytest.raises(DeadlineExceededError):
            BulkClient.connect(*stays.address, deadline=soon(0.3), tls=client.context(server=False))
    assert room == DATA
