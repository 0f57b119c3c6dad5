"""The control plane: resolving names, a published system's load, versions to many, and what the log costs.

Real processes on one machine, loopback: a NATS server that syncs every write, a gateway, workers, and every reader,
binder and subscriber a process of its own. The processes that make the load run on the same cores as those measured.

The published load is that of TensorCast's control plane under stress: 16 workers with heartbeats each 0.1 s, reconciles
and chunk reports each 0.5 s, and 640 resolves/s. Its heartbeats and reports are calls to one central server; here a
heartbeat is a message that JetStream acknowledges, measured inside the worker; a *reconcile* is a worker's inventory
confirmed against the directory at a position that includes its last fact; a *chunk report* is a lease fact of the
worker (a pin taken or released), from the call to its fold. 20 % of the resolves are for keys that another process
bound a moment before and are awaited by position. Its figures are of its own machines, not of this one.
"""

from __future__ import annotations

import tensorbus as tb
from benchmarks import _parts
from benchmarks._crew import Crew, Player, crew, perform
from benchmarks._home import Home, running_home
from benchmarks._table import Options, Row, bounded, compare, parse_options, percentile, show, spread

BENCH = "control"
PUBLISHED_RESOLVE_MS, PUBLISHED_RESOLVE_RATE = 193.0, 225.0
PUBLISHED_BEAT_MS, PUBLISHED_BEAT_RATE = 355.0, 41.0
PUBLISHED_SEEN_MS = 3600.0
WORKERS, READERS, BINDERS, SUBSCRIBERS = 16, 32, 4, 31
FACTS_RATE = 1000
RATE, FRESH_SHARE = 640, 0.2
MS, US = 1e3, 1e6


def quantile(values: list[float], percent: float, scale: float = MS) -> float | None:
    return percentile(values, percent) * scale if values else None


# -- one followed key --------------------------------------------------------------------------------------------------


def followed(home: Home, hired: Crew, options: Options) -> list[Row]:
    """A followed key's resolve against a NATS request, both while facts arrive."""
    keys = [f"followed/{n}" for n in range(100)]
    others = [f"other/{n}" for n in range(900)]
    with tb.connect(home=home.path, host_id="h0") as bus:
        artifacts = [bus.put(_small(f"a{n}")).id for n in range(701)]
    facts = hired.hire(
        _parts.offer_facts, name="facts", url=home.nats_url, keys=keys + others, artifacts=artifacts, rate=FACTS_RATE
    )
    echo = hired.hire(_parts.answer_requests, name="echo", url=home.nats_url)
    echo.hear(30)
    echo.hear(30)
    asking = hired.hire(_parts.request, name="request", url=home.nats_url)
    facts.hear(30)  # every key is bound
    resolving = hired.hire(
        _parts.resolve_followed, name="resolve", home=str(home.path), keys=keys, others=others[:300]
    )  # fmt: skip
    (said, took_s), requests, resolves = perform([facts, asking, resolving], seconds=4.0 if options.quick else 12.0)
    resolving.tell(None)
    first = resolving.hear(30)
    hired.dismiss()
    load = f"{said / took_s:.0f} facts/s, a tenth of them on followed keys"
    rate = bounded(BENCH, "facts/s meanwhile", said / took_s, "/s", limit=0.95 * FACTS_RATE, better="higher")
    rows = [
        compare(
            BENCH, f"resolve a followed key, {name}", quantile(resolves, percent, US), "us",
            against=f"NATS request {name}", against_value=quantile(requests, percent, US), better="lower",
            target=50 if percent == 99 else None, spread=spread(resolves, scale=US), note=load,
        )
        for name, percent in (("p50", 50), ("p99", 99))
    ]  # fmt: skip
    rows += [
        compare(
            BENCH, f"first resolve of a key, {name}", quantile(first, percent, US), "us",
            against=f"NATS request {name}", against_value=quantile(requests, percent, US), better="lower",
            spread=spread(first, scale=US), note="asked of the worker, no other load; the request under load",
        )
        for name, percent in (("p50", 50), ("p99", 99))
    ]  # fmt: skip
    return [rate, *rows]


