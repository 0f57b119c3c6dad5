"""Gloo, as torch brings it: one process sends a tensor to another over loopback, both warm."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
import torch.distributed as dist
from _common import arguments, emit, free_ports, warm

SLICE = 64 << 20


def pieces(nbytes: int, value: int) -> list[torch.Tensor]:
    return list(torch.from_numpy(warm(nbytes, value)).split(SLICE))


def join(rank: int, port: int) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)


def receive(sizes: list[int], repeats: int, port: int) -> None:
    join(1, port)
    done = torch.zeros(1)
    for nbytes in sizes:
        room = pieces(nbytes, 1)
        for _ in range(repeats + 1):
            for piece in room:
                dist.recv(piece, 0)
            dist.send(done, 0)


def send(sizes: list[int], repeats: int) -> None:
    with free_ports(1) as (port,):
        pass
    command = [sys.executable, __file__, "--role", "receive", "--port", str(port), "--repeats", str(repeats), "--sizes"]
    with subprocess.Popen([*command, *map(str, sizes)]):
        join(0, port)
        done = torch.zeros(1)
        for nbytes in sizes:
            data, runs = pieces(nbytes, 7), []
            for _ in range(repeats + 1):
                began = time.perf_counter()
                for piece in data:
                    dist.send(piece, 1)
                dist.recv(done, 1)
                runs.append(time.perf_counter() - began)
            emit("gloo", "torch", case="send", nbytes=nbytes, runs_s=runs[1:])


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--role", choices=("send", "receive"), default="send", help="for the script's own helper")
    parser.add_argument("--port", type=int, default=0)
    args = parser.parse_args()
    if args.role == "receive":
        receive(args.sizes, args.repeats, args.port)
    else:
        send(args.sizes, args.repeats)
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)
