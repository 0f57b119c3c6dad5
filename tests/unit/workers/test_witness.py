"""When a witness may call another dead: only while it proves that it would have heard it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorbus.bus import Heartbeat, MemoryCluster
from tensorbus.clock import NS_PER_S
from tensorbus.events import DestroyReason
from tensorbus.ids import Incarnation, WorkerId
from tensorbus.lifecycle import Session
from tensorbus.workers._witness import Hearing, Witness
from tests.unit.workers.rig import TENANT, rig, soon, until

TTL_S = 2.0
BEAT_S = 0.4


@dataclass
class HandClock:
    """Shows what the test sets."""

    now_s: float = 1000.0

    def now_ns(self) -> int:
        return int(self.now_s * NS_PER_S)

    def wall_ns(self) -> int:
        return self.now_ns()


def never(_seq: int) -> None:
    """No own heartbeat came back."""


def ns(seconds: float) -> int:
    return int(seconds * NS_PER_S)


def beats(start: float, stop: float, step: float = BEAT_S) -> Iterator[float]:
    at = start
    while at < stop:
        yield at
        at += step


def condemned(mine: Iterable[float], others: Iterable[float], *, until_s: float, look_s: float = 0.25) -> list[float]:
    """The looks at which a witness with a TTL of 2 s would end the other's session, given what came when."""
    hearing = Hearing(break_ns=ns(TTL_S / 2))
    last_ns = mine_ns = 0
    arrivals = [(at, 0) for at in mine] + [(at, 1) for at in others] + [(at, 2) for at in beats(0, until_s, look_s)]
    verdicts = []
    for at, who in sorted(arrivals):
        if who == 0:
            mine_ns = ns(at)
            hearing.heard_itself(mine_ns)
        elif who == 1:
            last_ns = ns(at)
        elif hearing.would_have_heard(other_ns=last_ns, sent_ns=mine_ns, now_ns=ns(at), ttl_ns=ns(TTL_S)):
            verdicts.append(at)
    return verdicts


def test_silence_longer_than_the_ttl_is_death_and_not_earlier() -> None:
    found = condemned(beats(0, 10), beats(0.1, 3), until_s=10)
    assert found
    assert 2.9 + TTL_S <= found[0] <= 2.9 + TTL_S + BEAT_S + 0.25


def test_who_beats_is_never_condemned() -> None:
    assert condemned(beats(0, 60), beats(0.3, 60, TTL_S / 2), until_s=60) == []


@pytest.mark.parametrize("pause_s", [0.5, 0.9, 1.5, 1.9, 2.5, 30.0])
def test_a_bus_that_pauses_for_both_ends_nobody(pause_s: float) -> None:
    """Everybody's heartbeats stop together and come back one by one, the other's last."""
    mine = [*beats(0, 5), *beats(5 + pause_s, 40 + pause_s)]
    others = [*beats(0.2, 5), *beats(5 + pause_s + 0.6, 40 + pause_s)]
    assert condemned(mine, others, until_s=40 + pause_s) == []


@pytest.mark.parametrize("pause_s", [0.9, 1.1, 5.0])
def test_a_witness_that_stood_still_starts_its_count_anew(pause_s: float) -> None:
    """It hears nothing while it is stopped, and afterwards reads what waited in its socket all at once."""
    mine = [*beats(0, 5), *beats(5 + pause_s, 12)]
    others = [*beats(0.2, 5), *beats(5 + pause_s, 12)]
    assert condemned(mine, others, until_s=12) == []


def test_a_death_within_a_pause_of_the_bus_is_seen_a_ttl_after_it() -> None:
    mine = [*beats(0, 5), *beats(10, 20)]
    found = condemned(mine, beats(0, 5), until_s=20)
    assert found
    assert 10 + TTL_S < found[0] <= 10 + TTL_S + BEAT_S + 0.25


@given(
    mine=st.lists(st.floats(0, 50), max_size=60),
    others=st.lists(st.floats(0, 50), max_size=30),
)
def test_nobody_is_condemned_without_a_whole_ttl_of_own_heartbeats_and_none_of_the_others(
    mine: list[float], others: list[float]
) -> None:
    for at in condemned(mine, others, until_s=50):
        silent_since = max([0.0, *(other for other in others if other <= at)])
        proof = sorted(own for own in mine if silent_since <= own <= at)
        assert proof
        assert proof[-1] - max(proof[0], silent_since) > 0
        # Walk back from the newest own heartbeat: no break, for longer than a TTL.
        start = proof[-1]
        for own in reversed([own for own in sorted(mine) if own <= at]):
            if start - own > TTL_S / 2 + 1e-6:
                break
            start = own
        assert proof[-1] - max(start, silent_since) > TTL_S - 1e-6


def session(worker: str, incarnation: str) -> Session:
    return Session(
        worker=WorkerId(worker),
        incarnation=Incarnation(incarnation),
        host="h",
        roles=("basic",),
        data="",
        control="",
        pool_bytes=0,
        ttl_ns=ns(TTL_S),
        pid=1,
        version="",
        opened=1,
        opened_ns=0,
    )


def test_a_reading_that_falls_behind_proves_less_than_it_seems_to() -> None:
    """Own heartbeats are heard for longer than a TTL, but all of them were sent within less."""
    hearing = Hearing(break_ns=ns(TTL_S / 2))
    for at in beats(0, 4, 0.8):
        hearing.heard_itself(ns(at))
    asked = {"other_ns": 0, "now_ns": ns(4), "ttl_ns": ns(TTL_S)}
    assert not hearing.would_have_heard(sent_ns=ns(1.9), **asked)
    assert not hearing.would_have_heard(sent_ns=None, **asked)
    assert hearing.would_have_heard(sent_ns=ns(2.1), **asked)


