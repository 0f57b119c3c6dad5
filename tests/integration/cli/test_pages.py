"""``tensorbus pages status`` and what ``doctor`` says of homes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tensorbus.cli._app import run
from tensorbus.testing._processes import WorkerProgram, wait_until

pytestmark = pytest.mark.integration


def test_the_homes_of_shards_are_shown(
    start_worker: Callable[..., WorkerProgram], home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def status() -> dict[str, object]:
        assert run(["pages", "status", "--home", str(home), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert isinstance(found, dict)
        return found

    assert run(["pages", "status", "--home", str(home)]) == 6
    start_worker("basic", id="w1")
    assert run(["pages", "status", "--home", str(home)]) == 0
    assert "no home" in capsys.readouterr().out
    stopped = start_worker("shard-home", id="h1", page_shards=8)
    wait_until(lambda: status()["nobodys"] == [] and status()["shards"] == 8, what="a home of every shard")
    assert run(["pages", "status", "--home", str(home)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].split()[:4] == ["h1", "alive", "8", "8"]
    run(["doctor", "--home", str(home)])
    assert "1 homes answer for 8 shards, 0 pages" in capsys.readouterr().out
    stopped.stop()
    wait_until(lambda: status()["nobodys"] == list(range(8)), what="a cluster without a home")
