"""Mooncake Store on one host, at its default settings over TCP: three processes, as it is deployed.

One holds the memory, this one puts, a third gets into a buffer that is registered and warm, then reads a byte of every
page. All addresses are loopback.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("MC_TCP_BIND_ADDRESS", "127.0.0.1")  # its default is the machine's first address
sys.path.insert(0, str(Path(__file__).resolve().parent))

import mooncake
from _common import arguments, emit, free_ports, touch, touched, warm
from mooncake.store import MooncakeDistributedStore

PACKAGE = "mooncake-transfer-engine-non-cuda"
LOCAL_BUFFER = 256 << 20


def start_master(rpc: int, http: int, metrics: int) -> subprocess.Popen[bytes]:
    """The master with its metadata server. The lease must outlast a get."""
    program = Path(next(iter(mooncake.__path__))) / "mooncake_master"
    flags = {
        "rpc_address": "127.0.0.1",
        "rpc_port": rpc,
        "enable_http_metadata_server": "true",
        "http_metadata_server_host": "127.0.0.1",
        "http_metadata_server_port": http,
        "metrics_host": "127.0.0.1",
        "metrics_port": metrics,
        "default_kv_lease_ttl": 60000,
    }
    command = [str(program), *(f"--{name}={value}" for name, value in flags.items())]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def connect(segment: int, *, rpc: int, http: int, attempts: int = 50) -> Any:
    """A client that offers ``segment`` bytes of memory; waits for the master to come up."""
    for _ in range(attempts):
        store = MooncakeDistributedStore()
        with free_ports(1) as (port,):
            done = store.setup(
                f"127.0.0.1:{port}", f"http://127.0.0.1:{http}/metadata", segment, LOCAL_BUFFER, "tcp", "",
                f"127.0.0.1:{rpc}",
            )  # fmt: skip
        if done == 0:
            return store
        time.sleep(0.2)
    raise SystemExit("the mooncake master did not answer")


def answer(message: object) -> None:
    print("@" + json.dumps(message), flush=True)


class Helper:
    """This script in another process, told what to do by JSON lines; its library logs to the same stream."""

    def __init__(self, role: str, *, rpc: int, http: int, nbytes: int) -> None:
        command = [
            sys.executable,
            __file__,
            "--role",
            role,
            "--rpc",
            str(rpc),
            "--http",
            str(http),
            "--sizes",
            str(nbytes),
        ]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self.read()

    def ask(self, message: object) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(message) + "\n")
        self.process.stdin.flush()
        return self.read()

    def read(self) -> Any:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("@"):
                return json.loads(line[1:])
        raise SystemExit("a helper of the mooncake benchmark ended")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def hold(rpc: int, http: int, nbytes: int) -> None:
    """Offer memory until standard input ends."""
    store = connect(2 * nbytes + (256 << 20), rpc=rpc, http=http)
    answer("ready")
    sys.stdin.read()
    store.close()


def read_keys(rpc: int, http: int, nbytes: int) -> None:
    """Get what is asked for into one warm buffer and answer with the seconds and the pages' sum."""
    store = connect(0, rpc=rpc, http=http)
    buffer = warm(nbytes, 1)
    store.register_buffer(buffer.ctypes.data, nbytes)
    answer("ready")
    for line in sys.stdin:
        key, wanted = json.loads(line)
        buffer[:wanted] = 0
        started = time.perf_counter()
        got = store.get_into(key, buffer.ctypes.data, wanted)
        total = touch(buffer[:wanted])
        elapsed = time.perf_counter() - started
        answer([elapsed, total if got == wanted else -1])
    store.close()


def measure(store: Any, reader: Helper, data: Any, key: str, value: int) -> tuple[float, float]:
    """Seconds of one put and of one get; the object is removed afterwards."""
    data[:] = value
    started = time.perf_counter()
    done = store.put_from(key, data.ctypes.data, data.nbytes)
    put_s = time.perf_counter() - started
    if done != 0:
        raise SystemExit(f"mooncake refused a put of {data.nbytes} bytes: {done}")
    get_s, total = reader.ask([key, data.nbytes])
    if total != touched(data.nbytes, value):
        raise SystemExit(f"mooncake gave other bytes: {total}")
    store.remove(key, True)
    return put_s, get_s


def drive(sizes: list[int], repeats: int) -> None:
    with free_ports(3) as (rpc, http, metrics):
        master = start_master(rpc, http, metrics)
    helpers: list[Helper] = []
    try:
        for role in ("hold", "read"):
            helpers.append(Helper(role, rpc=rpc, http=http, nbytes=max(sizes)))
        store = connect(0, rpc=rpc, http=http)
        data = warm(max(sizes), 1)
        store.register_buffer(data.ctypes.data, data.nbytes)
        for nbytes in sizes:
            runs = [measure(store, helpers[1], data[:nbytes], f"{nbytes}-{n}", n + 2) for n in range(repeats + 1)][1:]
            emit("mooncake", PACKAGE, case="put", nbytes=nbytes, runs_s=[put_s for put_s, _ in runs])
            emit("mooncake", PACKAGE, case="get", nbytes=nbytes, runs_s=[get_s for _, get_s in runs])
    finally:
        for helper in helpers:
            helper.close()
        master.kill()
        master.wait()


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument(
        "--role", choices=("drive", "hold", "read"), default="drive", help="for the script's own helpers"
    )
    parser.add_argument("--rpc", type=int, default=0)
    parser.add_argument("--http", type=int, default=0)
    args = parser.parse_args()
    if args.role == "drive":
        drive(args.sizes, args.repeats)
    else:
        {"hold": hold, "read": read_keys}[args.role](args.rpc, args.http, args.sizes[0])
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # the library's threads outlive its close and would hold the process
