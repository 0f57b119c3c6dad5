"""One author's voice: a mutation returns once its own fold kept it, races have one winner, numbers stay in line."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest

from tensorbus.bus import Fault, MemoryCluster, _memory
from tensorbus.clock import Deadline
from tensorbus.errors import (
    ConflictError,
    DeadlineExceededError,
    FencedError,
    NotFoundError,
    OutOfSpaceError,
    UnavailableError,
)
from tensorbus.events import DestroyReason, KeyBound, aggregate_of
from tensorbus.feeds import Author, _author
from tensorbus.lifecycle import Directory, rules
from tests.unit.feeds.voices import feed, soon, voice
from tests.unit.lifecycle import history as h

T = TypeVar("T")
X_ASKED: dict[str, Any] = {"tenant": h.T, "artifact": h.X, "reason": DestroyReason.ASKED}


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> MemoryCluster:
    monkeypatch.setattr(_memory, "RESEND_S", 0.05)
    monkeypatch.setattr(_author, "LANE_RETRY_DELAY_S", 0.01)
    return MemoryCluster()


async def put(author: Author, fact: h.ArtifactPut | None = None) -> object:
    return await author.decide(lambda state: rules.birth(state, fact or h.put()), deadline=soon())


def bind(artifact: h.ArtifactId = h.X, *, rebind: bool = False) -> _author.Rule[None]:
    return lambda state: rules.bind(state, tenant=h.T, key="k", artifact=artifact, rebind=rebind)


async def stored_but_not_delivered(cluster: MemoryCluster, deciding: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Start a decision and return as soon as its fact is on the log, while all readers are still behind."""
    before = cluster.log.last_seq
    cluster.on_deliver = lambda message: 0.05
    task = asyncio.create_task(deciding)
    while cluster.log.last_seq == before:
        await asyncio.sleep(0)
    return task


# -- decide ------------------------------------------------------------------------------------------------------------


async def test_a_mutation_returns_when_the_own_fold_kept_it(cluster: MemoryCluster) -> None:
    async with voice(cluster) as author:
        seq, fact = await author.decide(lambda state: rules.birth(state, h.put()), deadline=soon())
        assert fact == h.put()
        assert author.feed.live.position == seq
        assert author.feed.live.state.artifact(h.T, h.X) is not None


async def test_an_answer_without_a_fact_comes_with_its_position(cluster: MemoryCluster) -> None:
    async with voice(cluster) as author:
        seq, _ = await author.decide(lambda state: rules.birth(state, h.put()), deadline=soon())
        assert await author.decide(lambda state: rules.birth(state, h.put()), deadline=soon()) == (
            seq,
            rules.Existing(h.X),
        )


async def test_a_rule_that_refuses_writes_nothing(cluster: MemoryCluster) -> None:
    async with voice(cluster) as author:
        before = cluster.log.last_seq
        with pytest.raises(NotFoundError):
            await author.decide(bind(), deadline=soon())
        assert cluster.log.last_seq == before


@pytest.mark.parametrize("replicated", [False, True])
async def test_of_two_authors_that_race_one_wins_and_the_other_decides_again(replicated: bool) -> None:
    cluster = MemoryCluster(replicated=replicated)
    async with voice(cluster, h.W1) as one, voice(cluster, h.W2) as two:
        for round_ in range(20):
            artifact = h.ArtifactId(f"a{round_}")
            outcomes = await asyncio.gather(put(one, h.put(artifact)), put(two, h.put(artifact)))
            facts = Counter(type(outcome).__name__ for _, outcome in outcomes)  # type: ignore[misc]
            assert facts == {"ArtifactPut": 1, "Existing": 1}
        assert one.feed.live.state.hash() == two.feed.live.state.hash()


async def test_of_many_authors_with_other_bytes_one_wins_and_all_others_conflict(cluster: MemoryCluster) -> None:
    async with voice(cluster, h.W1) as one, voice(cluster, h.W2) as two:
        asked = [put(author, h.put(digest=f"tb1:{n}")) for n, author in enumerate((one, two) * 4)]
        outcomes = await asyncio.gather(*asked, return_exceptions=True)
        assert sorted(type(outcome).__name__ for outcome in outcomes) == ["ConflictError"] * 7 + ["tuple"]
        assert one.feed.live.state.dropped == {}


