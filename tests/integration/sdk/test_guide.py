"""The guide's examples run as they stand."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.sdk.conftest import HOST
from tests.servers import Server

pytestmark = pytest.mark.integration

GUIDE = Path(__file__).parents[3] / "docs" / "sdk.md"


@pytest.fixture
def place(nats_server: Server, home: Path) -> Iterator[Path]:
    """What `tensorbus up` starts: a worker, and a gateway that is the store as well."""
    with nats_server.processes(home / "test-logs") as owner:
        owner.worker("basic", id="w1", host_id=HOST, home=home)
        owner.worker("gateway,store", id="g1", host_id=HOST, home=home)
        yield home


def test_every_example_of_the_guide(
    place: Path, tenant: str, nats_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TENSORBUS_HOME", str(place))
    monkeypatch.setenv("TENSORBUS_HOST_ID", HOST)
    monkeypatch.setenv("TENSORBUS_TENANT", tenant)
    monkeypatch.setenv("TENSORBUS_NATS_URL", nats_server.url)
    text = GUIDE.read_text(encoding="utf-8")
    blocks = list(re.finditer(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE))
    assert len(blocks) > 8
    names: dict[str, object] = {"__name__": "guide"}
    for block in blocks:
        lines_before = text.count("\n", 0, block.start(1))  # so that a failure names the line of the page
        exec(compile("\n" * lines_before + block[1], str(GUIDE), "exec"), names)
