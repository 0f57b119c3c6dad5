"""What every bus must do. A backend subclasses :class:`BusContract` and gives the fixture ``backend``.

Imports pytest, so only tests import this module.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import pytest
from blake3 import blake3

from tensorbus.bus import (
    Appended,
    Bus,
    Conflict,
    Handler,
    Message,
    Reader,
    StreamLimits,
    WrongSequenceError,
    append,
    get_blob,
    provision,
    put_blob,
    read_blob,
)
from tensorbus.clock import Deadline
from tensorbus.errors import (
    CorruptError,
    DeadlineExceededError,
    ErrorKind,
    InvalidArgumentError,
    NotFoundError,
    OutOfSpaceError,
    TensorbusError,
    UnavailableError,
)
from tensorbus.events import MSG_ID, BlobRef, Headers, KeyBound, ReplicaAdded, Subjects, Tier, aggregate_of
from tensorbus.ids import ArtifactId, EventId, Incarnation, SystemIds, WorkerId, new_event_id

W1, W2 = WorkerId("w1"), WorkerId("w2")
LIFE = Incarnation("0123456789abcdef")
IDS = SystemIds()


class Backend(Protocol):
    """Makes connections to one cluster, with its streams provisioned."""

    async def connect(self, *, prefix: str = "tb", limits: StreamLimits | None = None, pending_max: int = 1024) -> Bus:
        """A new connection, closed by the fixture; the first one of a prefix makes its streams."""
        ...


def soon(seconds: float = 20.0) -> Deadline:
    return Deadline(seconds, what="a step of a test")


def key_bound(key: str = "k", artifact: str = "a") -> KeyBound:
    return KeyBound(tenant="t", key=key, artifact=ArtifactId(artifact), rebind=False)


def replica_added(artifact: str = "a") -> ReplicaAdded:
    return ReplicaAdded(tenant="t", artifact=ArtifactId(artifact), view=None, tier=Tier.DRAM, nbytes=1, number=1)


def headers(expected: int | None = None, *, author: WorkerId = W1, event_id: EventId | None = None) -> Headers:
    return Headers(event_id=event_id or new_event_id(IDS), author=author, incarnation=LIFE, expected=expected)


async def fill(bus: Bus, count: int, *, subject: str = "tb.ev.replica.x.w1") -> list[int]:
    """Publish numbered messages one after the other."""
    return [
        await bus.publish(subject, str(n).encode(), headers={MSG_ID: new_event_id(IDS)}, deadline=soon())
        for n in range(count)
    ]


async def take(reader: Reader, count: int) -> list[Message]:
    """The next messages of a reading, whole batches."""
    found: list[Message] = []
    async with soon().scope():
        while len(found) < count:
            found.extend(await anext(aiter(reader)))
    return found


async def echo(question: bytes) -> bytes:
    return question


def seqs(messages: Sequence[Message]) -> list[int]:
    return [message.seq for message in messages]


class BusContract:
    """Tests that the real bus and its twin both pass."""

    # ------------------------------------------------------------------------------------------------------ append

    async def test_a_fact_is_appended_and_stored_as_it_was_given(self, backend: Backend) -> None:
        bus, event, given = await backend.connect(), key_bound(), headers(0)
        appended = await append(bus, event, given, deadline=soon())
        assert isinstance(appended, Appended)
        stored = await bus.get(appended.seq, deadline=soon())
        assert stored is not None
        assert stored.headers[MSG_ID] == given.event_id
        assert stored.subject == bus.subjects.fact(aggregate_of(event), W1)
        assert b'"k"' in stored.data
        assert await bus.last_seq(deadline=soon()) == appended.seq

    async def test_a_second_author_with_old_knowledge_loses_and_learns_the_sequence(self, backend: Backend) -> None:
        bus = await backend.connect()
        first = await append(bus, key_bound(), headers(0), deadline=soon())
        second = await append(bus, key_bound(artifact="b"), headers(0, author=W2), deadline=soon())
        assert second == Conflict(first.seq)
        third = await append(bus, key_bound(artifact="b"), headers(second.seq, author=W2), deadline=soon())
        assert isinstance(third, Appended)

    async def test_other_aggregates_do_not_conflict(self, backend: Backend) -> None:
        bus = await backend.connect()
        outcomes = [await append(bus, key_bound(key), headers(0), deadline=soon()) for key in ("a", "b", "c.d", "*")]
        assert all(isinstance(outcome, Appended) for outcome in outcomes)

    async def test_of_many_contenders_one_wins_every_round(self, backend: Backend) -> None:
        buses = [await backend.connect() for _ in range(3)]
        seq = 0
        for round_ in range(10):
            outcomes = await asyncio.gather(
                *(
                    append(
                        buses[n % 3],
                        key_bound(artifact=f"{round_}-{n}"),
                        headers(seq, author=WorkerId(f"w{n}")),
                        deadline=soon(),
                    )
                    for n in range(12)
                )
            )
            winners = [outcome for outcome in outcomes if isinstance(outcome, Appended)]
            assert len(winners) == 1
            assert {outcome.seq for outcome in outcomes} == {winners[0].seq}
            seq = winners[0].seq

    async def test_a_repeated_append_is_its_first_one(self, backend: Backend) -> None:
        bus, event, given = await backend.connect(), key_bound(), headers(0)
        first = await append(bus, event, given, deadline=soon())
        assert await append(bus, event, given, deadline=soon()) == first
        later = await append(bus, key_bound(artifact="b"), headers(first.seq, author=W2), deadline=soon())
        assert isinstance(later, Appended)
        # Its outcome was unknown, and somebody has built on it since: it is there all the same.
        assert await append(bus, event, given, deadline=soon()) == first

    async def test_a_fact_of_one_author_is_stored_once_per_id(self, backend: Backend) -> None:
        bus, given = await backend.connect(), headers()
        first = await append(bus, replica_added(), given, deadline=soon())
        assert await append(bus, replica_added(), given, deadline=soon()) == first
        assert await bus.last_seq(deadline=soon()) == first.seq

    async def test_expected_must_fit_the_kind(self, backend: Backend) -> None:
        bus = await backend.connect()
        with pytest.raises(InvalidArgumentError, match="must be given"):
            await append(bus, key_bound(), headers(None), deadline=soon())
        with pytest.raises(InvalidArgumentError, match="must be None"):
            await append(bus, replica_added(), headers(0), deadline=soon())

    async def test_an_expectation_above_the_log_is_a_conflict(self, backend: Backend) -> None:
        bus = await backend.connect()
        first = await append(bus, key_bound(), headers(0), deadline=soon())
        ahead = await append(bus, key_bound(artifact="b"), headers(first.seq + 100), deadline=soon())
        assert ahead == Conflict(first.seq)

    # ----------------------------------------------------------------------------------------------------- publish

    async def test_publish_needs_an_id(self, backend: Backend) -> None:
        bus = await backend.connect()
        with pytest.raises(InvalidArgumentError, match=MSG_ID):
            await bus.publish("tb.ev.replica.x.w1", b"", headers={}, deadline=soon())

    async def test_publish_says_the_sequence_that_holds(self, backend: Backend) -> None:
        bus = await backend.connect()
        last = (await fill(bus, 3))[-1]
        expecting = {
            MSG_ID: "x",
            "Nats-Expected-Last-Subject-Sequence": str(last - 1),
            "Nats-Expected-Last-Subject-Sequence-Subject": "tb.ev.replica.x.*",
        }
        with pytest.raises(WrongSequenceError) as caught:
            await bus.publish("tb.ev.replica.x.w2", b"", headers=expecting, deadline=soon())
        assert caught.value.seq == last

    async def test_nobody_takes_a_foreign_subject(self, backend: Backend) -> None:
        bus = await backend.connect()
        with pytest.raises(UnavailableError):
            await bus.publish("elsewhere.ev.replica.x.w1", b"", headers={MSG_ID: "x"}, deadline=soon(0.3))

    async def test_a_message_may_be_too_large(self, backend: Backend) -> None:
        bus = await backend.connect(prefix="small", limits=StreamLimits(message_bytes_max=1024))
        with pytest.raises(InvalidArgumentError):
            await bus.publish("small.ev.replica.x.w1", bytes(2048), headers={MSG_ID: "x"}, deadline=soon())

    async def test_a_full_log_refuses_what_is_new_and_keeps_what_is_old(self, backend: Backend) -> None:
        bus = await backend.connect(prefix="small", limits=StreamLimits(log_bytes_max=20_000))
        stored: list[int] = []

        async def write(count: int) -> None:
            for _ in range(count):
                given = {MSG_ID: new_event_id(IDS)}
                stored.append(await bus.publish("small.ev.replica.x.w1", bytes(1000), headers=given, deadline=soon()))

        with pytest.raises(OutOfSpaceError):
            await write(100)
        assert 5 <= len(stored) <= 20
        assert await bus.get(stored[0], deadline=soon()) is not None
        with pytest.raises(OutOfSpaceError):
            await write(1)

    async def test_too_many_appends_at_once_are_refused(self, backend: Backend) -> None:
        bus = await backend.connect(pending_max=4)
        outcomes = await asyncio.gather(
            *(append(bus, replica_added(str(n)), headers(), deadline=soon()) for n in range(8)), return_exceptions=True
        )
        assert sum(isinstance(outcome, OutOfSpaceError) for outcome in outcomes) == 4
        assert sum(isinstance(outcome, Appended) for outcome in outcomes) == 4
        assert isinstance(await append(bus, replica_added(), headers(), deadline=soon()), Appended)

    # ------------------------------------------------------------------------------------------------------- looks

    async def test_looking_at_the_log(self, backend: Backend) -> None:
        bus = await backend.connect()
        a1, b1, a2 = [
            (await fill(bus, 1, subject=subject))[0]
            for subject in ("tb.ev.replica.a.w1", "tb.ev.replica.b.w1", "tb.ev.replica.a.w2")
        ]

        async def first(pattern: str, seq: int) -> int | None:
            found = await bus.first_from(pattern, seq, deadline=soon())
            return None if found is None else found.seq

        async def last(pattern: str) -> int | None:
            found = await bus.last_on(pattern, deadline=soon())
            return None if found is None else found.seq

        assert [await last(p) for p in ("tb.ev.replica.a.*", "tb.ev.replica.a.w1", "tb.ev.>")] == [a2, a1, a2]
        assert [await last(p) for p in ("tb.ev.*.b.*", "tb.ev.replica.c.*", "tb.ev.replica.c.w1")] == [b1, None, None]
        assert [await first("tb.ev.replica.a.*", seq) for seq in (0, a1, a1 + 1, a2 + 1)] == [a1, a1, a2, None]
        assert [await first("tb.ev.>", seq) for seq in (a1 + 1, a2)] == [b1, a2]
        assert await bus.get(a2 + 1, deadline=soon()) is None
        assert await bus.get(0, deadline=soon()) is None

    async def test_every_way_to_read_gives_the_same_message(self, backend: Backend) -> None:
        bus = await backend.connect()
        appended = await append(bus, key_bound("schlüssel"), headers(0), deadline=soon())
        got = await bus.get(appended.seq, deadline=soon())
        assert got is not None
        async with bus.read(bus.subjects.facts, after=0) as reader:
            assert await take(reader, 1) == [got]
        assert await bus.last_on("tb.ev.key.*.w1", deadline=soon()) == got

    # ------------------------------------------------------------------------------------------------------- purge

    async def test_a_purge_keeps_the_last_message_of_its_filter_and_all_others(self, backend: Backend) -> None:
        bus = await backend.connect()
        mine = await fill(bus, 5, subject="tb.ev.replica.a.w1")
        others = await fill(bus, 2, subject="tb.ev.replica.b.w1")
        mine += await fill(bus, 1, subject="tb.ev.replica.a.w2")
        fence = "tb.ev.replica.a.*"
        assert await bus.purge(fence, upto=mine[2], deadline=soon()) == 3
        assert await bus.purge(fence, upto=mine[2], deadline=soon()) == 0
        assert await bus.purge(fence, upto=mine[-1] + 10, deadline=soon()) == 2
        assert await bus.purge(fence, upto=mine[-1] + 10, deadline=soon()) == 0
        async with bus.read(bus.subjects.facts, after=0) as reader:
            assert seqs(await take(reader, 3)) == [*others, mine[-1]]
        assert await bus.get(mine[0], deadline=soon()) is None
        first = await bus.first_from(fence, 0, deadline=soon())
        assert first is not None
        assert first.seq == mine[-1]

    async def test_a_purge_may_take_the_last_message_too(self, backend: Backend) -> None:
        bus = await backend.connect()
        mine = await fill(bus, 3)
        assert await bus.purge("tb.ev.replica.x.w1", upto=mine[1], keep_last=False, deadline=soon()) == 2
        assert await bus.purge("tb.ev.replica.x.*", upto=mine[2], keep_last=False, deadline=soon()) == 1
        assert await bus.last_on("tb.ev.>", deadline=soon()) is None
        assert await fill(bus, 1) == [mine[-1] + 1]

    async def test_a_purge_of_nothing_takes_nothing(self, backend: Backend) -> None:
        bus = await backend.connect()
        written = await fill(bus, 2)
        for keep_last in (True, False):
            for upto in (-1, 0, 1, written[0] - 1):
                assert await bus.purge("tb.ev.>", upto=upto, keep_last=keep_last, deadline=soon()) == 0
            assert await bus.purge("tb.ev.replica.y.*", upto=written[1], keep_last=keep_last, deadline=soon()) == 0
        with pytest.raises(InvalidArgumentError):
            await bus.purge("", upto=written[1], deadline=soon())
        assert (await bus.log_state(deadline=soon())).messages == 2

    async def test_who_lost_a_contest_still_loses_it_after_a_purge(self, backend: Backend) -> None:
        bus = await backend.connect()
        first = await append(bus, key_bound(), headers(0), deadline=soon())
        second = await append(bus, key_bound(artifact="b"), headers(first.seq), deadline=soon())
        fence = bus.subjects.fence(aggregate_of(key_bound()))
        assert await bus.purge(fence, upto=second.seq, deadline=soon()) == 1
        assert await append(bus, key_bound(), headers(0), deadline=soon()) == Conflict(second.seq)
        assert isinstance(await append(bus, key_bound(), headers(second.seq), deadline=soon()), Appended)

    async def test_the_subjects_of_a_filter_are_those_with_messages(self, backend: Backend) -> None:
        bus = await backend.connect()
        for subject in ("tb.blob.b.0.w1", "tb.blob.a.1.w1", "tb.blob.a.0.w1"):
            await fill(bus, 2, subject=subject)
        written = await fill(bus, 2, subject="tb.ev.replica.a.w1")
        found = ["tb.blob.a.0.w1", "tb.blob.a.1.w1", "tb.blob.b.0.w1"]
        assert await bus.subjects_on("tb.blob.>", deadline=soon()) == found
        await bus.purge("tb.blob.a.>", upto=written[-1], keep_last=False, deadline=soon())
        assert await bus.subjects_on("tb.blob.>", deadline=soon()) == found[2:]
        assert await bus.subjects_on("tb.snap.>", deadline=soon()) == []

    async def test_a_purge_makes_room(self, backend: Backend) -> None:
        bus = await backend.connect(prefix="small", limits=StreamLimits(log_bytes_max=20_000))
        stored: list[int] = []

        async def write(count: int) -> None:
            for _ in range(count):
                given = {MSG_ID: new_event_id(IDS)}
                stored.append(await bus.publish("small.ev.replica.x.w1", bytes(1000), headers=given, deadline=soon()))

        with pytest.raises(OutOfSpaceError):
            await write(100)
        full = await bus.log_state(deadline=soon())
        assert await bus.purge("small.ev.replica.x.*", upto=stored[-1], deadline=soon()) == len(stored) - 1
        assert (await bus.log_state(deadline=soon())).nbytes < full.nbytes / 4
        await write(5)

    async def test_the_state_of_the_log(self, backend: Backend) -> None:
        bus = await backend.connect()
        empty = await bus.log_state(deadline=soon())
        assert (empty.messages, empty.nbytes, empty.first_seq) == (0, 0, empty.last_seq + 1)
        written = await fill(bus, 3)
        full = await bus.log_state(deadline=soon())
        assert (full.first_seq, full.last_seq, full.messages) == (written[0], written[2], 3)
        assert full.nbytes > 0
        assert full.created_ns == empty.created_ns > 0
        await bus.purge("tb.ev.>", upto=written[1], deadline=soon())
        later = await bus.log_state(deadline=soon())
        assert (later.first_seq, later.last_seq, later.messages) == (written[2], written[2], 1)
        await bus.purge("tb.ev.>", upto=written[2], keep_last=False, deadline=soon())
        gone = await bus.log_state(deadline=soon())
        assert (gone.first_seq, gone.last_seq, gone.messages) == (written[2] + 1, written[2], 0)

    # ----------------------------------------------------------------------------------------------------- reading

    async def test_a_reading_starts_behind_any_position(self, backend: Backend) -> None:
        bus = await backend.connect()
        written = await fill(bus, 20)
        for at in (0, 1, 10, 18):
            async with bus.read(bus.subjects.facts, after=written[at]) as reader:
                assert reader.position == written[at]
                assert seqs(await take(reader, 19 - at)) == written[at + 1 :]
                assert reader.position == written[-1]

    async def test_a_reading_goes_on_with_what_is_written_later(self, backend: Backend) -> None:
        bus, other = await backend.connect(), await backend.connect()
        written = await fill(bus, 3)
        async with bus.read(bus.subjects.facts, after=0) as reader:
            assert seqs(await take(reader, 3)) == written
            more = await fill(other, 5)
            assert seqs(await take(reader, 5)) == more

    async def test_a_reading_sees_only_its_filter(self, backend: Backend) -> None:
        bus = await backend.connect()
        wanted: list[int] = []
        for n in range(5):
            wanted += await fill(bus, 1, subject="tb.ev.replica.a.w1")
            await fill(bus, 2, subject=f"tb.ev.replica.b.w{n}")
        async with bus.read("tb.ev.replica.a.*", after=0) as reader:
            assert seqs(await take(reader, 5)) == wanted

    async def test_two_readings_of_thousands_of_messages_miss_nothing(self, backend: Backend) -> None:
        bus, other = await backend.connect(), await backend.connect()

        async def write() -> list[int]:
            lots = [fill(other, 150, subject=f"tb.ev.replica.x{n}.w1") for n in range(20)]
            return sorted(seq for lot in await asyncio.gather(*lots) for seq in lot)

        async def follow() -> list[int]:
            async with bus.read(bus.subjects.facts, after=0) as reader:
                return seqs(await take(reader, 3000))

        written, one, two = await asyncio.gather(write(), follow(), follow())
        assert one == written
        assert two == written

    async def test_caught_up_is_said_when_what_was_there_has_been_handed_out(self, backend: Backend) -> None:
        bus = await backend.connect()
        async with bus.read(bus.subjects.facts, after=0) as empty, asyncio.TaskGroup() as group:
            waiting = group.create_task(take(empty, 1))
            async with soon().scope():
                await empty.caught_up.wait()
            written = await fill(bus, 1)
            assert seqs(await waiting) == written
        written += await fill(bus, 700)
        async with bus.read(bus.subjects.facts, after=0) as reader:
            assert not reader.caught_up.is_set()
            found = await take(reader, 701)
            assert reader.caught_up.is_set()
        assert seqs(found) == written

    async def test_reached_knows_when_nothing_is_to_come(self, backend: Backend) -> None:
        bus = await backend.connect()
        mine = (await fill(bus, 1, subject="tb.ev.replica.a.w1"))[0]
        others = (await fill(bus, 3, subject="tb.ev.replica.b.w1"))[-1]
        async with bus.read("tb.ev.replica.a.*", after=mine) as reader:
            await reader.reached(others, deadline=soon())  # nobody iterates, and there is nothing to wait for
            assert reader.position == mine
        async with bus.read("tb.ev.replica.a.*", after=0) as reader:
            with pytest.raises(TimeoutError):
                await reader.reached(others, deadline=soon(0.2))
            async with asyncio.TaskGroup() as group:
                waiting = group.create_task(reader.reached(others, deadline=soon()))
                assert seqs(await take(reader, 1)) == [mine]
                await waiting

    async def test_a_reading_ends_with_its_context(self, backend: Backend) -> None:
        bus = await backend.connect()
        async with bus.read(bus.subjects.facts, after=0) as reader:
            waiting = asyncio.create_task(take(reader, 1))
            await asyncio.sleep(0.05)
        with pytest.raises(StopAsyncIteration):
            await anext(aiter(reader))
        await asyncio.wait({waiting}, timeout=5)
        assert isinstance(waiting.exception(), (StopAsyncIteration, RuntimeError))

    async def test_a_closed_bus_says_so(self, backend: Backend) -> None:
        bus = await backend.connect()
        async with bus.read(bus.subjects.facts, after=0) as reader:
            waiting = asyncio.create_task(take(reader, 1))
            await asyncio.sleep(0.05)
            await bus.close()
            await bus.close()
            with pytest.raises(UnavailableError):
                await waiting
        with pytest.raises(UnavailableError):
            await append(bus, replica_added(), headers(), deadline=soon(1))
        with pytest.raises(UnavailableError):
            await bus.last_seq(deadline=soon(1))

    async def test_what_waits_for_a_reading_can_be_cancelled(self, backend: Backend) -> None:
        bus = await backend.connect()
        async with bus.read(bus.subjects.facts, after=0) as reader:
            for _ in range(3):
                waiting = asyncio.create_task(take(reader, 1))
                await asyncio.sleep(0.02)
                waiting.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await waiting
            written = await fill(bus, 2)
            assert seqs(await take(reader, 2)) == written

    # --------------------------------------------------------------------------------------------------- questions

    async def test_a_question_is_answered(self, backend: Backend) -> None:
        bus, other = await backend.connect(), await backend.connect()
        subject = bus.subjects.rpc("echo")
        async with other.answer(subject, echo, queue="q"):
            assert await bus.ask(subject, b"what?", deadline=soon()) == b"what?"
            assert await bus.ask(subject, b"", deadline=soon()) == b""
            assert await other.ask(subject, b"mine", deadline=soon()) == b"mine"

    async def test_each_question_goes_to_one_of_a_queue(self, backend: Backend) -> None:
        buses = [await backend.connect() for _ in range(3)]
        subject, answered = buses[0].subjects.rpc("count"), [0, 0]

        def counting(n: int) -> Handler:
            async def handle(question: bytes) -> bytes:
                answered[n] += 1
                return question

            return handle

        async with (
            buses[0].answer(subject, counting(0), queue="q"),
            buses[1].answer(subject, counting(1), queue="q"),
        ):
            for n in range(40):
                assert await buses[2].ask(subject, str(n).encode(), deadline=soon()) == str(n).encode()
        assert sum(answered) == 40
        assert min(answered) > 0

    async def test_nobody_there_is_said_soon(self, backend: Backend) -> None:
        bus = await backend.connect()
        subject = bus.subjects.rpc("nobody")
        async with asyncio.timeout(5):
            with pytest.raises(UnavailableError, match=r"nobody answers at tb\.rpc\.nobody"):
                await bus.ask(subject, b"?", deadline=soon())
        with pytest.raises(UnavailableError):
            await bus.ask(subject, b"?", deadline=soon(0.2))
        async with bus.answer(subject, echo, queue="q"):
            pass
        with pytest.raises(UnavailableError):
            await bus.ask(subject, b"?", deadline=soon())

    async def test_who_comes_a_moment_late_still_answers(self, backend: Backend) -> None:
        bus, other = await backend.connect(), await backend.connect()
        subject = bus.subjects.rpc("late")
        async with asyncio.TaskGroup() as group:
            asking = group.create_task(bus.ask(subject, b"?", deadline=soon()))
            await asyncio.sleep(0.1)
            async with other.answer(subject, echo, queue="q"):
                assert await asking == b"?"

    async def test_an_error_comes_back_as_what_it_was(self, backend: Backend) -> None:
        bus, other = await backend.connect(), await backend.connect()
        subject = bus.subjects.rpc("fail")

        async def fail(question: bytes) -> bytes:
            if question == b"typed":
                raise NotFoundError("no such thing", artifact="a", path=Path("/x"))
            raise ZeroDivisionError("oops")

        async with other.answer(subject, fail, queue="q"):
            with pytest.raises(NotFoundError, match="no such thing") as caught:
                await bus.ask(subject, b"typed", deadline=soon())
            assert caught.value.details == {"artifact": "a", "path": "/x"}
            with pytest.raises(TensorbusError, match="oops") as bare:
                await bus.ask(subject, b"bare", deadline=soon())
            assert bare.value.kind is ErrorKind.INTERNAL

    async def test_questions_and_answers_have_a_largest_size(self, backend: Backend) -> None:
        bus, other = await backend.connect(), await backend.connect()
        subject, most = bus.subjects.rpc("size"), bus.max_payload
        assert most >= 512 * 1024

        async def grow(question: bytes) -> bytes:
            return bytes(int(question.strip()))

        async with other.answer(subject, grow, queue="q"):
            assert await bus.ask(subject, str(most).encode().rjust(most), deadline=soon()) == bytes(most)
            with pytest.raises(InvalidArgumentError, match="an answer"):
                await bus.ask(subject, str(most + 1).encode(), deadline=soon())
            with pytest.raises(InvalidArgumentError, match="a question"):
                await bus.ask(subject, bytes(most + 1), deadline=soon())

    async def test_too_many_questions_wait_for_their_turn_until_their_deadline(self, backend: Backend) -> None:
        bus, other = await backend.connect(), await backend.connect()
        subject, go = bus.subjects.rpc("busy"), asyncio.Event()

        async def wait(question: bytes) -> bytes:
            await go.wait()
            return question

        async with other.answer(subject, wait, queue="q"), asyncio.TaskGroup() as group:
            asking = [group.create_task(bus.ask(subject, b"?", deadline=soon())) for _ in range(16)]
            await asyncio.sleep(0.1)
            with pytest.raises(OutOfSpaceError, match="ask again later") as caught:
                await bus.ask(subject, b"?", deadline=Deadline(0.3))
            assert subject not in str(caught.value)
            late = [group.create_task(bus.ask(subject, b"late", deadline=soon())) for _ in range(20)]
            await asyncio.sleep(0.1)
            go.set()
            assert [await one for one in asking] == [b"?"] * 16
            assert [await one for one in late] == [b"late"] * 20
            assert await bus.ask(subject, b"again", deadline=soon()) == b"again"

    async def test_a_long_answer_is_waited_for_and_asked_for_once(self, backend: Backend) -> None:
        bus, other = await backend.connect(), await backend.connect()
        subject, asked = bus.subjects.rpc("slow"), 0

        async def slow(question: bytes) -> bytes:
            nonlocal asked
            asked += 1
            await asyncio.sleep(2.5)  # longer than the silence after which a question is repeated
            return question

        async with other.answer(subject, slow, queue="q"):
            assert await bus.ask(subject, b"?", deadline=soon()) == b"?"
        assert asked == 1

    async def test_nobody_works_for_who_has_given_up(self, backend: Backend) -> None:
        bus, other = await backend.connect(), await backend.connect()
        subject, ended = bus.subjects.rpc("for-ever"), asyncio.Event()

        async def for_ever(_question: bytes) -> bytes:
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()
            return b""

        async with other.answer(subject, for_ever, queue="q"):
            with pytest.raises(DeadlineExceededError):
                await bus.ask(subject, b"?", deadline=soon(0.3))
            async with soon().scope():
                await ended.wait()

    async def test_who_leaves_hands_its_questions_to_the_next(self, backend: Backend) -> None:
        bus, one, two = [await backend.connect() for _ in range(3)]
        subject, working = bus.subjects.rpc("leave"), asyncio.Event()

        async def never(_question: bytes) -> bytes:
            working.set()
            await asyncio.Event().wait()
            return b""

        async with asyncio.TaskGroup() as group:
            async with one.answer(subject, never, queue="q"):
                asking = group.create_task(bus.ask(subject, b"?", deadline=soon()))
                await working.wait()
            async with two.answer(subject, echo, queue="q"):
                assert await asking == b"?"

    async def test_a_closed_bus_neither_asks_nor_answers(self, backend: Backend) -> None:
        bus = await backend.connect()
        subject = bus.subjects.rpc("closed")
        await bus.close()
        with pytest.raises(UnavailableError):
            await bus.ask(subject, b"?", deadline=soon(1))
        with pytest.raises(UnavailableError):
            async with bus.answer(subject, echo, queue="q"):
                pass

    async def test_who_answers_needs_a_queue(self, backend: Backend) -> None:
        bus = await backend.connect()
        with pytest.raises(InvalidArgumentError):
            async with bus.answer(bus.subjects.rpc("x"), echo, queue=""):
                pass

    # -------------------------------------------------------------------------------------------------- heartbeats

    async def test_heartbeats_are_watched_and_run_out(self, backend: Backend) -> None:
        bus, other = await backend.connect(), await backend.connect()
        one, two = bus.subjects.live(LIFE, W1), bus.subjects.live(LIFE, W2)
        await bus.beat(one, ttl_s=5, deadline=soon())
        await bus.beat(one, ttl_s=5, deadline=soon())
        newest = await bus.beat(one, ttl_s=5, deadline=soon())
        async with other.watch_live() as beats, soon().scope():
            first = await anext(beats)
            assert (first.worker, first.incarnation, first.seq, first.gone) == (W1, LIFE, newest, False)
            await bus.beat(two, ttl_s=1, deadline=soon())
            seen = [await anext(beats), await anext(beats)]
        assert [(beat.worker, beat.gone) for beat in seen] == [(W2, False), (W2, True)]

    async def test_a_renewed_heartbeat_does_not_run_out(self, backend: Backend) -> None:
        bus = await backend.connect()
        subject = bus.subjects.live(LIFE, W1)
        gone: list[Any] = []

        async def watch() -> None:
            async with bus.watch_live() as beats:
                async for beat in beats:
                    if beat.gone:
                        gone.append(beat)

        watching = asyncio.create_task(watch())
        for _ in range(6):
            await bus.beat(subject, ttl_s=1, deadline=soon())
            await asyncio.sleep(0.3)
        assert gone == []
        watching.cancel()
        await asyncio.wait({watching})

    async def test_a_heartbeat_counts_in_whole_seconds(self, backend: Backend) -> None:
        bus = await backend.connect()
        with pytest.raises(InvalidArgumentError):
            await bus.beat(bus.subjects.live(LIFE, W1), ttl_s=0, deadline=soon())

    # ------------------------------------------------------------------------------------------------------- blobs

    @pytest.mark.parametrize("nbytes", [0, 1, 3_000_000])
    async def test_a_blob_comes_back(self, backend: Backend, nbytes: int) -> None:
        bus = await backend.connect()
        body = IDS.hex(nbytes // 2 + 1).encode()[:nbytes]
        ref = await put_blob(bus, body, author=W1, deadline=soon())
        assert ref.digest == blake3(body).hexdigest()
        assert await get_blob(bus, ref, deadline=soon()) == body
        before = await bus.last_seq(deadline=soon())
        assert await put_blob(bus, body, author=W1, deadline=soon()) == ref
        assert await bus.last_seq(deadline=soon()) == before

    async def test_a_blob_is_put_and_read_in_pieces(self, backend: Backend) -> None:
        bus = await backend.connect()
        body = IDS.hex(1_500_000).encode()
        whole = await put_blob(bus, body, author=W1, deadline=soon())
        pieces = [body[at : at + 70_001] for at in range(0, len(body), 70_001)]
        assert await put_blob(bus, pieces, author=W1, deadline=soon()) == whole

        async def later() -> AsyncIterator[bytes]:
            for piece in (b"", *pieces, b""):
                yield piece

        assert await put_blob(bus, later(), author=W1, deadline=soon()) == whole
        read = [piece async for piece in read_blob(bus, whole, deadline=soon())]
        assert b"".join(read) == body
        assert len(read) > 1
        assert all(0 < len(piece) <= 512 * 1024 for piece in read)
        empty = await put_blob(bus, [], author=W1, deadline=soon())
        assert [piece async for piece in read_blob(bus, empty, deadline=soon())] == []

    async def test_a_blob_that_is_wrong_is_never_handed_out(self, backend: Backend) -> None:
        bus = await backend.connect()
        ref = await put_blob(bus, bytes(100_000), author=W1, deadline=soon())
        short = BlobRef(digest=ref.digest, nbytes=10, chunks=ref.chunks, author=W1)
        with pytest.raises(CorruptError):
            await get_blob(bus, short, deadline=soon())
        with pytest.raises(NotFoundError):
            await get_blob(bus, BlobRef(digest="00", nbytes=10, chunks=1, author=W1), deadline=soon())
        subject = bus.subjects.blob(ref.digest, 0, W1, stream=bus.name)
        await bus.publish(subject, b"no zlib", headers={MSG_ID: "other"}, deadline=soon())
        with pytest.raises(CorruptError):
            await get_blob(bus, ref, deadline=soon())

    # ----------------------------------------------------------------------------------------------------- streams

    async def test_provisioning_again_changes_nothing(self, backend: Backend) -> None:
        bus, other = await backend.connect(), await backend.connect()
        written = await fill(bus, 1)
        await asyncio.gather(*(provision(each, deadline=soon()) for each in (bus, other, bus)))
        assert await bus.last_seq(deadline=soon()) == written[0]

    async def test_sequences_start_high(self, backend: Backend) -> None:
        bus = await backend.connect()
        assert (await fill(bus, 1))[0] >= 1_700_000_000_000_000

    async def test_two_prefixes_do_not_meet(self, backend: Backend) -> None:
        bus, other = await backend.connect(), await backend.connect(prefix="other.tb")
        await fill(bus, 3)
        assert await other.last_on("other.tb.ev.>", deadline=soon()) is None
        written = await fill(other, 1, subject="other.tb.ev.replica.x.w1")
        async with other.read(Subjects("other.tb").facts, after=0) as reader:
            assert seqs(await take(reader, 1)) == written
