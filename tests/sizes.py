"""How much the tests that hurt real processes do: a little in every run, all of it with ``TB_TEST_SIZE=soak``."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """One row of the table.

    Attributes:
        crash_rounds: Callers or workers that are killed after registering, one after the other.
        crash_artifacts: Artifacts that each registers first.
        racers: Processes that put one id at once.
        race_rounds: Ids that they race for.
        pause_s: How long a bus or worker stands still, above a TTL of 2 s.
        pressure_processes: Readers and writers on a pool that is too small.
        pressure_rounds: Artifacts that each of them puts and reads.
        restarts: How often a bus or worker is started anew.
        tensors_max: Tensors of the largest artifact.
        timeout_s: The most that one of these tests takes.
        sim_seeds: Seeds of each simulated scenario.
        cluster_rounds: How often one of three servers is hurt, or all of them are.
        cluster_hurts: What becomes of them in each round, of the five things that may.
        wire_seeds: Runs over connections that lose, repeat and swap deliveries.
        purges: How often a purge overtakes one and the same worker.
        lives: Artifacts on two workers while bus and store are killed.
        store_seeds: Runs of each test that hurts a store at random moments.
        store_kills: How often a store is killed in one of them.
        shard_hand_overs: How often a shard changes its home under the former one's hands.
        store_hand_overs: How often the log changes its keeper.
        full_disks: How often one and the same disk gets full.
        transfers: Artifacts that are fetched by another worker and destroyed, one after the other.
        clients: Readers of one server at once.
        wire_puts: Artifacts that are put over them in each.
    """

    crash_rounds: int
    crash_artifacts: int
    racers: int
    race_rounds: int
    pause_s: float
    pressure_processes: int
    pressure_rounds: int
    restarts: int
    tensors_max: int
    timeout_s: int
    sim_seeds: int
    cluster_rounds: int
    cluster_hurts: int
    wire_seeds: int
    wire_puts: int
    purges: int
    full_disks: int
    shard_hand_overs: int
    store_hand_overs: int
    store_kills: int
    store_seeds: int
    lives: int
    transfers: int
    clients: int


QUICK: Final = Sizes(
    crash_rounds=4,
    crash_artifacts=50,
    racers=8,
    race_rounds=6,
    pause_s=3.0,
    pressure_processes=4,
    pressure_rounds=25,
    restarts=2,
    tensors_max=100_000,
    timeout_s=180,
    sim_seeds=20,
    cluster_rounds=1,
    cluster_hurts=2,
    wire_seeds=1,
    wire_puts=100,
    purges=1,
    full_disks=1,
    shard_hand_overs=60,
    store_hand_overs=1,
    store_kills=4,
    store_seeds=1,
    lives=40,
    transfers=40,
    clients=100,
)
SOAK: Final = Sizes(
    crash_rounds=20,
    crash_artifacts=50,
    racers=8,
    race_rounds=40,
    pause_s=12.0,
    pressure_processes=8,
    pressure_rounds=400,
    restarts=10,
    tensors_max=100_000,
    timeout_s=3600,
    sim_seeds=300,
    cluster_rounds=6,
    cluster_hurts=5,
    wire_seeds=10,
    wire_puts=2000,
    purges=10,
    full_disks=5,
    shard_hand_overs=1000,
    store_hand_overs=6,
    store_kills=50,
    store_seeds=5,
    lives=200,
    transfers=10_000,
    clients=1000,
)
SIZES: Final = SOAK if os.environ.get("TB_TEST_SIZE") == "soak" else QUICK
