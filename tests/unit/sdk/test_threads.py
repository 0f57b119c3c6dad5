"""Work in threads: it is run, given up, and still done while the interpreter ends."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading

import pytest

from tensorbus.errors import UnavailableError
from tensorbus.sdk._threads import DaemonThreads, in_thread, in_thread_to_its_end, share_out


async def test_results_and_errors_come_back() -> None:
    assert await asyncio.gather(*(in_thread(lambda n=n: n) for n in range(100))) == list(range(100))
    with pytest.raises(ZeroDivisionError):
        await in_thread(lambda: 1 // 0)


async def test_a_cancelled_caller_waits_for_the_end_and_nothing_is_reported() -> None:
    reported: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: reported.append(context))
    begun, ended = threading.Event(), threading.Event()

    def work(stop: threading.Event) -> None:
        begun.set()
        assert stop.wait(10)
        ended.set()
        raise RuntimeError("given up")

    task = asyncio.ensure_future(in_thread_to_its_end(work))
    await in_thread(lambda: begun.wait(10))
    task.cancel()
    await asyncio.sleep(0)
    task.cancel()  # a second one changes nothing
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()
    del task
    await asyncio.sleep(0)
    assert reported == []


def test_no_more_threads_than_wanted_and_idle_ones_serve_again() -> None:
    threads = DaemonThreads(2)
    names = [threads.submit(threading.get_ident).result(10) for _ in range(5)]
    assert len(set(names)) == 1
    both = threading.Barrier(2)
    assert [f.result(10) for f in [threads.submit(both.wait, 10) for _ in range(2)]] in ([0, 1], [1, 0])
    gate = threading.Event()
    waiting = [threads.submit(gate.wait, 10) for _ in range(6)]
    assert threads._count == 2
    gate.set()
    assert all(f.result(10) for f in waiting)


def test_a_thread_that_cannot_be_started_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(UnavailableError, match="no more threads"):
        DaemonThreads().submit(int)
    done: list[int] = []
    share_out([lambda: done.append(1), lambda: done.append(2)], threads=4)  # then this thread does it all
    assert done == [1, 2]


def test_the_first_error_of_shared_work_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        share_out([lambda: 1 // 0] * 10, threads=3)  # type: ignore[list-item]


def test_a_forked_child_has_threads_of_its_own() -> None:
    assert asyncio.run(in_thread(lambda: 1)) == 1
    code = (
        "import asyncio, os\nfrom tensorbus.sdk._threads import in_thread\n"
        "assert asyncio.run(in_thread(lambda: 1)) == 1\npid = os.fork()\n"
        "if not pid: os._exit(asyncio.run(in_thread(lambda: 7)))\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env={**os.environ})


def test_threads_serve_when_the_main_one_has_ended() -> None:
    code = (
        "import asyncio, threading, time\nfrom tensorbus.sdk._threads import in_thread\n"
        "def late():\n    threading.main_thread().join()\n    print(asyncio.run(in_thread(lambda: 'served')))\n"
        "threading.Thread(target=late).start()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("served\n", "")
