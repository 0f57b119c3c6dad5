"""The lease and the batches of a shard: no stale fact is seen, no promise broken, and every index is the stream's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest

from tensorbus.bus import Appended, Conflict
from tensorbus.clock import Deadline
from tensorbus.events import Headers, PagesChanged
from tensorbus.feeds import PageLog, _shard_replay, replay_shard
from tensorbus.ids import Incarnation, WorkerId
from tensorbus.lifecycle import ShardState, Verdict
from tensorbus.testing import World, disturb, search, sweep
from tests.simulation.shards import ALL, SHARD, Shared, SimFollower, SimHome, SimKeeper, slots_of
from tests.sizes import SIZES

Scenario = Callable[[World], Coroutine[Any, Any, None]]

HOMES = ("h0", "h1", "h2")
SETTLE_S = 60.0
REACHED = (
    "grant", "grant refused", "grant without comparing", "took over", "fenced", "batch", "promised",
    "snapshot", "confirmed", "purge", "defied", "late words", "dropped.fenced",
    "fault.loss", "fault.lost_ack", "fault.duplicate", "fault.slow",
    "fault.partition", "fault.pause", "fault.bus_pause", "fault.crash",
)  # fmt: skip


def shards(*, for_s: float = 60.0, lose: bool = False) -> Scenario:
    """Three homes take one shard from each other; a keeper confirms and purges; a reader follows; all faults come.

    Args:
        lose: Whether the stream of pages loses its tail now and then, and nobody follows it.
    """

    async def scenario(world: World) -> None:
        shared = Shared.of(world)
        followers: list[SimFollower] = []

        async def home(node: Any) -> None:
            await SimHome(shared, node, honest=lose or node.name == "h0").run()

        async def follow(node: Any) -> None:
            followers.append(SimFollower(shared, node))
            await followers[-1].run()

        world.always("the grant in force stays", shared.truth.check_lease)
        for name in HOMES:
            world.node(name).start(home)
        if lose:
            world.node("bus").background(losing(shared), name="losing")
        else:
            world.node("s0").start(lambda node: SimKeeper(shared, node).run())
            world.node("r0").start(follow)
        await disturb(world, [*HOMES, "s0", "r0"] if not lose else list(HOMES), for_s=for_s)
        for name in HOMES:
            world.crash(name)
        await asyncio.sleep(SETTLE_S)  # what is on its way arrives, or never will
        await check(shared, None if lose else followers[-1])

    return scenario


async def losing(shared: Shared) -> None:
    rng = shared.world.rng("losing")
    for _ in range(4):
        await asyncio.sleep(rng.uniform(5.0, 20.0))
        shared.truth.lose_pages(rng.randint(1, 12))


async def check(shared: Shared, follower: SimFollower | None) -> None:
    """Every way to make the index gives what the plain fold has."""
    truth, pages = shared.truth, shared.bus.pages
    last = await pages.last_on(ALL, deadline=Deadline(20))
    if last is None:
        return
    state = await replay_shard(pages, SHARD, upto=last.seq, deadline=Deadline(20))
    assert slots_of(state) == truth.visible, "a replay differs from what was stored"
    assert (state.token, state.number) == (truth.holder[2], truth.number)
    if follower is not None:
        await shared.world.eventually("the reader is there", lambda: follower.state.seq >= last.seq, within_s=SETTLE_S)
        assert follower.state.state_hash == state.state_hash, "the live index differs from a replay"


def test_no_stale_fact_is_seen_and_no_promise_is_broken() -> None:
    sweep(shards(), SIZES.sim_seeds, check_every=20).check(covers=REACHED)


def test_nor_when_the_stream_loses_its_tail() -> None:
    sweep(shards(lose=True), SIZES.sim_seeds, check_every=20).check(
        covers=("took over", "promised", "fault.loss_of_pages", "fenced")
    )


# -- planted bugs -----------------------------------------------------------------------------------------------------

Bug = Callable[[ExitStack], None]


def replaced(target: Any, name: str, wrong: Any) -> Bug:
    return lambda stack: stack.enter_context(patch.object(target, name, wrong))


async def _takes_the_newer_token_for_its_own(
    self: PageLog, batch: PagesChanged, headers: Headers
) -> Appended | Conflict | None:
    outcome = await right_try(self, batch, headers)
    if isinstance(outcome, Conflict):
        return await right_try(self, batch, replace(headers, token=outcome.seq, expected=outcome.seq))
    return outcome


right_try = PageLog._try


async def _counts_what_nobody_answered(
    self: PageLog, batch: PagesChanged, headers: Headers
) -> Appended | Conflict | None:
    outcome = await right_try(self, batch, headers)
    return Appended(self.position) if outcome is None else outcome


async def _does_not_look_whether_the_stream_is_the_same(self: PageLog) -> None:
    self._doubted = False


def _believes_the_token_alone(self: ShardState, worker: WorkerId, incarnation: Incarnation, token: int) -> bool:
    return self.lease is not None and self.lease.token == token


def _believes_the_worker_alone(self: ShardState, worker: WorkerId, incarnation: Incarnation, token: int) -> bool:
    return self.lease is not None and self.lease.holder == worker


def _grants_need_a_comparison(self: ShardState, recorded: Any, author: WorkerId) -> Verdict:
    if recorded.headers.expected != self.token:
        return self._drop("sequence")
    return right_granted(self, recorded, author)


right_granted = ShardState._granted


async def _believes_every_snapshot(state: ShardState, batch: Any, begun_by: int | None) -> bool:
    for message in batch:
        state.apply(_shard_replay.decode_pages(message))
    return True


def _begins_at_one(self: PageLog, *args: Any, **kwargs: Any) -> None:
    right_init(self, *args, **{**kwargs, "number": 0})


right_init = PageLog.__init__

BUGS: dict[str, tuple[Bug, bool]] = {
    "a fenced home goes on under the newer token": (
        replaced(PageLog, "_try", _takes_the_newer_token_for_its_own),
        False,
    ),
    "an unknown outcome counts as stored": (replaced(PageLog, "_try", _counts_what_nobody_answered), False),
    "a token can be copied": (replaced(ShardState, "holds", _believes_the_token_alone), False),
    "a former grant of the same worker still counts": (
        replaced(ShardState, "holds", _believes_the_worker_alone),
        False,
    ),
    "a grant counts only with the right header": (
        replaced(ShardState, "_granted", _grants_need_a_comparison),
        False,
    ),
    "a snapshot counts whoever took it": (replaced(_shard_replay, "_apply", _believes_every_snapshot), False),
    "a new home numbers from the beginning": (replaced(PageLog, "__init__", _begins_at_one), False),
    "a stream that lost its tail is not noticed": (
        replaced(PageLog, "_check", _does_not_look_whether_the_stream_is_the_same),
        True,
    ),
}


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found(name: str) -> None:
    plant, lose = BUGS[name]
    with ExitStack() as stack:
        plant(stack)
        found = search(shards(lose=lose), 60, check_every=50)
    assert found is not None, f"60 seeds did not find that {name}"
