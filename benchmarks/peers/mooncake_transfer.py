"""Mooncake's transfer engine over TCP between two processes on loopback, registered and warm memory on both sides.

The bytes are split over as many requests as the engine likes best here: slices of 64 MiB in one batch.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

os.environ.setdefault("MC_TCP_BIND_ADDRESS", "127.0.0.1")  # its default is the machine's first address
sys.path.insert(0, str(Path(__file__).resolve().parent))

from _common import arguments, emit, warm
from mooncake.engine import TransferEngine

PACKAGE = "mooncake-transfer-engine-non-cuda"
SLICE = 64 << 20
VALUE = 7


def engine() -> TransferEngine:
    made = TransferEngine()
    if made.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") != 0:
        raise SystemExit("the engine does not start")
    return made


def hold(nbytes: int) -> None:
    """Offer memory until standard input ends."""
    made, memory = engine(), warm(nbytes, VALUE)
    if made.register_memory(memory.ctypes.data, nbytes) != 0:
        raise SystemExit("the engine does not take the memory")
    print(json.dumps([made.get_rpc_port(), memory.ctypes.data]), flush=True)
    sys.stdin.read()


def drive(sizes: list[int], repeats: int) -> None:
    command = [sys.executable, __file__, "--role", "hold", "--sizes", str(max(sizes))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdin is not None
        line = next(text for text in holder.stdout if text.startswith("["))
        port, there = json.loads(line)
        made, memory = engine(), warm(max(sizes), 1)
        made.register_memory(memory.ctypes.data, max(sizes))
        for nbytes in sizes:
            runs = []
            for _ in range(repeats + 1):
                starts = range(0, nbytes, SLICE)
                lengths = [min(SLICE, nbytes - start) for start in starts]
                memory[:nbytes] = 1
                began = time.perf_counter()
                done = made.batch_transfer_sync_read(
                    f"127.0.0.1:{port}", [memory.ctypes.data + s for s in starts], [there + s for s in starts], lengths
                )
                runs.append(time.perf_counter() - began)
                if done != 0 or memory[0] != VALUE or memory[nbytes - 1] != VALUE:
                    raise SystemExit(f"the engine read {nbytes} bytes wrongly: {done}")
            emit("mooncake", PACKAGE, case="read", nbytes=nbytes, runs_s=runs[1:])
        holder.stdin.close()


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--role", choices=("drive", "hold"), default="drive", help="for the script's own helper")
    args = parser.parse_args()
    if args.role == "hold":
        hold(args.sizes[0])
    else:
        drive(args.sizes, args.repeats)
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # the library's threads outlive its close and would hold the process
