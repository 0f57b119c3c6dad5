"""What every test may use: hypothesis profiles and a home of its own."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.servers import Choice

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Started in the background of a shell, where Ctrl-C is ignored: what the tests start must not inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("dev", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", parent=settings.get_profile("dev"), derandomize=True)
settings.register_profile("soak", parent=settings.get_profile("dev"), max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "dev"))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Where the integration tests' server comes from; tests that hurt a server start one of their own all the same."""
    group = parser.getgroup("nats", "the NATS server of the integration tests")
    group.addoption("--nats", choices=["binary", "container", "url"], default="binary", help="binary by default")
    group.addoption("--nats-url", metavar="URL", help="the running server, with --nats=url")


def pytest_configure(config: pytest.Config) -> None:
    Choice.of(config)  # a wrong one ends the run at once


@pytest.fixture
def home() -> Iterator[Path]:
    """An empty TENSORBUS_HOME with a path short enough for a unix socket (108 bytes, which pytest's own exceed)."""
    path = Path(tempfile.mkdtemp(prefix="tb-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)
