"""Whom a bus speaks to, of the workers that live in a home."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tensorbus.errors import UnavailableError
from tensorbus.sdk import Place
from tensorbus.sdk._place import addresses
from tensorbus.transport import WorkerCard, locked, run_dir, write_card

Live = Callable[..., None]


@pytest.fixture
def live(home: Path) -> Iterator[Live]:
    """Has a worker live in the home, as far as others see."""
    with ExitStack() as stack:

        def add(worker: str, *roles: str, host: str = "h", control: str = "") -> None:
            run = run_dir(home)
            stack.enter_context(locked(run / f"{worker}.lock", what=worker))
            sock = f"{worker}.sock"
            write_card(
                run,
                WorkerCard(
                    worker=worker,
                    incarnation="i",
                    host_id=host,
                    roles=roles,
                    pid=1,
                    socket=sock,
                    control=control,
                    data="",
                ),
            )

        yield add


def chosen(home: Path) -> list[str]:
    place = Place(home=home, host_id="h", url=None, tenant="default", timeout_s=1.0)
    return [f"{address.worker} {'unix' if address.path else 'tcp'}" for address in addresses(place)]


def test_the_worker_with_memory_comes_first_then_others_of_the_host_then_gateways(home: Path, live: Live) -> None:
    live("a-store", "store")
    live("b-gate", "gateway", "store", control="127.0.0.1:1")
    live("c-far", "gateway", host="far", control="127.0.0.1:2")
    live("d-far", "basic", host="far")
    assert chosen(home) == ["b-gate unix", "a-store unix", "c-far tcp"]
    live("z-basic", "basic")
    assert chosen(home) == ["z-basic unix", "b-gate unix", "a-store unix", "c-far tcp"]


def test_a_worker_of_another_host_is_nobody_to_speak_to(home: Path, live: Live) -> None:
    live("d-far", "basic", host="far")
    with pytest.raises(UnavailableError, match="no worker for host id 'h'"):
        chosen(home)
