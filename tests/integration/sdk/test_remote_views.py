"""A caller without a worker reads of a view only what it needs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import tensorbus as tb
from tensorbus.transport import Transfer, TransferReport

pytestmark = pytest.mark.integration

BIG = torch.arange(1 << 20, dtype=torch.int32).reshape(1024, 16, 64)
SMALL = torch.arange(8, dtype=torch.float16)


@pytest.fixture
def far(place: Path, tenant: str) -> Iterator[tb.Bus]:
    with tb.connect(home=place, host_id="elsewhere", tenant=tenant) as bus:
        yield bus


@pytest.fixture
def came(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many bytes each reading brought."""
    sizes: list[int] = []
    run = Transfer.run

    def counted(self: Transfer, *args: object, **more: object) -> TransferReport:
        report = run(self, *args, **more)  # type: ignore[arg-type]  # handed on as they came
        sizes.append(report.nbytes)
        return report

    monkeypatch.setattr(Transfer, "run", counted)
    return sizes


@pytest.mark.parametrize(
    ("index", "rows"),
    [
        ((slice(8, 16),), 8),
        ((-1,), 1),
        ((slice(0, 101, 25), 3), 101),
        ((slice(5, 5),), 0),
        ((..., slice(0, 2)), 1024),
        ((slice(1000, None), slice(None), 7), 24),
    ],
)
def test_the_rows_that_a_view_takes(
    bus: tb.Bus, far: tb.Bus, came: list[int], index: tuple[object, ...], rows: int
) -> None:
    bus.put({"big": BIG, "small": SMALL}, key="k")
    view = far.artifact("k").view(names=["big"], slices={"big": index})  # type: ignore[dict-item]  # any index
    assert torch.equal(view["big"], BIG[index])
    assert sum(came) == rows * BIG[0].nbytes


def test_whole_tensors_by_name(bus: tb.Bus, far: tb.Bus, came: list[int]) -> None:
    bus.put({"big": BIG, "small": SMALL, "scalar": torch.tensor(7)}, key="k")
    art = far.artifact("k")
    few = art.view(names=["small", "scalar"])
    assert torch.equal(few["small"], SMALL) and few["scalar"].item() == 7
    assert sum(came) == SMALL.nbytes + 8
    turned = few.view(names=["small"], slices={"small": (slice(2, 6),)})
    assert torch.equal(turned["small"], SMALL[2:6])
    assert sum(came) == SMALL.nbytes + 8  # it was here already
    assert torch.equal(art["big"], BIG)  # and the base is never taken for what the view brought
    again = art.view(slices={"big": 0})
    assert torch.equal(again["big"], BIG[0])
    assert sum(came) == 2 * (SMALL.nbytes + 8) + BIG.nbytes
