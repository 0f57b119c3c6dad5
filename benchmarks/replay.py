"""What a durable log costs and gives: replay, the store, snapshots, the past, and the loss of a leader.

One log of 1,200,000 facts, as 64 workers write them about 100,000 artifacts with 1,000,000 replicas, on a real NATS
server with file storage; and one process after another that makes its state from it, each from nothing.

* *from the stream*: the Directory of a worker that starts, against the same reading that only counts what it gets.
  Both go through one Python client, which spends half of the counting on headers.
* *from the archive*: the same from Parquet files, against decoding messages that are in memory already.
* *into DuckDB*: finding out which rows the facts change and writing them, against inserting the same rows, at hand as
  Python values, through Arrow into tables of the same form, in as many transactions.
* *from a snapshot*: what a worker does that starts beside such a log: newest snapshot, then the facts behind it.
* *state at*: the whole state at an earlier position from the store's history, against a replay.
* *leader killed*: three servers; what was acknowledged must be there. NATS's own client publishes to the same stream
  and reads it back meanwhile, with its time-outs set short, so that its silence is the servers'.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import _failover, _replay_parts
from benchmarks._crew import Crew, Part, Player, crew
from benchmarks._replay_parts import Folded, Stored
from benchmarks._table import MIB, Options, Row, bounded, compare, parse_options, show, spread
from tensorbus.bus import EmbeddedServer, NatsBus, StreamLimits, provision
from tensorbus.clock import Deadline
from tensorbus.events import MSG_ID
from tensorbus.testing._nats_cluster import NatsCluster

BENCH = "replay"
ARTIFACTS, QUICK_ARTIFACTS = 100_000, 8_000
"""With twelve facts each."""
SUFFIX_FACTS, QUICK_SUFFIX_FACTS = 10_000, 1_000
"""Facts behind the snapshot."""
REPEATS, QUICK_REPEATS = 3, 2
ROUNDS, QUICK_ROUNDS = 6, 2
"""Leaders that are killed, one after the other."""
RSS_MIB_MAX = 1024
BEYOND_NATS_S = 1.5
PART_S = 900.0
STREAM = "TB"


@dataclass(frozen=True, slots=True)
class Log:
    """The log that is replayed: where it is, and its last sequence."""

    url: str
    last: int
    facts: int


@dataclass(frozen=True, slots=True)
class Archived:
    """What the archive's readers took.

    Attributes:
        written_s: Seconds of writing it from the stream.
        read_s: Of each repeat, reading it and only counting.
        decoded_s: Of each repeat, reading and decoding it.
        folded: Of each repeat, the Directory made from it.
    """

    written_s: float
    read_s: list[float]
    decoded_s: list[float]
    folded: list[Folded]


class Readers:
    """Processes that read the log, one at a time, each new."""

    def __init__(self, hired: Crew) -> None:
        self._hired = hired

    def ask(self, part: Part, **arguments: Any) -> Any:
        """Let a part play in a process of its own and give what it says."""
        player = self._hired.hire(part, name=part.__name__, **arguments)
        try:
            return player.hear(PART_S)
        finally:
            self._hired.end(player)


@contextmanager
def server_of(folder: str) -> Iterator[EmbeddedServer]:
    """A server whose disk is not waited for: the log is written once, and never by what is measured."""
    store = f'jetstream {{ store_dir: "{folder}/store", sync_interval: "2m", max_mem: 1GB, max_file: 1TB }}'
    with EmbeddedServer(Path(folder) / "nats", extra=store) as server:
        yield server


# -- one server: the log and those who read it -------------------------------------------------------------------------


def replays(hired: Crew, options: Options, folder: str) -> list[Row]:
    artifacts = QUICK_ARTIFACTS if options.quick else ARTIFACTS
    repeats = QUICK_REPEATS if options.quick else REPEATS
    readers = Readers(hired)
    with server_of(folder) as server:
        writer = hired.hire(_replay_parts.write_log, name="writer", url=server.url, artifacts=artifacts)
        first, last = writer.hear(PART_S)
        log = Log(server.url, last, last - first + 1)
        counted, folded = count_and_fold(readers, log, repeats)
        archived = archive(readers, log, f"{folder}/archive", repeats)
        same([*folded, *archived.folded])
        decoded = readers.ask(_replay_parts.decode_facts, url=log.url, facts=log.facts, repeats=repeats)
        stored: Stored = readers.ask(
            _replay_parts.fill_store, url=log.url, last=log.last, folder=folder, repeats=repeats
        )  # fmt: skip
        snapshot = snapshot_starts(readers, writer, log, options)
    return [
        *stream_rows(log, counted, folded, decoded),
        *archive_rows(log, archived, decoded),
        *store_rows(log, stored),
        *snapshot_rows(snapshot, folded),
        *travel_rows(stored, folded),
    ]


def count_and_fold(readers: Readers, log: Log, repeats: int) -> tuple[list[float], list[Folded]]:
    """Seconds of readings that only count, and Directories made, in turn."""
    counted, folded = [], []
    for _ in range(repeats):
        seconds, facts = readers.ask(_replay_parts.count_facts, url=log.url, last=log.last)
        if facts != log.facts:
            raise SystemExit(f"{facts} facts were read of {log.facts}")
        counted.append(seconds)
        folded.append(readers.ask(_replay_parts.fold_stream, url=log.url))
    same(folded)
    return counted, folded


def archive(readers: Readers, log: Log, folder: str, repeats: int) -> Archived:
    """Write the archive, then read it in three ways in turn."""
    files, written_s = readers.ask(_replay_parts.write_archive, url=log.url, last=log.last, folder=folder)
    archived = Archived(written_s, [], [], [])
    for _ in range(repeats):
        for decode, took in ((False, archived.read_s), (True, archived.decoded_s)):
            seconds, facts = readers.ask(_replay_parts.read_archive, folder=folder, files=files, decode=decode)
            if facts != log.facts:
                raise SystemExit(f"the archive has {facts} facts of {log.facts}")
            took.append(seconds)
        archived.folded.append(readers.ask(_replay_parts.fold_archive, folder=folder, files=files))
    return archived


def same(folded: Sequence[Folded]) -> None:
    """All must be the one state that the log says."""
    if len({one.state_hash for one in folded}) > 1:
        raise SystemExit("two replays of one log give two states")


def snapshot_starts(readers: Readers, writer: Player, log: Log, options: Options) -> list[Folded]:
    """Store a snapshot, write some facts more, and start from both."""
    readers.ask(_replay_parts.store_snapshot, url=log.url)
    writer.tell(QUICK_SUFFIX_FACTS if options.quick else SUFFIX_FACTS)
    writer.hear(PART_S)
    starts = [readers.ask(_replay_parts.fold_stream, url=log.url) for _ in range(REPEATS)]
    same(starts)
    if any(one.snapshot is None for one in starts):
        raise SystemExit("a start did not use the snapshot")
    return starts


def stream_rows(log: Log, counted: list[float], folded: list[Folded], decoded: tuple[int, list[float]]) -> list[Row]:
    count, took = decoded
    rates = [log.facts / one.seconds for one in folded]
    decode_rate = count / median(took)
    note = f"{log.facts:,} facts"
    return [
        compare(
            BENCH, "Directory from the stream", median(rates), "facts/s", against="the same reading that only counts",
            against_value=log.facts / median(counted), better="higher", target=0.5, spread=spread(rates), note=note,
        ),
        compare(
            BENCH, "Directory from the stream", median(rates), "facts/s", against="decoding alone",
            against_value=decode_rate, better="higher", spread=spread(rates), note=note,
        ),
        bounded(
            BENCH, "memory of a process that replayed all", max(one.rss_bytes for one in folded) / MIB, "MiB",
            limit=RSS_MIB_MAX, better="lower", note=size_of(folded[0]),
        ),
    ]  # fmt: skip


def archive_rows(log: Log, archived: Archived, decoded: tuple[int, list[float]]) -> list[Row]:
    count, took = decoded
    rates = [log.facts / one.seconds for one in archived.folded]
    reads = [log.facts / seconds for seconds in archived.read_s]
    return [
        compare(
            BENCH, "Directory from the archive", median(rates), "facts/s", against="decoding alone",
            against_value=count / median(took), better="higher", target=0.5, spread=spread(rates),
        ),
        compare(
            BENCH, "Directory from the archive", median(rates), "facts/s", against="the archive decoded, not folded",
            against_value=log.facts / median(archived.decoded_s), better="higher", spread=spread(rates),
        ),
        Row(
            bench=BENCH, case="archive read and only counted", value=median(reads), unit="facts/s",
            spread=spread(reads),
        ),
        Row(
            bench=BENCH, case="archive written", value=log.facts / archived.written_s, unit="facts/s",
            note="read from the stream, to Parquet",
        ),
    ]  # fmt: skip


def store_rows(log: Log, stored: Stored) -> list[Row]:
    note = f"{stored.rows:,} rows"
    return [
        compare(
            BENCH, "DuckDB: rows found and written", stored.facts / stored.seconds, "facts/s",
            against="bulk insert of the same rows", against_value=stored.facts / stored.insert_s, better="higher",
            target=0.5, note=note,
        ),
        Row(
            bench=BENCH, case="DuckDB: all from the stream", value=stored.facts / stored.total_s, unit="facts/s",
            note="read, decoded, folded, written",
        ),
    ]  # fmt: skip


def snapshot_rows(starts: list[Folded], folded: list[Folded]) -> list[Row]:
    took = [one.seconds for one in starts]
    return [
        compare(
            BENCH, "start from snapshot and what follows", median(took), "s", against="full replay",
            against_value=median(one.seconds for one in folded), better="lower", target=10, spread=spread(took),
            note=size_of(starts[0]),
        ),
        bounded(
            BENCH, "memory of a process that started so", max(one.rss_bytes for one in starts) / MIB, "MiB",
            limit=RSS_MIB_MAX, better="lower",
        ),
    ]  # fmt: skip


def travel_rows(stored: Stored, folded: list[Folded]) -> list[Row]:
    replay_s = median(one.seconds for one in folded)
    return [
        compare(
            BENCH, f"state at a position {where}", median(took), "s", against="full replay", against_value=replay_s,
            better="lower", target=10, spread=spread(took), note=f"{rows:,} rows",
        )
        for where, took, rows in zip(
            ("in the middle of the log", "at its end"), zip(*stored.travel_s, strict=True), stored.travel_rows,
            strict=True,
        )
    ]  # fmt: skip


def size_of(one: Folded) -> str:
    return f"{one.artifacts:,} artifacts, {one.replicas:,} replicas"


# -- three servers: a leader killed ------------------------------------------------------------------------------------


def failover(hired: Crew, options: Options, folder: str) -> list[Row]:
    kills: list[float] = []
    with NatsCluster(Path(folder) / "cluster") as cluster:
        prepare(cluster.url)
        ours = hired.hire(_failover.use_tensorbus, name="tensorbus", url=cluster.url)
        bare = hired.hire(_failover.use_nats, name="nats", url=cluster.url, subject="tb.ev.bench.x.bare")
        for player in (ours, bare):
            player.hear(PART_S)
        for _ in range(QUICK_ROUNDS if options.quick else ROUNDS):
            kills.append(kill_leader(cluster))
        for player in (ours, bare):
            player.tell("end")
        (our_acks, our_arrivals), (bare_acks, bare_arrivals) = ours.hear(PART_S), bare.hear(PART_S)
        found = stored_ids(cluster.url)
    return failover_rows(
        _failover.silences(kills, our_acks, our_arrivals),
        _failover.silences(kills, bare_acks, bare_arrivals),
        {"tensorbus": _failover.lost(our_acks, found), "NATS": _failover.lost(bare_acks, found)},
        len(our_acks),
    )


def kill_leader(cluster: NatsCluster) -> float:
    """Kill the leader in the midst of it, wait for the next one, start the old one again; the moment of the kill."""
    time.sleep(_failover.STEADY_S)
    leader = cluster.wait_leader(STREAM)
    killed = time.perf_counter()
    cluster.kill(leader)
    cluster.wait_leader(STREAM, but=leader)
    time.sleep(_failover.STEADY_S)
    cluster.start(leader)
    cluster.wait_healthy()
    return killed


def prepare(url: str) -> None:
    async def main() -> None:
        bus = await NatsBus.connect(url, name="bench")
        await provision(bus, limits=StreamLimits(replicas=3), deadline=Deadline(30))
        await bus.close()

    asyncio.run(main())


def stored_ids(url: str) -> set[str]:
    """The ids of all messages of the log."""

    async def main() -> set[str]:
        bus = await NatsBus.connect(url, name="bench")
        last, found = await bus.last_seq(deadline=Deadline(30)), set[str]()
        async with bus.read(bus.subjects.facts, after=0) as reader:
            async for batch in reader:
                found.update(message.headers[MSG_ID] for message in batch)
                if batch[-1].seq >= last:
                    break
        await bus.close()
        return found

    return asyncio.run(main())


def failover_rows(
    ours: list[_failover.Silence], bare: list[_failover.Silence], lost: dict[str, list[str]], acked: int
) -> list[Row]:
    rows = [
        bounded(
            BENCH, f"leader killed: acknowledged and lost, {side}", len(names), "facts", limit=0, better="lower",
            note=f"of {acked:,}" if side == "tensorbus" else "",
        )
        for side, names in lost.items()
    ]  # fmt: skip
    for what, field in (("publish", "publish_s"), ("readers", "read_s")):
        mine, its = ([getattr(one, field) for one in side] for side in (ours, bare))
        rows += back_rows(what, mine, its)
    return rows


def back_rows(what: str, mine: Sequence[float | None], its: Sequence[float | None]) -> list[Row]:
    """Back after how long, and how much later than NATS in the worst round."""
    whole = [one for one in mine if one is not None]
    theirs = [one for one in its if one is not None]
    all_back = len(whole) == len(mine)
    beyond = [a - b for a, b in zip(mine, its, strict=True) if a is not None and b is not None]
    worst = max(beyond) if all_back and beyond else None
    case = f"leader killed: {what} back"
    row = bounded(
        BENCH, f"{case}, later than NATS itself, worst of {len(mine)}", worst, "s", limit=BEYOND_NATS_S, better="lower",
        spread=spread(beyond), note="" if all_back else f"{len(mine) - len(whole)} never came back",
    )  # fmt: skip
    return [
        compare(
            BENCH, case, median(whole) if whole else None, "s", against="NATS itself",
            against_value=median(theirs) if theirs else None, better="lower", spread=spread(whole),
        ),
        row if all_back else replace(row, met=False),
    ]  # fmt: skip


def main() -> int:
    options = parse_options(__doc__)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="tb-bench-") as folder, crew("benchmarks._replay_parts") as hired:
        rows += replays(hired, options, folder)
        rows += failover(hired, options, folder)
    return show(rows, options)


if __name__ == "__main__":
    raise SystemExit(main())