async def test_an_author_that_decided_on_an_old_state_asks_its_rule_again(cluster: MemoryCluster) -> None:
    async with voice(cluster, h.W1) as one, voice(cluster, h.W2) as two:
        await put(one)
        await put(one, h.put(h.Y, h.D2))
        states: list[str | None] = []

        def rule(state: Directory) -> KeyBound | None:
            key = state.key(h.T, "k")
            states.append(key.artifact if key else None)
            return rules.bind(state, tenant=h.T, key="k", artifact=h.X, rebind=True)

        first = await stored_but_not_delivered(cluster, one.decide(bind(h.Y), deadline=soon()))
        await two.decide(rule, deadline=soon())
        await first
        assert states == [None, h.Y]


async def test_what_changed_between_rule_and_fold_is_decided_again(cluster: MemoryCluster) -> None:
    """The key's own aggregate did not move, so the server takes it: only the fold sees that the artifact has ended."""
    async with voice(cluster, h.W1) as one, voice(cluster, h.W2) as two:
        await put(one)
        await two.feed.reached(cluster.log.last_seq, deadline=soon())
        end = one.decide(lambda state: rules.destroy(state, **X_ASKED), deadline=soon())
        first = await stored_but_not_delivered(cluster, end)
        with pytest.raises(NotFoundError, match="it was destroyed"):
            await two.decide(bind(), deadline=soon())
        await first
        assert two.feed.live.state.dropped == {"destroyed": 1}


async def test_a_rule_at_odds_with_the_fold_fails_instead_of_filling_the_log(cluster: MemoryCluster) -> None:
    async with voice(cluster) as author:
        await put(author)
        with pytest.raises(ConflictError, match="disagree"):
            await author.decide(lambda _: h.put(), deadline=soon())


async def test_an_older_incarnation_is_fenced(cluster: MemoryCluster) -> None:
    async with voice(cluster, h.W1, h.FIRST) as old, voice(cluster, h.W1, h.SECOND) as new:
        with pytest.raises(FencedError, match="was replaced") as caught:
            await put(old)
        assert caught.value.details["incarnation"] == h.FIRST
        with pytest.raises(FencedError):
            await old.say(h.added, deadline=soon())
        await put(new)


async def test_the_unknown_outcome_of_an_append_is_found_on_the_log(cluster: MemoryCluster) -> None:
    lost = [Fault(lose_reply=True), Fault(lose_request=True), Fault(repeat=True)]
    async with voice(cluster) as author:
        cluster.on_publish = lambda subject, headers: lost.pop() if lost else Fault()
        for artifact in (h.X, h.Y):
            await put(author, h.put(artifact))
        assert lost == []
        assert author.feed.live.state.dropped == {}


async def test_an_author_that_met_an_unknown_fact_writes_nothing(cluster: MemoryCluster) -> None:
    async with voice(cluster) as author:
        subject = cluster.subjects.fact(aggregate_of(h.put()), h.W2)
        wire = {"Nats-Msg-Id": "1", "Tb-Type": "ArtifactSealed", "Tb-Schema": "1", "Tb-Author": "w2"}
        seq = cluster.store(subject, b"{}", {**wire, "Tb-Incarnation": "x"})
        await author.feed.reached(seq, deadline=soon())
        for asked in (put(author), author.say(h.added, deadline=soon())):
            with pytest.raises(UnavailableError, match="upgrade it"):
                await asked


async def test_a_paused_bus_costs_the_caller_its_deadline_and_no_more(cluster: MemoryCluster) -> None:
    async with voice(cluster) as author:
        cluster.pause()
        with pytest.raises(DeadlineExceededError):
            await author.decide(lambda state: rules.birth(state, h.put()), deadline=Deadline(0.1))
        cluster.resume()
        _, fact = await author.decide(lambda state: rules.birth(state, h.put()), deadline=soon())
        assert fact in (h.put(), rules.Existing(h.X))


