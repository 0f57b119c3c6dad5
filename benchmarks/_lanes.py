"""Network paths of a fixed rate: a namespace behind pairs of virtual devices, each shaped on its way here."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Lanes:
    """Attributes:
    prefix: Before a command that is to run at the other end.
    there: Addresses of the other end, one for each lane.
    """

    prefix: list[str]
    there: list[str]


@contextlib.contextmanager
def lanes(count: int, mbit: int) -> Iterator[Lanes | None]:
    """That many lanes, gone at the end; ``None`` where this process may not make them."""
    name = f"tb{os.getpid() % 100_000}"
    try:
        yield _made(name, count, mbit)
    finally:
        _run("ip", "netns", "del", name, quiet=True)


def _made(name: str, count: int, mbit: int) -> Lanes | None:
    inside = ["ip", "netns", "exec", name]
    try:
        _run("ip", "netns", "add", name)
        there = []
        for lane in range(count):
            here, far, net = f"{name}h{lane}", f"{name}f{lane}", f"10.211.{os.getpid() % 120 + lane}"
            _run("ip", "link", "add", here, "type", "veth", "peer", "name", far, "netns", name)
            _run("ip", "addr", "add", f"{net}.1/24", "dev", here)
            _run("ip", "link", "set", here, "up")
            _run(*inside, "ip", "addr", "add", f"{net}.2/24", "dev", far)
            _run(*inside, "ip", "link", "set", far, "up")
            shape = ("tbf", "rate", f"{mbit}mbit", "burst", "512kb", "latency", "50ms")
            _run(*inside, "tc", "qdisc", "add", "dev", far, "root", *shape)
            there.append(f"{net}.2")
        return Lanes(inside, there)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"no shaped paths here: {error}", file=sys.stderr)
        return None


def _run(*command: str, quiet: bool = False) -> None:
    subprocess.run(command, check=not quiet, capture_output=True, timeout=20)
