"""How much memory the Directory takes at the size it is built for, and how fast it folds the log.

100,000 artifacts, each with a key and ten replicas on 64 workers, go through the real codec in batches as a reader
hands them out. ``--quick`` takes a twentieth of it and scales the memory up.

    python -m benchmarks.directory_size [--quick] [--json] [--record]
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice

from benchmarks._table import MIB, Row, bounded, parse_options, show
from tensorbus.bus import Message
from tensorbus.events import (
    ArtifactPut,
    BlobRef,
    Event,
    Headers,
    KeyBound,
    ManifestRef,
    ReplicaAdded,
    SessionOpened,
    Subjects,
    Tier,
    aggregate_of,
    encode,
    headers_to_wire,
)
from tensorbus.feeds import decode_all
from tensorbus.ids import ArtifactId, EventId, Incarnation, WorkerId
from tensorbus.lifecycle import Directory

ARTIFACTS = 100_000
REPLICAS_EACH = 10
WORKERS = 64
BATCH = 512
RSS_MIB_MAX = 1024
BENCH = "directory_size"


@dataclass
class Writer:
    """Makes the messages that well-behaved workers leave on the log."""

    subjects: Subjects = field(default_factory=Subjects)
    seq: int = 1_700_000_000_000_000
    numbers: list[int] = field(default_factory=lambda: [0] * WORKERS)

    def message(self, event: Event, worker: int) -> Message:
        self.seq += 1
        about, author = aggregate_of(event), WorkerId(f"worker-{worker:03}")
        headers = Headers(
            event_id=EventId(f"{self.seq:032x}"),
            author=author,
            incarnation=Incarnation(f"{worker:016x}"),
            principal="caller-1",
            expected=0 if about.contested else None,
        )
        fence = self.subjects.fence(about) if about.contested else None
        wire = headers_to_wire(headers, type_name=event.type, fence=fence)
        return Message(self.seq, self.seq * 1000, self.subjects.fact(about, author), wire, encode(event))

    def log(self, artifacts: int) -> Iterator[Message]:
        for worker in range(WORKERS):
            yield self.message(_opened(worker), worker)
        for n in range(artifacts):
            artifact = ArtifactId(f"tb1:{n:064x}")
            yield self.message(_put(artifact, n), n % WORKERS)
            yield self.message(KeyBound(tenant="", key=f"models/{n}", artifact=artifact, rebind=False), n % WORKERS)
            for worker in ((n + more) % WORKERS for more in range(1, REPLICAS_EACH)):
                yield self.message(self._replica(artifact, n, worker), worker)

    def _replica(self, artifact: ArtifactId, n: int, worker: int) -> ReplicaAdded:
        self.numbers[worker] += 1
        return ReplicaAdded(
            tenant="", artifact=artifact, view=None, tier=Tier.DRAM, nbytes=MIB + n, number=self.numbers[worker]
        )


def _opened(worker: int) -> SessionOpened:
    return SessionOpened(
        worker=WorkerId(f"worker-{worker:03}"),
        incarnation=Incarnation(f"{worker:016x}"),
        host=f"host-{worker}",
        roles=("basic",),
        data="127.0.0.1:7001",
        control="",
        pool_bytes=1 << 36,
        ttl_ns=15_000_000_000,
        pid=1,
        version="0.1.0",
    )


def _put(artifact: ArtifactId, n: int) -> ArtifactPut:
    blob = BlobRef(digest=f"{n:064x}", nbytes=20_000, chunks=1, author=WorkerId("worker-000"))
    return ArtifactPut(
        tenant="",
        artifact=artifact,
        digest=artifact,
        nbytes=MIB + n,
        tensors=290,
        manifest=ManifestRef(blob=blob),
        tier=Tier.DRAM,
        key=f"models/{n}",
    )


def measure(artifacts: int, *, scale: float) -> list[Row]:
    state, log = Directory(), Writer().log(artifacts)
    facts, decode_s, fold_s = 0, 0.0, 0.0
    before = _rss_mib()
    while batch := list(islice(log, BATCH)):
        start = time.process_time()
        decoded = decode_all(batch)
        middle = time.process_time()
        kept = sum(state.apply(recorded).kept for recorded in decoded)
        decode_s, fold_s = decode_s + middle - start, fold_s + time.process_time() - middle
        facts += kept
        assert kept == len(batch), state.dropped
    del batch, decoded
    collect_s = _seconds(gc.collect)
    grown = (_rss_mib() - before) * scale
    hash_s = _seconds(state.hash)
    hashed = (_rss_mib() - before) * scale
    note = f"scaled up from {artifacts:,} artifacts" if scale != 1 else ""
    size = f"{ARTIFACTS:,} artifacts, {ARTIFACTS * REPLICAS_EACH:,} replicas"
    return [
        bounded(BENCH, f"memory of {size}", grown, "MiB", limit=RSS_MIB_MAX, better="lower", note=note),
        bounded(BENCH, "the same after its hash was read", hashed, "MiB", limit=RSS_MIB_MAX, better="lower", note=note),
        Row(bench=BENCH, case="fold alone", value=facts / fold_s, unit="facts per CPU second"),
        Row(bench=BENCH, case="decode and fold", value=facts / (decode_s + fold_s), unit="facts per CPU second"),
        Row(bench=BENCH, case="reading the hash", value=hash_s * 1000, unit="ms"),
        Row(bench=BENCH, case="one full garbage collection", value=collect_s * scale, unit="s", note=note),
    ]


def _seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def _rss_mib() -> float:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / MIB


def main() -> int:
    options = parse_options(__doc__)
    share = 20 if options.quick else 1
    return show(measure(ARTIFACTS // share, scale=share), options)


if __name__ == "__main__":
    sys.exit(main())