def test_a_witness_that_stood_still_after_its_proof_does_not_use_it_any_more() -> None:
    hearing = Hearing(break_ns=ns(TTL_S / 2))
    for at in beats(0, 4):
        hearing.heard_itself(ns(at))
    assert hearing.would_have_heard(other_ns=0, sent_ns=ns(3.9), now_ns=ns(4.2), ttl_ns=ns(TTL_S))
    assert not hearing.would_have_heard(other_ns=0, sent_ns=ns(3.9), now_ns=ns(9), ttl_ns=ns(TTL_S))


async def test_a_life_that_was_never_heard_counts_from_the_first_look() -> None:
    clock = HandClock()
    async with rig(MemoryCluster(), "gate", clock=clock) as gate:
        witness = Witness(gate.core.author, own_ttl_ns=ns(TTL_S), clock=clock, sent_ns=lambda _: clock.now_ns())
        own = Heartbeat("gate", gate.core.me.incarnation, 1, gone=False)
        other = session("w9", "aaaa")
        for _ in range(20):
            clock.now_s += BEAT_S
            witness._note(own)
        assert not witness._silent(other)  # the proof is long, and the other is met for the first time
        for _ in range(5):
            clock.now_s += BEAT_S
            witness._note(own)
            assert not witness._silent(other)
        clock.now_s += BEAT_S
        witness._note(own)
        assert witness._silent(other)
        assert not witness._silent(session("w9", "bbbb"))  # its next life starts from zero


async def test_an_expiry_marker_is_no_sign_of_life_and_no_proof_of_death() -> None:
    clock = HandClock()
    async with rig(MemoryCluster(), "gate", clock=clock) as gate:
        witness = Witness(gate.core.author, own_ttl_ns=ns(TTL_S), clock=clock, sent_ns=lambda _: clock.now_ns())
        witness._note(Heartbeat("w9", "aaaa", 1, gone=False))
        witness._note(Heartbeat("w9", "aaaa", 2, gone=True))
        assert not witness._silent(session("w9", "aaaa"))
        for _ in range(8):
            clock.now_s += BEAT_S
            witness._note(Heartbeat("gate", gate.core.me.incarnation, 1, gone=False))
            witness._note(Heartbeat("w9", "aaaa", 2, gone=True))
        assert witness._silent(session("w9", "aaaa"))


async def test_two_witnesses_end_a_silent_session_once_and_bury_what_was_lost_once() -> None:
    cluster = MemoryCluster()
    async with rig(cluster, "g1") as one, rig(cluster, "g2") as two:
        async with rig(cluster, "w1") as worker:
            taken = await worker.puts.take(worker.incoming(b"x" * 100, key="k"), deadline=soon())
        witnesses = [
            Witness(each.core.author, own_ttl_ns=ns(TTL_S), clock=each.core.clock, sent_ns=never) for each in (one, two)
        ]
        lost = one.core.state.sessions[WorkerId("w1")]
        before = cluster.log.last_seq
        await asyncio.gather(*(witness._end(lost) for witness in witnesses))
        assert cluster.log.last_seq == before + 1
        buried = [asyncio.create_task(witness.bury()) for witness in witnesses]
        await until(lambda: not one.core.state.artifacts[TENANT, taken.artifact].live)
        await until(lambda: not two.core.state.artifacts[TENANT, taken.artifact].live)
        await asyncio.sleep(0.05)
        assert cluster.log.last_seq == before + 2
        record = two.core.state.artifacts[TENANT, taken.artifact]
        assert record.reason is DestroyReason.LOST
        for task in buried:
            task.cancel()
        await asyncio.gather(*buried, return_exceptions=True)


async def test_what_comes_back_before_its_burial_is_left_alone() -> None:
    cluster = MemoryCluster()
    async with rig(cluster, "g1") as gate, rig(cluster, "w2") as other:
        async with rig(cluster, "w1") as worker:
            taken = await worker.puts.take(worker.incoming(b"x" * 100), deadline=soon())
        again = other.incoming(b"x" * 100)
        witness = Witness(gate.core.author, own_ttl_ns=ns(TTL_S), clock=gate.core.clock, sent_ns=never)
        await witness._end(gate.core.state.sessions[WorkerId("w1")])
        assert (await other.puts.take(again, deadline=soon())).artifact == taken.artifact
        await gate.core.feed.reached(cluster.log.last_seq, deadline=soon())
        await witness._bury_one(TENANT, taken.artifact)
        assert gate.core.state.artifacts[TENANT, taken.artifact].live


async def test_a_session_that_is_replaced_is_not_ended_for_its_former_life() -> None:
    cluster = MemoryCluster()
    async with rig(cluster, "g1") as gate:
        async with rig(cluster, "w1") as worker:
            await gate.core.feed.reached(cluster.log.last_seq, deadline=soon())
            former = gate.core.state.sessions[WorkerId("w1")]
            assert former.incarnation == worker.core.me.incarnation
        async with rig(cluster, "w1") as worker:
            witness = Witness(gate.core.author, own_ttl_ns=ns(TTL_S), clock=gate.core.clock, sent_ns=never)
            await gate.core.feed.reached(cluster.log.last_seq, deadline=soon())
            await witness._end(former)
            assert gate.core.state.is_live(WorkerId("w1"), worker.core.me.incarnation)
