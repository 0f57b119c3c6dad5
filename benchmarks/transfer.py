"""Bytes from one process to another over TCP: whole artifacts on loopback, and over paths of a fixed rate.

Against iperf3 with one stream, bare Python sockets, Mooncake's transfer engine and Store, and gloo. Ours go from warm
memory to warm memory through the server and client that workers use; checksums are XXH3-64 of each 4 MiB, checked where
the bytes arrive. All take turns; values are medians, and a ratio above 1 is faster. A *get* begins with the id on
a host whose worker does not have the artifact, and ends when a byte of every page was read. Paths are shaped by ``tc
tbf`` in a network namespace, which needs root; without, their rows are absent. A *get on the host* begins with the id
of an artifact of 64 tensors that was not read before, and ends with the first byte of each; beside Ray and Vineyard.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks import _transfer_parts as parts
from benchmarks._crew import READY_S, Crew, Player, crew
from benchmarks._home import running_home
from benchmarks._host_get import host_rows
from benchmarks._lanes import lanes
from benchmarks._table import (
    GIB,
    KIB,
    MIB,
    PEERS,
    Options,
    Row,
    find,
    median_of,
    parse_options,
    peer_python,
    repeated,
    run_peer,
    show,
    size,
)
from benchmarks.peers.__main__ import install
from benchmarks.peers._common import touched, warm
from tensorbus.clock import Deadline
from tensorbus.transport import BlockTable, Lines, Origin, Transfer, Ways, parse_addresses
from tensorbus.transport._blocks import checksum, cut

BENCH = "transfer"
CONNECTIONS = (1, 2, 4)
LANE_MBIT = 400
CALL_S = 120.0
IPERF_PORT = 5391

Runs = dict[tuple[str, int], list[float]]
"""GB/s, or seconds of a get, of each repeat by case and size."""


class Lender:
    """Another process that lends bytes, in this network or another."""

    def __init__(self, hosts: Sequence[str], nbytes: int, prefix: Sequence[str] = ()) -> None:
        command = [*prefix, sys.executable, "-m", "benchmarks._transfer_parts", "lend", ",".join(hosts), str(nbytes)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        said = json.loads(self._process.stdout.readline())
        self.addresses = parse_addresses(said["address"])
        self.bare = int(said["bare"])

    def __enter__(self) -> Lender:
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.kill()
        self._process.wait()


def bring(lenders: Sequence[tuple[Any, ...]], room: memoryview, ways: Ways) -> float:
    """Seconds of a transfer of the whole memory from all the addresses, each group of which is a source."""
    blocks = BlockTable([(0, len(room))]).blocks
    transfer = Transfer(blocks, room, tables="n", ways=ways)
    origins = [Origin(name=f"w{number}", addresses=tuple(group), request={}) for number, group in enumerate(lenders)]
    return transfer.run(origins, deadline=Deadline(CALL_S)).seconds


@contextlib.contextmanager
def iperf_server() -> Iterator[bool]:
    """Whether iperf3 is there; its server runs meanwhile."""
    if shutil.which("iperf3") is None:
        print("iperf3 is absent", file=sys.stderr)
        yield False
        return
    command = ["iperf3", "-s", "-B", "127.0.0.1", "-p", str(IPERF_PORT)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        time.sleep(0.5)
        try:
            yield True
        finally:
            server.kill()


def iperf(nbytes: int) -> float:
    command = ["iperf3", "-c", "127.0.0.1", "-p", str(IPERF_PORT), "-n", str(nbytes), "-J"]
    said = json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=CALL_S).stdout)
    return float(said["end"]["sum_received"]["bits_per_second"]) / 8e9


def hash_rate(room: memoryview) -> float:
    began = time.perf_counter()
    for block in cut([(0, len(room))]):
        checksum([room[at : at + count] for at, count in block])
    return len(room) / (time.perf_counter() - began) / 1e9


def loopback(sizes: Sequence[int], rounds: int) -> Runs:
    runs: Runs = defaultdict(list)
    memory = memoryview(warm(max(sizes), 1)).cast("B")
    lines = Lines()  # as in a worker, connections stay for the next transfer
    with Lender(["127.0.0.1"], max(sizes)) as lender, iperf_server() as has_iperf, contextlib.closing(lines):
        for nbytes in sizes:
            room = memory[:nbytes]
            # Checksums of what is lent are taken at its first read.
            bring([lender.addresses], memory, Ways(connections=max(CONNECTIONS), lines=lines))
            for _ in range(rounds):
                if has_iperf:
                    runs["iperf3", nbytes].append(iperf(nbytes))
                runs["checksum", nbytes].append(hash_rate(room))
                for connections in CONNECTIONS:
                    took = parts.draw(lender.bare, room, connections)
                    runs[f"sockets {connections}", nbytes].append(nbytes / took / 1e9)
                    for sums in (False, True):
                        ways = Ways(connections=connections, sums=sums, lines=lines)
                        took = bring([lender.addresses], room, ways)
                        runs[f"ours {connections} {sums}", nbytes].append(nbytes / took / 1e9)
                peers(nbytes, runs)
    return runs


def peers(nbytes: int, runs: Runs) -> None:
    """Two repeats of each peer in processes of its own; an absent one leaves no trace."""
    arguments = ["--repeats", "2", "--sizes", str(nbytes)]
    mooncake = find(run_peer("mooncake", "mooncake_transfer.py", arguments), case="read", nbytes=nbytes)
    gloo = find(run_here("gloo_transfer.py", arguments), case="send", nbytes=nbytes)
    runs["mooncake", nbytes] += [nbytes / took / 1e9 for took in mooncake]
    runs["gloo", nbytes] += [nbytes / took / 1e9 for took in gloo]


def run_here(script: str, arguments: Sequence[str]) -> list[dict[str, Any]]:
    """A peer that is in this environment already."""
    command = [sys.executable, f"benchmarks/peers/{script}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    if done.returncode != 0:
        print(f"{script} failed with {done.returncode}: {done.stderr[-1000:]}", file=sys.stderr)
        return []
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def loopback_rows(runs: Runs, nbytes: int) -> list[Row]:
    def row(case: str, key: str, against: str, theirs: float | None, target: float | None) -> Row:
        return _rate_row(f"{case}, {size(nbytes)}", runs.get((key, nbytes), []), against, theirs, target)

    def middle(key: str) -> float | None:
        return median_of(runs.get((key, nbytes), []))

    stream, hashing = middle("iperf3"), middle("checksum") or 0.0
    slower = None if stream is None else min(stream, hashing)
    best = max(CONNECTIONS, key=lambda n: middle(f"ours {n} True") or 0.0)
    rows = []
    for count in CONNECTIONS:
        name = f"{count} connection{'s' if count > 1 else ''}"
        rows.append(row(f"{name}, checksums off", f"ours {count} False", "iperf3, one stream", stream, 0.9))
        rows.append(row(f"{name}, checksums on", f"ours {count} True", "min(iperf3, XXH3-64)", slower, 0.9))
        bare = middle(f"sockets {count}")
        rows.append(row(f"{name}, checksums off", f"ours {count} False", "bare sockets", bare, None))
    for peer, target in (("mooncake", 1.5), ("gloo", 1.2)):
        rows.append(row(f"{best} connections, checksums on", f"ours {best} True", peer, middle(peer), target))
    return rows


def shaped_rows(nbytes: int, rounds: int) -> list[Row]:
    """One lane, two lanes to one source, and two lanes to a source each."""
    rates: Runs = defaultdict(list)
    room = memoryview(warm(nbytes, 1)).cast("B")
    with contextlib.ExitStack() as stack:
        found = stack.enter_context(lanes(2, LANE_MBIT))
        if found is not None:
            both = stack.enter_context(Lender(found.there, nbytes, found.prefix))
            second = stack.enter_context(Lender(found.there[1:], nbytes, found.prefix))
            ways = Ways(connections=2)
            for _ in range(rounds):
                for case, groups in (
                    ("one", [both.addresses[:1]]),
                    ("two paths", [both.addresses]),
                    ("two sources", [both.addresses[:1], second.addresses]),
                ):
                    rates[case, nbytes].append(nbytes / bring(groups, room, ways) / 1e9)
    one = median_of(rates["one", nbytes])
    lane = f"one lane of {LANE_MBIT} Mbit/s"
    return [
        _rate_row(f"{case}, {size(nbytes)}", rates[case, nbytes], lane, one, 1.85)
        for case in ("two paths", "two sources")
    ]


def ask(player: Player, verb: str, *arguments: object) -> Any:
    player.tell((verb, arguments))
    return player.hear(CALL_S)


def get_rows(sizes: Sequence[int], rounds: int) -> list[Row]:
    """An artifact that is on one host, read on another."""
    ours: Runs = defaultdict(list)
    theirs: Runs = defaultdict(list)
    with (
        crew("benchmarks._transfer_parts") as hired,
        running_home(workers=2, pool_bytes=8 * max(sizes) + 64 * MIB) as home,
    ):
        putter = _ready(hired, parts.put, home=str(home.path), nbytes_max=max(sizes))
        getter = _ready(hired, parts.get, home=str(home.path), host_id="h1")
        value = 0
        for turn in range(rounds + 1):
            for nbytes in sizes:
                for _ in range(4):
                    value = value % 250 + 1
                    _, ref = ask(putter, "put", nbytes, value, "now")
                    took, total = ask(getter, "get", ref)
                    if total != touched(nbytes, value):
                        raise SystemExit(f"a get of {nbytes} bytes gave other bytes: {total}")
                    ask(putter, "destroy")
                    if turn:
                        ours["get", nbytes].append(took)
            if turn:
                arguments = ["--repeats", "4", "--sizes", *map(str, sizes)]
                said = run_peer("mooncake", "mooncake_put_get.py", arguments)
                for nbytes in sizes:
                    theirs["get", nbytes] += find(said, case="get", nbytes=nbytes)
    return [_get_row(ours["get", nbytes], theirs["get", nbytes], nbytes) for nbytes in sizes]


def _ready(hired: Crew, part: Any, **arguments: object) -> Player:
    player = hired.hire(part, name=part.__name__, **arguments)
    player.hear(READY_S)
    return player


def _get_row(ours: list[float], theirs: list[float], nbytes: int) -> Row:
    return repeated(
        BENCH, f"get from another host's worker, {size(nbytes)}", ours, "ms", against="mooncake store get",
        theirs=median_of(theirs), better="lower", target=1.5, scale=1e3,
    )  # fmt: skip


def _rate_row(case: str, ours: list[float], against: str, theirs: float | None, target: float | None) -> Row:
    return repeated(BENCH, case, ours, "GB/s", against=against, theirs=theirs, better="higher", target=target)


def measure(options: Options) -> list[Row]:
    sizes, rounds = ([128 * MIB], 2) if options.quick else ([GIB, 4 * GIB], 5)
    runs = loopback(sizes, rounds)
    rows = [row for nbytes in sizes for row in loopback_rows(runs, nbytes)]
    rows += get_rows([MIB, 16 * MIB], 1 if options.quick else rounds)
    rows += host_rows([4 * KIB, MIB, 64 * MIB] if options.quick else [4 * KIB, MIB, 64 * MIB, GIB, 4 * GIB], rounds)
    return rows + shaped_rows(24 * MIB if options.quick else 64 * MIB, rounds)


def main() -> int:
    options = parse_options(__doc__)
    for peer in ("mooncake", "ray", "vineyard"):
        if peer_python(peer) is None:
            print(f"{peer}: {install(peer, PEERS)}", file=sys.stderr)
    return show(measure(options), options)


if __name__ == "__main__":
    raise SystemExit(main())
