"""How the simulated tests run: quietly, and the sweeps in ``make soak`` as well, with many more seeds."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sizes import SIZES, SOAK

HERE = Path(__file__).parent
SWEEPS = ("test_sessions", "test_names", "test_artifacts", "test_log", "test_losses", "test_pages")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == HERE:
            item.add_marker(pytest.mark.timeout(SIZES.timeout_s))
            if SIZES is SOAK and item.path.stem in SWEEPS:
                item.add_marker(pytest.mark.soak)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Thousands of simulated lives would fill the log; a run's own trace says what happened in it."""
    logger = logging.getLogger("tensorbus")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(level)
