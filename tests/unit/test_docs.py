"""The generated pages say what the code says."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.gen_docs import DOCS, pages
from tensorbus.events import EVENT_TYPES


@pytest.mark.parametrize(
    ("path", "text"), pages().items(), ids=lambda value: value.name if isinstance(value, Path) else ""
)
def test_the_page_is_up_to_date(path: Path, text: str) -> None:
    assert path.read_text(encoding="utf-8") == text, "run `make docs`"


def test_every_fact_is_told_with_kind_and_meaning() -> None:
    text = (DOCS / "events.md").read_text(encoding="utf-8")
    for cls in EVENT_TYPES:
        section = text.partition(f"## {cls.__name__}\n")[2].partition("\n## ")[0]
        assert "Kind `" in section
        assert "| `" in section
