"""Eight processes put one id at once through two workers; ids are the same in every process."""

from __future__ import annotations

import json
import os
from collections import Counter

import pytest

from tensorbus.errors import NotFoundError
from tests.chaos.conftest import Field, eventually, said
from tests.integration.workers.actor import data_of
from tests.integration.workers.raw import Raw
from tests.sizes import SIZES

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(SIZES.timeout_s)]

IDS = """
import json, sys
sys.path.insert(0, ".")
from tensorbus.events import Subjects, aggregate
from tensorbus.ids import run_id, subject_token
from tensorbus.model import Manifest, TensorSpec, plan_layout
from tests.golden.logs import make
names = set(f"layer.{n}.weight" for n in range(200)) | {"", "Ä", "a.b"}
specs = [TensorSpec(name, "f32", (len(name), 2), "ab" * 32) for name in names if name]
manifest = Manifest(tuple(specs))
print(json.dumps({
    "content": manifest.content_id(),
    "json": manifest.to_json(),
    "layout": plan_layout(manifest).to_json(),
    "token": subject_token("artifact", "acme", "Qwen/Qwen3-8B"),
    "run": run_id("acme", "key"),
    "fact": Subjects().fact(aggregate("key", "acme", "k"), "w1"),
    "folds": {name: make.fold(name).hash() for name in make.names()},
    "whole": {name: make.fold(name).full_hash() for name in make.names()},
}))
"""


@pytest.mark.parametrize("digest", [True, False], ids=["digest now", "digest later"])
@pytest.mark.parametrize("equal", [True, False], ids=["equal bytes", "other bytes"])
async def test_processes_that_put_one_id_at_once_through_two_workers(field: Field, equal: bool, digest: bool) -> None:
    workers = [field.worker(id="w1", host_id="h1"), field.worker(id="w2", host_id="h2")]
    seeds = ["{}" if equal else f"{{}}-{m}" for m in range(SIZES.racers)]
    common = {"nbytes": 50_000, "id": "mine{}", "digest": digest, "go": f"{field.home}/go{{}}"}
    programs = [
        field.actor("put", workers[m % 2], seed=seed, rounds=SIZES.race_rounds, **common)
        for m, seed in enumerate(seeds)
    ]
    async with await Raw.unix(workers[0].socket) as here, await Raw.unix(workers[1].socket) as there:
        for n in range(SIZES.race_rounds):
            for program in programs:
                said(program, f"ready {n}")
            (field.home / f"go{n}").touch()
            outcomes = [said(program, f"end {n}")["outcome"] for program in programs]
            others = "existed" if equal else "conflict"
            assert Counter(outcomes) == {"won": 1, others: SIZES.racers - 1}, outcomes
            winner = data_of(seeds[outcomes.index("won")].format(n), 50_000)
            last = (await here.stats())["directory"]["position"]
            for raw in (here, there):
                opened = await raw.open(f"mine{n}", at_least=last)
                assert opened.bytes("w") == winner
                del opened
            ended = await here.call("destroy", artifact=f"mine{n}")
            for raw in (here, there):
                with pytest.raises(NotFoundError):
                    await raw.resolve(f"mine{n}", at_least=ended["position"])
                await eventually(raw, "the memory", "pool", "busy_bytes", equals=0)


def test_ids_digests_and_folds_are_equal_under_any_hash_seed(field: Field) -> None:
    programs = [
        field.processes.python(IDS, name=f"ids-{seed}", env={**os.environ, "PYTHONHASHSEED": seed})
        for seed in ("0", "1", "42", "4294967295", "random")
    ]
    found = []
    for program in programs:
        assert program.wait() == 0, program.text
        found.append(json.loads(program.text))
    assert all(each == found[0] for each in found)
    assert found[0]["folds"] == found[0]["whole"]
    assert found[0]["folds"]
