"""Vineyard on one host: blobs put by this process, got by another, all at once, until each was read.

Its fastest way: plain blobs, without the names and types that its own tensors have, and a server that keeps its
metadata to itself. The reader has a connection already.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np
import vineyard
from _common import Bytes, arguments, emit, first_bytes, overlapping

START_S = 20.0


def connect(path: str) -> Any:
    """A client, once the server listens."""
    ends = time.monotonic() + START_S
    while True:
        try:
            return vineyard.connect(path)
        except Exception:
            if time.monotonic() > ends:
                raise
            time.sleep(0.1)


def read(line: Connection, path: str) -> None:
    """Get what is asked for; says the seconds and the sum of the first bytes."""
    client = connect(path)
    line.send("ready")
    while (names := line.recv()) is not None:
        refs = [vineyard.ObjectID(name) for name in names]
        started = time.perf_counter()
        total = first_bytes(np.frombuffer(memoryview(blob), np.uint8) for blob in client.get_blobs(refs))
        line.send((time.perf_counter() - started, total))


def put(client: Any, data: Bytes) -> Any:
    writer = client.create_blob(data.nbytes)
    np.copyto(np.frombuffer(memoryview(writer), np.uint8), data)
    return writer.seal(client).id


def measure(client: Any, line: Connection, nbytes: int, *, tensors: int, repeats: int) -> list[float]:
    runs = []
    for value in range(1, repeats + 2):
        data = overlapping(nbytes, tensors, value)
        refs = [put(client, tensor) for tensor in data]
        line.send([repr(ref) for ref in refs])
        took, total = line.recv()
        if total != first_bytes(data):
            raise SystemExit(f"vineyard gave other bytes: {total}")
        runs.append(took)
        client.delete(refs, force=True, deep=True)
    return runs[1:]


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--tensors", type=int, default=64)
    args = parser.parse_args()
    server = str(Path(vineyard.__file__).parent / "bdist" / "vineyardd")
    room = max(args.sizes) + max(args.sizes) // 4 + (256 << 20)
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/socket"
        command = [server, "--meta", "local", "--rpc=false", "--socket", path, "--size", str(room)]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as daemon:
            try:
                ours, theirs = get_context("spawn").Pipe()
                reader = get_context("spawn").Process(target=read, args=(theirs, path), daemon=True)
                reader.start()
                client = connect(path)
                ours.recv()
                for nbytes in args.sizes:
                    runs = measure(client, ours, nbytes, tensors=args.tensors, repeats=args.repeats)
                    emit("vineyard", "vineyard", case="first bytes", nbytes=nbytes, runs_s=runs)
                ours.send(None)
                reader.join()
            finally:
                daemon.terminate()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
