"""Shared by the peers' scripts, which run in venvs without tensorbus: arguments, warm buffers, pages, JSON lines."""

from __future__ import annotations

import argparse
import contextlib
import json
import mmap
import socket
from collections.abc import Iterable, Iterator
from importlib.metadata import version

import numpy as np
import numpy.typing as npt

PAGE = 4096
Bytes = npt.NDArray[np.uint8]


def arguments(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1 << 20, 16 << 20, 1 << 30], help="bytes")
    parser.add_argument("--repeats", type=int, default=5, help="measured runs of each size, after one that is not")
    return parser


def warm(nbytes: int, value: int) -> Bytes:
    """Memory whose pages are all there already."""
    array = np.frombuffer(mmap.mmap(-1, nbytes), dtype=np.uint8)
    array[:] = value
    return array


def touch(array: Bytes) -> int:
    """Read one byte of every page."""
    return int(array[::PAGE].sum(dtype=np.int64))


def touched(nbytes: int, value: int) -> int:
    """What :func:`touch` answers for memory filled with ``value``."""
    return -(-nbytes // PAGE) * value


def overlapping(nbytes: int, tensors: int, value: int) -> list[Bytes]:
    """Tensors of so many bytes together, all different, over memory of little more than one of them."""
    each, step = nbytes // tensors, 64
    memory = warm(each + tensors * step, value % 200)
    for number in range(tensors):
        memory[number * step] = (value + number) % 251
    return [memory[number * step : number * step + each] for number in range(tensors)]


def first_bytes(tensors: Iterable[Bytes]) -> int:
    """Read the first byte of each; their sum."""
    return sum(int(tensor.reshape(-1)[0]) for tensor in tensors)


def emit(peer: str, package: str, *, case: str, nbytes: int, runs_s: list[float]) -> None:
    line = {"peer": peer, "version": version(package), "case": case, "nbytes": nbytes, "runs_s": runs_s}
    print(json.dumps(line), flush=True)


@contextlib.contextmanager
def free_ports(count: int) -> Iterator[list[int]]:
    """Ports that were free; all are held until each has been named, so that they differ."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for sock in sockets:
            sock.bind(("127.0.0.1", 0))
        ports = [sock.getsockname()[1] for sock in sockets]
    yield ports