# -- the published load ------------------------------------------------------------------------------------------------


def published_load(home: Home, hired: Crew, options: Options) -> list[Row]:
    seconds = 8.0 if options.quick else 26.0
    steady = [f"steady/{n}" for n in range(50)]
    with tb.connect(home=home.path, host_id="h0") as bus:
        for key in steady:
            bus.put(_small(key), key=key)
    readers, binders = _hire_readers(home, hired, steady)
    host_ids = [f"h{n}" for n in range(WORKERS)]
    workers = hired.hire(_parts.run_workers, name="workers", home=str(home.path), host_ids=host_ids, period_s=0.5)
    results = perform([*readers, *binders, workers], seconds=seconds, lead_s=2.0)
    hired.dismiss()
    readings, (confirmed, reported, before, after, took_s) = results[:READERS], results[-1]
    took = [value for reading in readings for value in reading["took"]]
    late = [value for reading in readings for value in reading["late"]]
    fresh = [value for reading in readings for value in reading["fresh_took"]]
    wrong = {name: sum(reading[name] for reading in readings) for name in ("failed", "old")}
    beats = sum(now["count"] - then["count"] for now, then in zip(after, before, strict=True))
    binders_said = results[READERS : READERS + BINDERS]
    binds = [value for took, _ in binders_said for value in took]
    stale = count_stale(
        [answer for reading in readings for answer in reading["answers"]],
        [bind for _, some in binders_said for bind in some],
    )
    rate = f"published {PUBLISHED_RESOLVE_RATE:g}/s at best"
    return [
        bounded(BENCH, "load: resolves/s", len(took) / seconds, "/s", limit=0.99 * RATE, better="higher", note=rate),
        bounded(BENCH, "load: stale answers", stale, "", limit=0, better="lower"),
        bounded(BENCH, "load: failed resolves", wrong["failed"], "", limit=0, better="lower"),
        bounded(
            BENCH, "load: fresh keys over 100 ms old", wrong["old"], "", limit=0.01 * len(fresh), better="lower",
            note=f"of {len(fresh)} bound by another process and awaited by position",
        ),
        _published("load: resolve p95", quantile(took, 95), PUBLISHED_RESOLVE_MS, took, target=10),
        _published("load: resolve p95 from when it was due", quantile(late, 95), PUBLISHED_RESOLVE_MS, late, target=10),
        _published("load: resolve by position p95", quantile(fresh, 95), PUBLISHED_RESOLVE_MS, fresh),
        _published(
            "load: heartbeat p95, slowest worker", max(one["p95_s"] for one in after) * MS, PUBLISHED_BEAT_MS,
            [one["p95_s"] for one in after], target=10,
        ),
        bounded(
            BENCH, "load: heartbeats/s", beats / took_s, "/s", limit=0.95 * WORKERS * 10, better="higher",
            note=f"published {PUBLISHED_BEAT_RATE:g}/s at best",
        ),
        _published("load: reconcile p95", quantile(confirmed, 95), 340.0, confirmed),
        _reported("load: report (a lease fact) p95", reported),
        _reported("load: bind p95", binds),
    ]  # fmt: skip


def count_stale(answers: list[_parts.Answer], binds: list[_parts.Bind]) -> int:
    """Answers that are not what the key was bound to at the position asked for, or later up to the answer's own."""
    bound: dict[str, list[tuple[int, str]]] = {}
    for key, position, artifact in binds:
        bound.setdefault(key, []).append((position, artifact))
    return sum(
        artifact not in {one for position, one in bound.get(key, ()) if asked <= position <= told}
        for key, asked, told, artifact in answers
    )


