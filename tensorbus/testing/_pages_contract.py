"""What every bus must do with page facts. A backend subclasses :class:`PagesContract` as it does ``BusContract``.

Imports pytest, so only tests import this module.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from tensorbus.bus import Appended, Bus, Conflict, StreamLimits, append, get_blob, put_blob
from tensorbus.errors import OutOfSpaceError
from tensorbus.events import (
    MSG_ID,
    RECORD,
    BlobRef,
    Headers,
    LeaseGranted,
    PageHolder,
    PageOp,
    PagesChanged,
    ShardSnapshotTaken,
    decode_page,
)
from tensorbus.ids import Incarnation, WorkerId, new_event_id
from tensorbus.testing._bus_contract import IDS, LIFE, Backend, headers, key_bound, seqs, soon, take

H1, H2 = WorkerId("h1"), WorkerId("h2")
SHARD = 7


def pages_changed(number: int = 1, *, shard: int = SHARD, count: int = 1) -> PagesChanged:
    records = np.zeros(count, RECORD)
    records["op"] = PageOp.ADD
    records["slot"] = number
    holder = PageHolder(worker=WorkerId("w1"), incarnation=LIFE)
    return PagesChanged(shard=shard, number=number, keyspaces=("0" * 64,), holders=(holder,), records=records.tobytes())


def said_by(author: WorkerId, token: int, *, life: Incarnation = LIFE) -> Headers:
    return Headers(event_id=new_event_id(IDS), author=author, incarnation=life, token=token, expected=token)


async def grant(bus: Bus, author: WorkerId, *, after: int = 0, shard: int = SHARD) -> int:
    """Take a shard; the token."""
    outcome = await append(bus.pages, LeaseGranted(shard=shard), headers(after, author=author), deadline=soon())
    assert isinstance(outcome, Appended)
    return outcome.seq


class PagesContract:
    """Tests that the real bus and its twin both pass."""

    async def test_the_sequence_of_a_grant_is_the_token_of_what_follows(self, backend: Backend) -> None:
        bus = await backend.connect()
        token = await grant(bus, H1)
        batch = pages_changed(count=900)
        outcome = await append(bus.pages, batch, said_by(H1, token), deadline=soon())
        assert isinstance(outcome, Appended)
        found = await bus.pages.get(outcome.seq, deadline=soon())
        assert found is not None
        recorded = decode_page(
            seq=found.seq, time_ns=found.time_ns, subject=found.subject, headers=found.headers, data=found.data
        )
        assert recorded.event == batch
        assert (found.subject, recorded.headers.token, recorded.headers.expected) == ("tb.shard.7.h1", token, token)

    async def test_one_of_many_contenders_gets_a_shard(self, backend: Backend) -> None:
        buses = [await backend.connect() for _ in range(8)]
        outcomes = await asyncio.gather(
            *(
                append(bus.pages, LeaseGranted(shard=SHARD), headers(0, author=WorkerId(f"h{n}")), deadline=soon())
                for n, bus in enumerate(buses)
            )
        )
        won = [outcome for outcome in outcomes if isinstance(outcome, Appended)]
        assert len(won) == 1
        assert {outcome for outcome in outcomes if isinstance(outcome, Conflict)} == {Conflict(won[0].seq)}

    async def test_a_newer_grant_fences_the_former_home(self, backend: Backend) -> None:
        bus = await backend.connect()
        first = await grant(bus, H1)
        second = await grant(bus, H2, after=first)
        assert second > first
        for event in (pages_changed(), _snapshot()):
            assert await append(bus.pages, event, said_by(H1, first), deadline=soon()) == Conflict(second)
            assert isinstance(await append(bus.pages, event, said_by(H2, second), deadline=soon()), Appended)

    async def test_a_batch_moves_no_token_and_other_shards_are_others(self, backend: Backend) -> None:
        bus = await backend.connect()
        mine, other = await grant(bus, H1), await grant(bus, H2, shard=SHARD + 1)
        for number in (1, 2, 3):
            for author, token, shard in ((H1, mine, SHARD), (H2, other, SHARD + 1)):
                batch = pages_changed(number, shard=shard)
                outcome = await append(bus.pages, batch, said_by(author, token), deadline=soon())
                assert isinstance(outcome, Appended)

    async def test_a_batch_repeated_after_the_shard_was_lost_is_known_to_be_stored(self, backend: Backend) -> None:
        bus = await backend.connect()
        token, batch = await grant(bus, H1), pages_changed()
        said = said_by(H1, token)
        stored = await append(bus.pages, batch, said, deadline=soon())
        newer = await grant(bus, H2, after=token)
        assert await append(bus.pages, batch, said, deadline=soon()) == stored
        fresh = replace(said, event_id=new_event_id(IDS))
        assert await append(bus.pages, batch, fresh, deadline=soon()) == Conflict(newer)

    async def test_the_log_and_the_pages_are_two_streams(self, backend: Backend) -> None:
        bus = await backend.connect()
        appended = await append(bus, key_bound(), headers(0), deadline=soon())
        assert isinstance(appended, Appended)
        await grant(bus, H1)
        assert bus.name == "TB"
        assert bus.pages.name == "TB_PAGES"
        assert (await bus.log_state(deadline=soon())).messages == 1
        assert (await bus.pages.log_state(deadline=soon())).messages == 1
        assert await bus.last_on("tb.lease.*.*", deadline=soon()) is None
        assert await bus.pages.last_on(bus.subjects.facts, deadline=soon()) is None

    async def test_a_shard_is_read_whole_and_alone(self, backend: Backend) -> None:
        bus = await backend.connect()
        async with bus.pages.read(bus.subjects.shard(SHARD), after=0) as reader:
            token = await grant(bus, H1)
            await grant(bus, H1, shard=SHARD + 70)
            await put_blob(bus.pages, b"7" * 100, author=H1, deadline=soon())
            for event in (pages_changed(), _snapshot(), pages_changed(2)):
                await append(bus.pages, event, said_by(H1, token), deadline=soon())
            found = await take(reader, 4)
            assert [message.subject.split(".")[1] for message in found] == ["lease", "shard", "psnap", "shard"]
            last = await bus.pages.last_seq(deadline=soon())
            await reader.reached(last, deadline=soon())

    async def test_the_last_grant_outlives_every_purge(self, backend: Backend) -> None:
        bus = await backend.connect()
        first = await grant(bus, H1)
        for number in (1, 2, 3):
            await append(bus.pages, pages_changed(number), said_by(H1, first), deadline=soon())
        second = await grant(bus, H2, after=first)
        last = await bus.pages.last_seq(deadline=soon())
        assert await bus.pages.purge("tb.shard.7.*", upto=last, keep_last=False, deadline=soon()) == 3
        assert await bus.pages.purge("tb.lease.7.*", upto=last, deadline=soon()) == 1
        async with bus.pages.read(bus.subjects.leases, after=0) as reader:
            assert seqs(await take(reader, 1)) == [second]
        await grant(bus, H1, after=second)

    async def test_large_bodies_lie_beside_the_pages(self, backend: Backend) -> None:
        bus, body = await backend.connect(), b"page table " * 100_000
        ref = await put_blob(bus.pages, body, author=H1, deadline=soon())
        assert await get_blob(bus.pages, ref, deadline=soon()) == body
        assert await bus.pages.subjects_on("tb.pblob.*.*.*", deadline=soon()) != []
        assert await bus.subjects_on("tb.blob.*.*.*", deadline=soon()) == []

    async def test_the_pages_have_limits_of_their_own(self, backend: Backend) -> None:
        bus = await backend.connect(prefix="small", limits=StreamLimits(pages_bytes_max=40_000))
        token = await grant(bus, H1)

        async def fill() -> None:
            for number in range(1, 20):
                await append(bus.pages, pages_changed(number, count=100), said_by(H1, token), deadline=soon())

        with pytest.raises(OutOfSpaceError):
            await fill()
        await bus.publish("small.ev.replica.x.w1", b"y" * 60_000, headers={MSG_ID: "m"}, deadline=soon())


def _snapshot() -> ShardSnapshotTaken:
    blob = BlobRef(digest="ab" * 32, nbytes=1, chunks=1, author=H1)
    return ShardSnapshotTaken(shard=SHARD, upto=1, fold=1, state_hash="cd" * 32, blob=blob)
