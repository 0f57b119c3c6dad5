"""A put that was given up ends what it made, never what became of the same id since."""

from __future__ import annotations

from tensorbus.bus import MemoryCluster
from tests.unit.workers.rig import TENANT, rig, soon
from tests.unit.workers.test_puts import A, destroy, take


async def test_a_put_that_is_given_up_leaves_a_later_life_of_its_id_alone() -> None:
    cluster = MemoryCluster()
    async with rig(cluster, "w1") as worker:
        first = await take(worker, A)
        record = worker.core.state.artifact(TENANT, first.artifact)
        assert record is not None
        born = record.born
        await destroy(worker, first.artifact)
        again = await take(worker, A)
        assert again.artifact == first.artifact
        await worker.puts.abandon(TENANT, again.artifact, born=born, principal="")
        living = worker.core.state.artifact(TENANT, again.artifact)
        assert living is not None and living.live
        await worker.puts.abandon(TENANT, again.artifact, born=living.born, principal="")
        assert not living.live
        await worker.core.feed.reached(cluster.log.last_seq, deadline=soon())
