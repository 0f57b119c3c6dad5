"""How much memory the index of pages takes, how fast it is replayed, and how fast it answers.

The facts of 10 million pages on eight workers, as homes write them, go through the real codec into the states of 64
shards. ``--quick`` takes a sixteenth of both.

    python -m benchmarks.page_index [--quick] [--json] [--record]
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from benchmarks._table import Row, bounded, compare, parse_options, percentile, show, spread
from tensorbus.bus import Message
from tensorbus.events import (
    RECORD,
    Aggregate,
    Headers,
    LeaseGranted,
    PageEvent,
    PageHolder,
    PageOp,
    PagesChanged,
    Subjects,
    decode_page,
    encode_page,
    headers_to_wire,
)
from tensorbus.ids import EventId, Incarnation, Token, WorkerId
from tensorbus.lifecycle import PageTable, ShardState

PAGES = 10_000_000
SHARDS = 64
HOLDERS = tuple(PageHolder(worker=WorkerId(f"worker-{n}"), incarnation=Incarnation(f"{n:016x}")) for n in range(8))
KEYSPACE = "5a" * 32
A_BATCH = 768
A_LOOKUP = 1000
LOOKUPS = 200
NBYTES = 64 * 1024
START_S = 1_800_000_000
TTL_S = 600
BENCH = "page_index"

HOME = WorkerId("home-0")
LIFE = Incarnation("0" * 16)


class Writer:
    """Makes the messages of one shard."""

    def __init__(self, shard: int) -> None:
        self.shard = shard
        self._subjects = Subjects()
        self._random = np.random.default_rng(shard)
        self._seq = self._token = 0

    def message(self, event: PageEvent, about: Aggregate) -> Message:
        self._seq += 1
        headers = Headers(
            event_id=EventId(f"{self._seq:032x}"), author=HOME, incarnation=LIFE, token=Token(self._token)
        )
        wire = headers_to_wire(headers, type_name=event.type, fence=self._subjects.fence(about))
        time_ns = START_S * 10**9 + self._seq
        return Message(self._seq, time_ns, self._subjects.fact(about, HOME), wire, encode_page(event))

    def log(self, pages: int) -> Iterator[Message]:
        lease, shard = Aggregate("lease", str(self.shard)), Aggregate("shard", str(self.shard))
        grant = self.message(LeaseGranted(shard=self.shard), lease)
        self._token = grant.seq
        yield grant
        for number, begin in enumerate(range(0, pages, A_BATCH), 1):
            records = self.records(min(A_BATCH, pages - begin), begin)
            yield self.message(
                PagesChanged(
                    shard=self.shard,
                    number=number,
                    keyspaces=(KEYSPACE,),
                    holders=HOLDERS,
                    records=records.tobytes(),
                ),
                shard,
            )

    def records(self, count: int, begin: int) -> npt.NDArray[np.void]:
        """Three requests of 256 pages, each of one worker."""
        records = np.zeros(count, RECORD)
        records["key"] = np.frombuffer(self._random.bytes(32 * count), "V32")
        records["op"] = PageOp.ADD
        records["slot"] = np.arange(begin, begin + count)
        records["holder"] = records["slot"] // 256 % len(HOLDERS)
        records["nbytes"], records["ttl_s"] = NBYTES, TTL_S
        return records


def measure(pages: int, shards: int) -> list[Row]:
    states, each = [ShardState(shard) for shard in range(shards)], pages // shards
    steps: list[float] = []
    before = _rss()
    for state in states:
        for message in Writer(state.shard).log(each):
            start = time.process_time()
            recorded = decode_page(
                seq=message.seq,
                time_ns=message.time_ns,
                subject=message.subject,
                headers=message.headers,
                data=message.data,
            )
            assert state.apply(recorded).kept, state.dropped
            steps.append(time.process_time() - start)
    gc.collect()
    grown = (_rss() - before) / pages
    of_dict = _dict_bytes(pages // 10)
    milliseconds = [step * 1000 for step in steps]
    note = f"{pages:,} pages in {shards} shards"
    return [
        bounded(BENCH, "memory of a page", grown, "bytes", limit=200, better="lower", note=note),
        compare(
            BENCH,
            "the same beside a dict",
            grown,
            "bytes",
            against="dict of tuples",
            against_value=of_dict,
            better="lower",
            target=2,
            note=note,
        ),
        bounded(BENCH, "decode and fold", pages / sum(steps), "pages per CPU second", limit=500_000, better="higher"),
        Row(
            bench=BENCH,
            case="a fact of 768 pages, p99",
            value=percentile(milliseconds, 99),
            unit="ms",
            spread=spread(milliseconds),
        ),
        *_lookups(states[0].pages),
        *_drops(states[0].pages),
    ]


def _lookups(table: PageTable) -> list[Row]:
    records, _ = table.dump()
    keys = np.ascontiguousarray(records["key"]).view(np.uint8).reshape(-1, 32)
    known = {key.tobytes(): record.item() for key, record in zip(keys, records, strict=True)}
    random, number = np.random.default_rng(7), table.keyspaces.number(KEYSPACE)
    live = np.ones(len(HOLDERS), np.bool_)
    asked = [keys[random.integers(0, len(keys), A_LOOKUP)] for _ in range(LOOKUPS)]
    assert table.match(asked[0], number, now_s=START_S, live=live) == A_LOOKUP
    ours = _rate(lambda: [table.at(table.usable(table.find(some, number), now_s=START_S, live=live)) for some in asked])
    texts = [[key.tobytes() for key in some] for some in asked]
    theirs = _rate(lambda: [[known.get(key) for key in some] for some in texts])
    return [
        compare(
            BENCH,
            f"look up x {A_LOOKUP}",
            ours,
            "pages per CPU second",
            against="dict, keys made before",
            against_value=theirs,
            better="higher",
        ),
        bounded(
            BENCH,
            "the same, Mooncake's best being 0.7 M/s",
            ours,
            "pages per CPU second",
            limit=700_000,
            better="higher",
        ),
    ]


def _drops(table: PageTable) -> list[Row]:
    count, holder = len(table), _first_holder(table)
    gone_s = _seconds(lambda: table.remove_holder(holder))
    gone = count - len(table)
    expired_s = _seconds(lambda: table.expire(START_S + TTL_S + 1))
    assert not len(table)
    return [
        Row(bench=BENCH, case=f"a holder of {gone:,} pages of {count:,} goes", value=gone_s * 1000, unit="ms"),
        Row(bench=BENCH, case=f"{count - gone:,} pages expire at once", value=expired_s * 1000, unit="ms"),
    ]


def _first_holder(table: PageTable) -> int:
    number = table.holders.get(next(iter(table.holders)))
    assert number is not None
    return number


def _dict_bytes(pages: int) -> float:
    """What a page takes in a dict from its key, keyspace and fragment to where it lies."""
    writer, before, known = Writer(0), _rss(), dict[tuple[bytes, int, int], tuple[int, ...]]()
    for begin in range(0, pages, A_BATCH):
        for record in writer.records(A_BATCH, begin):
            key, keyspace, fragment, holder, _, flags, *place = record.item()
            known[key, keyspace, fragment] = (holder, flags, *place)
    return (_rss() - before) / len(known)


def _rate(work: Callable[[], object]) -> float:
    return LOOKUPS * A_LOOKUP / min(_seconds(work) for _ in range(5))


def _seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def _rss() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> int:
    options = parse_options(__doc__)
    share = 16 if options.quick else 1
    return show(measure(PAGES // share, SHARDS // share), options)


if __name__ == "__main__":
    sys.exit(main())
