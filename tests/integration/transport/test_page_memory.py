"""Page memory between real processes: never a byte of another page, whoever dies when."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from tensorbus.transport import PAGE_PLACE, PagePool, PageSource, PageState, Pool, TenantPages
from tests.integration.transport.page_process import pattern
from tests.paths import Lender, lending, wait_for

pytestmark = pytest.mark.integration

SCRIPT = Path(__file__).with_name("page_process.py")
NBYTES, SLOTS = 128 << 10, 64


@pytest.fixture
def pages() -> Iterator[PagePool]:
    pool = Pool(64 << 20)
    made = PagePool(pool, arena_bytes=SLOTS * NBYTES)
    yield made
    made.close()
    pool.close()


def start(pages: PagePool, segment: int, what: str, fds: tuple[int, ...], *args: str) -> subprocess.Popen[str]:
    shape = pages.shape(segment)
    words = [str(os.getpid()), what, ",".join(map(str, fds)), str(shape.slots), str(shape.slot_bytes), *args]
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), *words],
        pass_fds=fds,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[3])},
    )
    for fd in fds:
        os.close(fd)
    return process


@dataclass
class Owner:
    """Serves the pages to everybody."""

    pages: PagePool

    def open_pages(self, request: Mapping[str, object]) -> PageSource:
        return TenantPages(self.pages, str(request["permit"]))


@pytest.mark.parametrize("path", ["mapped", "tcp"])
def test_a_reader_never_takes_another_pages_bytes_while_slots_are_used_again(pages: PagePool, path: str) -> None:
    segment = pages.grow(NBYTES, tenant="t")
    stop = threading.Event()

    def reuse() -> None:
        rng = np.random.default_rng(4)
        live = np.empty(0, PAGE_PLACE)
        while not stop.is_set():
            while len(live) < SLOTS - 8:
                live = np.concatenate([live, fill()])
            chosen = rng.permutation(len(live))
            assert pages.free(live[chosen[:6]]).all()
            live = live[chosen[6:]]

    def fill() -> np.ndarray:
        places = pages.reserve(3, NBYTES, tenant="t")
        words = np.broadcast_to(pattern(places["slot"], places["generation"])[:, None], (len(places), NBYTES // 8))
        assert pages.commit(places, pages.write(places, words.copy(), NBYTES)).all()
        return places

    owner = threading.Thread(target=reuse)
    with lending(Lender(bytearray(1)), pages=Owner(pages)) as server:
        port = str(server.port if path == "tcp" else 0)
        readers = [start(pages, segment, "read", pages.open_reader(segment), "30", port) for _ in range(2)]
        owner.start()
        try:
            found = [json.loads(reader.communicate(timeout=60)[0]) for reader in readers]
        finally:
            stop.set()
            owner.join()
    for counts in found:
        assert counts["wrong"] == counts["corrupt"] == counts["lost"] == 0, counts
        assert counts["ok"] > 500, counts
        assert counts["torn"] > 20, "the test did not hurt"


def test_what_a_killed_writer_left_half_written_is_not_readable_and_is_used_again(pages: PagePool) -> None:
    before = len(os.listdir("/proc/self/fd"))
    segment = pages.grow(NBYTES, tenant="t", writer="w")
    places = pages.reserve(4, NBYTES, tenant="t", writer="w")
    process = start(pages, segment, "write", pages.open_writer(segment))
    assert process.stdout is not None
    assert process.stdout.readline() == "writing\n"
    wait_for(lambda: bool(pages._arena(segment).rows[3, -1] == 7))
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert pages.writer_gone("w") == 4
    out = np.zeros((4, NBYTES), np.uint8)
    assert (pages.read_into(places, out, NBYTES) == PageState.GONE).all()
    assert not pages.commit(places).any(), "a commit that was on its way"

    def ours() -> bool:
        pages._pool.reap()
        return not pages._arena(segment).segment.writer_mapped

    wait_for(ours)
    taken = pages.reserve(SLOTS, NBYTES, tenant="t")
    assert len(taken) == SLOTS, "no map is left through which somebody else could write"
    assert pages.commit(taken, pages.write(taken, np.ones((SLOTS, NBYTES), np.uint8), NBYTES)).all()
    assert not pages.read_into(taken[:4], out, NBYTES, verify=True).any()
    pages.free(taken)
    assert pages.shrink() == SLOTS * NBYTES
    pages._pool.close()
    assert len(os.listdir("/proc/self/fd")) <= before
