"""Taking bytes in: one outcome for each put, and memory that comes back when it has none."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from tensorbus.bus import Fault, MemoryCluster
from tensorbus.clock import Deadline
from tensorbus.errors import (
    ConflictError,
    DeadlineExceededError,
    FencedError,
    InvalidArgumentError,
    TensorbusError,
)
from tensorbus.events import DestroyReason
from tensorbus.ids import ArtifactId
from tensorbus.lifecycle import rules
from tensorbus.workers._puts import Taken
from tensorbus.workers._store import Held
from tests.unit.workers.rig import TENANT, Rig, rig, soon, until

A, B = b"a" * 5000, b"b" * 5000
PAGES = 8192


async def take(worker: Rig, data: bytes, deadline: Deadline | None = None, **options: object) -> Taken:
    return await worker.puts.take(worker.incoming(data, **options), deadline=deadline or soon())  # type: ignore[arg-type]  # passed on


async def destroy(worker: Rig, artifact: str) -> None:
    await worker.core.author.decide(
        lambda state: rules.destroy(state, tenant=TENANT, artifact=ArtifactId(artifact), reason=DestroyReason.ASKED),
        deadline=soon(),
    )


async def test_equal_bytes_are_one_artifact_and_held_once() -> None:
    async with rig(MemoryCluster()) as worker:
        first = await take(worker, A, key="k1")
        second = await take(worker, A, key="k2")
        assert (first.existed, second.existed) == (False, True)
        assert first.artifact == second.artifact
        assert worker.busy_bytes == PAGES
        assert sorted(worker.core.state.artifacts[TENANT, first.artifact].keys) == ["k1", "k2"]


async def test_a_given_id_takes_equal_bytes_again_and_refuses_others_with_their_memory_given_back() -> None:
    async with rig(MemoryCluster()) as worker:
        first = await take(worker, A, given="mine")
        assert await take(worker, A, given="mine") == Taken(first.artifact, first.position, True)
        with pytest.raises(ConflictError, match="'mine' is taken by other bytes"):
            await take(worker, B, given="mine")
        assert worker.busy_bytes == PAGES
        assert worker.bytes_of("mine") == A


async def test_many_puts_of_one_id_at_once_have_one_winner_and_the_others_join_it() -> None:
    async with rig(MemoryCluster()) as worker:
        taken = await asyncio.gather(*(take(worker, A, given="mine") for _ in range(16)))
        assert [each.existed for each in taken].count(False) == 1
        assert {each.artifact for each in taken} == {"mine"}
        assert worker.busy_bytes == PAGES


async def test_many_puts_of_other_bytes_under_one_id_have_one_winner_and_the_others_conflict() -> None:
    async with rig(MemoryCluster()) as worker:
        puts = [take(worker, bytes([n]) * 5000, given="mine") for n in range(16)]
        outcomes = await asyncio.gather(*puts, return_exceptions=True)
        won = [n for n, each in enumerate(outcomes) if isinstance(each, Taken)]
        assert len(won) == 1
        assert all(isinstance(each, Taken | ConflictError) for each in outcomes)
        assert worker.bytes_of("mine") == bytes(won) * 5000
        assert worker.busy_bytes == PAGES


@pytest.mark.parametrize("digest", [True, False])
async def test_two_workers_race_for_an_id_with_equal_bytes_and_both_hold_a_replica(digest: bool) -> None:
    cluster = MemoryCluster()
    async with rig(cluster, "w1") as one, rig(cluster, "w2") as two:
        for n in range(20):
            name = f"mine{n}"
            puts = [take(worker, A, given=name, digest=digest) for worker in (one, two, one, two)]
            taken = await asyncio.gather(*puts)
            assert [each.existed for each in taken].count(False) == 1
            await one.core.feed.reached(cluster.log.last_seq, deadline=soon())
            replicas = one.core.state.artifacts[TENANT, ArtifactId(name)].replicas
            assert sorted(replica.worker for replica in replicas) == ["w1", "w2"]
            assert one.bytes_of(name) == two.bytes_of(name) == A
        assert one.busy_bytes == two.busy_bytes == 20 * PAGES


@pytest.mark.parametrize("digest", [True, False])
async def test_two_workers_race_for_an_id_with_other_bytes_and_one_wins(digest: bool) -> None:
    cluster = MemoryCluster()
    async with rig(cluster, "w1") as one, rig(cluster, "w2") as two:
        for n in range(20):
            name = f"mine{n}"
            puts = [take(one, A, given=name, digest=digest), take(two, B, given=name, digest=digest)]
            outcomes = await asyncio.gather(*puts, return_exceptions=True)
            kinds = sorted(type(each).__name__ for each in outcomes)
            assert kinds == ["ConflictError", "Taken"], outcomes
            winner, loser, data = (one, two, A) if isinstance(outcomes[0], Taken) else (two, one, B)
            assert winner.bytes_of(name) == data
            assert loser.store.get(TENANT, ArtifactId(name)) is None
        assert (one.busy_bytes + two.busy_bytes) == 20 * PAGES


async def test_under_a_taken_id_the_digest_is_computed_before_the_answer() -> None:
    async with rig(MemoryCluster()) as worker:
        first = await take(worker, A, given="mine", digest=False)
        assert (await take(worker, A, given="mine", digest=False)).existed
        record = worker.core.state.artifacts[TENANT, first.artifact]
        assert record.digest is not None
        with pytest.raises(ConflictError):
            await take(worker, B, given="mine", digest=False)
        assert worker.busy_bytes == PAGES


async def test_a_later_digest_links_a_random_id_to_its_content() -> None:
    async with rig(MemoryCluster()) as worker:
        taken = await take(worker, A, digest=False)
        assert taken.artifact.startswith("tbr:")
        record = worker.core.state.artifacts[TENANT, taken.artifact]
        await until(lambda: record.digest is not None, "the digest")
        again = await take(worker, A)
        assert (again.artifact, again.existed) == (taken.artifact, True)
        await until(lambda: worker.busy_bytes == PAGES, "one copy")


async def test_a_bound_key_refuses_the_put_before_anything_is_said() -> None:
    cluster = MemoryCluster()
    async with rig(cluster) as worker:
        first = await take(worker, A, key="k")
        before = cluster.log.last_seq
        with pytest.raises(ConflictError, match="rebind=True"):
            await take(worker, B, key="k")
        assert cluster.log.last_seq == before
        assert worker.busy_bytes == PAGES
        moved = await take(worker, B, key="k", rebind=True)
        assert worker.core.state.keys[TENANT, "k"].artifact == moved.artifact != first.artifact


@pytest.mark.parametrize("where", ["same worker", "two workers"])
async def test_a_key_that_another_took_meanwhile_leaves_nothing_half_done(where: str) -> None:
    cluster = MemoryCluster()
    async with rig(cluster, "w1") as one, rig(cluster, "w2") as two:
        other = one if where == "same worker" else two
        for n in range(20):
            key = f"k{n}"
            data = [bytes([n, 1]) * 2500, bytes([n, 2]) * 2500]
            outcomes = await asyncio.gather(
                take(one, data[0], key=key), take(other, data[1], key=key), return_exceptions=True
            )
            kinds = sorted(type(each).__name__ for each in outcomes)
            assert kinds == ["ConflictError", "Taken"], outcomes
            for worker in (one, two):
                await worker.core.feed.reached(cluster.log.last_seq, deadline=soon())
        live = [record for record in one.core.state.artifacts.values() if record.live]
        assert len(live) == 20
        assert all(len(record.keys) == 1 for record in live)
        await until(lambda: one.busy_bytes + two.busy_bytes == 20 * PAGES, "memory back")
        lost = [record for record in one.core.state.artifacts.values() if not record.live]
        assert all(record.reason is DestroyReason.ABANDONED for record in lost)


async def test_a_put_that_joins_an_artifact_does_not_destroy_it_when_its_key_is_refused() -> None:
    cluster = MemoryCluster()
    async with rig(cluster, "w1") as one, rig(cluster, "w2") as two:
        theirs = await take(one, A, key="theirs")
        await take(one, B, key="taken")
        with pytest.raises(ConflictError):
            await take(two, A, key="taken")
        await one.core.feed.reached(cluster.log.last_seq, deadline=soon())
        assert one.core.state.artifacts[TENANT, theirs.artifact].live


async def test_an_id_whose_artifact_ended_is_never_given_to_other_bytes() -> None:
    async with rig(MemoryCluster()) as worker:
        await take(worker, A, given="mine")
        await destroy(worker, "mine")
        assert worker.busy_bytes == 0
        with pytest.raises(ConflictError, match="never reused"):
            await take(worker, B, given="mine")
        assert worker.busy_bytes == 0
        assert not (await take(worker, A, given="mine")).existed
        assert worker.bytes_of("mine") == A


async def test_an_id_of_the_system_cannot_be_given() -> None:
    async with rig(MemoryCluster()) as worker:
        with pytest.raises(InvalidArgumentError):
            await take(worker, A, given="tb1:" + "0" * 64)
        assert worker.busy_bytes == 0


async def test_a_registration_of_known_bytes_is_refused_and_gives_its_memory_back() -> None:
    async with rig(MemoryCluster()) as worker:
        await take(worker, A)
        with pytest.raises(ConflictError, match="a registration cannot"):
            await take(worker, A, lease_s=10.0)
        assert worker.busy_bytes == PAGES


# -- faults of the bus ------------------------------------------------------------------------------------------------


async def test_bytes_stay_while_the_outcome_is_unknown_and_serve_if_the_fact_came() -> None:
    cluster = MemoryCluster()
    async with rig(cluster) as worker:
        incoming = worker.incoming(A)
        cluster.pause()
        with pytest.raises(DeadlineExceededError):
            await worker.puts.take(incoming, deadline=Deadline(0.05))
        assert worker.busy_bytes == PAGES
        artifact = incoming.manifest.content_id()
        cluster.resume()
        await until(lambda: (TENANT, artifact) in worker.core.state.artifacts, "the fact that was under way")
        await asyncio.sleep(0.1)
        assert worker.core.state.artifacts[TENANT, artifact].live
        assert worker.bytes_of(artifact) == A


async def test_bytes_go_once_it_is_known_that_the_fact_never_came() -> None:
    cluster = MemoryCluster()
    async with rig(cluster) as worker:
        cluster.on_publish = lambda _subject, _headers: Fault(lose_request=True)
        with pytest.raises(DeadlineExceededError):
            await take(worker, A, deadline=Deadline(0.05))
        assert worker.busy_bytes == PAGES
        cluster.on_publish = None
        await until(lambda: worker.busy_bytes == 0, "memory back")
        assert len(worker.store) == 0


async def test_bytes_under_an_unknown_outcome_are_never_served_for_those_of_a_later_put() -> None:
    cluster = MemoryCluster()
    async with rig(cluster) as worker:
        cluster.on_publish = lambda _subject, _headers: Fault(lose_request=True)
        with pytest.raises(DeadlineExceededError):
            await take(worker, A, given="mine", deadline=Deadline(0.05))
        cluster.on_publish = None
        await take(worker, B, given="mine")
        assert worker.bytes_of("mine") == B
        await until(lambda: worker.busy_bytes == PAGES, "memory of the first put back")
        assert worker.bytes_of("mine") == B


async def test_a_refused_fact_gives_the_memory_back() -> None:
    cluster = MemoryCluster()
    async with rig(cluster) as worker:
        cluster.on_publish = lambda _subject, _headers: Fault(refuse=True)
        with pytest.raises(TensorbusError):
            await take(worker, A)
        cluster.on_publish = None
        await until(lambda: worker.busy_bytes == 0, "memory back")
        assert len(worker.store) == 0


async def test_lost_answers_and_repeats_do_not_make_two_artifacts_or_lose_one() -> None:
    cluster = MemoryCluster()
    async with rig(cluster) as worker:
        seen: dict[str, int] = {}

        def fault(_subject: str, headers: Mapping[str, str]) -> Fault:
            event = headers["Nats-Msg-Id"]
            seen[event] = seen.get(event, 0) + 1
            return Fault(lose_reply=seen[event] == 1 and len(seen) % 3 == 0, repeat=len(seen) % 2 == 0)

        cluster.on_publish = fault
        taken = await asyncio.gather(*(take(worker, bytes([n]) * 10, key=f"k{n}") for n in range(12)))
        cluster.on_publish = None
        assert len({each.artifact for each in taken}) == 12
        for n in range(12):
            bound = worker.core.state.keys[TENANT, f"k{n}"].artifact
            assert bound is not None
            assert worker.bytes_of(bound) == bytes([n]) * 10


async def test_a_fenced_worker_keeps_nothing_of_a_put() -> None:
    cluster = MemoryCluster()
    async with rig(cluster, "w1") as old:
        await take(old, A)
        async with rig(cluster, "w1") as new:
            await old.core.feed.reached(cluster.log.last_seq, deadline=soon())
            incoming = old.incoming(B)
            with pytest.raises(FencedError):
                await old.puts.take(incoming, deadline=soon())
            assert old.store.get(TENANT, incoming.manifest.content_id()) is None
            assert not any(record.live and record.replicas for record in new.core.state.artifacts.values())


async def test_a_replica_that_is_said_and_not_held_is_disowned() -> None:
    cluster = MemoryCluster()
    async with rig(cluster, "w1") as one, rig(cluster, "w2") as two:
        taken = await take(one, A)
        await take(two, A)
        held = two.store.get(TENANT, taken.artifact)
        assert held is not None
        two.store.drop(TENANT, taken.artifact)  # as after a put that was given up and counted all the same
        await take(one, B, key="k")  # any change elsewhere is none of its business
        await two.core.author.decide(
            lambda state: rules.bind(state, tenant=TENANT, key="x", artifact=taken.artifact, rebind=False),
            deadline=soon(),
        )
        await one.puts.add_replica(
            one.store.get(TENANT, taken.artifact),  # type: ignore[arg-type]  # it is there
            deadline=soon(),
        )
        record = two.core.state.artifacts[TENANT, taken.artifact]
        await until(lambda: [replica.worker for replica in record.replicas] == ["w1"], "the end of w2's replica")


async def test_a_replica_of_an_artifact_that_ended_meanwhile_gives_its_memory_back() -> None:
    cluster = MemoryCluster()
    async with rig(cluster, "w1") as one, rig(cluster, "w2") as two:
        taken = await take(one, A)
        await two.core.feed.reached(cluster.log.last_seq, deadline=soon())
        incoming = two.incoming(A)
        held = Held(TENANT, taken.artifact, incoming.parts, incoming.layout, incoming.manifest)
        await destroy(one, taken.artifact)
        with pytest.raises(ConflictError):
            await two.puts.add_replica(held, deadline=soon())
        await until(lambda: two.busy_bytes == 0, "memory back")
        assert not (await take(two, B)).existed


async def test_what_loses_the_race_for_an_id_is_at_no_time_held_under_it() -> None:
    """A reader of this host could be given the loser's bytes for the winner's."""
    cluster = MemoryCluster()
    async with rig(cluster, "w1") as one, rig(cluster, "w2") as two:
        for n in range(20):
            name = ArtifactId(f"mine{n}")
            seen: list[tuple[bool, str]] = []

            def look(worker: Rig, name: ArtifactId = name, seen: list[tuple[bool, str]] = seen) -> None:
                record = worker.core.state.artifacts.get((TENANT, name))
                if worker.store.get(TENANT, name) is not None:
                    data = worker.bytes_of(name)
                    assert record is not None
                    seen.append((record.digest == worker.store.get(TENANT, name).manifest.content_id(), data[:1].hex()))

            async def watch() -> None:
                while True:
                    look(one)
                    look(two)
                    await asyncio.sleep(0)

            watching = asyncio.create_task(watch())
            await asyncio.gather(take(one, A, given=name), take(two, B, given=name), return_exceptions=True)
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            assert seen
            assert all(right for right, _ in seen)


@pytest.mark.parametrize("held_before", [True, False])
async def test_a_put_that_races_with_the_end_of_its_equal_is_held(held_before: bool) -> None:
    cluster = MemoryCluster()
    async with rig(cluster, "w1") as one, rig(cluster, "w2") as two:
        for n in range(30):
            data = bytes([n]) * 5000
            first = await take(one if held_before else two, data)
            await one.core.feed.reached(cluster.log.last_seq, deadline=soon())
            outcome, _ = await asyncio.gather(take(one, data), destroy(two, first.artifact), return_exceptions=True)
            await one.core.feed.reached(cluster.log.last_seq, deadline=soon())
            await asyncio.sleep(0.01)
            record = one.core.state.artifacts[TENANT, first.artifact]
            if isinstance(outcome, Taken) and not outcome.existed:
                assert record.live
                assert one.bytes_of(first.artifact) == data
            await destroy(one, first.artifact)
        await until(lambda: one.busy_bytes + two.busy_bytes == 0, "memory back")


async def test_a_join_whose_key_was_taken_meanwhile_keeps_its_replica_readable() -> None:
    cluster = MemoryCluster()
    async with rig(cluster, "w1") as one, rig(cluster, "w2") as two:
        for n in range(20):
            data, key = bytes([n, 1]) * 2500, f"k{n}"
            first = await take(one, data)
            outcomes = await asyncio.gather(
                take(two, data, key=key), take(one, bytes([n, 2]) * 2500, key=key), return_exceptions=True
            )
            await two.core.feed.reached(cluster.log.last_seq, deadline=soon())
            record = two.core.state.artifacts[TENANT, first.artifact]
            assert record.live, outcomes
            if any(replica.worker == "w2" for replica in record.replicas):
                assert two.bytes_of(first.artifact) == data


async def test_two_copies_that_arrive_at_once_are_held_once() -> None:
    cluster = MemoryCluster()
    async with rig(cluster, "w1") as one, rig(cluster, "w2") as two:
        taken = await take(one, A)
        await two.core.feed.reached(cluster.log.last_seq, deadline=soon())
        copies = []
        for _ in range(2):
            incoming = two.incoming(A)
            copies.append(Held(TENANT, taken.artifact, incoming.parts, incoming.layout, incoming.manifest))
        added = await asyncio.gather(*(two.puts.add_replica(held, deadline=soon()) for held in copies))
        assert added[0][0] is added[1][0]
        assert two.busy_bytes == PAGES
        assert two.bytes_of(taken.artifact) == A


async def test_a_copy_that_does_not_count_takes_nothing_of_the_ids_next_life(monkeypatch: pytest.MonkeyPatch) -> None:
    async with rig(MemoryCluster()) as worker:
        taken = await worker.puts.take(worker.incoming(A), deadline=soon())
        living = worker.store.get(TENANT, taken.artifact)
        assert living is not None
        late = worker.incoming(A)
        copy = Held(TENANT, taken.artifact, late.parts, late.layout, late.manifest)
        worker.store._held.pop(living.where)

        async def say(*_args: object, **_options: object) -> None:
            worker.store.add(living, life=living.life)
            raise ConflictError("ReplicaAdded did not count: destroyed")

        monkeypatch.setattr(worker.core.author, "say", say)
        with pytest.raises(ConflictError):
            await worker.puts.add_replica(copy, deadline=soon())
        assert worker.store.get(TENANT, taken.artifact) is living
        assert worker.bytes_of(taken.artifact) == A


async def test_a_put_that_joins_a_copy_which_is_not_on_the_log_yet_waits_until_it_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the artifact could end by itself after the put was acknowledged."""
    cluster = MemoryCluster()
    async with rig(cluster, "w1") as one, rig(cluster, "w2") as two:
        taken = await take(one, A)
        await two.core.feed.reached(cluster.log.last_seq, deadline=soon())
        incoming, go, right = two.incoming(A), asyncio.Event(), two.core.author.say

        async def say_late(*args: Any, **options: Any) -> Any:
            await go.wait()
            return await right(*args, **options)

        monkeypatch.setattr(two.core.author, "say", say_late)
        copy = Held(TENANT, taken.artifact, incoming.parts, incoming.layout, incoming.manifest)
        adding = asyncio.create_task(two.puts.add_replica(copy, deadline=soon()))
        await until(lambda: two.store.get(TENANT, taken.artifact) is copy, "the copy")
        joining = asyncio.create_task(take(two, A))
        await asyncio.sleep(0.05)
        assert not joining.done()
        await destroy(one, taken.artifact)
        go.set()
        with pytest.raises(ConflictError):
            await adding
        again = await joining
        assert not again.existed, "it is the artifact's next life"
        assert two.bytes_of(again.artifact) == A
        assert two.busy_bytes == PAGES
