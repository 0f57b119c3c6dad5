"""The parts that processes play in ``benchmarks.transfer``: who lends bytes, bare sockets, and who gets artifacts.

``python -m benchmarks._transfer_parts lend HOSTS NBYTES`` lends until standard input ends, in whatever network it runs.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection

import tensorbus as tb
from benchmarks import _store_parts
from benchmarks.peers._common import warm
from tensorbus.errors import InvalidArgumentError
from tensorbus.transport import BlockTable, BulkServer, BulkSink, BulkSource, SourceTables

VALUE = 7
CHUNK = 8 << 20
TENSOR = _store_parts.TENSOR
PRELOADED = tb.connect


class Lender:
    """Warm memory for whoever asks."""

    def __init__(self, nbytes: int) -> None:
        self._data = memoryview(warm(nbytes, VALUE)).cast("B")
        blocks = BlockTable([(0, nbytes)])
        self._tables = SourceTables(manifest="[]", layout="{}", name="n", blocks=blocks)

    def open_source(self, request: Mapping[str, object]) -> BulkSource:
        return BulkSource(
            tables=self._tables, nbytes=len(self._data), parts=[self._data], generation=1,
            valid=lambda: True, release=lambda: None,
        )  # fmt: skip

    def open_sink(self, request: Mapping[str, object], nbytes: int) -> BulkSink:
        raise InvalidArgumentError("this one only lends")


def pour(listener: socket.socket, nbytes: int) -> None:
    """Send the same memory to each that connects: the bare floor of what a Python process can do."""
    data = memoryview(warm(nbytes, VALUE)).cast("B")

    def send(sock: socket.socket) -> None:
        with sock:
            start, count = json.loads(sock.recv(100))
            for at in range(start, start + count, CHUNK):
                sock.sendall(data[at : min(at + CHUNK, start + count)])

    while True:
        threading.Thread(target=send, args=(listener.accept()[0],), daemon=True).start()


def draw(port: int, room: memoryview, connections: int) -> float:
    """Seconds of filling memory from :func:`pour`."""
    share = -(-len(room) // connections)

    def receive(start: int) -> None:
        end = min(start + share, len(room))
        with socket.create_connection(("127.0.0.1", port)) as sock:
            sock.sendall(json.dumps([start, end - start]).encode())
            while start < end:
                start += sock.recv_into(room[start : min(start + CHUNK, end)], 0, socket.MSG_WAITALL)

    threads = [threading.Thread(target=receive, args=(at,)) for at in range(0, len(room), share)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - began


def get(cue: Connection, *, home: str, host_id: str) -> None:
    """Reads artifacts on a host that does not have them yet."""
    with tb.connect(home=home, host_id=host_id, timeout=120) as bus:
        _store_parts.serve(cue, _store_parts.Getter(bus))


def put(cue: Connection, *, home: str, nbytes_max: int) -> None:
    with tb.connect(home=home, host_id="h0", timeout=120) as bus:
        _store_parts.serve(cue, _store_parts.Putter(bus, nbytes_max))


def main() -> int:
    _, hosts, nbytes = sys.argv[1:]
    server = BulkServer(hosts, 0, Lender(int(nbytes)))
    listener = socket.create_server((hosts.split(",")[0], 0))
    threading.Thread(target=pour, args=(listener, int(nbytes)), daemon=True).start()
    print(json.dumps({"address": server.address, "bare": listener.getsockname()[1]}), flush=True)
    sys.stdin.read()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
