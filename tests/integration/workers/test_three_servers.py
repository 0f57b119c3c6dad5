"""Workers on three NATS servers: an artifact's whole life, also when the log's leader is killed in the middle of it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import tensorbus as tb
from tensorbus.bus import BusAdmin, StreamLimits
from tensorbus.testing._bus_contract import soon
from tensorbus.testing._nats_cluster import NatsCluster
from tensorbus.testing._processes import Processes

pytestmark = pytest.mark.integration

SESSION_TTL_S = 10
"""The least on servers that elect a leader, which takes them up to 8 s."""


@pytest.fixture
def cluster(home: Path) -> Iterator[NatsCluster]:
    with NatsCluster(home / "cluster") as cluster:
        yield cluster


async def make_streams(url: str) -> None:
    admin = await BusAdmin.connect(url)
    made = await admin.init(StreamLimits(replicas=3), deadline=soon(20))
    assert all(stream.made and stream.replicas == 3 for stream in made)
    await admin.close()


def test_an_artifact_lives_on_when_the_leader_is_killed(home: Path, cluster: NatsCluster) -> None:
    asyncio.run(make_streams(cluster.url))
    cluster.wait_healthy()
    owner = Processes(home / "test-logs", nats_url=cluster.url)
    settings = {"home": home, "session_ttl_s": SESSION_TTL_S, "nats_replicas": 3}
    try:
        one = owner.worker("basic", id="w1", host_id="h1", **settings)  # type: ignore[arg-type]
        two = owner.worker("basic", id="w2", host_id="h2", **settings)  # type: ignore[arg-type]
        owner.worker("gateway", id="g1", host_id="h3", **settings)  # type: ignore[arg-type]
        content = {n: torch.full((1000,), float(n)) for n in range(3)}
        with tb.connect(home=home, host_id="h1", timeout=60) as bus, tb.connect(home=home, host_id="h2") as other:
            bus.put({"w": content[0]}, key="before")
            leader = cluster.leader_of("TB")
            assert leader is not None
            cluster.kill(leader)
            put = bus.put({"w": content[1]}, key="while")
            bus.publish("policy", put)
            assert cluster.wait_leader("TB", but=leader) != leader
            for key, n in (("before", 0), ("while", 1)):
                found = other.artifact(key, at_least=put.position, timeout=30)
                assert torch.equal(found.tensor("w", timeout=30), content[n])
            cluster.start(leader)
            cluster.wait_healthy()
            after = bus.put({"w": content[2]}, key="after")
            assert torch.equal(other.artifact("after", at_least=after.position).tensor("w"), content[2])
            live = {worker.worker for worker in bus.list_workers() if worker.live}
        assert live == {"w1", "w2", "g1"}, "nobody's session ends for an election"
        assert one.alive and two.alive
    finally:
        owner.close()