# -- say ---------------------------------------------------------------------------------------------------------------


async def test_facts_are_said_one_after_the_other_under_running_numbers(cluster: MemoryCluster) -> None:
    async with voice(cluster) as author:
        await put(author)
        said = await asyncio.gather(*(author.say(h.added, deadline=soon()) for _ in range(10)))
        assert [fact.number for _, fact in said] == list(range(1, 11))  # type: ignore[union-attr]
        assert (author.feed.live.state.gaps, author.feed.live.state.dropped) == (0, {})


async def test_numbers_stay_in_line_across_unknown_outcomes(
    cluster: MemoryCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_author, "LANE_TRY_S", 0.08)
    faults = [Fault(lose_reply=True), Fault(lose_request=True), Fault(repeat=True), Fault()] * 6
    async with voice(cluster) as author:
        await put(author)
        cluster.on_publish = lambda subject, headers: faults.pop() if faults else Fault()
        said = await asyncio.gather(*(author.say(h.added, deadline=soon()) for _ in range(8)))
        assert [fact.number for _, fact in said] == list(range(1, 9))  # type: ignore[union-attr]
        assert (author.feed.live.state.gaps, author.feed.live.state.dropped) == (0, {})


async def test_a_fact_that_is_queued_is_said_although_its_caller_gave_up(cluster: MemoryCluster) -> None:
    async with voice(cluster) as author:
        await put(author)
        cluster.pause()
        with pytest.raises(DeadlineExceededError):
            await author.say(h.added, deadline=Deadline(0.02))
        cluster.resume()
        _, fact = await author.say(h.added, deadline=soon())
        assert fact == h.added(2)
        assert author.feed.live.state.sessions[h.W1].number == 2


async def test_a_fact_about_what_has_ended_is_a_conflict_and_takes_its_number(cluster: MemoryCluster) -> None:
    async with voice(cluster) as author:
        with pytest.raises(ConflictError, match="missing") as caught:
            await author.say(h.added, deadline=soon())
        assert caught.value.details["reason"] == "missing"
        await put(author)
        assert (await author.say(h.added, deadline=soon()))[1] == h.added(2)
        assert author.feed.live.state.gaps == 0


async def test_before_its_session_an_author_takes_no_number(cluster: MemoryCluster) -> None:
    """The fold would not count the first number, and see a hole before the second: degraded for ever."""
    async with voice(cluster, opened=False) as author:
        with pytest.raises(FencedError, match="no open session"):
            await author.say(h.added, deadline=soon())
        await author.decide(lambda _: h.opened(), deadline=soon())
        await put(author)
        await author.say(h.added, deadline=soon())
        assert author.feed.live.state.gaps == 0


async def test_a_bug_of_who_makes_a_fact_is_its_own_and_the_lane_goes_on(cluster: MemoryCluster) -> None:
    async with voice(cluster) as author:
        await put(author)

        def make(number: int) -> h.Event:
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await author.say(make, deadline=soon())
        assert (await author.say(h.added, deadline=soon()))[1] == h.added(1)


async def test_a_full_lane_refuses_and_a_closing_one_answers_all(
    cluster: MemoryCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_author, "LANE_WAITING_MAX", 2)
    async with voice(cluster) as author:
        cluster.pause()
        waiting = []
        for _ in range(3):  # one on its way, two in the lane
            waiting.append(asyncio.create_task(author.say(h.added, deadline=soon())))
            await asyncio.sleep(0.01)
        with pytest.raises(OutOfSpaceError):
            await author.say(h.added, deadline=soon())
    for outcome in await asyncio.gather(*waiting, return_exceptions=True):
        assert isinstance(outcome, FencedError)


async def test_two_feeds_of_one_log_agree(cluster: MemoryCluster) -> None:
    async with voice(cluster) as author:
        await put(author)
        seq, _ = await author.say(h.added, deadline=soon())
        async with feed(cluster) as late:
            assert late.live.position == seq
            assert late.live.state.hash() == author.feed.live.state.hash()
