"""Connections that rest between transfers: used again, and never missed when they are gone."""

from __future__ import annotations

import random

import pytest

from tensorbus.clock import Deadline
from tensorbus.errors import NotFoundError, UnavailableError
from tensorbus.transport import BulkClient, Lines, Transfer, Ways
from tensorbus.transport._blocks import BLOCK_BYTES
from tensorbus.transport._bulk_client import Wanted
from tensorbus.transport._lines import KEPT_EACH_MAX, REST_S
from tests.paths import Lender, ProxyPath, lending, origin, wait_for

DATA = random.Random(2).randbytes(1 << 20)


class Hands:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.at_ns = 0

    def now_ns(self) -> int:
        return self.at_ns

    def wall_ns(self) -> int:
        return self.at_ns


def soon() -> Deadline:
    return Deadline(30.0, what="the transfer")


def bring(lender: Lender, lines: Lines, address: tuple[str, int]) -> None:
    room = bytearray(len(lender.data))
    transfer = Transfer(
        lender.tables.blocks.blocks, memoryview(room), tables=lender.name, ways=Ways(connections=1, lines=lines)
    )
    transfer.run([origin("w1", address)], deadline=soon())
    assert room == lender.data


def test_the_next_transfer_uses_the_connection_of_the_last() -> None:
    lender, lines = Lender(bytearray(DATA)), Lines()
    with lending(lender) as server:
        for _ in range(5):
            bring(lender, lines, (server.host, server.port))
        assert len(server._served) == 1
        wait_for(lambda: lender.released == 5)
        lines.close()


def test_a_connection_that_was_cut_while_it_rested_is_not_missed() -> None:
    lender, lines = Lender(bytearray(DATA)), Lines()
    with lending(lender) as server:
        path = ProxyPath((server.host, server.port))
        bring(lender, lines, path.address)
        path.cut()
        path.open = True
        bring(lender, lines, path.address)
        lines.close()
        path.close()


def test_a_source_that_is_gone_for_good_is_out_of_reach() -> None:
    lender, lines = Lender(bytearray(DATA)), Lines()
    with lending(lender) as server:
        bring(lender, lines, (server.host, server.port))
    with pytest.raises(UnavailableError):
        bring(lender, lines, (server.host, server.port))


def test_connections_do_not_rest_for_ever() -> None:
    clock = Hands()
    lender, lines = Lender(bytearray(DATA)), Lines(clock=clock)
    with lending(lender) as server:
        bring(lender, lines, (server.host, server.port))
        clock.at_ns = int(REST_S * 1e9) + 1
        assert lines.take(((server.host, server.port), None)) is None
        wait_for(lambda: not server._served)


def test_few_rest_for_each_address_and_none_after_the_end() -> None:
    lender, lines = Lender(bytearray(DATA)), Lines()
    with lending(lender) as server:
        ways = Ways()
        line = ((server.host, server.port), None)
        for _ in range(KEPT_EACH_MAX + 2):
            lines.keep(line, ways.connect(line[0], 0, deadline=soon()))
        wait_for(lambda: len(server._served) == KEPT_EACH_MAX)
        lines.close()
        lines.keep(line, ways.connect(line[0], 0, deadline=soon()))
        assert lines.take(line) is None
        wait_for(lambda: not server._served)


def opened_with_first(lender: Lender, lines: Lines, address: tuple[str, int]) -> bytearray:
    ways, room = Ways(lines=lines), bytearray(len(lender.data))
    w1 = origin("w1", address)
    opened = ways.open(w1, 0, tables=True, first=True, deadline=soon())
    transfer = Transfer(lender.tables.blocks.blocks, memoryview(room), tables=lender.name, ways=ways)
    transfer.run([w1], opened=opened, deadline=soon())
    return room


@pytest.mark.parametrize("blocks", [1, 2, 9])
def test_the_first_block_comes_with_the_opening(blocks: int) -> None:
    lender, lines = Lender(bytearray(random.Random(3).randbytes(blocks * BLOCK_BYTES - 7))), Lines()
    with lending(lender) as server:
        for _ in range(3):
            assert opened_with_first(lender, lines, (server.host, server.port)) == lender.data
        lines.close()


def test_a_connection_goes_on_after_it_was_refused_a_source_with_its_first_block() -> None:
    lender = Lender(bytearray(DATA))
    with lending(lender) as server:
        client = BulkClient.connect(server.host, server.port, deadline=soon())
        lender.refuses = True
        with pytest.raises(NotFoundError, match="there is nothing here"):
            client.open({}, first=True, deadline=soon())
        lender.refuses = False
        source = client.open({}, first=True, deadline=soon())
        room = bytearray(len(DATA))
        wanted = [Wanted(0, [memoryview(room)], len(room))]
        (came,) = client.receive(source.first, wanted, sums=True, deadline=soon())
        assert came.right
        assert room == DATA
        client.close()
