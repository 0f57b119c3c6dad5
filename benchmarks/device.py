"""Device memory: copies to it, from it and within it, against bare calls; what allocating, exporting and opening cost.

Of the first GPU; without one, of the host's memory.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from benchmarks._table import GIB, MIB, Options, Row, compare, parse_options, show, size, spread
from tensorbus.testing._device_child import Neighbour
from tensorbus.transport import CudaDevice, Device, HostDevice, cuda_missing
from tensorbus.transport._device_runtime import D2D, D2H, H2D, HOST_PORTABLE, STREAM_NON_BLOCKING

Bytes = npt.NDArray[np.uint8]
Work = Callable[[], object]

BENCH = "device"
REPEATS, REPEATS_QUICK = 7, 2
SIZES, SIZES_QUICK = (MIB, 64 * MIB, GIB), (MIB, 16 * MIB)


class Bare:
    """The same copies as the runtime's own calls, or the C library's: what the hardware gives."""

    def __init__(self, device: Device, nbytes: int) -> None:
        self._cuda = device.runtime if isinstance(device, CudaDevice) else None
        self.near, self.far = np.ones(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
        self._nbytes = nbytes
        if self._cuda is not None:
            self._stream = self._cuda.streamCreateWithFlags(STREAM_NON_BLOCKING)
            self._locked = self._cuda.hostAlloc(nbytes, HOST_PORTABLE)
            self._first, self._second = self._cuda.malloc(nbytes), self._cuda.malloc(nbytes)

    def up(self) -> None:
        self._move(self._first, self._locked, H2D) if self._cuda else np.copyto(self.far, self.near)

    def down(self) -> None:
        self._move(self._locked, self._first, D2H) if self._cuda else np.copyto(self.near, self.far)

    def within(self) -> None:
        self._move(self._second, self._first, D2D) if self._cuda else np.copyto(self.far, self.near)

    def pageable_up(self) -> None:
        self._move(self._first, self.near.ctypes.data, H2D) if self._cuda else np.copyto(self.far, self.near)

    def pageable_down(self) -> None:
        self._move(self.near.ctypes.data, self._first, D2H) if self._cuda else np.copyto(self.near, self.far)

    def close(self) -> None:
        if self._cuda is not None:
            self._cuda.free(self._first)
            self._cuda.free(self._second)
            self._cuda.freeHost(self._locked)
            self._cuda.streamDestroy(self._stream)

    def _move(self, target: int, source: int, kind: int) -> None:
        assert self._cuda is not None
        self._cuda.memcpyAsync(target, source, self._nbytes, kind, self._stream)
        self._cuda.streamSynchronize(self._stream)


def seconds(works: Sequence[Work], repeats: int) -> list[list[float]]:
    """How long each work takes, alternating; the first round is for warming up."""
    found: list[list[float]] = [[] for _ in works]
    for round_ in range(repeats + 1):
        for number, work in enumerate(works):
            began = time.perf_counter()
            work()
            if round_:
                found[number].append(time.perf_counter() - began)
    return found


def rate_rows(case: str, nbytes: int, work: Work, against: str, bare: Work, repeats: int, target: float | None) -> Row:
    ours, theirs = seconds((work, bare), repeats)
    rates = [nbytes / took / 1e9 for took in ours]
    return compare(
        BENCH,
        f"{case}, {size(nbytes)}",
        statistics.median(rates),
        "GB/s",
        against=against,
        against_value=nbytes / statistics.median(theirs) / 1e9,
        better="higher",
        target=target,
        spread=spread(rates),
    )


def copies(device: Device, nbytes: int, repeats: int) -> list[Row]:
    """Copies of one size. Large ones are to reach nine tenths of the bare rate."""
    bare = Bare(device, nbytes)
    first, second = (device.allocate(nbytes, tenant="bench") for _ in range(2))
    target = 0.9 if nbytes >= 64 * MIB else None
    host: Bytes = np.ones(nbytes, np.uint8)
    rows: list[Row] = []

    def row(case: str, work: Work, against: str, other: Work, goal: float | None) -> None:
        rows.append(rate_rows(case, nbytes, work, against, other, repeats, goal))

    row("up, pageable", lambda: device.upload(host, first), "bare pageable", bare.pageable_up, None)
    row("down, pageable", lambda: device.download(first, host), "bare pageable", bare.pageable_down, None)
    with device.lock(host):
        row("up, locked", lambda: device.upload(host, first), "bare locked", bare.up, target)
        row("down, locked", lambda: device.download(first, host), "bare locked", bare.down, target)
    row("within", lambda: device.copy(first, second, nbytes=nbytes), "bare", bare.within, target)
    rows.append(both_ways(device, nbytes, repeats))
    for buffer in (first, second):
        device.free(buffer)
    bare.close()
    return rows


def both_ways(device: Device, nbytes: int, repeats: int) -> Row:
    """Up and down at once on two streams, against one after the other."""
    up: Bytes = np.ones(nbytes, np.uint8)
    down: Bytes = np.ones(nbytes, np.uint8)
    first, second = (device.allocate(nbytes, tenant="bench") for _ in range(2))
    with device.lock(up), device.lock(down), device.stream() as one, device.stream() as two:

        def together() -> None:
            device.upload(up, first, stream=one)
            device.download(second, down, stream=two)
            one.synchronize()
            two.synchronize()

        def in_turn() -> None:
            device.upload(up, first)
            device.download(second, down)

        row = rate_rows("up and down at once", 2 * nbytes, together, "in turn", in_turn, repeats, None)
    device.free(first)
    device.free(second)
    return row


def memory(device: Device, nbytes: int, repeats: int) -> list[Row]:
    """What a buffer costs: anew, and again; what locking host memory costs."""
    host: Bytes = np.ones(nbytes, np.uint8)
    tenants = iter(range(1_000_000))

    def anew() -> None:
        device.free(device.allocate(nbytes, tenant=f"bench {next(tenants)}"))

    def again() -> None:
        device.free(device.allocate(nbytes, tenant="again"))

    def lock() -> None:
        device.lock(host).release()

    found = seconds((anew, again, lock), repeats)
    names = ("allocate and free anew", "allocate and free again", "lock and unlock")
    return [cost(f"{name}, {size(nbytes)}", took) for name, took in zip(names, found, strict=True)]


def exports(device: Device, name: str, nbytes: int, repeats: int) -> list[Row]:
    """Exporting a buffer, and opening it in another process."""
    buffer = device.allocate(nbytes, tenant="bench")
    exporting, opening = [], []
    with Neighbour(name) as neighbour:
        for _ in range(repeats + 1):
            began = time.perf_counter()
            export = device.export(buffer)
            exporting.append(time.perf_counter() - began)
            opening.append(neighbour.open_ns(export) / 1e9)
            neighbour.let_go()
    device.withdraw(buffer)
    device.free(buffer)
    return [
        cost(f"export, {size(nbytes)}", exporting[1:]),
        cost(f"open in another process, {size(nbytes)}", opening[1:]),
    ]


def cost(case: str, took: Sequence[float]) -> Row:
    value = statistics.median(took) * 1e6
    return Row(bench=BENCH, case=case, value=value, unit="us", spread=spread(took, scale=1e6))


def verify(device: Device) -> None:
    """The rates are of copies that are right."""
    data = np.random.default_rng(1).integers(0, 256, 5_000_011, dtype=np.uint8)
    buffer, room = device.allocate(data.nbytes, tenant="bench"), np.zeros_like(data)
    device.upload(data, buffer)
    device.download(buffer, room)
    device.free(buffer)
    if not np.array_equal(data, room):
        raise AssertionError(f"{device.name} gave back other bytes than it was given")


def measure(device: Device, *, neighbour: str | None, quick: bool) -> list[Row]:
    """All rows.

    Args:
        device: What is measured.
        neighbour: Its name in another process; exports are not measured without.
        quick: Whether it runs, not how fast it is.
    """
    repeats = REPEATS_QUICK if quick else REPEATS
    verify(device)
    rows = []
    for nbytes in SIZES_QUICK if quick else SIZES:
        rows += copies(device, nbytes, repeats)
        rows += memory(device, nbytes, repeats)
        rows += exports(device, neighbour, nbytes, repeats) if neighbour else []
    return rows


def main() -> int:
    options: Options = parse_options(__doc__)
    missing = cuda_missing()
    device: Device = CudaDevice(0) if missing is None else HostDevice()
    if missing is not None:
        print(f"no GPU ({missing}); measuring host memory", file=sys.stderr)
    try:
        print(f"{device.name}: {device.description}", file=sys.stderr)
        return show(measure(device, neighbour=device.name, quick=options.quick), options)
    finally:
        device.close()


if __name__ == "__main__":
    sys.exit(main())
