"""Calls that cannot be right are refused in words, by the class that says so, before or when a worker is asked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import tensorbus as tb

pytestmark = pytest.mark.integration

X = torch.arange(6.0).reshape(2, 3)
HUGE = 10**400
INVALID = tb.InvalidArgumentError

Call = Callable[[tb.Bus, tb.Artifact, Path], object]

CALLS: dict[str, tuple[Call, type[tb.TensorbusError], str]] = {
    # names
    "artifact of a list": (lambda b, a, p: b.artifact([]), INVALID, "named by a non-empty str"),
    "exists of a list": (lambda b, a, p: b.exists([]), INVALID, "named by a non-empty str"),
    "artifact of a surrogate": (lambda b, a, p: b.artifact("\ud800"), INVALID, "UTF-8"),
    "artifact of bytes": (lambda b, a, p: b.artifact(b"k"), INVALID, "non-empty str"),
    "artifact of a huge name": (lambda b, a, p: b.artifact("x" * 10_000_000), INVALID, "the most is 1024"),
    "artifact of a huge id": (lambda b, a, p: b.artifact("tb1:" + "x" * 5000), INVALID, "the most is 1024"),
    "a view that nobody defined": (
        lambda b, a, p: b.artifact("tbv:" + "0" * 64),
        tb.NotFoundError,
        r"view\(…\).define",
    ),
    "ls of a surrogate": (lambda b, a, p: b.ls("\ud800"), INVALID, "UTF-8"),
    "ls of bytes": (lambda b, a, p: b.ls(b""), INVALID, "a prefix is a str, not a bytes"),
    "ls of a number": (lambda b, a, p: b.ls(5), INVALID, "a prefix is a str, not an int"),
    "ls of None": (lambda b, a, p: b.ls(None), INVALID, "a prefix is a str"),
    "ls of a huge prefix": (lambda b, a, p: b.ls_series("x" * 5000), INVALID, "the most is 1024"),
    "bind to a number": (lambda b, a, p: b.bind("k", 5), INVALID, "a handle, a key or an id, not an int"),
    "bind to nothing": (lambda b, a, p: b.bind("k", "nope"), tb.NotFoundError, "nope"),
    "bind to a view": (lambda b, a, p: b.bind("k", a.view(slices={"w": 0})), INVALID, "is a view"),
    "events of a number": (lambda b, a, p: b.events(artifact=5), INVALID, "non-empty str"),
    # times and positions
    "a timeout without end": (lambda b, a, p: b.stats(timeout=HUGE), INVALID, "timeout must be a number of seconds"),
    "a timeout before": (lambda b, a, p: b.stats(timeout=-1), INVALID, "timeout must be"),
    "a timeout of nan": (lambda b, a, p: b.stats(timeout=float("nan")), INVALID, "timeout must be"),
    "a timeout of text": (lambda b, a, p: b.stats(timeout="x"), INVALID, "timeout must be"),
    "a subscription that is timed by text": (lambda b, a, p: b.subscribe("s", timeout="x"), INVALID, "timeout must be"),
    "events timed by less than nothing": (lambda b, a, p: b.events(timeout=-1), INVALID, "timeout must be"),
    "a position beyond all": (lambda b, a, p: b.artifact("k", at_least=10**30), INVALID, "at_least is a position"),
    "a position without end": (
        lambda b, a, p: b.artifact("k", at_least=HUGE * HUGE),
        INVALID,
        "at_least is a position",
    ),
    "since of text": (lambda b, a, p: b.events(since="x"), INVALID, "since is a position"),
    "since beyond all": (lambda b, a, p: b.events(since=10**30), INVALID, "since is a position"),
    # putting
    "put of an empty path": (lambda b, a, p: b.put(""), INVALID, "is no path: it is empty"),
    "put of a long path": (lambda b, a, p: b.put(str(p / ("n" * 300))), INVALID, "too long"),
    "put with a word for rebind": (lambda b, a, p: b.put(X, rebind="yes"), INVALID, "rebind is True or False"),
    "put with a number for progress": (lambda b, a, p: b.put(X, progress=5), INVALID, "progress is called"),
    "put of a number": (lambda b, a, p: b.put({"w": 5}), INVALID, "an int is not a tensor"),
    "publish with a digest of what is there": (
        lambda b, a, p: b.publish("s", a, digest="later"),
        INVALID,
        "is there al",
    ),
    "publish with progress of what is there": (
        lambda b, a, p: b.publish("s", a, progress=print),
        INVALID,
        "is there al",
    ),
    # memory
    "empty of a word": (lambda b, a, p: b.empty("ab"), INVALID, "a shape is a whole number"),
    "empty of None": (lambda b, a, p: b.empty(None), INVALID, "a shape is a whole number"),
    "empty of a flag": (lambda b, a, p: b.empty((2, True)), INVALID, "a shape is a whole number"),
    "empty of a fraction": (lambda b, a, p: b.empty((2.0,)), INVALID, "a shape is a whole number"),
    "empty of less than nothing": (lambda b, a, p: b.empty(-1), INVALID, "from 0 on"),
    "empty of too much": (lambda b, a, p: b.empty(2**62, "u8"), INVALID, "no worker has memory of"),
    "empty of more than can be": (lambda b, a, p: b.empty(2**62, "f64"), INVALID, "the most are"),
    "a lease for ever": (lambda b, a, p: b.register(X, copy=True, lease_s=1e300), INVALID, "lease_s must be 0.1 to"),
    "a lease for no time": (lambda b, a, p: b.register(X, copy=True, lease_s=1e-9), INVALID, "lease_s must be 0.1 to"),
    "a pin for no time": (lambda b, a, p: a.pin(ttl_s=1e-9), INVALID, "ttl_s must be 0.1 to"),
    "register with a word for copy": (lambda b, a, p: b.register(X, copy="yes"), INVALID, "copy is True or False"),
    # views
    "slices in a list": (lambda b, a, p: a.view(slices=[0]), INVALID, "slices must be a dict"),
    "names of a number": (lambda b, a, p: a.view(names=5), INVALID, "several names"),
    "names with a number": (lambda b, a, p: a.view(names=[5]), INVALID, "a tensor's name is a str"),
    "a transposition of a number": (lambda b, a, p: a.view(transpose={"w": 5}), INVALID, "no transposition"),
    "a flag as an index": (lambda b, a, p: a.view(slices={"w": torch.tensor(True)}), INVALID, "not an index"),
    "a flag of numpy as an index": (lambda b, a, p: a.view(slices={"w": np.bool_(True)}), INVALID, "not an index"),
    "a step of nothing": (lambda b, a, p: a.view(slices={"w": slice(0, 2, 0)}), INVALID, "is 0; it must be 1"),
    # reading
    "into a number": (lambda b, a, p: a.tensor_dict(into=5), INVALID, "into= is a dict"),
    "into a list": (lambda b, a, p: a.tensor_dict(into=[X]), INVALID, "into= is a dict"),
    "into and framework": (lambda b, a, p: a.tensor_dict(into={"w": X.clone()}, framework="numpy"), INVALID, "one of"),
    "save to None": (lambda b, a, p: a.save(None), INVALID, "a path is a str"),
    "save to an empty path": (lambda b, a, p: a.save(""), INVALID, "it is empty"),
    "save to a zero byte": (lambda b, a, p: a.save("a\0b.safetensors"), INVALID, "zero byte"),
    "save to a long name": (lambda b, a, p: a.save(p / ("n" * 300)), INVALID, "too long"),
    "save with a number for progress": (lambda b, a, p: a.save(p, progress=5), INVALID, "progress is called"),
    "a tensor by a number": (lambda b, a, p: a.tensor(5), INVALID, "a str, not an int"),
}


@pytest.mark.parametrize("case", CALLS)
def test_a_call_that_cannot_be_right(bus: tb.Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    monkeypatch.chdir(tmp_path)
    call, kind, said = CALLS[case]
    art = bus.put({"w": X}, key="k")
    with pytest.raises(tb.TensorbusError, match=f"(?i){said}") as raised:
        call(bus, art, tmp_path)
    assert type(raised.value) is kind
    assert len(str(raised.value)) < 1000
    assert list(tmp_path.iterdir()) == []
    assert bus.artifact("k").id == art.id


@pytest.mark.parametrize("timeout", [HUGE, -1, float("nan"), "x"])
def test_a_bus_whose_timeout_is_none(place: Path, timeout: object) -> None:
    with pytest.raises(tb.InvalidArgumentError, match="timeout"):
        tb.connect(home=place, host_id="host-a", timeout=timeout)  # type: ignore[arg-type]


def test_a_timeout_of_ages_is_one(bus: tb.Bus) -> None:
    art = bus.put({"w": X}, key="k", timeout=1e300)
    assert bus.artifact("k", timeout=1e12).id == art.id


def test_memory_that_is_spent_is_advised_on_once(bus: tb.Bus) -> None:
    memory = bus.empty(8)
    lent = bus.register(memory)
    with pytest.raises(tb.InvalidArgumentError, match="registered before; take new memory") as refused:
        bus.register(memory)
    assert str(refused.value).count("bus.empty()") == 1
    lent.release()


def test_sizes_of_any_whole_kind(bus: tb.Bus) -> None:
    assert bus.empty(np.int64(3)).shape == (3,)  # type: ignore[arg-type]
    assert bus.empty((np.int32(2), 3), framework="numpy").shape == (2, 3)  # type: ignore[arg-type]


def test_an_artifact_is_named_by_handle_key_or_id_everywhere(bus: tb.Bus) -> None:
    art = bus.put({"w": X}, key="k", id="given")
    for number, name in enumerate((art, art.id, "k", "given")):
        assert bus.bind(f"also-{number}", name).id == art.id
    for name in (art, art.id, "k", "given", "also-1"):
        assert "ArtifactPut" in [event.type for event in bus.events(artifact=name)]
    art.destroy()
    assert "ArtifactDestroyed" in [event.type for event in bus.events(artifact="given")]
