"""An older program: ``python -m tests.chaos.older TYPE[,TYPE] worker ...`` is tensorbus without those facts."""

from __future__ import annotations

import sys

from tensorbus.cli import main
from tensorbus.events import _codec


def forget(names: frozenset[str]) -> None:
    """Have this process know no fact of these types."""
    assert names <= _codec._known, f"there never were {names - _codec._known}"
    _codec._known = _codec._known - names  # type: ignore[misc]  # what an older program was built with


if __name__ == "__main__":
    forget(frozenset(sys.argv[1].split(",")))
    main(sys.argv[2:])