def _hire_readers(home: Home, hired: Crew, steady: list[str]) -> tuple[list[Player], list[Player]]:
    """Two readers a worker, and binders at four of the workers, each with a line to its readers."""
    lines = [hired.pipe() for _ in range(READERS)]
    readers = [
        hired.hire(
            _parts.read_keys, name=f"reader {n}", home=str(home.path), host_id=_parts.beside(n, WORKERS), keys=steady,
            news=lines[n][0], rate=RATE * (1 - FRESH_SHARE) / READERS, phase=n / READERS,
        )
        for n in range(READERS)
    ]  # fmt: skip
    binders = []
    for n in range(BINDERS):
        mine = range(n, READERS, BINDERS)
        binders.append(
            hired.hire(
                _parts.bind_keys, name=f"binder {n}", home=str(home.path), host_id=_parts.beside(4 * n + 1, WORKERS),
                keys=[[f"fresh/{reader}/{k}" for k in range(8)] for reader in mine],
                news=[lines[reader][1] for reader in mine], rate=RATE * FRESH_SHARE / BINDERS, phase=n / BINDERS,
            )
        )  # fmt: skip
    for line in lines:
        for end in line:
            end.close()
    return readers, binders


def _published(case: str, value: float | None, against: float, values: list[float], target: float | None = None) -> Row:
    return compare(
        BENCH, case, value, "ms", against="published p95", against_value=against, better="lower", target=target,
        spread=spread(values, scale=MS),
    )  # fmt: skip


def _reported(case: str, values: list[float]) -> Row:
    return Row(bench=BENCH, case=case, value=quantile(values, 95), unit="ms", spread=spread(values, scale=MS))


# -- versions and the log ----------------------------------------------------------------------------------------------


def versions(home: Home, hired: Crew, options: Options) -> list[Row]:
    """From the call of ``publish`` to the handle, and to the bytes, in 31 other processes."""
    number = 21 if options.quick else 61
    names = {"home": str(home.path), "series": "policy", "versions": number}
    subscribers = [hired.hire(_parts.subscribe, name=f"subscriber {n}", **names) for n in range(SUBSCRIBERS)]
    publisher = hired.hire(_parts.publish, name="publisher", period_s=0.15, **names)
    *heard, begun = perform([*subscribers, publisher], seconds=number * 0.15, lead_s=1.5)
    hired.dismiss()
    # The first is not counted: whoever hears it does everything for the first time.
    seen = [moment - begun[version - 1] for one in heard for version, moment, _ in one if version > 1]
    read = [moment - begun[version - 1] for one in heard for version, _, moment in one if version > 1]
    missing = SUBSCRIBERS * (number - 1) - len(seen)
    return [
        bounded(
            BENCH, f"publish to seen by {SUBSCRIBERS}, p95", quantile(seen, 95), "ms", limit=50, better="lower",
            spread=spread(seen, scale=MS), note=f"{number - 1} versions, {missing} missing; published 3,600..7,300 ms",
        ),
        compare(
            BENCH, f"publish to read by {SUBSCRIBERS}, p95", quantile(read, 95), "ms", against="published p95 at best",
            against_value=PUBLISHED_SEEN_MS, better="lower", spread=spread(read, scale=MS),
        ),
    ]  # fmt: skip


def log_cost(home: Home, hired: Crew, options: Options) -> list[Row]:
    """A put of 4 KiB, which is one fact, against a bare publish to the same server, in turn."""
    count = 200 if options.quick else 1000
    player = hired.hire(_parts.put_and_publish, name="puts", home=str(home.path), url=home.nats_url, count_=count)
    [(puts, bare)] = perform([player], seconds=60)
    hired.dismiss()
    return [
        compare(
            BENCH, f"put of 4 KiB, {name}", quantile(puts, percent), "ms", against=f"bare JetStream publish {name}",
            against_value=quantile(bare, percent), better="lower", spread=spread(puts, scale=MS),
        )
        for name, percent in (("p50", 50), ("p99", 99))
    ]  # fmt: skip


def _small(text: str) -> object:
    import numpy as np

    return np.frombuffer(text.encode(), np.uint8)


def main() -> int:
    options = parse_options(__doc__)
    rows: list[Row] = []
    with crew("benchmarks._parts") as hired:
        with running_home() as home:
            rows += followed(home, hired, options)
        with running_home() as home:
            rows += versions(home, hired, options)
            rows += log_cost(home, hired, options)
        with running_home(workers=WORKERS, heartbeat_s=0.1) as home:
            rows += published_load(home, hired, options)
    return show(rows, options)


if __name__ == "__main__":
    raise SystemExit(main())
