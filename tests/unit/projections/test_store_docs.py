"""docs/store.md says what the tables are, and its examples run."""

from __future__ import annotations

import re
from pathlib import Path

from tensorbus.projections import GlobalStore, describe
from tests.unit.projections.store_rig import SUBJECTS, fill, small_log

PAGE = (Path(__file__).parents[3] / "docs" / "store.md").read_text(encoding="utf-8")


def test_every_column_is_on_the_page_in_order() -> None:
    written = []
    for section in PAGE.split("\n### ")[1:]:
        table = section.partition("\n")[0].strip("`")
        rows = re.findall(r"^\| `(\w+)` \| (\S+) \| (.*) \|$", section, re.MULTILINE)
        written += [(table, *row) for row in rows]
    assert written == describe()


def test_the_examples_run(tmp_path: Path) -> None:
    store = fill(GlobalStore.open(tmp_path / "s.duckdb", subjects=SUBJECTS), small_log())
    try:
        for block in re.findall(r"```sql\n(.*?)```", PAGE, re.DOTALL):
            for statement in block.strip().split(";\n"):
                with store.query(statement) as result:
                    assert list(result) or result.schema.names
    finally:
        store.close()
