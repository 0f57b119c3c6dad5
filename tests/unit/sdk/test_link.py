"""The connection of a bus, against a worker that misbehaves on request."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import tensorbus as tb
from tensorbus.sdk import AsyncBus
from tensorbus.transport import Reply, Request
from tests.unit.sdk.fake_worker import FakeWorker, fake_bus, fake_worker, info, place_of, until


def resolved(request: Request) -> Reply:
    return Reply({"artifact": info(), "position": 5})


async def test_a_question_is_repeated_when_the_connection_is_lost(home: Path) -> None:
    async with fake_bus(home) as (bus, fake):

        def first_hang_up(request: Request) -> Reply:
            if fake.count("resolve") == 1:
                fake.hang_up()
            return resolved(request)

        fake.answers["resolve"] = first_hang_up
        assert (await bus.artifact("k")).id == "tbr:1"
        assert fake.count("resolve") == 2


async def test_a_change_of_unknown_outcome_is_not_repeated(home: Path) -> None:
    async with fake_bus(home) as (bus, fake):

        def hang_up(request: Request) -> Reply:
            fake.hang_up()
            return Reply({"position": 1})

        fake.answers["unbind"] = hang_up
        with pytest.raises(tb.UnavailableError, match="unknown"):
            await bus.unbind("k")
        assert fake.count("unbind") == 1


async def test_an_error_of_the_workers_is_no_lost_connection(home: Path) -> None:
    async with fake_bus(home) as (bus, fake):

        def refuse(request: Request) -> Reply:
            raise tb.UnavailableError("no replica can be reached", artifact="a")

        fake.answers["resolve"] = refuse
        with pytest.raises(tb.UnavailableError, match="no replica") as raised:
            await bus.artifact("k")
        assert raised.value.details == {"artifact": "a"}
        assert fake.count("resolve") == 1


async def test_followed_names_are_asked_again_after_a_lost_connection(home: Path) -> None:
    async with fake_bus(home) as (bus, fake):
        fake.answers["resolve"] = resolved
        for _ in range(3):
            await bus.artifact("k")
        assert fake.count("resolve") == 1
        fake.hang_up()
        await until(lambda: not bus._core.link.connected)
        await bus.artifact("k")
        assert fake.count("resolve") == 2


async def test_a_push_changes_what_is_known(home: Path) -> None:
    async with fake_bus(home) as (bus, fake):
        fake.answers["resolve"] = resolved
        await bus.artifact("k")
        item = {"by": "any", "ref": "k", "artifact": info("tbr:2"), "error": None}
        await fake.push("changed", {"position": 6, "items": [item]})
        await until(lambda: bus._core.followed.look(("any", "k")).position == 6)
        assert (await bus.artifact("k")).id == "tbr:2"
        await fake.push("changed", {"position": "six"})
        await fake.push("unheard-of", {})
        assert (await bus.artifact("k", at_least=5)).id == "tbr:2"
        assert fake.count("resolve") == 1
        await bus.artifact("k", at_least=7)
        assert fake.asked[-1][1]["at_least"] == 7


async def test_a_call_that_takes_too_long_says_so(home: Path) -> None:
    async with fake_bus(home) as (bus, fake):

        async def never(request: Request) -> Reply:
            await asyncio.Event().wait()
            return Reply()

        fake.answers["resolve"] = never
        with pytest.raises(tb.DeadlineExceededError, match="'k'"):
            await bus.artifact("k", timeout=0.05)
        with pytest.raises(tb.InvalidArgumentError, match="timeout"):
            await bus.artifact("k", timeout=True)


@pytest.mark.parametrize("answer", [{}, {"artifact": {"artifact": 1}, "position": 1}, {"artifact": info()}])
async def test_an_answer_that_is_none_is_an_error(home: Path, answer: dict[str, object]) -> None:
    async with fake_bus(home) as (bus, fake):
        fake.answers["resolve"] = lambda request: Reply(answer)
        with pytest.raises(tb.CorruptError):
            await bus.artifact("k")


async def test_nobody_there_is_said_at_once_and_later_waited_for(home: Path) -> None:
    bus = AsyncBus(place_of(home))
    with pytest.raises(tb.UnavailableError, match="tensorbus up"):
        await bus.connect()
    async with fake_worker(home) as fake:
        fake.answers["resolve"] = resolved
        await bus.artifact("k")
    await until(lambda: not bus._core.link.connected)
    waiting = asyncio.ensure_future(bus.artifact("k"))
    async with fake_worker(home) as again:
        again.answers["resolve"] = resolved
        assert (await waiting).id == "tbr:1"
    await bus.close()


async def test_closing_ends_calls_that_wait(home: Path) -> None:
    async with fake_bus(home) as (bus, fake):

        async def never(request: Request) -> Reply:
            await asyncio.Event().wait()
            return Reply()

        fake.answers["stats"] = never
        waiting = asyncio.ensure_future(bus.stats())
        await until(lambda: fake.count("stats"))
        await bus.close()
        with pytest.raises((tb.UnavailableError, tb.InvalidArgumentError)):
            await waiting


async def test_memory_is_waited_for_while_others_give_it_back(home: Path) -> None:
    async with fake_bus(home) as (bus, fake):

        def full(request: Request) -> Reply:
            raise tb.OutOfSpaceError("full", retiring_bytes=4096 if fake.count("alloc") < 3 else 0)

        fake.answers["alloc"] = full
        with pytest.raises(tb.OutOfSpaceError):
            await bus.empty(4)
        assert fake.count("alloc") == 3


async def test_a_segment_that_is_not_kept_mapped_is_given_back(home: Path) -> None:
    async with fake_bus(home) as (bus, fake):

        def mapped(request: Request) -> Reply:
            if request.args["fresh"]:
                raise tb.OutOfSpaceError("full")
            return Reply({"segment": 7, "generation": 2, "nbytes": 16, "mapped": True})

        fake.answers["alloc"] = mapped
        fake.answers["abort"] = lambda request: Reply()
        with pytest.raises(tb.OutOfSpaceError):
            await bus.empty(4)
        await until(lambda: ("abort", {"segment": 7, "generation": 2}) in fake.asked)


def sees_all(fake: FakeWorker, versions: dict[int, bool]) -> None:
    """Let the fake answer about a series of versions, some of which are gone."""

    def series(request: Request) -> Reply:
        after = int(str(request.args["after"]))
        new = [[number, info(f"tbr:{number}")] for number, there in versions.items() if there and number > after]
        gone = [number for number, there in versions.items() if not there and number > after]
        return Reply({"name": "s", "last": max(versions, default=0), "new": new, "gone": gone, "position": 9})

    fake.answers["series"] = series


async def test_a_gap_in_the_pushes_is_asked_for(home: Path) -> None:
    async with fake_bus(home) as (bus, fake):
        versions = {1: True}
        sees_all(fake, versions)
        subscription = bus.subscribe("s", start="earliest", timeout=10)
        assert (await subscription.next()).version == 1
        versions |= {2: True, 3: False, 4: True}
        news = {"name": "s", "last": 4, "new": [[4, info("tbr:4")]], "gone": [], "position": 10}
        await fake.push("series", news)
        assert [(await subscription.next()).version for _ in range(2)] == [2, 4]
        assert subscription.gone == 1
        await fake.push("series", {**news, "last": 5, "new": [[5, info("tbr:5")]]})
        await fake.push("series", {**news, "last": 5, "new": [[5, info("tbr:5")]]})
        assert (await subscription.next()).version == 5
        assert fake.count("series") == 2


async def test_versions_published_while_the_connection_was_lost_are_not_missed(home: Path) -> None:
    async with fake_bus(home) as (bus, fake):
        versions = {1: True}
        sees_all(fake, versions)
        subscription = bus.subscribe("s", start="earliest", timeout=10)
        assert (await subscription.next()).version == 1
        fake.hang_up()
        versions[2] = True
        assert (await subscription.next()).version == 2
